"""Checks of a server, from where a worker on this machine stands. Nothing here joins the run or disturbs it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from ringmaster_dist.addresses import resolve, split
from ringmaster_dist.doctor import Finding
from ringmaster_dist.protocol import Interruptions
from ringmaster_dist.transport import AuthenticationFailed, Incompatible, Unreachable, identity
from ringmaster_dist.transport.agent import versions
from ringmaster_dist.transport.client import Client, dial, is_ringmaster

_CONNECT_SECONDS, _CALL_SECONDS = 3.0, 10.0  # how long it waits for a connection, and for an answer
_SKEW_SECONDS = 2.0  # clocks may differ by this much


def _ask_about(server: str, token: str, seconds: float) -> dict[str, Any]:
    """The versions that a server runs, and by how much its clock is behind. Blocks and raises as `dial` does."""
    stream = dial(server, identity.worker_context(token, identity.ABOUT), seconds)
    asked, text, buffer = time.time(), b"", memoryview(bytearray(4096))
    try:
        while (count := stream.receive_into(buffer)) and len(text) < len(buffer):
            text += buffer[:count]
        about: dict[str, Any] = dict.fromkeys(versions(), "unknown") | json.loads(text)
        about["skew_seconds"] = (asked + time.time()) / 2 - about["time"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreachable(f"the server at {server} did not say what it is ({error})") from error
    finally:
        stream.socket.close()
    return about


def server_findings(server: str, token: str | None) -> Iterator[Finding]:
    """Ends after the first failure that makes further checks pointless."""
    host, _ = split(server)
    try:
        yield Finding("name", True, f"{host} is {resolve(host)[1]}")
    except OSError:
        yield Finding("name", False, f"{host} has no address: check the spelling, or use the IP address")
        return
    if token is None:
        yield _port(server)
        yield Finding("token", None, "not given, so the server says nothing: give token_file=RUN_DIR/token, or set "
                      "RINGMASTER_TOKEN")  # fmt: skip
        return
    try:
        about = _ask_about(server, token, _CONNECT_SECONDS)
    except Unreachable as error:
        yield Finding("port", False, f"{error}: is the run still on (RUN_DIR/address), is server.host an address other "
                      "machines can reach, does a firewall stand between?")  # fmt: skip
        return
    except AuthenticationFailed as error:
        yield Finding("token", False, str(error))
        return
    yield Finding("port", True, f"{server} answers with TLS 1.3")
    yield Finding("token", True, "is that of this run")
    yield _versions(about)
    yield _call(server, token)
    yield _clock(about["skew_seconds"])


def _port(server: str) -> Finding:
    try:
        if is_ringmaster(server, _CONNECT_SECONDS):
            return Finding("port", True, f"a ringmaster server answers at {server}")
    except Unreachable as error:
        return Finding("port", False, f"{error}: check the port, and that the run is still on (RUN_DIR/address)")
    return Finding("port", False, f"{server} answers, but not as a ringmaster server: check the port")


def _versions(about: dict[str, Any]) -> Finding:
    mine = versions()
    if about["protocol"] != mine["protocol"] or about["program"] != mine["program"]:
        there = f"the server is ringmaster {about['program']} (protocol {about['protocol']})"
        return Finding("versions", False, f"{there}, here {mine['program']} ({mine['protocol']}): install the same")
    for name in ("torch", "python"):
        if _minor(about[name]) != _minor(mine[name]):
            there = f"the server has {name} {about[name]}, here is {mine[name]}"
            return Finding("versions", False, f"{there}: install the same, "
                           "or messages may not be understood")  # fmt: skip
    return Finding("versions", True, f"as the server's: torch {about['torch']}, Python {about['python']}")


def _minor(version: object) -> list[str]:
    return str(version).split("+")[0].split(".")[:2]


def _call(server: str, token: str) -> Finding:
    """Makes a call that every server answers, since it does not know this session."""
    try:
        client = Client(server, token=token, connect_seconds=_CONNECT_SECONDS, call_seconds=_CALL_SECONDS)
        reply = client.fetch("doctor", 0, 0, Interruptions())
        client.close()
    except (Unreachable, AuthenticationFailed, Incompatible) as error:
        return Finding("RPC", False, f"a call was not answered: {error}")
    return Finding("RPC", True, "a call was answered" + ("; the run is over" if reply.ended else ""))


def _clock(skew: float) -> Finding:
    if abs(skew) < _SKEW_SECONDS:
        return Finding("clock skew", True, f"{skew:+.2f} s")
    return Finding("clock skew", False, f"this clock is {skew:+.1f} s from the server's; training does not mind, dates "
                   "and logs do: timedatectl set-ntp true on both")  # fmt: skip
