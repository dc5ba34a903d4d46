"""The model, compared with finite differences, explicit masks and SPEC's listing; the tokenizer, the rows and
generation."""

import json
import math
import os
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout
from ringmaster_dist.cli.main import main
from ringmaster_dist.problems import Interrupted
from ringmaster_dist.problems.module import role_by_shape
from ringmaster_dist.problems.nanochat import NanoChat, NanoChatConfig
from ringmaster_dist.problems.nanochat import corpus as corpora
from ringmaster_dist.problems.nanochat.generate import Decoder, generate, reader_of_model
from ringmaster_dist.problems.nanochat.problem import NanoChatProblem
from ringmaster_dist.problems.nanochat.rows import Recipe, pack, prepare
from ringmaster_dist.problems.nanochat.tokenizer import BOS, SPECIALS, BytePairs
from ringmaster_dist.problems.ranks import gradient_in_turn

SMALL = NanoChatConfig(3, 2, 1, 32, 300, 16, "SL")


def expected_parameters(layers, width, heads, kv_heads, vocabulary):
    kv_width = width // heads * kv_heads
    shapes = {"transformer.wte.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width),
              "resid_lambdas": (layers,), "x0_lambdas": (layers,)}  # fmt: skip
    for i in range(layers):
        block = f"transformer.h.{i}"
        shapes[f"{block}.attn.c_q.weight"] = shapes[f"{block}.attn.c_proj.weight"] = (width, width)
        shapes[f"{block}.attn.c_k.weight"] = shapes[f"{block}.attn.c_v.weight"] = (kv_width, width)
        shapes[f"{block}.mlp.c_fc.weight"] = (4 * width, width)
        shapes[f"{block}.mlp.c_proj.weight"] = (width, 4 * width)
        if i % 2 == (layers - 1) % 2:
            shapes[f"{block}.attn.ve_gate.weight"] = (kv_heads, 32)
            shapes[f"value_embeds.{i}.weight"] = (vocabulary, kv_width)
    return shapes


def test_names_and_shapes_are_the_paper_s():
    model = NanoChat(NanoChatConfig())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == expected_parameters(6, 192, 3, 3, 8192)
    assert sum(p.numel() for p in model.parameters()) == 10_518_828
    matrices = [p.numel() for name, p in model.named_parameters() if role_by_shape(name, p) == "matrix"]
    assert sum(matrices) == 2_654_496
    small = {name: tuple(p.shape) for name, p in NanoChat(SMALL).named_parameters()}
    assert small == expected_parameters(3, 32, 2, 1, 300)


def disturbed(config, seed=0):
    """Returns a model without zero weights, so that every part has an effect."""
    torch.manual_seed(seed)
    model = NanoChat(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def reference(model, tokens):
    """The architecture written a second time, position by position where it matters, with explicit masks."""
    config, p = model.config, dict(model.named_parameters())
    norm = lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)  # noqa: E731
    time, half = tokens.shape[1], config.head_dim // 2
    angles = torch.arange(time).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)[None, :]
    cos, sin = angles.cos().float().double(), angles.sin().float().double()

    def turned(x):  # (batch, time, heads, head_dim)
        a, b = x[..., :half], x[..., half:]
        c, s = cos[None, :, None, :], sin[None, :, None, :]
        return norm(torch.cat([a * c + b * s, -a * s + b * c], -1))

    x = x0 = norm(p["transformer.wte.weight"][tokens])
    for i in range(config.n_layer):
        name = f"transformer.h.{i}"
        x = p["resid_lambdas"][i] * x + p["x0_lambdas"][i] * x0
        y = norm(x)
        heads = lambda w, n: (y @ p[f"{name}.attn.{w}.weight"].T).unflatten(-1, (n, config.head_dim))  # noqa: B023, E731
        q, k, v = heads("c_q", config.n_head), heads("c_k", config.n_kv_head), heads("c_v", config.n_kv_head)
        if f"value_embeds.{i}.weight" in p:
            gate = 2 * torch.sigmoid(y[..., :32] @ p[f"{name}.attn.ve_gate.weight"].T)
            v = v + gate[..., None] * p[f"value_embeds.{i}.weight"][tokens].unflatten(-1, (config.n_kv_head, -1))
        q, k = turned(q), turned(k)
        last = i == config.n_layer - 1
        full = last or config.window_pattern[i % len(config.window_pattern)] == "L"
        window = config.sequence_len if full else config.sequence_len // 2
        out = torch.zeros_like(q)
        for head in range(config.n_head):
            kv = head // (config.n_head // config.n_kv_head)
            for t in range(time):
                seen = range(max(0, t - window + 1), t + 1)
                scores = torch.stack([(q[:, t, head] * k[:, s, kv]).sum(-1) for s in seen], -1)
                weights = torch.softmax(scores / math.sqrt(config.head_dim), -1)
                out[:, t, head] = sum(weights[:, j, None] * v[:, s, kv] for j, s in enumerate(seen))
        x = x + out.flatten(2) @ p[f"{name}.attn.c_proj.weight"].T
        y = norm(x)
        x = x + torch.relu(y @ p[f"{name}.mlp.c_fc.weight"].T) ** 2 @ p[f"{name}.mlp.c_proj.weight"].T
    logits = norm(x) @ p["lm_head.weight"].T
    return 15 * torch.tanh(logits / 15)


