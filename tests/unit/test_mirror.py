"""Copies of checkpoints at a URL: in memory, in a folder, on a server that fails, and back again."""

import json
import os
import random
import threading

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.config.describe import annotated
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.run_files import RunDirectoryError
from ringmaster_dist.runtime import mirror as module
from ringmaster_dist.runtime.mirror import Mirror, RemoteRun, Source, fetch
from ringmaster_dist.runtime.preparation import _composed, _refuse_used_mirror, prepare
from ringmaster_dist.server.checkpoints import Checkpoints
from tests.unit.test_checkpoints import save, state

SECONDS = 60.0


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    place = f"memory://{random.randrange(10**12)}/run" if request.param == "memory" else f"file://{tmp_path}/remote"
    yield place
    if request.param == "memory":
        MemoryFileSystem.store.clear()


class LocalRun:
    """A run directory whose trace grows by some parts between two checkpoints."""

    def __init__(self, folder, keep=2):
        self.folder = folder
        folder.mkdir()
        (folder / "config.yaml").write_text("a: 1\n")
        (folder / "terms.jsonl").write_text("{}\n")
        (folder / "token").write_text("the secret of this run")
        self.keep, self.checkpoints = keep, Checkpoints(folder / "checkpoints", keep)

    def checkpoint(self, version):
        with (self.folder / "trace.jsonl").open("ab") as trace:
            trace.write(random.Random(version).randbytes(250))
        written = save(self.checkpoints, version), {"trace.jsonl": (self.folder / "trace.jsonl").stat().st_size}
        with (self.folder / "trace.jsonl").open("ab") as trace:
            trace.write(b"later")
        return written

    def upload(self, remote, version):
        source = Source(*self.checkpoint(version))
        remote.upload(self.folder, source, self.keep)
        source.close()
        return source


def content(url):
    system, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(root).lstrip("/"): system.cat_file(path) for path in system.find(root)}


def test_the_newest_are_kept_with_their_files_and_come_back(url, tmp_path, monkeypatch):
    """Only what is new is uploaded. The token never is."""
    monkeypatch.setattr(module, "_PART_BYTES", 100)
    run, remote = LocalRun(tmp_path / "run"), RemoteRun(url)
    assert remote.names() == []
    sent = []
    pipe = type(remote._system).pipe_file
    monkeypatch.setattr(
        type(remote._system), "pipe_file", lambda *given, **more: sent.append(given) or pipe(*given, **more)
    )
    for version in (5, 10, 15, 20):
        sent.clear()
        source = run.upload(remote, version)
    assert len(sent) <= 5  # of eleven parts; one of these is the manifest
    there = content(url)
    assert [moment(name) for name in remote.names()] == [15, 20]
    assert remote.names() == [path.name for path in run.checkpoints._paths()]
    assert not any(b"the secret" in data for data in there.values())
    assert sum(name.startswith("checkpoints/") for name in there) == 2
    needed = {
        part
        for name in remote.names()
        for parts in json.loads(there[f"{name}.json"])["files"].values()
        for part in parts
    }
    assert {name.removeprefix("parts/") for name in there if name.startswith("parts/")} == needed
    fetched = fetch(url, tmp_path / "fetched", "another token").path
    for name in ("config.yaml", "terms.jsonl"):
        assert (fetched / name).read_bytes() == (run.folder / name).read_bytes()
    size = source.sizes["trace.jsonl"]
    assert (fetched / "trace.jsonl").read_bytes() == (run.folder / "trace.jsonl").read_bytes()[:size]
    assert Checkpoints(fetched / "checkpoints").newest()[1].core.version == 20
    assert (fetched / "token").read_text() == "another token"
    assert {path.stat().st_mode & 0o77 for path in (fetched, *fetched.rglob("*"))} == {0}
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        fetch(url, tmp_path / "fetched", "another token")


def moment(name):
    return int(name.partition("version-")[2][:9])


@pytest.mark.parametrize("ended", [False, True])  # the hashes of the two names are in either order
def test_a_checkpoint_replaces_another_of_the_same_moment(url, tmp_path, ended):
    """The last checkpoint of a run may have the pushes and the version of the one before, and says more."""
    run, remote = LocalRun(tmp_path / "run"), RemoteRun(url)
    run.upload(remote, 5)
    for is_over in (ended, not ended):
        source = Source(run.checkpoints.save(state(10, is_over), 0), {})
        remote.upload(run.folder, source, run.keep)
        source.close()
    assert [moment(name) for name in remote.names()] == [5, 10]
    assert remote.names()[-1] == source.checkpoint.name


