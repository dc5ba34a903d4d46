"""A long, lossy link: ``python frame_relay.py SPACE DEVICE SPACE DEVICE DELAY_SECONDS LOSS``.

Makes a TAP device in each of two network namespaces and carries frames between them. Each frame is delayed, and a
seeded share of them is lost. Prints "ready", and on SIGTERM the number of lost frames. It is a program of its own.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import sys
import time

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000


def tap(space: str, name: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def main() -> None:
    ends = [tap(sys.argv[1], sys.argv[2]), tap(sys.argv[3], sys.argv[4])]
    delay, loss, dice, lost = float(sys.argv[5]), float(sys.argv[6]), random.Random(5), 0
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    print("ready", flush=True)
    under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while not ending:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.2
        for source in select.select(ends, [], [], wait)[0]:
            frame = os.read(source, 65536)
            if dice.random() < loss:
                lost += 1
            else:
                under_way.append((time.monotonic() + delay, ends[1 - ends.index(source)], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, target, frame = under_way.popleft()
            try:
                os.write(target, frame)
            except OSError:  # that side is down
                lost += 1
    print(lost, flush=True)


if __name__ == "__main__":
    main()
