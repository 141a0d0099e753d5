"""Evaluating a model behind any OpenAI-compatible endpoint: tasks, boxes and graders here, the model anywhere.

    task × attempts ─▶ talk (harness/remote.py) ⇄ endpoint, box ─▶ grader, all attempts of a task together ─▶ store

There are no token ids, so nothing of it can be trained on. Attempts that end as `infra` are tried once more.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import yarl

from stretto.config import Config
from stretto.grading.grader import Grader
from stretto.grading.outcome import Grade, settle
from stretto.grading.reward import reward
from stretto.harness.behaviour import bad_calls, behaviour
from stretto.harness.declare import of
from stretto.harness.ending import Ending
from stretto.harness.remote import Endpoint, Talked, talk
from stretto.harness.session import Session
from stretto.harness.toolset import ToolSet
from stretto.launch.local import LaunchError
from stretto.records import Outcome, Rollout, Task, encode
from stretto.sandbox.pool import BoxPool
from stretto.weights.store import Store

PURPOSE = "evaluation"
_SOON = aiohttp.ClientTimeout(total=10)
KEY = "OPENAI_API_KEY"
ROOMY = [
    *("harness.max_turns=50", "harness.max_turn_tokens=4096", "harness.max_tokens=65536", "engine.max_tokens=65536"),
    *("rollouts.concurrency=8", "rollouts.deadline_seconds=1800", "sandbox.seconds=30", "sandbox.memory_mib=1024"),
    *("sandbox.workspace_mib=512", "grading.seconds=10"),
]
"""Budgets for models that nobody here trains, where overrides don't say otherwise."""


Tell = Callable[[int, int], None]
"""Is told how many attempts have ended, of how many."""


@dataclass(frozen=True)
class Played:
    talked: Talked
    started: float
    ended: float


def found(url: str, model: str) -> tuple[str, str]:
    """The base URL, with `/v1` where the endpoint needs it, and the model's name there. Raises LaunchError."""
    return asyncio.run(_found(url.rstrip("/"), model))


async def _found(url: str, model: str) -> tuple[str, str]:
    problem = ""
    async with _http(url) as http:
        for base in (url, f"{url}/v1"):
            try:
                async with http.get(f"{base}/models", headers=_headers(), timeout=_SOON) as answer:
                    served = [str(entry["id"]) for entry in (await answer.json(content_type=None))["data"]]
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
                problem = problem or f"{error or type(error).__name__}"
                continue
            if model and model not in served:
                raise LaunchError(f"{base} serves no model {model!r}; it has {', '.join(served[:10])}")
            if not model and len(served) != 1:
                raise LaunchError(
                    f"{base} serves {len(served)} models; name one with --model ({', '.join(served[:10])})"
                )
            return base, model or served[0]
    if model:  # some endpoints list nothing
        return url, model
    raise LaunchError(f"there is no engine of ours at {url}, and no OpenAI-compatible endpoint ({problem})")


def _http(url: str) -> aiohttp.ClientSession:
    """A client; only endpoints elsewhere are behind the user's proxy."""
    return aiohttp.ClientSession(trust_env=yarl.URL(url).host not in ("127.0.0.1", "localhost", "::1"))


def evaluate(
    config: Config, tasks: list[Task], url: str, model: str, attempts: int, temperature: float, tell: Tell
) -> dict[str, Any]:
    """The counts of an evaluation, as the orchestrator's, with `agreed` beside `solved`."""
    return asyncio.run(_evaluate(config, Store(config.store_url), tasks, url, model, attempts, temperature, tell))


