"""Checks values and their combinations. Every message names the key, its value, what is allowed and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.schema import Config, MethodConfig, ServerConfig
from ringmaster_dist.profiles import PROFILES, base_seconds

METHODS = ("ringmaster", "ringmaster_agnostic", "rennala", "delay_adaptive", "synchronous", "asynchronous")
_GEOMETRIES = ("spectral", "euclidean", "sign", "column", "row", "none")
_ORTHOGONALIZATIONS = ("polar_express", "jordan", "exact")
_MOST_GRADIENTS_PER_WORKER = 1000  # a batch that needs more than this from each worker is a slip


def validate(config: Config, *, real_time: bool = False) -> None:
    """Raises `UserError` at the first thing that cannot be meant."""
    problem, cluster, budget, run = config.problem, config.cluster, config.budget, config.run
    _one_of("problem.name", problem.name, ("quadratic",))
    _at_least("problem.dim", problem.dim, 1)
    _at_least("problem.noise", problem.noise, 0)

    for role in ("matrix", "embedding", "output", "scalar"):
        _one_of(f"geometry.{role}", getattr(config.geometry, role), _GEOMETRIES)
    _one_of("geometry.orthogonalization", config.geometry.orthogonalization, _ORTHOGONALIZATIONS)

    _at_least("cluster.workers", cluster.workers, 1)
    if cluster.profile == "none" and not real_time:
        raise UserError(f"cluster.profile=none: simulated workers need a pace, one of {', '.join(PROFILES)}")
    _one_of("cluster.profile", cluster.profile, (*PROFILES, "none"))
    _above("cluster.unit_seconds", cluster.unit_seconds, 0)
    _at_least("cluster.jitter", cluster.jitter, 0)
    for index, phase in enumerate(cluster.phases):
        key = f"cluster.phases[{index}]"
        _at_least(f"{key}.start_seconds", phase.start_seconds, 0)
        _at_least(f"{key}.rate", phase.rate, 0)
        for worker in phase.workers or ():
            if not 0 <= worker < cluster.workers:
                raise UserError(f"{key}.workers has {worker}: workers are 0 to {cluster.workers - 1}")

    if budget.updates is None and budget.seconds is None:
        raise UserError("the run would never end: set budget.updates or budget.seconds")
    if budget.updates is not None:
        _at_least("budget.updates", budget.updates, 1)
    if budget.seconds is not None:
        _above("budget.seconds", budget.seconds, 0)
    _at_least("run.seed", run.seed, 0)
    _at_least("run.samples", run.samples, 1)
    _one_of("simulation.engine", config.simulation.engine, ("auto", "core", "compiled"))
    _validate_server(config.server)
    _validate_method(config.method, config)


def _validate_server(server: ServerConfig) -> None:
    if not 0 <= server.port <= 65535:
        raise UserError(f"server.port={server.port}: must be between 0 (any free one) and 65535")
    _at_least("server.threads", server.threads, 2)
    _at_least("server.start_seconds", server.start_seconds, 0)
    for name in ("lease_seconds", "connect_seconds", "call_seconds", "patience_seconds", "farewell_seconds"):
        _above(f"server.{name}", getattr(server, name), 0)


def _validate_method(method: MethodConfig, config: Config) -> None:
    _one_of("method.name", method.name, METHODS)
    _above("method.eta", method.eta, 0)
    if method.beta is not None and not 0 <= method.beta < 1:
        raise UserError(f"method.beta={method.beta:g}: must be at least 0 and below 1 (0.95 is usual)")
    _at_least("method.weight_decay", method.weight_decay, 0)
    _at_least("method.warmup_updates", method.warmup_updates, 0)
    _at_least("method.decay_updates", method.decay_updates, 0)
    if not 0 <= method.final_eta_fraction <= 1:
        raise UserError(f"method.final_eta_fraction={method.final_eta_fraction:g}: must be between 0 and 1")
    updates = config.budget.updates
    if method.decay_updates and (updates is None or method.decay_updates > updates):
        raise UserError(
            f"method.decay_updates={method.decay_updates}: the decay ends with budget.updates, "
            f"which is {'not set' if updates is None else updates}"
        )
    if method.name == "ringmaster":
        if method.threshold is None:
            raise UserError("method.threshold is not set: give a whole number of at least 1, such as 8")
        if method.threshold < 1:
            raise UserError(
                f"method.threshold={method.threshold}: must be at least 1, else no gradient is ever accepted "
                "(1 accepts only fresh ones)"
            )
        _one_of("method.schedule", method.schedule, ("constant", "theory"))
        if method.schedule == "theory":
            _validate_constants(method, updates)
    if method.name == "ringmaster_agnostic":
        _one_of("method.smoothness", method.smoothness, ("classical", "generalized", "known"))
        if method.smoothness == "known":
            if method.l1 is None:
                raise UserError("method.smoothness=known needs method.l1, the constant L1")
            _above("method.l1", method.l1, 0)
    if method.name == "rennala":
        _validate_batch(method.batch, config)


def _validate_constants(method: MethodConfig, updates: int | None) -> None:
    constants = method.constants
    if updates is None:
        raise UserError("method.schedule=theory needs budget.updates, the K of the theorem")
    for name in ("smoothness", "noise", "initial_gap"):
        if getattr(constants, name) is None:
            raise UserError(f"method.schedule=theory needs method.constants.{name}")
    for name, value in (("smoothness", constants.smoothness), ("initial_gap", constants.initial_gap),
                        ("norm_ratio", constants.norm_ratio)):  # fmt: skip
        _above(f"method.constants.{name}", value or 0.0, 0)
    _at_least("method.constants.noise", constants.noise or 0.0, 0)
    _at_least("method.constants.generalized_smoothness", constants.generalized_smoothness, 0)


def _validate_batch(batch: int | None, config: Config) -> None:
    if batch is None:
        raise UserError("method.batch is not set: give the number of gradients per update, such as 8")
    _at_least("method.batch", batch, 1)
    workers = config.cluster.workers
    most = _MOST_GRADIENTS_PER_WORKER * workers
    if batch > most:
        raise UserError(
            f"method.batch={batch}: one update would need more than {_MOST_GRADIENTS_PER_WORKER} gradients from "
            f"each of the {workers} workers; use at most {most}"
        )
    seconds = config.budget.seconds
    if seconds is not None and not config.cluster.phases and config.cluster.profile != "none":
        times = base_seconds(config.cluster.profile, workers, config.cluster.unit_seconds)
        deliverable = int((seconds // times).sum())
        if batch > deliverable:
            raise UserError(
                f"method.batch={batch}: these workers finish at most {deliverable} gradients in "
                f"budget.seconds={seconds:g}, so there would be no update; lower the batch or raise the budget"
            )


def _one_of(key: str, value: str, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise UserError(f"{key}={value}: must be one of {', '.join(allowed)}")


def _at_least(key: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise UserError(f"{key}={value:g}: must be at least {least:g}")


def _above(key: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value > least):
        raise UserError(f"{key}={value:g}: must be above {least:g}")
