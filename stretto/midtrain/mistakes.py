"""Transcripts of recovering from one's own mistakes.

A model that only sees the mistakes of a random mutator never sees *its own favourite* fail, and after a failed test it
writes the same edit again. Here the first edit is the model's: it reads the file and patches a line. Where that is
wrong, the transcript goes on with the failed test and the right edit. The wrong edit itself is context only. (The idea
is DAgger's, arXiv 1011.0686: learn the right action in the states that one's own policy reaches.)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.harness.chat import Chat
from stretto.harness.parse import parse
from stretto.midtrain.demonstrator import Document, Endless, Transcript
from stretto.model.transformer import Transformer
from stretto.tasks.repair import Repair, generate

TURN = 40
"""Tokens the model may use for its edit."""


def corrected(model: Transformer, chat: Chat, seed: int, batch: int = 64) -> Iterator[Document]:
    """An endless stream of documents in which `model` erred and was put right, on training tasks only."""
    rng = random.Random(f"mistakes/{seed}")
    noise = torch.Generator().manual_seed(seed)
    repairs = generate("train", seed)
    while True:
        started = [_look(repair, chat) for repair in itertools.islice(repairs, batch)]
        turns = sample_turn(model, [t.ids for t in started], chat.stop[0], TURN, noise)
        for transcript, turn in zip(started, turns, strict=True):
            document = _put_right(transcript, chat.decode(turn), rng)
            if document is not None:
                yield document


def _look(repair: Repair, chat: Chat) -> Transcript:
    transcript = Transcript(repair, chat)
    transcript.read()
    return transcript


def _put_right(transcript: Transcript, turn: str, rng: random.Random) -> Document | None:
    """None when the model's edit was right, or no edit at all, or one that makes an endless program."""
    repair = transcript.repair
    edit = next((attempt.arguments for attempt in parse(turn) if attempt.name == "edit_file"), {})
    line, text = edit.get("line"), edit.get("text")
    if not isinstance(line, int) or not isinstance(text, str) or not 2 <= line <= len(repair.broken):
        return None
    if (line, text) == (repair.line, repair.fix) or "\n" in text:
        return None
    transcript.edit(line, text, weight=0.0)
    try:
        transcript.test()
    except Endless:
        return None
    if not transcript.passed:
        transcript.edit(repair.line, repair.fix)
        transcript.test()
    transcript.submit()
    return transcript.document()


@torch.inference_mode()
def sample_turn(
    model: Transformer, prompts: list[list[int]], stop: int, limit: int, noise: torch.Generator
) -> list[list[int]]:
    """One turn for each prompt, up to `stop` or `limit` tokens: half of them at temperature 1, half greedy."""
    longest = max(map(len, prompts)) + limit
    attend = _Cached(model, len(prompts), longest)
    turns: list[list[int]] = [[] for _ in prompts]
    open_rows = list(range(len(prompts)))
    fed = [list(prompt) for prompt in prompts]
    while open_rows:
        counts = [len(fed[row]) for row in open_rows]
        starts = [len(prompts[row]) + len(turns[row]) - count for row, count in zip(open_rows, counts, strict=True)]
        ids_T = torch.tensor([i for row in open_rows for i in fed[row]])
        positions_T = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        attend.at(open_rows, starts, counts)
        hidden_TD = model(ids_T, positions_T, attend).hidden_TD
        logits_BV = model.logits(hidden_TD[torch.tensor(counts).cumsum(0) - 1])
        drawn = torch.multinomial(torch.softmax(logits_BV, -1), 1, generator=noise).squeeze(1)
        best = logits_BV.argmax(-1)
        still = []
        for number, row in enumerate(open_rows):
            token = int(drawn[number] if row % 2 else best[number])
            turns[row].append(token)
            fed[row] = [token]
            if token != stop and len(turns[row]) < limit:
                still.append(row)
        open_rows = still
    return turns


class _Cached:
    """Attention of short, growing sequences, one cache row each."""

    def __init__(self, model: Transformer, rows: int, tokens: int):
        spec = model.spec
        shape = (spec.layers, rows, spec.kv_heads, tokens, spec.head_dim)
        self.k, self.v, self.share = torch.zeros(shape), torch.zeros(shape), spec.heads // spec.kv_heads

    def at(self, rows: list[int], starts: list[int], counts: list[int]) -> None:
        self.spans = list(zip(rows, starts, counts, strict=True))

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, exact: bool = False) -> Tensor:
        if exact:
            raise ValueError("mistakes are sampled in plain arithmetic: load the model without exact numerics")
        outs, at = [], 0
        for row, start, count in self.spans:
            span, end = slice(at, at + count), start + count
            self.k[layer, row, :, start:end] = k_TGd[span].transpose(0, 1)
            self.v[layer, row, :, start:end] = v_TGd[span].transpose(0, 1)
            k, v = (x[layer, row, :, :end].repeat_interleave(self.share, 0) for x in (self.k, self.v))
            out = F.scaled_dot_product_attention(q_THd[span].transpose(0, 1), k, v, is_causal=count > 1)
            outs.append(out.transpose(0, 1))
            at += count
        return torch.cat(outs)
