"""Serves the page of a run to a browser, by default on this machine, while the run is written. Only reads files.

Each request has a thread of its own. One thread at a time reads the files, and only if there is something new.
With ``metrics`` the same port also answers ``/metrics`` and ``/healthz``, under the same rules.
"""

from __future__ import annotations

import html
import os
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from ringmaster_dist.observe.exposition import CONTENT_TYPE, exposition, health
from ringmaster_dist.observe.page_data import page_data
from ringmaster_dist.observe.report import as_json, page, policy
from ringmaster_dist.observe.run_files import Recording, RunDirectoryError

_REFRESH_SECONDS = 2.0
_REQUEST_SECONDS = 5.0  # a connection without a request is closed then
_MOST_REQUESTS = 32  # at once; further connections are closed
_METRICS = {"/metrics", "/healthz"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_WAITING = (
    "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=1><title>waiting</title>"
    "<body style='font-family:system-ui;margin:3em'>{reason}. This page looks again by itself."
)


_NOTHING_YET = (RunDirectoryError, OSError, ValueError, KeyError)  # the files are not there, or not whole


def _user_of(port: int, own_port: int) -> int:
    """The user whose socket at this port is connected to our port on this machine, as the kernel says, or -1."""
    for table in filter(Path.exists, (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))):
        for line in table.read_text().splitlines()[1:]:
            _, local, remote, *rest = line.split()
            if [int(end.rpartition(":")[2], 16) for end in (local, remote)] == [port, own_port]:
                return int(rest[4])
    return -1


class _Answer(NamedTuple):
    text: str
    kind: str
    status: HTTPStatus = HTTPStatus.OK


class _Server(ThreadingHTTPServer):
    """An HTTP server that limits the number of its threads."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], pages: Mapping[str, Callable[[], _Answer]]) -> None:
        self.pages, self.open_pages = pages, _METRICS & pages.keys()
        self._slots = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__(address, _Handler)

    def is_for(self, client_address: Any, path: str = "") -> bool:
        """Whether the peer may ask. On loopback a page is for the user who serves it, and metrics are for all."""
        if self.server_address[0] not in _LOOPBACK or path in self.open_pages or (self.open_pages and not path):
            return True
        return _user_of(client_address[1], self.server_address[1]) in (os.getuid(), 0)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.is_for(client_address) and self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()


class Watcher:
    """Serves from its construction until `close`. Raises OSError if it cannot listen on the port."""

    def __init__(self, directory: Path, port: int = 0, host: str = "127.0.0.1", *, metrics: bool = False) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._recording: Recording | None = None
        self._stamp: tuple[Any, ...] = ()  # of what was read
        self._shown: tuple[Any, ...] = ()  # of what the page was made from
        self._data: dict[str, Any] = {}
        pages: dict[str, Callable[[], _Answer]] = {"/": self._page, "/data.json": self._json}
        if metrics:
            pages |= {"/metrics": self._metrics, "/healthz": self._health}
        self._server = _Server((host, port), pages)
        self.url = f"http://{host}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _page(self) -> _Answer:
        try:
            return _Answer(page(self._current(), _REFRESH_SECONDS), "text/html")
        except _NOTHING_YET as error:
            return _Answer(_WAITING.format(reason=html.escape(str(error))), "text/html")

    def _json(self) -> _Answer:
        return _Answer(as_json(self._current()), "application/json")

    def _metrics(self) -> _Answer:
        with self._lock:
            return _Answer(exposition(self._recorded(), time.time()), CONTENT_TYPE)

    def _health(self) -> _Answer:
        with self._lock:
            found = health(self._recorded(), time.time())
        status = HTTPStatus.OK if found.good else HTTPStatus.SERVICE_UNAVAILABLE
        return _Answer(found.reason + "\n", "text/plain", status)

    def _current(self) -> dict[str, Any]:
        """What the page shows now. Raises RunDirectoryError while there is nothing to show."""
        with self._lock:
            recording = self._recorded()
            if self._shown != self._stamp:
                self._data, self._shown = page_data([recording]), self._stamp
            return self._data

    def _recorded(self) -> Recording:
        """What the run has written so far, under the lock. Raises RunDirectoryError while there is nothing."""
        if self._recording is None:
            self._recording = Recording(self._directory)
        stamp = (*self._recording.stamp, self._recording.state)
        if stamp != self._stamp:
            self._recording.refresh()
            self._stamp = stamp
        return self._recording


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for the pages of its server that name this machine as their host."""

    server_version, sys_version = "ringmaster", ""
    timeout = _REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        if not self._is_meant():
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", "ask by the address that was printed")
        if not self.server.is_for(self.client_address, self.path):
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this page is for the user who serves it")
        if self.path not in self.server.pages:
            known = " and ".join(self.server.pages)
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", f"there is {known}")
        try:
            answer = self.server.pages[self.path]()
        except _NOTHING_YET as error:
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
        return self._answer(answer.status, answer.kind, answer.text)

    def _is_meant(self) -> bool:
        """Refuses DNS rebinding, where a foreign web page asks by a name that resolves to this machine."""
        bound = str(self.server.server_address[0])
        asked = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
        return bound not in _LOOPBACK or asked in _LOOPBACK

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", f"{policy()}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing, since the terminal shows the run."""
