"""Writes weights for other programs: as safetensors, as a checkpoint of nanochat, and as a folder for Hugging Face."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ringmaster_dist import __version__
from ringmaster_dist.config.errors import UserError, warn
from ringmaster_dist.errors import Mistake
from ringmaster_dist.problems.nanochat.checkout_problem import CheckoutProblem
from ringmaster_dist.problems.nanochat.hub_tokenizer import hub_tokenizer
from ringmaster_dist.problems.nanochat.problem import NanoChatProblem, TextProblem
from ringmaster_dist.runtime.saved_weights import Weights
from ringmaster_dist.server.weights import by_name, write


def write_safetensors(weights: Weights, target: Path) -> None:
    """A file with the whole state of the module, its configuration, and the tokenizer if there is one."""
    write(target, by_name(weights.problem, weights.layout, weights.iterate), weights.version)
    shutil.copyfile(weights.config_file, target.with_suffix(".yaml"))
    if isinstance(weights.problem, TextProblem):
        try:
            hub_tokenizer(weights.problem.tokenizer()).save(str(target.with_suffix(".tokenizer.json")))
        except Mistake as error:
            warn(str(error))


def write_nanochat(weights: Weights, target: Path) -> None:
    """A folder that nanochat's own loader takes: the state of the model, and its configuration."""
    problem = weights.problem
    if not isinstance(problem, CheckoutProblem):
        raise UserError(
            f"--format nanochat is for problem=nanochat_checkout, and this run is of problem="
            f"{weights.config.problem.name}, whose model nanochat does not have"
        )
    target.mkdir(parents=True, exist_ok=True)
    state, config = by_name(problem, weights.layout, weights.iterate), weights.config
    meta = {
        "step": weights.version,
        "model_config": problem.model_config,
        "user_config": {"depth": config.model.depth, "ringmaster_dist": __version__},
        "device_batch_size": config.problem.micro_batch or config.problem.batch,
        "max_seq_len": config.model.sequence_len,
    }
    _write_whole(target / f"model_{weights.version:06d}.pt", lambda path: torch.save(state, path))
    _write_json(target / f"meta_{weights.version:06d}.json", meta)


def write_hub(weights: Weights, target: Path) -> None:
    """A folder for Hugging Face: tensors, a configuration that names every size, and the tokenizer. It has no code."""
    problem = weights.problem
    if not isinstance(problem, NanoChatProblem | CheckoutProblem):
        name = weights.config.problem.name
        raise UserError(f"--format hf is for language models, and this run is of problem={name}")
    target.mkdir(parents=True, exist_ok=True)
    tokenizer, state = problem.tokenizer(), by_name(problem, weights.layout, weights.iterate)
    _write_whole(target / "model.safetensors", lambda path: save_file(state, path, metadata={"format": "pt"}))
    _write_whole(target / "tokenizer.json", lambda path: hub_tokenizer(tokenizer).save(str(path)))
    bos = hub_tokenizer(tokenizer).id_to_token(tokenizer.bos)
    _write_json(
        target / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "model_max_length": problem.context},
    )
    _write_json(target / "config.json", _hub_config(weights, problem, tokenizer.bos))


def _hub_config(weights: Weights, problem: NanoChatProblem | CheckoutProblem, bos: int) -> dict[str, Any]:
    """Every size of the model, under nanochat's names and under the usual ones of Hugging Face."""
    is_checkout = isinstance(problem, CheckoutProblem)
    sizes = problem.model_config
    return {
        "model_type": "nanochat_checkout" if is_checkout else "ringmaster_nanochat",
        **sizes,
        "num_hidden_layers": sizes["n_layer"],
        "num_attention_heads": sizes["n_head"],
        "num_key_value_heads": sizes["n_kv_head"],
        "hidden_size": sizes["n_embd"],
        "intermediate_size": 4 * sizes["n_embd"],
        "head_dim": sizes["n_embd"] // sizes["n_head"],
        "max_position_embeddings": sizes["sequence_len"],
        "embedding_rows": int(problem.module.get_parameter("transformer.wte.weight").shape[0]),
        "hidden_act": "relu2",
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "torch_dtype": "float32",
        "updates": weights.version,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write_whole(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"))


def _write_whole(path: Path, save: Callable[[Path], object]) -> None:
    """Writes the file whole or not at all. Raises OSError."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)  # a link would be followed
    try:
        save(temporary)
        temporary.replace(path)
    except RuntimeError as error:  # torch.save cannot write
        raise OSError(str(error).splitlines()[0]) from error
    finally:
        temporary.unlink(missing_ok=True)


WRITERS: dict[str, Callable[[Weights, Path], None]] = {
    "safetensors": write_safetensors,
    "nanochat": write_nanochat,
    "hf": write_hub,
}
