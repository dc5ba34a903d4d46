"""Settings that torch reads when it is imported or first used. Imports nothing of torch, so it can come first."""

import os


def quiet_environment() -> None:
    """Keeps c10d's C++ logging off the user's terminal, unless the user asked for it; asks for huge pages."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("TORCH_SHOW_CPP_STACKTRACES", "0")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # for big tensors: see memory.py
