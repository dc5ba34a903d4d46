"""A server whose updates are computed on an accelerator: its results, its state, and what does not wait for it."""

import threading

import pytest
import torch

from ringmaster_dist import devices
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.methods import Method, Rennala
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.protocol import PROTOCOL_VERSION, JoinRequest, Push, Verdict
from ringmaster_dist.runtime.placement import servers_device
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.outlets import NoJournal
from ringmaster_dist.server.service import Service, Settings
from ringmaster_dist.wire import Codec, Wire

pytestmark = pytest.mark.accelerator
LAYOUT = Layout([Parameter("w", (8, 6)), Parameter("v", (8, 6)), Parameter("b", (5,))], GEOMETRY_MAPS["scion"])
WAIT = 20.0  # seconds


def core_on(device, method, wire=Wire()):  # noqa: B008  (immutable)
    return ServerCore(torch.linspace(-1, 1, LAYOUT.size), method, Update(LAYOUT, device=device), wire.gradient_dtype)


class Running:
    """A service with its threads, and one worker that has joined."""

    def __init__(self, core, wire=Wire()):  # noqa: B008  (immutable)
        settings = Settings("", "", "t", 1e9, 1e9, lease_seconds=600.0, max_invalid=10, wire=wire)
        self.service = Service(core, settings, NoJournal())

    def __enter__(self):
        self.service.start()
        self.session = self.service.join(JoinRequest(PROTOCOL_VERSION, "t", -1)).wait().session
        return self

    def __exit__(self, *exception):
        self.service.close()

    def push(self, sequence, version, gradient):
        return self.service.push(self.session, Push(sequence, version, gradient, 0.5, 0.1))


def gradients(count, dtype):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(LAYOUT.size, generator=draw).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("make", [lambda s: Method(s), lambda s: Rennala(s, 2)], ids=["every gradient", "means of two"])
@pytest.mark.parametrize("wire", [Wire(), Wire(torch.bfloat16, torch.bfloat16), Wire(torch.int8)])
def test_a_service_on_an_accelerator_computes_what_the_core_does_on_the_cpu(make, wire, accelerator):
    dtype = wire.iterate_dtype or torch.float32
    codec = Codec(wire, LAYOUT.size, torch.float32)
    on_cpu = core_on("cpu", make(Constant(0.1, 0.5, 3)), wire)
    on_cpu.join()
    core = core_on(accelerator, make(Constant(0.1, 0.5, 3)), wire)
    with Running(core, wire) as running:
        for sequence, gradient in enumerate(gradients(5, torch.float32)):
            gradient = codec.encode_gradient(gradient, 0, 0, sequence)
            on_cpu.push(0, sequence, on_cpu.version, gradient)
            reply = running.push(sequence, core.version, gradient).wait()
            assert reply.receipt.verdict is Verdict.ACCEPTED
            assert reply.snapshot.version == on_cpu.version
            assert reply.snapshot.iterate.dtype is dtype
            expected = on_cpu.snapshot.iterate.to(dtype)
            torch.testing.assert_close(reply.snapshot.iterate, expected)  # so it is in host memory
        assert running.service.measure().device_memory_bytes > 0
    assert core.snapshot.iterate.device == core.momentum.device == torch.device(accelerator)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(core.momentum.cpu(), torch.zeros(LAYOUT.size))


def test_verdicts_and_copies_do_not_wait_for_an_update(accelerator, monkeypatch):
    core = core_on(accelerator, Method(Constant(0.1, 0.5, 1)))
    begun, go_on, computed = threading.Event(), threading.Event(), core.update.apply

    def slow(*tensors, **settings):
        begun.set()
        assert go_on.wait(WAIT)
        computed(*tensors, **settings)

    monkeypatch.setattr(core.update, "apply", slow)
    with Running(core) as running:
        publisher = running.service._publisher
        first = running.push(0, 0, torch.ones(LAYOUT.size))
        assert begun.wait(WAIT)
        other = running.service.join(JoinRequest(PROTOCOL_VERSION, "t", -1)).wait().session
        second = running.service.push(other, Push(0, 1, torch.full((LAYOUT.size,), 2.0), 0.5, 0.1))  # decided too
        copied = publisher._copied.get(timeout=WAIT)  # although the first update is still being computed
        assert torch.equal(copied.cpu(), torch.full((LAYOUT.size,), 2.0))
        publisher._copied.put(copied)
        assert not first.done()
        assert (core.version, core.stale) == (2, 0)
        third = running.service.join(JoinRequest(PROTOCOL_VERSION, "t", -1)).wait().session
        running.service.push(third, Push(0, 0, torch.ones(LAYOUT.size), 0.5, 0.1))
        assert core.stale == 1  # the verdict is there
        go_on.set()
        assert [first.wait().receipt.delay, second.wait().receipt.delay] == [0, 0]


def test_a_state_moves_between_devices(accelerator):
    """A run that was saved on an accelerator continues on a CPU, and the other way round."""
    pushed = gradients(6, torch.float32)
    plain = core_on("cpu", Rennala(Constant(0.1, 0.5, 3), 2))
    plain.join()
    for sequence, gradient in enumerate(pushed):
        plain.push(0, sequence, plain.version, gradient)
    core = core_on(accelerator, Rennala(Constant(0.1, 0.5, 3), 2))
    core.join()
    for sequence, gradient in enumerate(pushed):
        if sequence in (1, 3):  # with one gradient in the sum
            state = core.state()
            assert {state.iterate.device.type, state.momentum.device.type, state.sum.device.type} == {"cpu"}
            core = core_on("cpu" if sequence == 1 else accelerator, Rennala(Constant(0.1, 0.5, 3), 2))
            core.load(state)
        core.push(0, sequence, core.version, gradient)
    torch.testing.assert_close(core.snapshot.iterate.cpu(), plain.snapshot.iterate)
    torch.testing.assert_close(core.momentum.cpu(), plain.momentum)


def test_a_gradient_in_device_memory_is_invalid(accelerator):
    core = core_on(accelerator, Method(Constant(0.1, 0.5, 3)))
    assert "host memory" in core.gradient_fault(torch.ones(LAYOUT.size, device=accelerator))
    assert core.gradient_fault(torch.ones(LAYOUT.size)) == ""


def test_the_server_takes_an_accelerator_that_no_worker_uses(monkeypatch):
    monkeypatch.setattr(devices, "accelerators", lambda: ["cuda:0", "cuda:1", "cuda:2"])

    def device(*overrides):
        return servers_device(to_typed(compose(["cluster.profile=none", *overrides], "train"), real_time=True))

    assert device("cluster.workers=2") == "cuda:2"
    assert device("cluster.workers=3") == "cpu"
    assert device("cluster.workers=9", "cluster.local_workers=0") == "cuda:0"
    assert device("cluster.workers=2", "cluster.devices=[cuda:1,cpu]") == "cuda:0"
    assert device("cluster.workers=3", "server.device=cuda:1") == "cuda:1"
    monkeypatch.setenv("LOCAL_RANK", "0")  # the server's; the workers are ranks 1 and 2
    assert device("cluster.workers=2") == "cuda:0"
