"""The configuration as dataclasses. Each key has its type, default, sentence and range here, and nowhere else.

The files in configs/ choose among these keys and hold only what differs from the defaults. A key with ``only`` exists
for some choices of its group, one with ``command`` for one command. Checks that concern several keys are in `validate`.
"""

# ruff: noqa: RUF009  (key and section return fields)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from omegaconf import MISSING

from ringmaster_dist.algorithm.names import GEOMETRIES, METHODS, MIXED, ORTHOGONALIZATIONS
from ringmaster_dist.config.keys import all_keys, key, section
from ringmaster_dist.profiles import PROFILES

_DTYPES = ("float64", "float32", "bfloat16", "float16")  # of floating point
CHECKOUT = "nanochat_checkout"
TEXT_PROBLEMS = ("nanochat", CHECKOUT)  # they train on rows of tokens
OWN_CODE = ("python", CHECKOUT)  # they import code of the user's, which a worker has to allow
DEPTH = "nanochat_depth"  # the model whose sizes follow from a depth
_WANDB = ("wandb", "wandb_offline")
_MODELS = ("nanochat_mini", "nanochat_tiny", "nanochat_d6", "nanochat_d12")  # they name every size
_CONSTANT_MOMENTUM = tuple(name for name in METHODS if name != "ringmaster_agnostic")
_OLD_RUNS = ("version 0.2",)  # no choice has this name: such keys are only read, from the directories of old runs


def _name(default: str, group: str, one_of: tuple[str, ...] = ()) -> Any:
    return key(default, f"This is the name of the file. Choose another with {group}=NAME, not here.", one_of=one_of)


# fmt: off
@dataclass
class PhaseConfig:
    start_seconds: float = key(
        0.0, "The phase begins at this time of the run. The time of a real worker begins with its first gradient.",
        least=0)
    rate: float = key(1.0, "Workers compute at this multiple of their usual speed; 0 stops them.", least=0)
    workers: list[int] | None = key(None, "These workers change; null means all of them.")


@dataclass
class ClusterConfig:
    workers: int = key(64, "This many workers compute gradients. A real run waits for them to join.", least=1)
    profile: str = key(
        "linear", "The workers are this unequal. file takes measured times; none, in real runs only, sets no pace.",
        one_of=(*PROFILES, "file", "none"))
    profile_file: str | None = key(
        None, "With profile=file, its times are assigned to workers in turn. ringmaster profile writes such a file.")
    times: list[float] | None = key(
        None, "With profile=file, these are the times, such as [0.5, 2.0]; null reads them from profile_file.", above=0)
    unit_seconds: float = key(
        1.0, "The unit worker needs this long for a gradient. With profile=gpus it is the A100.", above=0)
    jitter: float = key(
        0.05, "The time of a gradient has half-normal noise of this fraction of the worker's own time.", least=0)
    batch: Any = key(
        None, "These rows per gradient, such as [8, 4], are assigned to workers of a real NanoChat run in turn; null "
        "means problem.batch for all. auto gives each worker rows by its measured speed.", least=1, one_of=("auto",),
        kind="a list of whole numbers")
    batch_min: int = key(1, "With batch=auto, a gradient takes at least this many rows.", least=1)
    batch_max: int | None = key(
        None, "With batch=auto, a gradient takes at most this many rows; null means problem.batch.", least=1)
    devices: list[str] | None = key(
        None, "These devices, such as [cuda:0, cuda:1, cpu], are assigned to the workers that this command starts, in "
        "turn; null means the accelerators in turn, or the CPU.", command="train")
    threads: int = key(1, "A worker uses this many torch threads. The bits of a gradient depend on it.", least=1)
    phases: list[PhaseConfig] = key(
        [], "The speed of simulated and paced workers changes, as in [{start_seconds: 9, rate: 0.5, workers: [0]}].")
    local_workers: int | None = key(
        None, "This machine starts this many of the workers; null starts all. The others run on other machines.",
        least=0, command="train")


