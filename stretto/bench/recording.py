"""Rollouts recorded in this process: the native engine, the harness with its boxes, the grader, all of them real.

    tasks ─▶ leases ─▶ harness.play ⇄ engine's Service ─▶ grader ─▶ rollouts ─▶ advantages ─▶ Batch

What differs from a run: no HTTP, no ledger, and the engine stands still while the trainer learns: every token of
a recording is of one version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from stretto.config import Config
from stretto.engine.client import EngineClient, EngineError
from stretto.engine.contract import Fault, Unavailable
from stretto.engine.service import Service
from stretto.grading.grader import Grader
from stretto.harness.chat import Chat
from stretto.harness.ending import Ending
from stretto.harness.loop import play
from stretto.harness.spans import Spans
from stretto.model.transformer import Transformer
from stretto.records import (
    Batch,
    BatchItem,
    GenerateRequest,
    GenerateResponse,
    Lease,
    Outcome,
    Rollout,
    Sampling,
    Task,
    encode,
)
from stretto.rollouts.advantages import advantages, has_signal
from stretto.rollouts.desk import GradingDesk
from stretto.rollouts.record import payload, store_key
from stretto.sandbox.pool import BoxPool
from stretto.tasks.repair import generate

DEADLINE_SECONDS = 240.0


@dataclass(frozen=True)
class Recording:
    """Groups of rollouts that one version made."""

    version: int
    groups: list[list[Rollout]]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group]

    @property
    def solve_rate(self) -> float:
        return sum(rollout.solved for rollout in self.rollouts) / max(1, len(self.rollouts))


def repair_tasks(count: int, seed: int) -> list[Task]:
    return [made.task for made in islice(generate("train", seed), count)]


def record(model: Transformer, version: int, tasks: Sequence[Task], attempts: int, config: Config) -> Recording:
    """`attempts` rollouts of each task, sampled as in training. Raises SandboxUnavailable."""
    return asyncio.run(_record(model, version, tasks, attempts, config))


def batch(recording: Recording, weighed: bool = True) -> Batch:
    """All groups of a recording as the batch of one step, with the advantages that training would give; or, not
    `weighed`, every rollout with advantage 1, so that none is left out."""
    items = []
    for group in recording.groups:
        rewards = [rollout.reward for rollout in group]
        items += [
            BatchItem(
                rollout=rollout.id,
                group=rollout.group,
                key=store_key(rollout.id),
                reward=rollout.reward,
                advantage=advantage if weighed else 1.0,
                oldest_version=recording.version,
            )
            for rollout, advantage in zip(group, advantages(rewards), strict=True)
            if has_signal(rewards) or not weighed
        ]
    return Batch(
        run="bench",
        version=recording.version,
        items=items,
        groups=len(recording.groups),
        rollouts=len(recording.rollouts),
        dropped_equal=sum(not has_signal([rollout.reward for rollout in group]) for group in recording.groups),
        solve_rate=recording.solve_rate,
        staleness=[0] * len(items),
    )


def payloads(recording: Recording, items: Sequence[BatchItem]) -> list[bytes]:
    """As they would lie in the store."""
    by_id = {rollout.id: rollout for rollout in recording.rollouts}
    return [encode(by_id[item.rollout]) for item in items]


class _Here(EngineClient):
    """The client of an engine that lives in this process."""

    def __init__(self, service: Service) -> None:
        self.url = "in this process"
        self._service = service

    async def generate(self, request: GenerateRequest, timeout: float) -> GenerateResponse:
        try:
            async with asyncio.timeout(timeout):
                return await self._service.generate(request)
        except (Unavailable, Fault) as error:
            raise EngineError(str(error)) from error

    async def release(self, session: str) -> None:
        await self._service.release(session)


async def _record(model: Transformer, version: int, tasks: Sequence[Task], attempts: int, config: Config) -> Recording:
    pool, chat = BoxPool(config.sandbox), Chat(config.model.folder)
    await pool.start()
    grader = Grader(config.grading, pool)
    service = Service(model, config.engine, version=version, seed=config.run.seed, name=f"bench-{version}")
    try:
        desk, spans, engine = GradingDesk(grader), Spans(chat), _Here(service)
        rollouts = config.rollouts
        sampling = Sampling(temperature=rollouts.temperature, top_p=rollouts.top_p, top_k=rollouts.top_k)

        async def one(lease: Lease) -> Rollout:
            desk.expect(lease)
            started = time.time()
            played = await play(lease, engine, chat, pool, config.harness, spans)
            grade = None
            if played.ending is Ending.SUBMITTED:
                grade = await desk.grade(lease, played.files)
            else:
                desk.absent(lease)
            return payload(lease, played, grade, config.grading, worker="bench", started=started, ended=time.time())

        made = await asyncio.gather(
            *(
                one(
                    Lease(
                        rollout=f"v{version}-g{number}-{attempt}",
                        group=f"v{version}-g{number}",
                        purpose="train",
                        task=task,
                        sampling=sampling,
                        engine=engine.url,
                        version=version,
                        deadline=time.time() + DEADLINE_SECONDS,
                    )
                )
                for number, task in enumerate(tasks)
                for attempt in range(attempts)
            )
        )
    finally:
        await service.close()
        await grader.close()
        await pool.close()
    kept = [rollout for rollout in made if rollout.outcome is not Outcome.INFRA]
    names = dict.fromkeys(rollout.group for rollout in made)
    return Recording(version, [[rollout for rollout in kept if rollout.group == name] for name in names])
