"""``ringmaster eval CHECKPOINT``."""

from __future__ import annotations

from pathlib import Path

from ringmaster_dist.config.errors import UserError

_HELP = """ringmaster eval RUN_DIR|CHECKPOINT|WEIGHTS [--rows N]

Evaluates weights: of a run (its newest good checkpoint), of one checkpoint, or exported ones. NanoChat: loss per token
and bits per byte over the whole validation part.

  --rows N   only N rows, spread over the validation part
"""


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0

    from ringmaster_dist.cli.options import flags

    (path,), options = flags(argv, {"--rows": int}, "ringmaster eval runs/a")

    import torch

    from ringmaster_dist.problems.nanochat.problem import NanoChatProblem
    from ringmaster_dist.runtime.saved_weights import find_weights

    weights = find_weights(Path(path))
    problem = weights.problem
    torch.set_num_threads(weights.config.server.compute_threads)  # as the server: sums are rounded likewise
    if isinstance(problem, NanoChatProblem):
        rows = options.get("--rows", len(problem.rows.validation))
        if rows < 1:
            raise UserError(f"--rows {rows}: must be at least 1")
        problem.validation_rows = rows
    found = problem.evaluate(weights.iterate)
    figures = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items())
    print(f"{weights.path.name} ({weights.version:,} updates): {figures}")
    return 0
