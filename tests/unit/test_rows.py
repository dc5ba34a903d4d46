"""Rows by speed: the assignment, its state, the weight of a row, and what a service and a simulation do with it."""

import math
import random

import pytest
import torch

from ringmaster_dist.algorithm.auto import AutoThreshold
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.methods import Method, Rennala, Synchronous
from ringmaster_dist.algorithm.rows import RowsBySpeed
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.protocol import PROTOCOL_VERSION, Interruptions, JoinRequest, Push
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.service import Service, Settings
from ringmaster_dist.simulation.forecast import RowsForFree
from ringmaster_dist.simulation.simulator import Simulator
from ringmaster_dist.simulation.speeds import Phase, Rates, Speeds

LINEAR = [0.1 * (1 + i) for i in range(8)]  # seconds of a gradient with the usual rows


class Played:
    """A simulated run with rows by speed."""

    def __init__(self, times, *, threshold=16.0, usual=4, least=1, most=4, phases=(), jitter=0.05, method=None, seed=0):
        problem = RowsForFree(3)
        layout = Layout(problem.parameters, GEOMETRY_MAPS["euclidean"])
        self.rows = RowsBySpeed(usual, least, most)
        method = method or Method(Constant(0.1, 0.05, threshold))
        self.core = ServerCore(problem.initial(0), method, Update(layout, dtype=problem.dtype), rows=self.rows)
        rates = Rates.from_phases(list(phases), len(times)) if phases else None
        speeds = Speeds(times, jitter=jitter, seed=seed, rates=rates)
        self.arrivals = []
        self.simulator = Simulator(self.core, problem, speeds, seed=seed, observer=self)

    def arrival(self, time, worker, sequence, gradient_version, receipt, loss, seconds, rows):
        self.arrivals.append((time, worker, sequence, rows, seconds, receipt.verdict.value))

    def sample(self, time): ...

    def run(self, seconds):
        self.simulator.run(seconds=seconds)
        return self

    @property
    def assigned(self):
        return [self.rows.rows_of(worker) for worker in sorted(self.core.live)]

    @property
    def wasted(self):
        used, wasted = self.simulator.used_seconds.sum(), self.simulator.wasted_seconds.sum()
        return wasted / (used + wasted)


def test_rows_follow_speeds_and_every_worker_is_accepted():
    played = Played(LINEAR).run(30.0)
    assert played.assigned == [4, 2, 1, 1, 1, 1, 1, 1]
    assert played.wasted < 0.05
    assert all(record.accepted > 20 for record in played.core.workers.values())
    assert played.core.stale == 0
    changes = played.rows.changes()  # each worker with more than the least number of rows was told once
    assert [(change.worker, change.rows) for change in changes] == [(0, 4), (1, 2)]
    assert all("s per row" in change.reason for change in changes)
    # A gradient of r rows takes r / usual of the worker's time, and no row is counted twice.
    for _, worker, _, rows, seconds, _ in played.arrivals:
        assert 1.0 <= seconds / (LINEAR[worker] * rows / 4) < 1.3
    for worker in played.core.live:
        accepted = [rows for _, own, _, rows, _, verdict in played.arrivals if (own, verdict) == (worker, "accepted")]
        assert played.rows.accepted_rows(worker) == sum(accepted)


def test_the_quick_take_more_than_usual_only_if_the_slow_would_be_late():
    times = [0.1, 0.1, 0.1, 1.6]
    assert Played(times, threshold=math.inf, most=64).run(30.0).assigned == [4, 4, 4, 1]
    late = Played(times, threshold=16, most=4).run(30.0)
    assert late.assigned == [4, 4, 4, 1]
    assert late.core.workers[3].accepted > 0  # 1 row takes 4 times as long as the others' gradients
    tight = Played(times, threshold=8, most=64).run(60.0)
    assert tight.assigned[3] == 1
    assert tight.assigned[0] > 4
    assert tight.wasted < 0.05
    assert tight.core.workers[3].accepted > 100


def test_rows_and_threshold_choose_themselves_together():
    played = Played(LINEAR, method=AutoThreshold(Constant(0.1, 0.05))).run(60.0)
    assert played.assigned == [4, 2, 1, 1, 1, 1, 1, 1]
    assert all(record.accepted > 0 for record in played.core.workers.values())


