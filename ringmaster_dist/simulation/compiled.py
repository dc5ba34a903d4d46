"""The simulator's loop for the quadratic, compiled by numba, for runs with many thousands of arrivals.

For a small vector, interpreting the loop of `Simulator` costs much more than the arithmetic. This module compiles the
same loop. It has no rules of its own. The functions that decide and draw are those that the core and `Simulator`
call, and the schedule of the method comes as arrays. So arrivals and verdicts are equal to the bit. Iterates
are equal to rounding, because sums are computed in another order. `supports` says which runs the loop can play, and
refuses every method and geometry that it does not know.

A tournament tree finds the next worker to finish. It has a leaf per worker, and each inner node names the one that
finishes first below it. The iterate of a version is in a *slot*, whose *cohort* is the list of the workers that compute
at it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import statistics
from collections import namedtuple
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import njit
from numba.extending import overload, register_jitable

from ringmaster_dist import profiles, randomness
from ringmaster_dist.algorithm import geometry, methods
from ringmaster_dist.algorithm.methods import DelayAdaptive, Method, Rennala, Synchronous, delay_adapted, is_stale
from ringmaster_dist.problems import Problem
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.protocol import Receipt, Verdict
from ringmaster_dist.server.core import NOT_FINITE, ServerCore
from ringmaster_dist.simulation.simulator import Simulator
from ringmaster_dist.simulation.speeds import Ints, Speeds

_BLOCK = 4096  # arrivals in a call of the loop, and versions whose schedule is computed at once
_MOST_NUMBERS = 2**30  # in the slots, one per worker; only those in use take memory
_VERDICTS = (Verdict.ACCEPTED, Verdict.STALE, Verdict.INVALID)
_ACCEPTED, _STALE, _INVALID = range(3)
_PLAIN, _NORMALIZED, _POLYNOMIAL, _SIGN = range(4)  # how the direction is scaled
_ORACLES = {"none": _PLAIN, "euclidean": _NORMALIZED, "row": _NORMALIZED, "sign": _SIGN, "column": _SIGN}
_SPECTRAL = {"exact": _NORMALIZED, "polar_express": _POLYNOMIAL, "jordan": _POLYNOMIAL}

# numba keeps compiled code on disk, and would not notice that another file has changed. So the folder's name does.
_SOURCES = (__file__, methods.__file__, geometry.__file__, profiles.__file__, randomness.__file__)
_DIGEST = hashlib.sha256(b"".join(Path(name).read_bytes() for name in _SOURCES)).hexdigest()[:16]
numba.config.CACHE_DIR = str(Path(__file__).parent / "__pycache__" / f"numba-{_DIGEST}")

# The functions that the loop shares with the core. numba compiles these very objects.
for _rule in (
    is_stale, delay_adapted, geometry.vector_scale, profiles.jittered_seconds,
    randomness._mix, randomness.bits, randomness.unit, randomness.normal, randomness.half_normal,
):  # fmt: skip
    register_jitable(_rule)


@overload(randomness._inverse_normal_cdf)
def _inverse_normal_cdf(p):
    """`NormalDist.inv_cdf` calls C. The standard library has the same algorithm in Python, which numba can compile."""
    tree = ast.parse(inspect.getsource(statistics))
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "_normal_dist_inv_cdf"]
    exec(compile(tree, statistics.__file__, "exec"), names := dict(vars(statistics)))
    standard = njit(names["_normal_dist_inv_cdf"])
    return lambda p: standard(p, 0.0, 1.0)


# A worker and its newest computation.
_WORKER = np.dtype([("base", "f8"), ("jitter_key", "u8"), ("noise_key", "u8"), ("sequence", "i8"), ("version", "i8"),
                    ("slot", "i8"), ("start", "f8")])  # fmt: skip
# An arrival, as it is reported.
_ROW = np.dtype([("time", "f8"), ("worker", "i8"), ("sequence", "i8"), ("gradient_version", "i8"), ("verdict", "i8"),
                 ("version", "i8"), ("continue_at", "i8"), ("loss", "f8"), ("compute_seconds", "f8")])  # fmt: skip
# The arrays that the loop changes, and the numbers that it reads. `CompiledSimulator` makes both.
_State = namedtuple("_State", ["workers", "tallies", "seconds", "times", "tree", "after", "before", "iterates",
                               "versions", "free", "momentum", "gradient", "mean", "buffer", "counters"])  # fmt: skip
_Rules = namedtuple("_Rules", ["jitter", "noise", "interrupt", "adaptive", "batch", "waits", "nesterov", "radius",
                               "weight_decay", "oracle", "coefficients"])  # fmt: skip
_VERSION, _CURRENT, _NUM_FREE, _COLLECTED = range(4)  # indices into the counters
# The nodes of the circular lists are first the workers, then the heads of the slots' cohorts, then the slots by age.
# The last two nodes are the heads of the list of waiting workers and of the list of slots by age.
_WAITING, _AGES = -1, -2


@njit(cache=True)
def _append(after, before, head, node):
    last = before[head]
    after[last], before[node], after[node], before[head] = node, last, head, node


@njit(cache=True)
def _remove(after, before, node):
    after[before[node]], before[after[node]] = after[node], before[node]


@njit(cache=True)
def _move_all(after, before, source, target):
    first, last, tail = after[source], before[source], before[target]
    if first != source:
        after[tail], before[first], after[last], before[target] = first, tail, target, last
        after[source] = before[source] = source


@njit(cache=True)
def _settle(times, tree, worker):
    """Brings the tree up to date after the time of a worker has changed. Of equal times the smaller index is first."""
    node = (len(times) + worker) // 2
    while node > 0:
        left, right = tree[2 * node], tree[2 * node + 1]
        first = right if times[right] < times[left] else left
        if first == tree[node] != worker:
            break
        tree[node] = first
        node //= 2


@njit(cache=True)
def _begin(me, version, slot, jitter, now):
    """Starts a computation of a worker. Returns when it finishes."""
    me.sequence += 1
    me.version, me.slot, me.start = version, slot, now
    return now + profiles.jittered_seconds(me.base, jitter, me.jitter_key, np.uint64(me.sequence))


@njit(cache=True)
def _begin_all(s, jitter, head, now):
    """Starts all workers of a list. A computation that is in flight is interrupted."""
    workers, seconds, times, tree, after = s.workers, s.seconds, s.times, s.tree, s.after
    version, slot, leaves, num_begun = s.counters[_VERSION], s.counters[_CURRENT], len(times), 0
    worker = after[head]
    while worker != head:
        me = workers[worker]
        if head != _WAITING:
            seconds[1, worker] += now - me.start
        times[worker] = _begin(me, version, slot, jitter, now)
        num_begun += 1
        if num_begun <= leaves // 8:
            _settle(times, tree, worker)
        worker = after[worker]
    if num_begun > leaves // 8:  # it is quicker to make the tree again
        for node in range(leaves - 1, 0, -1):
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = right if times[right] < times[left] else left
    _move_all(after, s.before, head, len(workers) + slot)


@njit(cache=True)
def _release_if_unused(s, slot):
    """Frees a slot if no worker computes at its iterate and it is not the newest."""
    head = len(s.workers) + slot
    if slot != s.counters[_CURRENT] and s.after[head] == head and s.versions[slot] >= 0:
        _remove(s.after, s.before, head + len(s.versions))
        s.versions[slot] = -1
        s.free[s.counters[_NUM_FREE]] = slot
        s.counters[_NUM_FREE] += 1


_fast = njit(cache=True, fastmath={"reassoc", "contract"})  # sums in any order, so that the loops become vector code


@_fast
def _gradient(x, noise, out):
    """Writes ``A x - b + noise`` to ``out``, as problems/quadratic.py does. Returns the loss and the sum of ``out``.

    Here x has a zero before and after it.
    """
    product = total = 0.0
    for i in range(len(out)):
        value = 0.5 * x[i + 1] - 0.25 * (x[i] + x[i + 2])
        product += x[i + 1] * value
        out[i] = value + noise
        total += out[i]
    out[0] += 0.25
    return 0.5 * product + 0.25 * x[1], total


@_fast
def _update(x, m, g, u, eta, alpha, rules, out):
    """Moves the momentum and writes the next iterate to ``out``, as algorithm/update.py does."""
    ahead = alpha if rules.nesterov else 0.0
    square = 0.0
    for i in range(len(m)):
        m[i] += alpha * (g[i] - m[i])
        u[i] = m[i] + ahead * (g[i] - m[i])
        square += u[i] * u[i]
    scale, norm = 1.0, math.sqrt(square)
    if rules.oracle == _NORMALIZED:
        scale = 1.0 / norm if norm > 0.0 else 0.0
    elif rules.oracle == _POLYNOMIAL:
        scale = geometry.vector_scale(norm, rules.coefficients)
    keep, step = 1.0 - eta * rules.weight_decay, eta * rules.radius * scale
    for i in range(len(m)):
        out[i] = keep * x[i] - step * (np.sign(u[i]) if rules.oracle == _SIGN else u[i])


@njit(cache=True)
def _play(s, rules, first_version, etas, alphas, thresholds, stop_version, until_seconds, rows):
    """Plays arrivals up to a version, a time or the end of ``rows``. Returns how many rows it has written.

    ``etas``, ``alphas`` and ``thresholds`` are for the versions from ``first_version`` on.
    """
    num_workers, counters = len(s.workers), s.counters
    for num_played in range(len(rows)):
        version, worker = counters[_VERSION], s.tree[1]
        now = s.times[worker]
        if version >= stop_version or now > until_seconds:
            return num_played
        me, index = s.workers[worker], version - first_version
        sequence, gradient_version, compute_seconds = me.sequence, me.version, now - me.start
        delay = version - gradient_version

        verdict, loss, complete = _STALE, np.nan, False
        if not is_stale(delay, thresholds[index]):
            noise = rules.noise * randomness.normal(me.noise_key, np.uint64(sequence))
            loss, total = _gradient(s.iterates[me.slot], noise, s.gradient)
            verdict = _ACCEPTED if math.isfinite(total) or np.isfinite(s.gradient).all() else _INVALID
        s.tallies[verdict, worker] += 1
        s.seconds[0 if verdict == _ACCEPTED else 1, worker] += compute_seconds
        s.seconds[2, worker] += compute_seconds
        _remove(s.after, s.before, worker)
        if verdict == _ACCEPTED:
            counters[_COLLECTED] += 1
            complete = counters[_COLLECTED] == rules.batch
            if rules.batch > 1:
                s.mean[:] = s.gradient if counters[_COLLECTED] == 1 else s.mean + s.gradient
                if complete:
                    s.mean[:] /= rules.batch
        if complete:
            counters[_COLLECTED] = 0
            eta = delay_adapted(etas[index], delay, num_workers) if rules.adaptive else etas[index]
            old, counters[_NUM_FREE] = counters[_CURRENT], counters[_NUM_FREE] - 1
            new = s.free[counters[_NUM_FREE]]
            x, x_next = s.iterates[old, 1:-1], s.iterates[new, 1:-1]
            _update(x, s.momentum, s.mean, s.buffer, eta, alphas[index], rules, x_next)
            counters[_VERSION], counters[_CURRENT], s.versions[new] = version + 1, new, version + 1
            _append(s.after, s.before, _AGES, num_workers + len(s.versions) + new)
            _release_if_unused(s, old)
        _release_if_unused(s, me.slot)

        continue_at = version + 1 if verdict == _ACCEPTED and rules.waits else counters[_VERSION]
        row = rows[num_played]
        row.time, row.worker, row.sequence, row.gradient_version = now, worker, sequence, gradient_version
        row.verdict, row.version, row.continue_at = verdict, version, continue_at
        row.loss, row.compute_seconds = loss, compute_seconds

        if continue_at > counters[_VERSION]:
            _append(s.after, s.before, _WAITING, worker)
            s.times[worker] = np.inf
        else:
            _append(s.after, s.before, num_workers + counters[_CURRENT], worker)
            s.times[worker] = _begin(me, counters[_VERSION], counters[_CURRENT], rules.jitter, now)
        _settle(s.times, s.tree, worker)
        if complete:
            _begin_all(s, rules.jitter, _WAITING, now)
            while rules.interrupt:
                oldest = s.after[_AGES] - num_workers - len(s.versions)
                if not is_stale(version + 1 - s.versions[oldest], thresholds[index + 1]):
                    break
                _begin_all(s, rules.jitter, num_workers + oldest, now)
                _release_if_unused(s, oldest)
    return len(rows)


def _batch(method: Method, num_workers: int) -> int | None:
    """How many gradients an update of this method averages. None if the loop does not know the method."""
    if type(method) is Rennala:
        return method.batch
    return {Method: 1, DelayAdaptive: 1, Synchronous: num_workers}.get(type(method))


def _oracle(core: ServerCore) -> int | None:
    """How the oracle scales a direction that is a single row. None if the loop does not know the geometry."""
    name = core.update.layout.blocks[0].geometry
    return _SPECTRAL.get(core.update.orthogonalization) if name == "spectral" else _ORACLES.get(name)


def supports(core: ServerCore, problem: Problem, speeds: Speeds) -> bool:
    """Whether the loop can play this run."""
    return (
        type(problem) is Quadratic
        and problem.clip is None
        and speeds.rates is None
        and type(core) is ServerCore
        and core.pushes == 0
        and core.rows is None
        and _batch(core.method, speeds.num_workers) is not None
        and _oracle(core) is not None
        and speeds.num_workers * problem.dim <= _MOST_NUMBERS
    )


class CompiledSimulator(Simulator):
    """A `Simulator` that plays with the compiled loop. The core gets the results whenever other code may look at it."""

    engine = "compiled"

    def __init__(self, core: ServerCore, problem: Quadratic, speeds: Speeds, **options: Any) -> None:
        assert supports(core, problem, speeds)
        super().__init__(core, problem, speeds, **options)
        method, update, (block,) = core.method, core.update, core.update.layout.blocks
        self._rules = _Rules(
            jitter=float(speeds.jitter), noise=float(problem.noise), interrupt=self._interrupt,
            adaptive=isinstance(method, DelayAdaptive), batch=_batch(method, speeds.num_workers), waits=method.waits,
            nesterov=update.nesterov, radius=float(block.radius), weight_decay=float(block.weight_decay),
            oracle=_oracle(core),
            coefficients=geometry.COEFFICIENTS.get(update.orthogonalization, geometry.POLAR_EXPRESS),
        )  # fmt: skip
        self._state = s = _initial_state(core, speeds, self._seed, self._rules.batch)
        self.used_seconds, self.wasted_seconds, self.delivered_seconds = s.seconds
        self._rows = np.empty(_BLOCK, dtype=_ROW)
        self._planned = range(0)
        _begin_all(s, self._rules.jitter, _WAITING, 0.0)

    @property
    def interrupted(self) -> Ints:
        s = self._state
        interrupted: Ints = s.workers["sequence"] + 1 - s.tallies.sum(axis=0) - (s.times[: len(s.workers)] < np.inf)
        return interrupted

    def run(self, *, updates: float = math.inf, seconds: float = math.inf) -> None:
        s, core = self._state, self.core
        while core.version < updates and not self._should_stop():
            until = min(seconds, self._next_sample_seconds)
            if s.times[s.tree[1]] <= until:
                self._play_some(updates, until)
                if core.version >= self._next_sample_updates:
                    self._sample(self.now)
            elif until < seconds:
                self._sample(until)
            else:
                self.now = seconds
                break
        for record, tally in zip(core.workers.values(), s.tallies.T.tolist(), strict=True):
            record.accepted, record.stale, record.invalid = tally

    def _play_some(self, updates: float, seconds: float) -> None:
        s, core, version = self._state, self.core, self.core.version
        if version not in self._planned:
            self._plan(version)
        stop = math.ceil(min(self._planned.stop, updates, max(version + 1, self._next_sample_updates)))
        num_played = _play(s, self._rules, self._planned.start, *self._schedule, stop, seconds, self._rows)
        rows = self._rows[:num_played]
        self.now = float(rows["time"][-1])
        iterate, momentum = s.iterates[s.counters[_CURRENT], 1:-1].copy(), s.momentum.copy()
        counters = s.tallies.sum(axis=1).tolist()
        core.take_over(int(s.counters[_VERSION]), torch.from_numpy(iterate), torch.from_numpy(momentum), counters)
        if self._report_arrival is not None:
            columns = [rows[name].tolist() for name in _ROW.names or ()]
            for time, worker, sequence, past, verdict, version, continue_at, loss, took in zip(*columns, strict=True):
                reason = NOT_FINITE if verdict == _INVALID else ""
                receipt = Receipt(_VERDICTS[verdict], version - past, version, continue_at, reason)
                loss = None if verdict == _STALE else loss
                self._report_arrival(time, worker, sequence, past, receipt, loss, took, 0)

    def _plan(self, version: int) -> None:
        """Asks the method for its schedule over the next versions."""
        method, self._planned = self.core.method, range(version, version + _BLOCK)
        etas = [method.schedule.eta(k) for k in self._planned]
        alphas = [method.alpha(k) for k in self._planned]
        thresholds = [float(method.threshold(k)) for k in range(version, version + _BLOCK + 1)]
        self._schedule = np.array(etas), np.array(alphas), np.array(thresholds)


def _initial_state(core: ServerCore, speeds: Speeds, seed: int, batch: int) -> _State:
    """All workers wait, and slot 0 has the first iterate."""
    num_workers, dim = speeds.num_workers, core.update.layout.size
    num_slots = num_workers + 2  # at most one per worker, the newest and the next
    workers = np.zeros(num_workers, dtype=_WORKER)
    workers["base"], workers["jitter_key"], workers["sequence"] = speeds.base, speeds.keys, -1
    workers["noise_key"] = randomness.worker_keys(seed, randomness.STREAM_NOISE, num_workers)
    leaves = 1 << (num_workers - 1).bit_length()
    nodes = np.arange(num_workers + 2 * num_slots + 2)
    nodes[[_WAITING, _AGES]] = _WAITING, _AGES  # every list is empty
    state = _State(
        workers=workers,  # (num_workers,)
        tallies=np.zeros((3, num_workers), dtype=np.int64),  # gradients by verdict
        seconds=np.zeros((3, num_workers)),  # used, wasted and delivered
        times=np.full(leaves, np.inf),  # when each worker finishes; infinity if it waits
        tree=np.concatenate([np.zeros(leaves, dtype=np.int64), np.arange(leaves)]),  # the root is node 1
        after=nodes.copy(),
        before=nodes.copy(),
        iterates=np.zeros((num_slots, dim + 2)),  # each with a zero before and after it
        versions=np.full(num_slots, -1),  # -1 if the slot is free
        free=np.arange(num_slots)[::-1].copy(),  # a stack of the free slots, below counters[_NUM_FREE]
        momentum=core.momentum.numpy().copy(),
        gradient=(gradient := np.zeros(dim)),
        mean=gradient if batch == 1 else np.zeros(dim),
        buffer=np.zeros(dim),
        counters=np.array([0, 0, num_slots - 1, 0]),
    )
    state.iterates[0, 1:-1], state.versions[0] = core.snapshot.iterate.numpy(), 0
    _append(state.after, state.before, _AGES, num_workers + num_slots)
    for worker in range(num_workers):
        _append(state.after, state.before, _WAITING, worker)
    return state