@pytest.mark.parametrize(
    "config", [SMALL, NanoChatConfig(2, 4, 2, 64, 270, 12, "S"), NanoChatConfig(1, 1, 1, 32, 260, 5, "L")]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # which is for GPUs
@pytest.mark.parametrize("flex", [False, True])
def test_the_model_is_the_architecture(config, flex):
    model = disturbed(config)
    model.flex = flex
    tokens = torch.randint(0, config.vocab_size, (2, config.sequence_len))
    with torch.no_grad():  # flex attention computes no gradients on a CPU
        torch.testing.assert_close(model(tokens), reference(model, tokens), rtol=1e-6, atol=1e-6)


def test_gradients_agree_with_finite_differences():
    model = disturbed(SMALL)
    tokens = torch.randint(0, 300, (2, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 3] = -1  # one that does not count
    model(inputs, targets).backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        slope = float((parameter.grad * direction).sum())
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 1e-5)
                values.append(float(model(inputs, targets)))
                parameter.add_(direction, alpha=-sign * 1e-5)
        assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5, abs=1e-8), name
        assert abs(slope) > 1e-7, f"{name} has no influence"


def test_the_first_loss_is_that_of_random_guessing():
    torch.manual_seed(0)
    model = NanoChat(NanoChatConfig(2, 2, 2, 64, 1024, 32, "SL"))
    tokens = torch.randint(0, 1024, (4, 33))
    assert float(model(tokens[:, :-1], tokens[:, 1:]).detach()) == pytest.approx(math.log(1024), abs=0.02)


@pytest.mark.parametrize(
    "values",
    [(2, 3, 2, 48, 300, 8, "S"), (2, 2, 2, 33, 300, 8, "S"), (2, 1, 1, 16, 300, 8, "S"), (2, 2, 2, 32, 300, 8, "X")],
)
def test_impossible_models_are_refused(values):
    with pytest.raises(ValueError, match=r"n_embd|window_pattern|n_head"):
        NanoChatConfig(*values)


