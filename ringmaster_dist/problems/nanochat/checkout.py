"""The user's own checkout of nanochat: its model, tokenizer, text shards and learning rates.

Nothing of nanochat is part of this package. `Checkout` imports the user's modules from the path that the user has
named, and needs only the names in `_NEEDED`. A name that is missing is one line. Errors are `Mistake`.

nanochat keeps data in one folder, its base: ``NANOCHAT_BASE_DIR``, else ``~/.cache/nanochat``. Every machine has its
own checkout and its own base.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ringmaster_dist.errors import Mistake
from ringmaster_dist.files import sha256_of
from ringmaster_dist.problems.nanochat.corpus import Source
from ringmaster_dist.problems.nanochat.sizes import Sizes

_NEEDED = {  # what each module has to have
    "gpt": ("GPT", "GPTConfig"),
    "tokenizer": ("get_tokenizer",),
    "dataset": ("list_parquet_files",),
    "common": ("get_base_dir",),
}
_SIZES = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd")  # fields of GPTConfig
_OPTIMIZERS = ("setup_optimizer", "setup_optimizers")  # the name in newer commits, and in older ones
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # variables of torchrun, which nanochat takes for its own
_MOST_TOKENS = 1 << 16  # rows are uint16


class Rate(NamedTuple):
    """How nanochat's own optimizer moves a parameter."""

    learning_rate: float
    is_muon: bool  # otherwise it is Adam's


class Checkout:
    """One checkout. The modules are imported when they are needed, and stay imported."""

    def __init__(self, path: Path, precision: str = "auto") -> None:
        """``precision`` is the type in which nanochat computes; auto leaves the choice to nanochat."""
        self.path = path.expanduser().resolve()
        if not (self.path / "nanochat" / "gpt.py").is_file():
            raise Mistake("it has no nanochat/gpt.py: name the folder of a nanochat checkout")
        if precision not in ("auto", os.environ.get("NANOCHAT_DTYPE")):
            os.environ["NANOCHAT_DTYPE"] = precision  # nanochat reads it when it is imported
            _forget()

    @property
    def source_digest(self) -> str:
        """A hash of the model's code. Machines of one run must have the same."""
        return sha256_of(self.path / "nanochat" / "gpt.py")[:8]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The type in which the model computes, or None for a commit that leaves it to autocast."""
        found: torch.dtype | None = getattr(self._module("gpt"), "COMPUTE_DTYPE", None)
        return found

    @property
    def base(self) -> Path:
        return Path(self._module("common").get_base_dir())

    def model(self, sizes: Sizes, vocab_size: int, *, initialize: bool = True) -> nn.Module:
        """A new ``GPT`` with float32 weights. The caller has seeded the generators."""
        gpt = self._module("gpt")
        given = {**asdict(sizes), "n_kv_head": sizes.n_head, "vocab_size": vocab_size}
        known = {field.name for field in fields(gpt.GPTConfig)} if is_dataclass(gpt.GPTConfig) else set()
        for name in _SIZES:
            if name not in known:
                raise Mistake(f"its GPTConfig has no field {name!r}")
        for name in ("init_weights", "forward"):
            if not hasattr(gpt.GPT, name):
                raise Mistake(f"its GPT has no method {name!r}")
        for name in ("targets", "loss_reduction"):
            if name not in inspect.signature(gpt.GPT.forward).parameters:
                raise Mistake(f"its GPT.forward has no argument {name!r}")
        with _quiet_and_alone():
            model: nn.Module = gpt.GPT(gpt.GPTConfig(**{k: v for k, v in given.items() if k in known}))
            if initialize:
                model.init_weights()  # type: ignore[operator]
        for parameter in model.parameters():  # nanochat stores embeddings in its compute type
            parameter.data = parameter.data.float()
        return model

    def rates(self, model: nn.Module) -> dict[str, Rate]:
        """The learning rate of each parameter, from the groups of nanochat's own optimizer."""
        setup = next((getattr(model, name) for name in _OPTIMIZERS if hasattr(model, name)), None)
        if setup is None:
            raise Mistake(f"its GPT has no method {_OPTIMIZERS[0]!r}")
        with _quiet_and_alone():
            made = setup()
        found: dict[int, Rate] = {}
        for optimizer in made if isinstance(made, list | tuple) else [made]:
            for group in optimizer.param_groups:
                is_muon = group.get("kind", type(optimizer).__name__).lower() in ("muon", "distmuon")
                found |= {id(p): Rate(float(group["lr"]), is_muon) for p in group["params"]}
        rates = {name: found[id(p)] for name, p in model.named_parameters() if id(p) in found}
        if not any(rate.is_muon for rate in rates.values()):
            raise Mistake("its optimizer has no group of the kind 'muon', so no radius can follow from it")
        return rates

    @cached_property
    def tokenizer(self) -> CheckoutTokenizer:
        return CheckoutTokenizer(self._own_tokenizer, self.tokenizer_digest, self._token_bytes())

    @cached_property
    def tokenizer_digest(self) -> str:
        """A hash of the files of the tokenizer."""
        folder = self.base / "tokenizer"
        files = sorted(path for path in folder.glob("*") if path.is_file())
        if not files:
            raise Mistake(f"there is no tokenizer in {folder}: run python -m scripts.tok_train in the checkout")
        return hashlib.sha256("".join(path.name + sha256_of(path) for path in files).encode()).hexdigest()

    def shards(self, count: int | None) -> list[Source]:
        """The parquet files of the base: the last is for validation, the first ``count`` of the others for training."""
        with _quiet_and_alone():
            paths = [Path(path) for path in self._module("dataset").list_parquet_files()]
        if len(paths) < 2:
            raise Mistake(
                f"{self.base} has {len(paths)} parquet shard(s), and at least 2 are needed, because the last one is "
                "for validation: run python -m nanochat.dataset in the checkout"
            )
        if count is not None and count >= len(paths):
            raise Mistake(f"problem.shards={count}: there are only {len(paths) - 1} shards for training")
        *training, validation = paths
        return [Source(path, path.name, path is validation) for path in (*training[:count], validation)]

    @cached_property
    def _own_tokenizer(self) -> Any:
        self.tokenizer_digest  # noqa: B018  (says that there is none, where nanochat would fail in its own way)
        try:
            with _quiet_and_alone():
                return self._module("tokenizer").get_tokenizer()
        except (OSError, AssertionError) as error:
            raise Mistake(f"its tokenizer cannot be loaded: {error}") from error

    def _token_bytes(self) -> np.ndarray:
        """The bytes of text that each token stands for, (vocab_size,). Newer commits ask the tokenizer for them."""
        tokenizer, module = self._own_tokenizer, self._module("tokenizer")
        ask: Callable[[], torch.Tensor] | None = getattr(module, "get_token_bytes", None)
        ask = ask or getattr(tokenizer, "get_token_bytes", None)
        if ask is None:
            raise Mistake("its tokenizer has no 'get_token_bytes'")
        try:
            sizes = ask().cpu().numpy().astype(np.int64)
        except (OSError, AssertionError) as error:
            raise Mistake(f"the bytes of its tokens cannot be loaded: {error}") from error
        if len(sizes) != tokenizer.get_vocab_size():
            raise Mistake(
                f"its token bytes are of another vocabulary: {len(sizes):,} entries, and the tokenizer has "
                f"{tokenizer.get_vocab_size():,}: run python -m scripts.tok_train again"
            )
        return sizes

    def _module(self, name: str) -> ModuleType:
        module = _imported(self.path, f"nanochat.{name}")
        for needed in _NEEDED[name]:
            if not hasattr(module, needed):
                raise Mistake(f"nanochat/{name}.py has no {needed!r}")
        return module