@dataclass
class BudgetConfig:
    updates: int | None = key(None, "The run stops after this many updates; null sets no limit.", least=1)
    seconds: float | None = key(
        None, "The run stops after this many seconds; null sets no limit. The limit that is reached first counts.",
        above=0)


@dataclass
class RunConfig:
    dir: str | None = key(None, "The run is written here; null means runs/<time>-<problem>-<method>.")
    seed: int = key(
        0, "All draws depend on it. A simulation repeats exactly with it; in a real run arrivals differ.", least=0)
    overwrite: bool = key(False, "true replaces a run that is already in run.dir.")
    trace: bool = key(True, "trace.jsonl gets a line per arriving gradient; false, in simulations only, leaves it out.")
    samples: int = key(
        200, "metrics.jsonl gets this many rows over the budget; in a real run without budget.seconds, per minute.",
        least=1)
    report: bool = key(False, "true draws figures and a page into <run.dir>/report at the end.")


@dataclass
class EvalConfig:
    every: int = key(
        100, "The first row after this many updates is evaluated, or every row if an evaluation is cheap.", least=1)


@dataclass
class ProblemConfig:
    name: str = _name("quadratic", "problem", ("quadratic", "nanochat", CHECKOUT, "python"))
    dim: int = key(1729, "The quadratic has this many coordinates.", least=1, only=("quadratic",))
    noise: float = key(0.01, "The gradient noise has this standard deviation.", least=0, only=("quadratic",))
    batch: int = key(4, "A gradient takes this many rows of text.", least=1, only=TEXT_PROBLEMS)
    micro_batch: int | None = key(
        None, "This many rows are computed at once; null takes all.", least=1, only=TEXT_PROBLEMS)
    validation_rows: int = key(
        32, "An evaluation looks at this many rows, spread over the validation part.", least=1, only=TEXT_PROBLEMS)
    final_tokens: int | None = key(
        131072, "The final evaluation looks at this many tokens, spread over the validation part; null takes all.",
        least=1, only=TEXT_PROBLEMS)
    target: str | None = key(
        None, "This is the factory, as package.module:factory. It is called with seed=, device= and args.",
        only=("python",))
    args: dict[str, Any] = key(
        {}, "The factory gets these arguments by name, such as problem.args.width=64.", only=("python",))
    path: str | None = key(
        None, "This is the folder of your nanochat checkout. A worker elsewhere gives its own with target=.",
        only=(CHECKOUT,))
    shards: int | None = key(
        None, "This many of the checkout's shards are used for training; null takes all. The last one validates.",
        least=1, only=(CHECKOUT,))
    clip: float | None = key(
        None, "A gradient with a larger Euclidean norm is scaled down to this norm; null scales none.", above=0)
    precision: str = key(
        "auto", "The model computes in this type. auto means bf16 or fp16 with loss scaling on CUDA, fp32 elsewhere.",
        one_of=("auto", "float32", "bfloat16", "float16"), only=TEXT_PROBLEMS)
    attention: str = key(
        "auto", "Windowed layers use this attention. auto means flex attention on CUDA and SDPA elsewhere.",
        one_of=("auto", "sdpa"), only=("nanochat",))
    compile: bool = key(False, "true compiles the model with torch.compile.", only=TEXT_PROBLEMS)


