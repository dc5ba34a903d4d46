"""``ringmaster train``: a server and workers on this machine, each its own process and failure domain."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from ringmaster_dist.cli.options import parse
from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.config.describe import annotated
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.schema import Config
from ringmaster_dist.observe.run_directory import RunDirectory, RunDirectoryError

_HELP = """ringmaster train [key=value ...]

Trains in real time over torch RPC: starts a server and cluster.workers workers on this machine as processes of their
own, brings a worker that dies back, and ends when the budget is used up. Slower machines are emulated by pacing
(cluster.profile, cluster.unit_seconds). Writes the run directory; ringmaster replay RUN_DIR then proves it.

  --cfg job   print the composed configuration and stop
  --help      this text

Also
  torchrun --standalone --nproc-per-node=5 -m ringmaster_dist.train [key=value ...]     rank 0 serves, 4 work
  python -m ringmaster_dist.worker server=$(cat RUN_DIR/address) token_file=RUN_DIR/token    one more worker, any time

Examples
  ringmaster train method=ringmaster method.threshold=4 run.dir=runs/a && ringmaster replay runs/a
  ringmaster train method=synchronous cluster.workers=8 cluster.profile=gpus budget.updates=100
"""
_START_SECONDS = 60.0
_TICK_SECONDS = 0.05
_RESTART_SECONDS = 0.5
_LAST_SECONDS = 2.0
_QUICK_DEATH_SECONDS, _MOST_QUICK_DEATHS = 10.0, 3


def main(argv: list[str]) -> int:
    overrides, show = parse(argv, "train")
    if show == "help":
        print(_HELP)
        print("Keys and their defaults")
        print("\n".join(f"  {line}" for line in annotated(compose([], "train")).splitlines()))
        return 0
    if show == "cfg":
        composed = compose(overrides, "train")
        to_typed(composed, real_time=True)
        print(annotated(composed))
        return 0
    config, _, directory = prepare(overrides)
    token = secrets.token_hex(16)
    directory.write_secret("token", token)
    code = supervise(config, directory, token)
    if code == 0:
        show_summary(directory)
    return code


def prepare(overrides: list[str]) -> tuple[Config, str, RunDirectory]:
    """Checks everything, claims the run directory, writes the configuration."""
    composed = compose(overrides, "train")
    config = to_typed(composed, real_time=True)
    if config.cluster.phases:
        raise UserError("cluster.phases changes speeds in simulations only: real workers keep their pace")
    name = f"{config.problem.name}-{config.method.name}"
    try:
        directory = RunDirectory(config.run.dir, name=name, overwrite=config.run.overwrite)
    except RunDirectoryError as error:
        raise UserError(str(error)) from error
    composed.run.dir = str(directory.path)
    text = annotated(composed) + "\n"
    directory.write_config(text)
    return config, text, directory


def show_summary(directory: RunDirectory) -> None:
    import json

    from rich.console import Console

    from ringmaster_dist.observe.console import print_summary

    summary = json.loads((directory.path / "summary.json").read_text())
    first = json.loads((directory.path / "metrics.jsonl").read_text().splitlines()[0])
    print_summary(Console(file=sys.stdout), summary, first.get("gap", float("nan")), str(directory.path))


class Place:
    """One worker's place: the process in it, and how its predecessors fared."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at = 0.0
        self._started_at = 0.0
        self._quick_deaths = 0

    def tend(self, command: list[str], environment: dict[str, str]) -> bool:
        """Starts the worker when it is due, notices when it has died. False when it dies each time it starts."""
        now = time.monotonic()
        if self.process is None:
            if now >= self.start_at:
                self.process, self._started_at = _start([*command, f"slot={self.slot}"], environment), now
        elif self.process.poll() not in (None, 0):
            # Killed from outside is bad luck; failing by itself, time after time as soon as it starts, is not.
            own_fault = self.process.returncode > 0 and now - self._started_at < _QUICK_DEATH_SECONDS
            self._quick_deaths = self._quick_deaths + 1 if own_fault else 0
            print(
                f"worker in slot {self.slot} ended with {self.process.returncode}: starting it again", file=sys.stderr
            )
            self.process, self.start_at = None, now + _RESTART_SECONDS
        return self._quick_deaths < _MOST_QUICK_DEATHS


def supervise(config: Config, directory: RunDirectory, token: str) -> int:
    """Runs the processes until the server ends. A worker that fails is started again, alone."""
    from ringmaster_dist.cli.signals import stop_signals

    environment = {**os.environ, "RINGMASTER_TOKEN": token, "OMP_NUM_THREADS": "1"}
    server = _start(["ringmaster_dist", "serve", str(directory.path)], environment)
    places: list[Place] = []
    failed = False
    try:
        with stop_signals() as asked:
            address = _wait_for_address(server, directory.path / "address")
            if address is None:
                return server.poll() or 1
            command = ["ringmaster_dist.worker", f"server={address}", *_timeouts(config)]
            places = [Place(slot) for slot in range(config.cluster.workers)]
            while server.poll() is None and not asked() and not failed:
                for place in places:
                    failed |= not place.tend(command, environment)
                time.sleep(_TICK_SECONDS)
            if server.poll() is None:
                server.terminate()  # it tells the workers, writes what there is, and ends
    finally:
        # The server waits for whoever has joined; who has not, or does not end soon after it, is not needed any more.
        _finish([server], 2 * config.server.farewell_seconds)
        _finish([place.process for place in places if place.process], _LAST_SECONDS)
    if failed:
        print(f"ringmaster: a worker failed {_MOST_QUICK_DEATHS} times as soon as it had started: the run was ended; "
              "its last words are above", file=sys.stderr)  # fmt: skip
        return 1
    return server.returncode


def _timeouts(config: Config) -> list[str]:
    names = ("connect_seconds", "call_seconds", "patience_seconds")
    return [f"{name}={getattr(config.server, name)}" for name in names]


def _start(module_and_arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # In a session of its own, so that Ctrl+C in the terminal reaches the supervisor alone.
    command = [sys.executable, "-m", *module_and_arguments]
    return subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)


def _wait_for_address(server: subprocess.Popen[bytes], path: Path) -> str | None:
    deadline = time.monotonic() + _START_SECONDS
    while not path.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(_TICK_SECONDS)
    return path.read_text().strip()


def _finish(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Leaves no process behind: waits a while for each, then ends it."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
