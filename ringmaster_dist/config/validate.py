"""Checks values and their combinations. Every message names the key, its value, what is allowed and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import cluster_seconds
from ringmaster_dist.config.schema import Config, MethodConfig, ServerConfig
from ringmaster_dist.profiles import PROFILES

METHODS = ("ringmaster", "ringmaster_agnostic", "rennala", "delay_adaptive", "synchronous", "asynchronous")
LOGGERS = ("none", "wandb", "wandb_offline")
_GEOMETRIES = ("spectral", "euclidean", "sign", "column", "row", "none")
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_PRECISIONS = ("float64", "float32", "bfloat16")
_ORTHOGONALIZATIONS = ("polar_express", "jordan", "exact")
_MOST_GRADIENTS_PER_WORKER = 1000  # a batch that needs more than this from each worker is a slip


def validate(config: Config, *, real_time: bool = False) -> None:
    """Raises `UserError` at the first thing that cannot be meant."""
    problem, cluster, budget, run = config.problem, config.cluster, config.budget, config.run
    _one_of("problem.name", problem.name, ("quadratic", "nanochat", "python"))
    _at_least("problem.dim", problem.dim, 1)
    _at_least("problem.noise", problem.noise, 0)
    if problem.clip is not None:
        _above("problem.clip", problem.clip, 0)
    if problem.name == "nanochat":
        _validate_nanochat(config)
    if problem.name == "python" and ":" not in (problem.target or ""):
        raise UserError(f"problem.target={problem.target}: write package.module:factory")
    _at_least("eval.every", config.eval.every, 1)
    _at_least("cluster.threads", cluster.threads, 1)
    if cluster.batch is not None:
        if problem.name != "nanochat" or not cluster.batch or min(cluster.batch) < 1:
            raise UserError(
                f"cluster.batch={cluster.batch}: rows of text per gradient, at least 1 each (nanochat only)"
            )
        if problem.micro_batch is not None:
            raise UserError("cluster.batch and problem.micro_batch do not go together: each worker has its own rows")
        if not real_time:
            raise UserError("cluster.batch is for real workers: a simulation gives every worker problem.batch")

    for role in ("matrix", "embedding", "output", "scalar"):
        _one_of(f"geometry.{role}", getattr(config.geometry, role), _GEOMETRIES)
        _above(f"geometry.radius.{role}", getattr(config.geometry.radius, role), 0)
        decay = getattr(config.geometry.weight_decay, role)
        if decay is not None:
            _at_least(f"geometry.weight_decay.{role}", decay, 0)
    _one_of("geometry.orthogonalization", config.geometry.orthogonalization, _ORTHOGONALIZATIONS)
    if config.geometry.precision is not None:
        _one_of("geometry.precision", config.geometry.precision, _PRECISIONS)

    _at_least("cluster.workers", cluster.workers, 1)
    if cluster.local_workers is not None and not 0 <= cluster.local_workers <= cluster.workers:
        raise UserError(
            f"cluster.local_workers={cluster.local_workers}: between 0 and cluster.workers={cluster.workers} of them "
            "are started on this machine"
        )
    if cluster.profile == "none" and not real_time:
        raise UserError(f"cluster.profile=none: simulated workers need a pace, one of {', '.join(PROFILES)}")
    _one_of("cluster.profile", cluster.profile, (*PROFILES, "file", "none"))
    if cluster.times is not None and cluster.profile != "file":
        raise UserError(f"cluster.times={cluster.times} counts only with cluster.profile=file")
    if cluster.profile == "file":
        cluster_seconds(cluster, 1)
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
    for name in ("gradient_dtype", "iterate_dtype"):
        value = getattr(config.wire, name)
        if value is not None:
            _one_of(f"wire.{name}", value, _DTYPES)
    if config.checkpoint.every is not None:
        _at_least("checkpoint.every", config.checkpoint.every, 1)
    _at_least("checkpoint.keep", config.checkpoint.keep, 1)
    _one_of("logger.name", config.logger.name, LOGGERS)
    _above("logger.init_seconds", config.logger.init_seconds, 0)
    _at_least("logger.finish_seconds", config.logger.finish_seconds, 0)
    _validate_method(config.method, config)


def _validate_nanochat(config: Config) -> None:
    problem, model, data = config.problem, config.model, config.data
    _at_least("problem.batch", problem.batch, 1)
    _at_least("problem.validation_rows", problem.validation_rows, 1)
    if problem.final_tokens is not None:
        _at_least("problem.final_tokens", problem.final_tokens, 1)
    if problem.micro_batch is not None and problem.batch % max(1, problem.micro_batch):
        raise UserError(f"problem.micro_batch={problem.micro_batch}: must divide problem.batch={problem.batch}")
    _one_of("problem.precision", problem.precision, ("auto", "float32", "bfloat16", "float16"))
    _one_of("problem.attention", problem.attention, ("auto", "sdpa"))
    for name in ("n_layer", "n_head", "n_kv_head", "sequence_len"):
        _at_least(f"model.{name}", getattr(model, name), 1)
    _at_least("model.n_embd", model.n_embd, 32)
    if model.n_embd % (2 * model.n_head):
        raise UserError(f"model.n_embd={model.n_embd}: must be a multiple of twice model.n_head={model.n_head}")
    if model.n_head % model.n_kv_head:
        raise UserError(f"model.n_head={model.n_head}: must be a multiple of model.n_kv_head={model.n_kv_head}")
    if not 260 <= model.vocab_size <= 65536:
        raise UserError(f"model.vocab_size={model.vocab_size}: must be between 260 (the bytes) and 65536")
    if not model.window_pattern or set(model.window_pattern) - set("SL"):
        raise UserError(f"model.window_pattern={model.window_pattern}: must be made of S and L")
    _one_of("data.name", data.name, ("stdlib", "text", "climbmix"))
    if not 1 <= data.shards <= 6542:
        raise UserError(f"data.shards={data.shards}: must be between 1 and 6542")
    if data.name == "text" and not data.path:
        raise UserError("data=text needs data.path, a file or folder of .txt, .md, .py, .jsonl or .parquet")


def _validate_server(server: ServerConfig) -> None:
    if not 0 <= server.port <= 65535:
        raise UserError(f"server.port={server.port}: must be between 0 (any free one) and 65535")
    _at_least("server.threads", server.threads, 2)
    _at_least("server.max_invalid", server.max_invalid, 1)
    _at_least("server.compute_threads", server.compute_threads, 1)
    _at_least("server.start_seconds", server.start_seconds, 0)
    for name in (
        "handshake_seconds",
        "lease_seconds",
        "connect_seconds",
        "call_seconds",
        "patience_seconds",
        "farewell_seconds",
    ):
        _above(f"server.{name}", getattr(server, name), 0)
    if server.start_seconds >= server.call_seconds:
        raise UserError(
            f"server.start_seconds={server.start_seconds:g}: must be below server.call_seconds="
            f"{server.call_seconds:g}, else the first workers give up while they wait for the others"
        )


def _validate_method(method: MethodConfig, config: Config) -> None:
    _one_of("method.name", method.name, METHODS)
    _above("method.eta", method.eta, 0)
    if method.beta is not None and not 0 <= method.beta < 1:
        raise UserError(f"method.beta={method.beta:g}: must be at least 0 and below 1 (0.95 is usual)")
    _at_least("method.weight_decay", method.weight_decay, 0)
    updates = config.budget.updates
    for name in ("warmup", "decay", "final_eta_fraction"):
        value = getattr(method, name)
        if not 0 <= value <= 1:
            raise UserError(f"method.{name}={value:g}: must be between 0 and 1")
        if name != "final_eta_fraction" and value and updates is None:
            raise UserError(f"method.{name}={value:g} is a fraction of budget.updates, which is not set: set it")
    if method.warmup + method.decay > 1:
        raise UserError(
            f"method.warmup={method.warmup:g} and method.decay={method.decay:g} are fractions of the same budget: "
            "together they must be at most 1"
        )
    if method.name == "ringmaster":
        if method.threshold is None:
            raise UserError("method.threshold is not set: give a whole number of at least 1, such as 8, or auto")
        if isinstance(method.threshold, str):
            if method.threshold != "auto":
                raise UserError(f"method.threshold={method.threshold}: must be a whole number of at least 1, or auto")
        elif method.threshold < 1:
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
        times = cluster_seconds(config.cluster, workers)
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
