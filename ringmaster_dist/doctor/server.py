"""A server elsewhere, as a worker on this machine would meet it. Nothing here joins the run or disturbs it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

from ringmaster_dist.doctor import Finding
from ringmaster_dist.protocol import Interruptions
from ringmaster_dist.transport.about import Reader, digest, here
from ringmaster_dist.transport.star import Client, Unreachable

_CONNECT_SECONDS, _CALL_SECONDS = 3.0, 10.0
_SKEW_SECONDS = 2.0


def server_findings(host: str, port: int, token: str | None) -> Iterator[Finding]:
    """Stops where going on makes no sense."""
    where = f"{host}:{port}"
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        yield Finding("name", False, f"{host} has no address: check the spelling, or use the IP address")
        return
    yield Finding("name", True, f"{host} is {address}")
    try:
        reader = Reader(host, port, _CONNECT_SECONDS)
    except OSError as error:
        why = error.strerror or "no answer in time"
        yield Finding("store", False, f"{where} cannot be reached ({why}): is the run going on (RUN_DIR/address), is "
                      "server.host an address other machines can reach, does a firewall stand between?")  # fmt: skip
        return
    except RuntimeError:
        yield Finding("store", False, f"{where} answers, but not as a ringmaster server: check the port")
        return
    about = reader.about()
    if about is None:
        yield Finding("store", False, f"{where} is a store, but of no ringmaster server that describes itself: check "
                      "the port, and that the server's version is this one")  # fmt: skip
        return
    yield Finding("store", True, f"{where} answers")
    yield _versions(about)
    yield _rpc_address(reader.rpc_address(), str(address))
    yield _rpc(where)
    yield _token(token, about)
    yield _clock(reader.clock_skew_seconds())


def _versions(about: dict[str, object]) -> Finding:
    mine = here()
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


def _rpc_address(published: str, server: str) -> Finding:
    host = published.partition("://")[2].rpartition(":")[0].strip("[]")
    if not host:
        return Finding("RPC address", False, "the server has published none: it is starting or ending; try again")
    if ipaddress.ip_address(host).is_loopback and not ipaddress.ip_address(server).is_loopback:
        return Finding("RPC address", False, f"the server's agent listens on {host}, where nobody else gets to: "
                       "start it with TP_SOCKET_IFNAME=<its interface>")  # fmt: skip
    return Finding("RPC address", True, published)


def _rpc(where: str) -> Finding:
    """A call that any server answers to anybody: it does not know this session."""
    try:
        client = Client(where, connect_seconds=_CONNECT_SECONDS, call_seconds=_CALL_SECONDS)
        reply = client.fetch("doctor", 0, 0, Interruptions())
        client.close()
    except Unreachable:
        return Finding("RPC", False, "a call was not answered: TensorPipe opens ports of its own choosing, so there "
                       "has to be an open network between the machines, not single ports")  # fmt: skip
    return Finding("RPC", True, "a call was answered" + ("; the run is over" if reply.ended else ""))


def _token(token: str | None, about: dict[str, object]) -> Finding:
    if token is None:
        return Finding("token", True, "not looked at: give token_file=RUN_DIR/token, or set RINGMASTER_TOKEN")
    if digest(token) == about["token"]:
        return Finding("token", True, "is that of this run")
    return Finding("token", False, "is not that of this run: copy RUN_DIR/token from the server's machine")


def _clock(skew: float | None) -> Finding:
    if skew is None:
        return Finding("clock skew", False, "the server does not tell the time any more: it has ended, or hangs")
    if abs(skew) < _SKEW_SECONDS:
        return Finding("clock skew", True, f"{skew:+.2f} s")
    return Finding("clock skew", False, f"this clock is {skew:+.1f} s from the server's; training does not mind, dates "
                   "and logs do: timedatectl set-ntp true on both")  # fmt: skip
