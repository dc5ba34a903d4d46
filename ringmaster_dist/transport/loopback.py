"""Sockets of this machine: an agent's listener that is closed to other programs before it listens.

A TensorPipe agent listens on loopback and serves every program that connects, also those of other users. The kernel can
refuse them. A socket filter (classic BPF) on the socket drops every attempt to connect, except from one source address
and port, which a socket of the tunnel holds. Some kernels keep filters for privileged users. There the listener accepts
only packets that are signed with a key (TCP's MD5 option), which is slower for tensors and just as closed.

The socket is torch's own, and torch makes it and listens in one step. So the thread that makes an agent first asks the
kernel to hold every ``listen`` of its own, and of the threads that it starts, until this process allows it (seccomp's
user notification, which needs no privilege). Between the two the socket is closed to others. There is no moment in
which it is open. All of this is Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import queue
import select
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 5.0  # a connection to the agent is given up after this long
_POLL_MILLISECONDS = 50  # how often a thread that waits for `listen` looks whether the agent has failed
# SO_ATTACH_FILTER and opcodes of classic BPF, from linux/filter.h.
_ATTACH_FILTER = 26
_LOAD_BYTE, _LOAD_HALF, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x28, 0x20, 0x54, 0x15, 0x06
_PASS, _DROP = 0xFFFFFFFF, 0
_SYN, _SYN_OR_ACK, _FLAGS = 0x02, 0x12, 13  # in a TCP header, where the filter begins to read
_IP_SOURCE = (-0x100000 + 12) & 0xFFFFFFFF  # SKF_NET_OFF: in the IP header before it
_MD5SIG_EXT, _MD5SIG_FLAG_PREFIX = 32, 1  # TCP_MD5SIG_EXT, TCP_MD5SIG_FLAG_PREFIX
# From linux/seccomp.h and linux/prctl.h.
_SYSTEM_CALLS = {"x86_64": (317, 50), "aarch64": (277, 201)}  # of seccomp and of listen
_SET_NO_NEW_PRIVILEGES, _SET_FILTER, _NEW_LISTENER, _NO_SLOW_DOWN = 38, 1, 1 << 3, 1 << 2  # the last is SPEC_ALLOW
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _NOTIFICATION = 0xC0502100, struct.Struct("=Q8xi4x8x6Q")  # struct seccomp_notif: id, call, arguments
_SEND, _RESPONSE, _CONTINUE = 0xC0182101, struct.Struct("=QqiI"), 1  # struct seccomp_notif_resp


class NotClosed(RuntimeError):
    """This system cannot keep other programs of the machine away from torch's agent."""


class Listener(NamedTuple):
    """The listening socket of an agent."""

    descriptor: int  # the agent's own
    socket: socket.socket  # a duplicate, to keep
    key: bytes  # for `connect_alone`


def start_closed(start: Callable[[], None], *, insecure: bool = False) -> Listener:
    """Runs ``start``, which makes an agent. From its first moment the agent's listener accepts `connect_alone` only.

    Raises NotClosed where the system does not offer that, and what ``start`` raises. If it is ``insecure``, the
    listener is then closed as soon as it listens.
    """
    before = {descriptor for descriptor, _ in own_sockets()}
    announced: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()
    failures: list[Exception] = []

    def make() -> None:
        try:
            announced.put(_hold_listen())
        except OSError as error:
            announced.put(error)
            if not insecure:
                return
        try:
            start()
        except Exception as error:
            failures.append(error)

    maker = threading.Thread(target=make, name="agent", daemon=True)
    maker.start()
    held = announced.get()
    listener = _close_before_listen(held, maker) if isinstance(held, int) else None
    maker.join()
    if failures:
        raise failures[0]
    if isinstance(held, OSError) and not insecure:
        raise NotClosed(
            f"other users of this machine cannot be kept away from torch's RPC agent ({held}): allow the system calls "
            "prctl and seccomp (Linux 5.5 or newer; in a container, by its seccomp profile), or accept it with "
            "server.insecure=true"
        )
    if listener is None:
        new = (descriptor for descriptor, one in own_sockets() if descriptor not in before and _is_listening(one))
        listener = _closed(next(new))
    return listener


