"""What a field of the configuration says about itself: its sentence, its range, and where it exists.

`key` and `section` declare the fields of a dataclass. The checks of values, the error texts, the help and the comments
of a printed configuration all come from these declarations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

WHOLE = "a whole number"
_KINDS = {int: WHOLE, float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Key:
    """The declaration of one key. Numbers have to be finite and inside the bounds that are given."""

    sentence: str
    above: float | None = None  # exclusive
    least: float | None = None
    below: float | None = None  # exclusive
    most: float | None = None
    one_of: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # the choices of its group that have this key; empty: all of them
    command: str = ""  # the command that has this key, simulate or train; empty: both
    kind: str = ""  # the type in words; empty: as its field says

    def exists(self, choice: str, command: str) -> bool:
        return (not self.only or choice in self.only) and self.command in ("", command)

    def permits(self, value: Any) -> bool:
        """Whether a value of the right type is in the range. In a list, every element has to be. null always is."""
        if isinstance(value, list):
            return all(self.permits(element) for element in value)
        if isinstance(value, str):
            return not self.one_of or value in self.one_of
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )

    @property
    def range(self) -> str:
        """The bounds and names that are allowed, in words; empty if the type alone decides."""
        if self.least is not None and self.most is not None:
            bounds = f"between {self.least:g} and {self.most:g}"
        else:
            given = (("above", self.above), ("at least", self.least), ("below", self.below))
            bounds = " and ".join(f"{word} {bound:g}" for word, bound in given if bound is not None)
        names = ", ".join(self.one_of)
        return f"{bounds}, or {names}" if bounds and names else bounds or (names and f"one of {names}")

    @property
    def allowed(self) -> str:
        """The values that are allowed, in words that follow "must be"."""
        if self.range.startswith("one of"):
            return self.range
        return f"{self.kind} {self.range}".replace(" at least", " of at least").rstrip()

    @property
    def comment(self) -> str:
        return f"{self.sentence} [{self.range}]" if self.range else self.sentence


def key(default: Any, sentence: str, **declared: Any) -> Any:
    """A field with its default, its sentence, and what else a `Key` has."""
    metadata = {"key": Key(sentence, **declared)}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(of: type, sentence: str = "", **declared: Any) -> Any:
    """A field that has keys of its own."""
    return field(default_factory=of, metadata={"key": Key(sentence, **declared)})


@cache
def own_keys(of: Any) -> dict[str, Key]:
    """What the fields of one dataclass say about themselves, by their names."""
    hints = get_type_hints(of)
    keys = {one.name: one.metadata["key"] for one in fields(of)}
    return {name: replace(one, kind=one.kind or _in_words(hints[name])) for name, one in keys.items()}


def all_keys(of: type, prefix: str = "", inside: Key | None = None) -> Iterator[tuple[str, Key]]:
    """Every section and key of a dataclass by its full name, such as ``method.constants.noise``."""
    hints = get_type_hints(of)
    for name, declared in own_keys(of).items():
        if inside is not None:
            declared = replace(declared, only=declared.only or inside.only, command=declared.command or inside.command)
        yield prefix + name, declared
        if is_dataclass(hints[name]):
            yield from all_keys(hints[name], f"{prefix}{name}.", declared)


def _in_words(hint: Any) -> str:
    """The type of a field; of a union, its first type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is list:
        return f"a list of {_names(parts[0])}"
    if origin is dict:
        return "a mapping"
    return _in_words(parts[0]) if parts else _KINDS.get(hint, "a section")


def _names(element: Any) -> str:
    if is_dataclass(element):
        return f"{{{', '.join(one.name for one in fields(element))}}}"
    return _KINDS[element].removeprefix("a ") + "s"
