"""Gradients on an accelerator are those of the CPU, and a mistake about a device is reported as one.

They run on the accelerator of this machine, or on a pretended one (tests/pretend.py), which finds forgotten and mixed
transfers, but has no streams, no pinned memory and no number types of its own.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ringmaster_dist import devices, quantized
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout
from ringmaster_dist.cli.main import main
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import read_profile
from ringmaster_dist.doctor.machine import machine_findings
from ringmaster_dist.observe.run_files import RunFiles
from ringmaster_dist.problems import Interrupted
from ringmaster_dist.problems.module import ModuleProblem
from ringmaster_dist.problems.nanochat import NanoChatConfig
from ringmaster_dist.problems.nanochat import corpus as corpora
from ringmaster_dist.problems.nanochat.problem import NanoChatProblem
from ringmaster_dist.problems.nanochat.rows import Recipe, prepare
from ringmaster_dist.problems.seeding import seeded
from ringmaster_dist.wire import Codec, Wire
from ringmaster_dist.worker.job import device_of
from tests import pretend

pytestmark = pytest.mark.accelerator
MISSING = "pretend:7"


def draws(device, *, forgets=False):
    """Returns a function that draws batches on a device, or forgets to send one half of them there."""

    def batches(seed, worker, sequence):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * seed + 100 * worker + sequence))
        tokens = torch.arange(16) % 5
        return [(x.to(device), tokens if forgets else tokens.to(device))] * 2

    return batches


class Small(nn.Module):
    """It has an embedding, batch norm, whose buffers change, a frozen parameter and a tied weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.norm = nn.Embedding(5, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x, tokens):
        return self.head(torch.tanh(self.norm(self.body(x + self.embed(tokens))))) * self.scale


def loss(module, batch):
    return F.cross_entropy(module(*batch), batch[1])


def bound(problem):
    problem.bind(Layout(problem.parameters, GEOMETRY_MAPS["muon"]))
    return problem


def small(device, **more):
    with seeded(3):
        module = Small()
    evaluate = lambda module: {"loss": loss(module, draws(device)(9, 9, 9)[0])}  # noqa: E731
    return bound(ModuleProblem(module, draws(device, **more), loss, evaluate=evaluate, device=device, clip=0.1,
                               watched=[module.body]))  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("\n".join(f"the {i} of {i * i % 97} is {i % 7}" for i in range(2000)))
    return prepare(Recipe(corpora.text_files(folder), 32, folder / "cache", vocab_size=300))


def nanochat(device, rows, **more):
    tiny = NanoChatConfig(n_layer=4, n_head=2, n_kv_head=2, n_embd=64, vocab_size=300, sequence_len=32)
    given = {"batch": 4, "micro_batch": 2, "precision": "float32", "attention": "sdpa", **more}
    return bound(NanoChatProblem(tiny, rows, device=device, validation_rows=4, **given))


def close(found, expected):
    return float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def check_same(on_device, on_cpu):
    """The gradient, the loss, the evaluation and the exported state are equal to rounding, and in host memory."""
    iterate = on_cpu.initial(0)
    assert torch.equal(iterate, on_device.initial(0))
    for sequence in range(2):
        found, found_loss = on_device.gradient(iterate, 1, 2, sequence)
        expected, expected_loss = on_cpu.gradient(iterate, 1, 2, sequence)
        assert found.device.type == "cpu"
        assert close(found, expected)
        assert found_loss == pytest.approx(expected_loss, rel=1e-5)
    assert on_device.evaluate(iterate) == pytest.approx(on_cpu.evaluate(iterate), rel=1e-5)
    state, expected = on_device.state_dict(iterate), on_cpu.state_dict(iterate)
    assert {name for name, tensor in state.items() if tensor.device.type != "cpu"} == set()
    assert [name for name in expected if not torch.allclose(state[name], expected[name], 1e-4, 1e-5)] == []
    assert on_device.data_fingerprint == on_cpu.data_fingerprint


def test_a_module_s_gradient_is_the_cpu_s(accelerator):
    check_same(small(accelerator), small("cpu"))


