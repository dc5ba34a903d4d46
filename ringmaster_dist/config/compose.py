"""From override strings to a typed, validated `Config`.

Hydra composes the defaults of the schema, the files in configs/ and the overrides. This module turns Hydra's errors
into one line each, leaves out the keys that the chosen method, problem or command does not have, and converts to
dataclasses once. Only `cli`, `runtime` and `config` handle a DictConfig.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from ringmaster_dist.config import recipe
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.keys import WHOLE, own_keys
from ringmaster_dist.config.overrides import check_forms, first_line, hint, refuse_plus, why_refused
from ringmaster_dist.config.schema import (
    AUTO,
    BETA,
    CHECKOUT,
    DEPTH,
    KEYS,
    OF_A_RESUME,
    OF_THE_CALL,
    SERVER_BETA,
    SERVER_ETA,
    TEXT_PROBLEMS,
    Config,
    PhaseConfig,
    suggested_eta,
)
from ringmaster_dist.config.sizes import refuse_too_many_simulated
from ringmaster_dist.config.validate import refusal, validate
from ringmaster_dist.foreign import refuse_aliases, refuse_interpolations

# A resumed run may change these sections,
_MAY_CHANGE = ("budget", "cluster", "server", "worker", "checkpoint", "logger")
# except these, on which the bits depend
_MAY_NOT = ("cluster.batch", "cluster.batch_min", "cluster.batch_max", "cluster.threads", "server.compute_threads")
_OF_A_CHECKOUT = {"model": DEPTH, "geometry": "nanochat"}  # the choices that suit problem=nanochat_checkout


def config_dir() -> Path:
    """The folder of YAML files: shipped in the wheel, or at the top of the repository."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_configs", package.parent / "configs"):
        if (candidate / "config.yaml").exists():
            return candidate
    raise FileNotFoundError(f"there is no folder configs next to {package}, and no _configs in it")


def groups() -> dict[str, list[str]]:
    """The config groups and the choices in each."""
    folders = sorted(path for path in config_dir().iterdir() if path.is_dir())
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def compose(overrides: Sequence[str], name: str = "config") -> DictConfig:
    """The composed configuration, not yet checked. Raises `UserError` with one helpful line."""
    check_forms(overrides, groups())
    # A problem of the user's own may take any argument, so Hydra has to add the key.
    words = [word.lstrip("+") for word in overrides]  # `refuse_plus` comes later, so that a typo is named first
    words = [f"++{word}" if word.startswith("problem.args.") else word for word in words]
    words = [*_companions(words), *map(_as_meant, words)]
    try:
        composed = _compose(words, name)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, words, name)) from error
    unknown = _unknown_key(words, composed, name)
    if unknown:
        raise UserError(unknown)
    refuse_plus(overrides)
    _refuse_unused(overrides, composed.problem.name)
    if composed.problem.get("path"):  # the run's processes, and a replay, may have another working directory
        composed.problem.path = str(Path(composed.problem.path).resolve())
    for choice in recipe_of(composed, overrides):
        OmegaConf.update(composed, choice.key, choice.value)
    return _completed(composed)


def recipe_of(composed: DictConfig, overrides: Sequence[str]) -> list[recipe.Choice]:
    """What the recipe of a depth chooses, if the overrides ask for it."""
    fits = composed.model.name == DEPTH and composed.problem.name in TEXT_PROBLEMS
    if f"experiment={recipe.NAME}" not in overrides or not fits:
        return []
    return recipe.from_depth(composed, {override.lstrip("+").partition("=")[0] for override in overrides})


def _as_meant(override: str) -> str:
    """The override with ~ as the home folder, which Hydra does not accept, and with 1e3 as the whole number 1000."""
    key, equals, value = override.partition("=")
    if value.startswith("~/"):  # a shell does not expand it after problem.path=
        return f"{key}{equals}{Path.home()}{value[1:]}"
    if key in KEYS and KEYS[key].kind == WHOLE and not value.isdecimal():
        with suppress(ValueError):
            if (number := float(value)).is_integer():
                return f"{key}={int(number)}"
    return override