@dataclass
class ModelConfig:
    name: str = _name("nanochat_tiny", "model")
    depth: int = key(12, "The model has this many blocks, and its width follows.", least=1, only=(DEPTH,))
    aspect_ratio: int = key(64, "The width is depth times this, rounded up to whole heads.", least=1, only=(DEPTH,))
    head_dim: int = key(128, "A head has this many channels.", least=2, only=(DEPTH,))
    n_layer: int = key(4, "The model has this many blocks.", least=1, only=_MODELS)
    n_head: int = key(2, "A block has this many query heads.", least=1, only=_MODELS)
    n_kv_head: int = key(2, "A block has this many key-value heads.", least=1, only=_MODELS)
    n_embd: int = key(64, "The model is this wide.", least=32, only=_MODELS)
    vocab_size: int = key(
        1024, "The tokenizer has this many entries; 260 are the bytes and the special tokens. A checkout has its own.",
        least=260, most=65536)
    sequence_len: int = key(128, "The context is this many tokens long.", least=1)
    window_pattern: str = key(
        "SSSL", "S blocks see half the context, L blocks all of it. The pattern is tiled; the last block is always L.")


@dataclass
class DataConfig:
    name: str = _name("stdlib", "data", ("stdlib", "text", "climbmix"))
    path: str | None = key(None, "The text is in this file or folder.", only=("text",))
    shards: int = key(
        10, "This many of the 6542 training shards are used. Shard 6542, the last, validates.",
        least=1, most=6542, only=("climbmix",))
    url: str = key(
        "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main",
        "The shards are downloaded from here.", only=("climbmix",))
    cache: str | None = key(
        None, "Shards and prepared rows are kept here; null means RINGMASTER_CACHE, else ~/.cache/ringmaster. "
        "Workers on other machines use their own RINGMASTER_CACHE.")


@dataclass
class ConstantsConfig:
    smoothness: float | None = key(None, "This is L0.", above=0)
    generalized_smoothness: float = key(0.0, "This is L1.", least=0)
    noise: float | None = key(None, "This is sigma, of the whole gradient.", least=0)
    norm_ratio: float = key(1.0, "This is rho, the largest dual norm of a vector of length one.", above=0)
    initial_gap: float | None = key(None, "This is Delta0 = f(x_0) - f*.", above=0)


@dataclass
class MethodConfig:
    """The keys of all methods. threshold and batch are None where the method has no such key."""

    name: str = _name("ringmaster", "method", METHODS)
    eta: float = key(
        MISSING, "This is the step size; null takes what suits problem and geometry, see docs/choosing.md.", above=0)
    threshold: int | str | None = key(
        "auto", "R: a gradient is accepted if its delay is below R, with 1 only fresh ones. auto finds R during the "
        "run from how much gradients of different ages differ, and makes the step of a late one smaller.",
        least=1, one_of=("auto",), only=("ringmaster",))
    batch: int | None = key(8, "B: an update is the mean of this many gradients.", least=1, only=("rennala",))
    smoothness: str = key(
        "classical", "classical means L1 = 0; generalized means L1 > 0 and takes eta/17; known takes 1/(17 l1).",
        one_of=("classical", "generalized", "known"), only=("ringmaster_agnostic",))
    l1: float | None = key(None, "This is L1, if it is known.", above=0, only=("ringmaster_agnostic",))
    beta: float = key(
        MISSING, "This is the momentum; null means 0.95, or 0 with local steps.", least=0, below=1,
        only=_CONSTANT_MOMENTUM)
    schedule: str = key(
        "constant", "theory takes eta, beta and threshold from method.constants (Theorem 1).",
        one_of=("constant", "theory"), only=("ringmaster",))
    constants: ConstantsConfig = section(
        ConstantsConfig, "method.schedule=theory and ringmaster theory use these.", only=("ringmaster",))
    nesterov: bool = key(True, "true gives the oracle the looked-ahead momentum.")
    interrupt: bool = key(True, "true stops work that has become stale; with some methods no work does.")
    weight_decay: float = key(
        0.0, "Each update also shrinks the iterate by eta times this. geometry.weight_decay sets it by role.",
        least=0)
    warmup: float = key(0.0, "eta rises linearly over this fraction of budget.updates.", least=0, most=1)
    decay: float = key(
        0.0, "eta falls linearly over this last fraction of budget.updates; 0.5 is usual for models.", least=0, most=1)
    final_eta_fraction: float = key(0.0, "This fraction of eta is left at the end of the decay.", least=0, most=1)
    warmup_updates: int = key(0, "This is warmup as a number of updates.", only=_OLD_RUNS)
    decay_updates: int = key(0, "This is decay as a number of updates.", only=_OLD_RUNS)


