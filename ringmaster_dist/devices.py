"""The devices that gradients and updates are computed on: the CPU, and the accelerators that this torch knows.

Every question about a device is asked here, through `torch.accelerator` and the device's own module. A device is named
as torch names it, such as ``cpu`` or ``cuda:0``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ringmaster_dist.errors import Mistake

CPU = "cpu"


def accelerators() -> list[str]:
    """The accelerator devices of this machine. Empty if torch finds none."""
    kind = torch.accelerator.current_accelerator()
    return [] if kind is None else [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]


def available() -> list[str]:
    return [CPU, *accelerators()]


def require(name: str) -> None:
    """Raises `Mistake` if this machine does not have the device."""
    if name not in available():
        raise Mistake(f"this machine has no device {name!r}; it has {', '.join(available())}")


def here(name: str) -> str:
    """The device of this name, or else the first of its type on this machine, or else the CPU."""
    names, kind = available(), name.partition(":")[0]
    return name if name in names else next((other for other in names if other.partition(":")[0] == kind), CPU)


def in_turn(names: Sequence[str], index: int) -> str:
    """The device of the worker with this index, if the workers take the devices in turn. Empty if there is no name."""
    return names[index % len(names)] if names else ""


def select(device: torch.device | str) -> None:
    """Makes an accelerator the current one of this process, so that user code which says only ``cuda`` means it."""
    if not is_cpu(device):
        torch.accelerator.set_device_index(torch.device(device))


def is_cpu(device: torch.device | str) -> bool:
    return torch.device(device).type == CPU


def one_of_each_type(names: Iterable[str]) -> list[str]:
    """The first device of each type, such as ``cuda:0`` of several GPUs, in the order of the names."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(torch.device(name).type, name)
    return list(first.values())


def title(device: torch.device | str) -> str:
    """The name of the product, such as ``NVIDIA H100``, or the type of the device if its module does not say."""
    if is_cpu(device):
        return "CPU"
    name_of = getattr(_module(device), "get_device_name", None)
    return torch.device(device).type if name_of is None else str(name_of(device))


def has_bfloat16(device: torch.device | str) -> bool:
    """Whether it is a processor with instructions for bfloat16. Other processors emulate it, many times slower.

    False for accelerators, where it has not been measured.
    """
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported") if is_cpu(device) else ()
    return any(getattr(torch.cpu, name)() for name in names if hasattr(torch.cpu, name))


def own_stream(device: torch.device | str) -> AbstractContextManager[Any]:
    """Within it, what this thread starts on the device does not wait for what other threads have started there."""
    if is_cpu(device) or not hasattr(_module(device), "Stream"):
        return nullcontext()
    stream: AbstractContextManager[Any] = _module(device).stream(_module(device).Stream(device))
    return stream


def finish(device: torch.device | str) -> None:
    """Blocks until the device has finished what this thread has started on it, in the thread's current stream."""
    if is_cpu(device):
        return
    module = _module(device)
    if hasattr(module, "current_stream"):
        module.current_stream(device).synchronize()
    else:
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device | str) -> None:
    """Gives the device memory that no tensor uses back to other processes."""
    if not is_cpu(device) and hasattr(_module(device), "empty_cache"):
        _module(device).empty_cache()


def allocated_bytes(device: torch.device | str) -> int | None:
    """The memory of this process's tensors on an accelerator. None if its module does not say, and for the CPU."""
    count = None if is_cpu(device) else getattr(_module(device), "memory_allocated", None)
    return None if count is None else int(count(device))


def generators(device: torch.device | str) -> list[torch.Generator]:
    """The global generators that code on the device draws from: the CPU's, and the device's own if it has one."""
    device, found = torch.device(device), [torch.default_generator]
    if device.type == "mps":
        return [*found, torch.mps._get_default_mps_generator()]
    if device.type != CPU:
        module = _module(device)
        if hasattr(module, "init"):
            module.init()  # default_generators is empty before
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        found += getattr(module, "default_generators", ())[index : index + 1]
    return found


def pinned(size: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor | None:
    """Page-locked host memory, (size,), which the device can copy into by itself. None if the device has no such."""
    try:
        return None if is_cpu(device) else torch.empty(size, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return None


class HostMemory:
    """Host memory of shape (size,) for the tensors of one device, one after the other.

    The transport reads host memory from a thread that knows nothing of the device. So `receive` returns only when the
    copy has arrived. One thread uses it at a time.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._device = torch.device(device)
        memory = pinned(size, dtype, device)
        self._is_pinned = memory is not None
        if memory is None:
            memory = torch.empty(0 if is_cpu(device) else size, dtype=dtype)
        self._memory = memory  # (size,), or (0,) for the CPU, whose tensors are in host memory already

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, (size,), in host memory, which the next call overwrites. A CPU tensor is returned as it is."""
        if is_cpu(tensor.device):
            return tensor
        self._memory.copy_(tensor, non_blocking=self._is_pinned)  # on the current stream, after the computation
        if self._is_pinned:
            finish(self._device)  # copy_ has returned before the bytes are there
        return self._memory


def _module(device: torch.device | str) -> Any:
    """The module of a device type, such as `torch.cuda`."""
    return torch.get_device_module(torch.device(device))