def _parsed_overrides(overrides: Sequence[str]) -> list[Override]:
    words = [_as_meant(word) for word in overrides]
    try:
        return OverridesParser.create().parse_overrides(words)
    except HydraException as error:
        raise UserError(why_refused(error, words)) from error


def _refuse_unused(overrides: Sequence[str], problem: str) -> None:
    """Raises `UserError` for an override of a group that only language models have."""
    for word in overrides:
        if word.startswith(("model=", "model.", "data=", "data.")) and problem not in TEXT_PROBLEMS:
            raise UserError(f"{word} has no effect with problem={problem}: add problem=nanochat, or leave it out")


def _companions(overrides: Sequence[str]) -> list[str]:
    """The choices that a checkout needs in other groups, unless the overrides make them."""
    if f"problem={CHECKOUT}" not in overrides:
        return []
    given = {override.partition("=")[0] for override in overrides}
    return [f"{group}={choice}" for group, choice in _OF_A_CHECKOUT.items() if group not in given]


def load(overrides: Sequence[str]) -> Config:
    """The configuration of a simulation, typed and checked."""
    config = to_typed(compose(overrides))
    refuse_too_many_simulated(config)
    return config


def from_yaml(text: str, source: str = "the configuration of the run") -> Config:
    """The configuration of a real run, from the text in its directory."""
    return to_typed(_completed(_parsed(text, source)), real_time=True)


def _parsed(text: str, source: str) -> DictConfig:
    """A configuration that an earlier process has written. Raises `UserError` if the text is damaged."""
    why = "it is damaged, or another program's"
    try:
        refuse_aliases(text)
        composed: Any = OmegaConf.create(text)
        refuse_interpolations(OmegaConf.to_container(composed, resolve=False))
        choices = [composed[group].name for group in ("problem", "method", "geometry")]
    except ValueError as error:
        choices, why = [None], why if isinstance(error, OmegaConfBaseException) else str(error)
    except (YAMLError, OmegaConfBaseException, AssertionError, AttributeError, LookupError, TypeError, RecursionError):
        choices = [None]
    if not all(isinstance(choice, str) for choice in choices):
        raise UserError(f"{source} is not the configuration of a run: {why}")
    assert isinstance(composed, DictConfig)
    return composed


def _completed(composed: DictConfig) -> DictConfig:
    """The same configuration, with step sizes if none were given."""
    problem, geometry, method = composed.problem.name, composed.geometry.name, composed.method
    is_auto = method.name == "ringmaster" and method.get("threshold", AUTO) == AUTO
    eta, beta = suggested_eta(problem, geometry, AUTO if is_auto else method.name), BETA
    if OmegaConf.select(composed, "local.steps", default=1) != 1:
        _fill(composed.local, eta=suggested_eta(problem, geometry, "ringmaster"), beta=BETA)
        eta, beta = SERVER_ETA, SERVER_BETA
    _fill(method, eta=eta)
    if KEYS["method.beta"].exists(method.name, ""):
        _fill(method, beta=beta)
    return composed


def _fill(section: DictConfig, **defaults: float) -> None:
    """Gives these keys a value if they have none."""
    for key, value in defaults.items():
        if section.get(key) is None:
            section[key] = value


def continued(directory: Path, overrides: Sequence[str]) -> DictConfig:
    """The configuration of the run in a directory, with the overrides that a resumed run may have."""
    path = directory / "config.yaml"
    if not path.is_file():
        raise UserError(f"resume={directory}: there is no run in it (no config.yaml)")
    composed = _load(path)
    if "simulation" in composed:
        raise UserError(f"resume={directory}: a simulation cannot be resumed; ringmaster simulate plays it again")
    check_forms(overrides, groups())
    for override in _parsed_overrides(overrides):
        key = override.get_key_element()
        if key == "resume":
            continue
        if key not in KEYS:
            raise UserError(f"{key}: there is no such key{hint(key, list(KEYS))}".rstrip("; "))
        if not _may_change(key):
            allowed = ", ".join([*(f"{section}.*" for section in _MAY_CHANGE), *OF_A_RESUME])
            raise UserError(f"{key}: a run is resumed as it began; with resume only {allowed} may change")
        OmegaConf.update(composed, key, override.value(), force_add=True)
    _check_schedule(directory, _load(path), composed)
    return composed


