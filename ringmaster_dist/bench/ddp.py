"""What people would use instead: DistributedDataParallel over gloo with torch.optim.Muon, on the same paced workers.

A rank waits for its pace before its backward pass, in which DDP averages the gradients. So a step takes as long as its
slowest rank. If ranks are killed, rank 0 writes a checkpoint after every step, and all ranks resume from it together.
"""

from __future__ import annotations

import math
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ringmaster_dist.bench.contest import Trial
from ringmaster_dist.bench.rivals import Member, bytes_of_all_reduce, optimizers_of, save

_CHECKPOINT, _STORE = "checkpoint", "store"


def rank(trial: Trial, index: int, folder: Path) -> None:
    """One rank. It trains until the bench ends it."""
    member = Member(trial, index, folder)
    workers, resumable = trial.cluster.workers, bool(trial.cluster.kill_seconds)
    optimizers = optimizers_of(member.model, trial.contender.optimizer, trial.chosen["factor"])
    step, used = 0, 0.0
    if resumable and (folder / _CHECKPOINT).exists():
        saved = torch.load(folder / _CHECKPOINT)
        step, used = saved["step"], saved["used"]
        member.model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    _meet(index, workers, folder)
    model = DistributedDataParallel(member.model)
    member.start_together()
    backward_seconds = math.inf  # the least so far, which has waited for no other rank
    batch, num_bytes = member.config.problem.batch, bytes_of_all_reduce(member.model, workers)
    while True:
        began, at_seconds = time.monotonic(), member.seconds
        rows = member.rows(step)  # (batch, context + 1)
        loss = model(rows[:, :-1], rows[:, 1:])
        assigned = member.assigned(index, step, at_seconds)
        expected = backward_seconds if math.isfinite(backward_seconds) else 0.0
        time.sleep(max(0.0, began + assigned - expected - time.monotonic()))
        before = time.monotonic()
        loss.backward()
        backward_seconds = min(backward_seconds, time.monotonic() - before)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        used += sum(member.mean_seconds(worker, at_seconds) for worker in range(workers))
        step += 1
        if index == 0:
            if resumable:
                states = [optimizer.state_dict() for optimizer in optimizers]
                saved = {"step": step, "used": used, "model": member.model.state_dict(), "optimizers": states}
                save(saved, folder / _CHECKPOINT)
            member.publish(step, step * workers * batch, used, step * num_bytes)


def _meet(index: int, workers: int, folder: Path) -> None:
    """Joins the process group. Ranks that start again meet at another port, which rank 0 writes to a file."""
    address = folder / _STORE
    if index == 0:
        store = TCPStore("127.0.0.1", 0, workers, is_master=True, wait_for_workers=False)
        hidden = folder / f".{_STORE}"
        hidden.write_text(f"{store.port}")
        hidden.replace(address)
    else:
        store = _store_of_rank_0(address, workers)
    dist.init_process_group("gloo", store=store, rank=index, world_size=workers, timeout=timedelta(seconds=120))


def _store_of_rank_0(address: Path, workers: int) -> TCPStore:
    """Connects to the store of rank 0. The file may still name the store of an earlier start, which is gone."""
    while True:
        if address.exists() and _answers(int(address.read_text())):
            return TCPStore("127.0.0.1", int(address.read_text()), workers, wait_for_workers=False)
        time.sleep(0.02)


def _answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
