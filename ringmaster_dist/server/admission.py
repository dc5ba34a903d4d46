"""Decides whether a worker may join, and when the run starts. Everything here happens under the lock of the service."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable

from ringmaster_dist.protocol import PROTOCOL_VERSION, JoinRequest

log = logging.getLogger(__name__)

_MOST_SLOTS = 1_000_000
_MOST_RANKS = 1_000


def unfit(slot: int, ranks: int) -> str:
    """Says why there is no such seat. Empty if there is."""
    if not 0 <= slot < _MOST_SLOTS:
        return f"slot {slot} is not a place of a delay profile: 0 to {_MOST_SLOTS - 1}"
    return "" if 1 <= ranks <= _MOST_RANKS else f"{ranks} ranks are not a group: 1 to {_MOST_RANKS}"


class Admission:
    def __init__(self, token: str, expected_workers: int, start_seconds: float, clock: Callable[[], float]) -> None:
        """The run starts when ``expected_workers`` wait, or ``start_seconds`` after the first of them joined."""
        self._token, self._clock = token, clock
        self._expected_workers, self._start_seconds = expected_workers, start_seconds
        self._first_join: float | None = None

    def refusal(self, request: object) -> str:
        """Says why the worker may not join. Empty if it may."""
        if not (isinstance(request, JoinRequest) and request.is_well_formed()):
            return "what it joined with is not a request to join"
        if request.protocol_version != PROTOCOL_VERSION:
            return f"the worker speaks protocol {request.protocol_version}, the server {PROTOCOL_VERSION}"
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            log.warning("a join with a wrong token was refused")
            return "the token is not that of this run"
        return unfit(0 if request.slot == -1 else request.slot, request.ranks)

    def note_join(self) -> None:
        if self._first_join is None:
            self._first_join = self._clock()

    def is_start_due(self, num_waiting: int) -> bool:
        if self._first_join is None or num_waiting == 0:
            return False
        return num_waiting >= self._expected_workers or self._clock() - self._first_join >= self._start_seconds
