"""Sockets of this machine: keeps other programs away from an agent's listener, and says which process has a connection.

A TensorPipe agent listens on loopback and serves every program that connects, also those of other users. The kernel can
refuse them. A socket filter (classic BPF) on the listening socket drops every attempt to connect, except from one
source address and port, which a socket of the tunnel holds. Some kernels keep filters for privileged users. There the
listener accepts only packets that are signed with a key (TCP's MD5 option), which is slower for tensors and just as
closed. All of this is Linux.
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
_CONNECT_SECONDS = 5.0  # a connection to the agent is given up after this long
_CUT_PAUSE_SECONDS = 0.01  # the agent may take this long to accept a connection that is already queued
# SO_ATTACH_FILTER and opcodes of classic BPF, from linux/filter.h.
_ATTACH_FILTER = 26
_LOAD_BYTE, _LOAD_HALF, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x28, 0x20, 0x54, 0x15, 0x06
_PASS, _DROP = 0xFFFFFFFF, 0
_SYN, _SYN_OR_ACK, _FLAGS = 0x02, 0x12, 13  # in a TCP header, where the filter begins to read
_IP_SOURCE = (-0x100000 + 12) & 0xFFFFFFFF  # SKF_NET_OFF: in the IP header before it
_MD5SIG_EXT, _MD5SIG_FLAG_PREFIX = 32, 1  # TCP_MD5SIG_EXT, TCP_MD5SIG_FLAG_PREFIX


def close_to_others(listener: socket.socket) -> bytes:
    """From now on only `connect_alone` can connect. Returns the key for that, which is empty where a filter is used.

    Connections that were accepted before stay as they are. Raises OSError if the kernel offers neither way.
    """
    try:
        _accept_only_from(listener, 0)
    except OSError:
        key = os.urandom(32)
        _sign(listener, key)
        return key
    return b""


def connect_alone(listener: socket.socket, key: bytes) -> socket.socket:
    """Connects to a closed listener. Nobody else can connect meanwhile or afterwards. Raises OSError."""
    connection = socket.socket()
    try:
        connection.bind((LOOPBACK, 0))
        if key:
            _sign(connection, key)
        else:
            _accept_only_from(listener, connection.getsockname()[1])
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(listener.getsockname())
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    finally:
        if not key:
            _accept_only_from(listener, 0)
    return connection


def _accept_only_from(listener: socket.socket, port: int) -> None:
    """The listener accepts connections from this port of 127.0.0.1 alone, and from nowhere if it is 0."""
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
    any_address = struct.pack("=H", socket.AF_INET).ljust(128, b"\0")  # struct tcp_md5sig: a sockaddr_storage first
    lengths = struct.pack("=BBHi", _MD5SIG_FLAG_PREFIX, 0, len(key), 0)
    one.setsockopt(socket.IPPROTO_TCP, _MD5SIG_EXT, any_address + lengths + key.ljust(80, b"\0"))


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """This process's TCP sockets: each descriptor, with a duplicate that is closed after the iteration step."""
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
    """The socket of this process that listens at a port of loopback: its descriptor, and a duplicate to keep."""
    for descriptor, one in own_sockets():
        if one.getsockname() == (LOOPBACK, port) and _is_listening(one):
            return descriptor, one.dup()
    raise OSError(f"no socket of this process listens at {LOOPBACK}:{port}")


def _is_listening(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def is_own_peer(connection: socket.socket) -> bool:
    """Whether the other end of a loopback connection is a socket of this very process."""
    wanted = connection.getpeername(), connection.getsockname()
    return any(_both_addresses(one) == wanted for _, one in own_sockets())


def _both_addresses(one: socket.socket) -> tuple[Any, Any] | None:
    """Its own and its peer's address. Both matter: another process may have a connection from the same port."""
    try:
        return one.getsockname(), one.getpeername()
    except OSError:  # it is not connected
        return None


def cut_accepted(port: int) -> None:
    """Ends the connections that were made to a listener of this process before it was closed to others."""
    for _ in range(2):  # twice, for a connection that the agent was just about to accept
        for _, one in own_sockets():
            if one.getsockname()[1] == port and not _is_listening(one):
                shut(one)
        time.sleep(_CUT_PAUSE_SECONDS)


def process_has(process: int, local: tuple[str, int], remote: tuple[str, int]) -> bool:
    """Whether a process of this machine has the TCP connection between these two addresses."""
    wanted = [_in_proc(local), _in_proc(remote)]
    table = Path("/proc/net/tcp6" if ":" in local[0] else "/proc/net/tcp").read_text().splitlines()[1:]
    inodes = {f"socket:[{fields[9]}]" for fields in map(str.split, table) if fields[1:3] == wanted}
    folder = f"/proc/{process}/fd"
    try:
        return any(_link(f"{folder}/{name}") in inodes for name in os.listdir(folder))
    except OSError:  # the process has ended, or belongs to another user
        return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def _in_proc(address: tuple[str, int]) -> str:
    """As /proc/net/tcp and tcp6 write it: words of 32 bits, in the machine's byte order."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, address[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
