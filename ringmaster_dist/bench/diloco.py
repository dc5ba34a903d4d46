"""DiLoCo of torchft on the same paced workers: replicas take local steps, and then average how far they have moved.

A replica is one process with a manager of torchft. The inner optimizers are torch.optim.Muon and AdamW, and the outer
one is SGD with Nesterov's momentum. The bench runs torchft's lighthouse, by which replicas find each other. A replica
that was killed gets the shared weights from another one when it is back.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringmaster_dist.bench.contest import Trial
from ringmaster_dist.bench.rivals import (
    Member,
    bytes_of_all_reduce,
    local_steps,
    optimizers_of,
    outer_optimizer,
)

LIGHTHOUSE = "lighthouse"  # the file with its address
_TIMEOUT = timedelta(seconds=60)  # of one average, which begins when all are there, and of their connections
_TIMEOUT_WITH_KILLS = timedelta(seconds=5)  # the others wait this long for a replica that has died
_LONGEST_ROUND = timedelta(seconds=600)
_JOIN_MILLISECONDS = 2000  # the lighthouse waits this long for a replica that is missing


def lighthouse(trial: Trial, folder: Path) -> Any:
    """Starts the lighthouse in the process of the bench, and writes its address to the folder."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft reads it, here and in the replicas
    from torchft.coordination import LighthouseServer

    members = trial.cluster.workers
    least = members - 1 if trial.cluster.kill_seconds else members
    server = LighthouseServer(bind="[::]:0", min_replicas=least, join_timeout_ms=_JOIN_MILLISECONDS)
    (folder / LIGHTHOUSE).write_text(server.address())
    return server


def replica(trial: Trial, index: int, folder: Path) -> None:
    """One replica. It trains until the bench ends it."""
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    logging.disable(logging.INFO)
    member = Member(trial, index, folder)
    steps = local_steps(trial, member.config)
    other, muon = optimizers_of(member.model, trial.contender.optimizer, trial.chosen["factor"])
    outer = outer_optimizer(member.model)
    totals = {"rows": 0.0, "used": 0.0, "bytes": 0.0}

    def state() -> dict[str, Any]:
        return {"model": member.model.state_dict(), "muon": muon.state_dict(), "other": other.state_dict(),
                "totals": dict(totals)}  # fmt: skip

    def restore(saved: dict[str, Any]) -> None:
        member.model.load_state_dict(saved["model"])
        muon.load_state_dict(saved["muon"])
        other.load_state_dict(saved["other"])
        totals.update(saved["totals"])

    timeout = _TIMEOUT_WITH_KILLS if trial.cluster.kill_seconds else _TIMEOUT
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), load_state_dict=restore, state_dict=state,
        min_replica_size=1, use_async_quorum=False, timeout=timeout, quorum_timeout=_LONGEST_ROUND,
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
        lighthouse_addr=(folder / LIGHTHOUSE).read_text(), replica_id=f"replica_{index}", init_sync=False,
    )  # fmt: skip
    batch, sequence = member.config.problem.batch, 0
    if not member.is_late:
        member.wait_until_all_are_built()  # else the lighthouse may begin without the last one, which then waits
        manager.start_quorum()  # so that the replicas are connected when the clock starts
        manager.wait_quorum()
    member.start_together()
    with DiLoCo(manager, [member.model], muon, outer, sync_every=steps[index]):
        while True:
            began, at_seconds = time.monotonic(), member.seconds
            rows = member.rows(sequence)  # (batch, context + 1)
            other.zero_grad()
            muon.zero_grad()
            member.model(rows[:, :-1], rows[:, 1:]).backward()
            assigned = member.assigned(index, sequence, at_seconds)
            time.sleep(max(0.0, began + assigned - time.monotonic()))
            sequence += 1
            before = manager.current_step()
            other.step()
            muon.step()  # after the last local step of a round, torchft synchronizes here
            if manager.current_step() > before:
                present = manager.num_participants() / len(steps)
                totals["rows"] += present * sum(steps) * batch
                totals["used"] += present * sum(
                    count * member.mean_seconds(i, at_seconds) for i, count in enumerate(steps)
                )
                totals["bytes"] += present * bytes_of_all_reduce(member.model, len(steps))
                if manager.participating_rank() == 0:
                    member.publish(manager.current_step(), totals["rows"], totals["used"], totals["bytes"])
