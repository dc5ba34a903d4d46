"""Imports and calls the user's own code. A mistake in it is shown as a traceback without the frames of this program."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ringmaster_dist
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.schema import CHECKOUT, Config, DataConfig
from ringmaster_dist.errors import Mistake
from ringmaster_dist.problems import Problem
from ringmaster_dist.problems.seeding import seeded

A_WORKER = "a worker"
_PACKAGE = str(Path(ringmaster_dist.__file__).parent) + os.sep
_NEEDED = ("parameters", "dtype", "objective", "quick_to_evaluate", "bind", "initial", "gradient", "evaluate")


@contextmanager
def reported_once(source: str, what: str) -> Iterator[None]:
    """Turns any exception of the block into one `UserError`: a line that says ``what``, then the user's own frames.

    ``source`` is the key that names the user's code, as `source_of` gives it.
    """
    try:
        yield
    except UserError:
        raise
    except Mistake as error:
        raise UserError(f"{source}: {what}: {error}") from error
    except Exception as error:
        raise UserError(f"{source}: {what}\n{own_frames(error)}") from error


def allow(config: Config, target: str, who: str = "this command") -> None:
    """Raises UserError if the configuration needs code that ``target``, which the user has given, does not allow.

    A configuration may come from somebody else. A checkout is taken from where the user says that it is. Data is kept
    in the cache of this machine. What a directory has, and not a server, is downloaded from the usual place only.
    """
    config.data.cache = None
    if who != A_WORKER:
        config.data.url = DataConfig().url
    if config.problem.name == CHECKOUT:
        if not target:
            raise UserError(
                f"the run trains a nanochat checkout, and none was allowed: {who} imports only what its user allows: "
                "add target=PATH, the folder of the same nanochat on this machine"
            )
        config.problem.path = target
    if config.problem.name == "python" and config.problem.target != target:
        wanted = config.problem.target
        given = f"target={target} was given" if target else "none was allowed"
        raise UserError(
            f"the run needs code of yours, problem.target={wanted}, and {given}: {who} imports only what "
            f"its user allows: add target={wanted}"
        )


def source_of(config: Config) -> str:
    """The key that names the user's code, with its value."""
    problem = config.problem
    return f"problem.path={problem.path}" if problem.name == CHECKOUT else f"problem.target={problem.target}"


def own_frames(error: BaseException) -> str:
    """The traceback of an error without the frames of this program, of installed packages and of the import system."""
    shown = traceback.TracebackException.from_exception(error)
    if not _cut(shown, installed=True):  # the user's code may be an installed package
        shown = traceback.TracebackException.from_exception(error)
        if not _cut(shown, installed=False):
            return "".join(shown.format_exception_only()).rstrip()
    return "".join(shown.format()).rstrip()


def _cut(shown: traceback.TracebackException, *, installed: bool) -> int:
    """Removes frames in place, and returns how many are left."""
    shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if _is_own(f.filename, installed)])
    for earlier in (shown.__cause__, shown.__context__):
        if earlier is not None:
            _cut(earlier, installed=installed)
    return len(shown.stack)


def _is_own(filename: str, installed: bool) -> bool:
    if filename.startswith((_PACKAGE, "<frozen importlib")) or f"{os.sep}importlib{os.sep}" in filename:
        return False
    return not (installed and f"{os.sep}site-packages{os.sep}" in filename)


def problem_from(target: str, arguments: dict[str, Any], seed: int, device: str) -> Problem:
    """The problem that the user's factory returns. Every machine imports the factory by its name; no code is sent.

    The random generators are seeded, so that every machine draws the same initial and frozen weights.
    """
    factory = _imported(target, seed, device)
    given = {**arguments, "seed": seed, "device": device}
    try:
        inspect.signature(factory).bind(**given)
    except TypeError as error:
        raise UserError(f"problem.target={target} does not take these problem.args: {error}") from error
    except ValueError:
        pass  # a callable that is written in C has no signature
    with reported_once(f"problem.target={target}", "the factory failed"), alike(seed, device):
        problem: Problem = factory(**given)
    missing = [name for name in _NEEDED if not hasattr(problem, name)]
    if missing:
        raise UserError(
            f"problem.target={target} gave {_named(problem)}, which has no {missing[0]}: the factory has to return a "
            "ModuleProblem(module, batches, loss), or an object with the shape of ringmaster_dist.problems.Problem"
        )
    return problem


@contextmanager
def alike(seed: int, device: str) -> Iterator[None]:
    """Seeds the generators and uses one thread, so that the factory gives the same bits in every process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with seeded(seed, device):
            yield
    finally:
        torch.set_num_threads(threads)


def _imported(target: str, seed: int, device: str) -> Any:
    module_name, _, name = target.partition(":")
    if os.getcwd() not in sys.path:  # sys.path has the folder of the script, not the one it is called in
        sys.path.append(os.getcwd())
    try:
        with alike(seed, device):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"problem.target={target} cannot be imported here: {error}") from error
    except Exception as error:
        raise UserError(f"problem.target={target} cannot be imported here\n{own_frames(error)}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        what = f"{name} is {_named(factory)}, not a function" if hasattr(module, name) else f"it has no {name!r}"
        raise UserError(f"problem.target={target} cannot be imported here: {what}")
    return factory


def _named(thing: object) -> str:
    return "None" if thing is None else f"an object of type {type(thing).__name__}"
