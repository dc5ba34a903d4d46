"""Recomputes a real run from its trace, in one process, and compares the bits.

The trace says which gradients arrived in which order, with worker, sequence and version. These determine the batch of
each. So every gradient can be computed again at the iterate of its version. The core gets the same arrivals, joins and
leaves in the same order, and has to give the same verdicts and end at the same iterate.

An accelerator rounds in its own way. Gradients and updates are computed again on a device of the same type, if this
machine has one, and on the CPU otherwise. If an accelerator took part, the verdicts have to be the same and the losses
equal to within `TOLERANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ringmaster_dist import devices
from ringmaster_dist.algorithm.rows import RowsChange
from ringmaster_dist.config.build import build_core, build_layout, build_problem, build_wire, rows_of
from ringmaster_dist.config.compose import config_text, from_yaml
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.own_code import allow
from ringmaster_dist.config.schema import OWN_CODE, Config
from ringmaster_dist.observe.records import Member, Term
from ringmaster_dist.observe.run_files import CONFIG, FINAL, MEMBERS, ROWS, TERMS, TRACE, RunFiles
from ringmaster_dist.problems import Problem
from ringmaster_dist.problems.ranks import gradient_in_turn
from ringmaster_dist.protocol import Verdict
from ringmaster_dist.server import weights
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.wire import Codec

TOLERANCE = 0.02  # of a loss, if an accelerator took part
_NAMED_WORKERS = 4  # in a message


class Outcome(NamedTuple):
    same: bool
    updates: int
    pushes: int
    message: str


class _Agreement:
    """Compares what was recorded with what the replay finds. Without a tolerance, all bits have to be the same."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self.most = 0.0  # the largest difference so far, as a part of the loss

    def of_losses(self, recorded: float | None, found: float | None) -> bool:
        """True if one of them is not known."""
        if recorded is None or found is None or recorded == found:
            return True
        difference = abs(found - recorded) / abs(recorded) if recorded else math.inf
        self.most = max(self.most, difference)
        return difference <= self._tolerance

    def of_iterates(self, recorded: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> tuple[bool, str]:
        """Whether two final iterates agree, by name of their parameters, and the words for it."""
        different = [name for name, view in found.items() if not _is_same(recorded.get(name), view)]
        if not different:
            return True, "the same bits"
        if not self._tolerance or any(recorded.get(name) is None for name in different):
            return False, f"the final iterate differs in {', '.join(different)}"
        distance = math.hypot(*(float((recorded[name] - view).norm()) for name, view in found.items()))
        length = math.hypot(*(float(view.norm()) for view in recorded.values()))
        return True, (
            f"the same verdicts, but not the same bits: losses differ by at most {self.most:.2g} of their value, the "
            f"final iterate by {distance / length:.2g} of its norm"
        )


def _is_same(recorded: torch.Tensor | None, found: torch.Tensor) -> bool:
    return recorded is not None and torch.equal(recorded, found)


class _Computed(NamedTuple):
    """A gradient that the replay has computed, so that it can be computed again."""

    problem: Problem
    iterate: torch.Tensor
    version: int
    worker: int
    sequence: int
    ranks: int
    rows: int  # that the server had assigned, or 0

    def gradient(self, iterate: torch.Tensor, seed: int) -> tuple[torch.Tensor, float]:
        """At this iterate, (size,), as the worker had it."""
        return gradient_in_turn(self.problem, self.ranks, iterate, seed, self.worker, self.sequence, self.rows)


def replay(
    directory: Path, progress: Callable[[float, str], None] = lambda fraction, text: None, *, target: str = ""
) -> Outcome:
    """Raises `UserError` where the directory does not hold a finished real run, or needs other code than ``target``.

    ``progress`` is called at arrivals.
    """
    for name in (CONFIG, TRACE, MEMBERS, TERMS, FINAL):
        if not (directory / name).exists():
            raise UserError(f"{directory} has no {name}: replay needs the directory of a finished ringmaster train")
    files = RunFiles(directory, complete=True)
    config = from_yaml(config_text(directory / CONFIG), str(directory / CONFIG))
    allow(config, target)
    problem = build_problem(config)
    arrivals, members, terms = files.arrivals(), files.members(), files.terms()
    make_core = partial(build_core, config, problem, directory)
    core = make_core(devices.here(terms[0].device), terms[0].precision)
    used = {term.device for term in terms} | {member.device for member in members}
    agreement = _Agreement(TOLERANCE if used - {devices.CPU, ""} else 0.0)
    wire = Codec(build_wire(config), core.update.layout.size, problem.dtype)
    last_use = {arrival.gradient_version: index for index, arrival in enumerate(arrivals)}
    iterates = {0: core.snapshot.iterate.cpu()}
    next_member = 0
    last: _Computed | None = None  # the last accepted arrival
    joined: dict[int, Member] = {}  # by worker
    problems = {(config.problem.batch, devices.CPU): problem}  # by the number of rows of a gradient, and the device
    assigned: list[list[object]] = []  # the changes of rows
    torch.set_num_threads(config.cluster.threads)  # as the workers; the bits depend on it
    for index, arrival in enumerate(arrivals):
        progress(index / len(arrivals), f"arrival {index:,} of {len(arrivals):,}  version {core.version:,}")
        while next_member < len(members) and members[next_member].pushes <= index:
            torch.set_num_threads(config.server.compute_threads)  # a departure may complete a round
            _apply(core, members[next_member])
            torch.set_num_threads(config.cluster.threads)
            joined[members[next_member].worker] = members[next_member]
            iterates.setdefault(core.version, core.snapshot.iterate.cpu())
            next_member += 1
        core = _in_term(core, terms[: 1 + _serving_term(terms, index)], make_core)
        worker, sequence, version = arrival.worker, arrival.sequence, arrival.gradient_version
        named = version if arrival.lost_version is None else arrival.lost_version
        accepted = arrival.verdict is Verdict.ACCEPTED
        if arrival.verdict is Verdict.INVALID:
            core.push(worker, sequence, named, torch.empty(0), arrival.term)
            continue
        before, loss = core.version, arrival.loss
        gradient = torch.empty(0)
        if accepted and version not in iterates:
            what = "is not made yet" if version > core.version else "was used for the last time before"
            return Outcome(False, before, index, f"arrival {index} was computed at version {version}, which {what}")
        if accepted or version in iterates:
            iterate = wire.decode_iterate(wire.encode_iterate(iterates[version]))
            member = joined[worker]
            kind = rows_of(config, member.slot), devices.here(member.device or devices.CPU)
            if kind not in problems:
                problems[kind] = build_problem(config, kind[1], rows=kind[0])
                problems[kind].bind(core.update.layout)
            computed = _Computed(
                problems[kind], iterates[version], version, worker, sequence, member.ranks, arrival.rows
            )
            gradient, loss = computed.gradient(iterate, config.run.seed)
            gradient = wire.encode_gradient(gradient, config.run.seed, worker, sequence)
            last = computed if accepted else last
        torch.set_num_threads(config.server.compute_threads)
        receipt = core.push(worker, sequence, named, gradient, arrival.term, arrival.compute_seconds, arrival.rows)
        torch.set_num_threads(config.cluster.threads)
        assigned += [list(change) for change in core.rows.changes()] if core.rows is not None else []
        recorded, found = ((a.verdict.value, a.delay, a.version) for a in (arrival, receipt))
        if found != recorded:
            was, says = ("{} with delay {} at version {}".format(*one) for one in (recorded, found))
            message = f"arrival {index} was {was}, and the replay says {says}"
            return Outcome(False, core.version, index, message)
        if arrival.lost_version is None and not agreement.of_losses(arrival.loss, loss):
            return Outcome(
                False, before, index,
                f"the loss at version {version} (arrival {index}) was {arrival.loss!r}, the replay says {loss!r}: "
                f"the iterates differ from update {version} on{_why_different(config, wire, computed, members)}",
            )  # fmt: skip
        iterates.setdefault(core.version, core.snapshot.iterate.cpu())
        for old in [v for v in (version, before) if last_use.get(v, -1) <= index and v != core.version]:
            iterates.pop(old, None)
    torch.set_num_threads(config.server.compute_threads)
    for member in members[next_member:]:
        _apply(core, member)
    if core.rows is not None:
        recorded_rows = [[row[name] for name in RowsChange._fields] for row in files.rows(ROWS)]
        if recorded_rows != assigned:
            return Outcome(False, core.version, len(arrivals), f"the replay assigns other rows than {ROWS} says")
    final, final_version = weights.read(directory / FINAL)
    if core.version != final_version:
        return Outcome(False, core.version, len(arrivals), "the numbers of updates differ")
    agrees, message = agreement.of_iterates(final, core.update.layout.views(core.snapshot.iterate.cpu()))
    if not agrees and last:
        message += _why_different(config, wire, last, members)
    return Outcome(agrees, core.version, len(arrivals), message)


def _serving_term(terms: list[Term], index: int) -> int:
    """The term that judged the arrival of this index: the last that had begun by then."""
    return max(number for number, term in enumerate(terms) if term.pushes <= index)


def _in_term(core: ServerCore, terms: list[Term], make_core: Callable[[str, str], ServerCore]) -> ServerCore:
    """The core in the last of these terms, on the device and in the precision of that term."""
    device, precision = devices.here(terms[-1].device), terms[-1].precision
    if (device, precision or core.update.precision) != (str(core.update.device), core.update.precision):
        state, core = core.state(), make_core(device, precision)
        core.load(state)
    core.enter_term([term.version for term in terms])
    return core


def _apply(core: ServerCore, member: Member) -> None:
    if member.event == "join":
        core.join(member.worker)
    else:
        core.leave(member.worker)


def _why_different(config: Config, wire: Codec, computed: _Computed, members: list[Member]) -> str:
    """Why a replay may find other bits: the gradient, or the factory, does not repeat, or the workers were others."""
    torch.set_num_threads(config.cluster.threads)  # as the workers
    found = _gradient_twice(config, wire, computed) + _factory_twice(config, computed.problem)
    return found or f"; {on_accelerators(members)}"


def on_accelerators(members: list[Member]) -> str:
    """Names the workers that computed on an accelerator, as far as they are known."""
    known = {member.worker: member.computed_on for member in members if member.device}
    named = [f"worker {worker} computed on {on}" for worker, on in known.items() if on != devices.CPU]
    if named:
        more = f" (and {len(named) - _NAMED_WORKERS} more on accelerators)" if len(named) > _NAMED_WORKERS else ""
        return f"{', '.join(named[:_NAMED_WORKERS])}{more}, and the replay computes on this CPU, which gives other bits"
    perhaps = "" if all(member.device for member in members) else "on an accelerator, "
    return (
        f"the replay computes on this CPU, and workers {perhaps}on another kind of CPU or with another torch give "
        "other bits"
    )


def _gradient_twice(config: Config, wire: Codec, computed: _Computed) -> str:
    version, worker, sequence = computed.version, computed.worker, computed.sequence
    iterate = wire.decode_iterate(wire.encode_iterate(computed.iterate))
    first, first_loss = computed.gradient(iterate, config.run.seed)
    first = first.detach().clone()
    second, second_loss = computed.gradient(iterate, config.run.seed)
    if first_loss == second_loss and torch.equal(first, second):
        return ""
    gave = f"{float(first_loss)!r} and {float(second_loss)!r}"
    if first_loss == second_loss:
        gave = f"the same loss {float(first_loss)!r} and two different gradients"
    return (
        f"; the gradient is not a function of its arguments: computed twice at version {version} for worker {worker}, "
        f"sequence {sequence}, it gave {gave}"
    )


def _factory_twice(config: Config, problem: Problem) -> str:
    if config.problem.name not in OWN_CODE:
        return ""
    other = build_problem(config)
    build_layout(config, other)
    same_start = torch.equal(problem.initial(config.run.seed), other.initial(config.run.seed))
    if same_start and getattr(problem, "data_fingerprint", "") == getattr(other, "data_fingerprint", ""):
        return ""
    named = config.problem
    code = f"the factory {named.target}" if named.name == "python" else f"the checkout {named.path}"
    return f"; {code} gives other weights each time it is called"
