"""A worker that computes while it pushes, with the real service and without a network. A call takes a given time."""

import threading
import time

import pytest
import torch

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.methods import DelayAdaptive, Method, Rennala
from ringmaster_dist.algorithm.schedules import Constant, agnostic
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.problems import Interrupted
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.outlets import NoJournal
from ringmaster_dist.server.service import Service, Settings
from ringmaster_dist.transport import Unreachable
from ringmaster_dist.wire import Codec, Wire
from ringmaster_dist.worker.job import Job
from ringmaster_dist.worker.loop import Failed, Refused, Worker

SIZE = 6
NEVER = float("inf")
ASYNCHRONOUS = Method(Constant(0.1, 0.5, NEVER))


class Server(NoJournal):
    """A service with its threads. It keeps every arrival, and knows how many pushes are under way."""

    def __init__(self, method, updates, **settings):
        self.arrivals, self.under_way, self.most_under_way, self.asked = [], 0, 0, []
        layout = Layout([Parameter("w", (2, 3))], GEOMETRY_MAPS["muon"])
        core = ServerCore(torch.zeros(SIZE), method, Update(layout))
        given = {"max_seconds": 30.0, "lease_seconds": 10.0, "max_invalid": 2} | settings
        self.service = Service(core, Settings("", "f", "secret", max_updates=updates, **given), self)

    def arrival(self, time, worker, push, receipt):
        self.arrivals.append((worker, push._replace(gradient=push.gradient.clone()), receipt))

    def __enter__(self):
        self.service.start()
        return self

    def __exit__(self, *exception):
        self.service.close()


class Direct:
    """A client that calls the service itself. Every push takes ``seconds``, and those of ``broken`` lose the reply."""

    is_proven = True

    def __init__(self, server, seconds, broken):
        self._server, self._service, self._seconds, self._broken = server, server.service, seconds, broken
        self._is_closed = False

    def push(self, session, push):
        server = self._server
        server.under_way += 1
        server.most_under_way = max(server.most_under_way, server.under_way)
        try:
            time.sleep(self._seconds)
            reply = self._service.push(session, push).wait()
        finally:
            server.under_way -= 1
        if push.sequence in self._broken:
            self._broken.remove(push.sequence)
            raise Unreachable("the reply was lost")
        return reply

    def join(self, request):
        return self._service.join(request).wait()

    def fetch(self, *arguments):
        return self._service.fetch(*arguments)

    def leave(self, session):
        self._service.leave(session)

    def await_stale(self, session, term, version, answer):
        self._server.asked.append((term, version))
        future = self._service.await_stale(session, term, version)
        future.add_done_callback(lambda done: self._is_closed or answer(done.value()))

    def close(self):
        self._is_closed = True


class Slow:
    """Its gradients take ``seconds`` and are full of their sequence. Each overwrites the last one."""

    dtype = torch.float32

    def __init__(self, server, seconds, broken=()):
        self._server, self._seconds, self._broken = server, seconds, broken
        self._memory = torch.empty(SIZE)
        self.num_overlapping = 0  # gradients that were begun while a push was under way

    def gradient(self, iterate, seed, worker, sequence, stop):
        self.num_overlapping += self._server.under_way
        until = time.monotonic() + self._seconds
        while time.monotonic() < until:
            self._memory.fill_(sequence)
            time.sleep(0.001)
            if stop():
                raise Interrupted
        if sequence in self._broken:
            raise ArithmeticError("the device is on fire")
        return self._memory, 0.5


def work(server, *, compute, exchange, lost=(), problem=None, overlap=True):
    """Runs a worker until its end, and returns its problem. Raises what the worker raises."""
    problem, lost = problem or Slow(server, compute), list(lost)
    job = Job(problem, "cpu", "f", 0, None, 1, 0.0, True, overlap, Codec(Wire(), SIZE, torch.float32, copies=overlap))
    worker = Worker(lambda: Direct(server, exchange, lost), lambda config, slot: job, token="secret", slot=-1,
                    devices=(), patience_seconds=5.0)  # fmt: skip
    worker.run()
    return problem


