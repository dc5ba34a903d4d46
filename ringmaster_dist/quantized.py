"""Gradients with one byte for each number. Each block of 256 numbers has a scale, and rounding is random and unbiased.

A packed gradient is one int8 tensor (packed_size(size),):

    [ the bytes of the scales, float32 (num_blocks,) | the steps, int8 (size,) ]        number = step * scale

A number lies between two steps. It is rounded to one of them at random, so that the mean over the draws is the number.
The probabilities have 16 bits, so the mean is exact to float32 rounding of the largest number of the block. The draws
follow from the gradient's key and the place of a number. So nothing is remembered from one gradient to the next, and
every device and any number of threads give the same bits. Hashing takes longer than everything else together. So only
65,536 draws, a period, are hashed for each gradient. A period of the gradient has these draws plus a hash of its own:

    word i of period j = bits(key, i) + bits(bits(key, -1), j)  modulo 2**64,  with four draws of 16 bits in a word

Any two draws are independent, so the errors of any two numbers are uncorrelated, as with a hash for every word.

NaN and Inf in a gradient make the scale of their block NaN or Inf, which `is_finite` finds without reading the steps.
"""

from __future__ import annotations

import torch

from ringmaster_dist import devices, randomness

DTYPE = torch.int8  # of a packed gradient, and of no other
BLOCK = 256  # numbers that share a scale
_LARGEST_STEP = 127 - 2.0**-10  # a bit less than 127, so that float32 rounding never makes 128 of it
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # its reciprocal is finite
_LARGEST_SCALE = torch.finfo(torch.float32).max / 128
_SCALE_BYTES, _DRAWS_PER_WORD, _DRAW = 4, 4, 2.0**-16  # a word of 64 random bits gives four draws of 16 bits
_PERIOD = 1 << 16  # numbers whose draws are hashed
_PIECE, _PIECE_OF_ACCELERATOR = 4 * _PERIOD, 1 << 22  # numbers; smaller ones fit the cache better, but need more calls


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def packed_size(size: int) -> int:
    """The length of the packed form of a gradient (size,), which is also its bytes."""
    return size + _SCALE_BYTES * num_blocks(size)


def length(size: int, dtype: torch.dtype) -> int:
    """The length of a gradient of ``size`` numbers that travels in this dtype."""
    return packed_size(size) if dtype == DTYPE else size


def is_finite(packed: torch.Tensor, size: int) -> bool:
    """Whether all numbers of a packed gradient are finite."""
    low, high = torch.aminmax(_scales(packed, size))
    return float(low) >= 0.0 and float(high) <= _LARGEST_SCALE  # both are false for NaN


