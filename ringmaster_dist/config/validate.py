"""Checks a configuration: each value against its declaration, then the combinations of keys.

Every message names the key, its value, what is allowed and what to do.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.keys import Key, own_keys
from ringmaster_dist.config.profile_file import cluster_seconds, measured_times
from ringmaster_dist.config.schema import CHECKOUT, DEPTH, TEXT_PROBLEMS, ClusterConfig, Config
from ringmaster_dist.profiles import PROFILES

_MOST_GRADIENTS_PER_WORKER = 1000  # a batch that needs more than this from each worker is a slip


def validate(config: Config, *, real_time: bool = False) -> None:
    """Raises `UserError` at the first value that cannot be meant."""
    _check_values(config, "")
    _check_problem(config)
    _check_cluster(config.cluster, real_time)
    _check_rows(config, real_time)
    if config.budget.updates is None and config.budget.seconds is None:
        raise UserError("the run would never end: set budget.updates or budget.seconds")
    server = config.server
    if server.start_seconds >= server.call_seconds:
        raise UserError(
            f"server.start_seconds={server.start_seconds:g}: must be below server.call_seconds="
            f"{server.call_seconds:g}, else the first workers give up while they wait for the others"
        )
    _check_ramps(config)
    _check_method(config)
    _check_local(config)
    _check_overlap(config)
    if not config.watch and (config.watch_metrics or config.watch_port):
        name = "watch_metrics=true" if config.watch_metrics else f"watch_port={config.watch_port}"
        raise UserError(f"{name}: nothing is served without watch=true: add it, or leave {name} out")


def _check_values(section: Any, prefix: str) -> None:
    """Each key of a section that exists for the section's choice, and the sections inside it."""
    choice = getattr(section, "name", "")
    for key, declared in own_keys(section.__class__).items():
        if declared.only and choice not in declared.only:
            continue
        name, value = prefix + key, getattr(section, key)
        inner = value if isinstance(value, list) else [value]
        if inner and is_dataclass(inner[0]):
            for index, element in enumerate(inner):
                _check_values(element, f"{name}[{index}]." if inner is value else f"{name}.")
        elif not declared.permits(value):
            raise UserError(refusal(name, value, declared))


def refusal(name: str, value: Any, declared: Key) -> str:
    """Why a key does not take a value."""
    shown = "null" if value is None else f"{value:g}" if isinstance(value, float) else value
    return f"{name}={shown}: must be {declared.allowed}. {declared.sentence}"


def _check_problem(config: Config) -> None:
    problem, model, data = config.problem, config.model, config.data
    if problem.name == "python" and ":" not in (problem.target or ""):
        raise UserError(f"problem.target={problem.target}: write package.module:factory")
    if problem.name not in TEXT_PROBLEMS:
        return
    if problem.micro_batch is not None and problem.batch % problem.micro_batch:
        raise UserError(f"problem.micro_batch={problem.micro_batch}: must divide problem.batch={problem.batch}")
    if problem.name == CHECKOUT:
        if not problem.path:
            raise UserError("problem=nanochat_checkout needs problem.path, the folder of your nanochat checkout")
        if model.name != DEPTH:
            raise UserError(f"model={model.name}: the sizes of a checkout follow from a depth: use model={DEPTH}")
    elif model.name == DEPTH:
        if model.head_dim % 2:
            raise UserError(f"model.head_dim={model.head_dim}: must be even")
    elif model.n_embd % (2 * model.n_head):
        raise UserError(f"model.n_embd={model.n_embd}: must be a multiple of twice model.n_head={model.n_head}")
    elif model.n_head % model.n_kv_head:
        raise UserError(f"model.n_head={model.n_head}: must be a multiple of model.n_kv_head={model.n_kv_head}")
    if not model.window_pattern or set(model.window_pattern) - set("SL"):
        raise UserError(f"model.window_pattern={model.window_pattern}: must be made of S and L")
    if problem.name == "nanochat" and data.name == "text" and not data.path:
        raise UserError("data=text needs data.path, a file or folder of .txt, .md, .py, .jsonl or .parquet")


def _check_cluster(cluster: ClusterConfig, real_time: bool) -> None:
    if cluster.local_workers is not None and cluster.local_workers > cluster.workers:
        raise UserError(
            f"cluster.local_workers={cluster.local_workers}: between 0 and cluster.workers={cluster.workers} of them "
            "are started on this machine"
        )
    if cluster.devices == []:
        raise UserError("cluster.devices=[]: name at least one device, such as [cuda:0, cpu], or leave the key out")
    if cluster.devices and cluster.local_workers == 0:
        raise UserError(
            f"cluster.devices=[{','.join(cluster.devices)}] is for workers that this machine starts, and "
            "cluster.local_workers=0 starts none: give device= to each ringmaster worker"
        )
    if cluster.profile == "none" and not real_time:
        raise UserError(f"cluster.profile=none: simulated workers need a pace, one of {', '.join(PROFILES)}")
    if cluster.times is not None and cluster.profile != "file":
        raise UserError(f"cluster.times={cluster.times} counts only with cluster.profile=file")
    if cluster.profile == "file":
        measured_times(cluster)  # reads the file
    for index, phase in enumerate(cluster.phases):
        for worker in phase.workers or ():
            if not 0 <= worker < cluster.workers:
                raise UserError(f"cluster.phases[{index}].workers has {worker}: workers are 0 to {cluster.workers - 1}")


