"""The service without a network: sessions, leases and waiting calls. The test sets the clock."""

import math

import pytest
import torch

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.methods import Method, Synchronous
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.protocol import PROTOCOL_VERSION, Device, Interruptions, JoinRequest, Push, Staleness, Verdict
from ringmaster_dist.server.admission import Admission
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.leases import Leases
from ringmaster_dist.server.outlets import NoCheckpoints
from ringmaster_dist.server.publisher import Publisher
from ringmaster_dist.server.service import Service, Settings
from ringmaster_dist.wire import Wire

LAYOUT = Layout([Parameter("w", (2, 3))], GEOMETRY_MAPS["muon"])

UNREADABLE_DEVICES = [
    Device("cuda:0", "H100"), [Device("cuda:0", "H100")], ("cuda:0",), (("cuda:0", "H100"),), (Device("cuda:0", None),),
    (Device("cuda:0", "\x1b[31m"),), (Device("cud\u00e4", ""),), (Device("x" * 101),), (Device("cpu", "CPU"),) * 129,
]  # fmt: skip


class Notes:
    """A journal that keeps its lines in memory."""

    def __init__(self):
        self.arrivals, self.members, self.changes, self.seats = [], [], [], []

    def arrival(self, time, worker, push, receipt):
        self.arrivals.append((time, worker, push.sequence, receipt.verdict))

    def membership(self, worker, event, pushes, seat, why=""):
        self.members.append((worker, event, pushes))
        self.seats.append((worker, seat))

    def change(self, time, change):
        self.changes.append(change)

    def flush(self):
        pass

    def mark(self):
        return {"trace.jsonl": len(self.arrivals)}


class Stage:
    """A service with a test clock and without threads. `wait` and `compute` do the work of the threads."""

    def __init__(self, method=None, state=None, checkpointing=None, restarted=False, **settings):
        self.time, self.notes = 100.0, Notes()
        wire = settings.get("wire", Wire())
        method = method or Method(Constant(0.1, 0.5, 2))
        core = ServerCore(torch.zeros(6), method, Update(LAYOUT), wire.gradient_dtype)
        if state is not None:
            core.load(state.core)
        if state is not None or restarted:
            core.enter_term([0, core.version])
        defaults = {"max_updates": 1000, "max_seconds": 1000.0, "lease_seconds": 10.0, "max_invalid": 10}
        given = Settings(config_text="x: 1", fingerprint="f", token="secret", session_key="k", **(defaults | settings))
        self.service = Service(core, given, self.notes, checkpointing, state=state, clock=lambda: self.time)

    def join(self, token="secret", protocol=PROTOCOL_VERSION):
        return self.service.join(JoinRequest(protocol, token, -1))

    def session(self):
        return self.join().wait().session

    def push(self, session, sequence, version, value=1.0, term=0, compute=True):
        pushed = self.service.push(session, Push(sequence, version, torch.full((6,), value), 0.5, 0.1, term))
        if compute:
            self.service.compute()
        return pushed

    def wait(self, seconds):
        self.time += seconds
        self.service.tick()
        self.service.compute()


def test_a_worker_is_welcomed_with_all_it_needs():
    welcome = Stage().join().wait()
    assert welcome.worker_id == 0
    assert welcome.config == "x: 1"
    assert welcome.fingerprint == "f"
    assert welcome.snapshot.version == 0
    assert welcome.session.startswith("0.0.")


