"""Settings of all tests: no time limit per Hypothesis example (the machine is shared), one thread for repeatable
bits, and a separate cache of prepared text."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("shared-machine", deadline=None, print_blob=True)
settings.load_profile("shared-machine")
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    os.environ["RINGMASTER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
