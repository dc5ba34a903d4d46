"""What a worker says on stdout to the person that has started it. The main thread enters."""

from __future__ import annotations

import time

_FIRST_SECONDS, _SECONDS = 5.0, 30.0  # after the first gradient, and between two lines later


class Talk:
    """Says that the worker waits, has joined, how fast it computes, and how it ended. A silent one says nothing."""

    def __init__(self, *, silent: bool = True) -> None:
        self._silent = silent
        self._name = "worker"
        self._next_line = 0.0
        self._num, self._seconds, self._verdicts = 0, 0.0, {"accepted": 0, "stale": 0}

    def say(self, text: str) -> None:
        if not self._silent:
            print(f"{self._name}: {text}", flush=True)

    def waits(self, where: str) -> None:
        self.say(f"looks for the server at {where}")

    def joined(self, worker: int, device: str) -> None:
        self._name = f"worker-{worker}"
        self.say(f"joined, computes on {device}")
        self._next_line = 0.0

    def computed(self, seconds: float) -> None:
        """A gradient was computed in this time, with its pace."""
        self._num, self._seconds = self._num + 1, self._seconds + seconds

    def answered(self, verdict: str) -> None:
        """A push got this verdict."""
        self._verdicts[verdict] = self._verdicts.get(verdict, 0) + 1
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + (_SECONDS if self._next_line else _FIRST_SECONDS)
            judged = ", ".join(f"{count:,} {verdict}" for verdict, count in self._verdicts.items())
            self.say(f"{self._speed()}; {judged}")

    def is_over(self) -> None:
        self.say(f"the run is over, after {self._speed()}")

    def _speed(self) -> str:
        mean = f", {self._seconds / self._num:.3g} s each" if self._num else ""
        return f"{self._num:,} gradient{'s' * (self._num != 1)}{mean}"
