"""Checks of this machine: versions, network names, memory, disk, devices, and a small run of its own."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ringmaster_dist.addresses import elsewhere, is_loopback, resolve
from ringmaster_dist.doctor import Finding
from ringmaster_dist.observe.run_files import RunFiles

_SHM_BYTES, _DISK_BYTES, _OPEN_FILES = 256 << 20, 2 << 30, 1024
_FIRST_YEAR = 2025


def machine_findings(folder: Path) -> Iterator[Finding]:
    yield _versions()
    yield _transport()
    yield _names()
    yield _shm()
    yield _disk(folder)
    yield _open_files()
    yield _clock()
    yield from _devices()


def _versions() -> Finding:
    import torch

    python, numbers = platform.python_version(), torch.__version__.split("+")[0].split(".")
    good = sys.version_info >= (3, 10, 9) and (2, 6) <= (int(numbers[0]), int(numbers[1])) < (3, 0)
    text = f"Python {python}, torch {torch.__version__}"
    needed = "Python 3.10.9 or newer and torch 2.6 to 2.x are needed"
    return Finding("versions", good, text if good else f"{text}: {needed}")


def _transport() -> Finding:
    from ringmaster_dist.transport.agent import check_assumptions

    try:
        check_assumptions()
    except RuntimeError as error:
        return Finding("torch RPC", False, f"{error}: install another torch 2.x")
    return Finding("torch RPC", True, "everything that the transport needs is there")


def _names() -> Finding:
    """Whether other machines can reach this one, and by which address."""
    name, listed = socket.gethostname(), elsewhere()
    if listed.startswith("none"):
        return Finding("interface", True, "there is no network but loopback: one machine alone")
    if is_loopback(name) or not _has_address(name):
        return Finding("interface", None, f"the host name {name} is of no use to other machines; to serve them give "
                       f"server.host an address: {listed}")  # fmt: skip
    return Finding("interface", True, f"other machines may know this one by {listed}")


def _has_address(name: str) -> bool:
    try:
        return bool(resolve(name))
    except OSError:
        return False


def _shm() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("/dev/shm", True, "not there, not needed")
    total = shutil.disk_usage(path).total
    if total >= _SHM_BYTES:
        return Finding("/dev/shm", True, f"{_size(total)}")
    return Finding(
        "/dev/shm", False, f"only {_size(total)}: start the container with --shm-size=1g (shm_size in compose)"
    )


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    if free >= _DISK_BYTES:
        return Finding("disk", True, f"{_size(free)} free in {folder}")
    return Finding("disk", False, f"only {_size(free)} free in {folder}: make room, or choose a run.dir elsewhere")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _OPEN_FILES or soft == resource.RLIM_INFINITY:
        return Finding("open files", True, f"{soft} allowed")
    return Finding("open files", False, f"only {soft} allowed, a server needs a few per worker: ulimit -n {hard}")


def _clock() -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    if time.gmtime().tm_year >= _FIRST_YEAR:
        return Finding("clock", True, f"{now} UTC")
    return Finding("clock", False, f"{now} UTC is in the past: set the clock (timedatectl set-ntp true)")


def _devices() -> Iterator[Finding]:
    import torch

    from ringmaster_dist import devices

    for name in devices.available():
        try:
            types = [t for t in (torch.float32, torch.bfloat16, torch.float16) if _computes(name, t)]
        except RuntimeError as error:
            yield Finding(name, False, f"does not compute ({str(error).splitlines()[0]}): check driver and torch build")
            continue
        what = f"{os.cpu_count()} cores" if devices.is_cpu(name) else devices.title(name)
        if devices.pinned(1, torch.float32, name) is not None:
            what += ", copies into pinned host memory"
        listed = ", ".join(str(t).removeprefix("torch.") for t in types)
        yield Finding(name, torch.float32 in types, f"{what}; computes in {listed}")
    if not devices.accelerators():
        yield Finding("accelerator", True, "none that this torch can use; workers compute on the CPU")


def _computes(device: str, dtype: object) -> bool:
    import torch

    try:
        a = torch.ones(8, 8, device=device, dtype=dtype)  # type: ignore[call-overload]
        return float((a @ a).sum()) == 512.0
    except (RuntimeError, NotImplementedError):
        if dtype is torch.float32:
            raise
        return False


def small_run() -> Finding:
    """Runs a server and two workers on this machine, over RPC, from start to end. Blocks for 90 seconds at most."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ringmaster_dist", "train", f"run.dir={folder}/run", "problem.dim=10",
                   "cluster.workers=2", "cluster.unit_seconds=0.005", "budget.updates=20", "budget.seconds=20",
                   "run.report=false", "server.start_seconds=20"]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=90)
            summary = RunFiles(Path(folder, "run")).summary() if done.returncode == 0 else None
        except (subprocess.TimeoutExpired, OSError):
            return Finding("small run", False, "a server and two workers on loopback did not finish: run ringmaster "
                           "train problem.dim=10 with RINGMASTER_LOG=INFO to see where it stops")  # fmt: skip
    if summary is not None and summary.updates == 20:
        return Finding("small run", True, f"a server and two workers made 20 updates in {summary.seconds:.2f} s")
    said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return Finding("small run", False, f"a server and two workers on loopback failed: {said}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MB"
