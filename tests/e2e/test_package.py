"""The wheel and the source distribution, as they would be published."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from ringmaster_dist import __version__

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds both in a copy of the files that git knows or would add, and returns their folder."""
    folder = tmp_path_factory.mktemp("package")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout.splitlines() or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    for name in names:
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder / "dist")]
    done = subprocess.run(build, cwd=folder / "source", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "dist"


def test_what_is_published_is_complete(built):
    """The metadata passes the checks of the package index, and nothing but the package is installed."""
    wheel, sdist = (
        built / f"ringmaster_dist-{__version__}-py3-none-any.whl",
        built / f"ringmaster_dist-{__version__}.tar.gz",
    )
    assert sorted(built.iterdir()) == sorted([wheel, sdist])
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = BytesParser().parsebytes(archive.read(f"ringmaster_dist-{__version__}.dist-info/METADATA"))
        entries = archive.read(f"ringmaster_dist-{__version__}.dist-info/entry_points.txt").decode()
    assert {name.partition("/")[0] for name in names} == {"ringmaster_dist", f"ringmaster_dist-{__version__}.dist-info"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ringmaster_dist").rglob("*.py")}
    assert sources <= set(names)
    assert {"ringmaster_dist/py.typed", "ringmaster_dist/observe/assets/page.js"} <= set(names)
    configs = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    assert {f"ringmaster_dist/_configs/{name}" for name in configs} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".nbi", ".nbc"))]
    assert "ringmaster = ringmaster_dist.__main__:main" in entries
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "MIT"
    versions = [text.rpartition(" ")[2] for text in metadata.get_all("Classifier") if "Python :: 3." in text]
    assert (versions[0], metadata["Requires-Python"]) == ("3.10", ">=3.10.9")
    assert {"test", "fast", "remote"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata.get_payload().startswith("# ")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "tests/unit/test_core.py", "configs/train.yaml", "docker/kubernetes/server.yaml",
            "docs/run-directory.md", "LICENSE", "CHANGELOG.md", "launch/test.sh"} <= inside  # fmt: skip
    assert not [name for name in inside if name.startswith((".venv", "runs", "docker/secrets"))]


def test_the_wheel_works_away_from_the_repository(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r});"
        "from ringmaster_dist.config.compose import config_dir, load;"
        "print(config_dir()); print(load(['method=rennala']).method.batch)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == [str(tmp_path / "site/ringmaster_dist/_configs"), "8"], done.stderr
