"""What the paper says of its two experiments, and whether an outcome agrees.

One rule holds for every claim. A method is ahead of another one if its median over the seeds is lower. If the ranges
over the seeds overlap, the verdict says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from ringmaster_dist.experiment.curves import seconds_to
from ringmaster_dist.experiment.plan import EVERY_ETA, REGIMES, TRAIN_LOSS
from ringmaster_dist.experiment.runner import Outcome, Result

OWN, BASELINES = "ringmaster", ("rennala", "delay_adaptive")
PAPER = (OWN, "ringmaster_agnostic", *BASELINES)
SLIGHTLY = 2.0  # "slightly behind" is up to this many times the best other
LEVEL = 1.25  # "level" is within this factor, in both directions

Values = Mapping[str, Sequence[float]]  # of each method, by seed


def table(outcome: Outcome) -> list[str]:
    """The claims and the verdicts as lines of Markdown. Experiments that the paper does not have get none."""
    if outcome.plan.objective == TRAIN_LOSS:
        return _language(outcome)
    return _quadratic(outcome) if outcome.plan.gaps else []


def lowest(values: Values, others: Sequence[str]) -> str:
    """Says whether our method is lower than all the others."""
    own = values[OWN]
    best = min(others, key=lambda method: statistics.median(values[method]))
    rival = values[best]
    ahead = statistics.median(own) < statistics.median(rival)
    overlap = min(own) <= max(rival) and min(rival) <= max(own)
    verdict = ("holds" if ahead else "**fails**") + (", but the seeds overlap" if overlap else "")
    return f"{verdict}: {_spread(own)}, and {best} has {_spread(rival)}"


def growing(margins: Sequence[float]) -> str:
    """Says whether the margin grows from each regime to the next."""
    grows = all(after > before for before, after in pairwise(margins))
    return ("holds" if grows else "**fails**") + ": " + ", ".join(f"{margin:+.3f}" for margin in margins)


def ratio(regime: str, values: Values) -> str:
    """The claim of a regime of the quadratic, for values of which the lower one is better."""
    medians = {method: statistics.median(values[method]) for method in PAPER}
    against = {"similar": BASELINES, "sublinear": PAPER[1:], "linear": ("rennala",)}[regime]
    best = min(against, key=lambda method: medians[method])
    if not medians[OWN] < float("inf"):
        return f"**fails**: {OWN} never reaches it"
    if not medians[best] < float("inf"):
        return f"holds: {best} never reaches it" if regime == "sublinear" else f"**fails**: {best} never reaches it"
    found = medians[OWN] / medians[best]
    holds = {"similar": 1 < found <= SLIGHTLY, "sublinear": found < 1, "linear": 1 / LEVEL <= found <= LEVEL}[regime]
    return ("holds" if holds else "**fails**") + f": {found:.2f} x {best}"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def _by_method(results: Sequence[Result], regime: str, value: Callable[[Result], float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for result in results:
        if result.job.regime == regime:
            found.setdefault(result.job.method, []).append(value(result))
    return found


def _language(outcome: Outcome) -> list[str]:
    lines = [
        "The paper says that Ringmaster has the lowest training loss with every kind of delays, and that its margin "
        "over the baselines (Rennala, delay-adaptive) grows from similar to sublinear to linear delays. The training "
        "loss is the mean over the gradients that were accepted in the last tenth of the time. The validation loss is "
        "that of the last iterate. The figures are the median and the range over the seeds.",
        "",
        "| workers | delays | claim | training loss | validation loss |",
        "|---|---|---|---|---|",
    ]
    kinds = (outcome.end, lambda result: result.final)
    for workers in dict.fromkeys(regime.partition("-")[2] for regime in outcome.plan.regimes):
        own = [regime for regime in outcome.plan.regimes if regime.partition("-")[2] == workers]
        margins: list[list[float]] = [[], []]
        for regime in own:
            found = [_by_method(outcome.final, regime, kind) for kind in kinds]
            profile = regime.partition("-")[0]
            said = [lowest(values, PAPER[1:]) for values in found]
            lines.append(f"| {workers} | {profile} | Ringmaster is the lowest | {' | '.join(said)} |")
            if EVERY_ETA in outcome.plan.grids:
                said = [lowest(values, [EVERY_ETA]) for values in found]
                lines.append(f"| {workers} | {profile} | not in the paper: also with every eta for Rennala | "
                             f"{' | '.join(said)} |")  # fmt: skip
            for values, list_of in zip(found, margins, strict=True):
                best = min(statistics.median(values[method]) for method in BASELINES)
                list_of.append(best - statistics.median(values[OWN]))
        if len(own) == len(REGIMES):
            said = [growing(list_of) for list_of in margins]
            lines.append(f"| {workers} | all | the margin grows | {' | '.join(said)} |")
    return [*lines, ""]


def _quadratic(outcome: Outcome) -> list[str]:
    plan = outcome.plan
    said = {
        "similar": "similar: Ringmaster slightly behind the best baseline",
        "sublinear": "sublinear: Ringmaster best",
        "linear": "linear: Ringmaster level with Rennala",
    }
    lines = [
        f"Every column has its own tuning. The figures are ratios of medians. Slightly behind means up to {SLIGHTLY:g} "
        f"times the best baseline, and level means within a factor of {LEVEL:g}.",
        "",
        "| the paper | final gap | " + " | ".join(f"seconds to a gap of {gap:g}" for gap in plan.gaps) + " |",
        "|---|---|" + "---|" * len(plan.gaps),
    ]
    for regime in plan.regimes:
        columns = [ratio(regime, _by_method(outcome.final, regime, outcome.end))]
        columns += [ratio(regime, times(outcome, regime, gap)) for gap in plan.gaps]
        lines.append(f"| {said[regime]} | {' | '.join(columns)} |")
    return [*lines, ""]


def times(outcome: Outcome, regime: str, gap: float) -> dict[str, list[float]]:
    """The seconds to a gap of every method, by seed, with the setting that was tuned for this gap."""
    return {
        method: [seconds_to(r.curve, gap) for r in outcome.timed
                 if r.job._replace(seed=0) == outcome.quickest[regime, method, gap]]
        for method in outcome.plan.grids
    }  # fmt: skip
