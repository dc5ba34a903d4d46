"""Several machines on one: network namespaces, each with its own link to a bridge.

It needs root, iproute2 and /dev/net/tun.

Everything is in namespaces that this module makes, with the process id in their names. They and their processes are
removed afterwards. A link can be cut, be narrow (tc tbf), or be long and lossy. A long and lossy link is a pair of TAP
devices with `relay.py` between them, because not every kernel has netem.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUBNET = "10.99.77"
RELAY = Path(__file__).with_name("relay.py")


def require_namespaces():
    """Skips a test on a machine without namespaces. With CI=true it fails instead."""
    missing = ""
    if os.geteuid() != 0:
        missing = "root"
    elif not shutil.which("ip") or not shutil.which("tc"):
        missing = "ip and tc of iproute2"
    elif subprocess.run(["ip", "netns", "add", f"rm{os.getpid()}"], capture_output=True).returncode != 0:
        missing = "the right to make network namespaces"
    else:
        subprocess.run(["ip", "netns", "del", f"rm{os.getpid()}"], check=True)
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"network namespaces need {missing}, and CI has to run these tests")
    if missing:
        pytest.skip(f"network namespaces need {missing}")


def sh(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True)
    assert done.returncode == 0, f"{line}: {done.stderr}"


class Network:
    """A bridge and the machines on it, as a context manager that removes them."""

    def __init__(self) -> None:
        self._tag = f"rm{os.getpid()}"
        self._hub = f"{self._tag}-hub"
        self._machines: list[str] = []
        self._relays: list[subprocess.Popen] = []

    def __enter__(self) -> "Network":
        sh(f"ip netns add {self._hub}")
        sh(f"ip -n {self._hub} link add bridge type bridge")
        sh(f"ip -n {self._hub} link set bridge up")
        return self

    def __exit__(self, *exception: object) -> None:
        for relay in self._relays:
            relay.kill()
            relay.wait()
        for name in [*self._machines, "hub"]:
            sh(f"ip netns del {self._tag}-{name}")

    def machine(self, name: str, *, delay_seconds: float = 0.0, loss: float = 0.0) -> str:
        """Adds a machine and returns its address."""
        space, address = f"{self._tag}-{name}", f"{SUBNET}.{len(self._machines) + 1}"
        sh(f"ip netns add {space}")
        self._machines.append(name)
        if delay_seconds or loss:
            command = [sys.executable, str(RELAY), self._hub, name, space, "uplink", str(delay_seconds), str(loss)]
            relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._relays.append(relay)
            assert relay.stdout is not None
            assert relay.stdout.readline() == "ready\n"
        else:
            sh(f"ip -n {self._hub} link add {name} type veth peer name uplink netns {space}")
        sh(f"ip -n {self._hub} link set {name} master bridge up")
        sh(f"ip -n {space} addr add {address}/24 dev uplink")
        sh(f"ip -n {space} link set uplink up")
        sh(f"ip -n {space} link set lo up")
        return address

    def second_network(self, name: str, *, router: str) -> None:
        """Adds a machine on another network, and a router on both networks that forwards nothing by itself."""
        self.machine(router)
        space = self.space(name)
        sh(f"ip netns add {space}")
        self._machines.append(name)
        sh(f"ip -n {self.space(router)} link add inner type veth peer name uplink netns {space}")
        ends = (self.space(router), "inner", self.address_of_router), (space, "uplink", "10.99.78.2")
        for one, device, address in ends:
            sh(f"ip -n {one} addr add {address}/24 dev {device}")
            sh(f"ip -n {one} link set {device} up")
        sh(f"ip -n {space} link set lo up")

    address_of_router = "10.99.78.1"  # on the second network

    def space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def at(self, name: str) -> list[str]:
        """Returns the words before a command that run it on this machine. The machine has its own process ids, because
        TensorPipe takes two processes that share them for one machine. Then tensors would not use the link."""
        own_processes = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", f"{self._tag}-{name}", *own_processes]

    def cut(self, name: str) -> None:
        sh(f"ip -n {self._hub} link set {name} down")

    def mend(self, name: str) -> None:
        sh(f"ip -n {self._hub} link set {name} up")

    def narrow(self, name: str, rate: str) -> None:
        """Limits the rate in both directions."""
        for space, device in ((f"{self._tag}-{name}", "uplink"), (self._hub, name)):
            sh(f"tc -n {space} qdisc add dev {device} root tbf rate {rate} burst 16kb latency 500ms")

    def lost_frames(self) -> int:
        """Ends the relays and returns the number of frames that they lost."""
        total = 0
        for relay in self._relays:
            relay.terminate()
            output, _ = relay.communicate(timeout=10)
            total += int(output.split()[-1])
        self._relays = []
        return total