async def _evaluate(
    config: Config, store: Store, tasks: list[Task], url: str, model: str, attempts: int, temperature: float, tell: Tell
) -> dict[str, Any]:
    for name in ("client", "compact_tokens"):
        if getattr(config.harness, name):
            raise LaunchError(f"harness.{name} goes with a checkpoint whose tokens are recorded, not with an endpoint")
    pool = BoxPool(config.sandbox)
    toolsets = {task.id: of(task, config.harness.tools) for task in tasks}
    await pool.start()
    grader = Grader(config.grading, pool)
    slots = asyncio.Semaphore(config.rollouts.concurrency)
    ended = 0
    try:
        async with _http(url) as http:
            endpoint = Endpoint(url, model, http, os.environ.get(KEY, ""), temperature)

            async def attempt(task: Task) -> Played:
                nonlocal ended
                async with slots:
                    played = await _play(task, toolsets[task.id], endpoint, pool, config)
                    if played.talked.ending is Ending.INFRA:
                        played = await _play(task, toolsets[task.id], endpoint, pool, config)
                ended += 1
                tell(ended, len(tasks) * attempts)
                return played

            async def judged(task: Task) -> list[Rollout]:
                played = await asyncio.gather(*(attempt(task) for _ in range(attempts)))
                grades = await _grades(grader, task, played, config.run.seed)
                return [
                    _record(task, number, p, grade, config, model, url, toolsets[task.id])
                    for number, (p, grade) in enumerate(zip(played, grades, strict=True))
                ]

            rollouts = await asyncio.gather(*map(judged, tasks))
    finally:
        await grader.close()
        await pool.close()
    for rollout in (rollout for group in rollouts for rollout in group):
        store.put(f"rollouts/{rollout.id}.msgpack", encode(rollout))
    return counts([task.id for task in tasks], attempts, rollouts)


async def _play(task: Task, toolset: ToolSet, endpoint: Endpoint, pool: BoxPool, config: Config) -> Played:
    session = Session(task, pool, toolset)
    started = time.time()
    try:
        talked = await talk(session, endpoint, config.harness, config.rollouts.deadline_seconds)
    finally:
        await session.close()
    return Played(talked, started, time.time())


async def _grades(grader: Grader, task: Task, played: list[Played], seed: int) -> list[Grade | None]:
    """Of everything that was left behind, handed in or not."""
    there = [p for p in played if p.talked.files or p.talked.ending is Ending.SUBMITTED]
    grades = iter(await grader.grade(task, [p.talked.files for p in there], seed) if there else [])
    return [next(grades) if p in there else None for p in played]


def _record(
    task: Task, number: int, played: Played, grade: Grade | None, config: Config, model: str, url: str, toolset: ToolSet
) -> Rollout:
    talked = played.talked
    settled = settle(talked.ending, grade if talked.ending is Ending.SUBMITTED else None, talked.reason)
    solved = settled.solved and settled.outcome is Outcome.SCORED
    shown = behaviour(talked.calls, solved)
    items = reward(settled.outcome, solved, bad_calls(talked.calls), config.grading, config.shaping, None, shown)
    return Rollout(
        id=f"{PURPOSE}-{task.id.replace('/', '-')}-{number}",
        group=f"{PURPOSE}-{task.id}",
        task=task.id,
        purpose=PURPOSE,
        outcome=settled.outcome,
        reward=float(sum(items.values())),
        rewards=items,
        solved=solved,
        segments=[],
        calls=talked.calls,
        messages=talked.messages,
        turns=talked.turns,
        engine=f"{url} {model}",
        worker="eval",
        started=played.started,
        ended=played.ended,
        reason=settled.reason,
        tools=toolset.version,
        agreed=grade is not None and 0 < grade.total == grade.passed,
    )


def counts(ids: list[str], attempts: int, rollouts: list[list[Rollout]]) -> dict[str, Any]:
    """Per task, in the order of `ids`: how many of how many valid attempts solved it, and how many agree."""
    valid = [[rollout for rollout in group if rollout.outcome is not Outcome.INFRA] for group in rollouts]
    flat = [rollout for group in valid for rollout in group]
    shown = [behaviour(rollout.calls, rollout.solved) for rollout in flat]
    reasons = [rollout.reason for group in rollouts for rollout in group if rollout.outcome is Outcome.INFRA]
    return {
        "ids": ids,
        "attempts": attempts,
        "solved": [sum(rollout.solved for rollout in group) for group in valid],
        "agreed": [sum(rollout.agreed for rollout in group) for group in valid],
        "valid": [len(group) for group in valid],
        "outcomes": dict(Counter(rollout.outcome.value for group in rollouts for rollout in group)),
        "behaviour": {name: sum(s[name] for s in shown) / len(shown) for name in shown[0]} if shown else {},
        "infra": reasons[0] if reasons else "",
    }


def _headers() -> dict[str, str]:
    key = os.environ.get(KEY, "")
    return {"Authorization": f"Bearer {key}"} if key else {}
