"""A nanochat checkout as a problem, with a stand-in that has nanochat's names and other code."""

import importlib
import json
import logging
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from ringmaster_dist.config.build import build_fingerprint, build_layout, build_problem, build_radii, build_rows
from ringmaster_dist.config.compose import compose, load, recipe_of
from ringmaster_dist.config.describe import annotated
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.problems.nanochat.checkout import Checkout
from ringmaster_dist.problems.nanochat.checkout_problem import ADAM_SHARE
from ringmaster_dist.problems.nanochat.hub_tokenizer import hub_tokenizer
from ringmaster_dist.problems.nanochat.sizes import Sizes
from ringmaster_dist.worker.job import make_job
from tests.standin_base import TEXTS, make_base


@pytest.fixture
def config(nanochat):
    return load(["problem=nanochat_checkout", f"problem.path={nanochat}", "model.depth=2", "model.sequence_len=64"])


def test_sizes_follow_from_the_depth_as_in_nanochat():
    def sizes(depth):
        found = Sizes.of_depth(depth, aspect_ratio=64, head_dim=128, sequence_len=2048, window_pattern="SSSL")
        return found.n_layer, found.n_head, found.n_embd

    # The table of nanochat: depth, heads and width.
    assert [sizes(depth) for depth in (4, 5, 12, 20, 26, 32)] == [
        (4, 2, 256), (5, 3, 384), (12, 6, 768), (20, 10, 1280), (26, 13, 1664), (32, 16, 2048),
    ]  # fmt: skip


def test_roles_and_radii_follow_nanochat_s_groups(config):
    problem = build_problem(config)
    found = {p.name: (p.role, p.radius) for p in problem.parameters}
    scale, coordinate = (128 / 768) ** -0.5, ADAM_SHARE / 0.02
    row = math.sqrt(128)
    expected = {
        "transformer.h.1.attn.ve_gate.weight": ("matrix", 1.0),
        "transformer.h.0.mlp.c_fc.weight": ("matrix", 1.0),
        "transformer.wte.weight": ("embedding", 0.2 * scale * coordinate * row),
        "value_embeds.1.weight": ("embedding", 0.1 * scale * coordinate * row),
        "lm_head.weight": ("output", 0.004 * scale * coordinate),
        "resid_lambdas": ("scalar", 0.005 * coordinate),
        "x0_lambdas": ("scalar", 0.5 * coordinate),
        "smear_gate.weight": ("scalar", 0.2 * coordinate),
        "smear_lambda": ("scalar", 0.2 * coordinate),
        "backout_lambda": ("scalar", 0.2 * coordinate),
    }
    for name, (role, radius) in expected.items():
        assert found[name] == (role, pytest.approx(radius)), name
    assert len(found) == 13 + len(expected) - 2
    layout = build_layout(config, problem)
    by_geometry = {(block.geometry, round(block.radius, 9)) for block in layout.blocks}
    assert ("row", round(0.2 * scale * coordinate * row, 9)) in by_geometry
    assert ("spectral", 1.0) in by_geometry


def test_local_steps_have_the_radii_and_the_server_has_none(config):
    single = build_problem(config)
    config.local.steps, config.local.eta, config.local.beta = 2, 0.01, 0.9
    problem = build_problem(config)
    layout = build_layout(config, problem)
    assert {(block.geometry, block.radius) for block in layout.blocks} == {("none", 1.0)}
    iterate = problem.initial(0)
    moved = layout.views(problem.gradient(iterate, 0, 0, 0)[0])  # by two steps
    radii = {p.name: p.radius for p in single.parameters}
    for name in ("x0_lambdas", "resid_lambdas", "lm_head.weight"):
        assert float(moved[name].abs().max()) <= 0.02 * radii[name] * 1.001
        assert float(moved[name].abs().max()) > 0.009 * radii[name]


def test_weights_stay_in_float32_whatever_nanochat_computes_in(config, monkeypatch):
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    found = {}
    for config.problem.precision in ("float32", "bfloat16", "float32"):
        problem = build_problem(config)
        build_layout(config, problem)
        gradient, loss = problem.gradient(problem.initial(0), 0, 1, 2)
        assert gradient.dtype == problem.initial(0).dtype == torch.float32
        assert problem.checkout.compute_dtype == getattr(torch, config.problem.precision)
        found.setdefault(config.problem.precision, []).append((gradient.clone(), loss))
    (one, other), (narrow,) = found["float32"], found["bfloat16"]
    assert torch.equal(one[0], other[0])
    assert narrow[1] == pytest.approx(one[1], rel=1e-2)
    assert not torch.equal(narrow[0], one[0])


