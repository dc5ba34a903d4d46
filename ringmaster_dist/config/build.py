"""Makes the objects that a configuration describes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ringmaster_dist import __version__, devices
from ringmaster_dist.algorithm.auto import AutoThreshold
from ringmaster_dist.algorithm.layout import ROLES, Layout, Norm, Parameter
from ringmaster_dist.algorithm.methods import DelayAdaptive, Method, Rennala, Synchronous
from ringmaster_dist.algorithm.rows import RowsBySpeed
from ringmaster_dist.algorithm.schedules import Constant, Constants, Ramped, Schedule, agnostic, theory
from ringmaster_dist.algorithm.update import Update, quick_precision
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.own_code import alike, problem_from, reported_once, source_of
from ringmaster_dist.config.schema import AUTO, CHECKOUT, DEPTH, TEXT_PROBLEMS, Config
from ringmaster_dist.config.validate import check_row_bounds
from ringmaster_dist.crew import Crew
from ringmaster_dist.errors import Mistake
from ringmaster_dist.problems import Problem
from ringmaster_dist.problems.local_steps import LocalSteps
from ringmaster_dist.problems.module import ModuleProblem
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.server import weights
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.weights import INITIAL
from ringmaster_dist.wire import Wire

if TYPE_CHECKING:
    from ringmaster_dist.problems.nanochat.checkout import Checkout
    from ringmaster_dist.problems.nanochat.model import NanoChatConfig
    from ringmaster_dist.problems.nanochat.rows import Recipe, Rows
    from ringmaster_dist.problems.nanochat.sizes import Sizes
    from ringmaster_dist.server.meter import WorkerMeasurements


def rows_of(config: Config, slot: int) -> int:
    """The rows that a gradient of the worker in this slot takes."""
    dealt = config.cluster.batch
    return dealt[slot % len(dealt)] if isinstance(dealt, list) else config.problem.batch


def build_problem(config: Config, device: str = "cpu", rows: int | None = None) -> Problem:
    """The problem of a configuration, on a device, which becomes the current one. ``rows`` replaces problem.batch."""
    devices.select(device)
    problem, local = _single_steps(config, device, rows), config.local
    if local.steps == 1:
        return problem
    assert local.eta is not None, "compose has completed it"
    assert local.beta is not None, "compose has completed it"
    layout = _layout(config, problem.parameters, _norms(config))
    # A worker's steps may not depend on its processor, because a replay takes them on another one.
    make_update = partial(_update, config, dtype=problem.dtype, precision=_precision(config, ""))
    return LocalSteps(problem, layout, make_update, local.steps, eta=local.eta, beta=local.beta)


def _single_steps(config: Config, device: str, rows: int | None) -> Problem:
    """The problem without local steps."""
    problem = config.problem
    if problem.name == "quadratic":
        return Quadratic(problem.dim, problem.noise, problem.clip)
    if problem.name == "python":
        return _from_python(config, device)
    common: dict[str, Any] = {
        "batch": rows or problem.batch,
        "weight": (rows or problem.batch) / problem.batch,
        "micro_batch": problem.micro_batch,
        "validation_rows": problem.validation_rows,
        "final_tokens": problem.final_tokens,
        "seed": config.run.seed,
        "device": device,
        "precision": problem.precision,
        "compiled": problem.compile,
        "clip": problem.clip,
    }
    if problem.name == CHECKOUT:
        from ringmaster_dist.problems.nanochat.checkout_problem import CheckoutProblem

        with reported_once(source_of(config), "the checkout cannot be used"), alike(config.run.seed, device):
            return CheckoutProblem(build_checkout(config), build_sizes(config), build_rows(config), **common)

    from ringmaster_dist.problems.nanochat.problem import NanoChatProblem

    return NanoChatProblem(build_model_config(config), build_rows(config), attention=problem.attention, **common)


def build_checkout(config: Config) -> Checkout:
    """The user's nanochat. It imports nothing yet. Raises Mistake if there is none at problem.path."""
    from ringmaster_dist.problems.nanochat.checkout import Checkout

    return Checkout(Path(config.problem.path or ""), config.problem.precision)


