"""The compiled lane: the simulator's loop and the quadratic's arithmetic in one machine-code function.

Interpreting a small vector update costs many times its arithmetic. Where a run means millions of them, this
module plays the same game as `Simulator` around `ServerCore`, compiled by numba, for a problem that is a single
vector. A test holds the two together: the same arrivals and verdicts to the bit, the same iterates to rounding.

Each worker has one computation in flight, in a binary heap by (finish, worker). Computations at one version are
a linked list (a *cohort*) that hangs on the *slot* that stores its iterate; a slot is free again when its last
computation is gone or has become stale. Workers and slots are records, so that a call passes few arrays and a
worker is one or two cache lines.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

# Why `advance` returned.
REACHED_VERSION, REACHED_TIME, RECORD_FULL, SLOTS_FULL = range(4)
# Indices into State.counters.
VERSION, CURRENT, NUM_FREE, COLLECTED, WAITING, OLDEST, ACCEPTED, STALE, INVALID = range(9)
# What becomes of the direction.
PLAIN, NORMALIZED, POLYNOMIAL, SIGN = range(4)

WORKER = np.dtype(
    [
        ("base", np.float64),  # seconds per gradient
        ("jitter_key", np.uint64),
        ("noise_key", np.uint64),
        ("sequence", np.int64),  # of the computation in flight
        ("version", np.int64),
        ("start", np.float64),
        ("slot", np.int64),  # that stores its iterate; -1: forgotten
        ("after", np.int64),  # next and previous worker of the same cohort
        ("before", np.int64),
        ("place", np.int64),  # in the heap
        ("accepted", np.int64),
        ("stale", np.int64),
        ("invalid", np.int64),
        ("interrupted", np.int64),
        ("used", np.float64),  # seconds spent on accepted work
        ("wasted", np.float64),  # and on other work
    ]
)
SLOT = np.dtype([("version", np.int64), ("users", np.int64), ("first", np.int64)])


class State(NamedTuple):
    workers: Any
    slots: Any
    iterates: Any  # by slot
    free: Any  # the first counters[NUM_FREE] of these slots are free
    recent: Any  # slots of the versions that may still be accepted, at version modulo length
    times: Any  # the heap: finishing times
    heap: Any  # and whose they are
    waiting: Any  # the first counters[WAITING] of these wait for the round to end
    momentum: Any
    gradient: Any
    direction: Any
    total: Any  # of the gradients collected for an average
    counters: Any
    clock: Any  # one number: now


class Rules(NamedTuple):
    """What is the same for the whole run."""

    jitter: float
    noise: float
    interrupt: bool
    bounded: bool  # whether the threshold is finite
    adaptive: bool  # whether eta shrinks with the delay
    batch: int  # gradients per update
    waits: bool
    nesterov: bool
    weight_decay: float
    oracle: int
    coefficients: Any


@njit(cache=True)
def _mix(value):
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


@njit(cache=True)
def _unit(key, sequence):
    value = _mix(key + np.uint64(sequence + 1) * _GOLDEN)
    return (np.float64(value >> np.uint64(12)) + 0.5) * 2.0**-52


@njit(cache=True)
def inverse_normal_cdf(p):
    """Wichura's algorithm AS 241, as in Python's statistics module."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        num = (((((((2.5090809287301226727e3 * r + 3.3430575583588128105e4) * r + 6.7265770927008700853e4) * r
               + 4.5921953931549871457e4) * r + 1.3731693765509461125e4) * r + 1.9715909503065514427e3) * r
               + 1.3314166789178437745e2) * r + 3.3871328727963666080e0) * q  # fmt: skip
        den = (((((((5.2264952788528545610e3 * r + 2.8729085735721942674e4) * r + 3.9307895800092710610e4) * r
               + 2.1213794301586595867e4) * r + 5.3941960214247511077e3) * r + 6.8718700749205790830e2) * r
               + 4.2313330701600911252e1) * r + 1.0)  # fmt: skip
        return num / den
    r = math.sqrt(-math.log(p if q <= 0.0 else 1.0 - p))
    if r <= 5.0:
        r -= 1.6
        num = (((((((7.74545014278341407640e-4 * r + 2.27238449892691845833e-2) * r + 2.41780725177450611770e-1) * r
               + 1.27045825245236838258e0) * r + 3.64784832476320460504e0) * r + 5.76949722146069140550e0) * r
               + 4.63033784615654529590e0) * r + 1.42343711074968357734e0)  # fmt: skip
        den = (((((((1.05075007164441684324e-9 * r + 5.47593808499534494600e-4) * r + 1.51986665636164571966e-2) * r
               + 1.48103976427480074590e-1) * r + 6.89767334985100004550e-1) * r + 1.67638483018380384940e0) * r
               + 2.05319162663775882187e0) * r + 1.0)  # fmt: skip
    else:
        r -= 5.0
        num = (((((((2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r + 1.24266094738807843860e-3) * r
               + 2.65321895265761230930e-2) * r + 2.96560571828504891230e-1) * r + 1.78482653991729133580e0) * r
               + 5.46378491116411436990e0) * r + 6.65790464350110377720e0)  # fmt: skip
        den = (((((((2.04426310338993978564e-15 * r + 1.42151175831644588870e-7) * r + 1.84631831751005468180e-5) * r
               + 7.86869131145613259100e-4) * r + 1.48753612908506148525e-2) * r + 1.36929880922735805310e-1) * r
               + 5.99832206555887937690e-1) * r + 1.0)  # fmt: skip
    x = num / den
    return -x if q < 0.0 else x


# --- the heap -------------------------------------------------------------------------------------------------


@njit(cache=True)
def _sift_down(workers, times, heap, spot):
    size, time, worker = len(heap), times[spot], heap[spot]
    while True:
        child = 2 * spot + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            times[right] < times[child] or (times[right] == times[child] and heap[right] < heap[child])
        ):
            child = right
        if time < times[child] or (time == times[child] and worker < heap[child]):
            break
        times[spot], heap[spot] = times[child], heap[child]
        workers[heap[spot]].place = spot
        spot = child
    times[spot], heap[spot] = time, worker
    workers[worker].place = spot


