"""The configuration for people: every key with its value and the comment it has in its YAML file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ringmaster_dist.config.compose import compose, config_dir, groups

_LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?: +(?P<value>[^#]*?))? *(?:# (?P<comment>.*))?$")


def comments(choices: dict[str, str], main: str) -> dict[str, str]:
    """The comment of each full key of the main configuration, with these choices of the groups."""
    found: dict[str, str] = {}
    for name in ("base", main):
        found.update(_comments_of(config_dir() / f"{name}.yaml", ""))
    for group, choice in choices.items():
        found.update(_comments_of(config_dir() / group / f"{choice}.yaml", f"{group}."))
    return found


def headline(path: Path) -> str:
    """What a config file says of itself: its first comment line that is not a directive."""
    lines = path.read_text().splitlines()
    return next((line[2:] for line in lines if line.startswith("# ") and "@package" not in line), "")


def keys_and_choices(main: str) -> str:
    """For a help text: every choice of every group, and every key with its default."""
    lines = ["Choices; --cfg job with one of them shows its keys"]
    for group, options in groups().items():
        for option in options:
            lines.append(f"  {group}={option:<22} {headline(config_dir() / group / f'{option}.yaml')}")
    lines += ["", "Keys and their defaults", *(f"  {line}" for line in annotated(compose([], main)).splitlines())]
    return "\n".join(lines)


def choices_of(composed: DictConfig) -> dict[str, str]:
    """Which file of each group a composed configuration came from."""
    return {name: str(composed[name].name) for name in groups() if name in composed}


def annotated(composed: DictConfig) -> str:
    """The composed configuration as YAML, each key with its comment."""
    notes = comments(choices_of(composed), "train" if "server" in composed else "config")
    rows: list[tuple[str, str]] = []
    _emit(OmegaConf.to_container(composed, resolve=True), "", 0, notes, rows)
    width = min(44, max(len(row) for row, _ in rows))
    return "\n".join(f"{row:<{width}}  # {note}".rstrip() if note else row for row, note in rows)


def _emit(tree: Any, prefix: str, depth: int, notes: dict[str, str], rows: list[tuple[str, str]]) -> None:
    for key, value in tree.items():
        full = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            rows.append(("  " * depth + f"{key}:", notes.get(full, "")))
            _emit(value, f"{full}.", depth + 1, notes, rows)
        else:
            text = OmegaConf.to_yaml(OmegaConf.create({key: value}), resolve=True).rstrip()
            text = text if "\n" not in text else f"{key}: {json.dumps(value)}"  # JSON on one line is YAML too
            rows.append(("  " * depth + text, notes.get(full, "")))


def _comments_of(path: Path, prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    for line in path.read_text().splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        indent = len(match["indent"])
        parents = [(depth, key) for depth, key in parents if depth < indent]
        parents.append((indent, match["key"]))
        if match["comment"]:
            found[prefix + ".".join(key for _, key in parents)] = match["comment"]
    return found
