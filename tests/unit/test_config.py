"""Configuration: every choice composes, and every mistake is reported in one line."""

import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import ringmaster_dist
from ringmaster_dist.algorithm.geometry import COEFFICIENTS, ORTHOGONALIZATIONS
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, ROLES
from ringmaster_dist.algorithm.methods import DelayAdaptive, Method, Rennala, Synchronous
from ringmaster_dist.algorithm.schedules import Constant, Ramped
from ringmaster_dist.config import sizes
from ringmaster_dist.config.build import build_core, build_method, build_model_config, build_problem
from ringmaster_dist.config.compose import (
    begun_from,
    compose,
    config_dir,
    continued,
    expand,
    from_yaml,
    groups,
    load,
    to_typed,
)
from ringmaster_dist.config.describe import annotated
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.schema import KEYS, Config
from ringmaster_dist.config.sizes import refuse_too_many_processes
from ringmaster_dist.problems.quadratic import Quadratic

CHOICES = [f"{group}={option}" for group, options in groups().items() for option in options]


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if not choice.startswith(("model=", "data="))])
def test_every_choice_composes_and_builds(choice, nanochat):
    of_depth = [f"problem.path={nanochat}", "model.depth=2", "model.sequence_len=64"]
    needed = {"problem=python": ["problem.target=tests.unit.test_config:own", "problem.args.dim=7"],
              "problem=nanochat_checkout": of_depth,
              "experiment=nanochat_depth": [*of_depth, "cluster.profile=linear"]}  # fmt: skip
    config = load([choice, *needed.get(choice, [])])
    core = build_core(config, build_problem(config))
    sizes = {"nanochat": 458_888, "nanochat_checkout": 516_138, "python": 7, "quadratic": 1729}
    assert core.update.layout.size == sizes[config.problem.name]


def own(seed, device, dim):
    """Returns a problem, as the factory of a user does."""
    return Quadratic(dim)


@pytest.mark.parametrize("model", groups()["model"])
def test_every_model_can_be_made(model):
    built = build_model_config(load(["problem=nanochat", f"model={model}"]))
    assert built.n_layer in (1, 4, 6, 12)


@pytest.mark.parametrize("data", groups()["data"])
def test_every_corpus_composes(data):
    path = ["data.path=my.txt"] if data == "text" else []
    assert load(["problem=nanochat", f"data={data}", *path]).data.name == data


def test_the_groups_agree_with_the_names_in_the_code():
    known = groups()
    for group in ("problem", "data", "method", "logger"):
        assert set(known[group]) == set(KEYS[f"{group}.name"].one_of)
    assert set(known["geometry"]) == set(GEOMETRY_MAPS)
    assert set(ORTHOGONALIZATIONS) == {*COEFFICIENTS, "exact"}
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in KEYS["wire.gradient_dtype"].one_of)
    for name in known["geometry"]:
        geometry = load([f"geometry={name}"]).geometry
        assert {role: getattr(geometry, role) for role in ROLES} == GEOMETRY_MAPS[name]
    choices = {choice for group in known.values() for choice in group}
    for key, declared in KEYS.items():  # a key that no choice has could never be set
        assert set(declared.only) <= choices or key in ("method.warmup_updates", "method.decay_updates"), key


def test_every_key_has_a_sentence_and_a_default_in_its_range():
    defaults = OmegaConf.structured(Config)
    for key, declared in KEYS.items():
        value = None if OmegaConf.is_missing(defaults, key) else OmegaConf.select(defaults, key)
        assert declared.permits(OmegaConf.to_object(value) if OmegaConf.is_list(value) else value), key
        if "." in key and not OmegaConf.is_dict(value):
            assert declared.sentence.endswith("."), key