class CheckoutTokenizer:
    """nanochat's tokenizer, as rows and commands need it. It works on documents without padding."""

    def __init__(self, tokenizer: Any, identity: str, sizes: np.ndarray) -> None:
        for name in ("encode", "decode", "get_vocab_size", "get_bos_token_id"):
            if not hasattr(tokenizer, name):
                raise Mistake(f"its tokenizer has no method {name!r}")
        self.own, self.identity, self._sizes = tokenizer, identity, sizes
        self.bos = int(tokenizer.get_bos_token_id())
        self.vocab_size = int(tokenizer.get_vocab_size())
        if self.vocab_size > _MOST_TOKENS:
            raise Mistake(f"its vocabulary has {self.vocab_size:,} tokens, and rows hold at most {_MOST_TOKENS:,}")

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self.own.encode(text)]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text after a BOS."""
        encoded = [np.array(tokens) for tokens in self.own.encode(list(texts), prepend=self.bos)]
        if any(int(tokens.max()) >= self.vocab_size for tokens in encoded):
            raise Mistake(f"its tokenizer gives tokens beyond its vocabulary of {self.vocab_size:,}")
        return [tokens.astype(np.uint16) for tokens in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.own.decode([token for token in tokens if self._sizes[token]]))  # without special tokens

    def token_bytes(self) -> np.ndarray:
        return self._sizes


def _imported(path: Path, name: str) -> ModuleType:
    """The module of this checkout. Modules of another one, which the process may have, are forgotten."""
    package = sys.modules.get("nanochat")
    if package is not None and not any(Path(place).is_relative_to(path) for place in package.__path__):
        _forget()
    if sys.path[0] != str(path):
        sys.path.insert(0, str(path))
        importlib.invalidate_caches()
    try:
        with _quiet_and_alone():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Mistake(f"{name} cannot be imported: {error}") from error


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "nanochat"]:
        del sys.modules[name]


@contextmanager
def _quiet_and_alone() -> Iterator[None]:
    """nanochat prints, sets up the root logger, and takes the variables of a launcher for its own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        os.environ.update(hidden)
        root.handlers[:] = handlers
        root.setLevel(level)
