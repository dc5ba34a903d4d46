"""Files that may come from somebody else: what they name and contain is data. They have no code, no references to
what is here, no links to other places, and no size that their own bytes do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_MOST_TEXT_BYTES, _MOST_DEPTH = 1 << 20, 50  # of a configuration
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast


def refuse_aliases(text: str) -> None:
    """Raises ValueError if a text of YAML repeats parts of itself, by which a few lines can stand for any size.

    Deep nesting is refused too, since the time to read it grows with the square of the depth.
    """
    if len(text) > _MOST_TEXT_BYTES:
        raise ValueError("it is too long")
    depth = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it repeats parts of itself (aliases of YAML)")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise ValueError("it is nested too deeply")


def plain_yaml(text: str) -> Any:
    """The values in a text of YAML. Raises ValueError, or yaml.YAMLError."""
    refuse_aliases(text)
    return yaml.load(text, _Loader)


def refuse_interpolations(values: Any) -> None:
    """Raises ValueError if a value refers to others or to the environment, as in ${oc.env:HOME}."""
    if isinstance(values, str) and "${" in values:
        raise ValueError(f"it refers to something else ({values[:80]!a}), and would have to be resolved here")
    for value in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        refuse_interpolations(value)


def refuse_links(folder: Path) -> None:
    """Raises ValueError if a folder has a link in it: what is written there would be written elsewhere.

    wandb's own folder has links, which it replaces.
    """
    for path in folder.rglob("*"):
        if path.is_symlink() and folder / "wandb" not in path.parents:
            raise ValueError(f"{path} is a link: a directory that is written to has to be without links")


# Keys of a run directory that decide who is reached and who may reach this machine, with the values that are harmless.
_REACHING: dict[str, dict[str, Any]] = {
    "checkpoint": {"mirror": None},
    "server": {"host": "127.0.0.1", "tls": True, "insecure": False},
    "logger": {"name": "none", "project": "ringmaster", "entity": None, "artifacts": False},
}


def reaching(config: Mapping[str, Any]) -> dict[str, str]:
    """The keys by which a configuration reaches beyond this machine, and their values as a user types them."""
    return {
        f"{section}.{key}": str(config[section][key]).replace("True", "true").replace("False", "false")
        for section, harmless in _REACHING.items()
        for key, value in harmless.items()
        if config.get(section, {}).get(key, value) != value
    }


def inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder. Raises ValueError if it is a link to somewhere else."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link to a place outside of {folder}")
    return path
