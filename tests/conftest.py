"""Settings of all tests: no time limit per Hypothesis example (the machine is shared), one thread for repeatable
bits, a separate cache of prepared text, and the accelerator of the tests that need one."""

import os

import pytest
import torch
from hypothesis import settings

from tests import pretend
from tests.standin_base import CHECKOUT, make_base

settings.register_profile("shared-machine", deadline=None, print_blob=True)
settings.load_profile("shared-machine")
torch.set_num_threads(1)

IS_REAL = torch.accelerator.device_count() > 0
if not IS_REAL and pretend.IS_POSSIBLE:
    pretend.register()  # before the first backward pass; torch does not count it until a test asks for it
HOOK = """
import sys
if "resource_tracker" not in " ".join(sys.orig_argv):  # multiprocessing's own process does not need torch
    from tests import pretend
    pretend.register()
    pretend.set_present(True)
"""


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """One cache for all processes of the tests, so that a corpus is prepared once."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ["RINGMASTER_CACHE"] = str(folder / "cache")


@pytest.fixture(scope="session")
def nanochat(tmp_path_factory):
    """The path of the stand-in for a nanochat checkout. Its data is where the environment says."""
    os.environ["NANOCHAT_BASE_DIR"] = str(make_base(tmp_path_factory.mktemp("nanochat") / "base"))
    return CHECKOUT


@pytest.fixture
def accelerator(monkeypatch, tmp_path_factory):
    """The name of an accelerator device, for this process and for those that it starts. It is pretended if need be."""
    if IS_REAL:
        yield f"{torch.accelerator.current_accelerator().type}:0"
        return
    if not pretend.IS_POSSIBLE:
        pytest.skip("there is no accelerator, and this torch cannot pretend to have one")
    hook = tmp_path_factory.mktemp("hook")  # Python imports sitecustomize when a process starts
    (hook / "sitecustomize.py").write_text(HOOK)
    root = os.path.dirname(os.path.dirname(__file__))
    monkeypatch.setenv("PYTHONPATH", f"{hook}{os.pathsep}{root}")
    pretend.set_present(True)
    yield pretend.NAME
    pretend.set_present(False)
