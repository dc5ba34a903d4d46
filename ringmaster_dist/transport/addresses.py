"""Which of this machine's addresses a peer can reach, and by which interface.

TensorPipe listens and publishes where the variable TP_SOCKET_IFNAME says; without it, at what the host name stands for,
and where that fails, silently at 127.0.0.1. So the interface is chosen here: on the server by the address it is told to
listen on, on a worker by the route to the server. What the user has set is left as it is. IPv4.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct

_VARIABLE = "TP_SOCKET_IFNAME"
_GIVEN = os.environ.get(_VARIABLE)  # by the user; what is chosen here may change with the server's address
_SIOCGIFCONF, _ENTRY_BYTES, _MOST_ENTRIES = 0x8912, 40, 256


class AddressError(Exception):
    """A server cannot be reached at this address; the message says why and what to do."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name counts as what it stands for here; an unknown one does not."""
    try:
        return ipaddress.ip_address(resolve(host)).is_loopback
    except OSError:
        return False


def resolve(host: str) -> str:
    """The IPv4 address of a name. Raises OSError."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except UnicodeError as error:  # such as of a..b
        raise OSError(f"{host!r} is not a name") from error


def local_addresses() -> dict[str, str]:
    """This machine's addresses, and the interface of each."""
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


def elsewhere() -> str:
    """The addresses another machine may know this one by, for an error's last words."""
    shared = [f"{address} ({name})" for address, name in local_addresses().items() if not is_loopback(address)]
    return ", ".join(shared) or "none: this machine has loopback alone"


def listen_at(host: str) -> str:
    """The address to listen on, with TensorPipe told its interface. Raises AddressError, or OSError for a bad name."""
    address = resolve(host)
    if ipaddress.ip_address(address).is_unspecified:
        raise AddressError(
            f"server.host={host} is every address at once, but workers are told one: "
            f"give the one they can reach, of {elsewhere()}"
        )
    interface = local_addresses().get(address)
    if interface is None and not is_loopback(address):
        raise AddressError(f"server.host={host} is not an address of this machine; it has {elsewhere()}")
    _use(interface or "lo")
    return address


def route_to(host: str) -> None:
    """Tells TensorPipe the interface by which this machine reaches the server. Raises OSError."""
    address = resolve(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: the kernel only looks up the route
        mine = probe.getsockname()[0]
    _use("lo" if is_loopback(mine) else local_addresses().get(mine, "lo"))


def check_published(host: str, address: str, published: str) -> None:
    """Refuses an agent that says ``uv://127.0.0.1:PORT`` although its server listens for other machines."""
    where = published.partition("://")[2].rpartition(":")[0]
    if is_loopback(where) and not is_loopback(address):
        because = f"{_VARIABLE}={_GIVEN}" if _GIVEN else f"the interface of {address}"
        raise AddressError(
            f"server.host={host}: workers elsewhere would be sent to {where}, this machine's loopback ({because}): "
            f"set {_VARIABLE} to the interface they can reach, of {elsewhere()}"
        )


def _use(interface: str) -> None:
    if _GIVEN is None:
        os.environ[_VARIABLE] = interface
