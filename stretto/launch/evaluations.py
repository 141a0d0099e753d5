"""Which evaluations a run makes, and what is left of them after a restart. Pure.

Before and after training: every held-out task and every task from new templates, sampled (pass@k uses all attempts)
and greedy. In between: the first few held-out tasks, one attempt each, beside the training. A split without tasks is
not evaluated; `sizes` counts the run's tasks by split (`run_folder.sizes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stretto.config import Config
from stretto.launch.client import Evaluation
from stretto.launch.run_folder import HELD


def full(config: Config, sizes: Mapping[str, int], phase: str, done: Iterable[str] = ()) -> list[Evaluation]:
    """The evaluations of a phase (`before`, `after`) whose names are not in `done`."""
    splits = [split for split in HELD if sizes.get(split)]
    sampled = [
        Evaluation(f"{phase}-{split}", split, config.eval.attempts, config.rollouts.temperature) for split in splits
    ]
    greedy = [Evaluation(f"{phase}-{split}-greedy", split, 1, 0.0) for split in splits]
    return [evaluation for evaluation in sampled + greedy if evaluation.name not in set(done)]


def held(sizes: Mapping[str, int]) -> int:
    """Tasks that are evaluated before and after."""
    return sum(sizes.get(split, 0) for split in HELD)


def during(config: Config, sizes: Mapping[str, int], version: int, done: Iterable[str] = ()) -> Evaluation | None:
    """The short evaluation due at `version`, if there is one."""
    every, tasks = config.eval.every, min(config.eval.during_tasks, sizes.get("heldout", 0))
    if not every or not tasks or version < every or version >= config.trainer.steps:
        return None
    name = f"during-{version - version % every:06d}"
    return None if name in set(done) else Evaluation(name, "heldout", 1, config.rollouts.temperature, tasks)


def finished(lines: Iterable[dict[str, Any]], phase: str) -> list[str]:
    """Names of the evaluations of a phase that metrics.jsonl holds results of."""
    return [line["name"] for line in lines if line["kind"] == "eval" and str(line.get("name", "")).startswith(phase)]
