"""The computations in flight, in the order in which they finish.

Each worker has at most one computation in flight, in one of two places. The *heap* holds those with a known finishing
time. The *pool* holds those that were started many at a time, with a lower bound on their finishing time. Most of these
are interrupted again before they finish, and then their exact time is never needed. When the next finish in the heap is
not before every bound in the pool, the computations with the lowest bounds move to the heap.

So it costs a few vector operations to start many computations, and a heap push to start one. Of two computations that
finish at the same time, the one of the smaller worker index comes first.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from ringmaster_dist.simulation.speeds import Floats, Ints, Speeds

IDLE = -1  # the version of a worker that has nothing in flight
_FIRST_DRAW = 16  # how many leave the pool at first; doubles with each further draw
_PARTS_PER_DRAW = 16
_FEW = 8  # below this many, starting one by one is quicker than in bulk
_PRUNE_ABOVE = 256


class Arrival(NamedTuple):
    """A finished computation. Tuples of this order sort by time, then worker."""

    time: float
    worker: int
    sequence: int


class Arrivals:
    """Starts computations and returns them as they finish. A worker that is started again drops what it was doing."""

    def __init__(self, speeds: Speeds) -> None:
        num_workers = speeds.num_workers
        # By worker, of its newest computation:
        self.sequence: Ints = np.full(num_workers, -1, dtype=np.int64)
        self.version: Ints = np.full(num_workers, IDLE, dtype=np.int64)
        self.start: Floats = np.zeros(num_workers)  # virtual seconds
        self._bound: Floats = np.full(num_workers, np.inf)  # on its finish; infinite outside the pool
        self._speeds = speeds
        self._heap: list[Arrival] = []
        self._limit = math.inf  # everything in the pool finishes after this
        self._draw = _FIRST_DRAW
        self._prune_at = _PRUNE_ABOVE

    def begin(self, worker: int, version: int, now: float) -> None:
        sequence = int(self.sequence[worker]) + 1
        self.sequence[worker] = sequence
        self.version[worker] = version
        self.start[worker] = now
        self._bound[worker] = np.inf
        heappush(self._heap, Arrival(self._speeds.finish(worker, sequence, now), worker, sequence))

    def begin_many(self, workers: Ints, version: int, now: float) -> None:
        """The same for many workers, all different."""
        if len(workers) < _FEW:
            for worker in workers.tolist():
                self.begin(worker, version, now)
            return
        sequences = self.sequence.take(workers)
        sequences += 1
        self.sequence[workers] = sequences
        self.version[workers] = version
        self.start[workers] = now
        bounds = self._speeds.earliest(workers, sequences, now)
        self._bound[workers] = bounds
        self._limit = min(self._limit, math.nextafter(float(bounds.min()), -math.inf))
        self._draw = _FIRST_DRAW
        if len(self._heap) > self._prune_at:
            self._heap = [a for a in self._heap if self.sequence[a.worker] == a.sequence]
            heapify(self._heap)
            self._prune_at = max(_PRUNE_ABOVE, 2 * len(self._heap))

    def pop(self) -> Arrival | None:
        """The next to finish, or None if nothing in flight ever will."""
        heap = self._heap
        while True:
            while heap and self.sequence[heap[0][1]] != heap[0][2]:  # started again since
                heappop(heap)
            if heap and heap[0][0] <= self._limit:
                return heappop(heap) if heap[0][0] < math.inf else None
            if self._limit == math.inf:
                return None
            self._draw_from_pool()

    def put_back(self, arrival: Arrival) -> None:
        """Undoes a `pop`: the computation is in flight again."""
        heappush(self._heap, arrival)

    def _draw_from_pool(self) -> None:
        """Moves the computations with the lowest bounds to the heap, more than ``_draw`` of them, or all that are left.

        The pool is cut into interleaved parts. The new limit is a low rank among their minima, so each part of a lower
        rank has a bound up to it. This is many times quicker than a partition of the whole pool.
        """
        bound = self._bound  # (num_workers,)
        num_parts = _PARTS_PER_DRAW * self._draw
        length = len(bound) // num_parts
        parts = bound[: length * num_parts].reshape(length, num_parts) if length > 1 else bound[None]
        minima = parts.min(axis=0)
        rank = min(self._draw, len(minima) - 1)
        self._limit = float(np.partition(minima, rank)[rank])
        chosen = np.flatnonzero(bound <= self._limit if self._limit < math.inf else bound < np.inf)
        self._draw *= 2
        for worker in chosen.tolist():
            sequence = int(self.sequence[worker])
            time = self._speeds.finish(worker, sequence, float(self.start[worker]))
            heappush(self._heap, Arrival(time, worker, sequence))
        bound[chosen] = np.inf