@pytest.mark.parametrize(
    ("token", "protocol", "reason"),
    [("wrong", PROTOCOL_VERSION, "token"), ("", PROTOCOL_VERSION, "token"), ("secret", 7, "protocol 7")],
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
    assert stage.service.fetch("guess", 0, 0, Interruptions()).unknown
    assert stage.service.await_stale("guess", 0, 0).wait() is Staleness.UNKNOWN
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


def test_the_first_workers_wait_for_the_rest_and_then_the_clock_starts():
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


def test_the_first_workers_wait_at_most_start_seconds():
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
        poll = stage.service.await_stale(session, 0, 0)
        stage.wait(4)
        assert poll.wait() is Staleness.AGAIN
    assert stage.service.core.live == {0}


def test_a_poll_is_answered_as_soon_as_the_work_is_stale():
    stage = Stage()
    fast, slow = stage.session(), stage.session()
    poll = stage.service.await_stale(slow, 0, 0)
    stage.push(fast, 0, 0).wait()
    assert not poll.done()
    stage.push(fast, 1, 1).wait()
    assert poll.wait() is Staleness.STALE
    assert stage.service.await_stale(slow, 0, 0).wait() is Staleness.STALE
    stage.service.fetch(slow, 0, 0, Interruptions(3, 1.5))
    assert stage.service.workers[1].interruptions == Interruptions(3, 1.5)


def test_a_synchronous_push_waits_and_the_round_shrinks_with_a_lease():
    stage = Stage(Synchronous(Constant(0.1, 0.5)))
    first, _silent = stage.session(), stage.session()
    pushed = stage.push(first, 0, 0)
    assert not pushed.done()
    stage.wait(8)
    stage.service.fetch(first, 0, 0, Interruptions())
    stage.wait(8)
    reply = pushed.wait()
    assert reply.receipt.verdict is Verdict.ACCEPTED
    assert reply.snapshot.version == 1


def test_every_waiting_call_is_answered_with_the_end():
    stage = Stage(Synchronous(Constant(0.1, 0.5)))
    waiting, polling = stage.session(), stage.session()
    pushed, poll = stage.push(waiting, 0, 0), stage.service.await_stale(polling, 0, 0)
    stage.service.end()
    stage.service.compute()
    assert pushed.wait().ended
    assert poll.wait() is Staleness.ENDED
    assert stage.push(polling, 0, 0).wait().ended
    assert stage.service.fetch(polling, 0, 0, Interruptions()).ended
    late = stage.join().wait()
    assert late.ended
    assert late.session == ""
    assert not stage.service.wait_until_all_left(0.0)
    stage.service.leave(waiting)
    stage.service.leave(polling)
    assert stage.service.wait_until_all_left(0.0)
    assert stage.notes.members[-1][1] == "join"  # leaving after the end is not history


def test_the_end_is_answered_only_after_it_is_saved():
    """A server that is lost while it saves the end restarts, and needs its workers."""
    heard = []

    class Saving(NoCheckpoints):
        def write_last(self, state):
            assert state.core.version == 1
            late = stage.push(sessions[1], 0, 0, compute=False)
            heard.append([pushed.done(), poll.done(), late.done(), stage.join().done()])

    stage = Stage(max_updates=1, checkpointing=Saving())
    sessions = [stage.session() for _ in range(2)]
    poll = stage.service.await_stale(sessions[1], 0, 0)
    pushed = stage.push(sessions[0], 0, 0, compute=False)
    stage.service.compute()
    assert heard == [[False] * 4]
    assert pushed.wait().ended
    assert poll.wait() is Staleness.ENDED
    assert stage.join().wait().ended


def test_a_run_ends_by_updates_and_by_seconds():
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


def test_a_push_that_comes_late_over_an_old_connection_changes_nothing():
    """The worker pushed again over a new connection, was answered, and sent the next push, before the old push
    arrived."""
    stage = Stage()
    worker = stage.session()
    for sequence in range(2):
        assert stage.push(worker, sequence, sequence).wait().receipt.verdict is Verdict.ACCEPTED
    before = (list(stage.notes.arrivals), stage.service.core.pushes, stage.service.workers[0].wasted_seconds)
    late = stage.push(worker, 0, 0).wait()
    assert (late.receipt, late.snapshot.version) == (None, 2)
    assert (stage.notes.arrivals, stage.service.core.pushes, stage.service.workers[0].wasted_seconds) == before
    assert stage.push(worker, 2, 2).wait().receipt.verdict is Verdict.ACCEPTED


def test_a_rejected_push_does_not_wait_for_the_update():
    """While a decided update is not computed yet, verdicts are given, and a stale push is answered."""
    stage = Stage(Method(Constant(0.1, 0.5, 2)))
    fast, slow = stage.session(), stage.session()
    for sequence in range(2):
        stage.push(fast, sequence, sequence).wait()
    accepted = stage.push(fast, 2, 2, compute=False)
    rejected = stage.push(slow, 0, 0, compute=False)
    assert rejected.wait().receipt.verdict is Verdict.STALE
    assert rejected.wait().receipt.version == 3  # that update is decided
    assert rejected.wait().snapshot.version == 2  # and this is the newest there is
    assert not accepted.done()
    stage.service.compute()
    assert accepted.wait().snapshot.version == 3


def test_no_worker_gets_a_snapshot_that_is_already_stale():
    stage = Stage(Method(Constant(0.1, 0.5, 1)))
    fast, slow = stage.session(), stage.session()
    stage.push(fast, 0, 0, compute=False)
    rejected, poll = stage.push(slow, 0, 0, compute=False), stage.service.await_stale(slow, 0, 0)
    assert not rejected.done()
    assert not poll.done()
    stage.service.compute()
    assert rejected.wait().snapshot.version == 1
    assert poll.wait() is Staleness.STALE


def test_pushes_that_arrive_during_an_update_are_judged_in_order():
    """The verdicts, versions and bits are the same as if each push had waited for the one before."""
    together, apart = Stage(), Stage()
    sessions = [[stage.session() for _ in range(5)] for stage in (together, apart)]
    waiting = [together.push(s, 0, 0, float(i), compute=False) for i, s in enumerate(sessions[0])]
    together.service.compute()
    answered = [apart.push(s, 0, 0, float(i)).wait() for i, s in enumerate(sessions[1])]
    assert [w.wait().receipt for w in waiting] == [a.receipt for a in answered]
    assert [a.receipt.verdict for a in answered] == [Verdict.ACCEPTED] * 2 + [Verdict.STALE] * 3
    assert torch.equal(together.service.core.snapshot.iterate, apart.service.core.snapshot.iterate)


def test_a_repeated_push_during_its_update_waits_for_it_too():
    stage = Stage()
    session = stage.session()
    first, again = stage.push(session, 0, 0, compute=False), stage.push(session, 0, 0, compute=False)
    stage.service.compute()
    assert first.wait().receipt == again.wait().receipt
    assert stage.service.core.version == 1


def test_a_worker_that_keeps_sending_nonsense_is_evicted():
    stage = Stage(max_invalid=3)
    bad, good = stage.session(), stage.session()
    nan = float("nan")
    assert not stage.push(bad, 0, 0, nan).wait().evicted
    stage.push(bad, 1, 0).wait()  # one good gradient resets the count
    for sequence in (2, 3):
        assert not stage.push(bad, sequence, 1, nan).wait().evicted
    assert "NaN" in stage.push(bad, 4, 1, nan).wait().evicted
    assert stage.push(bad, 5, 1).wait().unknown
    assert stage.service.core.live == {1}
    assert stage.push(good, 0, 1).wait().receipt.verdict is Verdict.ACCEPTED


def test_a_restarted_server_recognises_its_workers():
    stage = Stage()
    session = stage.session()
    first = stage.push(session, 0, 0).wait()
    stage.time += 7
    state = stage.service.capture()
    assert state.files == {"trace.jsonl": 1}
    again = Stage(state=state)
    assert again.service.seconds == 7.0
    assert again.push(session, 0, 0).wait().receipt == first.receipt  # answered before: not counted twice
    assert again.service.core.pushes == 1
    assert again.push(session, 1, 1).wait().receipt.verdict is Verdict.ACCEPTED
    assert again.notes.members == []


def test_the_ranks_of_a_group_are_noted_at_every_join_and_leave():
    """They survive a lost lease, a restart from a checkpoint, and a restart from before the join."""
    stage = Stage()
    group = stage.service.join(JoinRequest(PROTOCOL_VERSION, "secret", -1, (), 3)).wait().session
    stage.session()
    stage.wait(20.0)
    stage.push(group, 0, 0)
    assert [seat.ranks for _, seat in stage.notes.seats] == [3, 1, 3, 1, 3]
    assert [worker.ranks for worker in stage.service.measure().workers] == [3, 1]
    for again in (Stage(state=stage.service.capture()), Stage(restarted=True)):
        again.push(group, 1, 0)
        again.service.leave(group)
        assert {seat.ranks for _, seat in again.notes.seats} == {3}
    for ranks in (0, -1, 10**9, 2.0, True):
        assert not stage.service.join(JoinRequest(PROTOCOL_VERSION, "secret", -1, ranks)).wait().session


def test_gradients_of_a_lost_version_never_count():
    """Versions made after the checkpoint are lost. Versions that the checkpoint contains still count."""
    method = Method(Constant(0.1, 0.5, 5))
    stage = Stage(method)
    sessions = [stage.session() for _ in range(3)]
    stage.push(sessions[0], 0, 0).wait()
    state = stage.service.capture()  # at version 1
    stage.push(sessions[0], 1, 1).wait()
    lost = stage.push(sessions[0], 2, 2).wait().snapshot
    late = stage.session()
    again = Stage(method, state=state)
    assert again.service.await_stale(sessions[0], 0, lost.version).wait() is Staleness.STALE
    assert not again.service.await_stale(sessions[0], 2**62, 2**62).done()  # which keeps the lease then
    kept = again.push(sessions[1], 0, 1).wait()
    assert (kept.receipt.verdict, kept.receipt.delay) == (Verdict.ACCEPTED, 0)
    for sequence, version in ((3, 3), (4, 2)):  # one in the future by its number, one in the past
        reply = again.push(sessions[0], sequence, version).wait()
        assert (reply.receipt.verdict, reply.receipt.delay) == (Verdict.STALE, 1)
    assert again.push(sessions[2], 0, 2, term=1).wait().receipt.verdict is Verdict.ACCEPTED
    assert "term 2 is unknown" in again.push(sessions[2], 1, 2, term=2).wait().receipt.reason
    known = again.service.fetch(sessions[0], 0, 3, Interruptions())
    assert known.snapshot.version == 3  # version 3 of another term is another iterate
    assert again.service.fetch(sessions[0], 1, 3, Interruptions()).snapshot is None
    # A worker that joined after the checkpoint keeps its id, unless that id has been given to another worker.
    assert again.push(late, 0, 1).wait().receipt.verdict is Verdict.ACCEPTED
    assert again.service.core.live == {0, 1, 2, 3}
    taken = Stage(method, state=state)
    assert taken.join().wait().worker_id == 3
    assert taken.push(late, 0, 1).wait().unknown


def test_a_finished_run_with_a_larger_budget_continues_with_new_workers():
    stage = Stage(Synchronous(Constant(0.1, 0.5)), max_updates=1)
    sessions = [stage.session() for _ in range(2)]
    for session in sessions:
        stage.push(session, 0, 0)
    assert stage.service.ended.is_set()
    for session in sessions:
        stage.service.leave(session)
    again = Stage(Synchronous(Constant(0.1, 0.5)), state=stage.service.capture())
    assert again.service.core.live == set()
    assert [event for _, event, _ in again.notes.members] == ["leave", "leave"]
    reply = again.push(again.session(), 0, 1, term=1).wait()
    assert (reply.receipt.verdict, reply.snapshot.version) == (Verdict.ACCEPTED, 2)


def test_a_server_lost_before_its_first_checkpoint_has_a_clock_again():
    """Its workers reconnect with their sessions and no worker joins. A session proves that the run has begun."""
    before = Stage()
    sessions = [before.session() for _ in range(2)]
    again = Stage(max_seconds=50.0, restarted=True)
    assert again.push(sessions[0], 0, 0).wait().receipt.verdict is Verdict.ACCEPTED
    again.service.await_stale(sessions[1], 0, 0)
    again.wait(20)
    assert again.service.seconds == 20.0
    assert again.service.core.live == set()  # leases end
    again.wait(31)
    assert again.service.ended.is_set()


def test_a_narrow_wire_rounds_both_ways():
    stage = Stage(wire=Wire(torch.bfloat16, torch.bfloat16))
    session = stage.session()
    gradient = torch.full((6,), 1.001).to(torch.bfloat16)
    reply = stage.service.push(session, Push(0, 0, gradient, 0.5, 0.1))
    stage.service.compute()
    assert reply.wait().snapshot.iterate.dtype is torch.bfloat16
    assert stage.service.core.snapshot.iterate.dtype is torch.float32
    wrong = stage.service.push(session, Push(1, 1, gradient.half(), 0.5, 0.1)).wait()
    assert "float16" in wrong.receipt.reason


def test_a_server_that_was_lost_after_the_end_ends_again():
    """The last checkpoint exists, but the process is gone. A restarted server must not wait for workers."""
    stage = Stage(max_updates=1)
    stage.push(stage.session(), 0, 0)
    assert stage.service.ended.is_set()
    again = Stage(state=stage.service.capture(), max_updates=1).service
    again.start()
    assert again.ended.wait(30)
    assert again.core.version == 1
    again.close()


def test_nonsense_of_one_worker_is_refused_and_does_not_reach_the_others():
    stage = Stage()
    mad, sane = stage.session(), stage.session()
    good = Push(0, 0, torch.ones(6), 0.5, 0.1)
    for changes in (
        {"sequence": "0"},
        {"gradient_version": 0.0},
        {"gradient": [1.0]},
        {"loss": None},
        {"term": "x"},
        {"sequence": 10**5000},
        {"compute_seconds": float("nan")},
        {"compute_seconds": float("inf")},
    ):
        assert "not a push" in stage.service.push(mad, good._replace(**changes)).wait().evicted
    assert stage.service.await_stale(mad, "x", 3).wait() is Staleness.UNKNOWN
    for count in ((1, 2), Interruptions("x", None), Interruptions(1, float("nan")), Interruptions(2**70, 1.0)):
        assert "not a count" in stage.service.fetch(mad, 0, 0, count).evicted
    for request in (
        JoinRequest("2", "secret", 0),
        JoinRequest(PROTOCOL_VERSION, None, 0),
        JoinRequest(1, "", 1.5),
        *(JoinRequest(PROTOCOL_VERSION, "secret", 0, devices) for devices in UNREADABLE_DEVICES),
        good,
    ):
        assert not stage.service.join(request).wait().session
    assert stage.service.join(JoinRequest(PROTOCOL_VERSION, "secret", 10**10)).wait().session == ""
    assert stage.service.core.pushes == 0
    assert stage.push(sane, 0, 0).wait().receipt.verdict is Verdict.ACCEPTED
    assert stage.service.failure is None


def test_the_server_knows_the_device_of_each_worker_also_after_a_restart():
    """Workers take the devices of their machine in turn, by a slot that is their id if they have given none."""
    h100, tesla = Device("cuda:0", "NVIDIA H100/80 GB"), Device.described("cuda:1", "Tesl\u00e4\n" + 200 * "x")
    assert tesla == Device("cuda:1", "Tesl??" + 94 * "x")
    offers = [(-1, (h100, tesla)), (-1, (h100, tesla)), (4, (h100, tesla)), (-1, ())]
    stage = Stage()
    requests = [JoinRequest(PROTOCOL_VERSION, "secret", slot, devices) for slot, devices in offers]
    sessions = [stage.service.join(request).wait().session for request in requests]
    joined = {worker: seat.device for worker, seat in stage.notes.seats}
    assert joined == {0: h100, 1: tesla, 2: h100, 3: Device()}
    state = stage.service.capture()
    assert all(len(line) == 11 for line in state.members)
    from_checkpoint, lost = Stage(state=state), Stage(restarted=True)
    for restarted in (from_checkpoint, lost):
        for session in sessions:
            restarted.push(session, 0, 0)
        known = {worker: member.seat.device for worker, member in restarted.service.workers.items()}
        assert known == joined
    assert {worker: seat.device for worker, seat in lost.notes.seats} == joined


def test_a_failing_thread_ends_the_run_with_an_error():
    stage = Stage()
    session = stage.session()
    stage.service.core.update.apply = None  # as if there were no memory left
    stage.service.start()
    stage.push(session, 0, 0, compute=False)
    assert stage.service.ended.wait(30)
    assert isinstance(stage.service.failure, TypeError)


def test_a_lease_runs_out_in_silence_and_any_call_renews_it():
    time = 0.0
    leases = Leases(10.0, lambda: time)
    leases.renew(0)
    leases.renew(1)
    time = 8.0
    leases.renew(1)
    time = 10.0
    assert leases.expired() == set()
    time = 10.5
    assert leases.expired() == {0}
    leases.renew_all()
    assert leases.expired() == set()
    assert leases.poll_again_before == pytest.approx(10.5 - 10.0 / 3)


def test_the_run_starts_with_the_expected_workers_or_when_the_time_is_up():
    time = 0.0
    admission = Admission("secret", expected_workers=3, start_seconds=5.0, clock=lambda: time)
    assert not admission.is_start_due(0)
    admission.note_join()
    time = 4.0
    admission.note_join()  # the first counts
    assert not admission.is_start_due(2)
    assert admission.is_start_due(3)
    time = 5.0
    assert admission.is_start_due(2)
    assert not admission.is_start_due(0)
    assert admission.refusal(JoinRequest(PROTOCOL_VERSION, "secret", 5)) == ""
    assert "slot" in admission.refusal(JoinRequest(PROTOCOL_VERSION, "secret", -2))


@pytest.mark.parametrize("iterate_dtype", [None, torch.bfloat16])
def test_what_is_computed_reaches_workers_when_it_is_published(iterate_dtype):
    core = ServerCore(torch.ones(6), Method(Constant(0.1, 0.5, 2)), Update(LAYOUT))
    published = []
    publisher = Publisher(core, Wire(None, iterate_dtype), published.append)
    core.join()
    seen = [publisher.snapshot]
    for sequence in range(3):
        core.judge(0, sequence, core.version, torch.randn(6))
        publisher.compute_next()
        assert len(published) == sequence
        publisher.hand_out()
        seen.append(published[-1])
        assert torch.equal(seen[-1].iterate, core.snapshot.iterate.to(iterate_dtype or torch.float32))
    assert [snapshot.version for snapshot in seen] == [0, 1, 2, 3]
    assert len({snapshot.iterate.data_ptr() for snapshot in seen}) == 4  # none is written while a worker may read it


def test_figures_are_read_at_one_moment():
    stage = Stage()
    session = stage.session()
    stage.push(session, 0, 0)
    stage.push(session, 1, -1)
    stage.service.fetch(session, 0, 0, Interruptions(2, 1.5))
    figures = stage.service.measure()
    assert (figures.version, figures.computed_version, figures.pushes, figures.num_live) == (1, 1, 2, 1)
    (worker,) = figures.workers
    assert (worker.accepted, worker.invalid, worker.interruptions.num) == (1, 1, 2)
    assert worker.used_seconds == pytest.approx(0.1)
    assert worker.wasted_seconds == pytest.approx(1.6)
    before, after = figures.meter.kept
    assert (before.version, after.version) == (0, 1)
    stage.service.keep_next_update()
    assert stage.service.measure().meter.kept is None
    assert figures.meter.kept is not None  # it is a copy


def test_one_worker_does_not_decide_that_no_gradient_is_a_number_any_more():
    stage = Stage(max_invalid=1000)
    good, bad = stage.session(), stage.session()
    stage.push(good, 0, 0)
    for sequence in range(40):
        stage.push(bad, sequence, stage.service.core.version, math.nan)
    assert stage.service.core.invalid == 40
    assert not stage.service.all_are_invalid
    stage.push(good, 1, stage.service.core.version, math.nan)
    assert stage.service.all_are_invalid
