"""The interface TensorPipe is told, and the addresses that are refused."""

import os
import subprocess
import sys

import pytest

from ringmaster_dist.transport import addresses


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    monkeypatch.setattr(addresses, "_GIVEN", None)
    monkeypatch.delenv("TP_SOCKET_IFNAME", raising=False)


def test_this_machine_has_loopback():
    assert addresses.local_addresses()["127.0.0.1"] == "lo"


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True),
                                               ("10.1.2.3", False), ("name.invalid", False)])  # fmt: skip
def test_what_is_loopback(host, loopback):
    assert addresses.is_loopback(host) is loopback


def test_loopback_is_served_on_loopback_alone():
    assert addresses.listen_at("localhost") == "127.0.0.1"
    assert os.environ["TP_SOCKET_IFNAME"] == "lo"
    addresses.route_to("127.0.0.1")
    assert os.environ["TP_SOCKET_IFNAME"] == "lo"


def test_what_the_user_has_set_stays():
    code = (
        "from ringmaster_dist.transport import addresses; import os; addresses.route_to('127.0.0.1');"
        "print(os.environ['TP_SOCKET_IFNAME'])"
    )
    environment = {**os.environ, "TP_SOCKET_IFNAME": "ib0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "ib0", done.stderr


@pytest.mark.parametrize(("host", "words"), [("0.0.0.0", "every address at once"), ("192.0.2.77", "not an address of")])
def test_addresses_nobody_can_reach_are_refused(host, words):
    with pytest.raises(addresses.AddressError, match=words):
        addresses.listen_at(host)


def test_a_published_loopback_is_refused_unless_meant():
    addresses.check_published("localhost", "127.0.0.1", "uv://127.0.0.1:4")
    addresses.check_published("a", "10.0.0.1", "uv://10.0.0.2:4")
    with pytest.raises(addresses.AddressError, match="TP_SOCKET_IFNAME"):
        addresses.check_published("a", "10.0.0.1", "uv://127.0.0.1:4")
