"""From overrides to a run directory that a server can start in. Everything is checked before anything is written."""

from __future__ import annotations

import logging
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.console import Console

from ringmaster_dist import devices
from ringmaster_dist.addresses import elsewhere, is_loopback
from ringmaster_dist.config.compose import begun_from, compose, continued, same_run, to_typed
from ringmaster_dist.config.describe import annotated
from ringmaster_dist.config.errors import UserError, warn
from ringmaster_dist.config.own_code import allow
from ringmaster_dist.config.profile_file import measured_times, warn_about_times
from ringmaster_dist.config.schema import TEXT_PROBLEMS, Config
from ringmaster_dist.config.secret import servers_token
from ringmaster_dist.config.sizes import refuse_too_many_processes, warn_about_many_processes
from ringmaster_dist.foreign import reaching, refuse_links
from ringmaster_dist.observe.console import ProgressLine
from ringmaster_dist.observe.records import Summary
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.observe.run_files import FINAL, SAMPLE, SUMMARY
from ringmaster_dist.runtime.mirror import RemoteRun, fetch, is_url, one_line
from ringmaster_dist.runtime.placement import local_devices, local_workers, refuse_missing_devices
from ringmaster_dist.runtime.rehearsal import rehearse
from ringmaster_dist.runtime.saved_weights import Tensors, chosen_weights, write_initial

if TYPE_CHECKING:
    from ringmaster_dist.problems.nanochat.rows import Rows

log = logging.getLogger(__name__)


class RunIsOver(Exception):
    """The run has used up its budget, so resume=auto has nothing to do. This is not an error."""


def prepare(overrides: list[str], program: str = "ringmaster train") -> tuple[Config, str, RunDirectory]:
    """Checks everything, makes or reopens the run directory, and writes the configuration and the token into it.

    ``program`` is what was called with the overrides, for the page of the run.

    Raises UserError at a mistake, and `RunIsOver` if resume=auto finds a run that has used up its budget.
    """
    token = servers_token()
    named = overrides
    resumes = _given("resume", overrides) not in ("", "null", "auto")
    if resumes:
        overrides = [word for word in overrides if not word.startswith("target=")]
    composed, resumed, fetched = _composed(overrides, token)
    config = to_typed(composed, real_time=True)
    if resumes:  # the directory may come from somebody else
        allow(config, _given("target", named), "ringmaster train resume=")
        composed.problem.path = config.problem.path
        if "data" in composed:
            composed.data.cache, composed.data.url = None, config.data.url
        _refuse_unnamed(config, named, fetched)
    _refuse_what_only_a_simulation_can(config)
    refuse_too_many_processes(config)
    _warn_about_loopback(config)
    _refuse_plain_text(config)
    refuse_missing_devices(config)
    warn_about_times(config)
    warn_about_many_processes(config)
    if resumed:
        directory = _reopened(config, Path(resumed), token, fetched, asked="resume=auto" not in overrides)
    else:
        directory = _made(config, token)
    composed.run.dir = str(directory.path)
    if config.cluster.profile == "file":  # workers on other machines do not have that file
        composed.cluster.times = measured_times(config.cluster)
    text = annotated(composed) + "\n"
    directory.write_config(text)
    directory.add_command(program, named)
    return config, text, directory


def _composed(overrides: list[str], token: str) -> tuple[DictConfig, str, str]:
    """The configuration, the directory of the run to resume, and the URL that this call has copied the run from.

    The directory is empty for a new run. The URL is empty if nothing was copied.
    """
    resumed = _given("resume", overrides)
    if is_url(resumed):
        target = _given("run.dir", overrides)
        if not target:
            raise UserError(f"resume={resumed} needs run.dir, the directory that the run is copied to")
        if _begun(target):
            raise UserError(f"run.dir={target} already holds a run: resume it with resume={target}")
        fetch(resumed, Path(target), token or secrets.token_hex(16))
        return continued(Path(target), [word for word in overrides if not word.startswith("run.dir=")]), target, resumed
    if resumed in ("", "null"):
        return compose(overrides, "train"), "", ""
    if resumed != "auto":
        return continued(Path(resumed), overrides), resumed, ""
    composed = compose(overrides, "train")
    resumed, fetched = _begun(composed.run.dir), ""
    if not resumed and (fetched := _fetched(composed, token)):
        resumed = composed.run.dir
    composed.resume = None
    if resumed:
        same_run(Path(resumed), composed)
        composed.init = begun_from(Path(resumed))  # a resumed run keeps the init= that it began with
    return composed, resumed, fetched


def _given(key: str, overrides: list[str]) -> str:
    return next((word.partition("=")[2] for word in overrides if word.startswith(f"{key}=")), "")


def _fetched(composed: DictConfig, token: str) -> str:
    """Copies the run at checkpoint.mirror to run.dir, if there is one. Returns the URL, or an empty string."""
    url, key = composed.checkpoint.mirror, "checkpoint.mirror"
    if not url:
        return ""
    with one_line(key, url):
        if not RemoteRun(url).names():
            return ""
    fetch(url, Path(composed.run.dir), token or secrets.token_hex(16), key)
    return str(url)


def _refuse_used_mirror(config: Config, *own: str | None) -> None:
    """Raises UserError if checkpoint.mirror cannot be used, or if it holds a run and is none of this run's ``own``."""
    url = config.checkpoint.mirror
    if not url:
        return
    with one_line("checkpoint.mirror", url):
        remote = RemoteRun(url)
        is_used = url not in own and bool(remote.names())
    if is_used:
        raise UserError(f"checkpoint.mirror={url} already holds a run: resume it with resume={url}, or choose another")


