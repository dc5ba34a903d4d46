"""Makes the objects that a configuration describes."""

from __future__ import annotations

import math

from ringmaster_dist.algorithm.layout import ROLES, Layout
from ringmaster_dist.algorithm.methods import DelayAdaptive, Method, Rennala, Synchronous
from ringmaster_dist.algorithm.schedules import Constant, Constants, Ramped, Schedule, agnostic, theory
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.config.schema import Config
from ringmaster_dist.problems import Problem
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.server.core import ServerCore


def build_problem(config: Config) -> Problem:
    return Quadratic(config.problem.dim, config.problem.noise)


def build_schedule(config: Config) -> Schedule:
    method = config.method
    schedule: Schedule
    if method.name == "ringmaster_agnostic":
        known_l1 = method.l1 if method.smoothness == "known" else None
        schedule = agnostic(method.eta, generalized=method.smoothness == "generalized", known_l1=known_l1)
    elif method.schedule == "theory":
        given = method.constants
        known = (given.smoothness, given.noise, given.initial_gap, config.budget.updates)
        assert None not in known, "validation has let a missing constant pass"
        constants = Constants(
            smoothness=given.smoothness or 0.0,
            generalized_smoothness=given.generalized_smoothness,
            noise=given.noise or 0.0,
            norm_ratio=given.norm_ratio,
            initial_gap=given.initial_gap or 0.0,
            updates=config.budget.updates or 0,
        )
        schedule = theory(constants)
    else:
        assert method.beta is not None
        threshold = math.inf if method.threshold is None else method.threshold
        schedule = Constant(method.eta, 1.0 - method.beta, threshold)
    if method.warmup_updates or method.decay_updates:
        schedule = Ramped(
            schedule, method.warmup_updates, method.decay_updates, config.budget.updates or 0,
            method.final_eta_fraction,
        )  # fmt: skip
    return schedule


def build_method(config: Config) -> Method:
    schedule = build_schedule(config)
    if config.method.name == "rennala":
        assert config.method.batch is not None
        return Rennala(schedule, config.method.batch)
    if config.method.name == "synchronous":
        return Synchronous(schedule)
    if config.method.name == "delay_adaptive":
        return DelayAdaptive(schedule)
    return Method(schedule)


def build_layout(config: Config, problem: Problem) -> Layout:
    return Layout(problem.parameters, {role: getattr(config.geometry, role) for role in ROLES})


def build_core(config: Config, problem: Problem) -> ServerCore:
    layout = build_layout(config, problem)
    update = Update(
        layout,
        dtype=problem.dtype,
        nesterov=config.method.nesterov,
        weight_decay=config.method.weight_decay,
        orthogonalization=config.geometry.orthogonalization,
    )
    return ServerCore(problem.initial(layout, config.run.seed), build_method(config), update)
