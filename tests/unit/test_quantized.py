"""Gradients in int8: what they cost, how far they are from the gradient, and that their mean is the gradient."""

import math

import numpy as np
import pytest
import torch

from ringmaster_dist import quantized, randomness
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.methods import Method, Rennala
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.quantized import whole
from ringmaster_dist.server.core import NOT_FINITE, ServerCore
from ringmaster_dist.wire import Codec, Wire
from tests.unit.test_update import LargestAllocation

INT8 = Wire(torch.int8)


def codec(size, dtype=torch.float32):
    return Codec(INT8, size, dtype)


def sent(gradient, *draw):
    """The gradient as the server reads it."""
    return whole(codec(len(gradient)).encode_gradient(gradient, *draw), len(gradient))


def largest_of_block(gradient):
    """For each number, the largest of its block."""
    return torch.cat([block.abs().max().expand(len(block)) for block in gradient.split(quantized.BLOCK)])


def transcribed(gradient, seed, worker, sequence):
    """The packed form in numpy, number by number, as the docstring of the module describes it."""
    key = randomness.bits(randomness.worker_key(seed, randomness.STREAM_ROUNDING, worker), sequence)
    f32, scales, steps = np.float32, [], []
    for low in range(0, len(gradient), 256):
        block = gradient[low : low + 256]
        scale = max(f32(max(abs(block)) / f32(127 - 2**-10)), np.finfo(f32).tiny)
        scales.append(scale)
        for place, number in enumerate(block, low):
            period, within = divmod(place, 65536)
            word = randomness.bits(key, within // 4) + randomness.bits(randomness.bits(key, -1), period)
            drawn = (word >> 16 * (place % 4)) & 0xFFFF
            drawn -= 0x10000 if drawn >= 0x8000 else 0
            steps.append(np.rint(f32(number * (f32(1) / scale)) + f32(drawn / 65536)))
    return np.array(scales, f32).tobytes() + np.array(steps, np.int8).tobytes()


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000, 66_000])
def test_a_packed_gradient_is_what_its_description_says(size):
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3
    packed = codec(size).encode_gradient(gradient, 7, 2, 5)
    assert packed.numpy().tobytes() == transcribed(gradient.numpy(), 7, 2, 5)
    assert packed.nbytes == codec(size).gradient_bytes == size + 4 * math.ceil(size / 256)


def test_the_bits_depend_on_the_draw_and_on_nothing_else(monkeypatch):
    size = 300_003  # several pieces
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0))
    mine = codec(size)
    first = mine.encode_gradient(gradient, 0, 1, 2)
    for draw in [(1, 1, 2), (0, 2, 2), (0, 1, 3)]:
        other = mine.encode_gradient(gradient, *draw)
        assert 0.3 < float((first != other).double().mean()) < 0.7
    assert torch.equal(mine.encode_gradient(gradient, 0, 1, 2), first)
    assert torch.equal(codec(size, torch.float64).encode_gradient(gradient.double(), 0, 1, 2), first)
    monkeypatch.setattr(quantized, "_PIECE", quantized._PERIOD)
    assert torch.equal(codec(size).encode_gradient(gradient, 0, 1, 2), first)


def test_packing_makes_no_copy_of_the_gradient():
    size = 600_000
    gradient = torch.ones(size, dtype=torch.float64)
    quantizer, out = quantized.Quantizer(size, "cpu"), torch.empty(quantized.packed_size(size), dtype=torch.int8)
    with LargestAllocation() as watch:
        quantizer.pack(gradient, 0, out)
    assert 0 < watch.elements < 2000  # scales
    assert quantizer._numbers.numel() < size / 2


@pytest.mark.parametrize("place", [0, 300, 1023])
def test_no_number_moves_by_more_than_a_step(place):
    """One huge number makes the steps of its block long, and those of no other block."""
    gradient = torch.randn(1100, generator=torch.Generator().manual_seed(1))
    gradient[place] = -1e30
    for sequence in range(20):
        error = (sent(gradient, 0, 0, sequence) - gradient).abs()
        assert bool((error <= 1.0001 * largest_of_block(gradient) / 127).all())


