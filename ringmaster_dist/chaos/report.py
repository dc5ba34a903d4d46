"""The account of a disturbed run versus the undisturbed one, counted from the files of both."""

from __future__ import annotations

import json
import platform
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

from ringmaster_dist.chaos.faults import KINDS, WORKER_KINDS, Injector
from ringmaster_dist.observe.run_files import RunFiles
from ringmaster_dist.simulation.replay import replay


def account(directory: Path, undisturbed: Injector, disturbed: Injector, given: dict[str, float]) -> dict[str, Any]:
    """Compares the runs. Rates are accepted gradients per second of wall clock, from the first update to the end."""
    run = RunFiles(directory / "disturbed")
    before, after = RunFiles(directory / "undisturbed").outcome(), run.outcome()
    rates = [s.accepted / injector.seconds for s, injector in ((before, undisturbed), (after, disturbed))]
    begins = [term.version for term in run.terms()][1:]
    lost = sum(max(0, restart.checkpoint - begin) for restart, begin in zip(disturbed.restarts, begins, strict=False))
    redone = sum(max(0, restart.version - begin) for restart, begin in zip(disturbed.restarts, begins, strict=False))
    # Terms beyond those that the schedule has caused are of a server that died by itself.
    unplanned = len(begins) - len(disturbed.restarts)
    reported = Counter(record["kind"] for record in run.rows("faults.jsonl"))
    outcome = replay(run.path)
    counted = after.accepted + after.stale + after.invalid
    return {
        "date": str(date.today()),
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()} {platform.release()}",
        "given": given,
        "seconds": round(disturbed.seconds, 1),
        "faults": {kind: disturbed.injected[kind] for kind in KINDS},
        "worker_faults": sum(disturbed.injected[kind] for kind in WORKER_KINDS),
        "told_by_workers": {kind: reported[kind] for kind in ("disconnect", "nan")},
        "updates": after.updates,
        "pushes": after.pushes,
        "counters_add_up": after.pushes == counted,
        "invalid": after.invalid,
        "workers_joined": after.num_workers,
        "undisturbed_per_second": round(rates[0], 3),
        "disturbed_per_second": round(rates[1], 3),
        "goodput": round(rates[1] / rates[0], 4),
        "lost_updates": lost,
        "unplanned_restarts": unplanned,
        "redone_updates": redone,
        "replay": "same" if outcome.same else "DIFFERENT",
        "replay_message": outcome.message,
    }


def show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
        return
    faults = ", ".join(f"{number} {kind}" for kind, number in report["faults"].items())
    reported = ", ".join(f"{number} {kind}" for kind, number in report["told_by_workers"].items())
    lines = {
        "time": f"{report['seconds']:g} s under faults, seed {report['given']['seed']:g}, {report['date']}",
        "faults": f"{report['worker_faults']} of workers and {report['faults']['restart']} of the server: {faults}",
        "seen by workers": f"{reported}; {report['invalid']} invalid gradients refused",
        "goodput": f"{report['goodput']:.1%}: {report['disturbed_per_second']:g} accepted per second, "
        f"undisturbed {report['undisturbed_per_second']:g}",
        "unplanned": f"{report['unplanned_restarts']} restarts of the server that the schedule did not ask for",
        "lost": f"{report['lost_updates']} updates of a finished checkpoint "
        f"({report['redone_updates']} made after it were repeated)",
        "counters": f"{report['pushes']:,} pushes, {'every one' if report['counters_add_up'] else 'NOT every one'} "
        "with one verdict",
        "replay": f"{report['replay']}: {report['updates']:,} updates, {report['replay_message']}",
    }
    print("ringmaster chaos")
    for name, text in lines.items():
        print(f"  {name:<16} {text}")