@pytest.mark.parametrize("path", sorted(config_dir().rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_file_comments_every_key_and_repeats_no_default(path):
    """What a file says differs from the schema, or from what the file for real runs says."""
    assert [line for line in path.read_text().splitlines() if re.match(r" *\w+: +[^ #][^#]*$", line)] == []
    group = "" if path.parent.name in ("experiment", "configs") else path.parent.name
    defaults = OmegaConf.to_container(OmegaConf.structured(Config))
    train = OmegaConf.load(config_dir() / "train.yaml")
    written = OmegaConf.to_container(OmegaConf.load(path))
    written.pop("defaults", None)
    for key, value in flat({group: written} if group else written).items():
        differs = value != OmegaConf.select(OmegaConf.create(defaults), key) or OmegaConf.select(train, key) is not None
        assert differs or key == f"{group}.name", f"{key} is the default"


def test_no_module_repeats_a_default_of_the_server():
    """A second value would hide that the configuration was not passed on. Zero is the value of a count at its start."""
    names = "|".join(name.partition(".")[2] for name in KEYS if re.match(r"server\.(\w+_seconds|max_invalid)$", name))
    for path in Path(ringmaster_dist.__file__).parent.rglob("*.py"):
        if path.parent.name != "config":
            assert re.findall(rf"\b(?:{names}): \w+ = (?!0\.0\b)[\d.]+", path.read_text()) == [], path


def flat(tree, prefix=""):
    leaves = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def test_printed_configuration_loads_back():
    import yaml

    overrides = ["method=rennala", "cluster.phases=[{start_seconds: 3, rate: 0, workers: [1]}]"]
    composed = compose(overrides)
    text = annotated(composed)
    assert yaml.safe_load(text)["cluster"]["phases"] == [{"start_seconds": 3, "rate": 0, "workers": [1]}]
    assert "# B: an update is the mean of this many gradients. [at least 1]" in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["problem=python"], ["problem.target", "package.module:factory"]),
        (["problem=nanochat", "model.n_embd=30"], ["model.n_embd=30", "at least 32"]),
        (["problem=nanochat", "model.n_head=5"], ["model.n_embd=64", "model.n_head=5"]),
        (["problem=nanochat", "model.vocab_size=100"], ["model.vocab_size=100", "260"]),
        (["problem=nanochat", "model.window_pattern=XL"], ["model.window_pattern=XL"]),
        (["problem=nanochat", "data=text"], ["data.path"]),
        (["model=nanochat_d6"], ["model=nanochat_d6 has no effect with problem=quadratic: add problem=nanochat"]),
        (["model=nanochat_depth", "model.depth=4"], ["model=nanochat_depth has no effect with problem=quadratic"]),
        (["model.n_layer=2"], ["model.n_layer=2 has no effect with problem=quadratic: add problem=nanochat"]),
        (["data=climbmix"], ["data=climbmix has no effect with problem=quadratic: add problem=nanochat"]),
        (["problem=python", "problem.target=a:b", "data=text"], ["data=text has no effect with problem=python"]),
        (["problem=nanochat_checkout"], ["problem.path", "folder"]),
        (["problem=nanochat_checkout", "problem.path=a", "model=nanochat_d6"], ["model=nanochat_d6", "nanochat_depth"]),
        (["problem=nanochat_checkout", "problem.path=a", "data.path=b"], ["data.path"]),
        (["problem=nanochat", "problem.micro_batch=3"], ["problem.micro_batch=3", "problem.batch=4"]),
        (["cluster.batch=[2]"], ["cluster.batch=[2]", "nanochat"]),
        (["cluster.batch=auto"], ["cluster.batch=auto", "problem=nanochat"]),
        (["problem=nanochat", "cluster.batch=often"], ["cluster.batch=often", "auto"]),
        (["problem=nanochat", "cluster.batch=8"], ["cluster.batch=8", "[8, 4]"]),
        (["problem=nanochat", "cluster.batch=[8,2.5]"], ["cluster.batch=[8, 2.5]", "whole numbers"]),
        (["problem=nanochat", "cluster.batch=auto", "cluster.batch_min=5"], ["cluster.batch_min=5", "at most", "4"]),
        (["problem=nanochat", "cluster.batch=auto", "cluster.batch_max=3"], ["cluster.batch_max=3", "at least", "4"]),
        (["method.threshold=often"], ["method.threshold=often", "auto"]),
        (["cluster.profile=file"], ["cluster.profile_file"]),
        (["cluster.profile=file", "cluster.times=[1.0,0]"], ["cluster.times=[1.0, 0.0]", "above 0"]),
        (["cluster.profile=file", "cluster.profile_file=/nowhere"], ["cluster.profile_file=/nowhere"]),
        (["problem=nanochat", "data=climbmix", "data.shards=0"], ["data.shards=0", "6542"]),
        (["problem=nanochat", "model=gpt5"], ["model=gpt5", "nanochat_tiny"]),
        (["method.etaa=1"], ["method.etaa", "did you mean method.eta?"]),
        (["method=ringmster"], ["method=ringmster", "did you mean ringmaster?", "rennala"]),
        (["method=rennala", "method.threshold=3"], ["method.threshold", "method=rennala", "batch"]),
        (["clutser.workers=3"], ["clutser.workers", "did you mean cluster.workers?"]),
        (["method.eta=-1"], ["method.eta=-1", "above 0"]),
        (["method.eta=nan"], ["method.eta=nan"]),
        (["method.eta=fast"], ["method.eta", "fast"]),
        (["method.threshold=0"], ["method.threshold=0", "at least 1"]),
        (["method.threshold=2.5"], ["method.threshold", "2.5"]),
        (["method.beta=1"], ["method.beta=1", "below 1"]),
        (["method=rennala", "method.batch=0"], ["method.batch=0", "at least 1"]),
        (["method=rennala", "method.batch=64001"], ["method.batch=64001", "at most 64000"]),
        (["method=rennala", "method.batch=50", "budget.seconds=5"], ["method.batch=50", "10 gradients"]),
        (["cluster.workers=0"], ["cluster.workers=0", "a whole number of at least 1", "compute gradients"]),
        (["cluster.workers=many"], ["cluster.workers=many", "a whole number"]),
        (["run.trace=maybe"], ["run.trace=maybe", "true or false"]),
        (["method.nesterov=null"], ["method.nesterov=null", "true or false"]),
        (["server.port=1"], ["server.port", "only ringmaster train"]),
        (["+method.batch=3"], ["method.batch", "method=ringmaster"]),
        (["+foo=1"], ["foo", "no such key"]),
        (["+method.eta=1"], ["+method.eta=1", "write method.eta=1"]),
        (["++method.etta=1"], ["method.etta", "did you mean method.eta?"]),
        (["+experiment=nanochat_local"], ["write experiment=nanochat_local"]),
        (["experiment=nanochat_locl"], ["did you mean nanochat_local?", "paper_quadratic"]),
        (["experiment=null"], ["experiment=null", "nanochat_local"]),
        (["method=null"], ["method=null", "rennala"]),
        (["~method"], ["~method", "method=NAME", "rennala"]),
        (["~problem.dim"], ["~problem.dim", "cannot be removed"]),
        (["hydra.run.dir=/tmp/x"], ["hydra.run.dir=/tmp/x", "run.dir=DIR"]),
        (["hydra/job_logging=none"], ["hydra/job_logging=none"]),
        (["method.eta=0.1,0.2"], ["method.eta=0.1,0.2", "-m"]),
        (["method=ringmaster,rennala"], ["method=ringmaster,rennala", "-m"]),
        (["cluster.workers=100000000000"], ["cluster.workers=100000000000", "TB of memory", "at most"]),
        (["budget.seconds=${no.such}"], ["budget.seconds", "no.such"]),
        (["cluster.profile=none"], ["cluster.profile=none", "linear"]),
        (["cluster.jitter=-0.1"], ["cluster.jitter=-0.1"]),
        (["cluster.unit_seconds=0"], ["cluster.unit_seconds=0"]),
        (["cluster.phases=[{start_seconds: 1, rate: -1}]"], ["cluster.phases[0].rate=-1"]),
        (["cluster.phases=[{start_seconds: 1, workers: [64]}]"], ["64", "0 to 63"]),
        (["cluster.phases=[{rate: 1}, {start: 1}]"], ["cluster.phases[1].start: there is no such key; known: start_s"]),
        (["cluster.phases=${no.such}"], ["cluster.phases", "no.such"]),
        (["cluster.phases=[{start_seconds: x}]"], ["cluster.phases[0].start_seconds=x: must be a number"]),
        (["cluster.phases=[{workers: [0, a]}]"], ["cluster.phases[0].workers=", "must be a list of whole numbers"]),
        (["cluster.phases=[{rate: ${no.such}}]"], ["cluster.phases[0].rate", "no.such"]),
        (["run.dir='a"], ["run.dir='a: a quote or a bracket is not closed", "write \"run.dir='...'\""]),
        (["run.dir=[a"], ["run.dir=[a: a quote or a bracket is not closed"]),
        (["run.dir=a=b"], ["run.dir=a=b: ", "a character needs quotes"]),
        (["budget.seconds=null"], ["budget.updates", "never end"]),
        (["budget.updates=0"], ["budget.updates=0"]),
        (["budget.updates=1e-3"], ["budget.updates=0.001", "a whole number"]),
        (["problem.dim=0"], ["problem.dim=0"]),
        (["problem.noise=-1"], ["problem.noise=-1"]),
        (["geometry.matrix=nuclear"], ["geometry.matrix=nuclear", "spectral"]),
        (["geometry.orthogonalization=qr"], ["qr", "polar_express"]),
        (["cluster.times=[1,2]"], ["cluster.profile=file"]),
        (["geometry.precision=float16"], ["geometry.precision", "bfloat16"]),
        (["method.decay_updates=5"], ["method.decay_updates=5", "method.decay", "fraction"]),
        (["method.warmup_updates=5"], ["method.warmup_updates=5", "method.warmup", "fraction"]),
        (["method.decay=0.5"], ["method.decay=0.5", "budget.updates"]),
        (["method.decay=1.5", "budget.updates=9"], ["method.decay=1.5", "between 0 and 1"]),
        (["method.decay=0.8", "method.warmup=0.3", "budget.updates=9"], ["method.decay=0.8", "method.warmup=0.3"]),
        (["geometry.radius.output=0"], ["geometry.radius.output=0", "above 0"]),
        (["geometry.radius=2"], ["geometry.radius has keys of its own", "geometry.radius.matrix"]),
        (["geometry.radius.outputs=1"], ["geometry.radius.outputs", "output"]),
        (["geometry.weight_decay.scalar=-1"], ["geometry.weight_decay.scalar=-1"]),
        (["problem.clip=0"], ["problem.clip=0"]),
        (["problem=nanochat", "problem.final_tokens=0"], ["problem.final_tokens=0"]),
        (["method.schedule=theory"], ["theory", "budget.updates"]),
        (["method.schedule=theory", "budget.updates=9"], ["method.constants.smoothness"]),
        (["method=ringmaster_agnostic", "method.smoothness=known"], ["method.l1"]),
        (["simulation.engine=gpu"], ["simulation.engine=gpu", "compiled"]),
        (["run.seed=-1"], ["run.seed=-1"]),
        (["logger=tensorboard"], ["logger=tensorboard", "wandb_offline"]),
        (["logger=wandb", "logger.init_seconds=0"], ["logger.init_seconds=0"]),
        (["logger=none", "logger.project=x"], ["logger.project"]),
        (["nonsense"], ["nonsense", "key=value"]),
        (["=3"], ["'=3'", "key=value"]),
        (["method.eta="], ["method.eta"]),
    ],
)  # fmt: skip
def test_mistakes_are_reported_in_one_line(overrides, words):
    with pytest.raises(UserError) as error:
        load(overrides)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_whole_number_may_be_written_with_an_exponent(tmp_path):
    config = load(["budget.updates=1e3", "method.threshold=2.0", "run.seed=12345678901234567891"])
    assert (config.budget.updates, config.method.threshold) == (1000, 2)
    assert config.run.seed == 12345678901234567891  # which a float would round
    (tmp_path / "config.yaml").write_text(annotated(compose([], "train")) + "\n")
    assert continued(tmp_path, ["budget.updates=1e3"]).budget.updates == 1000
    assert expand(["budget.updates=1e3"]) == [["budget.updates=1000"]]


