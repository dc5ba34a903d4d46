"""The server's rank of a torchrun, when its server fails."""

import socket

import pytest

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.console import LiveTable
from ringmaster_dist.runtime import torchrun_rank


def test_a_server_that_fails_leaves_no_table_on_the_terminal(tmp_path, monkeypatch):
    opened, closed = [], []

    class Table(LiveTable):
        """Notes what the rank does with it."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            opened.append(self._unit)

        def close(self):
            super().close()
            closed.append(self)

    monkeypatch.setattr(torchrun_rank, "LiveTable", Table)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # for the file by which the ranks meet
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(UserError, match="cannot be listened on"),
    ):
        torchrun_rank.take_part([f"run.dir={tmp_path}/run", "problem.dim=10", "local.steps=4",
                                 f"server.port={other.getsockname()[1]}"])  # fmt: skip
    assert (opened, len(closed)) == (["s/4 steps"], 1)