def unpack(packed: torch.Tensor, size: int, low: int, high: int, out: torch.Tensor) -> torch.Tensor:
    """Writes the numbers ``low`` to ``high`` of a packed gradient to ``out``, (high - low,), and returns it."""
    scales = _scales(packed, size)  # (num_blocks,)
    out.copy_(_steps(packed, size)[low:high])
    first = min(-(-low // BLOCK) * BLOCK, high)  # whole blocks lie between first and last
    last = max(high // BLOCK * BLOCK, first)
    if low < first:
        out[: first - low].mul_(scales[low // BLOCK])
    if first < last:
        out[first - low : last - low].view(-1, BLOCK).mul_(scales[first // BLOCK : last // BLOCK, None])
    if last < high:
        out[last - low :].mul_(scales[last // BLOCK])
    return out


def at(gradient: torch.Tensor, size: int, places: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient, packed or not, at these places, (num_places,)."""
    if gradient.dtype != DTYPE:
        return gradient[places]
    return _steps(gradient, size)[places] * _scales(gradient, size)[places // BLOCK]


def whole(gradient: torch.Tensor, size: int) -> torch.Tensor:
    """All numbers of a gradient, (size,). One that is not packed is returned as it is."""
    if gradient.dtype != DTYPE:
        return gradient
    return unpack(gradient, size, 0, size, torch.empty(size, device=gradient.device))


class Quantizer:
    """Packs gradients (size,) on the device where they are. One thread uses it at a time.

    It works piece by piece, and owns scratch memory of one piece and of one period. That is less than 3 MB on a CPU and
    less than 40 MB on an accelerator.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        self._size = size
        limit = _PIECE if devices.is_cpu(device) else _PIECE_OF_ACCELERATOR
        period = min(_PERIOD, num_blocks(size) * BLOCK)  # whole blocks
        self._piece = piece = min(limit, -(-size // period) * period)  # whole periods
        self._numbers = torch.empty(piece, dtype=torch.float32, device=device)
        self._rounded = torch.empty(piece, dtype=DTYPE, device=device)
        words = period // _DRAWS_PER_WORD
        self._counters = torch.arange(words, device=device).mul_(_signed(randomness.GOLDEN))  # (words,), int64
        self._hashed, self._shifted = torch.empty_like(self._counters), torch.empty_like(self._counters)
        self._words = torch.empty(piece // period, words, dtype=torch.int64, device=device)

    def pack(self, gradient: torch.Tensor, key: int, out: torch.Tensor) -> torch.Tensor:
        """Writes the packed form of a gradient (size,) to ``out``, in host memory, and returns it.

        ``key`` are the 64 random bits that determine the rounding.
        """
        scales, steps = _scales(out, self._size), _steps(out, self._size)
        self._hash(key)
        for low in range(0, self._size, self._piece):
            high = min(low + self._piece, self._size)
            first, last = low // BLOCK, num_blocks(high)
            numbers = self._numbers[: (last - first) * BLOCK]
            numbers[: high - low].copy_(gradient[low:high])
            numbers[high - low :].zero_()  # the rest of the last block
            blocks = numbers.view(-1, BLOCK)
            scale = torch.maximum(blocks.amax(dim=1), blocks.amin(dim=1).neg_())  # (last - first,)
            scale.div_(_LARGEST_STEP).clamp_(min=_SMALLEST_SCALE)
            blocks.mul_(scale.reciprocal()[:, None])
            numbers.add_(self._draws(key, low)[: len(numbers)], alpha=_DRAW).round_()
            scales[first:last].copy_(scale)
            steps[low:high].copy_(self._rounded[: high - low].copy_(numbers[: high - low]))
        return out

    def _hash(self, key: int) -> None:
        """Computes `randomness.bits` of the key and of each word's index.

        torch has no unsigned shift, hence the masks.
        """
        words = torch.add(self._counters, _signed(key + randomness.GOLDEN), out=self._hashed)
        for shift, factor in ((30, randomness.FIRST_FACTOR), (27, randomness.SECOND_FACTOR), (31, 1)):
            shifted = torch.bitwise_right_shift(words, shift, out=self._shifted)
            words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
            if factor != 1:
                words.mul_(_signed(factor))

    def _draws(self, key: int, low: int) -> torch.Tensor:
        """Random numbers from -2**15 to 2**15 - 1 for the numbers from ``low`` on, int16 (piece,), after `_hash`."""
        own, first = randomness.bits(key, -1), low // _PERIOD
        for number, words in enumerate(self._words):
            torch.add(self._hashed, _signed(randomness.bits(own, first + number)), out=words)
        return self._words.view(-1).view(torch.int16)


def _scales(packed: torch.Tensor, size: int) -> torch.Tensor:
    """float32 (num_blocks,)"""
    return packed[: _SCALE_BYTES * num_blocks(size)].view(torch.float32)


def _steps(packed: torch.Tensor, size: int) -> torch.Tensor:
    """int8 (size,)"""
    return packed[_SCALE_BYTES * num_blocks(size) :]


def _signed(value: int) -> int:
    """The int64 number with the lowest 64 bits of ``value``."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