def test_importing_a_checkout_changes_neither_logs_nor_output(config, capsys):
    root = logging.getLogger()
    before = list(root.handlers), root.level
    build_problem(config)
    assert (list(root.handlers), root.level) == before
    assert capsys.readouterr().out == ""


def test_bits_per_byte_are_nanochat_s(config):
    """The stand-in computes them from the loss of each token, in the way nanochat does."""
    problem = build_problem(config)
    build_layout(config, problem)
    iterate = problem.initial(0)
    iterate += 0.02 * torch.randn(iterate.shape, generator=torch.Generator().manual_seed(1))
    problem.validation_rows = len(problem.rows.validation)
    found = problem.evaluate(iterate)
    tokens = torch.from_numpy(np.array(problem.rows.validation).astype(np.int64))
    batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens.split(16)]
    evaluate = importlib.import_module("nanochat.loss_eval").evaluate_bpb
    sizes = importlib.import_module("nanochat.tokenizer").get_token_bytes()
    expected = evaluate(problem.module, batches, len(batches), sizes)
    assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-6)


def test_rows_hold_the_checkout_s_own_tokens(config):
    rows, tokenizer = build_rows(config), Checkout(Path(config.problem.path)).tokenizer
    assert rows.train.shape[1] == 65
    assert rows.manifest["vocab_size"] == tokenizer.vocab_size == 320
    assert (rows.train[:, 0] == tokenizer.bos).all()  # cropped documents never continue in the next row
    row = rows.validation[0]
    first = row[1 : 1 + list(row[1:]).index(tokenizer.bos)] if tokenizer.bos in row[1:] else row[1:]
    assert any(text.startswith(tokenizer.decode(first.tolist())) for text in TEXTS)
    assert rows.is_whole()


def test_the_tokenizer_is_written_for_hugging_face(nanochat, tmp_path):
    tokenizer = Checkout(nanochat).tokenizer
    hub_tokenizer(tokenizer).save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.get_vocab_size() == tokenizer.vocab_size
    assert loaded.token_to_id("<|bos|>") == tokenizer.bos
    for text in (*TEXTS[:40], "what? été 東京 😀\n\n\tdef", "", "\x00\x7f\xad"):
        assert loaded.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
        assert loaded.decode(tokenizer.encode(text)) == text


