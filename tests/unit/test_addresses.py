"""Addresses as users write them, and where a server can listen."""

import socket

import pytest

from ringmaster_dist import addresses


def test_the_addresses_of_this_machine_include_loopback():
    assert addresses.local_addresses()["127.0.0.1"] == "lo"


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True),
                                               ("::1", True), ("10.1.2.3", False), ("fd00::1", False),
                                               ("name.invalid", False)])  # fmt: skip
def test_loopback_addresses_are_recognised(host, loopback):
    assert addresses.is_loopback(host) is loopback


@pytest.mark.parametrize(("text", "parts"), [("10.0.0.1:29400", ("10.0.0.1", 29400)), ("gpu-7:1", ("gpu-7", 1)),
                                            ("[fd00::1]:29400", ("fd00::1", 29400))])  # fmt: skip
def test_an_address_is_split_into_host_and_port(text, parts):
    assert addresses.split(text) == parts
    assert addresses.joined(*parts) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "fd00::1:29400", "host:²"]
)
def test_malformed_addresses_are_refused(text):
    with pytest.raises(ValueError, match="brackets" if text.count(":") > 1 else "is not HOST:PORT"):
        addresses.split(text)


@pytest.mark.parametrize(("host", "peer"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"),
                                           ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"),
                                           ("::", "::1")])  # fmt: skip
def test_a_server_listens_on_its_configured_address(host, peer):
    with addresses.listen(host, 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection((peer, port), timeout=60).close()
        assert addresses.split(addresses.published(host, port))[1] == port


def test_every_interface_is_published_as_one_address():
    assert not addresses.published("0.0.0.0", 5).startswith("0.0.0.0")
    assert addresses.published("::1", 5) == "[::1]:5"


def test_the_address_of_another_machine_is_refused():
    with pytest.raises(addresses.AddressError, match="not an address of this machine"):
        addresses.listen("192.0.2.77", 0)


def test_an_address_can_be_checked_before_a_server_listens_there():
    with addresses.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(addresses.AddressError, match=f"server.port={port} cannot be listened on .*in use"):
            addresses.check("127.0.0.1", port)
    addresses.check("127.0.0.1", port)
    addresses.listen("127.0.0.1", port).close()  # the check leaves nothing behind