@pytest.mark.parametrize("damage", ["checkpoint", "part", "manifest", "missing"])
def test_a_damaged_copy_is_passed_over(damage, url, tmp_path, caplog):
    run, remote = LocalRun(tmp_path / "run"), RemoteRun(url)
    for version in (5, 10):
        run.upload(remote, version)
    newest = remote.names()[-1]
    manifest = remote._manifest(newest)
    part = f"parts/{manifest['files']['trace.jsonl'][-1]}"
    path = {"checkpoint": f"checkpoints/{newest}", "manifest": f"{newest}.json"}.get(damage, part)
    system, root = fsspec.core.url_to_fs(url)
    whole = system.cat_file(f"{root}/{path}")
    if damage == "missing":
        system.rm_file(f"{root}/{path}")
    else:
        system.pipe_file(f"{root}/{path}", whole[:-1])
    fetched = fetch(url, tmp_path / "fetched", "t" * 16).path
    assert Checkpoints(fetched / "checkpoints").newest()[1].core.version == 5
    assert f"{newest} at {url} is passed over" in caplog.text


def test_a_copy_that_fails_is_a_warning_and_the_next_one_is_whole(tmp_path, monkeypatch, caplog):
    """A manifest that could not be uploaded is not seen. Uploads wait in a thread, and the newest is uploaded next."""
    url = f"memory://{random.randrange(10**12)}"
    run, may_go_on, broken = LocalRun(tmp_path / "run", keep=9), threading.Event(), [True]
    mirror, move = Mirror(url, run.folder, 9), MemoryFileSystem.mv

    def slow_move(*given):
        may_go_on.wait(SECONDS)
        if broken[0]:
            raise ConnectionError("the line is cut")
        move(*given)

    monkeypatch.setattr(MemoryFileSystem, "mv", slow_move)
    for version in (5, 10, 15):  # returns at once, although nothing was uploaded
        mirror.submit(*run.checkpoint(version))
    assert RemoteRun(url).names() == []
    may_go_on.set()
    mirror.finish(SECONDS)
    assert RemoteRun(url).names() == []
    assert caplog.text.count("WAS NOT COPIED to memory://") >= 2
    assert "the line is cut" in caplog.text
    broken[0] = False
    mirror.finish(SECONDS)  # tries the last one again
    assert [moment(name) for name in RemoteRun(url).names()] == [15]
    assert fetch(url, tmp_path / "fetched", "t" * 16).path.is_dir()