@pytest.mark.parametrize("method", [Synchronous(Constant(0.1, 0.05)), Rennala(Constant(0.1, 0.05), 4)])
def test_a_round_is_not_later_for_unequal_speeds(method):
    played = Played(LINEAR[:4], most=64, method=method).run(30.0)
    assert played.assigned == [4, 2, 1, 1]
    assert played.core.version > 200  # a round of equal rows takes 0.4 s


@pytest.mark.parametrize("seed", range(5))
def test_rows_do_not_follow_jitter(seed):
    played = Played(LINEAR, jitter=0.15, seed=seed).run(60.0)
    assert len(played.rows.changes()) <= 16  # in about 4,000 updates


@pytest.mark.parametrize("threshold", [8.0, 16.0, math.inf])
def test_a_worker_that_becomes_eight_times_slower_gets_fewer_rows_within_ten_gradients(threshold):
    """With a small threshold all its work is interrupted at first, so only its silence tells."""
    slowed, at = 0, 20.0
    played = Played(LINEAR[:4], threshold=threshold, phases=[Phase(at, 0.125, [slowed])]).run(at)
    assert played.assigned == [4, 2, 1, 1]
    before = int(played.simulator._arrivals.sequence[slowed])
    while played.rows.rows_of(slowed) == 4:
        played.simulator.run(updates=played.core.version + 1, seconds=60.0)
    assert played.simulator._arrivals.sequence[slowed] - before <= 10
    played.run(60.0)
    assert played.assigned == [1, 4, 3, 2]  # the second is the quickest now, with 0.05 s per row; the first takes 0.2 s
    late = [verdict for time, worker, *_, verdict in played.arrivals if worker == slowed and time > 30.0]
    assert len(late) > 30
    assert late.count("accepted") == len(late)


def test_workers_that_leave_and_join_are_followed():
    rows, live = RowsBySpeed(8, 1, 8), {0, 1}

    def arrives(worker, seconds_per_row, times=1):
        for _ in range(times):
            taken = rows.rows_of(worker)
            rows.observe(worker, taken, taken * seconds_per_row, live, version=0, threshold=16, accepted=True)

    arrives(0, 0.01)
    arrives(1, 0.04)
    assert (rows.rows_of(0), rows.rows_of(1)) == (8, 2)
    live.discard(0)
    arrives(1, 0.04)
    assert rows.rows_of(1) == 8  # it is the quickest now
    live |= {0, 2}
    assert rows.rows_of(2) == 1  # its speed is not known
    arrives(2, 0.02)
    assert (rows.rows_of(0), rows.rows_of(1), rows.rows_of(2)) == (8, 2, 4)


@pytest.mark.parametrize("slowness", [[1.0, 1.0, 1.0], [1.0, 2.0, 4.0]])
def test_gradients_take_equally_long_even_if_each_has_a_fixed_cost(slowness):
    rows, live = RowsBySpeed(16, 1, 16), set(range(3))
    for _ in range(40):
        for worker, factor in enumerate(slowness):
            taken = rows.rows_of(worker)
            seconds = factor * (0.02 + 0.01 * taken)
            rows.observe(worker, taken, seconds, live, version=0, threshold=16, accepted=True)
    took = [factor * (0.02 + 0.01 * rows.rows_of(worker)) for worker, factor in enumerate(slowness)]
    assert max(took) / min(took) < 1.3
    assert len(rows.changes()) < 25


def test_the_state_resumes_to_the_same_rows():
    draws, live = random.Random(0), {0, 1, 2, 3}
    one = RowsBySpeed(8, 1, 32)
    for index in range(400):
        worker = draws.randrange(4)
        if index == 200:
            two = RowsBySpeed(8, 1, 32)
            two.load_state_dict(one.state_dict())
            one.changes()
        taken, seconds = draws.randrange(1, 33), draws.uniform(0.01, 0.5)
        for each in (one,) if index < 200 else (one, two):
            each.observe(worker, taken, seconds, live, version=index, threshold=8, accepted=index % 2 == 0)
    assert one.state_dict() == two.state_dict()
    assert list(one.changes()) == list(two.changes()) != []


