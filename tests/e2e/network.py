"""Networks of `bench.network` whose links can be cut, with a second network behind a router."""

import os

import pytest

from ringmaster_dist.bench import network
from ringmaster_dist.bench.network import sh


def require_namespaces():
    """Skips a test on a machine without namespaces. With CI=true it fails instead."""
    missing = network.missing()
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"network namespaces need {missing}, and CI has to run these tests")
    if missing:
        pytest.skip(f"network namespaces need {missing}")


class Network(network.Network):
    def second_network(self, name: str, *, router: str) -> None:
        """Adds a machine on another network, and a router on both networks that forwards nothing by itself."""
        self.machine(router)
        space = self.space(name)
        sh(f"ip netns add {space}")
        self.machines.append(name)
        sh(f"ip -n {self.space(router)} link add inner type veth peer name uplink netns {space}")
        ends = (self.space(router), "inner", self.address_of_router), (space, "uplink", "10.99.78.2")
        for one, device, address in ends:
            sh(f"ip -n {one} addr add {address}/24 dev {device}")
            sh(f"ip -n {one} link set {device} up")
        sh(f"ip -n {space} link set lo up")

    address_of_router = "10.99.78.1"  # on the second network

    def cut(self, name: str) -> None:
        sh(f"ip -n {self.hub} link set {name} down")

    def mend(self, name: str) -> None:
        sh(f"ip -n {self.hub} link set {name} up")

    def lost_frames(self) -> int:
        """Ends the relays and returns the number of frames that they lost."""
        total = 0
        for relay in self.relays:
            relay.terminate()
            output, _ = relay.communicate()
            total += int(output.split()[-1])
        self.relays = []
        return total