def test_an_interrupted_download_is_repeated(tmp_path, monkeypatch):
    run, url = LocalRun(tmp_path / "run"), f"file://{tmp_path}/remote"
    run.upload(RemoteRun(url), 5)
    with monkeypatch.context() as patched:
        patched.setattr(module.RunDirectory, "write_secret", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fetch(url, tmp_path / "fetched", "t" * 16)
    assert fetch(url, tmp_path / "fetched", "t" * 16).read("config.yaml") == "a: 1"


def test_resume_finds_the_run_at_a_url(tmp_path):
    """resume=auto looks into run.dir first, and then at checkpoint.mirror. resume=URL names the URL."""
    url = f"file://{tmp_path}/remote"
    line = [f"run.dir={tmp_path}/a", f"checkpoint.mirror={url}", "budget.updates=5000"]
    run = LocalRun(tmp_path / "run")
    (run.folder / "config.yaml").write_text(annotated(compose(line, "train")) + "\n")
    assert _composed([*line, "resume=auto"], "")[1] == ""  # the run has not begun
    run.upload(RemoteRun(url), 5)
    for _ in range(2):  # copied, and found here
        assert _composed([*line, "resume=auto"], "t" * 16)[1] == f"{tmp_path}/a"
    composed, resumed, fetched = _composed([f"resume={url}", f"run.dir={tmp_path}/b", "budget.updates=7000"], "")
    assert (resumed, fetched, composed.budget.updates) == (f"{tmp_path}/b", url, 7000)
    assert len((tmp_path / "b/token").read_text()) == 32
    for overrides, words in (
        ([f"resume={url}"], "needs run.dir, the directory that the run is copied to"),
        ([f"resume={url}", f"run.dir={tmp_path}/b"], f"already holds a run: resume it with resume={tmp_path}/b"),
        ([f"resume={url}", f"run.dir={tmp_path}/c", "method.eta=3"], "method.eta: a run is resumed as it began"),
    ):
        with pytest.raises(UserError, match=words):
            _composed(overrides, "")
    with pytest.raises(UserError, match=f"already holds a run: resume it with resume={url}, or choose another"):
        _refuse_used_mirror(to_typed(compose([*line], "train"), real_time=True))


def open_files(folder):
    found = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return sorted(name.removesuffix(" (deleted)") for name in found if name.startswith(str(folder)))


def test_a_checkpoint_that_the_run_removes_meanwhile_is_copied(url, tmp_path, monkeypatch, caplog):
    """The mirror is slower than the run, which keeps one checkpoint. What waits no longer takes no space on disk."""
    run, started, may_go_on = LocalRun(tmp_path / "run", keep=1), threading.Event(), threading.Event()
    mirror, system = Mirror(url, run.folder, 1), type(fsspec.core.url_to_fs(url)[0])
    put = system.put_file

    def slow_put(*given, **more):
        started.set()
        may_go_on.wait(SECONDS)
        put(*given, **more)

    monkeypatch.setattr(system, "put_file", slow_put)
    first = run.checkpoint(5)
    mirror.submit(*first)
    assert started.wait(SECONDS)
    for version in (10, 15):
        last = run.checkpoint(version)
        mirror.submit(*last)
    held = open_files(run.folder)
    assert not first[0].exists()
    may_go_on.set()
    mirror.finish(SECONDS)
    assert "WAS NOT COPIED" not in caplog.text
    assert [name for name in content(url) if name.startswith("checkpoints/")] == [f"checkpoints/{last[0].name}"]
    assert held == sorted(str(path) for path, _ in (first, last))  # 10 was replaced
    assert open_files(run.folder) == []
    assert list((run.folder / "checkpoints").iterdir()) == [last[0]]
    assert Checkpoints(fetch(url, tmp_path / "fetched", "t" * 16).path / "checkpoints").newest()[1].core.version == 15


def one_line(raised):
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", ["../outside", "/absolute", "a/b", "token", "checkpoints"])
def test_a_manifest_names_only_the_files_of_a_run(name, url, tmp_path):
    """Whoever can write at the URL cannot write outside the run directory."""
    run, remote = LocalRun(tmp_path / "run"), RemoteRun(url)
    run.upload(remote, 5)
    (newest,) = remote.names()
    manifest = remote._manifest(newest)
    name = f"{tmp_path}{name}" if name == "/absolute" else name
    manifest["files"][name] = manifest["files"]["trace.jsonl"]
    remote._system.pipe_file(remote._path(f"{newest}.json"), json.dumps(manifest).encode())
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as raised:
        fetch(url, tmp_path / "fetched", "t" * 16)
    assert f"{name!r}, which is not a file of a run" in one_line(raised)
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "fetched"])
    assert list((tmp_path / "fetched").iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: b"\xff{",
        lambda manifest: b"[" * 100_000,
        lambda manifest: [manifest],
        lambda manifest: {**manifest, "files": list(manifest["files"])},
        lambda manifest: {**manifest, "files": {**manifest["files"], "trace.jsonl": None}},
        lambda manifest: {**manifest, "files": {**manifest["files"], "trace.jsonl": [7]}},
        lambda manifest: {**manifest, "files": {**manifest["files"], "trace.jsonl": ["../" + "0" * 64]}},
        lambda manifest: {**manifest, "files": {}},
        lambda manifest: {"files": manifest["files"]},
        lambda manifest: {"sha256": manifest["sha256"]},
    ],
)
def test_a_damaged_manifest_is_one_line(change, tmp_path):
    url = f"file://{tmp_path}/remote"
    run, remote = LocalRun(tmp_path / "run"), RemoteRun(url)
    run.upload(remote, 5)
    (newest,) = remote.names()
    changed = change(remote._manifest(newest))
    text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    (tmp_path / "remote" / f"{newest}.json").write_bytes(text)
    with pytest.raises(UserError) as raised:
        fetch(url, tmp_path / "fetched", "t" * 16)
    assert one_line(raised).endswith(f"of the newest, {newest}: its manifest is damaged")
    assert list((tmp_path / "fetched").iterdir()) == []


