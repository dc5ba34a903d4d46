"""Every file of a run is damaged in many ways, and every command that reads it succeeds or says one line."""

import random
import shutil

import pytest

from ringmaster_dist.cli.main import main
from ringmaster_dist.config.errors import exit_code_of
from ringmaster_dist.observe import report
from ringmaster_dist.runtime.preparation import prepare
from tests.distributed.processes import Run, check_finished

_TEXT = b'{"time": "noon", "version": {}, "worker": -1}\n'
DAMAGES = {
    "empty": lambda data, draw: b"",
    "cut": lambda data, draw: data[: draw.randrange(len(data))],
    "flipped": lambda data, draw: bytes(byte ^ 255 if draw.random() < 0.02 else byte for byte in data),
    "letters": lambda data, draw: bytes(draw.randrange(32, 127) if draw.random() < 0.02 else byte for byte in data),
    "other records": lambda data, draw: data + _TEXT,
    "a number": lambda data, draw: b"7\n",
    "zeros": lambda data, draw: bytes(len(data)),
}
READERS = {
    "report": lambda run, out: main(["report", str(run), "--out", str(out)]),
    "replay": lambda run, out: main(["replay", str(run)]),
    "eval": lambda run, out: main(["eval", str(run)]),
    "export": lambda run, out: main(["export", str(run), str(out / "weights.safetensors")]),
    "advise": lambda run, out: main(["advise", f"run={run}", "thresholds=2"]),
    "init": lambda run, out: main(["simulate", f"init={run}", "problem.dim=20", "budget.seconds=2", "cluster.workers=2",
                                   f"run.dir={out}/sim", "run.overwrite=true"]),
    "resume": lambda run, out: exit_code_of(lambda: prepare([f"resume={run}", "budget.updates=99"]) and 0),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / "run"
    with Run(path, "problem.dim=20", "cluster.workers=2", "budget.updates=30", "checkpoint.every=10",
             "method.threshold=auto") as run:  # fmt: skip
        check_finished(run)
    return path


FILES = ["config.yaml", "trace.jsonl", "metrics.jsonl", "summary.json", "members.jsonl", "terms.jsonl",
         "thresholds.jsonl", "final.safetensors", "checkpoints"]  # fmt: skip
NUM_READERS = 3  # of each damaged file, in turn


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_line(name, finished, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda data, folder: [])  # the page has the same data
    readers = list(READERS.items())
    for index, (damage, change) in enumerate(DAMAGES.items()):
        copy = tmp_path / str(index)
        shutil.copytree(finished, copy)
        draw = random.Random(f"{name} {damage}")
        paths = sorted((copy / name).glob("*.safetensors")) if name == "checkpoints" else [copy / name]
        assert paths
        for path in paths:
            path.write_bytes(change(path.read_bytes(), draw))
        for number in range(NUM_READERS):
            reader, read = readers[(FILES.index(name) + index + number) % len(readers)]
            if reader == "init" and name not in ("config.yaml", "checkpoints"):
                continue  # it reads no other file
            out = tmp_path / "out"
            out.mkdir(exist_ok=True)
            code = read(copy, out)
            errors = capfd.readouterr().err
            what = f"{reader} with {name} as {damage}: code {code}, {errors}"
            assert "Traceback" not in errors, what
            lines = [line for line in errors.splitlines() if "warning" not in line]
            assert code in (0, 1) or (code == 2 and len(lines) == 1), what  # 1: the replay or the weights differ
