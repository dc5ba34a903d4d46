"""The configuration for people: every key with its value, its sentence and its range."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ringmaster_dist.config.compose import compose, config_dir, groups
from ringmaster_dist.config.schema import KEYS

_COMMENT_WIDTH = 100


def headline(path: Path) -> str:
    """The sentence with which a config file begins, after a directive such as @package."""
    lines = path.read_text().splitlines()
    return next((line[2:] for line in lines if line.startswith("# ") and "@package" not in line), "")


def keys_and_choices(main: str) -> str:
    """For a help text: every choice of every group, and every key with its default."""
    lines = ["Choices; --cfg job with one of them shows its keys"]
    for group, options in groups().items():
        for option in options:
            lines.append(f"  {f'{group}={option}':<30} {headline(config_dir() / group / f'{option}.yaml')}")
    lines += ["", "Keys, their defaults and [what is allowed]"]
    return "\n".join([*lines, *(f"  {line}" for line in annotated(compose([], main)).splitlines())])


def annotated(composed: DictConfig) -> str:
    """The composed configuration as YAML, each key with its comment. A long comment continues on the next line."""
    rows = list(_rows(OmegaConf.to_container(composed, resolve=True), "", 0))
    width = min(44, max(len(row) for row, _ in rows))
    lines = []
    for row, note in rows:
        first, *more = textwrap.wrap(note, _COMMENT_WIDTH) or [""]
        lines.append(f"{row:<{width}}  # {first}" if first else row)
        lines += [f"{'':<{width}}  # {each}" for each in more]
    return "\n".join(lines)


def _rows(tree: Any, prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    """Lines of YAML and their comments."""
    for key, value in tree.items():
        full = f"{prefix}{key}"
        note = KEYS[full].comment if full in KEYS else ""
        if isinstance(value, dict) and value:
            yield "  " * depth + f"{key}:", note
            yield from _rows(value, f"{full}.", depth + 1)
        else:
            text = OmegaConf.to_yaml(OmegaConf.create({key: value}), resolve=True).rstrip()
            text = text if "\n" not in text else f"{key}: {json.dumps(value)}"  # JSON on one line is YAML too
            yield "  " * depth + text, note
