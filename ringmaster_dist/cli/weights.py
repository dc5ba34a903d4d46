"""Commands that use the weights of a run: eval, sample and export."""

from __future__ import annotations

import itertools
import math
import re
import sys
from argparse import Namespace
from pathlib import Path

from ringmaster_dist.cli.parser import Parser, number, one_of, target_setting, whole
from ringmaster_dist.config.errors import UserError

_PROMPT_TOKENS = 12  # of a prompt that is taken from the data


def _weights_argument(parser: Parser) -> None:
    parser.add_argument("weights", metavar="RUN_DIR|CHECKPOINT|WEIGHTS", type=Path,
                        help="a run (its newest good checkpoint), one checkpoint, or exported weights")  # fmt: skip


def _checkpoint_setting(parser: Parser) -> None:
    parser.setting("checkpoint=NAME", "which weights of a run: newest, or best (those of its lowest evaluation)",
                   one_of("newest", "best"), "newest")  # fmt: skip
    target_setting(parser)


def eval_options(parser: Parser) -> None:
    _weights_argument(parser)
    _checkpoint_setting(parser)
    parser.option("--rows N", "evaluate only N rows, spread over the validation part", whole(1))


def run_eval(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster eval RUN_DIR|CHECKPOINT|WEIGHTS [checkpoint=best] [target=NAME] [--rows N]

    Evaluates weights. For a language model it prints the loss per token and the bits per byte over the whole validation
    part, and shows its progress on stderr.
    """
    import torch
    from rich.console import Console

    from ringmaster_dist.observe.console import ProgressLine
    from ringmaster_dist.problems.nanochat.problem import TextProblem
    from ringmaster_dist.runtime.saved_weights import find_weights

    weights = find_weights(arguments.weights, best=arguments.checkpoint == "best", target=arguments.target)
    problem = weights.problem
    torch.set_num_threads(weights.config.server.compute_threads)  # as in the server, so that sums round the same way
    if isinstance(problem, TextProblem):
        problem.validation_rows = arguments.rows or len(problem.rows.validation)
    line = ProgressLine(Console(stderr=True))
    if isinstance(problem, TextProblem):
        problem.on_scored = lambda done, rows: line.show(done / rows, f"{done:,} of {rows:,} rows")
    try:
        found = problem.evaluate(weights.iterate)
    finally:
        line.close()
    figures = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items())
    print(f"{weights.path.name} ({weights.version:,} updates): {figures}")
    return 0


def sample_options(parser: Parser) -> None:
    _weights_argument(parser)
    _checkpoint_setting(parser)
    parser.option("--prompt TEXT", "how the text begins; without it, as a row of the validation data does; '' begins "
                  "a new document")  # fmt: skip
    parser.option("--tokens N", "how many tokens to add; beyond the context, the oldest are forgotten", whole(1), 100)
    parser.option("--temperature T", "0 takes the likeliest token each time", number(0), 0.8)
    parser.option("--top-k K", "choose among the K likeliest tokens; 0 chooses among all", whole(0), 50)
    parser.option("--seed S", "another seed gives another text", whole(), 0)
    parser.switch("--no-cache", help="compute everything again for every token")
    parser.switch("--interactive", help="read lines from the terminal, and continue the text after each; an empty line "
                  "continues without one, and Ctrl+D ends")  # fmt: skip


def run_sample(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster sample RUN_DIR|CHECKPOINT|WEIGHTS [--prompt TEXT] [checkpoint=best] [--interactive] [options]

    Generates text with a trained language model.

    Examples
      ringmaster sample runs/a
      ringmaster sample runs/a checkpoint=best --prompt 'def '
      ringmaster sample runs/a --interactive
    """
    writer = Writer(
        arguments.weights, temperature=arguments.temperature, top_k=arguments.top_k, seed=arguments.seed,
        cached=not arguments.no_cache, best=arguments.checkpoint == "best", target=arguments.target,
    )  # fmt: skip
    if not arguments.interactive:
        writer.write(writer.prompt_of_data() if arguments.prompt is None else arguments.prompt, arguments.tokens)
        return 0
    is_terminal = sys.stdin.isatty()
    if arguments.prompt:
        writer.write(arguments.prompt, arguments.tokens)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return 0
        writer.write(line, arguments.tokens)


class Writer:
    """Writes a text to stdout, token by token, and remembers it. The context slides over a text that is longer."""

    def __init__(
        self,
        path: Path,
        *,
        temperature: float,
        top_k: int,
        seed: int,
        cached: bool,
        best: bool = False,
        target: str = "",
    ) -> None:
        """Raises UserError if the weights are not of a language model, or not finite."""
        from ringmaster_dist.problems.nanochat.generate import reader_of
        from ringmaster_dist.problems.nanochat.problem import TextProblem
        from ringmaster_dist.runtime.saved_weights import find_weights

        weights = find_weights(path, best=best, target=target)
        problem = weights.problem
        if not isinstance(problem, TextProblem):
            raise UserError(f"{path} is of problem={weights.config.problem.name}: only a language model writes text")
        problem.validation_rows = 1  # one row is enough to see whether the weights are finite
        if not math.isfinite(problem.evaluate(weights.iterate)["loss"]):
            raise UserError(f"{path}: these weights give no finite numbers, so no text: the run has diverged")
        problem.load(weights.iterate)
        self._problem, self._tokenizer = problem, problem.tokenizer()
        self._reader = reader_of(problem, cached=cached)
        self._temperature, self._top_k, self._seed = temperature, top_k or None, seed
        self._pending = [self._tokenizer.bos]  # what the model has not seen yet

    def prompt_of_data(self) -> str:
        """The beginning of the first validation row, without its last word or character, which may be cut."""
        bos = self._tokenizer.bos
        row = self._problem.rows.validation[0].tolist()  # (context + 1,)
        document = itertools.takewhile(lambda token: token != bos, row[1:] if row[0] == bos else row)
        text = self._tokenizer.decode(list(itertools.islice(document, _PROMPT_TOKENS)))
        return re.sub(r"(?<=\S)\s+\S*$", "", text.rstrip("\ufffd"))

    def write(self, prompt: str, num_tokens: int) -> None:
        """Continues the text with the prompt, and then with tokens of the model."""
        from ringmaster_dist.problems.nanochat.generate import generate

        sys.stdout.write(prompt)
        shown = ""
        written: list[int] = []
        tokens = [*self._pending, *self._tokenizer.encode(prompt)]
        for token in generate(
            self._reader, tokens, num_tokens, temperature=self._temperature, top_k=self._top_k, seed=self._seed
        ):
            written.append(token)
            text = self._tokenizer.decode(written)
            if not text.endswith("\ufffd"):  # otherwise the next token has the rest of a character
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
        self._pending = written[-1:]
        self._seed += 1  # so that the next piece does not repeat the draws of this one
        print()


def export_options(parser: Parser) -> None:
    parser.add_argument("weights", metavar="RUN_DIR|CHECKPOINT", type=Path,
                        help="a run (its newest good checkpoint) or one checkpoint")  # fmt: skip
    parser.add_argument("output", metavar="FILE|DIR", type=Path, nargs="?",
                        help="where to write (weights.safetensors, nanochat or hf in the run's directory)")  # fmt: skip
    _checkpoint_setting(parser)
    parser.option("--format NAME", "safetensors, nanochat or hf", one_of("safetensors", "nanochat", "hf"),
                  "safetensors")  # fmt: skip


def run_export(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster export RUN_DIR|CHECKPOINT [FILE|DIR] [checkpoint=best] [--format NAME]

    Writes the weights of a checkpoint by name. The command works while the run continues and after a crash.

      --format safetensors   The tensors are the whole state of the module, with frozen and tied weights and buffers, so
                             module.load_state_dict(load_file(FILE)) works. The configuration (.yaml) and the tokenizer,
                             if there is one (.tokenizer.json), are written next to FILE. The number of updates is
                             `version` in the file's metadata.
      --format nanochat      DIR gets model_NNNNNN.pt and meta_NNNNNN.json, a checkpoint of nanochat. This is for
                             problem=nanochat_checkout. Put it into base_checkpoints/d12 of nanochat's data folder.
      --format hf            DIR gets model.safetensors, config.json with every size, tokenizer.json and
                             tokenizer_config.json, for Hugging Face. There is no code in it. It is for language models.

    Examples
      ringmaster export runs/a model.safetensors
      ringmaster export runs/a ~/.cache/nanochat/base_checkpoints/d12 --format nanochat
      ringmaster export runs/a my-model --format hf
    """
    import torch

    from ringmaster_dist.runtime.exports import WRITERS
    from ringmaster_dist.runtime.saved_weights import find_weights

    weights = find_weights(arguments.weights, best=arguments.checkpoint == "best", target=arguments.target)
    torch.set_num_threads(weights.config.server.compute_threads)  # so that running statistics have the server's bits
    name = "weights.safetensors" if arguments.format == "safetensors" else arguments.format
    output = arguments.output or weights.config_file.parent / name
    try:
        _refuse_links(output)
        WRITERS[arguments.format](weights, output)
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error})") from error
    print(f"{output}: {weights.layout.size:,} parameters after {weights.version:,} updates, from {weights.path.name}")
    return 0


def _refuse_links(output: Path) -> None:
    """Raises UserError if what is written would go elsewhere, by a link in a directory that may be somebody else's."""
    for path in (output, output.with_suffix(".yaml"), output.with_suffix(".tokenizer.json")):
        if path.is_symlink():
            raise UserError(f"{path} is a link to another place: give another place")