@pytest.mark.parametrize("pieces", [[16], [1] * 16, [5, 1, 6, 1, 3]])
@pytest.mark.parametrize("config", [SMALL, NanoChatConfig(3, 4, 2, 64, 300, 16, "SL")])
def test_the_decoder_gives_the_model_s_logits(config, pieces):
    """This holds token by token and for several tokens at once, also with fewer keys than queries."""
    model = disturbed(config).float()
    tokens = torch.randint(0, 300, (16,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(tokens[None])[0]
        decoder, seen = Decoder(model), 0
        for count in pieces:
            logits = decoder(tokens[seen : seen + count].tolist())
            seen += count
            torch.testing.assert_close(logits, expected[seen - 1], rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="context of 16"):
            decoder([0])


@pytest.mark.parametrize("prompt", [1, 5, 13])
def test_the_kv_cache_changes_no_logits(prompt):
    """This holds also if the window is shorter than the cache."""
    model = disturbed(SMALL).float()
    tokens = torch.randint(0, 300, (prompt,), generator=torch.Generator().manual_seed(2)).tolist()
    quick, slow = (
        list(generate(reader_of_model(model, cached=cached), tokens, 40, temperature=0.0)) for cached in (True, False)
    )
    assert quick == slow
    assert len(quick) == 40  # the context of 16 has slid over them
    again = tokens + quick  # at the end the newer half was read again, each time that the context was full
    seen = (len(again) - 1) - 17
    with torch.inference_mode():
        expected = model(torch.tensor([again[:-1][-(8 + seen % 9) :]]))[0, -1]
    assert again[-1] == int(expected.argmax())

    def drawn(seed):
        return list(generate(reader_of_model(model), tokens, 3, temperature=1.0, top_k=9, seed=seed))

    assert len({tuple(drawn(seed)) for seed in range(8)}) > 1
    assert drawn(0) == drawn(0)


TEXTS = [f"def function_{i}(value):\n    return value + {i} * {i * 7919 % 1000}\n" for i in range(400)]


@pytest.fixture(scope="module")
def tokenizer():
    return BytePairs.train(TEXTS, 320)


@settings(max_examples=300)
@given(st.text())
def test_any_text_survives_encoding_and_decoding(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert not set(tokens) & set(range(len(SPECIALS)))
    assert sum(tokenizer.token_bytes()[tokens]) == len(text.encode())


def test_the_tokenizer_is_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    again = BytePairs.load(tmp_path / "tokenizer.json")
    text = "def héllo <|reserved_0|> 12345 \U0001f600"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.vocab_size == 320
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    assert all(len(tokenizer.decode([t]).strip()) <= 2 for t in tokenizer.encode("1234567") if t > BOS)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), max_size=80), st.integers(2, 12))
def test_packed_rows_are_full_and_hold_each_document_once(sizes, length):
    documents = [np.full(size, i, dtype=np.uint16) for i, size in enumerate(sizes)]
    rows = list(pack(documents, length))
    assert all(len(row) == length for row in rows)
    assert len(rows) <= sum(sizes) // length
    for i, size in enumerate(sizes):
        pieces = [np.flatnonzero(row == i) for row in rows if (row == i).any()]
        assert len(pieces) <= 1  # a document is in one row, whole or cropped
        if pieces:
            assert len(pieces[0]) <= size
            assert (np.diff(pieces[0]) == 1).all()


def test_best_fit_takes_the_longest_that_fits():
    documents = [np.full(n, n, dtype=np.uint16) for n in (3, 5, 4, 2, 6)]
    rows = [row.tolist() for row in pack(documents, 8)]
    assert rows == [[6] * 6 + [2] * 2, [5] * 5 + [3] * 3]


def write_corpus(folder, count=60):
    for i in range(count):
        (folder / f"{i}.txt").write_text("".join(TEXTS[(i * 7 + j) % 400] for j in range(20)))
    return folder


