"""What agreement costs: seconds of a training step and tokens/s of an engine, each against a case without replay.

Seconds are CPU seconds of this process, which computes in one thread: on an idle core that is the time that passes. The
machine may be shared and noisy, so cases take turns, and each round gives one ratio to its own baseline; the median of
the ratios is the result.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stretto.bench.forced import force
from stretto.bench.variants import MICROBATCH, Variant
from stretto.config import EngineConfig, TrainerConfig
from stretto.model.transformer import Transformer
from stretto.records import Segment
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.samples import Sample
from stretto.trainer.step import Distribution, learn


@dataclass(frozen=True)
class Cost:
    """Medians over rounds. `relative` is seconds over the baseline's seconds of the same round."""

    seconds: float
    relative: float


def alternate(cases: Mapping[str, Callable[[], object]], baselines: Mapping[str, str], rounds: int) -> dict[str, Cost]:
    """Time each case once a round, after one round that is not counted; `baselines` names each case's baseline.

    Every other round goes backwards, so that no case always follows the same one.
    """
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name in list(cases)[:: -1 if number % 2 else 1]:
            start = time.process_time()
            cases[name]()
            if number:
                taken[name].append(time.process_time() - start)
    return {
        name: Cost(
            statistics.median(seconds),
            statistics.median(a / b for a, b in zip(seconds, taken[baselines[name]], strict=True)),
        )
        for name, seconds in taken.items()
    }


def step(model: Transformer, samples: Sequence[Sample], variant: Variant) -> Callable[[], object]:
    """A whole step, from packing to the optimizer, at learning rate 0 so that each round does the same."""
    settings = TrainerConfig(microbatch_tokens=MICROBATCH, replay=variant.replay, replay_ratio=variant.ratio)
    optimizer = MasterAdamW(model, settings.betas, settings.weight_decay)
    seen = samples if variant.replay else [dataclasses.replace(sample, routes_TLK=None) for sample in samples]
    return lambda: learn(model, optimizer, seen, settings, Distribution(1.0), 0.0)


def generation(
    model: Transformer, segments: Sequence[Segment], config: EngineConfig, capture: bool
) -> Callable[[], object]:
    """The engine's work for `segments`, with or without recording and sending routes."""
    return lambda: force(model, segments, config, capture)
