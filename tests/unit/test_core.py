"""The server core: verdicts, idempotence, refusals, rounds, and continuing bit for bit."""

import copy
import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.methods import DelayAdaptive, Method, Rennala, Synchronous
from ringmaster_dist.algorithm.schedules import Constant, agnostic
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.protocol import Verdict
from ringmaster_dist.server.core import ServerCore

LAYOUT = Layout([Parameter("w", (3, 4)), Parameter("v", (5,), "scalar")], GEOMETRY_MAPS["muon"])
CONSTANT = Constant(0.1, 0.05)
MAKERS = {
    "ringmaster": lambda: Method(Constant(0.1, 0.05, 3)),
    "agnostic": lambda: Method(agnostic(0.5)),
    "rennala": lambda: Rennala(CONSTANT, 3),
    "delay_adaptive": lambda: DelayAdaptive(CONSTANT),
    "synchronous": lambda: Synchronous(CONSTANT),
    "asynchronous": lambda: Method(CONSTANT),
}


def make(name="ringmaster", workers=2):
    core = ServerCore(torch.linspace(-1, 1, LAYOUT.size), MAKERS[name](), Update(LAYOUT))
    for _ in range(workers):
        core.join()
    return core


def gradient(seed=0):
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed))


def fingerprint(core):
    """Everything that an update or a verdict could change, except counters and ledger."""
    state = core.state()
    tensors = [state.iterate, state.momentum, state.sum]
    rest = state.method, state.num_summed
    return [None if t is None else t.tolist() for t in tensors], state.version, rest, state.live


def test_accepts_below_and_refuses_at_the_threshold():
    core = make()
    for sequence in range(3):
        assert core.push(0, sequence, core.version, gradient(sequence)).verdict is Verdict.ACCEPTED
    assert core.stale_before == 1
    late = core.push(1, 0, 0, gradient())
    assert (late.verdict, late.delay, late.version, late.continue_at) == (Verdict.STALE, 3, 3, 3)
    on_time = core.push(1, 1, 1, gradient())
    assert (on_time.verdict, on_time.delay, on_time.continue_at) == (Verdict.ACCEPTED, 2, 4)
    assert (core.version, core.pushes, core.accepted, core.stale) == (4, 5, 4, 1)


def test_a_repeated_push_gets_its_first_answer_and_changes_nothing():
    core = make()
    first = core.push(0, 0, 0, gradient())
    before = fingerprint(core), core.pushes
    for _ in range(3):
        assert core.push(0, 0, 0, gradient(9)) == first
    assert (fingerprint(core), core.pushes) == before


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("push", "reason"),
    [
        ((0, 5, 0, lambda: torch.full((LAYOUT.size,), math.nan)), "NaN"),
        ((0, 5, 0, lambda: torch.ones(LAYOUT.size, requires_grad=True)), "not a plain tensor"),
        ((0, 5, 0, lambda: torch.ones(LAYOUT.size).to_sparse()), "not a plain tensor"),
        ((0, 5, 0, lambda: torch.full((LAYOUT.size,), -math.inf)), "Inf"),
        ((0, 5, 0, lambda: torch.zeros(LAYOUT.size + 1)), "shape"),
        ((0, 5, 0, lambda: torch.zeros(1, LAYOUT.size)), "shape"),
        ((0, 5, 0, lambda: torch.zeros(LAYOUT.size, dtype=torch.float64)), "float64"),
        ((0, 5, 1, gradient), "future"),
        ((0, 5, -1, gradient), "negative"),
        ((0, -1, 0, gradient), "negative"),
        ((7, 5, 0, gradient), "not a member"),
        ((-3, 5, 0, gradient), "not a member"),
    ],
)
def test_invalid_pushes_change_nothing(name, push, reason):
    core = make(name)
    before = fingerprint(core)
    receipt = core.push(*push)
    assert receipt.verdict is Verdict.INVALID
    assert reason in receipt.reason
    assert fingerprint(core) == before
    assert (core.invalid, core.pushes) == (1, 1)
    assert core.push(0, 6, 0, gradient()).verdict is Verdict.ACCEPTED


def test_a_large_finite_gradient_is_not_mistaken_for_infinite():
    core = make()
    assert core.push(0, 0, 0, torch.full((LAYOUT.size,), 3e38)).verdict is Verdict.ACCEPTED


