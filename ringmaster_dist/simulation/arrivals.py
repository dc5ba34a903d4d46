"""The computations in flight, in the order in which they finish.

Two places hold them. The *heap* holds those whose finishing time is known. The *pool* holds, in arrays, those
that were started together (at the beginning, after an interruption) with only a lower bound on theirs: most of
them are interrupted again before they finish and never need more. When the heap's next finish is not before
every bound in the pool, the pool's lowest bounds move to the heap with their exact times.

So starting many costs a few vector operations, starting one costs a heap push, and ties go to the smaller
worker index.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from ringmaster_dist.simulation.speeds import Floats, Ints, Speeds

_FIRST_DRAW = 16  # how many leave the pool at first; doubles with each further draw
_FEW = 24  # below this many, starting one by one is quicker than in bulk
_PRUNE_ABOVE = 256


class Arrival(NamedTuple):
    """A finished computation. Tuples of this order sort by time, then worker."""

    time: float
    worker: int
    sequence: int


class Arrivals:
    """Starts computations and hands them back as they finish. Restarting a worker drops what it was doing."""

    def __init__(self, speeds: Speeds) -> None:
        num_workers = speeds.num_workers
        self.sequence: Ints = np.full(num_workers, -1, dtype=np.int64)  # of the newest computation
        self.version: Ints = np.zeros(num_workers, dtype=np.int64)  # it is computed at
        self.start: Floats = np.zeros(num_workers)  # when it began
        self._speeds = speeds
        self._heap: list[Arrival] = []
        self._bound: Floats = np.full(num_workers, np.inf)  # of those in the pool
        self._limit = np.inf  # all of the pool finishes after this
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
        """The same for distinct workers at once."""
        if len(workers) < _FEW:
            for worker in workers.tolist():
                self.begin(worker, version, now)
            return
        sequences = self.sequence[workers]
        sequences += 1
        self.sequence[workers] = sequences
        self.version[workers] = version
        self.start[workers] = now
        bounds = self._speeds.earliest(workers, sequences, now)
        self._bound[workers] = bounds
        self._limit = min(self._limit, float(np.nextafter(bounds.min(), -np.inf)))
        self._draw = _FIRST_DRAW
        if len(self._heap) > self._prune_at:
            self._heap = [a for a in self._heap if self.sequence[a.worker] == a.sequence]
            heapify(self._heap)
            self._prune_at = max(_PRUNE_ABOVE, 2 * len(self._heap))

    def pop(self) -> Arrival | None:
        """The next to finish, or None when nothing in flight ever will."""
        heap = self._heap
        while True:
            while heap and self.sequence[heap[0][1]] != heap[0][2]:  # restarted since
                heappop(heap)
            if heap and heap[0][0] <= self._limit:
                return heappop(heap) if heap[0][0] < np.inf else None
            if self._limit == np.inf:
                return None
            self._draw_from_pool()

    def put_back(self, arrival: Arrival) -> None:
        """Undoes a `pop`: the computation is in flight again."""
        heappush(self._heap, arrival)

    def _draw_from_pool(self) -> None:
        bound = self._bound
        rank = min(self._draw, len(bound) - 1)
        self._limit = float(np.partition(bound, rank)[rank])
        chosen = np.flatnonzero(bound <= self._limit if self._limit < np.inf else bound < np.inf)
        self._draw *= 2
        for worker in chosen.tolist():
            sequence = int(self.sequence[worker])
            time = self._speeds.finish(worker, sequence, float(self.start[worker]))
            heappush(self._heap, Arrival(time, worker, sequence))
        bound[chosen] = np.inf
