"""Messages of other Python versions are read, and everything else is refused."""

import io
import pickle

import pytest
from torch.distributed.rpc import internal

from ringmaster_dist import protocol
from ringmaster_dist.transport import agent
from ringmaster_dist.transport.agent import ServersUnpickler, WorkersUnpickler

WELL_FORMED = protocol.Push.is_well_formed


class _Attribute:
    """Is pickled as a call of getattr, as some Python versions do with enum members."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


ROLES = pytest.mark.parametrize("role", [ServersUnpickler, WorkersUnpickler])


def read(role, message):
    """What a message stands for. A server does not raise an error, but calls what answers with it."""
    found = role(io.BytesIO(message)).load()
    if type(found) is internal.PythonUDF and found.func is agent._refuse:
        answer = found.func(*found.args)
        assert type(answer) is internal.RemoteException
        raise pickle.UnpicklingError(answer.msg)
    return found


def unpickled(value):
    return WorkersUnpickler(io.BytesIO(pickle.dumps(value))).load()


@pytest.mark.parametrize("member", [*protocol.Verdict, *protocol.Staleness])
def test_enum_members_of_every_python_are_read(member):
    assert unpickled(member) is member
    assert unpickled(_Attribute(type(member), member.name)) is member


@ROLES
def test_no_message_changes_a_class(role):
    """``BUILD`` sets attributes of the object on the stack, which can be a class."""
    name = b"cringmaster_dist.protocol\nPush\n"
    message = name + b"(N}S'is_well_formed'\nNstb."
    assert pickle.loads(message) is protocol.Push  # it is a message, and does what it says
    try:
        assert protocol.Push.is_well_formed is None
    finally:
        protocol.Push.is_well_formed = WELL_FORMED
    newer = b"\x80\x04\x8c\x18ringmaster_dist.protocol\x8c\x04Push\x93N}\x8c\x0eis_well_formedNs\x86b."
    for attack in (message, newer):
        with pytest.raises(pickle.UnpicklingError, match=r"instruction (GLOBAL|SETITEM)"):
            read(role, attack)
    assert protocol.Push.is_well_formed is WELL_FORMED


@pytest.mark.parametrize("name", ["__class__", "mro", "_member_map_", "accepted"])
def test_no_other_attribute_of_an_enum_is_read(name):
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        unpickled(_Attribute(protocol.Verdict, name))


@ROLES
@pytest.mark.parametrize(
    "message",
    [
        b"\x80\x04Nr\x00\x00\x00\x02.",  # LONG_BINPUT: room for a memo of 2^25 entries
        b"\x80\x04" + b"N0" * 3_000_000 + b"N.",  # six megabytes of nothing
        b"\x80\x04N2.",  # DUP
        b"\x80\x04B\x00\x00\x00\x40.",  # bytes that are not there
        b"\x80\x04\x82\x01.",  # EXT1
        b"",
        b"\x80\x04",
    ],
)
def test_a_message_that_costs_too_much_is_refused(role, message):
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        read(role, message)


def call(function=agent.leave, arguments=("session",), keywords=None):
    return pickle.dumps(internal.PythonUDF(function, arguments, keywords or {}))


def test_a_server_reads_the_five_calls():
    request = protocol.JoinRequest(2, "token", -1, 5 * (protocol.Device("cuda:0", "NVIDIA H100"),))
    for function, arguments in ((agent.leave, ("session",)), (agent.join, (request,))):
        found = read(ServersUnpickler, call(function, arguments))
        assert (found.func, found.args, found.kwargs) == (function, arguments, {})
    with pytest.raises(pickle.UnpicklingError, match="leave with 2 arguments"):
        read(ServersUnpickler, call(agent.leave, ("session", 1)))


RECURSIVE = b")\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(60))  # 2^60 leaves
FUNCTION = b"\x8c\x1fringmaster_dist.transport.agent\x8c\x05leave\x93"


@pytest.mark.parametrize(
    "message",
    [
        pickle.dumps(None),
        pickle.dumps(protocol.Verdict.STALE),
        pickle.dumps(ValueError("text")),
        call(protocol.JoinRequest, (2, "token", -1)),
        call("leave"),
        call(arguments=["session"]),
        call(keywords={"session": "x"}),
        b"\x80\x04" + FUNCTION + b"\x8c\x01x\x85R.",  # calls it while it is read
        b"\x80\x04(" + RECURSIVE + b"}h\x3cNst.",  # hashes a tuple without end
        b"\x80\x04(" + RECURSIVE + b"\x8c\x08builtins\x8c\x0eAttributeError\x93h\x3c\x85Rt.",  # prints it
        b"\x80\x04(" + RECURSIVE + b"\x8c\x08builtins\x8c\x07getattr\x93Nh\x3c\x86Rt.",
    ],
)
def test_a_server_reads_nothing_else(message):
    with pytest.raises((pickle.UnpicklingError, TypeError)):
        read(ServersUnpickler, message)
