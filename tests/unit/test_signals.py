"""A signal ends a process wherever its main thread is."""

import os
import signal
import subprocess
import sys

import pytest

WAITS_IN_CPP = """
import torch
from ringmaster_dist.signals import Stopped, raise_when_stopped
raise_when_stopped()
try:
    print("ready", flush=True)
    torch.futures.Future().wait()  # nobody sets it, and no handler in Python runs meanwhile
except Stopped:
    torch.futures.Future().wait()  # the signal was early
"""
STARTS_FORK_SERVER = """
import os, signal, sys, threading
from multiprocessing import forkserver
from ringmaster_dist.signals import raise_when_stopped, start_fork_server, Stopped
raise_when_stopped()
start = forkserver.ensure_running
def pressed():
    start()
    os.kill(os.getpid(), signal.SIGINT)  # Ctrl+C, while this process ignores it for the sake of the fork server
    print("still here", flush=True)
forkserver.ensure_running = pressed
try:
    start_fork_server()
except Stopped as error:
    print("stopped", error.exit_code, flush=True)
"""
IMPORTS = """
import signal, sys
from ringmaster_dist.signals import raise_when_stopped, Stopped
raise_when_stopped()
sys.path.insert(0, sys.argv[1])
try:
    import pressed
    signal.pause()
except Stopped as error:
    print("stopped", error.exit_code, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_waits_in_cpp_code_ends(number):
    process = subprocess.Popen([sys.executable, "-c", WAITS_IN_CPP], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    os.kill(process.pid, number)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (128 + number, b"ringmaster: stopped\n")


def test_ctrl_c_while_the_fork_server_starts_is_not_lost():
    done = subprocess.run([sys.executable, "-c", STARTS_FORK_SERVER], capture_output=True, text=True)
    assert done.stdout == "still here\nstopped 130\n", done.stderr


def test_ctrl_c_during_an_import_waits_for_its_end(tmp_path):
    """C++ code that imports a module aborts the process if the import raises."""
    (tmp_path / "pressed.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('imported', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", IMPORTS, str(tmp_path)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("imported\nstopped 130\n", "")
