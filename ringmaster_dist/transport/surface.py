"""The functions a worker calls on the server, found by name. They hand over to whoever serves in this process.

`join`, `push` and `await_stale` answer with a future, so that a worker that waits holds no thread of the server.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.distributed import rpc

from ringmaster_dist.protocol import Interruptions, JoinRequest, Push, Reply, Staleness, Welcome


class Handlers(Protocol):
    """What the serving side implements. Called from RPC threads, several at once; must not raise."""

    def join(self, request: JoinRequest) -> torch.futures.Future[Welcome]: ...

    def fetch(self, session: str, term: int, known_version: int, interruptions: Interruptions) -> Reply: ...

    def push(self, session: str, push: Push) -> torch.futures.Future[Reply]: ...

    def await_stale(self, session: str, term: int, version: int) -> torch.futures.Future[Staleness]: ...

    def leave(self, session: str) -> None: ...


_serving: list[Handlers] = []


def serve(handlers: Handlers) -> None:
    _serving[:] = [handlers]


@rpc.functions.async_execution
def join(request: JoinRequest) -> torch.futures.Future[Welcome]:
    return _serving[0].join(request)


def fetch(session: str, term: int, known_version: int, interruptions: Interruptions) -> Reply:
    return _serving[0].fetch(session, term, known_version, interruptions)


@rpc.functions.async_execution
def push(session: str, push: Push) -> torch.futures.Future[Reply]:
    return _serving[0].push(session, push)


@rpc.functions.async_execution
def await_stale(session: str, term: int, version: int) -> torch.futures.Future[Staleness]:
    return _serving[0].await_stale(session, term, version)


def leave(session: str) -> None:
    _serving[0].leave(session)