def test_the_mean_over_draws_is_the_gradient():
    """A number between two steps is a coin toss. The mean of n tosses is within 5 sigma of its expectation."""
    gradient = torch.randn(700, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradient[256:512] *= 1e-12
    mine, draws = codec(700, torch.float64), 2000
    total = torch.zeros(700, dtype=torch.float64)
    for sequence in range(draws):
        total += whole(mine.encode_gradient(gradient, 3, 1, sequence), 700)
    scale = largest_of_block(gradient) / (127 - 2**-10)
    place = gradient / scale
    below = place - place.floor()
    sigma = (below * (1 - below) / draws).sqrt()
    error = (total / draws - gradient) / scale
    assert bool((error.abs() < 5 * sigma + 1e-4).all())
    assert abs(float(error.mean())) < 5 * float(sigma.mean()) / math.sqrt(700)  # nor do all lean to one side


def test_errors_of_numbers_that_share_hashed_bits_are_uncorrelated():
    """All numbers lie halfway between two steps, so an error is a fair coin. Pairs are one and two periods apart."""
    size, gradients = 2 * quantized._PERIOD + 256, 100
    gradient = torch.full((size,), 0.5)
    gradient[:: quantized.BLOCK] = 127 - 2.0**-10  # so that the scale is one
    mine = codec(size)
    coins = torch.stack([mine.encode_gradient(gradient, 0, 0, k)[-size:] for k in range(gradients)]).double() * 2 - 1
    first, second, third = (coins[:, low + 1 : low + 256] for low in (0, quantized._PERIOD, 2 * quantized._PERIOD))
    for one, other in ((first, second), (first, third), (second, third), (first, first.roll(1, 1))):
        assert abs(float((one * other).mean())) < 5 / math.sqrt(one.numel())


def test_the_extremes_of_float32():
    limits = torch.finfo(torch.float32)
    for number in (0.0, limits.smallest_normal / 2**20, 2.0**-149, limits.smallest_normal, limits.max / 2):
        gradient = torch.tensor([number, -number, 0.0])
        packed = codec(3).encode_gradient(gradient, 0, 0, 0)
        assert quantized.is_finite(packed, 3)
        step = max(number / 126, limits.smallest_normal)
        assert bool(((whole(packed, 3) - gradient).abs() <= step).all())
        assert float(whole(packed, 3)[2]) == 0.0


def core_for(size, make=Method, dtype=torch.int8):
    layout = Layout([Parameter("w", (size // 4, 4)), Parameter("b", (size % 4 or 4,))], GEOMETRY_MAPS["scion"])
    made = ServerCore(torch.zeros(layout.size), make(Constant(0.1, 0.5, 5)), Update(layout), dtype)
    made.join()
    return made


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_refused(number):
    core = core_for(803)
    gradient = torch.ones(core.update.layout.size)
    gradient[600] = number
    packed = codec(len(gradient)).encode_gradient(gradient, 0, 0, 0)
    assert core.gradient_fault(packed) == NOT_FINITE


def test_bytes_that_a_worker_made_up_are_refused_or_finite():
    core = core_for(803)
    size = core.update.layout.size
    for wrong in (torch.zeros(size, dtype=torch.int8), torch.zeros(core.gradient_size), torch.ones(size)):
        assert core.gradient_fault(wrong) != ""
    draw, refused = torch.Generator().manual_seed(0), 0
    for scale in (0.0, -1.0, 3e38, 2.6e36, 1e-40):
        packed = torch.randint(-128, 128, (core.gradient_size,), generator=draw, dtype=torch.int8)
        packed[: 4 * quantized.num_blocks(size)].view(torch.float32).fill_(scale)
        fault = core.gradient_fault(packed)
        refused += fault == NOT_FINITE
        assert fault or bool(torch.isfinite(whole(packed, size)).all())
    assert refused == 2


@pytest.mark.parametrize("make", [Method, lambda schedule: Rennala(schedule, 3)], ids=["each", "means of three"])
@pytest.mark.parametrize("size", [803, 70_001])
def test_the_core_computes_with_the_numbers_of_a_packed_gradient(make, size):
    """The blocks of the layout and those of the scales have different borders."""
    packed_core, plain = core_for(size, make), core_for(size, make, torch.float32)
    draw, number = torch.Generator().manual_seed(0), packed_core.update.layout.size
    for sequence in range(6):
        gradient = torch.randn(number, generator=draw)
        packed = codec(number).encode_gradient(gradient, 0, 0, sequence)
        packed_core.push(0, sequence, packed_core.version, packed)
        plain.push(0, sequence, plain.version, whole(packed, number))
    assert packed_core.version == plain.version > 0
    assert torch.equal(packed_core.snapshot.iterate, plain.snapshot.iterate)
    assert torch.equal(packed_core.momentum, plain.momentum)


def test_a_sample_of_a_packed_gradient_has_its_numbers():
    """The rule of the automatic threshold looks at a sample."""
    gradient, places = torch.randn(1000), torch.tensor([0, 255, 256, 999, 3])
    packed = codec(1000).encode_gradient(gradient, 1, 2, 3)
    assert torch.equal(quantized.at(packed, 1000, places), whole(packed, 1000)[places])
    assert torch.equal(quantized.at(gradient, 1000, places), gradient[places])
