"""Addresses as users write them, HOST:PORT with brackets around an IPv6 host, and which of them this machine has."""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import socket
import struct

_SIOCGIFCONF, _ENTRY_BYTES, _MOST_ENTRIES = 0x8912, 40, 256


class AddressError(Exception):
    """A server cannot listen at this address; the message says why and what to do."""


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
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name counts as what it stands for here; an unknown one does not."""
    try:
        return ipaddress.ip_address(resolve(host)[1]).is_loopback
    except OSError:
        return False


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """The address that a name stands for, an IPv4 one if it has both. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # such as of a..b
        raise OSError(f"{host!r} is not a name") from error
    family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0]).partition("%")[0]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; at 0.0.0.0 or ::, on every interface. Raises AddressError, or OSError."""
    family, address = resolve(host)
    try:
        both = family == socket.AF_INET6 and ipaddress.ip_address(address).is_unspecified
        return socket.create_server((address, port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise AddressError(f"server.host={host} is not an address of this machine; it has {elsewhere()}") from error
        raise


def published(host: str, port: int) -> str:
    """What to tell workers about a server that listens there."""
    if ipaddress.ip_address(resolve(host)[1]).is_unspecified:
        host = next(iter(_shared_addresses()), "127.0.0.1")
    return joined(host, port)


def elsewhere() -> str:
    """The addresses another machine may know this one by, for an error's last words."""
    shared = [f"{address} ({name})" for address, name in _shared_addresses().items()]
    return ", ".join(shared) or "none: this machine has loopback alone"


def _shared_addresses() -> dict[str, str]:
    return {address: name for address, name in local_addresses().items() if not is_loopback(address)}


def local_addresses() -> dict[str, str]:
    """This machine's IPv4 addresses, and the interface of each."""
    memory = array.array("B", bytes(_ENTRY_BYTES * _MOST_ENTRIES))
    request = struct.pack("iL", len(memory), memory.buffer_info()[0])  # struct ifconf
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (used,) = struct.unpack("i", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request)[:4])
    found = {}
    for start in range(0, used, _ENTRY_BYTES):  # struct ifreq: 16 bytes of name, then a sockaddr_in
        entry = memory[start : start + _ENTRY_BYTES].tobytes()
        name = entry[:16].partition(b"\0")[0].decode().partition(":")[0]
        found[socket.inet_ntoa(entry[20:24])] = name
    return found
