"""Who guesses the next tokens: the checkpoint's heads for multi-token prediction, or what the sequence repeats.

A guess is never trusted (`lookahead`), so a drafter may be wrong, forget, or lag behind the weights that sample: heads
stay those the engine started with, and only fewer of their guesses pass.

Letters: `B` decoding slots, `S` slots, `T` rows of the pass, `N` rows sampled from, `D` width.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from stretto.engine import guess
from stretto.engine.cache import KVCache
from stretto.engine.forward import Passed, angle_tables, steps_fit
from stretto.engine.guess import HeadWeights, Sizes
from stretto.engine.layers import flattened
from stretto.engine.narrow import narrowed
from stretto.engine.scheduler import Plan, Scheduler
from stretto.model.attention import Attention
from stretto.model.mlp import Mlp
from stretto.model.moe import MoE
from stretto.model.mtp import Head, Heads
from stretto.model.transformer import Transformer


class Drafter(Protocol):
    def propose(self, plan: Plan, scheduler: Scheduler, model: Transformer) -> list[list[int]]:
        """Guesses for each decoding slot of a pass, not more than the slot may still take."""
        ...

    def absorb(self, plan: Plan, scheduler: Scheduler, model: Transformer, passed: Passed) -> None:
        """Learn what a committed pass computed."""
        ...


def can_guess(heads: Heads | None, model: Transformer) -> bool:
    """Whether the engine runs these heads: those of a network that it runs in steps (`forward`)."""
    return heads is not None and steps_fit(model)


class Repeats:
    """Prompt lookup (arXiv 2304.04487): what followed the last occurrence of the sequence's last few tokens. Agents
    write much of what they have read."""

    LONGEST, SHORTEST = 4, 2

    def __init__(self, count: int) -> None:
        self._count = count

    def propose(self, plan: Plan, scheduler: Scheduler, model: Transformer) -> list[list[int]]:
        slots = scheduler.slots
        return [
            self._follow(slots.ids_SM[slot, : slots.known_S[slot]], _room(scheduler, slot, self._count))
            for slot in plan.slots_T.tolist()
        ]

    def absorb(self, plan: Plan, scheduler: Scheduler, model: Transformer, passed: Passed) -> None: ...

    def _follow(self, ids: np.ndarray, count: int) -> list[int]:
        alike = np.flatnonzero(ids[:-1] == ids[-1])  # ends of a common suffix of one token, then of more
        found = alike[:0]
        for length in range(2, self.LONGEST + 1):
            alike = alike[alike >= length - 1]
            alike = alike[ids[alike - length + 1] == ids[-length]] if length <= len(ids) else alike[:0]
            if not len(alike):
                break
            if length >= self.SHORTEST:
                found = alike
        return ids[found[-1] + 1 :][:count].tolist() if len(found) else []


class _Rows(NamedTuple):
    """Rows of one slot, one after the other, and the network's states there."""

    slot: int
    end: int  # position after the last one
    count: int
    hidden: np.ndarray  # flat

    def following(self, scheduler: Scheduler) -> np.ndarray:
        """The token after each of them."""
        return scheduler.slots.ids_SM[self.slot, self.end - self.count + 1 : self.end + 1].astype(np.int64)


