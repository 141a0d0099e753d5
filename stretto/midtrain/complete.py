"""Greedy continuations of many prompts at once, by the native engine without its thread: how evaluations get text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stretto.config import EngineConfig
from stretto.engine.runner import Events, Runner, Serving
from stretto.engine.scheduler import Ended
from stretto.model import checkpoint
from stretto.model.transformer import Transformer
from stretto.records import GenerateRequest, Sampling

SLOTS = 16
"""Prompts that are continued at once."""


def greedy(
    model: Transformer, prompts: Sequence[list[int]], limits: Sequence[int], stop: Collection[int]
) -> list[list[int]]:
    """The most likely continuation of each prompt, up to a token of `stop` (left out) or its limit of tokens.

    `model` no longer learns afterwards: of one in training give a `frozen` copy. Raises BadRequest for an empty prompt.
    """
    if not prompts:
        return []
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    events: Events = []
    config = EngineConfig(slots=min(SLOTS, len(prompts)), max_tokens=longest)
    runner = Runner(model, config, serving=Serving(0, ""), seed=0, deliver=events.extend)
    keys = []
    for prompt, limit in zip(prompts, limits, strict=True):
        sampling = Sampling(temperature=0.0)
        keys.append(runner.submit(GenerateRequest(ids=prompt, max_tokens=limit, stop=[*stop], sampling=sampling)))
    while runner.advance():
        pass
    answers = {event.job.key: event.response.ids for event in events if isinstance(event, Ended) and event.response}
    return [ids[:-1] if ids and ids[-1] in stop else ids for ids in (answers[key] for key in keys)]


def frozen(model: Transformer) -> Transformer:
    """A copy with the same weights and numerics."""
    copy = checkpoint.empty(model.spec, numerics=model.numerics)
    copy.load_state_dict(model.state_dict())
    return copy
