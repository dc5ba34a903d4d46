"""The service without a wire: who may call, who is alive, who waits. Time is a number the test turns."""

import pytest
import torch

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.methods import Method, Synchronous
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.protocol import PROTOCOL_VERSION, Interruptions, JoinRequest, Push, Staleness, Verdict
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.service import Service

LAYOUT = Layout([Parameter("w", (2, 3))], GEOMETRY_MAPS["muon"])


class Notes:
    """A journal that remembers."""

    def __init__(self):
        self.arrivals, self.members = [], []

    def arrival(self, time, worker, push, receipt):
        self.arrivals.append((time, worker, push.sequence, receipt.verdict))

    def membership(self, worker, event, pushes):
        self.members.append((worker, event, pushes))


class Stage:
    """A service with a clock of its own; `wait` does what its thread would do meanwhile."""

    def __init__(self, method=None, **settings):
        self.time, self.notes = 100.0, Notes()
        core = ServerCore(torch.zeros(6), method or Method(Constant(0.1, 0.5, 2)), Update(LAYOUT))
        defaults = {"max_updates": 1000, "max_seconds": 1000.0, "lease_seconds": 10.0}
        self.service = Service(
            core,
            config_text="x: 1",
            token="secret",
            journal=self.notes,
            clock=lambda: self.time,
            **(defaults | settings),
        )

    def join(self, token="secret", protocol=PROTOCOL_VERSION):
        return self.service.join(JoinRequest(protocol, token, -1))

    def session(self):
        return self.join().wait().session

    def push(self, session, sequence, version, value=1.0):
        return self.service.push(session, Push(sequence, version, torch.full((6,), value), 0.5, 0.1))

    def wait(self, seconds):
        self.time += seconds
        self.service.tick()


def test_a_worker_is_welcomed_with_all_it_needs():
    welcome = Stage().join().wait()
    assert welcome.worker_id == 0
    assert welcome.config == "x: 1"
    assert welcome.layout_fingerprint == LAYOUT.fingerprint
    assert welcome.snapshot.version == 0
    assert len(welcome.session) == 32


@pytest.mark.parametrize(
    ("token", "protocol", "reason"), [("wrong", 1, "token"), ("", 1, "token"), ("secret", 7, "protocol 7")]
)
def test_strangers_are_refused(token, protocol, reason):
    stage = Stage()
    welcome = stage.join(token, protocol).wait()
    assert welcome.session == ""
    assert reason in welcome.reason
    assert not stage.service.core.live
    assert stage.notes.members == []


def test_unknown_sessions_get_nothing():
    stage = Stage()
    stage.session()
    assert stage.push("guess", 0, 0).wait().unknown
    assert stage.service.fetch("guess", 0, Interruptions()).unknown
    assert stage.service.await_stale("guess", 0).wait() is Staleness.UNKNOWN
    stage.service.leave("guess")
    assert stage.service.core.pushes == 0
    assert len(stage.service.core.live) == 1


def test_a_push_is_answered_with_verdict_and_snapshot_once():
    stage = Stage()
    session = stage.session()
    first, again = stage.push(session, 0, 0).wait(), stage.push(session, 0, 0).wait()
    assert first.receipt.verdict is Verdict.ACCEPTED
    assert first.snapshot.version == 1
    assert again.receipt == first.receipt
    assert len(stage.notes.arrivals) == 1


def test_the_first_wait_for_the_rest_and_the_clock_starts_then():
    stage = Stage(expected_workers=2, start_seconds=30.0)
    first = stage.join()
    stage.wait(20)
    assert not first.done()
    assert stage.service.seconds == 0.0
    second = stage.join()
    assert first.done()
    assert second.done()
    stage.time += 3
    assert stage.service.seconds == 3.0


def test_the_first_do_not_wait_for_ever():
    stage = Stage(expected_workers=2, start_seconds=30.0)
    first = stage.join()
    stage.wait(31)
    assert first.done()
    assert stage.service.core.live == {0}


def test_a_silent_worker_loses_its_lease_and_is_taken_back():
    stage = Stage()
    session, other = stage.session(), stage.session()
    stage.wait(8)
    stage.push(other, 0, 0).wait()
    stage.wait(8)
    assert stage.service.core.live == {1}
    assert stage.push(session, 0, 0).wait().receipt.verdict is Verdict.ACCEPTED
    assert stage.service.core.live == {0, 1}
    assert stage.notes.members[2:] == [(0, "leave", 1), (0, "join", 1)]


def test_a_long_poll_keeps_the_lease_of_a_slow_worker():
    stage = Stage()
    session = stage.session()
    for _ in range(6):
        poll = stage.service.await_stale(session, 0)
        stage.wait(4)
        assert poll.wait() is Staleness.AGAIN
    assert stage.service.core.live == {0}


def test_stale_work_is_told_at_once():
    stage = Stage()
    fast, slow = stage.session(), stage.session()
    poll = stage.service.await_stale(slow, 0)
    stage.push(fast, 0, 0).wait()
    assert not poll.done()
    stage.push(fast, 1, 1).wait()
    assert poll.wait() is Staleness.STALE
    assert stage.service.await_stale(slow, 0).wait() is Staleness.STALE
    stage.service.fetch(slow, 0, Interruptions(3, 1.5))
    assert stage.service.workers[1].interruptions == Interruptions(3, 1.5)


def test_a_synchronous_push_waits_and_the_round_shrinks_with_a_lease():
    stage = Stage(Synchronous(Constant(0.1, 0.5)))
    first, _silent = stage.session(), stage.session()
    pushed = stage.push(first, 0, 0)
    assert not pushed.done()
    stage.wait(8)
    stage.service.fetch(first, 0, Interruptions())
    stage.wait(8)
    reply = pushed.wait()
    assert reply.receipt.verdict is Verdict.ACCEPTED
    assert reply.snapshot.version == 1


def test_the_end_is_told_to_everybody():
    stage = Stage(Synchronous(Constant(0.1, 0.5)))
    waiting, polling = stage.session(), stage.session()
    pushed, poll = stage.push(waiting, 0, 0), stage.service.await_stale(polling, 0)
    stage.service.end()
    assert pushed.wait().ended
    assert poll.wait() is Staleness.ENDED
    assert stage.push(polling, 0, 0).wait().ended
    assert stage.service.fetch(polling, 0, Interruptions()).ended
    late = stage.join().wait()
    assert late.ended
    assert late.session == ""
    assert not stage.service.wait_until_all_left(0.0)
    stage.service.leave(waiting)
    stage.service.leave(polling)
    assert stage.service.wait_until_all_left(0.0)
    assert stage.notes.members[-1][1] == "join"  # leaving after the end is not history


def test_it_ends_by_updates_and_by_seconds():
    stage = Stage(max_updates=1)
    assert stage.push(stage.session(), 0, 0).wait().ended
    stage = Stage(max_seconds=5.0)
    stage.session()
    stage.wait(6)
    assert stage.service.ended.is_set()
    assert stage.service.seconds == 6.0


def test_a_bad_gradient_is_its_worker_s_fault():
    stage = Stage()
    bad, good = stage.session(), stage.session()
    reply = stage.push(bad, 0, 0, float("nan")).wait()
    assert reply.receipt.verdict is Verdict.INVALID
    assert "NaN" in reply.receipt.reason
    assert reply.snapshot.version == 0
    assert stage.push(good, 0, 0).wait().receipt.verdict is Verdict.ACCEPTED
    assert stage.service.workers[0].wasted_seconds == pytest.approx(0.1)