class Guesser:
    """The first head of a checkpoint, used again for each further guess. Its keys and values are one more layer of the
    engine's cache, so that slots are shared and copied with them."""

    ROW = 0.3
    """Chance that a run of guesses comes true below which its last one is not worth a row of the pass."""
    FURTHER = 0.45
    """The same, below which it is not worth making another one."""

    def __init__(self, heads: Heads, cache: KVCache, count: int) -> None:
        spec = heads.spec
        self._count = count
        self._weights, self._sizes = _head(heads.head(0), heads)
        self._k, self._v = cache.arrays[spec.layers]
        self._cos, self._sin = angle_tables(spec, cache.tokens)
        self._rows: dict[int, _Rows] = {}  # by slot: the last ones, of the last pass
        self._guesses_K = np.zeros(count, np.int64)
        self._network: Transformer | None = None
        self._warm_up()

    def _warm_up(self) -> None:
        """Have everything compiled now. Writes into the first row of the first slot."""
        width, vocab = self._sizes.width, self._sizes.vocab
        table, state, one = np.zeros(vocab * width, np.float32), np.zeros(width, np.float32), np.zeros(1, np.int64)
        rest = self._cos, self._sin, self._k, self._v
        chance = 0.5, 0.5, np.float32(1), np.uint64(0), np.zeros(vocab, bool)
        head, here = table.astype(np.uint16), (self._weights, self._sizes, table)
        guess.guess(*here, head, state, one, 0, 1, self._guesses_K, *chance, *rest)
        guess.remember(*here, state, one, one, one, one, *rest)

    def propose(self, plan: Plan, scheduler: Scheduler, model: Transformer) -> list[list[int]]:
        embedding, head = self._shared(model)
        guesses_B: list[list[int]] = []
        for slot, position in zip(plan.slots_T.tolist(), plan.positions_T.tolist(), strict=True):
            count, rows = _room(scheduler, slot, self._count), self._rows.get(slot)
            if count == 0 or rows is None or rows.end != position:
                guesses_B.append([])
                continue
            del self._rows[slot]
            made = guess.guess(
                self._weights,
                self._sizes,
                embedding,
                head,
                rows.hidden,
                rows.following(scheduler),
                slot,
                position,
                self._guesses_K[:count],
                self.ROW,
                self.FURTHER,
                scheduler.temperature_S[slot],
                scheduler.seed_S[slot],
                scheduler.stop_SV[slot],
                self._cos,
                self._sin,
                self._k,
                self._v,
            )
            guesses_B.append(self._guesses_K[:made].tolist())
        return guesses_B

    def absorb(self, plan: Plan, scheduler: Scheduler, model: Transformer, passed: Passed) -> None:
        """The states that the next guesses start from, which make the keys and values of these rows, too; those of all
        other rows now."""
        assert passed.hidden_TD is not None
        hidden_TD = passed.hidden_TD.numpy()
        left, self._rows = self._rows, {}
        for rows in left.values():  # nobody guessed there
            self._remember(model, rows, scheduler)
        start = 0
        while start < plan.decoding:  # rows of a slot lie together
            slot, end = int(plan.slots_T[start]), start + 1
            while end < plan.decoding and plan.slots_T[end] == slot:
                end += 1
            rows = _Rows(slot, int(plan.positions_T[end - 1]) + 1, end - start, hidden_TD[start:end].reshape(-1))
            self._keep(model, rows, scheduler)
            start = end
        for chunk in plan.chunks:
            count = chunk.end - chunk.start
            rows = _Rows(chunk.slot, chunk.position + count, count, hidden_TD[chunk.start : chunk.end].reshape(-1))
            self._remember(model, rows, scheduler)
        for n in range(plan.decoding, len(plan.samplers_N)):
            slot, position = int(plan.samplers_N[n]), int(plan.next_N[n])
            self._keep(model, _Rows(slot, position, 1, passed.hidden_ND[n].numpy()), scheduler)

    def _keep(self, model: Transformer, rows: _Rows, scheduler: Scheduler) -> None:
        if rows.slot in scheduler.active:
            self._rows[rows.slot] = rows
        else:  # its answer is complete; another may go on from there
            self._remember(model, rows, scheduler)

    def _remember(self, model: Transformer, rows: _Rows, scheduler: Scheduler) -> None:
        guess.remember(
            self._weights,
            self._sizes,
            self._shared(model)[0],
            rows.hidden,
            np.arange(rows.count),
            rows.following(scheduler),
            np.full(rows.count, rows.slot),
            np.arange(rows.end - rows.count, rows.end),
            self._cos,
            self._sin,
            self._k,
            self._v,
        )

    def _shared(self, model: Transformer) -> tuple[np.ndarray, np.ndarray]:
        """Embedding and output head of the network that samples now. Weights never change while they are live."""
        if model is not self._network:  # the first pass, or the first after a swap
            self._network = model
            self._tables = flattened(model.embed_tokens.weight), narrowed(model.head_weight)
        return self._tables


def _room(scheduler: Scheduler, slot: int, count: int) -> int:
    """Guesses that a slot can take: the token after them is still one that it may sample."""
    return max(0, min(count, int(scheduler.end_S[slot] - scheduler.slots.known_S[slot]) - 1))


def _head(head: Head, heads: Heads) -> tuple[HeadWeights, Sizes]:
    attention, mlp, spec = head.self_attn, head.mlp, heads.spec
    assert isinstance(attention, Attention)
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    none = torch.empty(0)
    if isinstance(mlp, MoE):
        router, gate_up, down = mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj
        shape = spec.experts, spec.experts_per_token, spec.expert_size
    else:
        assert isinstance(mlp, Mlp)
        router, gate_up = torch.zeros(1, spec.hidden_size), torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        down, shape = mlp.down_proj.weight, (1, 1, spec.intermediate_size)
    e_proj, h_proj = head.eh_proj.weight.chunk(2, dim=1)
    parts = HeadWeights(
        enorm=flattened(head.enorm.weight),
        hnorm=flattened(head.hnorm.weight),
        e_proj=narrowed(e_proj),
        h_proj=narrowed(h_proj),
        norm=flattened(head.input_layernorm.weight),
        qkv=narrowed(torch.cat([p.weight for p in projections])),
        qkv_bias=flattened(torch.cat([p.bias for p in projections if p.bias is not None] or [none])),
        q_norm=flattened(none if attention.q_norm is None else attention.q_norm.weight),
        k_norm=flattened(none if attention.k_norm is None else attention.k_norm.weight),
        out=narrowed(attention.o_proj.weight),
        out_bias=flattened(none if attention.o_proj.bias is None else attention.o_proj.bias),
        mlp_norm=flattened(head.post_attention_layernorm.weight),
        router=narrowed(router),
        gate_up=narrowed(gate_up),
        down=narrowed(down),
        last_norm=flattened(head.shared_head["norm"].get_parameter("weight")),
    )
    sizes = Sizes(
        spec.hidden_size, spec.vocab_size, spec.heads, *shape, spec.norm_topk_prob or shape[0] == 1, spec.rms_norm_eps
    )
    return parts, sizes
