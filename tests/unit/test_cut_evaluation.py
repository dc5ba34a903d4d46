"""A run whose closing evaluation is cut short by a signal says to which iterate its loss belongs."""

import json
import os
import signal
import time

import pytest
import torch

from ringmaster_dist.problems.quadratic import Quadratic
from tests.command import ringmaster


class Slow(Quadratic):
    """Only the first iterate can be evaluated in time. The next evaluation sends Ctrl+C to the command."""

    quick_to_evaluate = False

    def __init__(self, command):
        super().__init__(10)
        self._command = command

    def evaluate(self, iterate):
        if torch.equal(iterate, self.initial(0)):
            return super().evaluate(iterate)
        if self._command:
            command, self._command = self._command, 0
            os.kill(command, signal.SIGINT)
        time.sleep(600)
        raise AssertionError("no signal has arrived")


def slow(command, **of_the_run):
    return Slow(command)


@pytest.mark.parametrize("command", ["simulate", "train"])
def test_a_loss_of_an_earlier_version_says_so(command, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # train sets it, and this restores it
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    done = ringmaster(command, "problem=python", f"problem.target={__name__}:slow", "cluster.workers=2", "eval.every=5",
                      f"problem.args.command={os.getpid()}", f"run.dir={tmp_path}", "budget.updates=null",
                      "budget.seconds=6000", "run.samples=60000")  # fmt: skip
    assert done.returncode == 130, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["updates"] >= 5
    assert summary["evaluated_on"] == "the iterate after 0 updates"
    assert f"-> {summary['final_gap']:.4g} on the iterate after 0 updates" in done.stdout
