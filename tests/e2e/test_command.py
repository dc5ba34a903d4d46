"""The installed command, as a user calls it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from ringmaster_dist import __version__
from ringmaster_dist.cli.main import COMMANDS, main
from ringmaster_dist.config.build import build_rows
from ringmaster_dist.config.compose import from_yaml, load
from ringmaster_dist.experiment import plan as plans
from tests.command import ringmaster as run_here
from tests.distributed.processes import until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.e2e

SMALL = ["problem.dim=20", "cluster.workers=5", "budget.seconds=40"]
SUMMARY = {"updates", "seconds", "pushes", "accepted", "stale", "invalid", "interrupted", "final_gap",
           "gradients_per_second", "per_worker"}  # fmt: skip
TRACE = {"time", "worker", "sequence", "gradient_version", "version", "delay", "verdict", "loss", "compute_seconds"}


def ringmaster(*arguments, cwd=None):
    command = [sys.executable, "-m", "ringmaster_dist", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_the_command_explains_itself():
    plain = ringmaster()
    assert plain.returncode == 0
    assert "simulate" in plain.stdout
    helped = ringmaster("simulate", "--help")
    assert helped.returncode == 0
    for word in ("method=rennala", "threshold: auto", "accepted if its delay is below R", "--cfg job", "Examples"):
        assert word in helped.stdout
    assert max(len(line) for line in helped.stdout.splitlines()) < 160
    assert ringmaster("--version").stdout.strip() == __version__


def test_every_command_has_a_help_text_and_needs_no_torch_for_it():
    code = (
        "import sys; from ringmaster_dist.cli.main import COMMANDS, main;"
        "print([command.name for command in COMMANDS if main([command.name, '--help'])], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[] False", done.stderr
    lines = done.stdout.splitlines()
    for command in COMMANDS:
        assert any(line.startswith(f"ringmaster {command.name} ") for line in lines)
    for word in ("--rows N", "port=N", "time-to-loss", "--top-k K", "resume=auto", "torchrun --standalone"):
        assert word in done.stdout


def test_commands_that_read_runs_need_no_torch(tmp_path):
    """An import of torch takes longer than all that they do."""
    run = str(tmp_path / "run")
    assert ringmaster("simulate", "problem.dim=20", "budget.updates=5", f"run.dir={run}").returncode == 0
    calls = [["runs", str(tmp_path)], ["runs", "compare", run, run], ["report", run, "--out", f"{tmp_path}/report"],
             ["theory", "cluster.workers=8"]]  # fmt: skip
    code = (
        "import json, sys; from ringmaster_dist.cli.main import main;"
        "codes = [main(words) for words in json.loads(sys.argv[1])]; print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(calls)], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0] False", done.stderr


@pytest.mark.parametrize("words", [["--help"], ["advise", "times=1,2"]])  # a plain text, and a table
def test_a_reader_that_has_seen_enough_is_no_failure(words):
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "ringmaster_dist", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_configuration_is_shown_with_overrides():
    shown = run_here("simulate", "--cfg", "job", "method=rennala", "method.batch=5")
    assert shown.returncode == 0
    assert "batch: 5" in shown.stdout
    assert "threshold" not in shown.stdout


def test_a_run_leaves_its_files(tmp_path):
    done = run_here("simulate", *SMALL, f"run.dir={tmp_path}/run", "method.threshold=3", "run.samples=10")
    assert done.returncode == 0, done.stderr
    assert "accepted" in done.stdout
    assert str(tmp_path / "run") in done.stdout
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary) >= SUMMARY
    records = [json.loads(line) for line in (tmp_path / "run/trace.jsonl").read_text().splitlines()]
    assert set(records[0]) == TRACE
    assert summary["pushes"] == len(records) == summary["accepted"] + summary["stale"] + summary["invalid"]
    assert all(r["delay"] == r["version"] - r["gradient_version"] for r in records)
    assert len({(r["worker"], r["sequence"]) for r in records}) == len(records)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["time"] for row in metrics] == pytest.approx([4.0 * i for i in range(11)])
    assert metrics[-1]["gap"] == summary["final_gap"] < metrics[0]["gap"]
    config = (tmp_path / "run/config.yaml").read_text()
    assert "threshold: 3" in config
    assert f"dir: {tmp_path}/run" in config


def test_a_run_is_not_overwritten_unasked(tmp_path):
    arguments = ["simulate", *SMALL, f"run.dir={tmp_path}/run"]
    assert run_here(*arguments).returncode == 0
    first = (tmp_path / "run/summary.json").read_text()
    refused = run_here(*arguments, "run.seed=1")
    assert refused.returncode == 2
    assert "run.overwrite=true" in refused.stderr
    assert (tmp_path / "run/summary.json").read_text() == first
    assert run_here(*arguments, "run.seed=1", "run.overwrite=true").returncode == 0
    assert (tmp_path / "run/summary.json").read_text() != first


def test_a_seed_repeats_a_run_exactly(tmp_path):
    traces = []
    for index, seed in enumerate((4, 4, 5)):
        simulate = run_here if index else ringmaster
        assert simulate("simulate", *SMALL, f"run.seed={seed}", f"run.dir={tmp_path}/{index}").returncode == 0
        traces.append((tmp_path / f"{index}/trace.jsonl").read_text())
    assert traces[0] == traces[1] != traces[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["advise", "times=3"],
        ["theory", "times=1,0"],
        ["theory", "times=a"],
        ["theory", "times=1", "gpus"],
        ["theory", "run=nowhere"],
        ["theory", "thresholds=0"],
        ["experiment", "cubic"],
        ["experiment", "quadratic", "size=huge"],
        ["experiment", "quadratic", "regimes=odd"],
        ["experiment", "machines", "regimes=odd"],
        ["experiment", "quadratic", "seeds=0"],
        ["profile", "steps=1"],
        ["sample", "nowhere"],
        ["eval"],
        ["export", "nowhere"],
        ["data", "eat"],
        ["simulate", "method.etaa=1"],
        ["simulate", "method=unknown"],
        ["simulate", "method.eta=-1"],
        ["simulate", "--fast"],
        ["simulate", "--cfg", "hydra"],
        ["simulat"],
        ["bench", "nothing"],
        ["report"],
        ["report", "nowhere"],
        ["report", "tests", "--colour", "red"],
        ["watch", "tests"],
        ["dashboard", "tests"],
        ["doctor", "somewhere"],
    ],
)
def test_mistakes_exit_with_2_and_one_line(arguments):
    failed = run_here(*arguments)
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr.startswith("ringmaster: ")
    assert len(failed.stderr.strip().splitlines()) == 1


def test_a_run_directory_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", Path("/proc/run")):
        failed = run_here("simulate", *SMALL, f"run.dir={place}")
        assert failed.returncode == 2
        assert f"run.dir={place} cannot be written" in failed.stderr
        assert "Traceback" not in failed.stderr


def test_an_interrupted_simulation_says_how_far_it_got(tmp_path):
    command = [sys.executable, "-m", "ringmaster_dist", "simulate", f"run.dir={tmp_path}/run", "budget.seconds=1e9",
               "run.samples=1000000"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    trace = tmp_path / "run/trace.jsonl"
    until(lambda: trace.exists() and trace.stat().st_size > 0, "the run has begun")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["ended"] == "stopped by the user"
    assert summary["pushes"] == len(trace.read_text().splitlines()) > 0
    assert "accepted" in output


def test_a_million_workers_fit_in_four_gigabytes(tmp_path):
    code = (
        "import resource, sys; from ringmaster_dist.cli.main import main;"
        "code = main(sys.argv[1:]);"
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024); sys.exit(code)"
    )
    arguments = [
        "simulate",
        "cluster.workers=1000000",
        "budget.seconds=20",
        "problem.dim=100",
        f"run.dir={tmp_path}/run",
    ]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 4096
    assert json.loads((tmp_path / "run/summary.json").read_text())["updates"] > 30


def test_your_own_model_as_the_readme_says(tmp_path):
    """The README's example is trained, replayed and simulated exactly as printed."""
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Your own model") : text.index("## Your machines")]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "my_problem.py").write_text(code)
    (commands,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    outputs = []
    for line in commands.splitlines():
        done = ringmaster(*shlex.split(line)[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert "the same bits" in outputs[1]
    summary = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    first = json.loads((tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()[0])
    assert summary["final_loss"] < 0.7 * first["loss"]


def printed(capsys, *words):
    """Runs a command in this process, and returns what it prints."""
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_nanochat_from_training_to_text(tmp_path, capsys):
    """The main job in small: trained over RPC, replayed to the same bits, evaluated, sampled, exported and loaded."""
    run = tmp_path / "run"
    short = ["budget.updates=90", "cluster.unit_seconds=0.02", "method.decay=0", f"run.dir={run}"]
    short += ["budget.seconds=600", "cluster.batch=[4,2]", "model.n_layer=2", "model.n_embd=64"]
    short += ["model.sequence_len=64", "data=text", f"data.path={Path(json.__file__).parents[1] / 'asyncio'}"]
    trained = ringmaster("train", "experiment=nanochat_local", *short)
    assert trained.returncode == 0, trained.stderr
    assert "a sample" in trained.stdout
    summary = json.loads((run / "summary.json").read_text())
    assert summary["final_loss"] < 6.3  # guessing is ln(1024) = 6.93
    assert "the same bits" in printed(capsys, "replay", run)
    evaluated = printed(capsys, "eval", run)
    (told,) = re.findall(r"loss (\S+)", evaluated)
    assert float(told) == pytest.approx(summary["final_loss"], abs=1e-4)
    assert f"-> {summary['final_loss']:.4g}" in trained.stdout  # the closing line says the same
    assert f"on {summary['evaluated_on']}" in trained.stdout
    weights = tmp_path / "weights.safetensors"
    printed(capsys, "export", run, weights)
    assert printed(capsys, "eval", weights).partition(":")[2] == evaluated.partition(":")[2]
    texts = [printed(capsys, "sample", place, "--prompt", "import ", "--tokens", "20") for place in (run, weights)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("import ")
    assert len(texts[0]) > 20
    rows = build_rows(from_yaml((run / "config.yaml").read_text()))
    document = rows.tokenizer().decode(rows.validation[0][1:40].tolist())  # after the token that begins it
    assert document[:6] == printed(capsys, "sample", run, "checkpoint=best", "--tokens", "1")[:6]
    assert len(printed(capsys, "sample", run, "--prompt", "word " * 250, "--tokens", "100")) > 1350  # the context is 64
    printed(capsys, "export", run, tmp_path / "hub", "--format", "hf")
    config = json.loads((tmp_path / "hub/config.json").read_text())
    assert load_file(tmp_path / "hub/model.safetensors")["lm_head.weight"].shape == (1024, config["hidden_size"])
    assert Tokenizer.from_file(str(tmp_path / "hub/tokenizer.json")).get_vocab_size() == config["vocab_size"]
    assert main(["export", str(run), str(tmp_path / "none"), "--format", "nanochat"]) == 2  # it is another model
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("n_layer: 2", "n_layer: 3"))
    assert main(["eval", str(run)]) == 2
    assert "another model" in capsys.readouterr().err


def test_an_experiment_is_reproduced_and_resumed(tmp_path):
    """A small experiment tunes every method and writes its tables, figure and summary. A second call gives the same
    bytes."""
    given = ["experiment", "quadratic", "size=smoke", "seeds=2", "regimes=linear"]
    done = ringmaster(*given, f"dir={tmp_path}/a")
    assert done.returncode == 0, done.stderr
    assert "Best first: ringmaster" in done.stdout[done.stdout.index("## linear") :]
    assert "## Seconds to a gap, linear delays" in done.stdout
    assert (tmp_path / "a/quadratic.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "a/quadratic.pdf").read_bytes()[:4] == b"%PDF"
    tables = {name: (tmp_path / "a" / name).read_bytes() for name in ("tuning.csv", "curves.csv", "gaps.csv")}
    assert tables["tuning.csv"].count(b"\n") == 1 + (4 + 2 + 4 + 2)
    lost = sorted((tmp_path / "a/runs").glob("*.json"))[::3]
    for path in lost:  # as if it had been interrupted
        path.unlink()
    assert main([*given, f"dir={tmp_path}/a", "jobs=1"]) == 0
    assert {name: (tmp_path / "a" / name).read_bytes() for name in tables} == tables


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["times=1,2,4"], ["H_3 = 1.714", "3 workers"]),
        (["gpus", "updates=100"], ["7 workers, 0.01418 to 0.2152 s"]),
        (["cluster.workers=4", "cluster.phases=[{start_seconds: 9, rate: 0.5, workers: [0]}]"], ["T by phases"]),
        ([f"method.constants.{name}=1" for name in ("smoothness", "noise", "initial_gap")], ["Theorem 1"]),
    ],
)
def test_theory_prints_its_figures(arguments, words, tmp_path):
    done = run_here("theory", *arguments, f"plot={tmp_path}/plot.png")
    assert done.returncode == 0, done.stderr
    for word in words:
        assert word in done.stdout
    assert (tmp_path / "plot.png").exists()


def test_advice_is_given():
    """On a cluster with one very slow worker, the advice says that it starves and names a threshold."""
    done = run_here("advise", "times=1,1,1,500", "thresholds=1,2,4,8")
    assert done.returncode == 0, done.stderr
    assert "1 of 4" in done.stdout
    assert "advice: method=ringmaster method.threshold=" in done.stdout


def test_a_race_is_reproduced_and_resumed(tmp_path):
    """One cell in small: the stages, the tables and the figure, and the same bytes after runs were lost."""
    given = ["experiment", "machines", "size=smoke", "seeds=1", "regimes=quadratic-change", "jobs=1"]
    done = run_here(*given, f"dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "of 1 cells**" in done.stdout
    assert "| quadratic | 4 | speeds change |" in done.stdout
    assert (tmp_path / "machines.png").read_bytes()[:4] == b"\x89PNG"
    tables = {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")}
    assert set(tables) == {"machines.csv", "tuning.csv", "curves.csv"}
    assert tables["machines.csv"].count(b"\n") == 1 + 3
    for path in sorted((tmp_path / "runs").glob("*.json"))[::5]:
        path.unlink()
    assert run_here(*given, f"dir={tmp_path}").returncode == 0
    assert {name: (tmp_path / name).read_bytes() for name in tables} == tables


@pytest.mark.parametrize("plan", [plans.nanochat("smoke", 1), plans.nanochat("full", 1), plans.steps("full", 1)])
def test_the_runs_of_the_other_experiments_compose(plan):
    jobs = list(plan.tuning())
    assert {job.method for job in jobs} == set(plan.grids)
    for job in {job.method: job for job in jobs}.values():
        load(job.all_overrides)


@pytest.mark.parametrize("name", ["simulate", "train"])
def test_a_run_that_diverges_is_reported_and_fails(name, tmp_path):
    done = ringmaster(name, "method.eta=1e30", "budget.updates=60", f"run.dir={tmp_path}/run", "run.report=false")
    assert done.returncode == 1, done.stderr
    assert "THE RUN DIVERGES" in done.stderr
    assert "method.eta=2.5e+29" in done.stderr
    assert "THE RUN HAS DIVERGED" in done.stdout
    assert json.loads((tmp_path / "run/summary.json").read_text())["diverged"] is True


def test_a_dry_run_says_what_to_expect_and_writes_nothing(tmp_path):
    done = ringmaster("train", "--dry-run", "cluster.workers=2", "cluster.unit_seconds=0.5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1,729 parameters" in done.stdout
    (rate,) = re.findall(r"about (\S+) updates per second", done.stdout)
    assert float(rate) == pytest.approx(2 + 1, rel=0.1)  # 1/0.5 + 1/1.0, less a little jitter
    assert "13.8 kB up and 13.8 kB down per gradient" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_run_whose_steps_follow_its_budget_is_not_extended(tmp_path):
    """One line says what to do instead."""
    run, short = f"run.dir={tmp_path}/run", ["problem.dim=9", "cluster.workers=2", "run.report=false"]
    assert ringmaster("train", run, *short, "budget.updates=10", "method.decay=0.5").returncode == 0
    longer = run_here("train", f"resume={tmp_path}/run", "budget.updates=20")
    assert longer.returncode == 2
    assert f"init={tmp_path}/run" in longer.stderr
    assert longer.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["update", "simulator"])
def test_benches_report(name):
    done = run_here("bench", name, "--quick", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["bench"].startswith(name)
    assert report["machine"]["cores"] >= 1
    assert len(report["rows"]) >= 2


def simulations():
    """The commands of docs/simulate.md that simulate."""
    return [line for line in (ROOT / "docs/simulate.md").read_text().splitlines() if line.startswith("ringmaster sim")]


@pytest.mark.parametrize("command", simulations())
def test_the_documented_simulations_run(command, tmp_path):
    """They run as printed."""
    done = ringmaster(*shlex.split(command)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_readme_is_short_and_names_its_two_commands():
    text = (ROOT / "README.md").read_text()
    assert len(simulations()) >= 6
    assert len(text.splitlines()) <= 150
    for path in ("launch/local.sh", "launch/test.sh"):
        assert f"```sh\n./{path}\n```" in text
        assert (ROOT / path).exists()
