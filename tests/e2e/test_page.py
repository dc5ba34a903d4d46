"""The report of real and simulated runs in a real browser."""

import json
import shutil
import subprocess
import sys

import pytest

from ringmaster_dist.observe.watch import Watcher
from tests.e2e.browser import open_page

pytestmark = pytest.mark.e2e

# Put before everything else: notes what goes wrong, then uses every button and points at every chart.
_VISITOR = """<script>
window.wrong = [];
window.onerror = (text) => { window.wrong.push(text); };
window.onload = () => {
  for (let i = 0; i < document.querySelectorAll("button").length; i++) document.querySelectorAll("button")[i].click();
  const tips = [];
  for (const chart of document.querySelectorAll("svg > rect, svg > g, canvas")) {
    const box = chart.getBoundingClientRect(), at = { clientX: box.left + box.width / 2, clientY: box.top + 8 };
    chart.dispatchEvent(new MouseEvent("mousemove", { ...at, bubbles: true }));
    tips.push(document.getElementById("tip").textContent);
  }
  document.body.dataset.tips = tips.filter((tip) => tip).length;
  document.body.dataset.wrong = window.wrong.join("; ");
};
</script>"""


def ringmaster(*arguments):
    command = [sys.executable, "-m", "ringmaster_dist", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    ringmaster("train", f"run.dir={folder}/real", "problem.dim=50", "method.threshold=2", "budget.updates=150")
    ringmaster(
        "simulate", "-m", f"run.dir={folder}/many", "problem.dim=20", "cluster.workers=5,40", "budget.seconds=40"
    )
    return folder


def visit(path, folder):
    text = path.read_text().replace("<head>", f"<head>{_VISITOR}", 1)
    (folder / "visited.html").write_text(text)
    return open_page(f"file://{folder}/visited.html", folder)


def check(dom, picture, console):
    assert console == ""
    assert 'data-wrong=""' in dom
    assert int(dom.partition('data-tips="')[2].partition('"')[0]) >= 6
    assert picture.stat().st_size > 20_000


def test_the_page_of_one_run_in_a_browser(runs, tmp_path):
    report = runs / "real/report"  # drawn at the end of the run
    for name in ("loss.png", "delays.png", "workers.png"):
        assert (report / name).read_bytes()[:4] == b"\x89PNG"
    dom, picture, console = visit(report / "report.html", tmp_path)
    check(dom, picture, console)
    for words in (
        "Objective gap",
        "Updates per second",
        "What the workers did",
        "Share of work",
        "of compute wasted",
        "finished",
        "<th>device</th>",
        "<td>cpu</td>",
    ):
        assert words in dom
    assert dom.count("<canvas") == 2
    data = json.loads((report / "report.html").read_text().partition('id="data">')[2].partition("</script>")[0])[
        "runs"
    ][0]
    summary = json.loads((runs / "real/summary.json").read_text())
    for key in ("updates", "accepted", "stale", "invalid", "interrupted"):
        assert data["totals"][key] == summary[key]
    assert data["totals"]["wasted_fraction"] == pytest.approx(summary["wasted_fraction"])
    assert {str(w["worker"]): w["accepted"] for w in data["workers"]} == {
        name: worker["accepted"] for name, worker in summary["per_worker"].items()
    }


def test_the_page_of_several_runs_and_a_crashed_one(runs, tmp_path):
    crashed = tmp_path / "crashed"
    shutil.copytree(runs / "real", crashed)
    (crashed / "summary.json").unlink()
    with (crashed / "trace.jsonl").open("a") as trace:
        trace.write('{"time": 3.0, "wor')
    ringmaster("report", f"{runs}/many/0", f"{runs}/many/1", str(crashed), "--out", str(tmp_path / "out"))
    dom, picture, console = visit(tmp_path / "out/report.html", tmp_path)
    check(dom, picture, console)
    assert "3 runs" in dom
    assert "workers=40" in dom


def test_the_live_page_follows_the_run(runs, tmp_path):
    """The first page shows half of the run. When the browser asks again, the rest has been written."""
    run = tmp_path / "run"
    shutil.copytree(runs / "real", run, ignore=shutil.ignore_patterns("report", "summary.json"))
    trace = (run / "trace.jsonl").read_text().splitlines(keepends=True)
    (run / "trace.jsonl").write_text("".join(trace[:60]))
    (run / "metrics.jsonl").unlink()
    watcher = Watcher(run)
    served = watcher._current

    def current():
        shown = served()
        (run / "trace.jsonl").write_text("".join(trace))
        return shown

    watcher._current = current
    try:
        dom, _, console = open_page(watcher.url, tmp_path, milliseconds=6000)
    finally:
        watcher.close()
    assert console == ""
    assert int(dom.partition('data-drawn="')[2].partition('"')[0]) >= 2
    assert "<b>150</b><span>updates</span>" in dom
    assert "running" in dom
