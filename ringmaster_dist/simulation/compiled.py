"""The simulator's loop for the quadratic, compiled by numba, for runs of many thousands of arrivals.

`Simulator` interprets Python for every arrival, which costs much more than the arithmetic of a vector. This loop does the
same without the interpreter. It decides and draws nothing by rules of its own: it calls the functions in `_RULES`, which
are those of the core and the interpreted simulator, and takes the method's schedule as arrays. Arrivals and verdicts are
equal to the bit. Iterates are equal to rounding, because sums are computed in another order. `supports` says which runs
it can play, and refuses every method and geometry that it does not know.

Workers finish in the order of a tournament tree: a leaf per worker, and each inner node names the child that finishes
first. The iterate of a version is in a *slot*. Its *cohort* is the list of the workers that compute at it.
"""

from __future__ import annotations

import ast
import inspect
import math
import statistics
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.extending import overload, register_jitable

from ringmaster_dist import profiles, randomness
from ringmaster_dist.algorithm import geometry
from ringmaster_dist.algorithm.methods import DelayAdaptive, Method, Rennala, Synchronous, delay_adapted, is_stale
from ringmaster_dist.problems import Problem
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.protocol import Receipt, Verdict
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation.simulator import Simulator
from ringmaster_dist.simulation.speeds import Ints, Speeds

_MOST_ARRIVALS = 4096  # in one call of the loop
_PLANNED = 4096  # versions whose schedule is computed at once
_MOST_NUMBERS = 2**30  # in the iterates that may be alive; memory is only taken for those that are
_VERDICTS = (Verdict.ACCEPTED, Verdict.STALE, Verdict.INVALID)
_ACCEPTED, _STALE, _INVALID = range(3)
_PLAIN, _NORMALIZED, _POLYNOMIAL, _SIGN = range(4)  # how the direction is scaled
_ORACLES = {"none": _PLAIN, "euclidean": _NORMALIZED, "row": _NORMALIZED, "sign": _SIGN, "column": _SIGN}
_SPECTRAL = {"exact": _NORMALIZED, "polar_express": _POLYNOMIAL, "jordan": _POLYNOMIAL}

# The functions that the loop shares with the core. numba compiles these very objects.
_RULES = (
    is_stale, delay_adapted, geometry.vector_scale, profiles.jittered_seconds,
    randomness._mix, randomness.bits, randomness.unit, randomness.normal, randomness.half_normal,
)  # fmt: skip
for _rule in _RULES:
    register_jitable(_rule)


@overload(randomness._inverse_normal_cdf)
def _inverse_normal_cdf(p):
    """`NormalDist.inv_cdf` calls C code. The standard library has the same algorithm in Python, which numba can compile."""
    tree = ast.parse(inspect.getsource(statistics))
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "_normal_dist_inv_cdf"]
    exec(compile(tree, statistics.__file__, "exec"), names := dict(vars(statistics)))
    standard = njit(names["_normal_dist_inv_cdf"])
    return lambda p: standard(p, 0.0, 1.0)


_WORKER = np.dtype(
    [
        ("base", np.float64),  # seconds per gradient
        ("jitter_key", np.uint64),
        ("noise_key", np.uint64),
        ("sequence", np.int64),  # of the newest computation
        ("version", np.int64),
        ("slot", np.int64),  # of the iterate of that version; it may have been released since
        ("start", np.float64),
    ]
)
_ROW = np.dtype(
    [
        ("time", np.float64),
        ("worker", np.int64),
        ("sequence", np.int64),
        ("gradient_version", np.int64),
        ("verdict", np.int64),
        ("version", np.int64),
        ("continue_at", np.int64),
        ("loss", np.float64),
        ("compute_seconds", np.float64),
    ]
)
_VERSION, _CURRENT, _NUM_FREE, _COLLECTED = range(4)  # indices into _State.counters
# Heads of circular lists: computations whose iterate was released, waiting workers, and slots from old to new. The nodes of
# workers are 0, ..., num_workers - 1. Then comes the head of each slot's cohort, and then the node of each slot by age.
_LOST, _WAITING, _AGES = -1, -2, -3


class _State(NamedTuple):
    workers: Any  # (num_workers,) of _WORKER
    tallies: Any  # (3, num_workers), gradients by verdict
    seconds: Any  # (2, num_workers), used and wasted
    times: Any  # (leaves,), when each worker finishes; infinity if it waits
    tree: Any  # (2 * leaves,), the first worker to finish below each node; the root is node 1
    after: Any  # (nodes,), the lists
    before: Any  # (nodes,)
    iterates: Any  # (slots, dim)
    versions: Any  # (slots,), -1 if the slot is free
    free: Any  # (slots,), of which the first counters[_NUM_FREE] are free slots
    momentum: Any  # (dim,)
    gradient: Any  # (dim,)
    mean: Any  # (dim,), the gradient itself if an update takes one
    direction: Any  # (dim,)
    counters: Any