def _refuse_unnamed(config: Config, overrides: list[str], fetched: str) -> None:
    """Raises UserError if a directory, which may come from somebody else, reaches what the user has not named.

    ``fetched`` is the URL that this call has copied the run from.
    """
    reached = reaching(asdict(config))
    if reached.get("checkpoint.mirror") == fetched:
        del reached["checkpoint.mirror"]
    unnamed = [key for key in reached if not _given(key, overrides)]
    if unnamed:
        words = " ".join(f"{key}={reached[key]}" for key in unnamed)
        raise UserError(
            f"the run in {config.run.dir} reaches other machines, and a directory may come from somebody else: if you "
            f"want that, add {words}, else give other values to these keys"
        )


def _reopened(config: Config, path: Path, token: str, fetched: str, *, asked: bool) -> RunDirectory:
    """The directory of a run that is resumed.

    ``fetched`` is the URL that this call has copied the run from, if any. ``asked`` says whether the user has named
    the directory (not resume=auto).
    """
    try:
        refuse_links(path)
    except ValueError as error:
        raise UserError(f"resume={path}: {error}") from error
    directory = RunDirectory.opened(path)
    directory.refuse_if_in_use()
    _refuse_if_used_up(config, directory, asked=asked)
    _refuse_used_mirror(config, fetched, directory.config().get("checkpoint", {}).get("mirror"))
    _try(config)
    if token or asked or not directory.read("token"):
        directory.write_secret("token", token or secrets.token_hex(16))
    # Of the run up to its last stop; and what the maker of a directory would know, if that is somebody else.
    for name in (SUMMARY, FINAL, SAMPLE, *(("sessions", "address") if asked else ())):
        (directory.path / name).unlink(missing_ok=True)
    return directory


def _made(config: Config, token: str) -> RunDirectory:
    """The directory of a new run, with its initial weights (if init= is given) and its token."""
    _refuse_used_mirror(config)
    initial = _rehearsed(config)
    name = f"{config.problem.name}-{config.method.name}"
    directory = RunDirectory(config.run.dir, name=name, overwrite=config.run.overwrite)
    write_initial(directory.path, initial)
    directory.write_secret("token", token or secrets.token_hex(16))
    return directory


def prepare_dry_run(overrides: list[str]) -> tuple[Config, Tensors | None]:
    """The same checks for a run that is not started. Returns its configuration and the weights it would begin from."""
    if any(word.startswith("resume=") for word in overrides):
        raise UserError("--dry-run describes a new run: leave out resume")
    config = to_typed(compose(overrides, "train"), real_time=True)
    _refuse_what_only_a_simulation_can(config)
    refuse_too_many_processes(config)
    _warn_about_loopback(config)
    refuse_missing_devices(config)
    return config, _rehearsed(config)


def _rehearsed(config: Config) -> Tensors | None:
    """Tries data and code once. Returns the weights that the run begins from, or None for the problem's own."""
    _try(config)
    return chosen_weights(config)


def _try(config: Config) -> None:
    """Prepares the data, and computes one gradient and one evaluation with the user's code.

    It does so on each type of device that the workers here will have.
    """
    if config.problem.name in TEXT_PROBLEMS:
        prepare_data(config)
    for device in devices.one_of_each_type(local_devices(config)):
        rehearse(config, device)


def _refuse_what_only_a_simulation_can(config: Config) -> None:
    if not config.run.trace:
        raise UserError("run.trace=false is for simulations: a real run without its trace could not be replayed")
    if config.cluster.phases and config.cluster.profile == "none":
        raise UserError("cluster.phases changes the pace of workers, and cluster.profile=none sets none")
    if any(phase.rate == 0 for phase in config.cluster.phases):
        raise UserError("cluster.phases: a rate of 0 is for simulations: real workers do not stop")


def _begun(directory: str | None) -> str:
    """The directory if it holds a run that can be resumed, else an empty string."""
    if directory is None:
        raise UserError("resume=auto needs run.dir, the directory to look into")
    return directory if all((Path(directory) / name).exists() for name in ("config.yaml", "token")) else ""


def _warn_about_loopback(config: Config) -> None:
    others = config.cluster.workers - local_workers(config)
    if others and is_loopback(config.server.host):
        warn(
            f"server.host={config.server.host} is loopback, so only this machine can start the {others} of "
            f"cluster.workers={config.cluster.workers} that are missing; for workers elsewhere, set server.host to an "
            f"address they can reach, of {elsewhere()}"
        )


def _refuse_plain_text(config: Config) -> None:
    server = config.server
    if server.tls or is_loopback(server.host):
        return
    if not server.insecure:
        raise UserError(
            f"server.tls=false with server.host={server.host}: anybody on the network between could read the token "
            "and join the run; leave server.tls at true, or say server.insecure=true if that network is yours alone"
        )
    log.warning("server.tls=false: the token and all training data cross the network at %s unencrypted", server.host)


def _refuse_if_used_up(config: Config, directory: RunDirectory, *, asked: bool) -> None:
    summary = directory.summary() or Summary()
    for unit in ("updates", "seconds"):
        limit, used = getattr(config.budget, unit), getattr(summary, unit)
        if limit is not None and used >= limit and not asked:
            raise RunIsOver(f"the run in {directory.path} is over: {used:g} {unit}; budget.{unit} may be raised")
        if limit is not None and used >= limit:
            raise UserError(
                f"resume={directory.path}: the run has used up its budget ({used:g} {unit}): raise budget.{unit}"
            )


def prepare_data(config: Config) -> Rows:
    """Tokenizes the corpus before the processes start, and shows the progress. The processes then find it on disk."""
    from ringmaster_dist.config.build import build_rows

    line = ProgressLine(Console(file=sys.stderr))
    try:
        return build_rows(config, line.show)
    finally:
        line.close()