@dataclass
class LocalConfig:
    steps: int = key(
        1, "A worker takes this many steps of its own and pushes the distance, for slow links. 1 pushes each gradient.",
        least=1)
    eta: float | None = key(
        None, "These steps have this size; null takes what suits problem and geometry. method.eta is the server's.",
        above=0)
    beta: float | None = key(
        None, "These steps have this momentum, which begins at zero with each push; null means 0.95.", least=0, below=1)


@dataclass
class RadiusConfig:
    matrix: float = key(1.0, "Hidden matrices have this radius.", above=0)
    embedding: float = key(1.0, "Embeddings have this radius.", above=0)
    output: float = key(1.0, "The output head has this radius.", above=0)
    scalar: float = key(1.0, "Residual scalars, biases and norm weights have this radius.", above=0)


@dataclass
class RoleDecayConfig:
    matrix: float | None = key(None, "Hidden matrices have this decay.", least=0)
    embedding: float | None = key(None, "Embeddings have this decay.", least=0)
    output: float | None = key(None, "The output head has this decay.", least=0)
    scalar: float | None = key(None, "Residual scalars, biases and norm weights have this decay.", least=0)


@dataclass
class GeometryConfig:
    name: str = _name("muon", "geometry")
    matrix: str = key("spectral", "Hidden matrices, and vectors that stand alone, have this norm.", one_of=GEOMETRIES)
    embedding: str = key("none", "Token and value embeddings have this norm.", one_of=GEOMETRIES)
    output: str = key("none", "The output head has this norm.", one_of=GEOMETRIES)
    scalar: str = key("none", "Residual scalars have this norm.", one_of=GEOMETRIES)
    radius: RadiusConfig = section(
        RadiusConfig, "A block moves by eta * radius * oracle. The norm of the whole is the largest |block| / radius.")
    weight_decay: RoleDecayConfig = section(RoleDecayConfig, "A role can have its own; null means method.weight_decay.")
    orthogonalization: str = key(
        "polar_express", "It computes the spectral oracle: polar_express and jordan take five steps, exact a slow SVD.",
        one_of=ORTHOGONALIZATIONS)
    precision: str | None = key(
        "auto", "The five steps use this type; null means the problem's. mixed means bfloat16 for matrices that are "
        "about square. auto means mixed if a server of a large model has a processor with bfloat16, and else null.",
        one_of=("auto", MIXED, "float64", "float32", "bfloat16"))


@dataclass
class LoggerConfig:
    name: str = _name("none", "logger", ("none", *_WANDB))
    project: str = key("ringmaster", "The run belongs to this wandb project.", only=_WANDB)
    entity: str | None = key(None, "The project belongs to this user or team; null means your default.", only=_WANDB)
    group: str | None = key(
        None, "Runs that belong together share this name; null means the folder of a multirun, else none.", only=_WANDB)
    run_name: str | None = key(None, "The run has this name at wandb; null means that of its directory.", only=_WANDB)
    tags: list[str] = key([], "The run can be found by these words.", only=_WANDB)
    artifacts: bool = key(False, "true also uploads checkpoints and the final weights.", only=_WANDB)
    text: bool = key(True, "true lets a trained NanoChat write a sample at the end.", only=_WANDB)
    init_seconds: float = key(
        30.0, "The run continues offline if wandb does not answer for this long.", above=0, only=_WANDB)
    finish_seconds: float = key(
        30.0, "The end of the run waits at most this long for the last rows to be handed over.", least=0, only=_WANDB)


