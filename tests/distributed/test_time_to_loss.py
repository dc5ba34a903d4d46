"""Time to loss in real processes: ours and DDP on two paced workers, and the second time from the kept results."""

import json
from pathlib import Path

from ringmaster_dist.bench.contest import CLUSTERS, CONTENDERS
from ringmaster_dist.bench.time_to_loss import Results, race


def test_ours_and_ddp_race_and_finished_trials_are_kept(tmp_path):
    """Four trials in virtual time choose the settings, and two real ones fill the table. A lost one is run again."""
    small = CLUSTERS["linear32"]
    words = [word for word in small.overrides if not word.startswith("data=")]
    text = ("data=text", f"data.path={Path(__file__).parent}", "cluster.unit_seconds=0.02")
    cluster = small._replace(workers=2, target=5.9, limit_seconds=20.0, overrides=(*words, *text))
    ours = CONTENDERS["ringmaster"]._replace(grid={"method.eta": (0.01, 0.02), "method.threshold": (8,)})
    ddp = CONTENDERS["ddp"]._replace(grid={"factor": (1.0, 2.0)})
    folder, steps = tmp_path / "trials", []

    def raced():
        results = Results(tmp_path)
        [table] = race([(cluster, [ours, ddp])], results, 1, lambda fraction, text: steps.append(text))
        assert table.words.startswith(("The quickest of ours is ringmaster", "We lose here: ddp"))
        return table.rows, {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    (first, second), kept = raced()
    assert len(kept) == 6
    assert float(first["seconds"]) > 0
    assert first["x ringmaster"] == "1.00"
    assert float(second["x ringmaster"]) > 0
    assert first["setting"].startswith("eta 0.0")
    updates, used = int(second["updates"]), int(second["rows used"])
    assert 8 * (updates - 1) <= used <= 8 * (updates + 1)  # two ranks of four rows
    assert "tuning in virtual time, 4 of 4" in steps
    facts = {path: json.loads(path.read_text()) for path in kept}
    lost = next(path for path, fact in facts.items() if (fact["clock"], fact["contender"]) == ("real", "ddp"))
    lost.unlink()
    _, again = raced()
    assert [path for path in kept if again[path] != kept[path]] == [lost]