def _check_rows(config: Config, real_time: bool) -> None:
    rows, problem = config.cluster.batch, config.problem
    if rows is None:
        return
    if rows == "auto":
        if problem.name == "quadratic":
            raise UserError("cluster.batch=auto: the quadratic has no rows: use problem=nanochat or a model of yours")
        if problem.name in TEXT_PROBLEMS:
            check_row_bounds(config.cluster, problem.batch)
        return
    if not isinstance(rows, list) or not all(type(count) is int for count in rows):
        raise UserError(f"cluster.batch={rows}: must be auto, or a list of whole numbers such as [8, 4], or null")
    if problem.name not in TEXT_PROBLEMS or not rows:
        raise UserError(f"cluster.batch={rows}: rows of text per gradient, at least 1 each (nanochat only)")
    if problem.micro_batch is not None:
        raise UserError("cluster.batch and problem.micro_batch do not go together: each worker has its own rows")
    if not real_time:
        raise UserError("cluster.batch is for real workers: a simulation gives every worker problem.batch")


def check_row_bounds(cluster: ClusterConfig, batch: int) -> None:
    """``batch`` is the usual number of rows of the problem, which has to be between the bounds."""
    least, most = cluster.batch_min, batch if cluster.batch_max is None else cluster.batch_max
    if least > batch:
        raise UserError(f"cluster.batch_min={least}: must be at most the usual rows of a gradient, {batch}")
    if most < batch:
        raise UserError(f"cluster.batch_max={most}: must be at least the usual rows of a gradient, {batch}")


def _check_ramps(config: Config) -> None:
    method = config.method
    for name, value in (("warmup", method.warmup), ("decay", method.decay)):
        if value and config.budget.updates is None:
            raise UserError(f"method.{name}={value:g} is a fraction of budget.updates, which is not set: set it")
    if method.warmup + method.decay > 1:
        raise UserError(
            f"method.warmup={method.warmup:g} and method.decay={method.decay:g} are fractions of the same budget: "
            "together they must be at most 1"
        )


def _check_method(config: Config) -> None:
    method = config.method
    if method.name == "ringmaster":
        if method.threshold is None:
            raise UserError("method.threshold is not set: give a whole number of at least 1, such as 8, or auto")
        if method.schedule == "theory":
            if config.budget.updates is None:
                raise UserError("method.schedule=theory needs budget.updates, the K of the theorem")
            for name in ("smoothness", "noise", "initial_gap"):
                if getattr(method.constants, name) is None:
                    raise UserError(f"method.schedule=theory needs method.constants.{name}")
    if method.name == "ringmaster_agnostic" and method.smoothness == "known" and method.l1 is None:
        raise UserError("method.smoothness=known needs method.l1, the constant L1")
    if method.name == "rennala":
        _check_batch(config)


def _check_local(config: Config) -> None:
    local = config.local
    if local.steps == 1:
        for name in ("eta", "beta"):
            if (value := getattr(local, name)) is not None:
                raise UserError(f"local.{name}={value:g} counts only with local.steps above 1")
        return
    if config.method.schedule == "theory":
        raise UserError(f"method.schedule=theory is for single gradients: remove it, or local.steps={local.steps}")
    if config.cluster.batch is not None:
        raise UserError(
            f"cluster.batch and local.steps={local.steps} do not go together: the length of an oracle's step does not "
            "depend on the rows, so every push would have the same weight"
        )


def _check_overlap(config: Config) -> None:
    method = config.method
    if config.worker.overlap and (method.name == "synchronous" or method.threshold == 1):
        which = f"method.threshold={method.threshold}" if method.name != "synchronous" else "method=synchronous"
        raise UserError(
            f"worker.overlap=true and {which} do not go together: a gradient that is computed while the last one is "
            "sent would always be stale"
        )


def _check_batch(config: Config) -> None:
    batch, workers, seconds = config.method.batch, config.cluster.workers, config.budget.seconds
    if batch is None:
        raise UserError("method.batch is not set: give the number of gradients per update, such as 8")
    most = _MOST_GRADIENTS_PER_WORKER * workers
    if batch > most:
        raise UserError(
            f"method.batch={batch}: one update would need more than {_MOST_GRADIENTS_PER_WORKER} gradients from "
            f"each of the {workers} workers; use at most {most}"
        )
    if seconds is not None and not config.cluster.phases and config.cluster.profile != "none":
        times = cluster_seconds(config, workers)
        deliverable = int((seconds // times).sum())
        if batch > deliverable:
            raise UserError(
                f"method.batch={batch}: these workers finish at most {deliverable} gradients in "
                f"budget.seconds={seconds:g}, so there would be no update; lower the batch or raise the budget"
            )
