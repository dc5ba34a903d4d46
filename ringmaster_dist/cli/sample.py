"""``ringmaster sample CHECKPOINT --prompt TEXT``."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from ringmaster_dist.config.errors import UserError

_HELP = """ringmaster sample RUN_DIR|CHECKPOINT|WEIGHTS [--prompt TEXT] [options]

Generates text with a trained NanoChat model.

  --prompt TEXT       what the text begins with (nothing: a new document)
  --tokens N          how many tokens to add (100); the context is the limit
  --temperature T     0 takes the likeliest token each time (0.8)
  --top-k K           chooses among the K likeliest (50; 0: among all)
  --seed S            another seed, another text (0)
  --no-cache          computes everything again for every token
"""


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0

    from ringmaster_dist.cli.options import flags

    known = {
        "--prompt": str,
        "--tokens": int,
        "--temperature": float,
        "--top-k": int,
        "--seed": int,
        "--no-cache": None,
    }
    (path,), options = flags(argv, known, "ringmaster sample runs/a --prompt 'def '")

    from ringmaster_dist.problems.nanochat.generate import generate
    from ringmaster_dist.problems.nanochat.problem import NanoChatProblem
    from ringmaster_dist.problems.nanochat.tokenizer import BOS
    from ringmaster_dist.runtime.saved_weights import find_weights

    temperature, top_k = options.get("--temperature", 0.8), options.get("--top-k", 50)
    if temperature < 0 or top_k < 0 or options.get("--tokens", 1) < 1:
        raise UserError("--temperature and --top-k must not be negative, --tokens must be at least 1")
    weights = find_weights(Path(path))
    problem = weights.problem
    if not isinstance(problem, NanoChatProblem):
        raise UserError(f"{path} is of problem={weights.config.problem.name}: only nanochat writes text")
    tokenizer = problem.rows.tokenizer()
    prompt = options.get("--prompt", "")
    tokens = [BOS, *tokenizer.encode(prompt)]
    if len(tokens) >= problem.config.sequence_len:
        raise UserError(
            f"--prompt has {len(tokens)} tokens, the model's context is {problem.config.sequence_len}: shorten it"
        )
    problem.validation_rows = 1  # a look is enough
    if not math.isfinite(problem.evaluate(weights.iterate)["loss"]):
        raise UserError(f"{path}: these weights give no finite numbers, so no text: the run has diverged")
    problem.load(weights.iterate)
    sys.stdout.write(prompt)
    shown = ""
    written: list[int] = []
    for token in generate(
        problem.model, tokens, options.get("--tokens", 100),
        temperature=temperature, top_k=top_k or None, seed=options.get("--seed", 0), cached="--no-cache" not in options,
    ):  # fmt: skip
        written.append(token)
        text = tokenizer.decode(written)
        if not text.endswith("\ufffd"):  # else the rest of a character is to come
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    print()
    return 0