def _close_before_listen(held: int, maker: threading.Thread) -> Listener | None:
    """Closes the agent's socket to others and lets it listen. None if the agent has failed before that."""
    poll = select.poll()
    poll.register(held, select.POLLIN)
    try:
        while maker.is_alive():
            if not poll.poll(_POLL_MILLISECONDS):
                continue
            notification = bytearray(_NOTIFICATION.size)
            fcntl.ioctl(held, _RECEIVE, notification)
            number, _, descriptor, *_ = _NOTIFICATION.unpack(notification)
            listener = _closed(descriptor)
            fcntl.ioctl(held, _SEND, bytearray(_RESPONSE.pack(number, 0, 0, _CONTINUE)))
            return listener
    except OSError as error:
        raise NotClosed(f"torch's RPC agent cannot be closed to other users of this machine: {error}") from error
    finally:
        os.close(held)  # without an answer `listen` fails, and the agent's threads cannot listen again
    return None


def _hold_listen() -> int:
    """Holds every `listen` of this thread and of those that it starts, and returns where they are announced."""
    if platform.machine() not in _SYSTEM_CALLS:
        raise OSError(f"no system call is known for {platform.machine()}")
    seccomp, listen = _SYSTEM_CALLS[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    program = [(_LOAD_WORD, 0, 0, 0), (_JUMP_IF_EQUAL, 0, 1, listen), (_RETURN, 0, 0, _NOTIFY), (_RETURN, 0, 0, _ALLOW)]
    _code, described = _compiled(program)
    held = libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)  # of this thread and of those that it starts
    if held == 0:
        flags = ctypes.c_ulong(_NEW_LISTENER | _NO_SLOW_DOWN)
        held = libc.syscall(ctypes.c_long(seccomp), ctypes.c_ulong(_SET_FILTER), flags, described)
    if held < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(held)


def _closed(descriptor: int) -> Listener:
    """Closes a socket to others, by a filter or by a key. Raises OSError if the kernel offers neither."""
    listener, key = socket.socket(fileno=os.dup(descriptor)), b""
    try:
        _accept_only_from(listener, 0)
    except OSError:
        key = os.urandom(32)
        _sign(listener, key)
    return Listener(descriptor, listener, key)


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
    _code, described = _compiled(program)  # the kernel reads the code, which has to live until then
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)


def _compiled(program: list[tuple[int, int, int, int]]) -> tuple[Any, bytes]:
    """A program of classic BPF: its code, and a struct sock_fprog that points to it."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    return code, struct.pack("HL", len(program), ctypes.addressof(code))


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


# --- processes of one user ------------------------------------------------------------------------------------------
#
# Two processes may share memory if the kernel says that they are of one user of one machine. A server listens on a
# local socket whose name has its public port. A worker that has connected to that port says there which connection is
# its own, and the server says whether it has that connection. Either end then knows the other's process from the
# kernel. A proxy, such as that of ssh or a container, or a server elsewhere, has no part in it.

_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group
_MOST_ADDRESS_BYTES = 256
_GREETING_SECONDS = 0.5


def meet_neighbours(port: int) -> socket.socket | None:
    """Listens for workers of this user on this machine. None if the name is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_meeting_point(port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        return None
    return listener


def greet_neighbour(port: int, address: str) -> int:
    """Tells a server of this user on this machine that the connection from this HOST:PORT is of this process.

    Returns the server's process, or 0 if there is no such server. Another user may have taken the name, and never
    answer: that costs a moment at most.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_GREETING_SECONDS)
            connection.connect(_meeting_point(port))
            process, user = _peer_of(connection)
            if user != os.getuid():
                return 0
            connection.send(address.encode())
            return process if connection.recv(1) else 0
    except OSError:
        return 0


def meet(listener: socket.socket, is_here: Callable[[str, int], bool]) -> None:
    """Takes the greeting of one worker. ``is_here(address, process)`` says whether this end has that connection."""
    with contextlib.suppress(OSError, UnicodeError):
        connection, _ = listener.accept()
        with connection:
            process, user = _peer_of(connection)
            if user == os.getuid():
                connection.settimeout(_GREETING_SECONDS)
                if is_here(connection.recv(_MOST_ADDRESS_BYTES).decode(), process):
                    connection.send(b"+")


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end. Of a listening process, they are those at its `listen`."""
    size = _CREDENTIALS.size
    process, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return process, user


def _meeting_point(port: int) -> str:
    return f"\0ringmaster-{port}"