def build_radii(config: Config) -> dict[str, tuple[float, float]]:
    """The least and the largest radius of each role in the user's checkout. No weights are made."""
    from ringmaster_dist.problems.nanochat.checkout_problem import movements

    with reported_once(source_of(config), "the checkout cannot be used"):
        checkout = build_checkout(config)
        with torch.device("meta"):
            model = checkout.model(build_sizes(config), checkout.tokenizer.vocab_size, initialize=False)
        moved = movements(model, checkout.rates(model)).values()
    by_role = {role: [one.radius for one in moved if one.role == role] for role in ROLES}
    return {role: (min(radii), max(radii)) for role, radii in by_role.items() if radii}


def build_sizes(config: Config) -> Sizes:
    """The sizes that follow from model.depth."""
    from ringmaster_dist.problems.nanochat.sizes import Sizes

    model = config.model
    return Sizes.of_depth(
        model.depth, aspect_ratio=model.aspect_ratio, head_dim=model.head_dim, sequence_len=model.sequence_len,
        window_pattern=model.window_pattern,
    )  # fmt: skip


def build_model_config(config: Config) -> NanoChatConfig:
    from ringmaster_dist.problems.nanochat.model import NanoChatConfig

    model = config.model
    if model.name == DEPTH:
        sizes = build_sizes(config)
        return NanoChatConfig(
            n_layer=sizes.n_layer, n_head=sizes.n_head, n_kv_head=sizes.n_head, n_embd=sizes.n_embd,
            vocab_size=model.vocab_size, sequence_len=sizes.sequence_len, window_pattern=sizes.window_pattern,
        )  # fmt: skip
    return NanoChatConfig(
        n_layer=model.n_layer, n_head=model.n_head, n_kv_head=model.n_kv_head, n_embd=model.n_embd,
        vocab_size=model.vocab_size, sequence_len=model.sequence_len, window_pattern=model.window_pattern,
    )  # fmt: skip


def build_rows(config: Config, progress: Callable[[float, str], None] = lambda fraction, text: None) -> Rows:
    """The prepared corpus. It is prepared first if this machine has not done so."""
    from ringmaster_dist.problems.nanochat import corpus, rows

    try:
        return rows.prepare(build_recipe(config, progress), progress)
    except corpus.CorpusError as error:
        raise UserError(str(error)) from error
    except Mistake as error:
        raise UserError(f"{source_of(config)}: the tokens cannot be made: {error}") from error
    except OSError as error:
        where, why = cache_folder(config), error.strerror or error
        raise UserError(f"data.cache={where}: prepared rows cannot be kept there ({why}): choose another") from error


def build_recipe(config: Config, progress: Callable[[float, str], None] = lambda fraction, text: None) -> Recipe:
    """What the rows are made from. Missing shards of a public corpus are downloaded."""
    from ringmaster_dist.problems.nanochat import corpus
    from ringmaster_dist.problems.nanochat.rows import Recipe

    data, model, cache = config.data, config.model, cache_folder(config)
    if config.problem.name == CHECKOUT:
        with reported_once(source_of(config), "the checkout cannot be used"):
            checkout = build_checkout(config)
            shards, tokenizer = checkout.shards(config.problem.shards), checkout.tokenizer
        return Recipe(shards, model.sequence_len, cache, crop=True, tokenizer=tokenizer)
    try:
        if data.name == "climbmix":
            sources = corpus.climbmix(data.url, data.shards, cache / "climbmix", progress)
        else:
            sources = corpus.standard_library() if data.name == "stdlib" else corpus.text_files(Path(data.path or ""))
    except corpus.CorpusError as error:
        raise UserError(str(error)) from error
    return Recipe(sources, model.sequence_len, cache, vocab_size=model.vocab_size, crop=data.name == "climbmix")


