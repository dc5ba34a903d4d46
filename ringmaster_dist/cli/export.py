"""``ringmaster export RUN_DIR|CHECKPOINT [FILE]``."""

from __future__ import annotations

import shutil
from pathlib import Path

from ringmaster_dist.config.errors import UserError

_HELP = """ringmaster export RUN_DIR|CHECKPOINT [FILE]

Writes the weights of a checkpoint by name to a safetensors FILE. Of a run it takes the newest good checkpoint. The
configuration (.yaml) and the tokenizer, if there is one (.tokenizer.json), are written next to FILE. The tensors are
the whole state of the module: module.load_state_dict(load_file(FILE)) works, with frozen and tied weights and buffers.
The number of updates is `version` in the file's metadata. Without FILE, it writes weights.safetensors in the run's
directory. It works while the run continues and after a crash.
"""


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    if not 1 <= len(argv) <= 2:
        raise UserError(
            "ringmaster export takes a run directory and perhaps a file: ringmaster export runs/a x.safetensors"
        )

    import torch

    from ringmaster_dist.runtime.saved_weights import find_weights
    from ringmaster_dist.server.weights import by_name, write

    weights = find_weights(Path(argv[0]))
    torch.set_num_threads(weights.config.server.compute_threads)  # running statistics to the bits of the server's
    target = Path(argv[1]) if len(argv) == 2 else weights.config_file.parent / "weights.safetensors"
    try:
        write(target, by_name(weights.problem, weights.layout, weights.iterate), weights.version)
        shutil.copyfile(weights.config_file, target.with_suffix(".yaml"))
        if hasattr(weights.problem, "rows"):
            weights.problem.rows.tokenizer().save(target.with_suffix(".tokenizer.json"))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error})") from error
    print(f"{target}: {weights.layout.size:,} parameters after {weights.version:,} updates, from {weights.path.name}")
    return 0