def test_a_word_that_hydra_cannot_read_is_named():
    with pytest.raises(UserError, match=re.escape("run.tag='b: a quote or a bracket is not closed")):
        expand(["method.eta=1,2", "problem.path=~/nanochat", "run.tag='b"])


def test_more_workers_than_the_memory_holds_are_refused():
    config = to_typed(compose(["cluster.workers=1000000"], "train"), real_time=True)
    with pytest.raises(UserError, match=r"cluster.workers=1000000: so many processes .* 60 TB .* at most [0-9]+, or"):
        refuse_too_many_processes(config)
    config.cluster.local_workers = 1  # the others come from elsewhere
    refuse_too_many_processes(config)


def test_the_page_cache_of_a_container_is_available(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("400000000\n")
    (tmp_path / "memory.current").write_text("390000000\n")
    (tmp_path / "memory.stat").write_text("anon 90000000\nfile 300000000\ninactive_file 200000000\n")
    config = to_typed(compose(["cluster.workers=3"], "train"), real_time=True)
    refuse_too_many_processes(config)  # 210 MB are available
    config.cluster.workers = 4
    with pytest.raises(UserError, match=r"0\.2 GB are available: use at most 3"):
        refuse_too_many_processes(config)


@pytest.mark.parametrize(
    "text", ["", "- 1\n", "method: {name: ringmaster\n", "problem: 3\n", "\x00\n", "7\n", "method: ${a.b}\n"]
)
def test_a_damaged_configuration_is_one_line(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    for read in (lambda: from_yaml(text), lambda: continued(tmp_path, []), lambda: begun_from(tmp_path)):
        with pytest.raises(UserError, match="is not the configuration of a run"):
            read()


def test_a_cut_configuration_is_not_completed_with_defaults(tmp_path):
    whole = annotated(compose(["checkpoint.every=7"], "train")) + "\n"
    (tmp_path / "config.yaml").write_text(whole[: whole.index("checkpoint:") - 5])
    with pytest.raises(UserError, match="its last line is cut"):
        continued(tmp_path, [])


def test_a_simulation_is_not_resumed(tmp_path):
    (tmp_path / "config.yaml").write_text(annotated(compose([], "config")) + "\n")
    with pytest.raises(UserError, match="a simulation cannot be resumed"):
        continued(tmp_path, ["budget.updates=60"])


def test_a_resumed_run_takes_what_does_not_change_it(tmp_path):
    (tmp_path / "config.yaml").write_text(annotated(compose(["run.report=true"], "train")) + "\n")
    composed = continued(tmp_path, ["run.report=false", "budget.updates=900", "watch=true", f"resume={tmp_path}"])
    assert (composed.run.report, composed.budget.updates, composed.watch) == (False, 900, True)
    for word, said in (
        ("run.seed=3", "resumed as it began"),
        ("budget.update=3", "did you mean budget.updates?"),
        ("budget.updates=1,2", "-m"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            continued(tmp_path, [word])


def test_methods_are_built_as_configured():
    assert isinstance(build_method(load(["method=rennala", "method.batch=3"])), Rennala)
    assert isinstance(build_method(load(["method=synchronous"])), Synchronous)
    assert isinstance(build_method(load(["method=delay_adaptive"])), DelayAdaptive)
    ringmaster = build_method(load(["method.eta=0.3", "method.threshold=5", "method.beta=0.9"]))
    assert type(ringmaster) is Method
    assert (ringmaster.schedule.eta(7), ringmaster.threshold(7)) == (0.3, 5)
    assert ringmaster.alpha(7) == pytest.approx(0.1)
    known = build_method(load(["method=ringmaster_agnostic", "method.smoothness=known", "method.l1=2"]))
    assert known.schedule.eta(0) == pytest.approx(1 / 34)


def test_theory_and_ramps_are_built():
    constants = ["method.constants.smoothness=1", "method.constants.noise=0.4", "method.constants.initial_gap=10"]
    schedule = build_method(load(["method.schedule=theory", "budget.updates=400", *constants])).schedule
    assert isinstance(schedule, Constant)
    assert schedule.threshold_value == 3
    ramp = build_method(load(["method.warmup=0.2", "method.decay=0.5", "budget.updates=20"])).schedule
    assert isinstance(ramp, Ramped)
    assert ramp.eta(0) == pytest.approx(0.2 / 5)
    assert ramp.eta(19) == pytest.approx(0.0)


def test_a_step_size_is_suggested_and_shown():
    """It depends on problem, geometry and method. A given value has priority."""
    assert load([]).method.eta == 0.2
    assert load(["method=delay_adaptive"]).method.eta == 0.008
    assert load(["method=ringmaster_agnostic"]).method.eta == 5.0
    assert load(["problem=nanochat", "geometry=scion"]).method.eta == 0.02
    assert load(["problem=nanochat", "geometry=scion", "method.threshold=8"]).method.eta == 0.01
    assert load(["problem=nanochat", "method.eta=0.7"]).method.eta == 0.7
    assert "  eta: 0.2 " in annotated(compose([]))
    for geometry in groups()["geometry"]:
        for method in groups()["method"]:
            for problem in ("quadratic", "nanochat"):
                assert load([f"geometry={geometry}", f"method={method}", f"problem={problem}"]).method.eta > 0


def test_a_configuration_of_an_earlier_version_is_read():
    text = annotated(compose(["budget.updates=40", "geometry=scion"], "train"))
    kept = [line for line in text.splitlines() if not line.startswith(("  warmup:", "  decay:"))]
    start = kept.index(next(line for line in kept if line.startswith("  radius:")))
    del kept[start : start + 10]  # radii and decays of the roles
    place = kept.index(next(line for line in kept if line.startswith("  final_eta_fraction")))
    old = from_yaml("\n".join([*kept[:place], "  warmup_updates: 4", "  decay_updates: 10", *kept[place:]]))
    ramp = build_method(old).schedule
    assert (ramp.warmup, ramp.decay, ramp.total) == (4, 10, 40)
    blocks = build_core(old, build_problem(old)).update.layout.blocks
    assert {(block.radius, block.weight_decay) for block in blocks} == {(1.0, 0.0)}


def test_weight_decay_of_a_role_overrides_that_of_the_method():
    overrides = ["problem=nanochat", "method.weight_decay=0.1", "geometry.weight_decay.embedding=0", "geometry=scion"]
    config = load(overrides)
    layout = build_core(config, build_problem(config)).update.layout
    assert {(block.geometry, block.weight_decay) for block in layout.blocks} == {
        ("row", 0.0), ("spectral", 0.1), ("sign", 0.1),
    }  # fmt: skip
    assert {block.radius for block in layout.blocks if block.geometry == "row"} == {config.geometry.radius.embedding}


def test_multirun_expands():
    combinations = expand(["method=ringmaster,rennala", "method.eta=0.1,0.2", "run.seed=3"])
    assert len(combinations) == 4
    assert ["method=rennala", "method.eta=0.1", "run.seed=3"] in combinations
