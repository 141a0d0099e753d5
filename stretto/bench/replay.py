"""`stretto bench replay`: what is left between engine and trainer at each level of agreement, and what that costs.

    version 0 ──engine, bf16──▶ rollouts R ─┬─▶ trainer at version 0, 1, 4: R is at lag 0, 1, 4
                                            └─▶ other engines, made to say R: float32, exact
    version 0 ──▶ fresh rollouts ──▶ real advantages ──▶ optimizer step ──▶ version 1 ──▶ … ──▶ version 4

Every row of the table is about the same tokens. What is measured is defined in trainer/agreement.py; why, and what to
make of it, stands in docs/numerics.md. Needs the sandbox, because rollouts are real ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stretto.bench.cost import Cost, alternate, generation, step
from stretto.bench.forced import force
from stretto.bench.recording import batch, payloads, record, repair_tasks
from stretto.bench.replay_table import show
from stretto.bench.schedules import Agreement, exactness
from stretto.bench.variants import (
    Measured,
    Networks,
    Variant,
    Weights,
    corrupted,
    measure,
    said_by,
    shifted,
    variants,
)
from stretto.config import Config, load
from stretto.model.numerics import Level, engine_numerics, trainer_numerics
from stretto.model.spec import ModelSpec, load_spec
from stretto.records import RouteChunk, Segment, route_bits
from stretto.trainer.agreement import ALL
from stretto.trainer.alarms import alarming
from stretto.trainer.learner import Learner
from stretto.trainer.samples import Sample

ENGINES = ("bfloat16", "float32")
LAGS = (0, 1, 4)
TASKS, ATTEMPTS = 40, 8
"""Measured rollouts: so many tasks, so many attempts at each."""
STEP_TASKS = 8
"""Tasks of each optimizer step; attempts as above."""
RATIOS = (0.0, 0.5, 0.8, 0.9, 0.95, 1.0)
"""Of the plausibility filter, beside the configured one."""
CORRUPTED = 0.02
STEP_ROUNDS, ENGINE_ROUNDS = 7, 7
TIMED = 64
"""Measured rollouts that a timed pass takes."""
SCHEDULES = 1000
"""In all, over both dtypes."""

Said = dict[tuple[str, bool], list[Sample]]
"""The same tokens as each engine says them: by dtype, and whether its arithmetic is exact."""


@dataclass(frozen=True)
class Row:
    """One engine, one lag, one way of the trainer to recompute it."""

    engine: str
    lag: int
    variant: str
    measured: Measured


@dataclass(frozen=True)
class Swept:
    """One ratio of the plausibility filter, the trainer computing in float32 and the engine in bf16."""

    ratio: float
    clean: Measured
    corrupt: Measured
    shift: Measured
    stale: Measured


@dataclass(frozen=True)
class Material:
    """What everything is measured on."""

    config: Config
    samples: list[Sample]  # of version 0, as recorded
    segments: list[Segment]  # theirs
    weights: dict[int, Weights]  # by version
    networks: Networks


def replay(json_file: Path | None, console: Console) -> None:
    """Measure, print the tables and what holds, write the JSON. Raises SandboxUnavailable or ValueError."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ValueError(f"{json_file} cannot be written: there is no folder {json_file.absolute().parent}")
    torch.set_num_threads(1)
    with console.status("") as status:
        result = run(lambda text: status.update(text))
    show(result, console)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def run(say: Callable[[str], None]) -> dict[str, Any]:
    """The JSON: rows, filter, costs, checks. `say` is told what is being done."""
    material = record_everything(say)
    config = material.config
    with ProcessPoolExecutor(len(ENGINES), get_context("spawn")) as pool:
        running = {engine: pool.submit(_exactness, config.model.folder, engine) for engine in ENGINES}
        said, chunks, repeated = engines_say(material, say)
        rows = recompute_all(material, said, say)
        say("plausibility filter: good and bad rows at several ratios")
        swept = sweep(material)
        say(f"exact: {SCHEDULES:,} random schedules")
        exact = {engine: future.result() for engine, future in running.items()}
    say("training steps: times")  # when nothing else of ours runs
    steps = step_costs(material, said)
    say("engines: times")
    engines = engine_costs(material)
    return {
        "benchmark": "replay",
        "model": config.model.path,
        "rollouts": len(material.samples),
        "sampled_tokens": sum(len(sample.targets_N) for sample in material.samples),
        "replay_ratio": config.trainer.replay_ratio,
        "rows": [{"engine": r.engine, "lag": r.lag, "variant": r.variant, **r.measured.values()} for r in rows],
        "filter": [
            {"ratio": s.ratio, **{name: getattr(s, name).values() for name in ("clean", "corrupt", "shift", "stale")}}
            for s in swept
        ],
        "step": {name: asdict(cost) for name, cost in steps.items()},
        "engine": {name: asdict(cost) for name, cost in engines.items()},
        "bytes_per_token": wire_bytes(material.networks.spec, chunks),
        "repeated_max_abs_dlogp": repeated,
        "exact": {engine: asdict(agreement) for engine, agreement in exact.items()},
        "checks": checks(rows, swept, steps, engines, exact, config.trainer.replay_ratio),
    }


