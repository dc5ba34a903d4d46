"""Commands that use the weights of a run: eval, sample and export."""

from __future__ import annotations

import math
import shutil
import sys
from argparse import Namespace
from pathlib import Path

from ringmaster_dist.cli.parser import Parser, number, whole
from ringmaster_dist.config.errors import UserError


def _weights_argument(parser: Parser) -> None:
    parser.add_argument("weights", metavar="RUN_DIR|CHECKPOINT|WEIGHTS", type=Path,
                        help="a run (its newest good checkpoint), one checkpoint, or exported weights")  # fmt: skip


def eval_options(parser: Parser) -> None:
    _weights_argument(parser)
    parser.option("--rows N", "evaluate only N rows, spread over the validation part", whole(1))


def run_eval(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster eval RUN_DIR|CHECKPOINT|WEIGHTS [--rows N]

    Evaluates weights. For NanoChat it prints the loss per token and the bits per byte over the whole validation part.
    """
    import torch

    from ringmaster_dist.problems.nanochat.problem import NanoChatProblem
    from ringmaster_dist.runtime.saved_weights import find_weights

    weights = find_weights(arguments.weights)
    problem = weights.problem
    torch.set_num_threads(weights.config.server.compute_threads)  # as in the server, so that sums round the same way
    if isinstance(problem, NanoChatProblem):
        problem.validation_rows = arguments.rows or len(problem.rows.validation)
    found = problem.evaluate(weights.iterate)
    figures = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items())
    print(f"{weights.path.name} ({weights.version:,} updates): {figures}")
    return 0


def sample_options(parser: Parser) -> None:
    _weights_argument(parser)
    parser.option("--prompt TEXT", "how the text begins; without it, a new document begins", str, "")
    parser.option("--tokens N", "how many tokens to add; the context is the limit", whole(1), 100)
    parser.option("--temperature T", "0 takes the likeliest token each time", number(0), 0.8)
    parser.option("--top-k K", "choose among the K likeliest tokens; 0 chooses among all", whole(0), 50)
    parser.option("--seed S", "another seed gives another text", whole(), 0)
    parser.switch("--no-cache", help="compute everything again for every token")


def run_sample(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster sample RUN_DIR|CHECKPOINT|WEIGHTS [--prompt TEXT] [options]

    Generates text with a trained NanoChat model.

    Example
      ringmaster sample runs/a --prompt 'def '
    """
    write_sample(
        arguments.weights, arguments.prompt, arguments.tokens, temperature=arguments.temperature,
        top_k=arguments.top_k, seed=arguments.seed, cached=not arguments.no_cache,
    )  # fmt: skip
    return 0


def write_sample(
    path: Path, prompt: str, num_tokens: int, *, temperature: float = 0.8, top_k: int = 50, seed: int = 0,
    cached: bool = True,
) -> None:  # fmt: skip
    """Writes the prompt and the text that a model continues it with to stdout, token by token. Raises UserError."""
    from ringmaster_dist.problems.nanochat.generate import generate
    from ringmaster_dist.problems.nanochat.problem import NanoChatProblem
    from ringmaster_dist.problems.nanochat.tokenizer import BOS
    from ringmaster_dist.runtime.saved_weights import find_weights

    weights = find_weights(path)
    problem = weights.problem
    if not isinstance(problem, NanoChatProblem):
        raise UserError(f"{path} is of problem={weights.config.problem.name}: only nanochat writes text")
    tokenizer = problem.rows.tokenizer()
    tokens = [BOS, *tokenizer.encode(prompt)]
    if len(tokens) >= problem.config.sequence_len:
        raise UserError(
            f"--prompt has {len(tokens)} tokens, the model's context is {problem.config.sequence_len}: shorten it"
        )
    problem.validation_rows = 1  # one row is enough to see whether the weights are finite
    if not math.isfinite(problem.evaluate(weights.iterate)["loss"]):
        raise UserError(f"{path}: these weights give no finite numbers, so no text: the run has diverged")
    problem.load(weights.iterate)
    sys.stdout.write(prompt)
    shown = ""
    written: list[int] = []
    for token in generate(
        problem.model, tokens, num_tokens, temperature=temperature, top_k=top_k or None, seed=seed, cached=cached
    ):
        written.append(token)
        text = tokenizer.decode(written)
        if not text.endswith("\ufffd"):  # otherwise the next token has the rest of a character
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    print()


def export_options(parser: Parser) -> None:
    parser.add_argument("weights", metavar="RUN_DIR|CHECKPOINT", type=Path,
                        help="a run (its newest good checkpoint) or one checkpoint")  # fmt: skip
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?",
                        help="where to write (weights.safetensors in the run's directory)")  # fmt: skip


def run_export(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster export RUN_DIR|CHECKPOINT [FILE]

    Writes the weights of a checkpoint by name to a safetensors FILE. The configuration (.yaml) and the tokenizer, if
    there is one (.tokenizer.json), are written next to FILE. The tensors are the whole state of the module, with frozen
    and tied weights and buffers, so module.load_state_dict(load_file(FILE)) works. The number of updates is `version`
    in the file's metadata. The command works while the run continues and after a crash.

    Example
      ringmaster export runs/a model.safetensors
    """
    import torch

    from ringmaster_dist.runtime.saved_weights import find_weights
    from ringmaster_dist.server.weights import by_name, write

    weights = find_weights(arguments.weights)
    torch.set_num_threads(weights.config.server.compute_threads)  # so that running statistics have the server's bits
    target = arguments.file or weights.config_file.parent / "weights.safetensors"
    try:
        write(target, by_name(weights.problem, weights.layout, weights.iterate), weights.version)
        shutil.copyfile(weights.config_file, target.with_suffix(".yaml"))
        if hasattr(weights.problem, "rows"):
            weights.problem.rows.tokenizer().save(target.with_suffix(".tokenizer.json"))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error})") from error
    print(f"{target}: {weights.layout.size:,} parameters after {weights.version:,} updates, from {weights.path.name}")
    return 0