class _Rules(NamedTuple):
    """What is the same for the whole run."""

    jitter: float
    noise: float
    interrupt: bool
    adaptive: bool  # whether the step depends on the delay
    batch: int  # gradients per update
    waits: bool
    nesterov: bool
    radius: float
    weight_decay: float
    oracle: int
    coefficients: Any


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
        worker = after[worker]
    if num_begun > leaves // 8:
        for node in range(leaves - 1, 0, -1):
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = right if times[right] < times[left] else left
    else:
        worker = after[head]
        while worker != head:
            _settle(times, tree, worker)
            worker = after[worker]
    _move_all(after, s.before, head, len(workers) + slot)


@njit(cache=True)
def _release_if_unused(s, slot, version):
    """Frees the slot of a version if no worker computes at it and it is not the newest."""
    head = len(s.workers) + slot
    if s.versions[slot] == version != s.counters[_VERSION] and s.after[head] == head:
        _remove(s.after, s.before, head + len(s.versions))
        s.versions[slot] = -1
        s.free[s.counters[_NUM_FREE]] = slot
        s.counters[_NUM_FREE] += 1


_fast = njit(cache=True, fastmath={"reassoc", "contract"})  # sums in any order, so that the loops become vector code


@_fast
def _gradient(x, noise, out):
    """Writes ``A x - b + noise`` to ``out``, see problems/quadratic.py. Returns the loss and the sum of the gradient."""
    last = len(x) - 1
    product = total = 0.0
    for i in range(len(x)):
        if 0 < i < last:
            value = 0.5 * x[i] - 0.25 * (x[i - 1] + x[i + 1])
        else:
            value = 0.5 * x[i] + (0.25 if i == 0 else 0.0)
            if last > 0:
                value -= 0.25 * x[1 if i == 0 else last - 1]
        product += x[i] * value
        total += value
        out[i] = value + noise
    return 0.5 * product + 0.125 * x[0], total + noise