def _may_change(key: str) -> bool:
    section, dot, _ = key.partition(".")
    return key in OF_A_RESUME or (bool(dot) and section in _MAY_CHANGE and key not in _MAY_NOT)


def _load(path: Path) -> DictConfig:
    return _completed(_parsed(config_text(path), str(path)))


def config_text(path: Path) -> str:
    """The text of a config.yaml. Raises `UserError` if it was cut, because the rest would be taken for defaults.

    Damaged bytes are replaced. They are no YAML, or a value that is refused later.
    """
    text = path.read_text(errors="replace")
    if text and not text.endswith("\n"):
        raise UserError(f"{path} is not the configuration of a run: its last line is cut")
    return text


def _check_schedule(directory: Path, before: DictConfig, composed: DictConfig) -> None:
    method = composed.method
    reasons = [f"method.{key}={method[key]}" for key in ("warmup", "decay", "decay_updates") if method.get(key)]
    if method.get("schedule") == "theory":
        reasons.append("method.schedule=theory")
    if reasons and composed.budget.updates != before.budget.updates:
        raise UserError(
            f"budget.updates={composed.budget.updates}: the step sizes of the run in {directory} depend on its "
            f"{before.budget.updates} updates ({', '.join(reasons)}); to train its weights further, begin a new run "
            f"with init={directory} and another run.dir"
        )


def same_run(directory: Path, composed: DictConfig) -> None:
    """Raises `UserError` if this configuration differs from the run's in a key that may not change."""
    before = _load(directory / "config.yaml")
    then, now = _with_types(before), _with_types(composed)  # with the keys that an earlier version did not write
    for key in (name for name in KEYS if name.count(".") == 1):  # watch, resume and init belong to the call
        if _may_change(key) or key in OF_THE_CALL:
            continue
        old, new = OmegaConf.select(then, key), OmegaConf.select(now, key)
        if old != new:
            given = OmegaConf.select(composed, key)  # as it was written
            raise UserError(
                f"{key}={given}: the run in {directory} was begun with {old}; "
                "a run is resumed as it began: choose another run.dir, or leave the key as it was"
            )
    _check_schedule(directory, before, composed)


def begun_from(directory: Path) -> str | None:
    """The value of ``init`` when the run in a directory began."""
    path = directory / "config.yaml"
    return cast("str | None", _parsed(config_text(path), str(path)).get("init"))


def to_typed(composed: DictConfig, *, real_time: bool = False) -> Config:
    """The same configuration as dataclasses, checked. ``real_time`` says that it is not for a simulation."""
    try:
        typed = OmegaConf.to_object(_with_types(composed))
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise UserError(_where(error, composed)) from error
    assert isinstance(typed, Config)
    validate(typed, real_time=real_time)
    return typed


def _with_types(composed: DictConfig) -> DictConfig:
    """The configuration on top of the schema, which checks types and fills in what is missing."""
    schema = OmegaConf.structured(Config)
    schema.method.threshold = schema.method.batch = None  # a method that has one of them says so
    schema.method.beta = BETA  # for the method that has none
    try:
        merged = OmegaConf.merge(schema, composed)
    except OmegaConfBaseException as error:
        raise UserError(_where(error, composed)) from error
    assert isinstance(merged, DictConfig)
    return merged


