"""A real headless browser, for tests of pages."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
          "--disable-background-networking", "--disable-component-update", "--disable-sync",
          "--hide-scrollbars", "--enable-logging=stderr"]  # fmt: skip


def chromium() -> str:
    """Returns its path. With CI=true a missing browser is a failure."""
    found = os.environ.get("RINGMASTER_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        what = "there is no Chromium: apt-get install chromium, or set RINGMASTER_CHROMIUM to one"
        if os.environ.get("CI") == "true":
            pytest.fail(f"the pages cannot be tested, {what}")
        pytest.skip(what)
    return found


def open_page(url: str, folder: Path, *, size: str = "1240,1600", milliseconds: int = 4000) -> tuple[str, Path, str]:
    """Returns the document after its scripts have run, a screenshot, and the console output."""
    command = [chromium(), *_FLAGS, f"--window-size={size}", f"--virtual-time-budget={milliseconds}"]
    dom = _run([*command, f"--user-data-dir={folder / 'profile-a'}", "--dump-dom", url])
    picture = folder / "page.png"
    _run([*command, f"--user-data-dir={folder / 'profile-b'}", f"--screenshot={picture}", url])
    console = "\n".join(line for line in dom.stderr.splitlines() if "CONSOLE" in line)
    return dom.stdout, picture, console


def _run(command: list[str]) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done
