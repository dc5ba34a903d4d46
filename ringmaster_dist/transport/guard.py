"""Keeps an RPC agent reachable whatever strangers send to its port.

TensorPipe trusts who connects. A connection that is closed before it has introduced itself makes the agent stop
listening, for good and in silence: nobody can join any more. Bytes that are not TensorPipe's are taken for a length,
and memory for it is asked for: the loop thread ends in ``std::terminate``, which would end the process.

So a thread looks after the agent. One that has stopped listening is replaced; its connections go on being served. One
whose loop has broken is replaced too: the broken thread is put aside for good, its connections are cut, and the
workers connect anew. Nothing of this touches who serves: no update is lost and no verdict given twice.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger(__name__)

_LOOP_THREAD = "TP_UV_loop"  # how TensorPipe names it
_LOOK_SECONDS = 0.1
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 5.0  # before a replacement, for each one before it
_MOST_BROKEN = 64  # each leaves a thread and what it was sending behind; more than that ends the process

_broken = threading.Event()
_num_broken = 0


def _put_aside() -> None:
    """Called by C++ instead of ending the process. Returns for threads that are not TensorPipe's: that ends it."""
    global _num_broken
    with open(f"/proc/self/task/{threading.get_native_id()}/comm") as comm:
        if comm.read().strip() != _LOOP_THREAD or _num_broken >= _MOST_BROKEN:
            return
    _num_broken += 1
    _broken.set()
    threading.Event().wait()  # for ever: the thread has nowhere to return to


_handler = ctypes.CFUNCTYPE(None)(_put_aside)  # kept: C++ holds its address


def _catch_terminate() -> None:
    set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    set_terminate.restype = ctypes.c_void_p
    set_terminate(_handler)


class Guard:
    """Replaces the agent that ``start`` makes, whenever it cannot be reached any more.

    ``start`` makes a new agent, which becomes the current one, and returns it with the port it listens on.
    """

    def __init__(self, start: Callable[[], tuple[Any, int]]) -> None:
        self._start = start
        self._agents: list[Any] = []  # earlier ones too: to forget one would wait for its threads
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._begin()
        if sys.platform.startswith("linux"):
            _catch_terminate()
            self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """From now on nothing is replaced."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def num_replaced(self) -> int:
        return len(self._agents) - 1

    def _begin(self) -> None:
        agent, self._port = self._start()
        self._agents.append(agent)
        self._listener = next((fd for fd, one in _sockets(self._port) if _listens(one)), -1)
        self._identity = _identity(self._listener)

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            broken = _broken.is_set()
            if not broken and self._identity and _identity(self._listener) == self._identity:
                continue
            if self._closing.wait(min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * self.num_replaced)):
                return  # who does this again and again gets it more and more slowly
            lost = self._port
            if broken:
                _broken.clear()
                for _, one in _sockets(lost):
                    _shut(one)
            try:
                self._begin()
                what = "broken" if broken else "closed"
                log.warning("a stranger has %s the RPC port %d: another is open, %d", what, lost, self._port)
            except (OSError, RuntimeError) as error:  # such as too many open files
                self._identity = 0  # at the next look
                log.warning("the RPC port could not be opened again: %s", error)


def _sockets(port: int) -> Iterator[tuple[int, socket.socket]]:
    """This process's TCP sockets at a local port, each with its descriptor and, for a moment, a copy to look at."""
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                    yield int(name), one
        except OSError:  # closed meanwhile
            continue


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected any more
        return


def _identity(descriptor: int) -> int:
    """Of the open file behind a descriptor; 0 where there is none."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0
