"""The parser of every command: argparse, plus settings that are written as key=value.

A word of the command line is an option (``--rows 5``), a setting of the command itself (``port=8000``), a positional
argument (``runs/a``), or an override for Hydra (``method.eta=0.1``). A mistake raises UserError.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from ringmaster_dist.config.errors import UserError

_SETTING = ":"  # argparse sees port=8000 as :port=8000, an option with a prefix of its own


class Parser(argparse.ArgumentParser):
    """Reads the words of one command. The help text begins with a line of usage."""

    def __init__(self, command: str, help_text: str) -> None:
        usage, _, description = inspect.cleandoc(help_text).partition("\n")
        super().__init__(
            prog=f"ringmaster {command}", usage=usage, description=description.strip(), add_help=False,
            allow_abbrev=False, prefix_chars=f"-{_SETTING}", formatter_class=_Formatter,
        )  # fmt: skip
        self._switches: list[str] = []
        self._options: list[str] = []  # those that take a value
        self._settings: list[str] = []
        self.switch("--help", "-h", help="show this text")

    def setting(self, shown: str, help: str, kind: Callable[[str], Any] = str, default: Any = None) -> None:
        """Declares ``port=N``. ``kind`` converts the value, and raises ValueError with a reason such as "must be 1"."""
        name, _, metavar = shown.partition("=")
        self._settings.append(f"{name}=")
        self._add_value([f"{_SETTING}{name}"], metavar, help, kind, default)

    def option(
        self, shown: str, help: str, kind: Callable[[str], Any] = str, default: Any = None, *, short: str = ""
    ) -> None:
        """Declares ``--rows N``, in the same way."""
        name, _, metavar = shown.partition(" ")
        flags = [name, short] if short else [name]
        self._options += flags
        self._add_value(flags, metavar, help, kind, default)

    def _add_value(self, flags: list[str], metavar: str, help: str, kind: Callable[[str], Any], default: Any) -> None:
        def convert(text: str) -> Any:
            try:
                return kind(text)
            except ValueError as error:
                raise UserError(f"{flags[0].removeprefix(_SETTING)}={text}: {error}") from None

        shown = "" if default in (None, "") else f" (default: {default})"
        self.add_argument(*flags, type=convert, metavar=metavar, default=default, help=help + shown)

    def switch(self, *names: str, help: str) -> None:
        self._switches += names
        self.add_argument(*names, action="store_true", help=help)

    def read(self, words: list[str], *, takes_overrides: bool) -> tuple[argparse.Namespace, list[str]]:
        """Returns the values of the command's own arguments, and the overrides. Options may stand anywhere."""
        marked, remaining = [], iter(words)
        for word in remaining:
            name, equals, _ = word.partition("=")
            if name + equals in self._settings:
                marked.append(_SETTING + word)
            elif word in self._options:
                value = next(remaining, None)
                marked.append(word if value is None else f"{word}={value}")  # a value may begin with a dash
            elif word.startswith("-") and name not in self._switches + self._options:
                self._refuse("option", name, [*self._options, *self._switches])
            elif equals and name.replace(".", "_").isidentifier() and not takes_overrides and not Path(word).exists():
                self._refuse("setting", f"{name}=", [*self._settings, *self._options])
            else:
                marked.append(word)
        arguments, rest = self.parse_known_intermixed_args(marked)
        if rest and not takes_overrides:
            self.error(f"{rest[0]!r} is one argument too many")
        return arguments, rest

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; usage: {self.usage}")

    def _refuse(self, what: str, name: str, known: list[str]) -> NoReturn:
        names = [each for each in known if len(each) > 2]  # without short forms such as -m
        listed = f"known: {', '.join(names)}; " if names else ""
        raise UserError(f"there is no {what} {name}; {did_you_mean(name, names)}{listed}see {self.prog} --help")

    def format_help(self) -> str:
        return super().format_help().removeprefix("usage: ")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows a setting as it is written, in lines of at most 120 characters."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = super()._format_action_invocation(action)
        return shown.removeprefix(_SETTING).replace(" ", "=", 1) if shown.startswith(_SETTING) else shown


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question to put before the list of known words, or nothing."""
    bare = {name.strip("-="): name for name in known}
    close = difflib.get_close_matches(word.strip("-="), bare, n=1)
    return f"did you mean {bare[close[0]]}? " if close else ""


def whole(least: float = -math.inf, most: float = math.inf) -> Callable[[str], int]:
    """Converts to a whole number within limits."""

    def convert(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not least <= int(text) <= most:
            limits = f" of at least {least:g}" if least > -math.inf else ""
            raise ValueError(f"must be a whole number{limits}" + (f" and at most {most:g}" if most < math.inf else ""))
        return int(text)

    return convert


def number(least: float) -> Callable[[str], float]:
    """Converts to a number that is not below ``least``."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not value >= least:
            raise ValueError(f"must be a number of at least {least:g}")
        return value

    return convert


def one_of(*names: str) -> Callable[[str], str]:
    """Takes one of these words."""

    def convert(text: str) -> str:
        if text not in names:
            raise ValueError(f"{did_you_mean(text, names)}must be one of {', '.join(names)}")
        return text

    return convert


def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Converts values that are separated by commas."""
    return lambda text: [kind(word) for word in text.split(",")]


def target_setting(parser: Parser) -> None:
    """For a command that reads a run, which may need the user's own code."""
    parser.setting("target=NAME", "the code that it may import, if the run needs some: problem.target (problem=python) "
                   "or the folder of nanochat on this machine (problem=nanochat_checkout)", str, "")  # fmt: skip
