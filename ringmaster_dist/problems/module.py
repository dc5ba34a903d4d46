"""An ordinary ``nn.Module`` with its data as a problem.

Its parameters are views of one flat tensor (size,), where size is the number of trained parameters. On an accelerator
that tensor belongs to the problem. On a CPU it is the snapshot itself, so a new iterate costs no copy. A gradient is
copied once, into another flat tensor (size,), and from an accelerator once more, into host memory. A worker makes that
last copy itself (``leaves_on_device``), because it can round the gradient for the wire before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ringmaster_dist import devices, randomness
from ringmaster_dist.algorithm.layout import ROLES, Layout, Parameter
from ringmaster_dist.errors import Mistake
from ringmaster_dist.problems import Interrupted, Stop, never
from ringmaster_dist.problems.module_state import Buffers, estimate, fingerprint_of, norms_of, settle
from ringmaster_dist.problems.seeding import seeded

Batch = Any

# No real worker has an id this large.
STATISTICS_WORKER = 2**20  # its batches give the running statistics
_EVALUATION_WORKER = STATISTICS_WORKER + 1  # its draws are those of an evaluation
_ODD_WEIGHTS = 0.1  # standard deviation of the weights at which `_find_changing` looks for changing buffers


def role_by_shape(name: str, parameter: nn.Parameter) -> str:
    """A tensor with fewer than two dimensions is a scalar. Names tell embeddings and heads; the rest are matrices."""
    if parameter.ndim < 2:
        return "scalar"
    if "embed" in name or "wte" in name:
        return "embedding"
    return "output" if "head" in name else "matrix"


class ModuleProblem:
    """``batches(seed, worker, sequence)`` gives micro-batches, and ``loss(module, batch)`` the mean loss of one.

    With ``batch``, the usual number of rows of a gradient, ``batches`` gets a fourth argument, the number of rows to
    draw. Then the server can give each worker a number of rows (``cluster.batch=auto``).

    The gradient is the mean over the micro-batches. It can be interrupted between micro-batches, and after each of the
    ``watched`` modules in the forward and in the backward pass.

    Parameters that require no gradient are frozen and not part of the iterate. A gradient is a function of the iterate
    and of (seed, worker, sequence). For that, the global random generators are seeded, and buffers that a forward pass
    has changed are restored. The running statistics of batch norm are computed before an evaluation and an export, from
    ``statistics_batches`` training batches that ``seed`` chooses.

    One thread uses it at a time.
    """

    objective = "loss"
    quick_to_evaluate = False
    dtype = torch.float32
    leaves_on_device = False  # whether a gradient stays on the device; by default it is in host memory

    def __init__(
        self,
        module: nn.Module,
        batches: Callable[..., Sequence[Batch]],
        loss: Callable[[nn.Module, Batch], torch.Tensor],
        *,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
        role: Callable[[str, nn.Parameter], str] = role_by_shape,
        watched: Sequence[nn.Module] = (),
        device: torch.device | str = "cpu",
        clip: float | None = None,
        batch: int | None = None,
        weight: float = 1.0,
        loss_scales: Sequence[float] = (1.0,),
        statistics_batches: int = 16,
        seed: int = 0,
    ) -> None:
        """``loss_scales`` are tried in turn until the gradient is finite, which the small range of fp16 needs."""
        self.module, self.device = module.to(device), torch.device(device)
        self.parameters: Sequence[Parameter] = trainable_parameters(module, role)
        self.clip, self.seed, self.batch = clip, seed, batch
        self.data_fingerprint = fingerprint_of(module)
        self._buffers = Buffers(module)
        self._batches, self._loss, self._evaluate = batches, loss, evaluate
        self._weight, self._loss_scales, self._statistics_batches = weight, loss_scales, statistics_batches
        self._stop: Stop = never
        self._changing: list[nn.Module] | None = None  # modules that change their buffers while they train
        for part in watched:
            part.register_forward_hook(self._look)

    def bind(self, layout: Layout) -> None:
        named = dict(self.module.named_parameters())
        self._tensors = [named[p.name] for p in layout.parameters]  # in the order of the layout
        self._layout = layout
        self._flat = torch.empty(layout.size, device=self.device)  # (size,)
        with torch.no_grad():
            for view, tensor in zip(layout.views(self._flat).values(), self._tensors, strict=True):
                view.copy_(tensor)
        self._point_at(self._flat)

    @cached_property
    def _evaluated(self) -> torch.Tensor:
        """The weights of an evaluation, (size,)."""
        return torch.empty(self._layout.size) if devices.is_cpu(self.device) else self._flat

    @cached_property
    def _gradient(self) -> torch.Tensor:
        """(size,). It is allocated with the first gradient, because a server only evaluates."""
        return torch.zeros(self._layout.size, device=self.device)

    @cached_property
    def _gradient_views(self) -> list[torch.Tensor]:
        return list(self._layout.views(self._gradient).values())

    @cached_property
    def _host_memory(self) -> devices.HostMemory:
        return devices.HostMemory(self._layout.size, self.dtype, self.device)

    def _point_at(self, flat: torch.Tensor) -> None:
        """Makes the module's parameters views of ``flat``, (size,)."""
        for view, tensor in zip(self._layout.views(flat).values(), self._tensors, strict=True):
            tensor.data = view

    def initial(self, seed: int) -> torch.Tensor:
        """The weights that the module was made with, (size,)."""
        return self._flat.detach().cpu().clone()

    def gradient(
        self, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int, stop: Stop = never,
        rows: int | None = None,
    ) -> tuple[torch.Tensor, float]:  # fmt: skip
        self._stop = stop
        self.load(iterate)
        self._buffers.restore()
        self.module.train()
        with self._draws_of(seed, worker_id, sequence):
            batches = self._draw_batches(seed, worker_id, sequence, rows)
            # It always begins with the largest scale, because a gradient must not depend on earlier gradients.
            for scale in self._loss_scales:
                loss = self._accumulate(batches, scale)
                if scale == self._loss_scales[-1] or bool(torch.isfinite(self._gradient.sum())):
                    break
        factor = self._weight / scale
        if self.clip is not None:
            factor *= min(1.0, self.clip * scale / (float(self._gradient.norm()) + 1e-6 * scale))
        if factor != 1.0:
            self._gradient.mul_(factor)
        return self._gradient if self.leaves_on_device else self._host_memory.receive(self._gradient), loss

    def _accumulate(self, batches: Sequence[Batch], scale: float) -> float:
        """Writes the gradient times ``scale`` into its buffer, and returns the mean loss."""
        for tensor in self._tensors:
            tensor.grad = None
        total = 0.0
        for batch in batches:
            self._check()
            loss = self._loss_of(batch) / self._parts(batch, batches)
            if not loss.requires_grad:
                raise Mistake(
                    "the loss does not require a gradient: compute it from the model's output, and do not detach it"
                )
            torch.autograd.backward(loss if scale == 1.0 else loss * scale)
            total += float(loss.detach())
        for tensor, view in zip(self._tensors, self._gradient_views, strict=True):
            if tensor.grad is None:  # the loss does not depend on it
                view.zero_()
            else:
                view.copy_(tensor.grad.to_dense() if tensor.grad.is_sparse else tensor.grad)
        return total

    def _parts(self, batch: Batch, batches: Sequence[Batch]) -> float:
        """How many micro-batches like this one would make up the gradient. The loss of a micro-batch counts 1/parts."""
        return len(batches)

    def _draws_of(self, seed: int, worker_id: int, sequence: int) -> AbstractContextManager[None]:
        key = randomness.worker_key(seed, randomness.STREAM_MODEL, worker_id)
        return seeded(randomness.bits(key, sequence), self.device)

    def _draw_batches(
        self, seed: int, worker_id: int, sequence: int, rows: int | None = None
    ) -> Sequence[Batch]:  # fmt: skip
        asked = () if self.batch is None else (rows or self.batch,)
        drawn = self._batches(seed, worker_id, sequence, *asked)
        where = f"batches(seed={seed}, worker={worker_id}, sequence={sequence}{''.join(f', rows={n}' for n in asked)})"
        if drawn is None:
            raise Mistake(f"{where} gave None: it has to give a list of micro-batches")
        batches = drawn if isinstance(drawn, Sized) else list(drawn)
        if len(batches) == 0:
            raise Mistake(f"{where} gave nothing: a gradient needs at least one micro-batch")
        return batches

    def _loss_of(self, batch: Batch) -> torch.Tensor:
        loss = self._loss(self.module, batch)
        if not isinstance(loss, torch.Tensor):
            raise Mistake(f"loss gave {type(loss).__name__}: it has to give a scalar tensor")
        if loss.numel() != 1:
            raise Mistake(f"loss gave a tensor of shape {tuple(loss.shape)}: it has to give a scalar, such as the mean")
        return loss

    def load(self, iterate: torch.Tensor) -> None:
        """Puts the iterate, (size,), into the module, which only reads it."""
        if devices.is_cpu(self.device) and iterate.dtype == self.dtype:
            self._point_at(iterate)
        else:
            self._flat.copy_(iterate)

    def evaluate(self, iterate: torch.Tensor) -> dict[str, float]:
        """The figures of the user's function. Its draws are the same each time, so they depend on the iterate alone."""
        if self._evaluate is None:
            return {}
        self._prepare(iterate)
        with torch.no_grad(), self._draws_of(self.seed, _EVALUATION_WORKER, 0):
            return _numbers(self._evaluate(self.module))

    def state_dict(self, iterate: torch.Tensor) -> dict[str, torch.Tensor]:
        """The module's whole state in host memory, with frozen parameters, tied names and buffers."""
        self._prepare(iterate)
        state = self.module.state_dict()
        return {name: t.detach().cpu().clone() for name, t in state.items() if isinstance(t, torch.Tensor)}

    def _prepare(self, iterate: torch.Tensor) -> None:
        """Puts the module into evaluation mode, with these weights and their running statistics."""

        def forward(draw: int) -> None:
            with torch.enable_grad(), self._draws_of(self.seed, STATISTICS_WORKER, draw):  # a loss may need gradients
                for batch in self._draw_batches(self.seed, STATISTICS_WORKER, draw):
                    self._loss_of(batch)

        self._stop = never
        if self._changing is None and self._buffers.has_saved:
            self._changing = self._find_changing(forward)
        self._point_at(self._evaluated.copy_(iterate))  # a copy, because user code may write to its weights
        self._buffers.restore()
        if not self._buffers.has_saved:
            self.module.eval()
            return
        assert self._changing is not None
        settle(self.module, self._changing, forward)
        estimate(self.module, forward, self._statistics_batches)

    def _find_changing(self, forward: Callable[[int], None]) -> list[nn.Module]:
        """The modules that change buffers in training mode.

        The weights are random, so that no buffer has its final value by chance, but the same in every process.
        """
        drawn = torch.Generator().manual_seed(0)
        self._point_at(self._evaluated.copy_(torch.randn(self._layout.size, generator=drawn).mul_(_ODD_WEIGHTS)))
        self._buffers.restore()
        self.module.train()
        forward(0)
        found = self._buffers.changing()
        self._buffers.restore()
        return found

    @property
    def unusual_buffers(self) -> list[str]:
        """Modules that change buffers other than running statistics in training mode. Call `evaluate` first."""
        norms, changing = norms_of(self.module), self._changing or []
        named = {module: name for name, module in self.module.named_modules()}
        return sorted({named[owner] or "the module" for owner in changing if owner not in norms})

    def fixed_state(self, iterate: torch.Tensor) -> dict[str, torch.Tensor]:
        """Frozen parameters, and the buffers that training does not change. They are as the factory makes them."""
        self._prepare(iterate)
        moving = {*norms_of(self.module), *(self._changing or ())}
        skipped = {f"{name}.{key}" if name else key for name, owner in self.module.named_modules()
                   if owner in moving for key in owner._buffers}  # fmt: skip
        return {
            name: tensor.detach().cpu()
            for name, tensor in self.module.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor) and not tensor.requires_grad and name not in skipped
        }

    def _look(self, module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        """A forward hook: checks now, and again when the backward pass has reached the output."""
        self._check()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._check)

    def _check(self, gradient: torch.Tensor | None = None) -> None:
        if self._stop():
            raise Interrupted


def _numbers(figures: object) -> dict[str, float]:
    if not isinstance(figures, Mapping):
        raise Mistake(f"evaluate gave {type(figures).__name__}: it has to give a mapping of names to numbers")
    found = {}
    for name, value in figures.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise Mistake(f"evaluate gave {name!r} as {type(value).__name__}: it has to be one number") from error
    return found


def trainable_parameters(module: nn.Module, role: Callable[[str, nn.Parameter], str]) -> list[Parameter]:
    found = []
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise Mistake(f"parameter {name!r} has no shape yet: call the lazy module once in the factory")
        if not parameter.requires_grad:
            continue
        if parameter.dtype != torch.float32:
            raise Mistake(
                f"parameter {name!r} is {parameter.dtype}: only float32 can be trained; use module.float(), and "
                "autocast in loss for narrower arithmetic"
            )
        its_role = role(name, parameter)
        if its_role not in ROLES:
            raise Mistake(f"parameter {name!r} was given the role {its_role!r}; known: {', '.join(ROLES)}")
        found.append(Parameter(name, tuple(parameter.shape), its_role))
    if not found:
        raise Mistake(f"the module ({type(module).__name__}) has no parameters that require a gradient")
    return found
