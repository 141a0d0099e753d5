"""An engine for `harness.play` that samples with transformers' `generate`: all rollouts of a batch, turn by turn.

    play ─▶ generate(request) ─▶ waits until every rollout still playing has asked ─▶ one `generate` for all of them

This is how a trainer samples that has no engine of its own (TRL's loop of turns and tools does the same): the histories
are padded on the left and computed anew with each turn. It gives no log-probs of the sampled tokens, as such a trainer
computes them in its own forward pass: zeros stand in their place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stretto.records import GenerateRequest, GenerateResponse


class Lockstep:
    """`model` is a causal LM of transformers. `playing` rollouts begin; each says `left` when it has ended."""

    url = "lockstep"

    def __init__(self, model: Any, pad: int, playing: int) -> None:
        self._model, self._pad, self._playing = model, pad, playing
        self._asked: list[tuple[GenerateRequest, asyncio.Future[GenerateResponse]]] = []

    async def generate(self, request: GenerateRequest, timeout: float = 0.0) -> GenerateResponse:
        """Answered when everybody has asked; `timeout` is an engine's, and there is none here."""
        answer: asyncio.Future[GenerateResponse] = asyncio.get_running_loop().create_future()
        self._asked.append((request, answer))
        self._go_on()
        return await answer

    async def release(self, session: str) -> None:
        """No keys and values are kept."""

    def left(self) -> None:
        self._playing -= 1
        self._go_on()

    def _go_on(self) -> None:
        if not self._asked or len(self._asked) < self._playing:
            return
        asked, self._asked = self._asked, []
        for (request, answer), ids in zip(asked, self._sample([request for request, _ in asked]), strict=True):
            if not answer.done():
                answer.set_result(_response(ids, request))

    @torch.no_grad()
    def _sample(self, requests: Sequence[GenerateRequest]) -> list[list[int]]:
        width = max(len(request.ids) for request in requests)
        ids_BT = torch.full((len(requests), width), self._pad)
        mask_BT = torch.zeros_like(ids_BT)
        for row, request in enumerate(requests):
            ids_BT[row, width - len(request.ids) :] = torch.tensor(request.ids)
            mask_BT[row, width - len(request.ids) :] = 1
        first = requests[0]
        self._model.eval()
        out_BT = self._model.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            max_new_tokens=max(request.max_tokens for request in requests),
            do_sample=True,
            temperature=first.sampling.temperature,
            top_k=0,
            top_p=1.0,
            eos_token_id=first.stop,
            pad_token_id=self._pad,
        )
        self._model.train()
        return [_turn(row, request) for row, request in zip(out_BT[:, width:].tolist(), requests, strict=True)]


def _turn(ids: list[int], request: GenerateRequest) -> list[int]:
    """Up to the first token that ends a turn, within the limit."""
    end = next((place + 1 for place, token in enumerate(ids) if token in request.stop), len(ids))
    return ids[: min(end, request.max_tokens)]


def _response(ids: list[int], request: GenerateRequest) -> GenerateResponse:
    return GenerateResponse(
        ids=ids,
        logprobs=np.zeros(len(ids), "<f4").tobytes(),
        versions=np.zeros(len(ids), "<i4").tobytes(),
        support=None,
        routes=None,
        route_shape=(0, 0),
        route_bits=8,
        finish="stop" if ids[-1] in request.stop else "length",
        cached=0,
    )
