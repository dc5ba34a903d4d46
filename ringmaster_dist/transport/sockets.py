"""What this process and this machine have open: to find an agent's listener, and to keep others away from it.

A TensorPipe agent listens on loopback and serves whoever connects, other users of the machine included. The kernel can
refuse them. A socket filter (classic BPF) on the listening socket drops every attempt to connect except from one
source address and port, which the tunnel's own socket holds. Where the kernel keeps filters for privileged users, the
listener takes only packets that are signed with a key (TCP's MD5 option): slower for tensors, just as closed. Linux.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringmaster_dist.transport.streams import shut

LOOPBACK = "127.0.0.1"
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER; the socket module does not name it
_LOAD_BYTE, _LOAD_HALF, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x28, 0x20, 0x54, 0x15, 0x06
_PASS, _DROP = 0xFFFFFFFF, 0
_SIGNED, _FLAG_PREFIX = 32, 1  # TCP_MD5SIG_EXT, TCP_MD5SIG_FLAG_PREFIX
_SYN, _SYN_OR_ACK, _FLAGS = 0x02, 0x12, 13  # in a TCP header, where the filter begins to read
_IP_SOURCE = (-0x100000 + 12) & 0xFFFFFFFF  # SKF_NET_OFF: in the IP header before it


def close_to_others(listener: socket.socket) -> bytes:
    """From now on only `connect_alone` connects to it. Returns the key for that; none where a filter does it.

    Connections that were accepted before are left as they are. Raises OSError where the kernel knows neither way.
    """
    try:
        _only_from(listener, 0)
    except OSError:
        key = os.urandom(32)
        _sign(listener, key)
        return key
    return b""


def connect_alone(listener: socket.socket, key: bytes) -> socket.socket:
    """Connects to a listener that nobody else can connect to meanwhile, or afterwards. Raises OSError."""
    connection = socket.socket()
    try:
        connection.bind((LOOPBACK, 0))
        if key:
            _sign(connection, key)
        else:
            _only_from(listener, connection.getsockname()[1])
        connection.settimeout(5.0)
        connection.connect(listener.getsockname())
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    finally:
        if not key:
            _only_from(listener, 0)
    return connection


def _only_from(listener: socket.socket, port: int) -> None:
    """The listener can be connected to from this port of 127.0.0.1 alone; 0: from nowhere."""
    (loopback,) = struct.unpack("!I", socket.inet_aton(LOOPBACK))
    program = [
        (_LOAD_BYTE, 0, 0, _FLAGS),
        (_AND, 0, 0, _SYN_OR_ACK),
        (_JUMP_IF_EQUAL, 0, 5, _SYN),  # anything but the first packet of a connection passes
        (_LOAD_HALF, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 2, port),
        (_LOAD_WORD, 0, 0, _IP_SOURCE),
        (_JUMP_IF_EQUAL, 1, 0, loopback),
        (_RETURN, 0, 0, _DROP),
        (_RETURN, 0, 0, _PASS),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))


def _sign(one: socket.socket, key: bytes) -> None:
    """Every packet of the socket's connections, to and from any IPv4 address, is signed with the key."""
    anybody = struct.pack("=H", socket.AF_INET).ljust(128, b"\0")  # struct tcp_md5sig: a sockaddr_storage first
    lengths = struct.pack("=BBHi", _FLAG_PREFIX, 0, len(key), 0)
    one.setsockopt(socket.IPPROTO_TCP, _SIGNED, anybody + lengths + key.ljust(80, b"\0"))


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """This process's TCP sockets, each with its descriptor and, for a moment, a copy to look at."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    yield int(name), one
        except OSError:  # closed meanwhile
            continue


def own_listener(port: int) -> tuple[int, socket.socket]:
    """The socket of this process that listens at a port of loopback: its descriptor, and a copy to keep."""
    for descriptor, one in own_sockets():
        if one.getsockname() == (LOOPBACK, port) and is_listening(one):
            return descriptor, one.dup()
    raise OSError(f"no socket of this process listens at {LOOPBACK}:{port}")


def is_listening(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def is_own_peer(connection: socket.socket) -> bool:
    """Whether the other end of a loopback connection is a socket of this very process."""
    wanted = connection.getpeername(), connection.getsockname()
    return any(_ends(one) == wanted for _, one in own_sockets())


def _ends(one: socket.socket) -> tuple[Any, Any] | None:
    """Its own and its peer's address. Both matter: another process may have a connection from the same port."""
    try:
        return one.getsockname(), one.getpeername()
    except OSError:  # it is not connected
        return None


def cut_accepted(port: int) -> None:
    """Ends the connections that were made to a listener of this process before it was closed to others."""
    for _ in range(2):  # once more, for one that the agent was just about to accept
        for _, one in own_sockets():
            if one.getsockname()[1] == port and not is_listening(one):
                shut(one)
        time.sleep(0.01)


def process_has(process: int, local: tuple[str, int], remote: tuple[str, int]) -> bool:
    """Whether a process of this machine has the TCP connection between these two ends."""
    wanted = [_in_proc(local), _in_proc(remote)]
    table = Path("/proc/net/tcp6" if ":" in local[0] else "/proc/net/tcp").read_text().splitlines()[1:]
    inodes = {f"socket:[{fields[9]}]" for fields in map(str.split, table) if fields[1:3] == wanted}
    folder = f"/proc/{process}/fd"
    try:
        return any(_link(f"{folder}/{name}") in inodes for name in os.listdir(folder))
    except OSError:  # it has ended, or is another user's
        return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def _in_proc(address: tuple[str, int]) -> str:
    """As /proc/net/tcp and tcp6 write it: words of 32 bits, in the machine's order."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, address[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
