"""Two hosts on this machine: network namespaces with a link between them, for benches of what crosses a network.

Needs root and iproute2. The link may be as slow as a real one (token bucket, ``tc``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

ADDRESSES = ("10.219.0.1", "10.219.0.2")


def available() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


class Link:
    """Two namespaces; `inside` says how to start a program in one of them. Gone when the block ends."""

    def __init__(self, rate: str = "") -> None:
        """``rate`` as tc takes it, such as 1gbit; empty: as fast as the machine is."""
        self._rate = rate
        self._names = [f"ringmaster-{os.getpid()}-{side}" for side in "ab"]

    def __enter__(self) -> Link:
        devices = [f"rm{os.getpid() % 100000}{side}" for side in "ab"]
        for name in self._names:
            _ip("netns", "add", name)
        _ip("link", "add", devices[0], "netns", self._names[0], "type", "veth", "peer", "name", devices[1],
            "netns", self._names[1])  # fmt: skip
        for name, device, address in zip(self._names, devices, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            for one in ("lo", device):
                _ip("-n", name, "link", "set", one, "up")
            if self._rate:
                tc = ["tc", "-n", name]
                _run(*tc, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1")
                _run(*tc, "class", "add", "dev", device, "parent", "1:", "classid", "1:1", "htb", "rate", self._rate)
        return self

    def __exit__(self, *exception: Any) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def inside(self, side: int) -> list[str]:
        return ["ip", "netns", "exec", self._names[side]]


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