@_fast
def _update(x, m, g, u, eta, alpha, rules, out):
    """Moves the momentum and writes the next iterate to ``out``, see algorithm/update.py."""
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
def _next_version(s, rules, eta, alpha):
    """Applies the mean gradient: version k -> k + 1."""
    counters, old = s.counters, s.counters[_CURRENT]
    counters[_NUM_FREE] -= 1
    new = s.free[counters[_NUM_FREE]]
    _update(s.iterates[old], s.momentum, s.mean, s.direction, eta, alpha, rules, s.iterates[new])
    version = counters[_VERSION]
    counters[_VERSION], counters[_CURRENT], s.versions[new] = version + 1, new, version + 1
    _append(s.after, s.before, _AGES, len(s.workers) + len(s.versions) + new)
    _release_if_unused(s, old, version)


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
            noise = 0.0
            if rules.noise != 0.0:
                noise = rules.noise * randomness.normal(me.noise_key, np.uint64(sequence))
            loss, total = _gradient(s.iterates[me.slot], noise, s.gradient)
            verdict = _ACCEPTED if math.isfinite(total) or np.isfinite(s.gradient).all() else _INVALID
        s.tallies[verdict, worker] += 1
        s.seconds[0 if verdict == _ACCEPTED else 1, worker] += compute_seconds
        _remove(s.after, s.before, worker)
        if verdict == _ACCEPTED:
            counters[_COLLECTED] += 1
            complete = counters[_COLLECTED] == rules.batch
            if rules.batch > 1:
                if counters[_COLLECTED] == 1:
                    s.mean[:] = 0.0
                s.mean[:] += s.gradient
                if complete:
                    s.mean[:] /= rules.batch
        if complete:
            counters[_COLLECTED] = 0
            eta = delay_adapted(etas[index], delay, num_workers) if rules.adaptive else etas[index]
            _next_version(s, rules, eta, alphas[index])
        _release_if_unused(s, me.slot, gradient_version)

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
            while True:  # the newest version is never stale
                oldest = s.after[_AGES] - num_workers - len(s.versions)
                if not is_stale(version + 1 - s.versions[oldest], thresholds[index + 1]):
                    break
                if rules.interrupt:
                    _begin_all(s, rules.jitter, num_workers + oldest, now)
                else:
                    _move_all(s.after, s.before, num_workers + oldest, _LOST)
                _release_if_unused(s, oldest, s.versions[oldest])
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
        isinstance(problem, Quadratic)
        and problem.clip is None
        and speeds.rates is None
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
        (block,) = core.update.layout.blocks
        batch = _batch(core.method, speeds.num_workers)
        self._rules = _Rules(
            jitter=float(speeds.jitter),
            noise=float(problem.noise),
            interrupt=self._interrupt,
            adaptive=isinstance(core.method, DelayAdaptive),
            batch=batch,
            waits=core.method.waits,
            nesterov=core.update.nesterov,
            radius=float(block.radius),
            weight_decay=float(block.weight_decay),
            oracle=_oracle(core),
            coefficients=geometry.COEFFICIENTS.get(core.update.orthogonalization, geometry.POLAR_EXPRESS),
        )
        self._state = s = _initial_state(core, speeds, self._seed, batch == 1)
        self.used_seconds, self.wasted_seconds = s.seconds
        self._rows = np.empty(_MOST_ARRIVALS, dtype=_ROW)
        self._planned = range(0)
        _begin_all(s, self._rules.jitter, _WAITING, 0.0)

    @property
    def interrupted(self) -> Ints:
        s = self._state
        in_flight = s.times[: len(s.workers)] < np.inf
        interrupted: Ints = s.workers["sequence"] + 1 - s.tallies.sum(axis=0) - in_flight
        return interrupted

    def run(self, *, updates: float = math.inf, seconds: float = math.inf) -> None:
        s, core = self._state, self.core
        while core.version < updates and not self._should_stop():
            if s.times[s.tree[1]] > min(seconds, self._next_sample_seconds):
                if self._next_sample_seconds >= seconds:
                    self.now = seconds
                    break
                self._sample(self._next_sample_seconds)
                continue
            self._play_some(updates, min(seconds, self._next_sample_seconds))
            if core.version >= self._next_sample_updates:
                self._sample(self.now)
        for record, tally in zip(core.workers.values(), s.tallies.T.tolist(), strict=True):
            record.accepted, record.stale, record.invalid = tally

    def _play_some(self, updates: float, seconds: float) -> None:
        s, core, version = self._state, self.core, self.core.version
        if version not in self._planned:
            self._plan(version)
        stop = math.ceil(min(self._planned.stop, updates, max(version + 1, self._next_sample_updates)))
        num_played = _play(
            s, self._rules, self._planned.start, self._etas, self._alphas, self._thresholds, stop, seconds, self._rows
        )
        rows = self._rows[:num_played]
        self.now = float(rows["time"][-1])
        iterate, momentum = s.iterates[s.counters[_CURRENT]].copy(), s.momentum.copy()
        counters = s.tallies.sum(axis=1).tolist()
        core.take_over(int(s.counters[_VERSION]), torch.from_numpy(iterate), torch.from_numpy(momentum), counters)
        if self._report_arrival is not None:
            columns = [rows[name].tolist() for name in _ROW.names]
            for time, worker, sequence, gradient_version, verdict, version, continue_at, loss, seconds in zip(*columns):
                receipt = Receipt(_VERDICTS[verdict], version - gradient_version, version, continue_at)
                known_loss = None if verdict == _STALE else loss
                self._report_arrival(time, worker, sequence, gradient_version, receipt, known_loss, seconds)

    def _plan(self, version: int) -> None:
        """Asks the method for its schedule over the next versions."""
        method, self._planned = self.core.method, range(version, version + _PLANNED)
        self._etas = np.array([method.schedule.eta(k) for k in self._planned])
        self._alphas = np.array([method.alpha(k) for k in self._planned])
        self._thresholds = np.array([method.threshold(k) for k in range(version, version + _PLANNED + 1)], np.float64)


def _initial_state(core: ServerCore, speeds: Speeds, seed: int, one_per_update: bool) -> _State:
    """All workers wait, and slot 0 has the first iterate."""
    num_workers, dim = speeds.num_workers, core.update.layout.size
    num_slots = num_workers + 2  # at most one per worker, the newest and the next
    workers = np.zeros(num_workers, dtype=_WORKER)
    workers["base"], workers["jitter_key"], workers["sequence"] = speeds.base, speeds.keys, -1
    workers["noise_key"] = randomness.worker_keys(seed, randomness.STREAM_NOISE, num_workers)
    leaves = 1 << (num_workers - 1).bit_length()
    nodes = np.arange(num_workers + 2 * num_slots + 3)
    nodes[[_LOST, _WAITING, _AGES]] = _LOST, _WAITING, _AGES  # every list is empty
    state = _State(
        workers=workers,
        tallies=np.zeros((3, num_workers), dtype=np.int64),
        seconds=np.zeros((2, num_workers)),
        times=np.full(leaves, np.inf),
        tree=np.concatenate([np.zeros(leaves, dtype=np.int64), np.arange(leaves)]),
        after=nodes.copy(),
        before=nodes.copy(),
        iterates=np.empty((num_slots, dim)),
        versions=np.full(num_slots, -1),
        free=np.arange(num_slots)[::-1].copy(),
        momentum=np.zeros(dim),
        gradient=(gradient := np.zeros(dim)),
        mean=gradient if one_per_update else np.zeros(dim),
        direction=np.zeros(dim),
        counters=np.array([0, 0, num_slots - 1, 0]),
    )
    state.iterates[0], state.versions[0] = core.snapshot.iterate.numpy(), 0
    _append(state.after, state.before, _AGES, num_workers + num_slots)
    for worker in range(num_workers):
        _append(state.after, state.before, _WAITING, worker)
    return state