def test_sequences_must_increase_and_may_have_gaps():
    core = make()
    core.push(0, 4, 0, gradient())
    assert core.push(0, 9, 1, gradient()).verdict is Verdict.ACCEPTED
    old = core.push(0, 4, 1, gradient())
    assert old.verdict is Verdict.INVALID
    assert "must increase" in old.reason


def test_stale_gradients_are_never_computed():
    core = make("rennala")
    for sequence in range(3):
        core.push(0, sequence, 0, gradient())
    assert core.push(1, 0, 0, lambda: pytest.fail("computed in vain")).verdict is Verdict.STALE


def test_fetch_reports_an_unchanged_version():
    core = make()
    assert core.fetch().version == 0
    assert core.fetch(0) is None
    core.push(0, 0, 0, gradient())
    assert core.fetch(0).version == 1


def test_snapshots_are_never_written_again():
    core = make()
    taken = [core.fetch()]
    copies = [taken[0].iterate.clone()]
    for sequence in range(4):
        core.push(0, sequence, core.version, gradient(sequence))
        taken.append(core.fetch())
        copies.append(taken[-1].iterate.clone())
    assert all(torch.equal(snapshot.iterate, c) for snapshot, c in zip(taken, copies, strict=True))


def test_recycled_memory_is_reused():
    core = make()
    first = core.fetch()
    core.push(0, 0, 0, gradient())
    core.recycle(first)
    core.push(0, 1, 1, gradient())
    assert core.fetch().iterate.data_ptr() == first.iterate.data_ptr()
    with pytest.raises(AssertionError):
        core.recycle(core.fetch())


def test_synchronous_waits_for_all_and_applies_the_mean():
    core, alone = make("synchronous", workers=3), make("asynchronous", workers=1)
    receipts = [core.push(worker, 0, 0, gradient(worker)) for worker in range(2)]
    assert all(r.verdict is Verdict.ACCEPTED and r.continue_at == 1 for r in receipts)
    assert core.version == 0
    again = core.push(0, 1, 0, gradient(0))
    assert again.verdict is Verdict.INVALID
    assert "already" in again.reason
    core.push(2, 0, 0, gradient(2))
    assert core.version == 1
    alone.push(0, 0, 0, (gradient(0) + gradient(1) + gradient(2)) / 3)
    torch.testing.assert_close(core.snapshot.iterate, alone.snapshot.iterate)


def test_a_synchronous_round_shrinks_when_someone_leaves():
    core, alone = make("synchronous", workers=3), make("asynchronous", workers=1)
    core.push(0, 0, 0, gradient(0))
    core.push(1, 0, 0, gradient(1))
    core.leave(2)
    assert core.version == 1
    alone.push(0, 0, 0, (gradient(0) + gradient(1)) / 2)
    torch.testing.assert_close(core.snapshot.iterate, alone.snapshot.iterate)
    assert core.push(2, 0, 0, gradient()).reason.startswith("worker 2 is not a member")
    core.leave(1)
    core.leave(0)  # an empty round is not an update
    assert core.version == 1
    assert core.join(2) == 2
    assert core.push(2, 1, 1, gradient()).verdict is Verdict.ACCEPTED
    assert core.version == 2


def test_a_contribution_stays_when_its_worker_leaves():
    core, alone = make("synchronous", workers=2), make("asynchronous", workers=1)
    core.push(0, 0, 0, gradient(0))
    core.leave(0)
    core.push(1, 0, 0, gradient(1))
    alone.push(0, 0, 0, (gradient(0) + gradient(1)) / 2)
    torch.testing.assert_close(core.snapshot.iterate, alone.snapshot.iterate)


def test_delay_adaptive_counts_live_workers():
    core = make("delay_adaptive", workers=4)
    assert core.method.eta(9, 8, len(core.live)) == pytest.approx(0.1 * 4 / 8)
    core.leave(3)
    core.leave(2)
    assert core.method.eta(9, 8, len(core.live)) == pytest.approx(0.1 * 2 / 8)
    assert core.method.eta(9, 1, 2) == 0.1


def test_worker_ids_are_never_reused():
    core = make(workers=2)
    assert core.join(10) == 10
    core.leave(10)
    assert core.join() == 11
    with pytest.raises(ValueError, match="not negative"):
        core.join(-1)


