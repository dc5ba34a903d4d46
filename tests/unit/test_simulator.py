"""The simulator, compared with a direct transcription of the specification and with known answers."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster_dist import randomness
from ringmaster_dist.algorithm.layout import Layout, Norm
from ringmaster_dist.algorithm.methods import DelayAdaptive, Method, Rennala, Synchronous
from ringmaster_dist.algorithm.schedules import Constant, agnostic
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.config.compose import load
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.observe.run_files import RunFiles
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.profiles import base_seconds, jittered_seconds
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation.arrivals import Arrivals
from ringmaster_dist.simulation.compiled import CompiledSimulator, supports
from ringmaster_dist.simulation.session import simulate
from ringmaster_dist.simulation.simulator import Simulator, Stalled
from ringmaster_dist.simulation.speeds import Phase, Rates, Speeds
from ringmaster_dist.theory import seconds_of_run, seconds_of_updates
from tests.transcription import play

METHODS = {
    "ringmaster": ["method.threshold=4"],
    "ringmaster_agnostic": [],
    "rennala": ["method.batch=4"],
    "delay_adaptive": [],
    "synchronous": [],
    "asynchronous": [],
}
CONSTANT = Constant(0.05, 0.05)


class Events:
    """An observer that records every event."""

    def __init__(self):
        self.arrivals, self.samples = [], []

    def arrival(self, *arrival):
        self.arrivals.append(arrival)

    def sample(self, time):
        self.samples.append(time)


def make_core(method, problem, norm="spectral", **update):
    layout = Layout(problem.parameters, {"matrix": norm})
    return ServerCore(problem.initial(0), method, Update(layout, dtype=problem.dtype, **update))


@pytest.mark.parametrize(("workers", "jitter"), [(6, 0.0), (30, 0.2)])
@pytest.mark.parametrize("interrupt", [True, False])
@pytest.mark.parametrize("profile", ["linear", "sublinear", "similar"])
@pytest.mark.parametrize("method", METHODS)
def test_the_simulator_equals_the_transcription(method, profile, interrupt, workers, jitter, tmp_path):
    """Every event and the final iterate are those of the specification."""
    overrides = [
        "problem=quadratic", "problem.dim=60", "problem.noise=0", f"cluster.workers={workers}",
        f"cluster.profile={profile}", f"cluster.jitter={jitter}", f"method={method}", "method.eta=0.2",
        *METHODS[method], "budget.seconds=60", f"method.interrupt={interrupt}",
    ]  # fmt: skip
    base = [float(t) for t in base_seconds(profile, workers, 1.0)]
    keys = [randomness.worker_key(0, randomness.STREAM_JITTER, worker) for worker in range(workers)]
    events, iterate, interrupted = play(
        method, workers, lambda i, sequence: jittered_seconds(base[i], jitter, keys[i], sequence),
        eta=0.2, dim=60, seconds=60, threshold=4, batch=4, interrupt=interrupt,
    )  # fmt: skip
    assert len(events) > 15
    minimizer = np.arange(1, 61) / 61 - 1
    error = np.diff(iterate - minimizer, prepend=0, append=0)
    config = load(overrides)
    for engine in ("core", "compiled"):
        folder = tmp_path / engine
        config.simulation.engine = engine
        summary = simulate(config, RunDirectory(str(folder), name="x"))
        records = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
        ours = [(r["time"], r["worker"], r["gradient_version"], r["version"], r["verdict"]) for r in records]
        assert ours == events
        assert summary.interrupted == interrupted
        assert summary.engine == engine
        assert summary.evaluation["gap"] == pytest.approx(error @ error / 8, rel=1e-9)


def test_no_accepted_delay_reaches_the_threshold(tmp_path):
    config = load(["problem.dim=5", "cluster.workers=9", "method.threshold=3", "budget.seconds=80",
                   "method.interrupt=false"])  # fmt: skip
    summary = simulate(config, RunDirectory(str(tmp_path), name="x"))
    records = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    accepted = [r["delay"] for r in records if r["verdict"] == "accepted"]
    stale = [r["delay"] for r in records if r["verdict"] == "stale"]
    assert max(accepted) == 2
    assert min(stale) >= 3
    assert len(stale) == summary.stale > 0


MAKERS = {
    "ringmaster": lambda: Method(Constant(0.05, 0.05, 5)),
    "agnostic": lambda: Method(agnostic(1.0)),
    "rennala": lambda: Rennala(CONSTANT, 3),
    "delay_adaptive": lambda: DelayAdaptive(CONSTANT),
    "synchronous": lambda: Synchronous(CONSTANT),
    "asynchronous": lambda: Method(CONSTANT),
}


ORACLES = [("spectral", "polar_express"), ("spectral", "jordan"), ("spectral", "exact"), ("euclidean", "exact"),
           ("row", "exact"), ("sign", "exact"), ("column", "exact"), ("none", "exact")]  # fmt: skip
CLUSTERS = [("similar", 0.0), ("similar", 0.05), ("linear", 0.3), ("gpus", 0.05)]


@pytest.mark.parametrize("i", range(len(MAKERS)), ids=MAKERS)
@pytest.mark.parametrize("j", range(len(ORACLES)), ids=map("-".join, ORACLES))
def test_the_compiled_engine_equals_the_core(i, j):
    """Arrivals are equal to the bit and iterates to rounding, for every method with every oracle."""
    interrupt, nesterov, shrinks = (bool((i + j) >> bit & 1) for bit in range(3))
    workers, (profile, jitter) = (1, 7, 80)[(i + 2 * j) % 3], CLUSTERS[(i + j // 2) % 4]
    noise = math.nan if (i, j) == (0, 0) else 0.01  # then every gradient is invalid
    results = []
    for kind in (Simulator, CompiledSimulator):
        problem, events = Quadratic(1 + 4 * j, noise), Events()
        norm = Norm(ORACLES[j][0], *((0.7, 0.1) if shrinks else ()))
        core = make_core([*MAKERS.values()][i](), problem, norm, nesterov=nesterov, orthogonalization=ORACLES[j][1])
        speeds = Speeds(base_seconds(profile, workers, 1.0), jitter=jitter, seed=3)
        simulator = kind(core, problem, speeds, seed=3, interrupt=interrupt, observer=events, sample_seconds=2.5,
                         sample_updates=7)  # fmt: skip
        simulator.run(updates=3, seconds=10)
        simulator.run(seconds=20)
        results.append((core, simulator, events))
    (core, one, events), (compiled_core, two, compiled_events) = results
    assert [a[:5] + a[6:] for a in events.arrivals] == [a[:5] + a[6:] for a in compiled_events.arrivals]
    for arrival, other in zip(events.arrivals, compiled_events.arrivals, strict=True):
        assert arrival[5] == other[5] or arrival[5] == pytest.approx(other[5], rel=1e-9, nan_ok=True)
    assert events.samples == compiled_events.samples
    assert len(events.samples) >= 8
    state, compiled = core.state(), compiled_core.state()
    assert (state.version, state.counters) == (compiled.version, compiled.counters)
    assert [worker[3:] for worker in state.workers] == [worker[3:] for worker in compiled.workers]
    torch.testing.assert_close(state.iterate, compiled.iterate, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state.momentum, compiled.momentum, rtol=1e-9, atol=1e-9)
    assert (one.interrupted == two.interrupted).all()
    np.testing.assert_allclose(one.wasted_seconds, two.wasted_seconds)
    np.testing.assert_allclose(one.used_seconds, two.used_seconds)
    np.testing.assert_allclose(one.delivered_seconds, two.delivered_seconds)
    assert one.now == two.now == 20


@pytest.mark.parametrize("engine", ["core", "compiled"])
@pytest.mark.parametrize("interrupt", [True, False])
def test_the_seconds_per_gradient_are_those_of_all_that_arrived(engine, interrupt, tmp_path):
    config = load(["problem=quadratic", "problem.dim=10", "cluster.workers=8", "cluster.profile=linear",
                   "cluster.jitter=0.3", "method=ringmaster", "method.threshold=4", f"method.interrupt={interrupt}",
                   f"simulation.engine={engine}", "budget.seconds=40"])  # fmt: skip
    summary = simulate(config, RunDirectory(str(tmp_path / "run"), name="x"))
    arrivals = RunFiles(tmp_path / "run").arrivals()
    assert summary.engine == engine
    assert (summary.stale > 0) == (not interrupt)
    assert len(summary.per_worker) == 8
    for worker, figures in summary.per_worker.items():
        seconds = [arrival.compute_seconds for arrival in arrivals if arrival.worker == int(worker)]
        assert figures.gradient_seconds == pytest.approx(sum(seconds) / max(1, len(seconds)))


def test_the_compiled_engine_refuses_what_it_does_not_know(tmp_path):
    class Other(Method):
        pass

    problem, speeds = Quadratic(3), Speeds([1.0])
    assert supports(make_core(Method(CONSTANT), problem), problem, speeds)
    assert not supports(make_core(Other(CONSTANT), problem), problem, speeds)
    assert not supports(make_core(Method(CONSTANT), Quadratic(3, clip=1.0)), Quadratic(3, clip=1.0), speeds)
    for key in ("problem.clip=1", "method.threshold=auto", "cluster.phases=[{start_seconds: 1, rate: 2}]"):
        for engine in ("compiled", "auto"):
            config = load(["problem.dim=3", "cluster.workers=2", "budget.seconds=20000", "budget.updates=20", key,
                           f"simulation.engine={engine}"])  # fmt: skip
            if engine == "auto":
                assert simulate(config, RunDirectory(str(tmp_path / key[:9]), name="x")).engine == "core"
            else:
                with pytest.raises(UserError, match=r"use simulation\.engine=core"):
                    simulate(config, RunDirectory(str(tmp_path / "refused"), name="x"))


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "rennala"])
def test_one_worker_is_sequential_muon(name):
    """With one worker no gradient is late, so every method is plain Muon with its schedule."""
    problem = Quadratic(12, 0.1)
    core = make_core(MAKERS[name](), problem)
    Simulator(core, problem, Speeds([1.0]), seed=5, interrupt=False).run(updates=40)

    layout = core.update.layout
    x, m = problem.initial(0), torch.zeros(12, dtype=torch.float64)
    method = MAKERS[name]()
    for k in range(40):
        g, _ = problem.gradient(x, 5, 0, k)
        out = torch.empty_like(x)
        Update(layout, dtype=x.dtype).apply(x, m, g, eta=method.eta(k, 0, 1), alpha=method.alpha(k), out=out)
        x = out
    assert torch.equal(core.snapshot.iterate, x)


times = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=12)


@settings(max_examples=60)
@given(times, st.integers(1, 12), st.booleans())
def test_any_r_updates_take_at_most_the_bound(taus, threshold, interrupt):
    """Lemma: R consecutive updates take at most t(R), wherever they begin."""
    problem = Quadratic(3, 0.0)
    core, events = make_core(Method(Constant(0.1, 0.5, threshold)), problem), Events()
    Simulator(core, problem, Speeds(taus), interrupt=interrupt, observer=events).run(updates=6 * threshold)
    moments = [0.0] + [a[0] for a in events.arrivals if a[4].verdict.value == "accepted"]
    bound = seconds_of_updates(taus, threshold)
    assert len(moments) == 6 * threshold + 1
    for begin, end in zip(moments, moments[threshold:], strict=False):
        assert end - begin <= bound * (1 + 1e-9)


@settings(max_examples=25)
@given(times, st.booleans())
def test_agnostic_run_is_within_its_bound(taus, interrupt):
    problem = Quadratic(3, 0.0)
    method = Method(agnostic(1.0))
    simulator = Simulator(make_core(method, problem), problem, Speeds(taus), interrupt=interrupt)
    simulator.run(updates=100)
    assert simulator.now <= seconds_of_run(taus, 100, method.threshold) * (1 + 1e-9)


def test_time_bounds_are_the_formulas():
    assert seconds_of_updates([4.0, 1.0, 2.0], 3) == pytest.approx(
        2 * min(1 * (1 + 3), (2 / 1.5) * (1 + 3 / 2), (3 / 1.75) * (1 + 3 / 3))
    )
    assert seconds_of_run([1.0, 2.0], 10, lambda k: 4) == pytest.approx(3 * seconds_of_updates([1.0, 2.0], 4))
    with pytest.raises(ValueError, match="positive"):
        seconds_of_updates([1.0, 0.0], 2)


def test_same_seed_same_run_other_seed_other_run():
    finals = []
    for seed in (1, 1, 2):
        problem = Quadratic(20, 0.05)
        core = make_core(Method(Constant(0.05, 0.05, 4)), problem)
        Simulator(core, problem, Speeds(base_seconds("linear", 8, 1.0), jitter=0.2, seed=seed), seed=seed).run(
            seconds=50
        )
        finals.append(core.snapshot.iterate)
    assert torch.equal(finals[0], finals[1])
    assert not torch.equal(finals[0], finals[2])


def test_run_can_be_continued():
    """Two budgets in sequence give the same result as one budget."""
    finals = []
    for stops in ((30.0,), (7.5, 20.0, 30.0)):
        problem = Quadratic(10, 0.05)
        core = make_core(Rennala(CONSTANT, 3), problem)
        simulator = Simulator(core, problem, Speeds(base_seconds("linear", 5, 1.0), jitter=0.1))
        for stop in stops:
            simulator.run(seconds=stop)
        finals.append((core.pushes, core.snapshot.iterate))
    assert finals[0][0] == finals[1][0]
    assert torch.equal(finals[0][1], finals[1][1])


@pytest.mark.parametrize("interrupt", [True, False])
def test_old_iterates_are_freed(interrupt):
    """No more iterates are kept than versions that may still be accepted."""
    problem = Quadratic(10, 0.0)
    core = make_core(Method(Constant(0.05, 0.05, 3)), problem)
    simulator = Simulator(core, problem, Speeds(base_seconds("linear", 50, 1.0)), interrupt=interrupt)
    for seconds in range(1, 60):
        simulator.run(seconds=seconds)
        assert len(simulator._cohorts) <= 3
        assert min(simulator._cohorts) >= core.stale_before


def test_stopped_workers_stop_and_resume():
    """Worker 0 stops from 10 to 20 and then runs at half speed. The gradient that it had begun arrives at 24."""
    problem = Quadratic(4, 0.0)
    core, events = make_core(Method(CONSTANT), problem), Events()
    rates = Rates.from_phases([Phase(10.0, 0.0, [0]), Phase(20.0, 0.5, [0])], 2)
    Simulator(core, problem, Speeds([3.0, 50.0], rates=rates), observer=events).run(seconds=40)
    moments = [a[0] for a in events.arrivals if a[1] == 0]
    assert moments == [3.0, 6.0, 9.0, 24.0, 30.0, 36.0]  # the fourth: 1 s before, 2 s at half speed after


def test_callable_rates_are_sampled_in_the_middle_of_steps():
    rates = Rates.from_callable(lambda worker, time: 1.0 if time < 5 else 0.25 * worker, 2, 20.0, 1.0)
    speeds = Speeds([4.0, 4.0], rates=rates)
    assert speeds.finish(1, 0, 0.0) == 4.0
    assert speeds.finish(1, 0, 3.0) == pytest.approx(13.0)  # two seconds at 1, the other two at a quarter
    assert speeds.finish(0, 0, 3.0) == math.inf


def test_a_cluster_that_stops_for_good_is_reported():
    problem = Quadratic(4, 0.0)
    rates = Rates.from_phases([Phase(2.5, 0.0)], 2)
    simulator = Simulator(make_core(Method(CONSTANT), problem), problem, Speeds([1.0, 2.0], rates=rates))
    with pytest.raises(Stalled):
        simulator.run(updates=1000)
    assert simulator.core.version == 3


@pytest.mark.parametrize("num_workers", [40, 700, 3001])
@pytest.mark.parametrize(("profile", "jitter"), [("similar", 0.0), ("similar", 0.05), ("linear", 0.3)])
def test_arrivals_come_in_the_order_of_their_finish(num_workers, profile, jitter):
    """Workers are started one by one and many at a time; each arrival is the earliest of the exact finishing times."""
    speeds = Speeds(base_seconds(profile, num_workers, 1.0), jitter=jitter, seed=1)
    arrivals, random = Arrivals(speeds), np.random.default_rng(2)
    finish = np.empty(num_workers)

    def begin(workers, now):
        arrivals.begin_many(workers, 0, now)
        finish[workers] = [speeds.finish(int(w), int(arrivals.sequence[w]), now) for w in workers]

    begin(np.arange(num_workers), 0.0)
    for _ in range(200):
        time, worker, sequence = arrivals.pop()
        assert (time, worker) == (finish.min(), int(finish.argmin()))
        assert sequence == arrivals.sequence[worker]
        begin(np.array([worker]), time)
        if random.random() < 0.2:
            begin(random.permutation(num_workers)[: random.integers(1, num_workers)], time)


@settings(max_examples=50)
@given(st.integers(0, 2**40), st.floats(0.0, 3.0), st.floats(0.0, 1e6), st.booleans())
def test_lower_bounds_hold(seed, jitter, start, changing):
    rates = Rates.from_phases([Phase(start + 1, 0.3), Phase(start + 2, 2.0)], 200) if changing else None
    speeds = Speeds(base_seconds("sublinear", 200, 0.7), jitter=jitter, seed=seed, rates=rates)
    workers, sequences = np.arange(200), np.arange(200) * 7
    earliest = speeds.earliest(workers, sequences, start)
    exact = np.array([speeds.finish(int(w), int(s), start) for w, s in zip(workers, sequences, strict=True)])
    assert (earliest <= exact).all()
    if jitter == 0.0:
        assert (earliest == exact).all()


def test_a_million_workers():
    """They fit in memory and run. An end-to-end test measures the memory in a separate process."""
    problem = Quadratic(10, 0.01)
    core = make_core(Method(Constant(0.1, 0.05, 8)), problem)
    simulator = Simulator(core, problem, Speeds(base_seconds("linear", 1_000_000, 1.0), jitter=0.05))
    simulator.run(updates=40)
    assert core.version == 40
    assert simulator.now < seconds_of_run([1.0 + i for i in range(50)], 40, lambda k: 8) * 1.3
