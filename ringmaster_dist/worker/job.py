"""What a run's configuration means for a worker."""

from __future__ import annotations

from ringmaster_dist.config.build import build_layout, build_problem
from ringmaster_dist.config.compose import from_yaml
from ringmaster_dist.profiles import base_seconds
from ringmaster_dist.worker.loop import Job


def make_job(config_text: str, slot: int) -> Job:
    config = from_yaml(config_text)
    problem = build_problem(config)
    cluster = config.cluster
    pace = None
    if cluster.profile != "none":
        pace = float(base_seconds(cluster.profile, slot + 1, cluster.unit_seconds)[slot])
    return Job(
        problem=problem,
        layout_fingerprint=build_layout(config, problem).fingerprint,
        seed=config.run.seed,
        base_seconds=pace,
        jitter=cluster.jitter,
        interrupt=config.method.interrupt,
    )