def make_core(method=None, rows=None):
    layout = Layout([Parameter("w", (2, 3))], GEOMETRY_MAPS["euclidean"])
    return ServerCore(
        torch.zeros(6), method or Method(Constant(0.1, 0.1, 16)), Update(layout, nesterov=False), rows=rows
    )


def test_a_gradient_of_twice_the_usual_rows_is_two_updates_with_it():
    """In the Euclidean geometry the steps of two updates with one direction add up."""
    gradient = torch.arange(6.0) + 1
    once, twice = make_core(rows=RowsBySpeed(4, 1, 8)), make_core(rows=RowsBySpeed(4, 1, 8))
    for core in (once, twice):
        core.join()
    once.push(0, 0, 0, gradient, rows=8)
    twice.push(0, 0, 0, gradient, rows=4)
    twice.push(0, 1, 1, gradient, rows=4)
    torch.testing.assert_close(once.momentum, twice.momentum)
    torch.testing.assert_close(once.snapshot.iterate, twice.snapshot.iterate)


@pytest.mark.parametrize("method", [Rennala(Constant(0.1, 0.1), 2), Synchronous(Constant(0.1, 0.1))])
def test_a_mean_is_weighted_by_rows(method):
    core = make_core(method, RowsBySpeed(4, 1, 4))
    core.join()
    core.join()
    one, three = torch.randn(6), torch.randn(6)
    core.push(0, 0, 0, one, rows=1)
    resumed = make_core(type(method)(*((method.schedule, 2) if isinstance(method, Rennala) else (method.schedule,))),
                        RowsBySpeed(4, 1, 4))  # fmt: skip
    resumed.load(core.state())  # in the middle of a round
    for each in (core, resumed):
        each.push(1, 0, 0, three, rows=3)
        assert each.version == 1
        alpha = 1 - 0.9 ** ((1 + 3) / 2 / 4)  # the round has half of the usual rows
        torch.testing.assert_close(each.momentum, alpha * (one + 3 * three) / 4)


@pytest.mark.parametrize(("rows", "assigned"), [(0, 1), (-1, 1), (5, 1), (2**62, 1), (1, 0)])
def test_a_lie_about_rows_is_refused_and_changes_nothing(rows, assigned):
    core = make_core(rows=RowsBySpeed(4, 1, 4) if assigned else None)
    core.join()
    receipt = core.push(0, 0, 0, torch.ones(6), compute_seconds=1e-9, rows=rows)
    assert receipt.verdict.value == "invalid"
    assert f"it says that it has {rows} rows" in receipt.reason
    assert core.version == 0
    assert core.rows_of(0) == assigned


class Notes:
    def __init__(self):
        self.pushes, self.assigned = [], []

    def arrival(self, time, worker, push, receipt):
        self.pushes.append((worker, push.rows))

    def rows(self, time, change):
        self.assigned.append((change.worker, change.rows))

    def membership(self, *what): ...

    def flush(self): ...

    def mark(self):
        return {}


def test_a_service_tells_rows_with_every_answer():
    notes, core = Notes(), make_core(rows=RowsBySpeed(4, 1, 4))
    settings = Settings("", "", "secret", 1000, 1000.0, 10.0, max_invalid=10)
    service = Service(core, settings, notes)
    quick, slow = (service.join(JoinRequest(PROTOCOL_VERSION, "secret", -1)) for _ in range(2))
    service.tick()
    quick, slow = quick.wait(), slow.wait()
    assert quick.rows == slow.rows == 1

    def push(who, sequence, rows, seconds):
        pushed = service.push(who.session, Push(sequence, core.version, torch.ones(6), 0.5, seconds, 0, rows))
        service.compute()
        return pushed.wait()

    first = push(quick, 0, 1, 0.01)
    assert first.rows == 4
    assert push(slow, 0, 1, 0.02).rows == 2
    again = push(quick, 0, 1, 0.01)  # its reply was lost
    assert (again.receipt, again.rows) == (first.receipt, first.rows)
    assert service.fetch(slow.session, 0, 0, Interruptions()).rows == 2
    assert notes.pushes == [(0, 1), (1, 1)]
    assert notes.assigned == [(0, 4), (1, 2)]
    measured = {worker.worker: (worker.rows, worker.accepted_rows) for worker in service.measure().workers}
    assert measured == {0: (4, 1), 1: (2, 1)}
