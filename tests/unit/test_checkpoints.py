"""Checkpoints on a real disk: they are written atomically, the newest good one is found, and only the last few are
kept."""

import dataclasses
import os

import pytest
import torch

from ringmaster_dist.server.checkpoints import Checkpoints, CheckpointState, Unusable, read
from ringmaster_dist.server.core import CoreState


def state(version, ended=False, slot=0):
    core = CoreState(
        iterate=torch.full((1000,), float(version)),
        momentum=torch.zeros(1000),
        sum=None,
        num_summed=0,
        version=version,
        method={},
        counters=[version, 0, 0],
        workers=[[0, 3, ["stale", 1, 2, 2, ""], 1, 2, 3]],
        live=[0],
        next_worker_id=1,
    )
    member = [0, "digest", slot, 0, 0.0, 1.5, 0.5, "cpu", "", 1, "host"]
    return CheckpointState(core, 12.5, ended, [member], {"trace.jsonl": 10})


def save(store, version, term=0):
    return store.save(state(version), term)


def test_what_is_read_is_what_was_saved(tmp_path):
    path = save(Checkpoints(tmp_path / "new" / "folder"), 7)
    again, before = dataclasses.asdict(read(path)), dataclasses.asdict(state(7))
    for name in ("iterate", "momentum"):
        assert torch.equal(again["core"].pop(name), before["core"].pop(name))
    assert again == before


def test_only_the_last_few_are_kept_and_the_newest_is_found(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    assert store.newest() is None
    for version in (5, 10, 15, 1000):
        save(store, version)
    save(store, 20, term=1)  # a later term that began from an earlier version
    assert len(list(tmp_path.iterdir())) == 2
    assert store.newest()[1].core.version == 20


def test_a_checkpoint_of_the_same_moment_replaces_the_other(tmp_path):
    store = Checkpoints(tmp_path)
    save(store, 5)
    store.save(state(5, ended=True), 0)
    assert [path.name for path in tmp_path.iterdir()] == [store.newest()[0].name]
    assert store.newest()[1].ended


@pytest.mark.parametrize("damage", ["torn", "altered", "empty"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(damage, tmp_path, caplog):
    store = Checkpoints(tmp_path)
    save(store, 5)
    newest = save(store, 10)
    whole = newest.read_bytes()
    newest.write_bytes(
        {"torn": whole[: len(whole) // 2], "altered": whole[:-1] + bytes([whole[-1] ^ 1]), "empty": b""}[damage]
    )
    assert store.newest()[1].core.version == 5
    assert newest.name in caplog.text
    assert "passed over" in caplog.text
    assert not newest.exists()  # it must not be found after versions beyond 5 have been made a second time
    assert newest.with_suffix(".damaged").exists()


def test_foreign_files_are_left_alone(tmp_path, caplog):
    store = Checkpoints(tmp_path)
    path = save(store, 5)
    (tmp_path / "model.safetensors").write_bytes(path.read_bytes())
    (tmp_path / "notes.txt").write_text("mine")
    path.unlink()
    assert store.newest() is None
    assert caplog.text == ""
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "notes.txt"]


def test_a_checkpoint_that_does_not_fit_is_skipped(tmp_path, caplog):
    store = Checkpoints(tmp_path)
    for version in (5, 10):
        save(store, version)
    found = store.newest(lambda state: "it is of another model" if state.core.version == 10 else "")
    assert found[1].core.version == 5
    assert "another model" in caplog.text


def test_a_run_does_not_start_over_if_no_checkpoint_is_usable(tmp_path, monkeypatch):
    """If no checkpoint is good, or none can be read at the moment, nothing is changed, so that a user can repair it
    or retry."""
    store = Checkpoints(tmp_path)
    paths = [save(store, version) for version in (5, 10)]
    with pytest.raises(Unusable, match="another model"):
        store.newest(lambda state: "it is of another model")
    assert all(path.exists() for path in paths)

    def no_more_files(path):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("ringmaster_dist.server.checkpoints.sha256_of", no_more_files)
    with pytest.raises(OSError, match="Too many open files"):
        store.newest()
    assert all(path.exists() for path in paths)


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(OSError, match="checkpoints"):
        save(Checkpoints(tmp_path / "checkpoints"), 10)
    assert os.listdir(tmp_path) == ["checkpoints"]


def test_a_member_that_cannot_be_one_is_damage(tmp_path):
    """A slot stands for as many entries of a delay profile."""
    store = Checkpoints(tmp_path)
    store.save(state(5, slot=900_000_000), 0)
    with pytest.raises(Unusable, match="slot 900000000 is not a place"):
        store.newest()