@dataclass
class SimulationConfig:
    engine: str = key(
        "auto", "core drives the server core itself. compiled plays the quadratic in machine code, for long runs. auto "
        "chooses by the length of the run.",
        one_of=("auto", "core", "compiled"))


@dataclass
class ServerConfig:
    host: str = key(
        "127.0.0.1", "The server listens on this address. Workers must be able to reach it; only this machine can "
        "reach the default.")
    port: int = key(
        0, "The server listens on this port; 0 takes a free one. <run.dir>/address names it.", least=0, most=65535)
    tls: bool = key(
        True, "true encrypts connections, and both ends prove the token; false is for loopback only.")
    insecure: bool = key(
        False, "true allows tls=false where other machines can connect; anyone who listens there can read the token. "
        "It also allows systems that cannot keep other users of the machine away from the server's files.")
    workers_per_address: int = key(
        64, "At most this many workers may connect from one address, apart from those that this user starts on this "
        "machine.", least=1)
    handshake_seconds: float = key(5.0, "A new connection has this long to prove the token.", above=0)
    start_seconds: float = key(
        30.0, "The first workers wait this long for cluster.workers to join; then the run starts.", least=0)
    lease_seconds: float = key(10.0, "A worker that is silent for longer than this loses its lease.", above=0)
    max_invalid: int = key(10, "A worker that sends this many invalid gradients in a row is evicted.", least=1)
    threads: int = key(16, "This many threads answer workers' calls.", least=2)
    device: str = key(
        "auto", "Updates are computed here, such as on cuda:0. auto takes the first accelerator that no worker of this "
        "command uses, or the CPU if there is none.", command="train")
    compute_threads: int = key(1, "This many threads compute an update. Its bits may depend on it.", least=1)
    connect_seconds: float = key(10.0, "A worker waits this long for a connection.", above=0)
    call_seconds: float = key(
        60.0, "A worker waits this long for an answer, then it asks again. It must be above start_seconds.", above=0)
    patience_seconds: float = key(180.0, "A worker that has lost the server retries for this long.", above=0)
    farewell_seconds: float = key(10.0, "The server waits this long for every worker to hear of the end.", above=0)


@dataclass
class WorkerConfig:
    overlap: bool = key(
        False, "true computes the next gradient while the last one is sent, at the newest snapshot there is. Delays "
        "grow. A worker still waits if an exchange takes less than a tenth or more than ten times of a gradient. It "
        "needs memory for one more snapshot and two more gradients, in their types on the wire.")


@dataclass
class WireConfig:
    gradient_dtype: str | None = key(
        None, "Gradients are sent in this type; null sends them as they are computed. int8 rounds at random, without "
        "bias, and has a scale for each 256 numbers.", one_of=(*_DTYPES, "int8"))
    iterate_dtype: str | None = key(
        None, "Iterates are sent in this type; null sends them as they are. A worker computes at what arrives.",
        one_of=_DTYPES)


@dataclass
class CheckpointConfig:
    every: int | None = key(
        100, "A checkpoint is written each time this many updates were made; null writes only the last.", least=1)
    keep: int = key(3, "This many of the newest checkpoints are kept.", least=1)
    mirror: str | None = key(
        None, "Checkpoints are also copied to this URL, such as s3://bucket/run. resume=URL resumes from it elsewhere.")
    mirror_seconds: float = key(60.0, "At its end a run waits this long for the copy of its last checkpoint.", least=0)
    best: bool = key(True, "best.safetensors keeps the weights of the lowest evaluation; false writes no such file.")


