"""Serves the page of a run to a browser, by default on this machine, while the run is written. Only reads files.

Each request has a thread of its own. One thread at a time reads the files, and only if there is something new.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ringmaster_dist.observe.page_data import page_data
from ringmaster_dist.observe.report import as_json, page
from ringmaster_dist.observe.run_files import Recording, RunDirectoryError

_REFRESH_SECONDS = 2.0
_REQUEST_SECONDS = 5.0  # a connection without a request is closed then
_MOST_REQUESTS = 32  # at once; further connections are closed
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_WAITING = (
    "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=1><title>waiting</title>"
    "<body style='font-family:system-ui;margin:3em'>{reason}. This page looks again by itself."
)


class _Server(ThreadingHTTPServer):
    """An HTTP server that limits the number of its threads."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], content: Callable[[], dict[str, Any]]) -> None:
        self.content = content
        self._slots = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
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

    def __init__(self, directory: Path, port: int = 0, host: str = "127.0.0.1") -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._recording: Recording | None = None
        self._stamp: tuple[Any, ...] = ()
        self._data: dict[str, Any] = {}
        self._server = _Server((host, port), lambda: self._current())
        self.url = f"http://{host}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _current(self) -> dict[str, Any]:
        """What the page shows now. Raises RunDirectoryError while there is nothing to show."""
        with self._lock:
            if self._recording is None:
                self._recording = Recording(self._directory)
            stamp = (*self._recording.stamp, self._recording.state)
            if stamp != self._stamp:
                self._recording.refresh()
                self._data, self._stamp = page_data([self._recording]), stamp
            return self._data


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for ``/`` and ``/data.json`` that name this machine as their host."""

    server_version, sys_version = "ringmaster", ""
    timeout = _REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        if not self._is_meant():
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", "ask by the address that was printed")
        if self.path not in ("/", "/data.json"):
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is / and /data.json")
        try:
            content = self.server.content()
        except (RunDirectoryError, OSError, ValueError, KeyError) as error:
            reason = html.escape(str(error))
            if self.path == "/":
                return self._answer(HTTPStatus.OK, "text/html", _WAITING.format(reason=reason))
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", reason)
        if self.path == "/":
            return self._answer(HTTPStatus.OK, "text/html", page(content, _REFRESH_SECONDS))
        return self._answer(HTTPStatus.OK, "application/json", as_json(content))

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
        self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing, since the terminal shows the run."""
