"""Addresses as users write them, HOST:PORT with brackets around an IPv6 host, and the addresses of this machine."""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import socket
import struct
from typing import Any

_SIOCGIFCONF, _ENTRY_BYTES, _MOST_ENTRIES = 0x8912, 40, 256


class AddressError(Exception):
    """A server cannot listen at this address. The message says why and what to do."""


def split(address: str) -> tuple[str, int]:
    """The host and the port of ``10.0.0.1:29400``, ``name:29400`` or ``[fd00::1]:29400``. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address}: an IPv6 address needs brackets, such as [fd00::1]:29400")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host, int(port)


def joined(host: str, port: int) -> str:
    """The inverse of `split`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(address: tuple[Any, ...]) -> tuple[str, int]:
    """A socket's address as host and port. An IPv4 host is written as such also on a dual-stack socket."""
    return str(address[0]).removeprefix("::ffff:").partition("%")[0], int(address[1])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host. A name is resolved first; an unknown name is not loopback."""
    try:
        return ipaddress.ip_address(resolve(host)[1]).is_loopback
    except OSError:
        return False


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """The address of a name. An IPv4 address is preferred. Blocks for the DNS. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # such as for a..b
        raise OSError(f"{host!r} is not a name") from error
    family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0]).partition("%")[0]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; at 0.0.0.0 or ::, it listens on every interface. Raises AddressError, or OSError."""
    family, address = resolve(host)
    try:
        both = family == socket.AF_INET6 and ipaddress.ip_address(address).is_unspecified
        return socket.create_server((address, port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise AddressError(f"server.host={host} is not an address of this machine; it has {elsewhere()}") from error
        raise


def check(host: str, port: int) -> None:
    """Raises AddressError if a server cannot listen at this address now."""
    try:
        listen(host, port).close()
    except OSError as error:
        raise AddressError(unavailable(host, port, error)) from error


def unavailable(host: str, port: int, error: OSError) -> str:
    """Why a server cannot listen at this address, and what to do."""
    return (
        f"server.host={host} server.port={port} cannot be listened on ({error.strerror}): choose another, or "
        "server.port=0"
    )


def published(host: str, port: int) -> str:
    """The address that workers are given for a server that listens at this host and port."""
    if ipaddress.ip_address(resolve(host)[1]).is_unspecified:
        host = next(iter(_public_addresses()), "127.0.0.1")
    return joined(host, port)


def elsewhere() -> str:
    """The addresses by which another machine may reach this one, as the last words of an error message."""
    public = [f"{address} ({name})" for address, name in _public_addresses().items()]
    return ", ".join(public) or "none: this machine has loopback alone"


def _public_addresses() -> dict[str, str]:
    return {address: name for address, name in local_addresses().items() if not is_loopback(address)}


def local_addresses() -> dict[str, str]:
    """This machine's IPv4 addresses, and the interface of each."""
    buffer = array.array("B", bytes(_ENTRY_BYTES * _MOST_ENTRIES))
    request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])  # struct ifconf
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (used,) = struct.unpack("i", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request)[:4])
    found = {}
    for start in range(0, used, _ENTRY_BYTES):  # struct ifreq: 16 bytes of name, then a sockaddr_in
        entry = buffer[start : start + _ENTRY_BYTES].tobytes()
        name = entry[:16].partition(b"\0")[0].decode().partition(":")[0]
        found[socket.inet_ntoa(entry[20:24])] = name
    return found
