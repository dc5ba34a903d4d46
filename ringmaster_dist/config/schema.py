"""The configuration as dataclasses. Names and meaning are in configs/; what is allowed is in `validate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ProblemConfig:
    name: str = "quadratic"
    dim: int = 1729
    noise: float = 0.01
    batch: int = 4
    micro_batch: int | None = None
    validation_rows: int = 32
    final_tokens: int | None = 131072
    clip: float | None = None
    precision: str = "auto"
    attention: str = "auto"
    compile: bool = False
    target: str | None = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelConfig:
    name: str = "nanochat_tiny"
    n_layer: int = 4
    n_head: int = 2
    n_kv_head: int = 2
    n_embd: int = 64
    vocab_size: int = 1024
    sequence_len: int = 128
    window_pattern: str = "SSSL"


@dataclass
class DataConfig:
    name: str = "stdlib"
    path: str | None = None
    shards: int = 10
    url: str = ""
    cache: str | None = None


@dataclass
class EvalConfig:
    every: int = 100


@dataclass
class ConstantsConfig:
    smoothness: float | None = None
    generalized_smoothness: float = 0.0
    noise: float | None = None
    norm_ratio: float = 1.0
    initial_gap: float | None = None


@dataclass
class MethodConfig:
    """The union of what the methods need; each method's file has its own keys only."""

    name: str = "ringmaster"
    eta: float = 0.2
    threshold: int | str | None = None  # a number, or auto
    batch: int | None = None
    beta: float | None = None
    schedule: str = "constant"
    constants: ConstantsConfig = field(default_factory=ConstantsConfig)
    smoothness: str = "classical"
    l1: float | None = None
    nesterov: bool = True
    interrupt: bool = True
    weight_decay: float = 0.0
    warmup: float = 0.0
    decay: float = 0.0
    final_eta_fraction: float = 0.0
    warmup_updates: int = 0  # these two only in runs of version 0.2 and before: warmup and decay as numbers of updates
    decay_updates: int = 0


@dataclass
class RadiusConfig:
    matrix: float = 1.0
    embedding: float = 1.0
    output: float = 1.0
    scalar: float = 1.0


@dataclass
class RoleDecayConfig:
    """None: method.weight_decay."""

    matrix: float | None = None
    embedding: float | None = None
    output: float | None = None
    scalar: float | None = None


@dataclass
class GeometryConfig:
    name: str = "muon"
    matrix: str = "spectral"
    embedding: str = "none"
    output: str = "none"
    scalar: str = "none"
    radius: RadiusConfig = field(default_factory=RadiusConfig)
    weight_decay: RoleDecayConfig = field(default_factory=RoleDecayConfig)
    orthogonalization: str = "polar_express"
    precision: str | None = None


@dataclass
class PhaseConfig:
    start_seconds: float = 0.0
    rate: float = 1.0
    workers: list[int] | None = None


@dataclass
class ClusterConfig:
    workers: int = 64
    local_workers: int | None = None
    profile: str = "linear"
    unit_seconds: float = 1.0
    profile_file: str | None = None
    times: list[float] | None = None
    batch: list[int] | None = None
    jitter: float = 0.05
    threads: int = 1
    phases: list[PhaseConfig] = field(default_factory=list)


@dataclass
class BudgetConfig:
    updates: int | None = None
    seconds: float | None = None


@dataclass
class RunConfig:
    dir: str | None = None
    seed: int = 0
    overwrite: bool = False
    trace: bool = True
    samples: int = 200
    report: bool = False


@dataclass
class SimulationConfig:
    engine: str = "auto"


@dataclass
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 0
    tls: bool = True
    insecure: bool = False
    handshake_seconds: float = 5.0
    start_seconds: float = 30.0
    lease_seconds: float = 10.0
    max_invalid: int = 10
    threads: int = 16
    compute_threads: int = 1
    connect_seconds: float = 10.0
    call_seconds: float = 60.0
    patience_seconds: float = 180.0
    farewell_seconds: float = 10.0


@dataclass
class WireConfig:
    gradient_dtype: str | None = None
    iterate_dtype: str | None = None


@dataclass
class CheckpointConfig:
    every: int | None = 100
    keep: int = 3


@dataclass
class LoggerConfig:
    name: str = "none"
    project: str = "ringmaster"
    entity: str | None = None
    group: str | None = None
    run_name: str | None = None
    tags: list[str] = field(default_factory=list)
    artifacts: bool = False
    text: bool = True
    init_seconds: float = 30.0
    finish_seconds: float = 30.0


@dataclass
class Config:
    problem: ProblemConfig = field(default_factory=ProblemConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    geometry: GeometryConfig = field(default_factory=GeometryConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    run: RunConfig = field(default_factory=RunConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    watch: bool = False
    resume: str | None = None
    init: str | None = None
