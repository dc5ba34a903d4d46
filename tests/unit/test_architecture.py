"""The arrows between the rooms, and what the pure rooms may know."""

from importlinter.application.use_cases import SUCCESS
from importlinter.cli import lint_imports


def test_the_import_arrows_hold():
    assert lint_imports(config_filename="pyproject.toml", no_cache=True) == (0 if SUCCESS else 1)
