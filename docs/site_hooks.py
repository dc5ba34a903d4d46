"""Hooks of mkdocs: the pages from outside docs/, their links, and the tables that the code generates.

A page may contain the line ``<!-- generated: NAME -->``. The site has a part of ``GENERATED`` in its place, which comes
from the schema or from the parsers. So the reference cannot differ from the program.
"""

from __future__ import annotations

import importlib
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from omegaconf import DictConfig, OmegaConf

from ringmaster_dist.cli.main import COMMANDS, Command
from ringmaster_dist.cli.parser import Parser
from ringmaster_dist.config.compose import compose, config_dir, groups
from ringmaster_dist.config.describe import headline
from ringmaster_dist.config.keys import Key
from ringmaster_dist.config.schema import KEYS, Config

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "index.md": "README.md",
    "docker.md": "docker/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}  # the page of the site, and the document in the repository
_PAGE_OF = {document: page for page, document in OUTSIDE.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
_MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, document in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    document = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _MARKER.sub(lambda match: GENERATED[match[1]](), relinked(markdown, document))


def anchor(title: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it. So one link works in both places."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def relinked(markdown: str, document: str) -> str:
    """The links of a document of the repository, as links between pages of the site.

    A link to a file that is no page of the site, such as a manifest, becomes its text.
    """
    own = posixpath.dirname(document.removeprefix("docs/")) if document.startswith("docs/") else ""

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(document), match[3]))
        if target not in _PAGE_OF and not target.startswith("docs/") and (ROOT / target).exists():
            return match[2]
        page = _PAGE_OF.get(target, target.removeprefix("docs/"))
        return f"{match[1]}[{match[2]}]({posixpath.relpath(page, own or '.')}{match[4] or ''})"

    return _LINK.sub(moved, markdown)


def commands() -> str:
    """The help text of every command."""
    return "\n\n".join(f"## {command.name}\n\n```text\n{help_text(command)}\n```" for command in COMMANDS)


def help_text(command: Command) -> str:
    module = importlib.import_module(f"ringmaster_dist.cli.{command.module}")
    parser = Parser(command.name, getattr(module, f"run_{command.name}").__doc__)
    getattr(module, f"{command.name}_options")(parser)
    return parser.format_help().rstrip()


def choices() -> str:
    """A table of the choices of every group, with the headline of its file."""
    rows = [(f"`{group}={name}`", headline(config_dir() / group / f"{name}.yaml"))
            for group, names in groups().items() for name in names]  # fmt: skip
    return _table(("choice", "meaning"), rows)


def keys() -> str:
    """A table of the keys of every section."""
    schema = OmegaConf.structured(Config)
    schemas = {name: compose([], name) for name in ("config", "train")}
    sections: dict[str, list[tuple[str, ...]]] = {}
    for name, declared in _readable_keys():
        if not OmegaConf.is_dict(OmegaConf.select(schema, name)) or name == "problem.args":
            section = name.partition(".")[0] if "." in name else "The call"
            row = (f"`{name}`", _default(name, schema, schemas), declared.sentence, _where(name, declared))
            sections.setdefault(section, []).append(row)
    head = ("key", "default", "meaning", "allowed")
    return "\n\n".join(f"## {name}\n\n{_table(head, rows)}" for name, rows in sections.items())


def _readable_keys() -> Iterator[tuple[str, Key]]:
    """All keys, without those that are only read from the directories of old runs."""
    known = {name for names in groups().values() for name in names}
    return ((name, key) for name, key in KEYS.items() if not key.only or set(key.only) & known)


def _default(name: str, schema: DictConfig, composed: dict[str, DictConfig]) -> str:
    """The default of simulate, and that of train if it is another."""
    found = [_value(name, config, schema) for config in composed.values()]
    simulated, real = found
    if KEYS[name].command:
        return f"`{real if KEYS[name].command == 'train' else simulated}`"
    return f"`{simulated}`" if simulated == real else f"`{simulated}`, with train `{real}`"


def _value(name: str, composed: DictConfig, schema: DictConfig) -> str:
    section, _, last = name.rpartition(".")
    parent = OmegaConf.select(composed, section) if section else composed
    value: Any = parent.get(last) if parent is not None and last in parent else None
    if parent is None or last not in parent:  # another choice of its group has it
        parent = OmegaConf.select(schema, section) if section else schema
        value = None if OmegaConf.is_missing(parent, last) else parent.get(last)
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    return value if isinstance(value, str) else json.dumps(value)


def _where(name: str, declared: Key) -> str:
    """What is allowed, and for which choices and which command the key exists."""
    parts = [declared.allowed]
    if declared.only:
        group = name.partition(".")[0]
        parts.append("only with " + ", ".join(f"`{group}={choice}`" for choice in declared.only))
    if declared.command:
        parts.append(f"only for `{declared.command}`")
    return "; ".join(parts)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


GENERATED: dict[str, Callable[[], str]] = {"commands": commands, "choices": choices, "keys": keys}
