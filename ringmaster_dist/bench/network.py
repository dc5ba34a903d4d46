"""Several machines on one: network namespaces, each with its own link to a bridge. It needs root and iproute2.

Everything is in namespaces that this module makes, with the process id in their names. They and their processes are
removed afterwards. A link can be narrow (tc tbf), long and lossy. A long or lossy link is a pair of TAP devices with
`frame_relay` between them, because not every kernel has netem. That needs /dev/net/tun.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ringmaster_dist.bench import frame_relay

SUBNET = "10.99.77"


def missing() -> str:
    """What this process needs to make networks and does not have. Empty if it has all."""
    if os.geteuid() != 0:
        return "root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "ip and tc of iproute2"
    if subprocess.run(["ip", "netns", "add", f"rm{os.getpid()}"], capture_output=True).returncode != 0:
        return "the right to make network namespaces"
    sh(f"ip netns del rm{os.getpid()}")
    return "" if Path("/dev/net/tun").exists() else "/dev/net/tun"


def sh(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{line}: {done.stderr.strip()}")


class Network:
    """A bridge and the machines on it, as a context manager that removes them. One thread enters."""

    def __init__(self) -> None:
        self.tag = f"rm{os.getpid()}"
        self.hub = f"{self.tag}-hub"
        self.machines: list[str] = []
        self.relays: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        sh(f"ip netns add {self.hub}")
        sh(f"ip -n {self.hub} link add bridge type bridge")
        sh(f"ip -n {self.hub} link set bridge up")
        return self

    def __exit__(self, *exception: object) -> None:
        for relay in self.relays:
            relay.kill()
            relay.wait()
        for name in [*self.machines, "hub"]:
            sh(f"ip netns del {self.tag}-{name}")

    def machine(self, name: str, *, delay_seconds: float = 0.0, loss: float = 0.0) -> str:
        """Adds a machine and returns its address. The delay is that of one direction."""
        space, address = self.space(name), f"{SUBNET}.{len(self.machines) + 1}"
        sh(f"ip netns add {space}")
        self.machines.append(name)
        if delay_seconds or loss:
            ends = [self.hub, name, space, "uplink", str(delay_seconds), str(loss)]
            relay = subprocess.Popen([sys.executable, frame_relay.__file__, *ends], stdout=subprocess.PIPE, text=True)
            self.relays.append(relay)
            assert relay.stdout is not None
            if relay.stdout.readline() != "ready\n":
                raise RuntimeError(f"the long link of {name} could not be made")
        else:
            sh(f"ip -n {self.hub} link add {name} type veth peer name uplink netns {space}")
        sh(f"ip -n {self.hub} link set {name} master bridge up")
        sh(f"ip -n {space} addr add {address}/24 dev uplink")
        sh(f"ip -n {space} link set uplink up")
        sh(f"ip -n {space} link set lo up")
        return address

    def narrow(self, name: str, rate: str) -> None:
        """Limits the rate in both directions, as tc writes it, such as 10mbit."""
        for space, device in ((self.space(name), "uplink"), (self.hub, name)):
            sh(f"tc -n {space} qdisc add dev {device} root tbf rate {rate} burst 16kb latency 500ms")

    def space(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def at(self, name: str) -> list[str]:
        """Returns the words before a command that run it on this machine. The machine has its own process ids, because
        TensorPipe takes two processes that share them for one machine. Then tensors would not use the link."""
        own_processes = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.space(name), *own_processes]
