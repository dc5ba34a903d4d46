"""Shared by all tests: no time limits per example (the machine is shared), and one thread for repeatable bits."""

import torch
from hypothesis import settings

settings.register_profile("shared-machine", deadline=None, print_blob=True)
settings.load_profile("shared-machine")
torch.set_num_threads(1)
