"""From what was played and graded to what is kept: the payload in the store, and the receipt that points to it.

The receipt is a function of the payload, so that it can be written again from the store by anyone.
"""

from __future__ import annotations

import numpy as np

from stretto.config import GradingConfig, ShapingConfig
from stretto.grading.detectors import inspect_calls
from stretto.grading.outcome import Grade, settle
from stretto.grading.reward import reward
from stretto.harness.behaviour import bad_calls, behaviour
from stretto.harness.ending import Ending
from stretto.harness.loop import Played
from stretto.records import Lease, Outcome, Receipt, Rollout


def store_key(rollout: str) -> str:
    return f"rollouts/{rollout}.msgpack"


def payload(
    lease: Lease,
    played: Played,
    grade: Grade | None,
    config: GradingConfig,
    *,
    shaping: ShapingConfig | None = None,
    worker: str,
    started: float,
    ended: float,
) -> Rollout:
    """The immutable record of one rollout. `grade` is there when it was submitted; all others are unsolved. In an
    evaluation it is also there for what was left behind, and decides nothing but `agreed`."""
    settled = settle(played.ending, grade if played.ending is Ending.SUBMITTED else None, played.reason)
    solved = settled.solved and settled.outcome is Outcome.SCORED
    shown = behaviour(played.calls, solved)
    items = reward(settled.outcome, solved, bad_calls(played.calls), config, shaping, played.effort, shown)
    return Rollout(
        id=lease.rollout,
        group=lease.group,
        task=lease.task.id,
        purpose=lease.purpose,
        outcome=settled.outcome,
        reward=float(sum(items.values())),
        rewards=items,
        solved=solved,
        segments=played.segments,
        calls=played.calls,
        messages=played.messages,
        turns=played.turns,
        engine=played.engine or lease.engine,
        worker=worker,
        started=started,
        ended=ended,
        reason=settled.reason,
        detected=[*settled.detected, *inspect_calls(played.calls)],
        agreed=grade is not None and 0 < grade.total == grade.passed,
        tools=played.tools,
        effort=vars(played.effort),
    )


def receipt(rollout: Rollout, version: int) -> Receipt:
    """The receipt for a payload; `version`, the lease's, stands in where nothing was sampled."""
    sampled = [segment.versions_T[segment.sampled_T] for segment in rollout.segments]
    versions = np.concatenate(sampled) if sampled else np.zeros(0, np.int32)
    return Receipt(
        rollout=rollout.id,
        group=rollout.group,
        purpose=rollout.purpose,
        worker=rollout.worker,
        outcome=rollout.outcome,
        reward=rollout.reward,
        solved=rollout.solved,
        key=store_key(rollout.id),
        oldest_version=int(versions.min()) if len(versions) else version,
        newest_version=int(versions.max()) if len(versions) else version,
        tokens=sum(len(segment.ids_T) for segment in rollout.segments),
        sampled=len(versions),
        turns=rollout.turns,
        seconds=rollout.ended - rollout.started,
        engine=rollout.engine,
        behaviour=behaviour(rollout.calls, rollout.solved),
        reason=rollout.reason,
    )
