"""A pretend accelerator: the device ``pretend:0``, whose tensors are in host memory and are computed by the CPU.

It behaves as an accelerator where that shows mistakes. An operation that mixes its tensors with the CPU's fails. A
copy to host memory with ``non_blocking=True`` arrives when the device is synchronized, and is NaN before. The device
has no streams, no pinned memory, no generator, no flex attention and no number types of its own. An exception inside
its backward pass ends the process, because torch cannot carry one out of the thread of a backend in Python.

For benches, an operation that writes to given memory can take a time of its own instead of the CPU's, and a copy
between host and device too. Its result is undefined then. The thread that has started it sleeps meanwhile.

The device can be used after `register`, which has to come before the first backward pass of the process. torch only
counts it after `set_present`. Not every torch can host a backend that is written in Python; see `IS_POSSIBLE`.
"""

import os
import time

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
NAME, KIND = "pretend:0", "pretend"
_present = False
_OPERATION_SECONDS = float(os.environ.get("PRETEND_OPERATION_SECONDS", 0.0))
_COPY_SECONDS = float(os.environ.get("PRETEND_COPY_SECONDS", 0.0))
_on_the_way = []  # (host tensor, its values): copies that arrive at the next synchronization


class _Module:
    """What `torch.get_device_module` returns."""

    def is_available(self):
        return _present

    def device_count(self):
        return int(_present)

    def is_initialized(self):
        return True

    def current_device(self):
        return 0

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        pass

    def get_device_name(self, device):
        return "Pretend Accelerator"

    def memory_allocated(self, device):
        return 12_345  # a number that a test can recognise

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


class PretendTensor(torch.Tensor):
    """A tensor on the device. Its values are in ``host``."""

    @staticmethod
    def __new__(cls, host):
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=NAME
        )
        made.host = host
        return made

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.host = other.host

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return _compute(operator, args, dict(kwargs or {}))

    def __repr__(self):
        return f"pretend({self.host})"


def _compute(operator, args, kwargs):
    """Computes with the host tensors, and wraps the results."""
    name = operator._schema.name
    if name == "aten::copy_":
        return _copy(*args, **kwargs)
    if name == "aten::_to_copy":
        device = torch.device(kwargs.pop("device", None) or NAME)
        kwargs.pop("non_blocking", None)
        made = operator(args[0].host, **kwargs)
        return PretendTensor(made) if device.type == KIND else made
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(tensor.dim() > 0 and not isinstance(tensor, PretendTensor) for tensor in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {NAME} and cpu ({name})")
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    kwargs.pop("pin_memory", None)
    if _OPERATION_SECONDS and ("out" in kwargs or name.endswith("_")):
        time.sleep(_OPERATION_SECONDS)
        return kwargs.get("out", args[0])
    results = operator(*tree_map(_host_of, args), **tree_map(_host_of, kwargs))
    wrappers = {id(_host_of(tensor)): tensor for tensor in tensors}  # an operation in place returns its argument

    def wrap(result):
        if not isinstance(result, torch.Tensor):
            return result
        return wrappers[id(result)] if id(result) in wrappers else PretendTensor(result)

    return tree_map(wrap, results)


def _copy(target, source, non_blocking=False):
    if non_blocking and not isinstance(target, PretendTensor):
        _on_the_way.append((target, source.host.clone()))
        target.fill_(torch.nan)
    elif _COPY_SECONDS and isinstance(target, PretendTensor) != isinstance(source, PretendTensor):
        time.sleep(_COPY_SECONDS)
    else:
        _host_of(target).copy_(_host_of(source))
    return target


def _host_of(value):
    return value.host if isinstance(value, PretendTensor) else value


def _synchronize(device=None):
    while _on_the_way:
        target, values = _on_the_way.pop()
        target.copy_(values)


_library = None


def set_present(is_present):
    """Says whether this machine has the device."""
    global _present
    _present = is_present
    # A tied weight stays tied on its way to a device, as on real ones. For tensors of another class torch has to swap.
    torch.__future__.set_swap_module_params_on_conversion(is_present)


def register():
    """Makes the device known to torch in this process."""
    global _library
    backend_registration._setup_privateuseone_for_python_backend(KIND, backend_module=_Module())
    torch.accelerator.synchronize = _synchronize  # a backend in Python has no way to offer it
    _library = torch.library.Library("aten", "IMPL")
    operators = torch.ops.aten
    for operator in (operators.empty.memory_format, operators.empty_strided.default, operators.arange.start_step):
        name = operator._schema.name.removeprefix("aten::") + f".{operator._schema.overload_name}".rstrip(".")
        _library.impl(name, lambda *a, _o=operator, **k: _compute(_o, a, k), "PrivateUse1")
    _library.impl("_copy_from", lambda source, target, non_blocking=False: _copy(target, source), "PrivateUse1")
