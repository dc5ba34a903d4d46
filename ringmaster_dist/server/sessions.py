"""Sessions: what names a worker in its calls. Made from the run's token, so that a restarted server knows its own.

A session is ``worker.slot.nonce.mac``. Two sessions of one worker id differ in their nonce: a server that has given an
id anew after a restart does not mistake the earlier holder for the later one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple


class Holder(NamedTuple):
    worker: int
    slot: int  # its place in the delay profile


def digest(session: str) -> str:
    """What is kept of a session, in memory and in checkpoints: enough to recognise it, too little to use it."""
    return hashlib.sha256(session.encode()).hexdigest()


class Sessions:
    def __init__(self, token: str) -> None:
        self._key = token.encode()

    def issue(self, worker: int, slot: int) -> str:
        text = f"{worker}.{slot}.{secrets.token_hex(8)}"
        return f"{text}.{self._mac(text)}"

    def holder(self, session: str) -> Holder | None:
        """Whom it was issued to, by this server or an earlier one of the same run; None for a forgery."""
        text, _, mac = session.rpartition(".") if isinstance(session, str) and session.isascii() else ("", "", "")
        if not hmac.compare_digest(mac.encode(), self._mac(text).encode()):
            return None
        worker, slot, _ = text.split(".")
        return Holder(int(worker), int(slot))

    def _mac(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()[:32]
