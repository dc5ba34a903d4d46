"""A group: several ranks on one machine that are one worker. The first rank talks to the server, the others follow it.

For the server and for the worker's loop a group is a worker like any other. The first rank's problem has the whole
group compute a gradient. The other ranks (`follow`) wait for orders of the first rank. All ranks make the same steps,
and at the end of each step they compare their outcomes (`_step`). A rank that fails or is interrupted takes part in
the comparison. So all ranks agree on what happens next, and no rank waits for one that has given up.

The main thread of each rank computes. While the first rank computes, another thread of it passes an interruption on.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch

from ringmaster_dist import devices
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.errors import Mistake
from ringmaster_dist.problems import Interrupted, Problem, Stop, gradient_of, never
from ringmaster_dist.problems.ranks import mean_loss, sequence_of
from ringmaster_dist.signals import end_at_once
from ringmaster_dist.worker.job import Job
from ringmaster_dist.worker.loop import Failed
from ringmaster_dist.worker.ranks import FIRST, RankLost, Ranks

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_JOB, _GRADIENT, _END = 1, 2, 3  # orders
_DONE, _INTERRUPTED, _FAILED, _MISTAKEN = 0, 1, 2, 3  # outcomes of a step
_LOOK_SECONDS = 0.002  # how often the first rank looks for an interruption


class RankFailed(Mistake):
    """A rank could not do its part. If there is a stack trace to show, that rank has shown it."""

    def __init__(self, rank: int, reason: str, is_mistake: bool) -> None:
        super().__init__(f"rank {rank} of the group: {reason}")
        self.is_mistake = is_mistake


def group_of_torchrun() -> Ranks:
    """The group that torchrun has started. Blocks until all its ranks are there. Raises UserError without torchrun."""
    try:
        rank, num, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    except KeyError as error:
        raise UserError(
            "group=true needs torchrun: torchrun --standalone --nproc-per-node=G -m ringmaster_dist.worker group=true"
        ) from error
    if num != local:
        raise UserError(f"group=true: torchrun has {num} ranks on several machines: start one group on each machine")
    return Ranks(rank, num, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Leader:
    """The first rank's side of its group. ``make`` is `make_job`."""

    def __init__(self, ranks: Ranks, make: Callable[..., Job]) -> None:
        self._ranks, self._make = ranks, make
        self._numbers = itertools.count(1)

    def make_job(self, config_text: str, slot: int, **own: Any) -> Job:
        """The job of this rank, whose problem has the whole group compute. Raises UserError or `Failed` for any rank.

        ``own`` are the arguments of `make_job` for this rank. The other ranks have theirs.
        """
        try:
            num_bytes = len(config_text.encode())
            self._ranks.order(_JOB, slot, num_bytes)
            job = _prepare(self._ranks, config_text, num_bytes, slot, partial(self._make, **own))
        except RankFailed as error:
            raise (UserError if error.is_mistake else Failed)(str(error)) from error
        except RankLost as error:
            raise Failed(str(error)) from error
        return replace(job, problem=cast(Problem, _SharedProblem(job.problem, self._ranks, self._numbers)))

    def dismiss(self, code: int) -> None:
        """Has the other ranks exit with this code, and waits until they know it. A broken group ends by itself."""
        try:
            if not self._ranks.is_broken:
                self._ranks.order(_END, code)
                self._ranks.compare(patient=True)
        except RankLost as error:
            log.info("%s after the end", error)
        self._ranks.close()


def follow(ranks: Ranks, make: Callable[[str, int], Job]) -> int:
    """Does what the first rank orders, until it says with which code to exit. Returns 1 if the first rank is lost."""
    end_at_once()  # this rank has nothing to clean up, and waits in C++ code
    job: Job | None = None
    try:
        while True:
            order, *numbers = ranks.order()
            try:
                if order == _END:
                    ranks.compare(patient=True)
                    return numbers[0]
                if order == _JOB:
                    slot, num_bytes, *_ = numbers
                    job = _prepare(ranks, "", num_bytes, slot, make)
                else:
                    assert job is not None, "a job comes before its gradients"
                    number, worker, sequence, size, rows = numbers
                    iterate = torch.empty(size, dtype=job.problem.dtype)  # (size,)
                    _contribute(job.problem, ranks, number, iterate, job.seed, worker, sequence, rows)
            except (RankFailed, Interrupted):
                continue  # the first rank knows it and gives the next order
    except RankLost as error:
        log.info("rank %d: %s", ranks.rank, error)
        return 1


