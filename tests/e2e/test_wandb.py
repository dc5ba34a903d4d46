"""Real wandb runs: the tests read back what wandb has written. A failure of wandb stops nothing."""

import http.server
import json
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from ringmaster_dist.config.schema import LoggerConfig
from ringmaster_dist.observe.loggers import WandbLogger
from ringmaster_dist.observe.records import MetricsRow, Summary
from tests.distributed.processes import LONG, Run, alive, check_finished, until
from tests.e2e.wandb_file import history, only, records

pytestmark = pytest.mark.e2e

QUICK = ["problem.dim=30", "cluster.workers=3", "cluster.unit_seconds=0.01", "run.samples=300", "run.report=false"]


def ringmaster(*arguments, **environment):
    command = [sys.executable, "-m", "ringmaster_dist", *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return subprocess.run(command, capture_output=True, text=True, env={**own, **environment})


def written(run):
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    return records(path)


def test_an_offline_run_is_read_back_and_resumed(tmp_path):
    run = tmp_path / "run"
    first = ringmaster("train", *QUICK, f"run.dir={run}", "budget.updates=80", "logger=wandb_offline",
                       "logger.artifacts=true", "logger.tags=[paced]", "checkpoint.every=40")  # fmt: skip
    assert first.returncode == 0, first.stderr
    found = written(run)
    (about,) = only(found, "run")
    assert about.run_id == (run / "wandb.id").read_text()
    assert (about.project, about.display_name, list(about.tags)) == ("ringmaster", "run", ["paced"])
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert config["method"]["threshold"] == "auto"
    rows = history(found)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if "progress/gap" in row]
    assert [(row["version"], row["time"], row["progress/gap"]) for row in logged] == [
        (row["version"], row["time"], row["gap"]) for row in metrics
    ]
    last = logged[-1]
    assert (last["staleness/accepted"], last["workers/workers"]) == (80, 3)
    assert any("workers/tau/0" in row and "system/update_seconds" in row for row in rows)
    bars = [row["staleness/delays"] for row in rows if "staleness/delays" in row]
    assert bars[0]["_type"] == "histogram"
    assert sum(sum(bar["values"]) for bar in bars) == metrics[-1]["accepted"] + metrics[-1]["stale"]
    assert [row["workers/table"]["_type"] for row in rows if "workers/table" in row] == ["table-file"]
    assert {metric.step_metric for metric in only(found, "metric") if metric.glob_name == "*"} == {"version"}
    uploaded = {record.request.log_artifact.artifact.type for record in found if record.HasField("request")}
    uploaded |= {artifact.type for artifact in only(found, "artifact")}
    assert {"checkpoint", "model"} <= uploaded
    again = ringmaster("train", f"resume={run}", "budget.updates=120")
    assert again.returncode == 2  # a directory does not decide by itself where it is logged
    words = "logger.name=wandb_offline logger.artifacts=true"
    assert f"add {words}" in again.stderr
    again = ringmaster("train", f"resume={run}", "budget.updates=120", *words.split())
    assert again.returncode == 0, again.stderr
    ids = {path.name.rpartition("-")[2] for path in run.glob("wandb/offline-run-*")}
    assert ids == {about.run_id}
    made = ringmaster("dashboard", str(run))
    assert made.returncode == 0, made.stderr
    specification = json.loads((run / "dashboard.json").read_text())
    sections = specification["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections][:4] == ["progress", "staleness", "workers", "system"]
    drawn = {name for section in sections for panel in section["panels"] for name in panel["config"].get("metrics", [])}
    assert {"progress/train_loss", "staleness/delay_p95", "system/update_seconds"} <= drawn
    assert {name for name in drawn if name in {key for row in rows for key in row}} >= {"staleness/delay_p95"}


class Refusing(http.server.BaseHTTPRequestHandler):
    """A wandb server that refuses every key."""

    def do_POST(self):
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def refusing():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("case", ["no network", "no key", "bad key"])
def test_no_network_or_key_leaves_an_offline_run(case, refusing, tmp_path):
    key = {"WANDB_API_KEY": "x" * 40}
    environment = {
        "no network": {**key, "WANDB_BASE_URL": "http://127.0.0.1:9"},
        "no key": {"WANDB_BASE_URL": refusing},
        "bad key": {**key, "WANDB_BASE_URL": refusing},
    }[case]
    home = {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)}
    what = ["simulate", "problem.dim=10", "cluster.workers=2", "budget.seconds=60"]
    done = ringmaster(*what, f"run.dir={tmp_path}/run", "budget.updates=60", "logger=wandb", "logger.init_seconds=2",
                      **environment, **home)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "wandb sync" in done.stderr
    assert "Traceback" not in done.stderr
    assert history(written(tmp_path / "run"))[-1]["version"] == 60


def test_a_multirun_is_a_group(tmp_path):
    done = ringmaster("simulate", "-m", "problem.dim=10", "cluster.workers=2", "budget.seconds=5", "method.eta=0.1,0.2",
                      f"run.dir={tmp_path}/sweep", "logger=wandb_offline")  # fmt: skip
    assert done.returncode == 0, done.stderr
    groups = [only(written(tmp_path / "sweep" / name), "run")[0].run_group for name in ("0", "1")]
    assert groups == ["sweep", "sweep"]


def test_a_wandb_that_hangs_costs_rows_and_nothing_else(tmp_path, monkeypatch, caplog):
    hanging = threading.Event()
    monkeypatch.setattr(WandbLogger, "_open", lambda self: hanging.wait())
    logger = WandbLogger(tmp_path, LoggerConfig("wandb_offline", finish_seconds=0.2), {})
    for version in range(1000):
        logger.row(MetricsRow(float(version), version))
    logger.close(Summary())
    assert "not taken everything" in caplog.text
    assert "too slow for" in caplog.text
    hanging.set()


def test_a_full_disk_or_a_dead_wandb_do_not_stop_the_run(tmp_path):
    """wandb's own process cannot write any more, and is then killed."""
    with Run(tmp_path / "run", *LONG, "logger=wandb_offline", "logger.finish_seconds=3") as run:
        (core,) = until(lambda: run.children("wandb-core"), "wandb has started")
        until(lambda: list(run.directory.glob("wandb/offline-run-*/*.wandb")), "wandb writes")
        resource.prlimit(core, resource.RLIMIT_FSIZE, (512, 512))
        version = run.version()
        until(lambda: run.version() > version + 50, "training goes on")
        if alive(core):
            os.kill(core, signal.SIGKILL)
        version = run.version()
        until(lambda: run.version() > version + 50, "training goes on")
        run.process.send_signal(signal.SIGINT)
        check_finished(run)


def test_a_logger_that_cannot_write_warns_and_stops_nothing(tmp_path, caplog):
    (tmp_path / "wandb.id").mkdir()
    logger = WandbLogger(tmp_path, LoggerConfig("wandb_offline", finish_seconds=20), {})
    logger.row(MetricsRow(1.0, 1))
    logger.close(Summary())
    assert "training continues without it" in caplog.text