def test_a_resumed_run_refuses_the_url_of_another_run(tmp_path):
    """It would remove the checkpoints there. Its own URL, an unused one and the one it came from are accepted."""
    own, other, moved = (f"file://{tmp_path}/{name}" for name in ("own", "other", "moved"))
    line = ["cluster.workers=1", "cluster.local_workers=1", f"run.dir={tmp_path}/a"]
    directory = prepare([*line, f"checkpoint.mirror={own}"])[2]
    local = LocalRun(tmp_path / "local")
    (local.folder / "config.yaml").write_text(directory.read("config.yaml") + "\n")
    for url in (own, other, moved):
        local.upload(RemoteRun(url), 5)
    a, auto = f"resume={tmp_path}/a", [*line, "resume=auto"]
    for overrides in ([a], auto, [f"resume={moved}", f"run.dir={tmp_path}/b"]):
        with pytest.raises(UserError, match=f"checkpoint.mirror={other} already holds a run"):
            prepare([*overrides, f"checkpoint.mirror={other}"])
    with pytest.raises(UserError, match=f"if you want that, add checkpoint.mirror={own}, else"):
        prepare([a])  # the directory may come from somebody else
    for overrides, mirror in (
        ([a, f"checkpoint.mirror={own}"], own),
        ([*auto, f"checkpoint.mirror={own}"], own),
        ([f"resume={tmp_path}/b", f"checkpoint.mirror={own}"], own),
        ([f"resume={moved}", f"run.dir={tmp_path}/c", f"checkpoint.mirror={moved}"], moved),
        ([a, f"checkpoint.mirror=file://{tmp_path}/unused"], f"file://{tmp_path}/unused"),
    ):
        assert prepare(overrides)[0].checkpoint.mirror == mirror


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nothing://a", "cannot be used: Protocol not known: nothing"),
        ("sftp://host/a", "needs a package: pip install 'ringmaster-dist[remote]'"),
        ("ftp://127.0.0.1:1/run", "cannot be used: [Errno 111] Connection refused"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_line(url, words, tmp_path):
    """It is said before the server starts, also if a run is resumed, and nothing is left behind."""
    new, old = tmp_path / "new", tmp_path / "old"
    directory = prepare(["cluster.workers=1", "cluster.local_workers=1", f"run.dir={old}"])[2]
    directory.write_config(directory.read("config.yaml").replace("mirror: null", f"mirror: {url}") + "\n")
    for key, overrides in (
        ("resume", [f"resume={url}", f"run.dir={new}"]),
        ("checkpoint.mirror", [f"checkpoint.mirror={url}", f"run.dir={new}", "resume=auto"]),
        ("checkpoint.mirror", [f"checkpoint.mirror={url}", f"run.dir={new}"]),
        ("checkpoint.mirror", [f"resume={old}", f"checkpoint.mirror={url}"]),
    ):
        with pytest.raises(UserError) as raised:
            prepare(overrides)
        assert one_line(raised).startswith(f"{key}={url} {words}")
        assert not new.exists()


def test_a_download_that_fails_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=f"resume=file://{tmp_path}/nothing cannot be used: there is no checkpoint"):
        fetch(f"file://{tmp_path}/nothing", tmp_path / "fetched", "t" * 16)
    url = f"memory://{random.randrange(10**12)}"
    LocalRun(tmp_path / "run").upload(RemoteRun(url), 5)

    def cut(*given, **more):
        raise ConnectionError("the line is cut\nsomewhere")

    monkeypatch.setattr(MemoryFileSystem, "get_file", cut)
    with pytest.raises(UserError) as raised:
        fetch(url, tmp_path / "fetched", "t" * 16)
    assert one_line(raised) == f"resume={url} cannot be used: the line is cut"
    assert list((tmp_path / "fetched").iterdir()) == []


def test_a_storage_that_cannot_be_reached_is_a_warning_for_each_checkpoint(tmp_path, caplog):
    """Some kinds of storage connect when they are opened. The server starts and continues without them."""
    run = LocalRun(tmp_path / "run")
    mirror = Mirror("ftp://127.0.0.1:1/run", run.folder, 2)
    for version in (5, 10):
        mirror.submit(*run.checkpoint(version))
        mirror.finish(SECONDS)  # tries it once more
    assert caplog.text.count("WAS NOT COPIED to ftp://127.0.0.1:1/run: [Errno 111] Connection refused") == 4
