"""The compiled lane: the simulator's loop around the quadratic, in machine code (its arithmetic is in kernels.py).

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

from ringmaster_dist.simulation.kernels import (
    inverse_normal_cdf,
    move_momentum,
    quadratic_gradient,
    take_step,
    total_of,
    unit,
)

# Why `advance` returned.
REACHED_VERSION, REACHED_TIME, RECORD_FULL, SLOTS_FULL = range(4)
# Indices into State.counters.
VERSION, CURRENT, NUM_FREE, COLLECTED, WAITING, OLDEST, ACCEPTED, STALE, INVALID = range(9)

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
    radius: float
    weight_decay: float
    oracle: int
    coefficients: Any


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
    return now + me.base * (1.0 + jitter * -inverse_normal_cdf(0.5 * unit(me.jitter_key, me.sequence)))


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
                noise = rules.noise * inverse_normal_cdf(unit(me.noise_key, me.sequence))
            loss = quadratic_gradient(s.iterates[me.slot], noise, s.gradient)
            verdict = ACCEPTED if math.isfinite(total_of(s.gradient)) else INVALID
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
            square = move_momentum(s.momentum, gradient, s.direction, alphas[index], rules.nesterov)
            old = counters[CURRENT]
            counters[NUM_FREE] -= 1
            new = free[counters[NUM_FREE]]
            take_step(
                s.iterates[old], s.direction, math.sqrt(square), eta, rules.radius, rules.weight_decay,
                rules.oracle, rules.coefficients, s.iterates[new],
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
