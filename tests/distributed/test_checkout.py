"""A nanochat checkout in real processes: trained, killed, resumed, replayed, exported, loaded and begun again."""

import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from ringmaster_dist.cli.main import main
from ringmaster_dist.config.compose import load
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.runtime.saved_weights import chosen_weights, find_weights
from tests.distributed.processes import Run, check_finished, target_of, until

SIZES = ["model.depth=2", "model.sequence_len=64", "problem.validation_rows=8"]


def of_checkout(path, *more):
    return ["problem=nanochat_checkout", f"problem.path={path}", *SIZES, *more]


def worker_elsewhere(run, folder, target):
    """Starts a worker with a checkout, a data folder and a cache of its own, as another machine has them."""
    path, base = shutil.copytree(target, folder / "elsewhere"), folder / "base"
    shutil.copytree(os.environ["NANOCHAT_BASE_DIR"], base)
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "RINGMASTER_CACHE": str(folder / "cache")}
    address = until(lambda: (run.directory / "address").exists() and (run.directory / "address").read_text(), "address")
    address = f"127.0.0.1:{address.strip().rpartition(':')[2]}"
    command = [sys.executable, "-m", "ringmaster_dist.worker", f"server={address}",
               f"token_file={run.directory}/token", "patience_seconds=30", f"target={path}"]  # fmt: skip
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory, nanochat):
    """A run whose only worker is elsewhere. Its server was killed and resumed it."""
    folder = tmp_path_factory.mktemp("checkout")
    words = of_checkout(
        nanochat, "cluster.workers=1", "cluster.local_workers=0", "server.host=0.0.0.0", "cluster.profile=none",
        "checkpoint.every=5", "budget.updates=60",
        "problem.batch=2", "problem.final_tokens=1024", f"run.dir={folder}/run", "resume=null", "run.report=false",
    )  # fmt: skip
    with Run(folder / "run", *words) as run, worker_elsewhere(run, folder, nanochat) as other:
        until(lambda: run.checkpoints(0), "the first term has a checkpoint")
        os.kill(run.server(), signal.SIGKILL)
        check_finished(run)  # the replay is part of it
        errors = other.communicate()[1]
    assert other.returncode == 0, errors
    return run


def test_a_checkout_is_trained_killed_resumed_and_replayed(run):
    summary = run.summary()
    assert summary["updates"] == 60
    assert len(run.terms()) == 2
    assert len(summary["per_worker"]) == 1
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert summary["final_loss"] < 0.5 * rows[0]["loss"]


def allowed(run):
    return f"target={target_of(run.directory)}"


class Bomb:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_an_export_is_what_nanochat_loads_and_begins_a_run(run, nanochat, tmp_path):
    saved = tmp_path / "saved"
    assert main(["export", str(run.directory), str(saved), "--format", "nanochat", allowed(run)]) == 0
    weights = find_weights(run.directory, target=target_of(run.directory))
    build = importlib.import_module("nanochat.checkpoint_manager").build_model
    model, _, meta = build(str(saved), 60, torch.device("cpu"), "eval")  # with strict=True
    assert meta["model_config"]["n_layer"] == 2
    tokens = torch.randint(0, 320, (3, 64), generator=torch.Generator().manual_seed(0))
    weights.problem.load(weights.iterate)
    weights.problem.module.eval()
    with torch.no_grad():  # sums round in another order, because the tensors are aligned in another way
        torch.testing.assert_close(model(tokens), weights.problem.logits(tokens), rtol=1e-6, atol=1e-6)

    def begun(given, *more):
        return chosen_weights(load(of_checkout(nanochat, f"init={given}", *more)))

    for given in (saved, saved / "model_000060.pt"):
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in begun(given).items())
    torch.save({"weight": Bomb(tmp_path / "ran")}, tmp_path / "pickled.pt")
    for words, given, *more in (
        ("it is of another model", saved, "model.depth=3"),
        ("is not a checkpoint of nanochat", tmp_path / "pickled.pt"),
    ):
        with pytest.raises(UserError, match=words) as raised:
            begun(given, *more)
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()


def test_an_export_for_hugging_face_names_every_size(run, tmp_path):
    assert main(["export", str(run.directory), str(tmp_path / "hub"), "--format", "hf", allowed(run)]) == 0
    weights = find_weights(run.directory, target=target_of(run.directory))
    tensors = load_file(tmp_path / "hub/model.safetensors")
    weights.problem.module.load_state_dict(tensors, strict=True)
    config = json.loads((tmp_path / "hub/config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (2, 128, 320)
    assert (config["max_position_embeddings"], config["embedding_rows"]) == (64, 320)
    tokenizer = Tokenizer.from_file(str(tmp_path / "hub/tokenizer.json"))
    assert tokenizer.token_to_id("<|bos|>") == config["bos_token_id"]
    assert {path.name for path in (tmp_path / "hub").iterdir()} == {
        "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_a_dialogue_continues_beyond_the_context(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("def function_1\n    return\n"))
    assert (
        main(["sample", str(run.directory), "--interactive", "--tokens", "90", "--temperature", "0", allowed(run)]) == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("def function_1")
    assert text.count("return") > 3  # it has learnt what its text looks like
    assert len(text) > 200
