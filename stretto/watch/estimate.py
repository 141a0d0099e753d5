"""How long a run will take, before anything was measured: said in its first line, corrected as it goes."""

from __future__ import annotations

from stretto.config import Config

START_SECONDS = 15.0
ROLLOUTS_PER_SECOND = 30.0  # nano model, one engine on one core of a laptop
STEP_SECONDS_PER_ROLLOUT = 1 / 28


def evaluation_rollouts(config: Config, held: int) -> int:
    """Rollouts of one full evaluation: all `held` tasks of the held-out splits, sampled and greedy."""
    return held * (config.eval.attempts + 1)


def step_rollouts(config: Config) -> int:
    return config.rollouts.group_size * config.rollouts.groups_per_step


def seconds(config: Config, held: int) -> float:
    """Of the whole run with the shipped model on two cores; other models need their own measurement."""
    evaluations = 2 * evaluation_rollouts(config, held) / ROLLOUTS_PER_SECOND
    return START_SECONDS + evaluations + config.trainer.steps * step_rollouts(config) * STEP_SECONDS_PER_ROLLOUT


def exactly(seconds: float) -> str:
    """'42 s', '2 min 05 s', '1 h 20 min': for what was measured."""
    if seconds < 60 or seconds >= 3600:
        return in_words(seconds)
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def in_words(seconds: float) -> str:
    """'40 s', '5 min', '1 h 20 min'."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
