"""Divergence is detected by the evaluation, or by the training loss if there is no evaluation."""

import math

import pytest

from ringmaster_dist.observe.divergence import Divergence
from ringmaster_dist.observe.records import finite


@pytest.mark.parametrize(
    ("values", "diverges"),
    [
        ([1.0, 0.5, 1.2], False),
        ([1.0, 0.5, 1.3], True),
        ([1.0, 1.3, 0.9], False),  # it has come back
        ([-2.0, -3.0, -1.6], False),
        ([-2.0, -3.0, -1.4], True),
        ([1.0, math.nan], True),
        ([1.0, math.inf], True),
        ([1.0, None], True),  # as it is written to a file
        ([0.78, 1.138], True),
        ([0.0269, 0.0801], False),  # small values are noisy,
        ([0.0269, 0.3], True),  # up to a point
        ([0.0, 0.05], False),
        ([0.0, 0.5], True),
        ([math.inf], True),
        ([], False),
    ],
)
def test_divergence_is_detected_by_the_objective(values, diverges):
    divergence = Divergence("loss")
    for value in values:
        divergence.look({"loss": value}, train_loss=99.0)
    assert divergence.diverged is diverges


def test_divergence_is_reported_once_for_every_rise():
    divergence = Divergence("gap")
    said = [divergence.look({"gap": value}) for value in (1.0, 2.0, 3.0, 0.5, 2.0)]
    assert said == [False, True, False, False, True]
    assert "it began at 1" in divergence.words(0.2)
    assert "method.eta=0.05" in divergence.words(0.2)


def test_a_problem_that_does_not_evaluate_is_judged_by_its_training_loss():
    divergence = Divergence("loss")
    for value, gradients in ((1.0, 1), (9.0, 29), (2.9, 50)):  # few gradients say nothing yet
        divergence.look({}, value, gradients)
        assert not divergence.diverged
    assert divergence.look({}, 3.1, 60)
    divergence.look({"accuracy": 0.5}, 0.9, 70)
    assert not divergence.diverged
    assert divergence.look({}, math.nan, 71)


def test_numbers_that_are_not_finite_are_written_as_null():
    assert finite({"loss": math.nan, "gap": math.inf, "other": 1.5, "count": 3}) == {
        "loss": None, "gap": None, "other": 1.5, "count": 3,
    }  # fmt: skip