def record_everything(say: Callable[[str], None]) -> Material:
    """Version 0's measured rollouts, and the versions that real steps make of it."""
    config = load("quickstart", ["model.numerics=ordered", "engine.dtype=bfloat16"])
    networks = Networks(load_spec(config.model.folder))
    learner = Learner(config, None)
    numerics = engine_numerics(config.model.numerics, config.engine.dtype)
    weights: dict[int, Weights] = {0: _present(learner)}
    say(f"recording {TASKS} × {ATTEMPTS} rollouts of version 0")
    recording = record(networks(numerics, weights[0]), 0, repair_tasks(TASKS, seed=1), ATTEMPTS, config)
    while learner.version < max(LAGS):
        version = learner.version
        say(f"making version {version + 1}")
        tasks = repair_tasks(STEP_TASKS, seed=100 + version)
        fresh = record(networks(numerics, weights[version]), version, tasks, ATTEMPTS, config)
        cut = batch(fresh)
        learner.step(learner.prepare(cut, payloads(fresh, cut.items)))
        weights[version + 1] = _present(learner)
    everything = batch(recording, weighed=False)
    samples = learner.prepare(everything, payloads(recording, everything.items)).samples
    segments = [segment for rollout in recording.rollouts for segment in rollout.segments if segment.sampled_T.any()]
    return Material(config, samples, segments, weights, networks)


def engines_say(material: Material, say: Callable[[str], None]) -> tuple[Said, list[RouteChunk], float]:
    """What every engine says of the recorded tokens; the routes on their way; how far a repetition is from the
    recording, in which other rows shared each pass."""
    said: Said = {}
    chunks: list[RouteChunk] = []
    for engine in ENGINES:
        for level in (Level.ORDERED, Level.EXACT):
            say(f"{engine} engine, {level}: the same tokens once more")
            model = material.networks(engine_numerics(level, engine), material.weights[0])
            once_more = force(model, material.segments, material.config.engine).scored
            said[engine, level is Level.EXACT] = said_by(material.samples, once_more)
            chunks = chunks or [chunk for one in once_more for chunk in one.chunks]
    repeated = _max_dlogp(said["bfloat16", False], material.samples)
    said["bfloat16", False] = material.samples  # what was really sampled
    return said, chunks, repeated


def recompute_all(material: Material, said: Said, say: Callable[[str], None]) -> list[Row]:
    rows = []
    for engine in ENGINES:
        for lag in LAGS:
            say(f"{engine} engine, lag {lag}")
            for variant in variants(material.config.trainer.replay_ratio):
                samples = said[engine, variant.level is Level.EXACT]
                rows.append(Row(engine, lag, variant.name, recompute(material, variant, engine, lag, samples)))
    return rows


