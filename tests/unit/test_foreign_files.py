"""Directories and files that somebody else has made: whatever they contain, they are data."""

import json
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml

from ringmaster_dist import foreign
from ringmaster_dist.cli.main import main
from ringmaster_dist.config.build import cache_folder
from ringmaster_dist.config.compose import from_yaml
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.own_code import A_WORKER, allow
from ringmaster_dist.config.schema import DataConfig
from ringmaster_dist.errors import printable
from ringmaster_dist.files import locked, open_private
from ringmaster_dist.observe.run_files import RunFiles
from ringmaster_dist.observe.run_list import table
from ringmaster_dist.runtime.preparation import prepare
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


def test_a_directory_does_not_choose_where_data_is_kept_or_fetched_from(given, tmp_path, monkeypatch):
    config = yaml.safe_load((given / "config.yaml").read_text())
    config["data"] = {"name": "climbmix", "cache": str(given / "cache"), "url": "http://127.0.0.1:1/evil"}
    monkeypatch.setenv("RINGMASTER_CACHE", str(tmp_path / "own"))
    typed = from_yaml(yaml.dump(config) + "\n")
    allow(typed, "")
    assert cache_folder(typed) == tmp_path / "own"
    assert typed.data.url == DataConfig().url
    typed = from_yaml(yaml.dump(config) + "\n")
    allow(typed, "", A_WORKER)  # a server may name a mirror of the texts
    assert cache_folder(typed) == tmp_path / "own"
    assert typed.data.url == config["data"]["url"]


def snapshot(folder):
    """All that a folder holds."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("name", [".config.yaml", ".lock", "commands.txt", "trace.jsonl", "checkpoints", ".address"])
def test_a_resumed_directory_has_no_links(name, given, tmp_path, capsys):
    """What the server writes there would be written over another file."""
    target = tmp_path / "precious"
    if name == "checkpoints":
        shutil.move(given / name, target)
    else:
        target.write_text("mine")
        (given / name).unlink(missing_ok=True)
    (given / name).symlink_to(target)
    before = snapshot(tmp_path)
    assert main(["train", f"resume={given}", "budget.updates=30"]) == 2
    assert "is a link" in capsys.readouterr().err
    assert snapshot(tmp_path) == before


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "link", "a")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "link"):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("server", "host", "0.0.0.0"), ("server", "tls", False), ("server", "insecure", True), ("logger", "name", "wandb"),
     ("checkpoint", "mirror", "memory://elsewhere")],
)  # fmt: skip
def test_a_resumed_directory_reaches_nobody_by_itself(section, key, value, given, capsys):
    path = given / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config[section] = {**config.get(section, {}), key: value}
    path.write_text(yaml.dump(config))
    before = snapshot(given)
    assert main(["train", f"resume={given}", "budget.updates=30"]) == 2
    word = f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"
    assert word in capsys.readouterr().err
    assert snapshot(given) == before
    assert RunFiles(given).resume_command == f"ringmaster train resume={given} {word}"


def test_the_maker_of_a_resumed_directory_does_not_know_its_secrets(given):
    """Nor does it choose the address at which workers look for the server."""
    (given / "token").write_text("a")
    (given / "sessions").write_text("known")
    (given / "address").write_text("127.0.0.1:1")
    prepare([f"resume={given}", "budget.updates=30"])
    assert len((given / "token").read_text()) == 32
    assert not (given / "sessions").exists()
    assert not (given / "address").exists()


@pytest.mark.parametrize(("key", "value"), [("version", 600_000_000), ("version", -1), ("worker", 2_000_000_000)])
def test_a_trace_takes_no_more_memory_than_its_lines(key, value, given, capsys):
    path = given / "trace.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[7][key] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(given)]) == 2
    assert "line 8 is not a" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["compressed", "bytearray", "other"])
def test_a_file_of_torch_that_expands_is_refused(how, tmp_path, capsys):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED) as archive:
        archive.writestr(
            "x/data.pkl", b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R." if how == "bytearray" else b"0" * 9
        )
    if how == "other":
        path.write_bytes(b"0" * 100)
    assert main(["simulate", f"init={path}", *QUICK, f"run.dir={tmp_path}/run"]) == 2
    words = {
        "compressed": "is compressed",
        "bytearray": "other things than tensors",
        "other": "not a file of torch.save",
    }
    assert words[how] in capsys.readouterr().err


def test_a_text_for_a_terminal_has_no_control_characters():
    assert printable("a\x1b[2Jb\u202ec\n\u00e9") == "a\\x1b[2Jb\\u202ec\n\u00e9"
    assert "\x1b" not in table(["name"], [["\x1b]0;owned\x07"]])
