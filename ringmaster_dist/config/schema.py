"""The configuration as dataclasses. Names and meaning are in configs/; what is allowed is in `validate`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ProblemConfig:
    name: str = "quadratic"
    dim: int = 1729
    noise: float = 0.01


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
    threshold: int | None = None
    batch: int | None = None
    beta: float | None = None
    schedule: str = "constant"
    constants: ConstantsConfig = field(default_factory=ConstantsConfig)
    smoothness: str = "classical"
    l1: float | None = None
    nesterov: bool = True
    interrupt: bool = True
    weight_decay: float = 0.0
    warmup_updates: int = 0
    decay_updates: int = 0
    final_eta_fraction: float = 0.0


@dataclass
class GeometryConfig:
    name: str = "muon"
    matrix: str = "spectral"
    embedding: str = "none"
    output: str = "none"
    scalar: str = "none"
    orthogonalization: str = "polar_express"


@dataclass
class PhaseConfig:
    start_seconds: float = 0.0
    rate: float = 1.0
    workers: list[int] | None = None


@dataclass
class ClusterConfig:
    workers: int = 64
    profile: str = "linear"
    unit_seconds: float = 1.0
    jitter: float = 0.05
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


@dataclass
class SimulationConfig:
    engine: str = "auto"


@dataclass
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 0
    start_seconds: float = 30.0
    lease_seconds: float = 10.0
    threads: int = 16
    connect_seconds: float = 10.0
    call_seconds: float = 60.0
    patience_seconds: float = 60.0
    farewell_seconds: float = 10.0


@dataclass
class Config:
    problem: ProblemConfig = field(default_factory=ProblemConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    geometry: GeometryConfig = field(default_factory=GeometryConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    run: RunConfig = field(default_factory=RunConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