@njit(cache=True)
def _sift_up(workers, times, heap, spot):
    time, worker = times[spot], heap[spot]
    while spot > 0:
        parent = (spot - 1) // 2
        if times[parent] < time or (times[parent] == time and heap[parent] < worker):
            break
        times[spot], heap[spot] = times[parent], heap[parent]
        workers[heap[spot]].place = spot
        spot = parent
    times[spot], heap[spot] = time, worker
    workers[worker].place = spot


@njit(cache=True)
def heapify(workers, times, heap):
    for spot in range(len(heap) // 2 - 1, -1, -1):
        _sift_down(workers, times, heap, spot)


# --- starting and ending computations -------------------------------------------------------------------------


@njit(cache=True)
def _release(slots, free, counters, slot):
    slots[slot].version = -1
    free[counters[NUM_FREE]] = slot
    counters[NUM_FREE] += 1


@njit(cache=True)
def _detach(workers, slots, free, counters, worker):
    """Takes a worker out of its cohort; frees the slot with its last user, unless it is the current one."""
    me = workers[worker]
    slot = me.slot
    if slot < 0:
        return
    if me.before >= 0:
        workers[me.before].after = me.after
    else:
        slots[slot].first = me.after
    if me.after >= 0:
        workers[me.after].before = me.before
    me.slot = -1
    slots[slot].users -= 1
    if slots[slot].users == 0 and slot != counters[CURRENT]:
        _release(slots, free, counters, slot)


@njit(cache=True)
def _start(me, now, version, slot, jitter):
    """Writes a new computation into a worker's record; returns when it will be finished."""
    me.sequence += 1
    me.version = version
    me.start = now
    me.slot = slot
    if jitter == 0.0:
        return now + me.base
    return now + me.base * (1.0 + jitter * -inverse_normal_cdf(0.5 * _unit(me.jitter_key, me.sequence)))


@njit(cache=True)
def begin(workers, slots, times, heap, counters, now, jitter, worker, sift):
    """Starts the worker at the newest iterate. With ``sift`` off the caller restores the heap."""
    me = workers[worker]
    slot = counters[CURRENT]
    times[me.place] = _start(me, now, counters[VERSION], slot, jitter)
    first = slots[slot].first
    me.before, me.after = -1, first
    if first >= 0:
        workers[first].before = worker
    slots[slot].first = worker
    slots[slot].users += 1
    if sift:
        _sift_up(workers, times, heap, me.place)
        _sift_down(workers, times, heap, me.place)


@njit(cache=True)
def begin_all(workers, slots, times, heap, counters, jitter):
    """Time zero: everybody starts."""
    for worker in range(len(workers)):
        begin(workers, slots, times, heap, counters, 0.0, jitter, worker, False)
    heapify(workers, times, heap)


@njit(cache=True)
def _restart(workers, slots, times, heap, free, counters, now, jitter, slot):
    """Interrupts a whole cohort and starts it at the newest iterate: its list is hung there as it is."""
    target = counters[CURRENT]
    version = counters[VERSION]
    in_bulk = slots[slot].users * 8 > len(heap)
    worker = last = slots[slot].first
    while worker >= 0:
        me = workers[worker]
        me.interrupted += 1
        me.wasted += now - me.start
        times[me.place] = _start(me, now, version, target, jitter)
        if not in_bulk:
            _sift_up(workers, times, heap, me.place)
            _sift_down(workers, times, heap, me.place)
        last = worker
        worker = me.after
    if in_bulk:
        heapify(workers, times, heap)
    first = slots[target].first
    workers[last].after = first
    if first >= 0:
        workers[first].before = last
    slots[target].first = slots[slot].first
    slots[target].users += slots[slot].users
    slots[slot].users = 0
    _release(slots, free, counters, slot)


@njit(cache=True)
def _abandon(workers, slots, free, counters, slot):
    """Forgets the iterate of a stale cohort, whose computations go on and will arrive in vain."""
    worker = slots[slot].first
    while worker >= 0:
        workers[worker].slot = -1
        worker = workers[worker].after
    slots[slot].users = 0
    _release(slots, free, counters, slot)


# --- arithmetic ------------------------------------------------------------------------------------------------


# Sums may be taken in any order here, so that the loops become vector code; the rest keeps to the letter.
_fast = njit(cache=True, fastmath={"reassoc", "contract"})


@_fast
def quadratic_gradient(x, noise, out):
    """Writes ``A x - b + noise`` to out; returns the loss. See problems/quadratic.py."""
    last = len(x) - 1
    product = 0.0
    for i in range(1, last):
        value = 0.5 * x[i] - 0.25 * (x[i - 1] + x[i + 1])
        product += x[i] * value
        out[i] = value + noise
    first_value = 0.5 * x[0] + 0.25
    if last > 0:
        first_value -= 0.25 * x[1]
        last_value = 0.5 * x[last] - 0.25 * x[last - 1]
        product += x[last] * last_value
        out[last] = last_value + noise
    out[0] = first_value + noise
    return 0.5 * (product + x[0] * first_value) + 0.125 * x[0]


@_fast
def _momentum(m, g, u, alpha, nesterov):
    """Moves m, writes the oracle's argument to u, returns its squared norm."""
    ahead = alpha if nesterov else 0.0
    square = 0.0
    for i in range(len(m)):
        moved = m[i] + alpha * (g[i] - m[i])
        m[i] = moved
        looked = moved + ahead * (g[i] - moved)
        u[i] = looked
        square += looked * looked
    return square


@_fast
def _sum(values):
    total = 0.0
    for value in values:
        total += value
    return total


@_fast
def _step(x, u, norm, eta, weight_decay, oracle, coefficients, out):
    """``out = x + eta lmo(u)``; see algorithm/update.py and `_iterate_vector` of algorithm/geometry.py."""
    scale = 1.0
    if oracle == NORMALIZED:
        scale = 1.0 / norm if norm > 0.0 else 0.0
    elif oracle == POLYNOMIAL:
        length = norm / (norm + 1e-7)
        for i in range(len(coefficients)):
            square = length * length
            length *= coefficients[i, 0] + square * (coefficients[i, 1] + coefficients[i, 2] * square)
        scale = length / norm if norm > 0.0 else 0.0
    keep, step = 1.0 - eta * weight_decay, eta * scale
    if oracle == SIGN:
        for i in range(len(x)):
            out[i] = keep * x[i] - step * np.sign(u[i])
    else:
        for i in range(len(x)):
            out[i] = keep * x[i] - step * u[i]


# --- the loop --------------------------------------------------------------------------------------------------


@njit(cache=True)
def advance(s, rules, first_version, etas, alphas, thresholds, until_seconds, whole, reals):
    """Plays until the schedule given, the time or the room for records ends: (why, records written).

    The schedules are for versions ``first_version``, ``first_version + 1``, ..., one more of the thresholds. A
    record is one row of ``whole`` (worker, sequence, gradient version, version, verdict) and of ``reals`` (time,
    loss, compute seconds); without rows nothing is recorded.
    """
    workers, slots, free, counters = s.workers, s.slots, s.free, s.counters
    times, heap, total = s.times, s.heap, s.total
    jitter, batch = rules.jitter, rules.batch
    num_records, record, num_workers = 0, len(whole) > 0, len(heap)
    while True:
        version = counters[VERSION]
        index = version - first_version
        if index >= len(etas):
            return REACHED_VERSION, num_records
        now, worker = times[0], heap[0]
        if now > until_seconds or now == np.inf:
            return REACHED_TIME, num_records
        if record and num_records == len(whole):
            return RECORD_FULL, num_records
        if counters[NUM_FREE] == 0:
            return SLOTS_FULL, num_records
        s.clock[0] = now
        me = workers[worker]
        compute_seconds = now - me.start
        delay = version - me.version
        verdict, loss, complete = STALE, np.nan, False

        if delay < thresholds[index]:
            noise = 0.0
            if rules.noise != 0.0:
                noise = rules.noise * inverse_normal_cdf(_unit(me.noise_key, me.sequence))
            loss = quadratic_gradient(s.iterates[me.slot], noise, s.gradient)
            verdict = ACCEPTED if math.isfinite(_sum(s.gradient)) else INVALID
        counters[verdict] += 1
        if verdict == ACCEPTED:
            me.accepted += 1
            me.used += compute_seconds
            complete = True
            if batch > 1:
                if counters[COLLECTED] == 0:
                    total[:] = s.gradient
                else:
                    total += s.gradient
                counters[COLLECTED] += 1
                complete = counters[COLLECTED] == batch
                if complete:
                    total /= batch
                    counters[COLLECTED] = 0
        else:
            me.wasted += compute_seconds
            if verdict == STALE:
                me.stale += 1
            else:
                me.invalid += 1
        if record:
            whole[num_records, 0] = worker
            whole[num_records, 1] = me.sequence
            whole[num_records, 2] = me.version
            whole[num_records, 3] = version
            whole[num_records, 4] = verdict
            reals[num_records, 0] = now
            reals[num_records, 1] = loss
            reals[num_records, 2] = compute_seconds
            num_records += 1

        if complete:
            eta = etas[index]
            if rules.adaptive:
                eta = eta * num_workers / max(num_workers, delay, 1)
            gradient = s.gradient if batch == 1 else total
            square = _momentum(s.momentum, gradient, s.direction, alphas[index], rules.nesterov)
            old = counters[CURRENT]
            counters[NUM_FREE] -= 1
            new = free[counters[NUM_FREE]]
            _step(
                s.iterates[old], s.direction, math.sqrt(square), eta, rules.weight_decay, rules.oracle,
                rules.coefficients, s.iterates[new],
            )  # fmt: skip
            version += 1
            counters[VERSION] = version
            counters[CURRENT] = new
            slots[new].version, slots[new].users, slots[new].first = version, 0, -1
            if rules.bounded:
                s.recent[version % len(s.recent)] = new
            if slots[old].users == 0:
                _release(slots, free, counters, old)

        _detach(workers, slots, free, counters, worker)
        if verdict == ACCEPTED and rules.waits and not complete:
            s.waiting[counters[WAITING]] = worker
            counters[WAITING] += 1
            times[0] = np.inf
            _sift_down(workers, times, heap, 0)
        else:
            begin(workers, slots, times, heap, counters, now, jitter, worker, True)
        if complete:
            if counters[WAITING] > 0:
                for i in range(counters[WAITING]):
                    begin(workers, slots, times, heap, counters, now, jitter, s.waiting[i], False)
                counters[WAITING] = 0
                heapify(workers, times, heap)
            if rules.bounded:
                while counters[OLDEST] <= version - thresholds[index + 1]:
                    slot = s.recent[counters[OLDEST] % len(s.recent)]
                    if slots[slot].version == counters[OLDEST]:
                        if rules.interrupt:
                            _restart(workers, slots, times, heap, free, counters, now, jitter, slot)
                        else:
                            _abandon(workers, slots, free, counters, slot)
                    counters[OLDEST] += 1
