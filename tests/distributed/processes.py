"""Real runs for tests: started, watched, disturbed and looked after."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

QUICK = ["problem.dim=50", "cluster.workers=3", "cluster.unit_seconds=0.01", "budget.seconds=60", "run.samples=600"]
LONG = ["budget.updates=null", "budget.seconds=600", "run.samples=6000"]  # ends when the test says so


class Run:
    """A ``ringmaster train`` in the background; leaves nothing behind when the block ends."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "ringmaster_dist", "train", f"run.dir={directory}", *QUICK, *overrides]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started: set[int] = set()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.children()
            self.process.kill()
            self.process.communicate()
        for pid in self.started:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)

    def children(self, kind: str = "") -> list[int]:
        """The supervisor's live children whose command line contains ``kind``."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
                command = (path.parent / "cmdline").read_text()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid and fields[0] != "Z":
                self.started.add(int(path.parent.name))
                if kind in command:
                    found.append(int(path.parent.name))
        return sorted(found)

    def workers(self) -> list[int]:
        return self.children("ringmaster_dist.worker")

    def arrivals(self) -> list[dict]:
        trace = self.directory / "trace.jsonl"
        lines = trace.read_text().splitlines(keepends=True) if trace.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def members(self) -> list[dict]:
        path = self.directory / "members.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def version(self) -> int:
        """As of the newest row of metrics.jsonl."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return json.loads(lines[-1])["version"] if lines else 0

    def wait(self, seconds: float = 100.0) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, output, errors

    def summary(self) -> dict:
        return json.loads((self.directory / "summary.json").read_text())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, what: str, seconds: float = 60.0):
    """Waits for something to become true, and returns it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"in {seconds:g} s this did not happen: {what}")


def replay(directory: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ringmaster_dist", "replay", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def check_finished(run: Run, *, attacked: bool = False) -> dict:
    """After the end: exit 0, no process left, counters add up, every arrival once, the replay gives the same bits."""
    code, _, errors = run.wait()
    assert code == 0, errors
    assert attacked or "Traceback" not in errors  # torch prints one for a call it could not unpickle
    until(lambda: not any(alive(pid) for pid in run.started), "every process of the run has ended", 20)
    summary, arrivals = run.summary(), run.arrivals()
    assert summary["pushes"] == len(arrivals) == summary["accepted"] + summary["stale"] + summary["invalid"]
    assert len({(a["worker"], a["sequence"]) for a in arrivals}) == len(arrivals)
    assert all(a["delay"] == a["version"] - a["gradient_version"] >= 0 for a in arrivals if a["verdict"] != "invalid")
    replayed = replay(run.directory)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "the same bits" in replayed.stdout
    return summary