def _where(error: OmegaConfBaseException, composed: DictConfig) -> str:
    """The key that has a value of the wrong type, and what it takes."""
    key = (error.full_key or "").partition("[")[0]
    if key and isinstance(error, InterpolationResolutionError):
        return f"{error.full_key}: {first_line(error)}"
    if key in KEYS:
        return refusal(key, OmegaConf.select(composed, key), KEYS[key])
    if key:
        return _phase_fault(composed) or f"{error.full_key}: {first_line(error)}"
    for key in KEYS:
        inner = [name for name in KEYS if name.rpartition(".")[0] == key]
        if inner and not OmegaConf.is_config(OmegaConf.select(composed, key, default=composed)):
            return f"{key} has keys of its own and takes no value: {', '.join(inner)}"
    return first_line(error)


def _phase_fault(composed: DictConfig) -> str:
    """A line about the first phase that has an unknown key or a value of the wrong type; empty if there is none.

    OmegaConf's own error does not say which element of the list is wrong.
    """
    known = own_keys(PhaseConfig)
    for index, phase in enumerate(composed.cluster.phases):
        try:
            OmegaConf.merge(PhaseConfig, phase)
        except OmegaConfBaseException as error:
            key = (error.full_key or "").partition("[")[0]
            name = f"cluster.phases[{index}].{key}"
            if key in known:
                return refusal(name, phase[key], known[key])
            return f"{name}: there is no such key; known: {', '.join(known)}"
    return ""


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """The combinations of a multirun: ``method=rennala,ringmaster method.eta=0.1,0.2`` are four."""
    choices = []
    for override in _parsed_overrides(overrides):
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([override.input_line or ""])
    return [list(combination) for combination in itertools.product(*choices)]


def _compose(overrides: Sequence[str], name: str) -> DictConfig:
    """What Hydra composes, without the keys that do not exist for these choices and this command."""
    _store_defaults()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = hydra_compose(name, overrides=list(overrides))
    known = _known_keys(composed, name)
    with open_dict(composed):
        for key in KEYS:
            section, _, last = key.rpartition(".")
            parent = OmegaConf.select(composed, section) if section else composed
            if key not in known and isinstance(parent, DictConfig):
                parent.pop(last, None)
    return composed


@cache
def _store_defaults() -> None:
    """Gives Hydra the schema under the name ``base``: all keys with their defaults, and the default of each group."""
    defaults = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.structured(Config)))
    choices = [{group: keys["name"]} for group, keys in defaults.items() if isinstance(keys, dict) and "name" in keys]
    ConfigStore.instance().store("base", {"defaults": ["_self_", *choices], **defaults})


def _known_keys(composed: DictConfig, name: str) -> list[str]:
    """The sections and keys that exist for these choices and this command."""
    command = _command(name)
    choices = {group: str(composed[group].name) for group in groups() if group in composed}
    return [key for key, declared in KEYS.items() if declared.exists(choices.get(key.partition(".")[0], ""), command)]


def _command(name: str) -> str:
    return "train" if name == "train" else "simulate"


def _explain(error: Exception, overrides: Sequence[str], name: str) -> str:
    """Why Hydra refused: a key that does not exist, else a word that cannot be read, else what Hydra says."""
    known_groups = groups()
    choices = [word for word in overrides if word.partition("=")[0] in known_groups]
    return _unknown_key(overrides, _compose(choices, name), name) or why_refused(error, overrides)


def _unknown_key(overrides: Sequence[str], composed: DictConfig, name: str) -> str:
    """A line about the first override of a key that does not exist here; empty if there is none."""
    known, known_groups = _known_keys(composed, name), groups()
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        if key in known or key in known_groups or (key.startswith("problem.args.") and "problem.args" in known):
            continue
        declared, section, group = KEYS.get(key), key.rpartition(".")[0], key.partition(".")[0]
        if declared is not None and declared.command not in ("", _command(name)):
            return f"{key}: only ringmaster {declared.command} has this key"
        where = f" with {group}={composed[group].name}" if group in known_groups else ""
        question = hint(key, known) if declared is None else "; "
        siblings = [other.removeprefix(f"{section}.") for other in known if other.rpartition(".")[0] == section]
        listing = f"known: {', '.join(siblings)}" if siblings else ""
        return f"{key}: there is no such key{where}{question}{listing}".rstrip("; ")
    return ""