BROKEN = {
    "GPTConfig": ("gpt", "GPTConfig", "no 'GPTConfig'"),
    "field": ("gpt", "n_kv_head:", "no field 'n_kv_head'"),
    "init_weights": ("gpt", "def init_weights", "no method 'init_weights'"),
    "loss_reduction": ("gpt", "loss_reduction", "no argument 'loss_reduction'"),
    "optimizer": ("gpt", "def setup_optimizer", "no method 'setup_optimizer'"),
    "tokenizer": ("tokenizer", "def get_tokenizer", "no 'get_tokenizer'"),
    "shards": ("dataset", "def list_parquet_files", "no 'list_parquet_files'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_name_that_a_checkout_lacks_is_one_line(case, config, nanochat, tmp_path):
    copy = shutil.copytree(nanochat, tmp_path / "checkout")
    module, name, words = BROKEN[case]
    file = copy / "nanochat" / f"{module}.py"
    file.write_text(file.read_text().replace(name, name.replace(name.strip(":").split()[-1], "other")))
    config.problem.path = str(copy)
    with pytest.raises(UserError) as raised:
        build_problem(config)
    assert words in str(raised.value)
    assert f"problem.path={copy}" in str(raised.value)
    assert "\n" not in str(raised.value)


def damage(base, what):
    tokenizer = base / "tokenizer"
    if what == "no tokenizer":
        shutil.rmtree(tokenizer)
    elif what == "another vocabulary":
        torch.save(torch.ones(7, dtype=torch.int32), tokenizer / "token_bytes.pt")
    elif what == "no bytes":
        (tokenizer / "token_bytes.pt").unlink()
    elif what == "one shard":
        for shard in sorted((base / "base_data").glob("*"))[1:]:
            shard.unlink()
    else:
        sorted((base / "base_data").glob("*"))[0].write_bytes(b"no parquet")


@pytest.mark.parametrize(("what", "words"), [
    ("no tokenizer", "tok_train"), ("another vocabulary", "7 entries, and the tokenizer has 320"),
    ("no bytes", "token_bytes.pt"), ("one shard", "1 parquet shard(s)"), ("no parquet", "cannot be read as parquet"),
])  # fmt: skip
def test_data_that_cannot_be_used_is_one_line(what, words, config, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(make_base(tmp_path / "base")))
    damage(tmp_path / "base", what)
    with pytest.raises(UserError) as raised:
        build_problem(config)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_checkout_is_one_line(config, tmp_path):
    config.problem.path = str(tmp_path)
    with pytest.raises(UserError, match=r"no nanochat/gpt\.py"):
        build_problem(config)


def test_a_worker_imports_only_the_checkout_that_its_user_names(config, nanochat, tmp_path):
    text = annotated(compose(["problem=nanochat_checkout", "problem.path=/of/the/server", "model.depth=2",
                              "model.sequence_len=64"], "train"))  # fmt: skip
    with pytest.raises(UserError, match="add target=PATH"):
        make_job(text, 0)
    servers = build_problem(config)
    assert make_job(text, 0, str(nanochat)).fingerprint == build_fingerprint(build_layout(config, servers), servers)
    other = shutil.copytree(nanochat, tmp_path / "other")
    with (other / "nanochat" / "gpt.py").open("a") as file:
        file.write("CAP = 20.0\n")
    assert make_job(text, 0, str(other)).fingerprint != make_job(text, 0, str(nanochat)).fingerprint


def chosen(*words):
    overrides = ["experiment=nanochat_depth", "problem.path=here", *words]
    return compose(overrides, "train"), recipe_of(compose(overrides, "train"), overrides)


def test_the_recipe_of_a_depth_has_nanochat_s_numbers():
    """The tokens and batches of nanochat's own table: depth 12 has 1.32 billion and 2^19, depth 20 5.22 and 2^20."""
    for depth, tokens, batch in ((12, 1.32e9, 1 << 19), (20, 5.22e9, 1 << 20)):
        one, _ = chosen(f"model.depth={depth}", "cluster.workers=1")
        gradient = one.problem.batch * 2048
        assert gradient == batch
        assert one.budget.updates * gradient == pytest.approx(tokens, rel=2e-3)
        assert one.method.eta == pytest.approx(0.02 * math.sqrt(batch / (1 << 19)), rel=1e-2)
        assert one.method.warmup * one.budget.updates == pytest.approx(40, rel=1e-2)


def test_the_recipe_follows_the_devices_and_what_the_user_gives(tmp_path):
    equal, _ = chosen("cluster.workers=4", "cluster.profile=similar")
    assert (equal.problem.batch, equal.cluster.batch, equal.method.threshold) == (64, None, 8)
    profile = tmp_path / "mine.json"
    profile.write_text(json.dumps({"devices": [{"seconds_mean": 1.0}, {"seconds_mean": 3.0}]}))
    unequal, reasons = chosen("cluster.workers=4", f"cluster.profile_file={profile}")
    assert (unequal.problem.batch, unequal.cluster.batch) == (128, "auto")  # 2.67 devices as fast as the fastest
    assert unequal.budget.updates * 128 * 2048 * (8 / 3) / 4 == pytest.approx(
        equal.budget.updates * 64 * 2048, rel=1e-3
    )
    assert all(choice.reason.endswith(".") for choice in reasons)
    given, reasons = chosen("cluster.workers=4", "problem.batch=16", "method.threshold=auto", "method.decay=0.1")
    assert (given.problem.batch, given.method.threshold, given.method.decay) == (16, "auto", 0.1)
    assert given.method.eta == equal.method.eta == 0.01  # the least
    decays = [one.geometry.weight_decay.matrix * one.method.eta / one.problem.batch for one in (given, equal)]
    assert decays[0] == pytest.approx(decays[1], rel=1e-2)  # a token has the same decay
    assert not {"problem.batch", "method.threshold", "method.decay"} & {choice.key for choice in reasons}
    waiting, reasons = chosen("cluster.workers=4", "method=synchronous", "cluster.batch=[8,4]")
    assert "threshold" not in waiting.method.keys()  # noqa: SIM118  (`in` skips missing values)
    assert waiting.problem.micro_batch is None
    assert "method.eta" in {choice.key for choice in reasons}
    assert chosen("cluster.workers=64", "problem.batch=64")[0].method.threshold == 64  # every worker is accepted
    assert chosen("cluster.workers=8", "problem.batch=256")[0].method.threshold == 8  # 16 would be too old


def test_the_radii_are_known_without_weights(config):
    parameters = build_problem(config).parameters
    for role, (least, most) in build_radii(config).items():
        radii = [p.radius for p in parameters if p.role == role]
        assert (least, most) == (min(radii), max(radii))