def test_gradients_are_computed_during_pushes_of_which_one_is_under_way():
    """The gradient that is sent keeps its numbers, and no snapshot has the update of the push that is under way."""
    with Server(ASYNCHRONOUS, 12) as server:
        problem = work(server, compute=0.02, exchange=0.02)
    assert server.most_under_way == 1
    assert problem.num_overlapping >= 5
    sequences = [push.sequence for _, push, _ in server.arrivals]
    assert sequences == sorted(set(sequences))
    assert all(torch.equal(push.gradient, torch.full((SIZE,), float(push.sequence))) for _, push, _ in server.arrivals)
    # The first exchange is waited for, to know how long it takes.
    assert [receipt.delay for _, _, receipt in server.arrivals] == [0, 0, *[1] * 10]


@pytest.mark.parametrize(("overlap", "compute", "exchange"), [(True, 0.2, 0.0), (True, 0.0, 0.2), (False, 0.1, 0.1)])
def test_the_reply_is_waited_for_if_overlap_gains_little(overlap, compute, exchange):
    with Server(ASYNCHRONOUS, 3) as server:
        problem = work(server, compute=compute, exchange=exchange, overlap=overlap)
    assert problem.num_overlapping == 0
    assert [receipt.delay for _, _, receipt in server.arrivals] == [0] * 3


@pytest.mark.parametrize(
    "method",
    [ASYNCHRONOUS, Method(Constant(0.1, 0.5, 2)), Method(agnostic(0.1)), DelayAdaptive(Constant(0.1, 0.5, NEVER)),
     Rennala(Constant(0.1, 0.5, NEVER), 3)],
)  # fmt: skip
def test_every_method_comes_to_its_end(method):
    failures = []

    def run():
        try:
            work(server, compute=0.005, exchange=0.005)
        except BaseException as error:
            failures.append(error)

    with Server(method, 15, expected_workers=3, start_seconds=5.0) as server:
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert server.service.core.version == 15
    assert server.service.core.accepted + server.service.core.stale == len(server.arrivals)


@pytest.mark.parametrize("given", [["method=synchronous"], ["method.threshold=1"]])
def test_overlap_is_refused_if_its_gradients_would_always_be_stale(given):
    with pytest.raises(UserError, match=r"^worker\.overlap=true and .* always be stale$"):
        to_typed(compose([*given, "worker.overlap=true"], "train"), real_time=True)


def test_a_lost_reply_is_asked_for_again_during_the_next_gradient():
    """The push counts once, and the work in progress is watched over the new connection."""
    with Server(ASYNCHRONOUS, 10) as server:
        work(server, compute=0.02, exchange=0.02, lost=(3, 6))
    sequences = [push.sequence for _, push, _ in server.arrivals]
    assert sequences == list(range(10))
    assert len(server.asked) >= len(sequences) + 2


def test_work_that_becomes_stale_during_a_push_is_dropped_and_counted():
    """With R = 1, which the configuration refuses, an accepted push makes the work in progress stale."""
    with Server(Method(Constant(0.1, 0.5, 1)), 8) as server:
        work(server, compute=0.04, exchange=0.02)
    assert server.service.core.stale == 0
    assert (2**62, 2**62) in server.asked  # to keep the lease meanwhile
    *_, (_, last, _) = server.arrivals
    assert last.interruptions.num >= 5
    assert server.service.workers[0].interruptions == last.interruptions


def test_a_push_that_ends_the_membership_stops_the_work_at_once():
    class Poisoned(Slow):
        def gradient(self, iterate, seed, worker, sequence, stop):
            gradient, loss = super().gradient(iterate, seed, worker, sequence, stop)
            self._seconds = 20.0 if sequence == 1 else self._seconds
            return gradient * float("nan"), loss

    began = time.monotonic()
    with Server(ASYNCHRONOUS, 100) as server, pytest.raises(Refused, match="2 invalid gradients in a row"):
        work(server, compute=0, exchange=0.05, problem=Poisoned(server, 0.01))
    assert time.monotonic() - began < 10


def test_a_worker_that_fails_during_a_push_leaves_after_it():
    with Server(ASYNCHRONOUS, 100) as server:
        with pytest.raises(Failed, match="on fire"):
            work(server, compute=0, exchange=0.05, problem=Slow(server, 0.01, broken=(4,)))
        assert [push.sequence for _, push, _ in server.arrivals] == [0, 1, 2, 3]
        assert server.service.core.live == set()