def cache_folder(config: Config) -> Path:
    given = config.data.cache or os.environ.get("RINGMASTER_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "ringmaster"


def _from_python(config: Config, device: str) -> Problem:
    target, seed = config.problem.target or "", config.run.seed
    problem = problem_from(target, config.problem.args, seed, device)
    if isinstance(problem, ModuleProblem):
        problem.seed = seed
    if config.problem.clip is not None:
        if not hasattr(problem, "clip"):
            raise UserError(
                f"problem.clip={config.problem.clip:g}: what {target} returns has no attribute clip and clips "
                "nothing: use a ModuleProblem, or clip in your own gradient"
            )
        problem.clip = config.problem.clip
    return problem


def build_fingerprint(layout: Layout, problem: Problem) -> str:
    """A text that is equal for two processes if and only if their package, parameters and data are the same."""
    return f"{__version__}/{layout.fingerprint}/{getattr(problem, 'data_fingerprint', '')}"


def explain_difference(mine: str, servers: str) -> str:
    """Why two fingerprints differ, and what to do about it."""
    (my_version, my_layout, _), (version, layout, *_) = mine.split("/"), f"{servers}//".split("/")
    if my_version != version:
        return f"this machine has version {my_version} of ringmaster-dist, the server {version}: install the same"
    if my_layout != layout:
        return "this machine builds other parameters from the same configuration: does it have the same model code?"
    return (
        "this machine has other data than the server, or other frozen weights or buffers: copy the server's text, the "
        "data's cache folder, the weights that the factory loads, or nanochat's tokenizer and nanochat/gpt.py"
    )


def build_schedule(config: Config) -> Schedule:
    method = config.method
    schedule: Schedule
    if method.name == "ringmaster_agnostic":
        known_l1 = method.l1 if method.smoothness == "known" else None
        schedule = agnostic(method.eta, generalized=method.smoothness == "generalized", known_l1=known_l1)
    elif method.schedule == "theory":
        given = method.constants
        known = (given.smoothness, given.noise, given.initial_gap, config.budget.updates)
        assert None not in known, "validation has let a missing constant pass"
        constants = Constants(
            smoothness=given.smoothness or 0.0,
            generalized_smoothness=given.generalized_smoothness,
            noise=given.noise or 0.0,
            norm_ratio=given.norm_ratio,
            initial_gap=given.initial_gap or 0.0,
            updates=config.budget.updates or 0,
        )
        schedule = theory(constants)
    else:
        threshold = method.threshold if isinstance(method.threshold, int) else math.inf  # auto: the method sets it
        schedule = Constant(method.eta, 1.0 - method.beta, threshold)
    updates = config.budget.updates or 0
    warmup = method.warmup_updates or round(method.warmup * updates)
    decay = method.decay_updates or round(method.decay * updates)
    if warmup or decay:
        schedule = Ramped(schedule, warmup, decay, updates, method.final_eta_fraction)
    return schedule


def build_method(config: Config, layout: Layout | None = None) -> Method:
    """The method. An automatic threshold needs the layout to look at gradients; without it there is no limit."""
    schedule = build_schedule(config)
    if config.method.name == "rennala":
        assert config.method.batch is not None
        return Rennala(schedule, config.method.batch)
    if config.method.name == "synchronous":
        return Synchronous(schedule)
    if config.method.name == "delay_adaptive":
        return DelayAdaptive(schedule)
    if config.method.threshold == "auto" and config.method.schedule != "theory":  # the theorem gives R too
        return AutoThreshold(schedule, layout, config.run.seed)
    return Method(schedule)


def build_rows_by_speed(config: Config, problem: Problem) -> RowsBySpeed | None:
    """What assigns rows to workers, with cluster.batch=auto. Raises UserError if the problem cannot take any number."""
    cluster = config.cluster
    if cluster.batch != "auto":
        return None
    usual = getattr(problem, "batch", None)
    if usual is None:
        raise UserError(
            f"cluster.batch=auto: {config.problem.target} does not say how to draw a number of rows: give its "
            "ModuleProblem batch=, and let batches take rows as a fourth argument (docs/extending.md, a model)"
        )
    check_row_bounds(cluster, usual)
    return RowsBySpeed(usual, cluster.batch_min, cluster.batch_max or usual)


def build_layout(config: Config, problem: Problem) -> Layout:
    """Where the problem's parameters lie in the flat iterate. The problem is bound to this layout.

    With local steps the server has no oracles, because the steps of the workers have them.
    """
    parameters, norms = problem.parameters, _norms(config)
    if config.local.steps != 1:
        parameters = [parameter._replace(radius=1.0) for parameter in parameters]
        norms = {role: Norm("none") for role in ROLES}
    layout = _layout(config, parameters, norms)
    problem.bind(layout)
    return layout


def _norms(config: Config) -> dict[str, Norm]:
    """The norm of each role."""
    geometry, norms = config.geometry, {}
    for role in ROLES:
        decay = getattr(geometry.weight_decay, role)
        decay = config.method.weight_decay if decay is None else decay
        norms[role] = Norm(getattr(geometry, role), getattr(geometry.radius, role), decay)
    return norms


def _layout(config: Config, parameters: Sequence[Parameter], norms: Mapping[str, Norm]) -> Layout:
    try:
        return Layout(parameters, norms)
    except ValueError as error:
        raise UserError(f"problem={config.problem.name}: {error}") from error


def build_wire(config: Config) -> Wire:
    return Wire(_dtype(config.wire.gradient_dtype), _dtype(config.wire.iterate_dtype))


def _dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def build_core(
    config: Config, problem: Problem, run: Path | None = None, device: torch.device | str = "cpu", precision: str = ""
) -> ServerCore:
    """The server core at the beginning of a run, on a device. With ``init``, its weights are in the run's directory.

    ``precision`` is what ``geometry.precision=auto`` means: the choice of an earlier term, or ``auto`` to choose by the
    device, or empty for the problem's own type. A simulation leaves it empty, so as not to depend on the processor.
    """
    layout = build_layout(config, problem)
    chosen = _precision(config, precision)
    if chosen == AUTO:
        chosen = quick_precision(layout, problem.dtype, devices.has_bfloat16(device))
    threads = config.server.compute_threads
    crew = Crew(threads) if threads > 1 and devices.is_cpu(device) else None
    update = _update(config, layout, dtype=problem.dtype, device=device, precision=chosen, crew=crew)
    initial = problem.initial(config.run.seed)
    if run is not None and config.init:
        initial = _given(run / INITIAL, layout, problem)
    rows = build_rows_by_speed(config, problem)
    return ServerCore(initial, build_method(config, layout), update, build_wire(config).gradient_dtype, rows)


def _precision(config: Config, auto: str) -> str:
    """The precision in the configuration; empty if it is null. ``auto`` stands for auto."""
    given = config.geometry.precision or ""
    return auto if given == AUTO else given


def _update(config: Config, layout: Layout, **given: Any) -> Update:
    return Update(
        layout,
        nesterov=config.method.nesterov,
        orthogonalization=config.geometry.orthogonalization,
        **given,
    )


def _given(path: Path, layout: Layout, problem: Problem) -> torch.Tensor:
    """The weights that a run with ``init`` began from, as one flat tensor. The run's directory has a copy."""
    try:
        return weights.flat(weights.read(path)[0], layout, problem.dtype)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path}, the weights that the run begins from, cannot be used: {error}") from error


def accepted_tokens(config: Config) -> Callable[[WorkerMeasurements], int]:
    """The tokens of a worker's accepted gradients; 0 if the problem has no tokens."""
    length = config.model.sequence_len * config.local.steps if config.problem.name in TEXT_PROBLEMS else 0
    if config.cluster.batch == "auto":
        return lambda worker: worker.accepted_rows * worker.ranks * length
    return lambda worker: worker.accepted * rows_of(config, worker.slot) * worker.ranks * length
