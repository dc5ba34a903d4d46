"""Recomputes a real run from its trace, in one process, and compares the bits.

The trace says which gradients arrived in which order, of which worker, sequence and version; the batch of each is a
function of those. So every gradient can be computed again at the iterate of its version, and the core, fed the same
arrivals, has to give the same verdicts and end at the same iterate. Joins and leaves are fed at the same places.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringmaster_dist.config.build import build_core, build_problem, build_wire, rows_of
from ringmaster_dist.config.compose import from_yaml
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.server import weights
from ringmaster_dist.simulation.doubt import Computed, why_different
from ringmaster_dist.wire import Codec


class Outcome(NamedTuple):
    same: bool
    updates: int
    pushes: int
    message: str


def replay(directory: Path) -> Outcome:
    """Raises `UserError` where the directory does not hold a finished real run."""
    for name in ("config.yaml", "trace.jsonl", "members.jsonl", "terms.jsonl", "final.safetensors"):
        if not (directory / name).exists():
            raise UserError(f"{directory} has no {name}: replay needs the directory of a finished ringmaster train")
    config = from_yaml((directory / "config.yaml").read_text())
    problem = build_problem(config)
    core = build_core(config, problem, directory)
    wire = Codec(build_wire(config), core.update.layout.size, problem.dtype)
    arrivals, members = _records(directory / "trace.jsonl"), _records(directory / "members.jsonl")
    terms = _records(directory / "terms.jsonl")
    last_use = {record["gradient_version"]: index for index, record in enumerate(arrivals)}
    iterates = {0: core.snapshot.iterate}
    next_member = 0
    last: Computed | None = None  # the last accepted arrival
    slots: dict[int, int] = {}
    problems = {config.problem.batch: problem}  # by the number of rows of a gradient
    torch.set_num_threads(config.cluster.threads)  # as the workers; the bits depend on it
    for index, record in enumerate(arrivals):
        while next_member < len(members) and members[next_member]["pushes"] <= index:
            torch.set_num_threads(config.server.compute_threads)  # a departure may complete a round
            _member(core, members[next_member])
            torch.set_num_threads(config.cluster.threads)
            slots[members[next_member]["worker"]] = members[next_member]["slot"]
            iterates.setdefault(core.version, core.snapshot.iterate)
            next_member += 1
        core.enter_term([term["version"] for term in terms[: 1 + _serving_term(terms, index)]])
        worker, sequence, version = record["worker"], record["sequence"], record["gradient_version"]
        named = record.get("lost_version", version)
        if record["verdict"] == "invalid":
            core.push(worker, sequence, named, torch.empty(0), record["term"])
            continue
        before, loss = core.version, record["loss"]
        gradient = torch.empty(0)
        if record["verdict"] == "accepted" and version not in iterates:
            what = "is not made yet" if version > core.version else "was used for the last time before"
            return Outcome(False, before, index, f"arrival {index} was computed at version {version}, which {what}")
        if record["verdict"] == "accepted" or version in iterates:
            iterate = wire.decode_iterate(wire.encode_iterate(iterates[version]))
            rows = rows_of(config, slots.get(worker, 0))
            if rows not in problems:
                problems[rows] = build_problem(config, rows=rows)
                problems[rows].bind(core.update.layout)
            gradient, loss = problems[rows].gradient(iterate, config.run.seed, worker, sequence)
            gradient = wire.encode_gradient(gradient)
            computed = Computed(problems[rows], iterates[version], version, worker, sequence)
            last = computed if record["verdict"] == "accepted" else last
        torch.set_num_threads(config.server.compute_threads)
        receipt = core.push(worker, sequence, named, gradient, record["term"], record["compute_seconds"])
        torch.set_num_threads(config.cluster.threads)
        told = (record["verdict"], record["delay"], record["version"])
        if (receipt.verdict.value, receipt.delay, receipt.version) != told:
            return Outcome(False, core.version, index, f"arrival {index} was {told}, the replay says {tuple(receipt)}")
        if "lost_version" not in record and record["loss"] is not None and record["loss"] != loss:
            return Outcome(
                False, before, index,
                f"the loss at version {version} (arrival {index}) was {record['loss']!r}, the replay says {loss!r}: "
                f"the iterates differ from update {version} on{why_different(config, wire, computed)}",
            )  # fmt: skip
        iterates.setdefault(core.version, core.snapshot.iterate)
        for old in [v for v in (version, before) if last_use.get(v, -1) <= index and v != core.version]:
            iterates.pop(old, None)
    torch.set_num_threads(config.server.compute_threads)
    for member in members[next_member:]:
        _member(core, member)
    final, version = weights.read(directory / "final.safetensors")
    views = core.update.layout.views(core.snapshot.iterate)
    if core.version != version:
        return Outcome(False, core.version, len(arrivals), "the numbers of updates differ")
    different = [name for name, view in views.items() if name not in final or not torch.equal(final[name], view)]
    if different:
        why = why_different(config, wire, last) if last else ""
        return Outcome(False, core.version, len(arrivals), f"the final iterate differs in {', '.join(different)}{why}")
    return Outcome(True, core.version, len(arrivals), "the same bits")


def _serving_term(terms: list[dict[str, Any]], index: int) -> int:
    """The term in which the arrival of this index was judged: the last that had begun, of those that go on to it."""
    return max(t for t, term in enumerate(terms) if term["pushes"] <= index)


def _member(core: Any, record: dict[str, Any]) -> None:
    if record["event"] == "join":
        core.join(record["worker"])
    else:
        core.leave(record["worker"])


def _records(path: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not JSON: the file is damaged or still being written") from error
    return records