class _SharedProblem:
    """The first rank's problem, except that its gradient is the mean over all ranks, which draw different rows."""

    def __init__(self, own: Problem, ranks: Ranks, numbers: Iterator[int]) -> None:
        """``numbers`` are those of the orders."""
        self._own, self._ranks, self._numbers = own, ranks, numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def gradient(
        self, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int, stop: Stop = never, rows: int = 0
    ) -> tuple[torch.Tensor, float]:
        """Of this many rows per rank. Raises `Interrupted`, this rank's own exception, `RankFailed` or `RankLost`."""
        number = next(self._numbers)
        self._ranks.order(_GRADIENT, number, worker_id, sequence, iterate.numel(), rows)
        with _passing_on(stop, self._ranks, number):
            return _contribute(self._own, self._ranks, number, iterate, seed, worker_id, sequence, rows)


@contextmanager
def _passing_on(stop: Stop, ranks: Ranks, number: int) -> Iterator[None]:
    """Interrupts the order for all ranks as soon as ``stop()`` is true. This rank may be waiting for the others."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_SECONDS):
            if stop():
                ranks.interrupt(number)
                return

    thread = threading.Thread(target=look, name="interruption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# --- the steps, which every rank makes ---------------------------------------------------------------------------


def _prepare(ranks: Ranks, config_text: str, num_bytes: int, slot: int, make: Callable[[str, int], Job]) -> Job:
    """The job of this rank. Only the first rank gives the text."""
    text = ranks.text(FIRST, config_text, num_bytes)
    job, prints = _step(ranks, lambda: make(text, slot), lambda job: zlib.crc32(job.fingerprint.encode()), patient=True)

    def compare() -> None:
        if prints[ranks.rank] != prints[FIRST]:
            raise Mistake("it has other data or other parameters than the first rank: does the factory draw at random?")

    _step(ranks, compare)
    ranks.choose_exchange(job.device, job.wire.size, job.problem.dtype)
    return job


def _contribute(
    problem: Problem, ranks: Ranks, number: int, iterate: torch.Tensor, seed: int, worker: int, sequence: int, rows: int
) -> tuple[torch.Tensor, float]:
    """The group's gradient, (size,), which only the first rank has, and its loss."""
    iterate = ranks.share(iterate)
    drawn = sequence_of(ranks.rank, ranks.num, sequence)

    def compute() -> tuple[torch.Tensor, float]:
        try:
            is_interrupted = partial(ranks.is_interrupted, number)
            gradient, loss = gradient_of(problem, iterate, seed, worker, drawn, is_interrupted, rows)
        except BaseException:
            ranks.interrupt(number)  # the others work in vain
            raise
        if not devices.is_cpu(gradient.device) or gradient.shape != iterate.shape:
            raise Mistake(
                f"the gradient has the shape {tuple(gradient.shape)} on {gradient.device}: the problem has to return "
                f"{tuple(iterate.shape)} in host memory"
            )
        return gradient.detach().to(problem.dtype).contiguous(), float(loss)

    (gradient, _), losses = _step(ranks, compute, lambda computed: computed[1])
    return ranks.mean(gradient), mean_loss(losses)


def _step(
    ranks: Ranks, work: Callable[[], _T], value: Callable[[_T], float] = lambda result: 0.0, *, patient: bool = False
) -> tuple[_T, list[float]]:
    """Does this rank's work. Returns its result, and the value of every rank's result.

    Blocks until all ranks have done theirs. If one has not, all ranks raise: `Interrupted`, or the exception of the
    first rank on that rank, or else `RankFailed`.
    """
    done: list[_T] = []
    error: Exception | None = None
    outcome, number, reason = _DONE, 0.0, ""
    try:
        done.append(work())
        number = value(done[0])
    except Interrupted:
        outcome = _INTERRUPTED
    except (Mistake, UserError) as mistake:
        outcome, error, reason = _MISTAKEN, mistake, str(mistake)
    except Exception as failure:
        outcome, error, reason = _FAILED, failure, f"{type(failure).__name__}: {failure}"
    except BaseException:  # such as Ctrl+C, after which this rank compares nothing
        ranks.is_broken = True
        raise
    rows = ranks.compare(outcome, number, len(reason.encode()), patient=patient)
    for rank, (code, _, num_bytes) in enumerate(rows):
        if code >= _FAILED:
            reason = ranks.text(rank, reason, int(num_bytes))
            if rank == ranks.rank and error is not None:
                _report(rank, error, is_mistake=code == _MISTAKEN)
            raise RankFailed(rank, reason, code == _MISTAKEN)
    if any(code == _INTERRUPTED for code, _, _ in rows):
        raise Interrupted
    return done[0], [number for _, number, _ in rows]


def _report(rank: int, error: Exception, *, is_mistake: bool) -> None:
    """On the first rank, raises the error, which the worker's loop reports. Another rank shows its stack trace."""
    if rank == FIRST:
        raise error
    if not is_mistake:
        log.error("rank %d of the group could not do its part", rank, exc_info=error)
