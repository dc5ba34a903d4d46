"""The site of the documents builds without a warning, is complete, and loads nothing from another host."""

import html
import importlib
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from ringmaster_dist.cli.main import COMMANDS
from ringmaster_dist.config.schema import KEYS

ROOT = Path(__file__).parents[2]
OLD_RUNS = {"method.warmup_updates", "method.decay_updates"}  # they are only read


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site. A broken link, a broken anchor and a page outside the navigation are warnings."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / ".mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


def test_a_broken_link_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# A\n\n[nowhere](index.md#nothing)\n")
    validation = {"anchors": "warn"}
    config = {"site_name": "x", "docs_dir": str(tmp_path / "docs"), "site_dir": str(tmp_path / "site")}
    (tmp_path / "mkdocs.yml").write_text("site_name: x\n")
    with pytest.raises(Abort):
        build(load_config(str(tmp_path / "mkdocs.yml"), strict=True, validation=validation, **config))


def test_the_reference_has_every_key_and_every_command(site):
    text = (site / "configuration.html").read_text()
    sections = {name.rpartition(".")[0] for name in KEYS}
    missing = [name for name in KEYS if f"<code>{name}</code>" not in text]
    assert set(missing) <= sections | OLD_RUNS
    assert not [name for name in OLD_RUNS if name in text]
    shown = html.unescape(re.sub(r"<.*?>", "", text))
    assert [name for name in set(KEYS) - set(missing) if KEYS[name].sentence.replace("`", "") not in shown] == []
    commands = (site / "commands.html").read_text()
    assert [one.name for one in COMMANDS if f'<h2 id="{one.name}">' not in commands] == []
    assert "generated:" not in text + commands


def test_no_page_loads_anything_from_another_host(site):
    loading = re.compile(r"""(?:src=|<link[^>]+href=|url\(|@import\s)["']?\s*(?:https?:)?//[^"')\s]+""")
    found = {
        (path.name, match[0])
        for pattern in ("*.html", "*.css")
        for path in site.rglob(pattern)
        for match in loading.finditer(path.read_text())
    }
    assert found == set()
    assert len(list(site.rglob("*.html"))) > 20


def test_links_work_in_the_repository_and_in_the_site():
    hooks = importlib.import_module("docs.site_hooks")
    text = "[a](docs/b.md#c) [d](CONTRIBUTING.md#e) [f](https://example.org) [g](#h)"
    assert hooks.relinked(text, "README.md") == ("[a](b.md#c) [d](contributing.md#e) [f](https://example.org) [g](#h)")
    assert hooks.relinked("[a](../README.md#b) [c](figures/d.md)", "docs/x.md") == "[a](index.md#b) [c](figures/d.md)"
    assert hooks.relinked("[a](../choosing.md)", "docs/figures/x.md") == "[a](../choosing.md)"
    assert hooks.relinked("[a](../docs/cluster.md)", "docker/README.md") == "[a](cluster.md)"
    assert hooks.relinked("[a](compose.yaml) [b](nothing.md)", "docker/README.md") == "a [b](docker/nothing.md)"
    assert hooks.anchor("3. The `threshold`: R's", "-") == "3-the-threshold-rs"
