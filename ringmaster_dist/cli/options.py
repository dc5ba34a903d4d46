"""The options that commands with a configuration share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ringmaster_dist.config.errors import UserError


def parse(argv: list[str], command: str) -> tuple[list[str], str]:
    """Splits arguments into overrides and what is only to be shown: ``help``, ``cfg`` or nothing."""
    overrides, show = [], ""
    words = iter(argv)
    for word in words:
        if word in ("-h", "--help"):
            show = "help"
        elif word in ("--cfg", "-c"):
            if (what := next(words, "")) != "job":
                raise UserError(f"--cfg {what}: only --cfg job is there")
            show = "cfg"
        elif word.startswith("-"):
            raise UserError(f"there is no option {word}; see ringmaster {command} --help")
        else:
            overrides.append(word)
    return overrides, show


def flags(
    argv: list[str], known: Mapping[str, Callable[[str], Any] | None], example: str
) -> tuple[list[str], dict[str, Any]]:
    """One argument, and options with their values (those of None are switches). Raises UserError."""
    words, options = many(argv, known, example)
    if len(words) != 1:
        raise UserError(f"one thing to look at is needed, such as: {example}")
    return words, options


def many(
    argv: list[str], known: Mapping[str, Callable[[str], Any] | None], example: str
) -> tuple[list[str], dict[str, Any]]:
    """As `flags`, with any number of arguments but none."""
    words, options, rest = [], {}, iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            words.append(word)
        elif name not in known:
            raise UserError(f"there is no option {name}; known: {', '.join(known)}")
        elif (convert := known[name]) is None:
            options[name] = True
        else:
            value = value if equals else next(rest, "")
            try:
                options[name] = convert(value)
            except ValueError:
                raise UserError(f"{name} {value}: not a {convert.__name__}") from None
    if not words:
        raise UserError(f"something to look at is needed, such as: {example}")
    return words, options


def wholes(key: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) >= 1 for word in words):
        raise UserError(f"{key}={text}: must be whole numbers of at least 1")
    return [int(word) for word in words]


def sort_words(argv: list[str], names: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """The values of a command's own ``name=value`` words, and the words that are the configuration's."""
    pairs = [(word, *word.partition("=")[::2]) for word in argv if word != "gpus"]
    own = {name: value for _, name, value in pairs if name in names}
    return own, [word for word, name, _ in pairs if name not in names]
