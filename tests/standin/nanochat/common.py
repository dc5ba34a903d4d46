"""Where the stand-in keeps its data, and the type in which it computes."""

import logging
import os

import torch

COMPUTE_DTYPE = getattr(torch, os.environ.get("NANOCHAT_DTYPE", "float32"))
logging.basicConfig(level=logging.DEBUG)  # a library that sets up the root logger must not change that of its caller
print("the stand-in of nanochat")


def get_base_dir():
    return os.environ["NANOCHAT_BASE_DIR"]
