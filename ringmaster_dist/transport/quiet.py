"""Settings that torch reads when it is imported. Imports nothing, so it can come first."""

import os


def quiet_environment() -> None:
    """Keeps c10d's C++ logging off the user's terminal, unless the user asked for it."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("TORCH_SHOW_CPP_STACKTRACES", "0")
