"""What people would use instead: DistributedDataParallel over gloo with torch.optim.Muon, on the same paced workers.

torchrun starts it, with one rank per worker, and the same data, model, batch and seconds per gradient as ours. A rank
waits for its pace before its backward pass, in which DDP averages the gradients. So a step takes as long as its slowest
rank. The clock does not run while rank 0 evaluates. Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringmaster_dist import randomness
from ringmaster_dist.bench.arithmetic import optimizers_of
from ringmaster_dist.config.build import build_problem
from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.config.profile_file import cluster_seconds
from ringmaster_dist.problems.nanochat.problem import NanoChatProblem
from ringmaster_dist.profiles import jittered_seconds

_STEPS_PER_EVALUATION = 2


def main(eta: float, target: float, limit_seconds: float, overrides: list[str]) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    config = to_typed(compose(overrides, "train"), real_time=True)
    problem = build_problem(config)
    assert isinstance(problem, NanoChatProblem)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(problem.model)
    optimizers = optimizers_of(problem.model, eta)
    base = float(cluster_seconds(config, rank + 1)[rank])
    key = randomness.worker_key(config.run.seed, randomness.STREAM_JITTER, rank)
    seconds, in_optimizer, step, backward_seconds = 0.0, 0.0, 0, 0.0
    loss, reached = float("inf"), torch.zeros(())
    while not reached and seconds < limit_seconds:
        dist.barrier()
        began = time.monotonic()
        # (batch, context + 1)
        rows = torch.from_numpy(problem.rows.sample(config.run.seed, rank, step, config.problem.batch).astype("int64"))
        output = model(rows[:, :-1], rows[:, 1:])
        assigned = jittered_seconds(base, config.cluster.jitter, key, step)
        time.sleep(max(0.0, began + assigned - backward_seconds - time.monotonic()))
        before = time.monotonic()
        output.backward()
        backward_seconds = min(
            backward_seconds or 1.0, time.monotonic() - before
        )  # the least: without waiting for other ranks
        before = time.monotonic()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds, in_optimizer = seconds + time.monotonic() - began, in_optimizer + time.monotonic() - before
        step += 1
        if step % _STEPS_PER_EVALUATION == 0:
            if rank == 0:
                with torch.no_grad():
                    loss = problem.score(problem.model, config.problem.validation_rows)["loss"]
                reached.fill_(loss <= target)
            dist.broadcast(reached, 0)
        clock = torch.tensor(seconds)
        dist.broadcast(clock, 0)  # so that all ranks stop at the same step
        seconds = float(clock)
    if rank == 0:
        facts = {"seconds": seconds, "steps": step, "loss": loss, "optimizer_seconds": in_optimizer}
        print(json.dumps({**facts, "reached": bool(reached)}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort when one rank leaves the group before the others


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