def test_rows_are_prepared_once_and_equal_everywhere(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    sources = corpora.text_files(write_corpus(folder))
    assert 0 < sum(s.validation for s in sources) < len(sources) / 2
    rows = prepare(Recipe(sources, 16, tmp_path / "one", vocab_size=300))
    stamp = (rows.folder / "train.bin").stat().st_mtime_ns
    again = prepare(Recipe(sources, 16, tmp_path / "one", vocab_size=300))
    assert (again.folder / "train.bin").stat().st_mtime_ns == stamp
    elsewhere = prepare(Recipe(sources, 16, tmp_path / "two", vocab_size=300))
    assert elsewhere.fingerprint == rows.fingerprint
    assert (elsewhere.train == rows.train).all()
    (folder / "0.txt").write_text("something else entirely, and long enough to matter\n" * 40)
    changed = prepare(Recipe(corpora.text_files(folder), 16, tmp_path / "one", vocab_size=300))
    assert changed.fingerprint != rows.fingerprint
    sample = rows.sample(3, 5, 7, 4)
    assert sample.shape == (4, 17)
    assert (sample == elsewhere.sample(3, 5, 7, 4)).all()
    draws = [rows.sample(3, worker, sequence, 4).tobytes() for worker in range(5) for sequence in range(5)]
    draws.append(rows.sample(3, 0, 7, 4, 4).tobytes())
    assert len(set(draws)) == 26
    assert set(rows.sample(0, 0, 0, 4000)[:, 0].tolist()) <= set(range(300))


def test_a_start_trusts_size_and_date_and_a_verification_does_not(tmp_path, capsys):
    (folder := tmp_path / "corpus").mkdir()
    write_corpus(folder)
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    words = ["data=text", f"data.path={folder}", f"data.cache={tmp_path}/cache", "model.vocab_size=300",
             "model.sequence_len=16"]  # fmt: skip
    assert main(["data", "verify", *words]) == 1
    assert "no rows are prepared" in capsys.readouterr().out
    assert main(["data", "prepare", *words]) == main(["data", "verify", *words]) == 0
    first = capsys.readouterr().out.partition(":")[0]
    path = sorted(folder.iterdir())[0]
    path.write_text(path.read_text().replace("value", "eulav"))
    os.utime(path, (1e9, 1e9))
    assert main(["data", "prepare", *words]) == 0
    assert capsys.readouterr().out.partition(":")[0] == first  # nobody has read the file
    assert main(["data", "verify", *words]) == 1
    assert f"{path} has changed" in capsys.readouterr().out
    assert main(["data", "prepare", *words]) == 0
    second = capsys.readouterr().out.partition(":")[0]
    assert second != first  # the verification has entered the new checksum
    os.utime(path)
    path.write_text(path.read_text().replace("eulav", "value"))
    assert main(["data", "prepare", *words]) == 0
    assert capsys.readouterr().out.partition(":")[0] == first  # the date has told
    with (Path(first) / "train.bin").open("r+b") as rows:
        rows.seek(40)
        rows.write(b"\0\1")
    assert main(["data", "verify", *words]) == 1
    assert "are damaged" in capsys.readouterr().out


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["a", "é", "東", "\n", "\r", "\r\n", "\x0b", "\u2028", "\x85", " "]), max_size=40))
def test_a_file_is_read_in_blocks_as_if_at_once(tmp_path_factory, pieces):
    text = "".join(pieces)
    path = tmp_path_factory.mktemp("blocks") / "text.txt"
    path.write_bytes(text.encode())
    with mock.patch.object(corpora, "_CHUNK_BYTES", 3):
        assert list(corpora._lines(path)) == text.splitlines(keepends=True)


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_large_file_is_streamed(kind, tmp_path):
    path = tmp_path / f"large.{kind}"
    line = "".join(TEXTS) if kind == "txt" else json.dumps({"text": TEXTS[0]}) + "\n"
    path.write_text(line * (8_000_000 // len(line)))
    tracemalloc.start()
    count = sum(len(text) for text in corpora.documents(corpora.Source(path, path.name, False)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count > 5_000_000
    assert peak < path.stat().st_size


def test_a_single_file_validates_on_every_twentieth_document(tmp_path):
    def write(name, texts):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return tmp_path / name

    whole = corpora.text_files(write("whole.jsonl", TEXTS))
    parts = [
        corpora.Source(write("train.jsonl", [text for i, text in enumerate(TEXTS) if i % 20]), "train", False),
        corpora.Source(write("validation.jsonl", TEXTS[::20]), "validation", True),
    ]
    one, other = (prepare(Recipe(sources, 16, tmp_path / "cache", vocab_size=300)) for sources in (whole, parts))
    assert one.folder != other.folder
    assert one.fingerprint == other.fingerprint


def test_an_interrupted_preparation_is_never_used(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    sources = corpora.text_files(write_corpus(folder))

    def interrupted(fraction, text):
        if "validation" in text:  # the training rows are written
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(Recipe(sources, 16, tmp_path / "cache", vocab_size=300), progress=interrupted)
    assert list((tmp_path / "cache").iterdir()) == []
    assert len(prepare(Recipe(sources, 16, tmp_path / "cache", vocab_size=300)).train) > 0


def test_every_kind_of_file_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_text('{"text": "first"}\n\n{"text": "sec\u2028ond"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["third", "fourth"], "n": [1, 2]}), tmp_path / "c.parquet")
    (tmp_path / "ignored.bin").write_bytes(b"\xff\xfe")
    texts = [text for source in corpora.text_files(tmp_path) for text in corpora.documents(source)]
    assert texts == ["plain", "first", "sec\u2028ond", "third", "fourth"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "empty"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.txt", b"short", "supports a vocabulary of"),
        ("a.jsonl", b'{"text": "1"}\n{"txt": 2}', "line 2"),
        ("a.jsonl", b'{"text": null}', "line 1"),
        ("a.parquet", b"PAR1 not really", "cannot be read as parquet"),
        ("a.bin", b"x", "known kinds"),
    ],
)
def test_an_unusable_corpus_is_reported(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content.replace(b'{"text": 1}', b'{"text": "fine"}'))
    with pytest.raises(corpora.CorpusError, match=message):
        prepare(Recipe(corpora.text_files(tmp_path / name), 16, tmp_path / "cache", vocab_size=300))


def test_a_corpus_smaller_than_a_row_is_reported(tmp_path):
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    with pytest.raises(corpora.CorpusError, match="too small"):
        prepare(Recipe(corpora.text_files(tmp_path), 60_000, tmp_path / "cache", vocab_size=300))


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rows = prepare(Recipe(corpora.text_files(write_corpus(folder)), 16, folder / "cache", vocab_size=300))
    problem = NanoChatProblem(SMALL, rows, batch=4, micro_batch=None, validation_rows=8)
    problem.bind(Layout(problem.parameters, GEOMETRY_MAPS["muon"]))
    return problem


def made(problem, **settings):
    """Makes another problem on the same rows."""
    other = NanoChatProblem(SMALL, problem.rows, **{"batch": 4, **settings})
    other.bind(Layout(other.parameters, GEOMETRY_MAPS["muon"]))
    return other


def test_the_gradient_is_the_module_s_own(problem):
    iterate = problem.initial(0)
    gradient, loss = problem.gradient(iterate, 1, 2, 3)
    gradient = gradient.clone()
    torch.manual_seed(0)
    plain = NanoChat(SMALL)
    tokens = torch.from_numpy(problem.rows.sample(1, 2, 3, 4).astype(np.int64))
    expected = plain(tokens[:, :-1], tokens[:, 1:])
    expected.backward()
    assert loss == float(expected.detach())
    layout = Layout(problem.parameters, GEOMETRY_MAPS["muon"])
    for name, view in layout.views(gradient).items():
        assert torch.equal(view, plain.get_parameter(name).grad), name
    again, _ = problem.gradient(iterate, 1, 2, 3)
    assert torch.equal(again, gradient)


def test_a_group_has_the_gradient_of_one_worker_with_all_its_rows(problem):
    iterate = problem.initial(0)
    whole, loss = made(problem, batch=6).gradient(iterate, 1, 2, 3)
    shared, its_loss = gradient_in_turn(made(problem, batch=2), 3, iterate, 1, 2, 3)
    assert torch.allclose(shared, whole, atol=1e-6)
    assert its_loss == pytest.approx(loss)


@pytest.mark.parametrize(("rows", "micro_batch"), [(None, 1), (3, 2), (7, 3)])
def test_micro_batches_give_the_same_gradient(problem, rows, micro_batch):
    """The last micro-batch may have fewer rows, and each row has the same weight."""
    halves = made(problem, micro_batch=micro_batch)
    iterate = problem.initial(0)
    whole, loss = problem.gradient(iterate, 0, 0, 0, rows=rows)
    parts, mean = halves.gradient(iterate, 0, 0, 0, rows=rows)
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-6)
    assert mean == pytest.approx(loss, rel=1e-5)


def test_half_precision_scales_its_loss_until_the_gradient_is_finite(problem):
    """The scale does not depend on earlier gradients."""
    half = made(problem, precision="float16")
    exact, _ = problem.gradient(problem.initial(0), 0, 1, 2)
    exact = exact.clone()
    first, loss = half.gradient(problem.initial(0), 0, 1, 2)
    first = first.clone()
    assert math.isfinite(loss)
    assert float((first - exact).norm() / exact.norm()) < 0.02
    tried = []
    accumulate = half._accumulate
    half._accumulate = lambda batches, scale: (tried.append(scale), accumulate(batches, scale))[1]
    steep = problem.initial(0)  # its gradients, scaled as at first, are beyond what fp16 holds
    Layout(problem.parameters, GEOMETRY_MAPS["muon"]).views(steep)["lm_head.weight"].mul_(1e4)
    finite, _ = half.gradient(steep, 0, 1, 2)
    assert bool(finite.isfinite().all())
    assert len(tried) > 1
    tried.clear()
    again, _ = half.gradient(problem.initial(0), 0, 1, 2)
    assert torch.equal(again, first)


def test_a_gradient_is_clipped_to_its_length(problem):
    exact, _ = problem.gradient(problem.initial(0), 0, 1, 2)
    limit = float(exact.norm()) / 3
    clipped, _ = made(problem, clip=limit).gradient(problem.initial(0), 0, 1, 2)
    torch.testing.assert_close(clipped, exact / 3, rtol=1e-4, atol=1e-7)
    as_it_was, _ = made(problem, clip=100.0).gradient(problem.initial(0), 0, 1, 2)
    assert torch.equal(as_it_was, problem.gradient(problem.initial(0), 0, 1, 2)[0])


def test_each_row_counts_the_same(problem):
    """Half the rows give half the gradient, so workers with few rows have less weight."""
    few, plain = made(problem, batch=2, weight=0.5), made(problem, batch=2)
    iterate = problem.initial(0)
    weighted, loss = few.gradient(iterate, 0, 0, 0)
    expected, same_loss = plain.gradient(iterate, 0, 0, 0)
    assert torch.equal(weighted, 0.5 * expected)
    assert loss == same_loss


def test_a_gradient_is_interrupted_between_layers_forward_and_backward(problem):
    """`stop` is called after each block, forward and backward. If the n-th answer is True, the gradient ends there."""
    iterate, asked = problem.initial(0), []
    problem.gradient(iterate, 0, 0, 0, lambda: bool(asked.append(1)))
    times = len(asked)
    assert times == 1 + 2 * SMALL.n_layer
    for last in range(1, times + 1):
        count = iter(range(1, times + 1))
        with pytest.raises(Interrupted):
            problem.gradient(iterate, 0, 0, 0, lambda count=count, last=last: next(count) == last)
    after, _ = problem.gradient(iterate, 1, 2, 3)
    kept = after.clone()
    assert torch.equal(problem.gradient(iterate, 1, 2, 3)[0], kept)


def test_bits_per_byte_counts_bytes_of_what_is_not_special(problem):
    found = problem.evaluate(problem.initial(0))
    assert found["loss"] == pytest.approx(math.log(300), abs=0.05)
    chosen = [i * len(problem.rows.validation) // 8 for i in range(8)]  # spread over all of them
    assert chosen[-1] > 8
    targets = problem.rows.validation[chosen, 1:]
    counted = targets[targets >= len(SPECIALS)]
    num_bytes = problem.rows.token_bytes[counted].sum()
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * counted.size / (math.log(2) * num_bytes))


def test_the_closing_evaluation_looks_at_the_whole_part_or_at_rows_spread_over_it(problem):
    whole, context = len(problem.rows.validation), SMALL.sequence_len
    thorough = made(problem, validation_rows=2)
    assert thorough.evaluated_on(at_the_end=True) == f"all {whole} validation rows"
    assert thorough.evaluated_on(at_the_end=False) == f"2 of {whole} validation rows"
    iterate = problem.initial(0)
    everything = made(problem, validation_rows=whole).evaluate(iterate)
    assert thorough.evaluate_at_the_end(iterate) == everything
    assert thorough.evaluate(iterate) != everything
    some = made(problem, validation_rows=2, final_tokens=5 * context)
    assert some.evaluated_on(at_the_end=True) == f"5 of {whole} validation rows"
    assert some.evaluate_at_the_end(iterate) == made(problem, validation_rows=5).evaluate(iterate)
