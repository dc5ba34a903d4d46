"""Starts, watches, disturbs and cleans up real runs for tests.

A test has no deadlines of its own, because a loaded machine is slow and not wrong. It waits with `until` for a
condition, and without a limit for a process that ends. `timeout` in pyproject.toml ends a test that hangs.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from ringmaster_dist.observe.run_files import RunFiles
from ringmaster_dist.simulation import replay as replaying
from tests.command import ringmaster

QUICK = ["problem.dim=50", "cluster.workers=3", "cluster.unit_seconds=0.01", "budget.seconds=600", "run.samples=6000",
         "run.report=false"]  # fmt: skip
LONG = ["budget.updates=null", "budget.seconds=6000", "run.samples=60000"]  # ends when the test says so
_AFTER_THE_END_SECONDS = 20.0  # for a condition that is still false when a run has ended


class Run:
    """A ``ringmaster train`` in the background. It leaves no process behind when the block ends."""

    open: ClassVar[list["Run"]] = []  # those whose block has not ended

    def __init__(self, directory: Path, *overrides: str, prefix: Sequence[str] = ()) -> None:
        self.directory = directory
        directory.parent.mkdir(exist_ok=True)
        self._errors = directory.with_suffix(".errors")
        given = overrides if any(word.startswith("resume=") for word in overrides) else (*QUICK, *overrides)
        where = [] if given is overrides else [f"run.dir={directory}"]
        command = [*prefix, sys.executable, "-m", "ringmaster_dist", "train", *where, *given]
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.started: set[int] = set()
        self.output = ""  # of the whole run, once it has ended

    def __enter__(self) -> "Run":
        Run.open.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        Run.open.remove(self)
        if self.process.poll() is None:
            self.children()
            self.process.kill()
            self.process.communicate()
        for pid in self.started:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)

    def children(self, kind: str = "") -> list[int]:
        """Returns the run's live processes (below the supervisor) whose name begins with ``kind``."""
        below = descendants(self.process.pid)
        self.started |= below.keys()
        return sorted(pid for pid, name in below.items() if name.startswith(kind))

    def workers(self) -> list[int]:
        return self.children("worker-slot")

    def server(self) -> int:
        return until(lambda: self.children("server"), "the server is there")[0]

    def errors(self) -> str:
        """Returns the text on stderr so far."""
        return self._errors.read_text()

    def _records(self, name: str) -> list[dict]:
        """Returns the complete lines of a file that may still grow."""
        path = self.directory / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def terms(self) -> list[dict]:
        return self._records("terms.jsonl")

    def checkpoints(self, term: int) -> list[Path]:
        return sorted(self.directory.glob(f"checkpoints/term-{term:04d}_*.safetensors"))

    def arrivals(self) -> list[dict]:
        return self._records("trace.jsonl")

    def members(self) -> list[dict]:
        return self._records("members.jsonl")

    def joined(self) -> set[int]:
        return {m["worker"] for m in self.members() if m["event"] == "join"}

    def version(self) -> int:
        """Returns the version in the newest row of metrics.jsonl."""
        rows = self._records("metrics.jsonl")
        return rows[-1]["version"] if rows else 0

    def interrupt(self) -> None:
        """Sends SIGINT to ``ringmaster train`` itself. A prefix such as unshare would ignore it."""
        pid = self.process.pid
        while Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() != sys.executable:
            (pid,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        os.kill(pid, signal.SIGINT)

    def wait(self) -> tuple[int, str, str]:
        """Returns the exit code, what was printed, and the errors. It may be called again."""
        if not self.process.stdout.closed:
            self.output, _ = self.process.communicate()
        return self.process.returncode, self.output, self.errors()

    def summary(self) -> dict:
        return json.loads((self.directory / "summary.json").read_text())


def descendants(pid: int) -> dict[int, str]:
    """Returns the live child processes of a process, with their own children and all names."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = path.read_text().rpartition(")")
        except OSError:
            continue
        state, parent, *_ = after.split()
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
            names[int(path.parent.name)] = before.partition("(")[2]
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below and child not in below}:
        below |= more
    return {child: names[child] for child in below - {pid}}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, what: str, seconds: float = 60.0):
    """Waits until something is true, and returns it. Only the time for which this machine could work counts.

    With four times as many runnable threads as cores, four seconds count as one. After the end of a run the wait is
    short.
    """
    last = time.monotonic()
    while seconds > 0:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
        last, before = time.monotonic(), last
        seconds -= (last - before) * _share_of_a_core()
        if any(run.process.poll() is not None for run in Run.open):
            seconds = min(seconds, _AFTER_THE_END_SECONDS)
    told = "".join(f"\n{run.directory} (exit code {run.process.poll()}):\n{run.errors()[-2000:]}" for run in Run.open)
    raise AssertionError(f"this did not happen: {what}{told}")


def _share_of_a_core() -> float:
    """Returns the share of a core that a thread of this machine gets now."""
    runnable, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
    return min(1.0, os.cpu_count() / max(1, int(runnable)))


def replay(directory: Path) -> subprocess.CompletedProcess:
    return ringmaster("replay", str(directory))


def recompute(directory: Path) -> replaying.Outcome:
    """Replays a run of the tests' own, whose code is allowed."""
    return replaying.replay(directory, target=target_of(directory))


def target_of(directory: Path) -> str:
    """The code that a run of the tests' own needs."""
    problem = RunFiles(directory).config()["problem"]
    return problem.get("target") or problem.get("path") or ""


def check_finished(run: Run, *, attacked: bool = False) -> dict:
    """Checks a finished run: its exit code, no process left, counters add up, every arrival occurs once, the replay
    gives the same bits."""
    code, _, errors = run.wait()
    assert code in ((130, 143) if run.summary()["ended"] == "stopped by the user" else (0,)), errors
    assert attacked or "Traceback" not in errors  # torch prints one for a call it could not unpickle
    until(lambda: not any(alive(pid) for pid in run.started), "every process of the run has ended")
    summary, arrivals = run.summary(), run.arrivals()
    assert summary["pushes"] == len(arrivals) == summary["accepted"] + summary["stale"] + summary["invalid"]
    assert len({(a["worker"], a["sequence"]) for a in arrivals}) == len(arrivals)
    assert all(a["delay"] == a["version"] - a["gradient_version"] >= 0 for a in arrivals if a["verdict"] != "invalid")
    outcome = recompute(run.directory)
    assert outcome.same, outcome.message
    return summary


def overlapping(arrivals: list[dict]) -> int:
    """Returns how many gradients were begun before the reply to the accepted push of their worker that came before.

    A snapshot from that reply, or a later one, would have the update of that push.
    """
    last: dict[int, dict] = {}
    found = 0
    for arrival in arrivals:
        before = last.get(arrival["worker"])
        if before is not None and before["verdict"] == "accepted" and before["term"] == arrival["term"]:
            found += arrival["gradient_version"] <= before["version"]
        last[arrival["worker"]] = arrival
    return found


def processes_with(*words: str) -> list[int]:
    """Returns the processes whose command line contains all these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(int(path.parent.name))
    return found


def hang_up(listener: socket.socket) -> None:
    """Closes every connection immediately, until the listener is closed."""
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return
