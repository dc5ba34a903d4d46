"""The exit code of a supervised run."""

import os
import signal

from ringmaster_dist.runtime.preparation import prepare
from ringmaster_dist.runtime.supervisor import supervise


def test_ctrl_c_while_the_server_awaits_its_restart(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the supervisor sets both, and this restores them
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    config, _, directory = prepare(["cluster.local_workers=0", "cluster.workers=1", "cluster.profile=none",
                                    f"run.dir={tmp_path}/run"])  # fmt: skip
    stopped = []

    def watch(server, workers):
        if server.pid is not None:
            os.kill(server.pid, signal.SIGKILL)
        elif server.process is None and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    assert supervise(config, directory, watch=watch) == 130
