"""Settings of whole processes, each in a process of its own."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("kind", ["keep_memory", "return_memory"])  # a worker, and a server
def test_a_long_lived_process_searches_for_reference_cycles_as_usual(kind):
    code = (
        "import gc; usual = gc.get_threshold(); from ringmaster_dist import process_settings as own;"
        "own.search_garbage_seldom(); seldom = gc.get_threshold(); own." + kind + "();"
        "print(seldom[0] > usual[0], gc.get_threshold() == usual, gc.get_freeze_count() > 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True True True\n", done.stderr
