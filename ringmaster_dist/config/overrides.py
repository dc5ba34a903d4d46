"""The words of a command line before Hydra sees them. Only key=value is an override here.

Hydra has more forms. Each of them is refused with the words to write instead, because none is needed and some would
change a run without a sign: Hydra removes a choice with ``~group``, and composes nothing for an unknown experiment.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ringmaster_dist.config.errors import UserError

_RENAMED = {"decay_updates": "decay", "warmup_updates": "warmup"}  # they were numbers of updates and are fractions now


def check_forms(overrides: Sequence[str], groups: Mapping[str, Sequence[str]]) -> None:
    """Raises `UserError` for the first word that is not key=value, or names a choice that its group does not have."""
    for word in overrides:
        key, equals, value = word.partition("=")
        if word.startswith("~"):
            raise UserError(f"{word}: a key or a choice cannot be removed; {_instead_of_removal(key[1:], groups)}")
        if not key or not equals:
            raise UserError(f"{word!r} is not an override: write key=value, such as method.eta=0.1")
        if key.startswith(("hydra.", "hydra/")):
            raise UserError(f"{word}: settings of Hydra have no effect here; run.dir=DIR is where a run is written")
        _refuse_renamed(word)
        _refuse_several_values(word)
        bare = key.lstrip("+")
        if bare in groups and value not in groups[bare]:
            raise UserError(
                f"{word}: there is no such {bare}{hint(value, groups[bare])}known: {', '.join(groups[bare])}"
            )


def refuse_plus(overrides: Sequence[str]) -> None:
    """Raises `UserError` for a word with a plus, whose key is known to exist."""
    for word in overrides:
        if word.startswith("+"):
            raise UserError(f"{word}: keys are not added; write {word.lstrip('+')}")


def hint(word: str, candidates: Sequence[str]) -> str:
    """Ends a sentence, and asks whether the nearest candidate was meant."""
    close = difflib.get_close_matches(word, candidates, n=1)
    return f"; did you mean {close[0]}? " if close else "; "


def why_refused(error: Exception, overrides: Sequence[str]) -> str:
    """Why Hydra refused these overrides: one that it cannot read, else what it says."""
    for word in (word.lstrip("+") for word in overrides):
        try:
            OverridesParser.create().parse_override(word)
        except HydraException:
            key = word.partition("=")[0]
            return (
                f"{word}: a quote or a bracket is not closed, or a character needs quotes inside those of the shell: "
                f"write \"{key}='...'\""
            )
    return first_line(error)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _instead_of_removal(key: str, groups: Mapping[str, Sequence[str]]) -> str:
    if key in groups:
        return f"{key}=NAME chooses another, of {', '.join(groups[key])}"
    return f"{key}=null resets a key that may be null, and --cfg job shows every key"


def _refuse_renamed(override: str) -> None:
    key, _, value = override.lstrip("+").partition("=")
    section, _, name = key.partition(".")
    if section == "method" and name in _RENAMED:
        new = _RENAMED[name]
        raise UserError(
            f"{override}: the key is method.{new} now, a fraction of budget.updates: "
            f"method.{new}=0.5 means half of them, where {name} took a number such as {value}"
        )


def _refuse_several_values(word: str) -> None:
    """``method.eta=0.1,0.2`` are two runs, which only a multirun makes."""
    try:
        is_sweep = OverridesParser.create().parse_override(word).is_sweep_override()
    except HydraException:
        return  # it has a fault that is explained later
    if is_sweep:
        raise UserError(f"{word}: these are several values; with -m every one is run, and a list is written as [a,b]")
