"""Writes the .jsonl files of a real run, and at its end a sample of a language model (`write_sample`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from ringmaster_dist.algorithm.methods import Change
from ringmaster_dist.algorithm.rows import RowsChange
from ringmaster_dist.config.schema import Config
from ringmaster_dist.observe.loggers import Logger
from ringmaster_dist.observe.metrics import Metrics
from ringmaster_dist.observe.records import Member, MetricsRow, Summary
from ringmaster_dist.observe.run_directory import Lines, RunDirectory
from ringmaster_dist.observe.run_files import FINAL, MEMBERS, METRICS, ROWS, SAMPLE, THRESHOLDS, TRACE
from ringmaster_dist.problems import Problem, unwrapped
from ringmaster_dist.protocol import Push, Receipt, Seat, Verdict
from ringmaster_dist.server.core import ServerCore

log = logging.getLogger(__name__)

_SAMPLE_TOKENS, _SAMPLE_SECONDS = 120, 5.0  # at most


class Journal:
    """Writes the trace, the members, the chosen thresholds and rows, and the metrics.

    The service calls `arrival`, `membership`, `change`, `rows`, `flush` and `mark` under its lock. The main thread
    calls `row` and `close`. The thread that writes a checkpoint calls `sync`.
    """

    def __init__(
        self, directory: RunDirectory, sizes: Mapping[str, int], measured: Metrics, choices: Sequence[str] = ()
    ) -> None:
        """Cuts each file to its entry in ``sizes``. ``choices`` are the files for what the server itself chooses."""
        self._measured = measured
        self._trace = directory.open_trace(sizes.get(TRACE, 0))
        names = (MEMBERS, METRICS, *choices)
        self._rows = {name: directory.open_rows(name, sizes.get(name, 0)) for name in names}
        self._files: dict[str, Lines] = {TRACE: self._trace, **self._rows}

    def arrival(self, time: float, worker: int, push: Push, receipt: Receipt) -> None:
        self._measured.arrival(time, worker, push, receipt)
        # A gradient whose version a restart has lost is listed at the last version that was not lost.
        shared, lost = receipt.version - receipt.delay, None
        if shared < push.gradient_version:
            lost = push.gradient_version
        else:
            shared = push.gradient_version
        self._trace.arrival(
            time, worker, push.sequence, shared, receipt, push.loss, push.compute_seconds, push.term, lost,
            push.rows if receipt.verdict is not Verdict.INVALID else 0,
        )  # fmt: skip

    def membership(self, worker: int, event: str, pushes: int, seat: Seat, why: str = "") -> None:
        member = Member(worker, event, pushes, seat.slot, *seat.device, seat.ranks, seat.host, why)
        self._rows[MEMBERS].write(member._asdict())

    def change(self, time: float, change: Change) -> None:
        self._rows[THRESHOLDS].write({"time": time, **change._asdict()})

    def rows(self, time: float, change: RowsChange) -> None:
        self._rows[ROWS].write({"time": time, **change._asdict()})

    def row(self, row: MetricsRow) -> None:
        self._rows[METRICS].write(row.to_json())

    def flush(self) -> None:
        self._trace.flush()

    def mark(self) -> dict[str, int]:
        """The sizes of the files, with everything so far in them. Raises OSError if the disk does not take it."""
        for name, file in self._files.items():
            if not file.flush():
                raise OSError(f"{name} cannot be written")
        return {name: file.size for name, file in self._files.items()}

    def sync(self) -> None:
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def write_sample(problem: Problem, core: ServerCore, directory: RunDirectory) -> None:
    """Lets a language model begin a document, and writes it to ``sample.txt``. Other problems write nothing.

    It runs after the run, in the main thread, and takes a few seconds at most. A failure does not change how the run
    ended.
    """
    try:
        if text := _sample(problem, core):
            directory.write_secret(SAMPLE, text + "\n")
    except Exception as error:
        log.warning("the model wrote no sample: %s", error)


def close_logger(logger: Logger, config: Config, directory: RunDirectory, summary: Summary) -> None:
    """Gives the logger the final weights, the sample and the summary. A failure does not change how the run ended."""
    if config.logger.name == "none":
        return
    try:
        logger.file(directory.path / FINAL, "model")
        if config.logger.text and (text := directory.read(SAMPLE)):
            logger.text(text)
    except Exception as error:
        log.warning("the logger did not get everything: %s", error)
    logger.close(summary)


def _sample(problem: Problem, core: ServerCore) -> str:
    from ringmaster_dist.problems.nanochat.generate import generate, reader_of
    from ringmaster_dist.problems.nanochat.problem import TextProblem

    problem = unwrapped(problem)
    if not isinstance(problem, TextProblem):
        return ""
    tokenizer, tokens = problem.tokenizer(), list[int]()
    deadline = time.monotonic() + _SAMPLE_SECONDS
    problem.load(core.snapshot.iterate.cpu())
    for token in generate(reader_of(problem), [tokenizer.bos], _SAMPLE_TOKENS):
        tokens.append(token)
        if time.monotonic() > deadline:
            break
    return tokenizer.decode(tokens)