def _exactness(folder: Path, engine: str) -> Agreement:
    """In a process of its own: half of the schedules each."""
    torch.set_num_threads(1)
    return exactness(folder, SCHEDULES // len(ENGINES), 0, engine_numerics(Level.EXACT, engine))


def _present(learner: Learner) -> Weights:
    """What the model holds now, values that bf16 can hold: what would be published."""
    return {name: parameter.detach().clone() for name, parameter in learner.model.named_parameters()}


def _max_dlogp(one: Sequence[Sample], two: Sequence[Sample]) -> float:
    return max(float(abs(a.behaviour_N - b.behaviour_N).max()) for a, b in zip(one, two, strict=True))


def recompute(material: Material, variant: Variant, engine: str, lag: int, samples: Sequence[Sample]) -> Measured:
    """`samples` as an engine of version 0 said them; the trainer is `lag` versions further."""
    model = material.networks(trainer_numerics(variant.level, engine), material.weights[lag])
    return measure(model, samples, variant.replay, variant.ratio)


def sweep(material: Material) -> list[Swept]:
    """Clean rows, 2 % random rows, rows of the token before, and clean rows under the newest weights."""
    experts = material.networks.spec.experts
    kinds = {
        "clean": (material.samples, 0),
        "corrupt": (corrupted(material.samples, CORRUPTED, experts, seed=0), 0),
        "shift": (shifted(material.samples), 0),
        "stale": (material.samples, max(LAGS)),
    }
    return [
        Swept(
            ratio,
            **{
                name: recompute(material, Variant("", Level.FAST, True, ratio), "bfloat16", lag, samples)
                for name, (samples, lag) in kinds.items()
            },
        )
        for ratio in sorted({*RATIOS, material.config.trainer.replay_ratio})
    ]


def step_costs(material: Material, said: Said) -> dict[str, Cost]:
    """By variant; `ordered` and `exact` by engine as well, because the trainer rounds where the engine does."""
    nothing, *others = variants(material.config.trainer.replay_ratio)
    chosen = [(nothing.name, nothing, "bfloat16")]
    for variant in others:
        if variant.level is Level.FAST:
            chosen.append((variant.name, variant, "bfloat16"))
        else:
            chosen += [(f"{variant.name}, {engine}", variant, engine) for engine in ENGINES]
    cases = {}
    for name, variant, engine in chosen:
        model = material.networks.own(trainer_numerics(variant.level, engine), material.weights[0])
        cases[name] = step(model, said[engine, variant.level is Level.EXACT][:TIMED], variant)
    return alternate(cases, dict.fromkeys(cases, nothing.name), STEP_ROUNDS)


def engine_costs(material: Material) -> dict[str, Cost]:
    """By dtype, without routes, with them, and in exact arithmetic."""
    cases, baselines = {}, {}
    for engine in ENGINES:
        for what, level, capture in (
            ("no routes", Level.FAST, False),
            ("routes", Level.ORDERED, True),
            ("exact", Level.EXACT, True),
        ):
            name = f"{engine}, {what}"
            model = material.networks.own(engine_numerics(level, engine), material.weights[0])
            cases[name] = generation(model, material.segments[:TIMED], material.config.engine, capture)
            baselines[name] = f"{engine}, no routes"
    return alternate(cases, baselines, ENGINE_ROUNDS)


def wire_bytes(spec: ModelSpec, chunks: Sequence[RouteChunk]) -> dict[str, float]:
    """Per token that has a row: as recorded, and as it travels."""
    layers, per_token = spec.route_shape
    rows = sum(chunk.count for chunk in chunks)
    sent = sum(len(chunk.rows) for chunk in chunks)
    return {"raw": layers * per_token * route_bits(spec.experts) / 8, "wire": sent / max(1, rows)}


def checks(
    rows: Sequence[Row],
    swept: Sequence[Swept],
    steps: dict[str, Cost],
    engines: dict[str, Cost],
    exact: dict[str, Agreement],
    ratio: float,
) -> dict[str, float | bool]:
    """With a bf16 engine at lag 0, where not said otherwise."""
    found = {row.variant: row.measured for row in rows if row.engine == "bfloat16" and row.lag == 0}
    without, replayed, ordered = found["no replay"], found["replay"], found["ordered"]
    at = next(one for one in swept if one.ratio == ratio)
    return {
        "k3_removed": _removed(without.bucket.divergence.k3, ordered.bucket.divergence.k3),
        "disagreement_removed": _removed(without.used_differ, ordered.used_differ),
        "tail_removed_by_replay": _removed(without.bucket.divergence.p999_dlogp, replayed.bucket.divergence.p999_dlogp),
        "step_time_cost": steps["ordered, bfloat16"].relative - 1,
        "engine_cost": 1 - 1 / engines["bfloat16, routes"].relative,
        "corrupt_k3_over_clean": at.corrupt.bucket.divergence.k3 / at.clean.bucket.divergence.k3,
        "shift_alarm": "misaligned" in alarming({ALL: at.shift.bucket}),
        "exact_max_abs_dlogp": max(agreement.max_abs_dlogp for agreement in exact.values()),
        "exact_cost": steps["exact, bfloat16"].relative / steps["ordered, bfloat16"].relative,
    }


def _removed(before: float, after: float) -> float:
    return 1 - after / before if before else 0.0
