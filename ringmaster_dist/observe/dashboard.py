"""The wandb workspace for asynchronous runs, defined in code: progress, staleness, workers, system."""

from __future__ import annotations

from typing import Any

_AXIS = "version"
# What is drawn together; the rest of a section has a panel each.
PANELS: dict[str, list[tuple[str, list[str]]]] = {
    "progress": [
        ("loss", ["loss", "train_loss"]),
        ("bits per byte", ["bits_per_byte"]),
        ("objective gap", ["gap"]),
        ("rates", ["updates_per_second", "gradients_per_second"]),
        ("step size", ["eta"]),
    ],
    "staleness": [
        ("delay", ["delay_mean", "delay_p50", "delay_p95", "delay_max", "threshold"]),
        ("delay by part", ["delay_compute", "delay_queue"]),
        ("verdicts", ["accepted", "stale", "invalid", "interrupted"]),
        ("seconds in queue and wire", ["queue_seconds"]),
    ],
    "workers": [
        ("live workers", ["workers"]),
        ("compute seconds", ["used_seconds", "wasted_seconds"]),
        ("lost leases and reconnections", ["lease_losses", "reconnects"]),
    ],
    "system": [
        ("server seconds", ["update_seconds", "lock_wait_seconds"]),
        ("memory", ["memory_bytes"]),
        ("bytes on the wire", ["bytes_received", "bytes_sent"]),
    ],
}
_PER_WORKER = {"seconds per gradient": "workers/tau/.*", "share of accepted work": "workers/share/.*"}


def workspace(entity: str, project: str) -> Any:
    """Not saved yet. Raises ImportError without the extra ``dashboard``."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    sections = []
    for name, panels in PANELS.items():
        drawn: list[Any] = [
            wr.LinePlot(title=title, x=_AXIS, y=[f"{name}/{key}" for key in keys]) for title, keys in panels
        ]
        if name == "progress":
            drawn.append(wr.LinePlot(title="loss against time", x="time", y=["progress/loss", "progress/train_loss"]))
            drawn.append(
                wr.LinePlot(title="loss against tokens", x="tokens", y=["progress/loss", "progress/train_loss"])
            )
        if name == "workers":
            drawn += [wr.LinePlot(title=title, x=_AXIS, metric_regex=regex) for title, regex in _PER_WORKER.items()]
        sections.append(ws.Section(name=name, panels=drawn, is_open=True))
    return ws.Workspace(entity=entity, project=project, name="ringmaster", sections=sections)


def specification(made: Any) -> str:
    """As JSON: what wandb would be sent."""
    return str(made._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2))
