"""What another Python may send for the same words, and what nobody may."""

import io
import pickle

import pytest

from ringmaster_dist import protocol
from ringmaster_dist.transport.unpickling import RestrictedUnpickler


class _Attribute:
    """Pickled as a call of getattr, as some Pythons do with members of an enumeration."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def unpickled(value):
    return RestrictedUnpickler(io.BytesIO(pickle.dumps(value))).load()


@pytest.mark.parametrize("member", [*protocol.Verdict, *protocol.Staleness])
def test_members_arrive_however_they_are_pickled(member):
    assert unpickled(member) is member
    assert unpickled(_Attribute(type(member), member.name)) is member


@pytest.mark.parametrize("name", ["__class__", "mro", "_member_map_", "accepted"])
def test_nothing_else_is_got_from_them(name):
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        unpickled(_Attribute(protocol.Verdict, name))
