"""The report of real and simulated runs in a real browser."""

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from ringmaster_dist.observe.exposition import exposition
from ringmaster_dist.observe.report import write_report
from ringmaster_dist.observe.run_files import Recording
from ringmaster_dist.observe.watch import Watcher
from tests.e2e.browser import open_page
from tests.unit.test_exposition import parsed

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
  const cells = [...document.querySelectorAll("td, pre, svg, canvas, summary")];
  document.body.dataset.cut = Math.max(...cells.map((cell) => cell.getBoundingClientRect().right)) > window.innerWidth;
  document.body.dataset.bars = [...document.querySelectorAll("td .stack")].map((bar) =>
    (bar.firstChild.getBoundingClientRect().width / bar.getBoundingClientRect().width).toFixed(2)).join(" ");
  document.body.dataset.wrong = window.wrong.join("; ");
};
</script>"""


def ringmaster(*arguments):
    command = [sys.executable, "-m", "ringmaster_dist", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def watched(folder, *overrides):
    """Trains, and asks for /metrics and /healthz all the time. The last answers of the running server are kept."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serving = ["watch=true", f"watch_port={port}", "watch_metrics=true"]
    command = [sys.executable, "-m", "ringmaster_dist", "train", *overrides, *serving]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as training:
        while training.poll() is None:
            try:
                health, metrics = (
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10).read().decode()
                    for path in ("healthz", "metrics")
                )
            except (OSError, http.client.HTTPException):  # the server has not started, or is over
                time.sleep(0.05)
                continue
            if "progress" in health and parsed(metrics).get(("workers",)) == 4:  # they leave at the end
                (folder / "healthz").write_text(health)
                (folder / "metrics").write_text(metrics)
            time.sleep(0.02)
        assert training.returncode == 0, training.stderr.read()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    watched(folder, f"run.dir={folder}/real", "problem.dim=50", "method.threshold=2", "budget.updates=150")
    ringmaster(
        "simulate", "-m", f"run.dir={folder}/many", "problem.dim=20", "cluster.workers=5,40", "budget.seconds=40"
    )
    return folder


def visit(path, folder, size="1240,1600"):
    text = path.read_text().replace("<head>", f"<head>{_VISITOR}", 1)
    (folder / "visited.html").write_text(text)
    return open_page(f"file://{folder}/visited.html", folder, size=size)


def noted(dom, name):
    """What the visitor has found."""
    return dom.partition(f'data-{name}="')[2].partition('"')[0]


def check(dom, picture, console):
    assert console == ""
    assert 'data-wrong=""' in dom
    assert int(noted(dom, "tips")) >= 6
    assert noted(dom, "cut") == "false"
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
        ">cpu</td>",
        "Step size",
        "Memory of the server",
        "Gradient norm",
        "Update norm",
        "ringmaster train run.dir=",
        "<dt>method.threshold</dt><dd>2</dd>",
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
    shares = [worker["accepted"] / summary["accepted"] for worker in summary["per_worker"].values()]
    assert [float(bar) for bar in noted(dom, "bars").split()] == pytest.approx(shares, abs=0.02)


def test_metrics_and_health_of_a_real_run(runs):
    assert (runs / "healthz").read_text() == "the run makes progress\n"
    found = parsed((runs / "metrics").read_text())
    assert 1 <= found["updates",] <= 150
    assert found["workers",] == 4
    assert found["threshold_updates",] == 2
    assert found["received_bytes_total",] > 0
    ended = parsed(exposition(Recording(runs / "real"), time.time()))
    summary = json.loads((runs / "real/summary.json").read_text())
    assert ended["updates",] == 150
    assert ended["evaluation", "gap"] == pytest.approx(summary["final_gap"])
    assert ended["checkpoint_age_seconds",] < 600
    for name, worker in summary["per_worker"].items():
        counts = [ended["gradients", name, kind] for kind in ("accepted", "stale", "invalid", "stopped")]
        assert counts == [worker[key] for key in ("accepted", "stale", "invalid", "interrupted")]


def test_text_that_others_choose_stays_text_on_a_narrow_page(runs, tmp_path):
    """A model, a worker and a command have written markup that would run a script."""
    hostile = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u202e"
    run = tmp_path / "run"
    shutil.copytree(runs / "real", run, ignore=shutil.ignore_patterns("report"))
    (run / "sample.txt").write_text(hostile + "x" * 300)
    (run / "commands.txt").write_text(f"ringmaster train {hostile}\n")
    members = [json.loads(line) for line in (run / "members.jsonl").read_text().splitlines()]
    (run / "members.jsonl").write_text("".join(json.dumps({**m, "device_title": hostile}) + "\n" for m in members))
    page, *_ = write_report([run], tmp_path / "out")
    dom, picture, console = visit(page, tmp_path, size="500,4000")
    check(dom, picture, console)
    assert "<title>run · ringmaster</title>" in dom
    assert "<img" not in dom
    assert dom.count("<script") == 3  # with the visitor's
    assert dom.count("&lt;img src=x onerror=") == 2 + len({m["worker"] for m in members})


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
    assert int(noted(dom, "drawn")) >= 2
    assert "<b>150</b><span>updates</span>" in dom
    assert "running" in dom
