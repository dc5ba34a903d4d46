"""The shards of text."""

import os

from nanochat.common import get_base_dir


def list_parquet_files(data_dir=None):
    folder = data_dir or os.path.join(get_base_dir(), "base_data")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if name.endswith(".parquet")]