def test_nanochat_s_gradient_is_the_cpu_s(accelerator, rows):
    check_same(nanochat(accelerator, rows), nanochat("cpu", rows))


def test_nanochat_s_default_precision_and_attention_compute(accelerator, rows):
    """They depend on the device, so the gradient is only near to the CPU's."""
    problem, on_cpu = nanochat(accelerator, rows, precision="auto", attention="auto"), nanochat("cpu", rows)
    iterate = on_cpu.initial(0)
    expected = on_cpu.gradient(iterate, 1, 2, 0)[0]
    assert F.cosine_similarity(problem.gradient(iterate, 1, 2, 0)[0], expected, dim=0) > 0.99


def test_work_on_a_device_is_interrupted(accelerator):
    """In the forward pass, and in the backward pass, which has a thread of its own on an accelerator.

    A pretended accelerator cannot raise an exception in that thread.
    """
    for earlier in (1,) if accelerator == pretend.NAME else (1, 2):
        problem, looks = small(accelerator), iter([*[False] * earlier, True])
        with pytest.raises(Interrupted):
            problem.gradient(problem.initial(0), 1, 2, 0, lambda looks=looks: next(looks))


def test_a_mixture_of_devices_fails(accelerator):
    problem = small(accelerator, forgets=True)
    with pytest.raises(RuntimeError, match="device"):
        problem.gradient(problem.initial(0), 1, 2, 0)


def test_a_copy_into_host_memory_has_arrived_when_it_is_used(accelerator, monkeypatch):
    pretended = accelerator == pretend.NAME
    if pretended:  # it has no pinned memory, but it copies as if it had
        monkeypatch.setattr(devices, "pinned", lambda size, dtype, device: torch.empty(size, dtype=dtype))
    memory = devices.HostMemory(1000, torch.float32, accelerator)
    places = set()
    for value in range(3):
        host = memory.receive(torch.full((1000,), float(value), device=accelerator))
        assert torch.equal(host, torch.full((1000,), float(value)))
        places.add(host.data_ptr())
    assert len(places) == 1
    if pretended:
        monkeypatch.setattr(devices, "finish", lambda device: None)
        assert memory.receive(torch.ones(1000, device=accelerator)).isnan().all()  # so the test above sees a mistake


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.int8])
def test_a_gradient_is_rounded_on_its_device_to_the_same_bits(accelerator, dtype, monkeypatch):
    monkeypatch.setattr(quantized, "_PIECE_OF_ACCELERATOR", 2 * quantized._PERIOD)
    gradient = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    expected = Codec(Wire(dtype), 300_001, torch.float32).encode_gradient(gradient, 3, 1, 4)
    codec = Codec(Wire(dtype), 300_001, torch.float32, accelerator)
    found = codec.encode_gradient(gradient.to(accelerator), 3, 1, 4)
    assert found.device.type == "cpu"
    assert found.nbytes == codec.gradient_bytes
    assert torch.equal(found, expected)


def test_a_worker_s_gradient_stays_on_the_device_until_it_is_rounded(accelerator):
    problem = small(accelerator)
    problem.leaves_on_device = True
    gradient, _ = problem.gradient(problem.initial(0), 1, 2, 0)
    assert gradient.device == torch.device(accelerator)
    found = Codec(Wire(), len(gradient), torch.float32, accelerator).encode_gradient(gradient, 1, 2, 0)
    assert close(found, small("cpu").gradient(problem.initial(0), 1, 2, 0)[0])


def test_the_cpu_s_tensors_are_not_copied():
    tensor = torch.ones(3)
    assert devices.HostMemory(3, torch.float32, "cpu").receive(tensor) is tensor


def test_draws_on_a_device_repeat_and_leave_its_generator_alone(accelerator):
    def drawn():
        return F.dropout(torch.ones(100, device=accelerator)).cpu()

    with seeded(5, accelerator):
        first = drawn()
    states = [generator.get_state() for generator in devices.generators(accelerator)]
    with seeded(5, accelerator):
        assert torch.equal(drawn(), first)
    after = [generator.get_state() for generator in devices.generators(accelerator)]
    assert all(map(torch.equal, states, after))