def test_wrong_initial_iterate_is_refused():
    with pytest.raises(ValueError, match="layout needs"):
        ServerCore(torch.zeros(LAYOUT.size, dtype=torch.float64), MAKERS["ringmaster"](), Update(LAYOUT))
    other = ServerCore(torch.zeros(LAYOUT.size), MAKERS["ringmaster"](), Update(LAYOUT)).state()
    other = dataclasses.replace(other, iterate=torch.zeros(3))
    with pytest.raises(ValueError, match="holds 3 parameters"):
        make().load(other)


actions = st.lists(
    st.tuples(
        st.integers(-1, 4),  # worker, some of them strangers
        st.sampled_from(["next", "next", "next", "repeat", "old", "negative"]),
        st.integers(-1, 6),  # how old the gradient is; -1 is from the future
        st.sampled_from(["good", "good", "good", "good", "nan", "inf", "short", "double"]),
        st.sampled_from(["push"] * 8 + ["leave", "join", "reload"]),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(st.sampled_from(sorted(MAKERS)), actions)
def test_the_invariants_hold_for_random_histories(name, history):
    """For any arrivals, counters add up, nothing late is applied, nothing is applied twice, and reloading changes
    nothing."""
    core = make(name, workers=3)
    applied = core.update.apply
    applications = []

    def counting_apply(*args, **kwargs):
        applications.append(1)
        return applied(*args, **kwargs)

    core.update.apply = counting_apply
    sequences, seen, pushed, contributed = {}, {}, 0, 0
    for step, (worker, order, age, content, action) in enumerate(history):
        if action == "leave":
            core.leave(worker)
            continue
        if action == "join" and worker >= 0:
            core.join(worker)
            continue
        if action == "reload":
            state = copy.deepcopy(core.state())
            fresh = make(name, workers=0)
            fresh.update = core.update
            fresh.load(state)
            assert fingerprint(fresh) == fingerprint(core)
            core = fresh
            continue
        last = sequences.get(worker, -1)
        sequence = {"next": last + 1 + step % 3, "repeat": last, "old": last - 1, "negative": -2}[order]
        tensor = {
            "good": gradient(step), "nan": gradient() * math.nan, "inf": gradient() / 0.0, "short": gradient()[1:],
            "double": gradient().double(),
        }[content]  # fmt: skip
        version, before = core.version - age, fingerprint(core)
        threshold = core.method.threshold(core.version)
        pushes_before, updates_before = core.pushes, len(applications)
        receipt = core.push(worker, sequence, version, tensor)
        if (worker, sequence) in seen and sequence == last:
            assert receipt == seen[worker, sequence]
            assert core.pushes == pushes_before
            assert fingerprint(core) == before
            continue
        pushed += 1
        if receipt.verdict is not Verdict.ACCEPTED:
            assert fingerprint(core) == before
            assert len(applications) == updates_before
        else:
            contributed += 1
            assert content == "good"
            assert 0 <= receipt.delay < threshold
        if worker in core.workers and sequence > last:
            sequences[worker] = sequence
            seen[worker, sequence] = receipt
        assert core.pushes == pushed == core.accepted + core.stale + core.invalid
    assert core.version == len(applications)
    assert core.accepted == contributed
    assert sum(r.accepted for r in core.workers.values()) == core.accepted
    if name in ("ringmaster", "agnostic", "delay_adaptive", "asynchronous"):
        assert core.version == core.accepted
    if name == "rennala":
        assert core.version == core.accepted // 3


@pytest.mark.parametrize("name", MAKERS)
def test_a_loaded_core_continues_bit_for_bit(name):
    """The state is saved at any moment, also within a batch or a round, and loaded into a new core."""
    whole, half = make(name), make(name)

    def pushes(core, sequences):
        for sequence in sequences:
            for worker in (0, 1):
                core.push(worker, sequence, max(0, core.version - worker), gradient(10 * sequence + worker))

    pushes(whole, range(5))
    whole.push(0, 5, whole.version, gradient(50))
    pushes(half, range(5))
    half.push(0, 5, half.version, gradient(50))
    resumed = make(name, workers=0)
    resumed.load(copy.deepcopy(half.state()))
    half.push(1, 5, half.version, gradient(99))  # a later push to the old core must not matter
    for core in (whole, resumed):
        core.push(1, 5, core.version, gradient(51))
        pushes(core, range(6, 12))
    assert torch.equal(whole.snapshot.iterate, resumed.snapshot.iterate)
    assert torch.equal(whole.momentum, resumed.momentum)
    assert whole.state().workers == resumed.state().workers
    assert (whole.version, whole.pushes) == (resumed.version, resumed.pushes)