@dataclass
class Config:
    cluster: ClusterConfig = section(ClusterConfig)
    budget: BudgetConfig = section(BudgetConfig)
    run: RunConfig = section(RunConfig)
    eval: EvalConfig = section(EvalConfig)
    init: str | None = key(
        None, "The run begins from these weights: a run's directory, a checkpoint, a safetensors file or a nanochat "
        "checkpoint; see --help.")
    problem: ProblemConfig = section(ProblemConfig)
    model: ModelConfig = section(ModelConfig)
    data: DataConfig = section(DataConfig)
    method: MethodConfig = section(MethodConfig)
    geometry: GeometryConfig = section(GeometryConfig)
    local: LocalConfig = section(LocalConfig)
    logger: LoggerConfig = section(LoggerConfig)
    simulation: SimulationConfig = section(SimulationConfig, command="simulate")
    watch: bool = key(False, "true serves a page on this machine that shows the run while it lasts.", command="train")
    watch_port: int = key(0, "With watch=true, the page is at this port; 0 takes a free one.", least=0, most=65535,
                          command="train")
    watch_metrics: bool = key(
        False, "true, with watch=true, also answers /metrics (for Prometheus) and /healthz at the port of the page.",
        command="train")
    server: ServerConfig = section(ServerConfig, command="train")
    worker: WorkerConfig = section(WorkerConfig, command="train")
    wire: WireConfig = section(WireConfig, command="train")
    checkpoint: CheckpointConfig = section(CheckpointConfig, command="train")
    resume: str | None = key(
        None, "The run in this directory, or at this URL, is resumed; auto means the run in run.dir, if there is one; "
        "see --help.",
        command="train")
# fmt: on


KEYS = dict(all_keys(Config))  # every section and key by its full name
OF_A_RESUME = ("run.report", "watch", "watch_port", "watch_metrics")  # a resumed run may change these keys
OF_THE_CALL = ("run.dir", "run.overwrite", "resume", *OF_A_RESUME)  # these do not change what is computed


class _Steps(NamedTuple):
    by_geometry: dict[str, float]  # for the methods that bound the delay, or average
    factors: dict[str, float]  # for the other methods


AUTO = "auto"  # a value of method.threshold and of geometry.precision

# The default of method.eta. The quadratic has the paper's; NanoChat has the winners of ``ringmaster experiment steps``
# and ``radii``. A model of the user's own gets what suited small ones, which is a guess; see docs/choosing.md.
_STEPS = {
    "quadratic": _Steps(
        {"muon": 0.2, "scion": 0.2, "euclidean": 0.2, "sign": 0.005},
        {"ringmaster_agnostic": 25.0, "delay_adaptive": 0.04, "asynchronous": 0.04},
    ),
    "nanochat": _Steps(
        {"muon": 1.0, "scion": 0.01, "euclidean": 0.1, "sign": 0.003}, {"ringmaster_agnostic": 25.0, AUTO: 2.0}
    ),
    # The step size is the learning rate of nanochat's matrices, and the radii follow from the others.
    CHECKOUT: _Steps(
        {"nanochat": 0.01, "muon": 0.01, "scion": 0.01, "euclidean": 0.1, "sign": 0.003},
        {"ringmaster_agnostic": 25.0, AUTO: 2.0},
    ),
    "python": _Steps(
        {"muon": 0.01, "scion": 0.01, "euclidean": 0.01, "sign": 0.001},
        {"ringmaster_agnostic": 25.0, "delay_adaptive": 0.5, "asynchronous": 0.5},
    ),
}


BETA = 0.95  # the default of method.beta, and of local.beta
SERVER_ETA, SERVER_BETA = 0.25, 0.0  # the defaults of method.eta and method.beta with local steps; see docs/choosing.md


def suggested_eta(problem: str, geometry: str, method: str) -> float:
    """The default of method.eta. A problem or geometry that is not known is refused elsewhere.

    ``method`` is a name, or `AUTO` for ringmaster with the automatic threshold, whose late steps are smaller.
    """
    steps = _STEPS.get(problem, _STEPS["python"])
    eta = steps.by_geometry.get(geometry, steps.by_geometry["muon"]) * steps.factors.get(method, 1.0)
    return float(f"{eta:.6g}")  # without the digits that binary fractions add