def test_workers_take_the_accelerators_in_turn(accelerator, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    count = len(devices.accelerators())
    assert [device_of(slot) for slot in range(3)] == [devices.accelerators()[slot % count] for slot in range(3)]
    assert device_of(3, "cpu") == "cpu"
    with pytest.raises(UserError, match=f"device={MISSING}: this machine has no device '{MISSING}'; it has cpu, "):
        device_of(0, MISSING)


def test_the_doctor_lists_every_device(accelerator, tmp_path):
    found = {finding.what: finding for finding in machine_findings(tmp_path)}
    assert found[accelerator].ok
    assert "float32" in found[accelerator].text
    assert devices.title(accelerator) in found[accelerator].text


def test_the_profile_of_every_device_is_a_cluster(accelerator, tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n".join(f"the {i} of {i * i % 97} is {i % 7}" for i in range(2000)))
    given = ["data=text", f"data.path={tmp_path}/text", "model.n_layer=2", "model.n_embd=32", "model.sequence_len=32",
             "model.vocab_size=300", "problem.precision=float32", "problem.attention=sdpa", "steps=2"]  # fmt: skip
    path = tmp_path / "profile.json"
    assert main(["profile", *given, f"output={path}"]) == 0
    assert f"{devices.title(accelerator)} " in capsys.readouterr().out
    profile = read_profile(path)
    assert [device["device"] for device in profile.devices] == devices.available()
    assert all(device["torch"] == torch.__version__ and device["rows"] == 4 for device in profile.devices)
    assert all(device["seconds_min"] <= device["seconds_mean"] <= device["seconds_max"] for device in profile.devices)

    paced = [f"cluster.profile_file={path}", "cluster.profile=file", "cluster.workers=4", "budget.updates=20"]
    assert main(["simulate", *paced, f"run.dir={tmp_path}/run", "run.report=false"]) == 0
    seconds = [worker.base_seconds for worker in RunFiles(tmp_path / "run").summary().per_worker.values()]
    assert seconds == (4 * profile.seconds)[:4]

    assert main(["profile", *given, f"output={path}", f"device={accelerator}"]) == 0
    assert [device["device"] for device in read_profile(path).devices] == [accelerator]


OWN = """
from ringmaster_dist.problems.quadratic import Quadratic
class Staying(Quadratic):
    device = "cpu"
    def gradient(self, *arguments):
        gradient, loss = super().gradient(*arguments)
        return gradient.to(self.device), loss
def factory(seed, device):
    problem = Staying(4)
    problem.device = device
    return problem
"""


def test_a_gradient_in_device_memory_is_refused_before_a_run(accelerator, tmp_path, monkeypatch, capsys):
    """It is refused although only the second worker has the accelerator."""
    (tmp_path / "staying.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    given = ["problem=python", "problem.target=staying:factory", f"run.dir={tmp_path}/run", "cluster.workers=2"]
    assert main(["train", *given, f"cluster.devices=[cpu,{accelerator}]"]) == 2
    assert f"the gradient is on {accelerator}: it has to be in host memory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("command", "key"), [
    ("train", f"cluster.devices=[cpu,{MISSING}]"),
    ("train", f"server.device={MISSING}"),
    ("worker", f"device=cpu,{MISSING}"),
])  # fmt: skip
def test_a_missing_device_is_one_line(command, key, accelerator, tmp_path, capsys):
    given = [f"run.dir={tmp_path}/run"] if command == "train" else ["server=127.0.0.1:9"]
    assert main([command, *given, key]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    there = ", ".join(devices.available())
    assert line == f"ringmaster: {key}: this machine has no device '{MISSING}'; it has {there}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("overrides", "words"), [
    (["cluster.devices=[]"], "cluster.devices=[]: name at least one device"),
    (["cluster.devices=[cpu]", "cluster.local_workers=0"], "is for workers that this machine starts"),
])  # fmt: skip
def test_a_list_of_devices_without_a_use_is_refused(overrides, words, capsys):
    assert main(["train", *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
