"""Directories and files that somebody else has made: whatever they contain, they are data."""

import json
import shutil
import subprocess
import sys

import pytest
import yaml

from ringmaster_dist import foreign
from ringmaster_dist.cli.main import main
from ringmaster_dist.config.compose import from_yaml
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.worker.job import make_job

QUICK = ["problem.dim=20", "cluster.workers=2", "budget.updates=20", "run.report=false"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run of the quadratic."""
    folder = tmp_path_factory.mktemp("made") / "run"
    command = [
        sys.executable,
        "-m",
        "ringmaster_dist",
        "train",
        *QUICK,
        f"run.dir={folder}",
        "cluster.unit_seconds=0.01",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def given(made, tmp_path):
    """The same run, as it came from somebody else."""
    return shutil.copytree(made, tmp_path / "given")


def alter(directory, value="", **keys):
    """Changes keys of the problem. ``value`` stands, as it is written, where PLACE is."""
    path = directory / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["problem"].update(keys)
    path.write_text(yaml.dump(config).replace("PLACE", value))


@pytest.mark.parametrize(
    "command", [["eval"], ["replay"], ["export"], ["sample"], ["train", "resume"], ["simulate", "init"]], ids=" ".join
)
def test_no_command_imports_the_code_of_a_directory(command, given, tmp_path, monkeypatch, capsys):
    """The module is there to be imported, and says so if it is."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    alter(given, name="python", target="evil:factory", args={})
    words = [command[0], f"{command[1]}={given}"] if len(command) > 1 else [command[0], str(given)]
    assert main([*words, *(["run.dir=never", *QUICK] if command[0] == "simulate" else [])]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "add target=evil:factory" in lines[-1]
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("value", ["${oc.env:SECRET}", '"\\x24{oc.env:SECRET}"', "${run.seed}"])
def test_what_a_configuration_refers_to_is_not_resolved(value, given, monkeypatch, capsys):
    monkeypatch.setenv("SECRET", "the-key-of-the-cloud")
    alter(given, value, path="PLACE")
    for words in (["eval", str(given)], ["replay", str(given)], ["train", f"resume={given}"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "refers to something else" in error
        assert "the-key-of-the-cloud" not in error
    with pytest.raises(UserError, match="refers to something else"):  # what a server sends to a worker
        make_job((given / "config.yaml").read_text(), 0)


def test_a_configuration_that_repeats_itself_is_refused(given):
    bomb = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    with pytest.raises(UserError, match="repeats parts of itself"):
        from_yaml((given / "config.yaml").read_text() + bomb)
    with pytest.raises(ValueError, match="repeats parts of itself"):
        foreign.plain_yaml(bomb)
    with pytest.raises(ValueError, match="too long"):
        foreign.plain_yaml("a: " + "b" * (2 << 20))
    with pytest.raises(UserError, match="nested too deeply"):
        from_yaml("[" * 100_000)


def test_links_out_of_a_directory_are_not_followed(given, tmp_path, capsys):
    other = tmp_path / "precious"
    other.write_text("mine")
    for name in ("report.html", ".report.html", "loss.png"):
        (given / "report").mkdir(exist_ok=True)
        (given / "report" / name).symlink_to(other)
    assert main(["report", str(given)]) == 0
    assert other.read_text() == "mine"
    shutil.rmtree(given / "report")
    (tmp_path / "folder").mkdir()
    (given / "report").symlink_to(tmp_path / "folder")
    assert main(["report", str(given)]) == 2
    assert not list((tmp_path / "folder").iterdir())
    (given / "report").unlink()
    for name in ("weights.safetensors", "weights.yaml"):
        (given / name).symlink_to(other)
        assert main(["export", str(given)]) == 2
        assert other.read_text() == "mine"
        (given / name).unlink()
    (given / "metrics.jsonl").unlink()
    (given / "metrics.jsonl").symlink_to(other)
    capsys.readouterr()
    assert main(["report", str(given)]) == 2
    assert "is a link to a place outside" in capsys.readouterr().err


def test_a_huge_number_of_a_worker_takes_no_memory(given, capsys):
    path = given / "trace.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["worker"] = 2_000_000_000
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(given)]) == 2
    assert "2000000000" in capsys.readouterr().err
