"""Who guesses the next tokens: the checkpoint's heads for multi-token prediction, or what the sequence repeats.

A guess is never trusted (`lookahead`), so a drafter may be wrong, forget, or lag behind the weights that sample: heads
stay those the engine started with, and only fewer of their guesses pass.

Letters: `B` decoding slots, `S` slots, `T` rows of the pass, `N` rows sampled from, `D` width.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stretto.engine import guess
from stretto.engine.cache import KVCache
from stretto.engine.forward import Passed, angle_tables, steps_fit
from stretto.engine.guess import HeadWeights, Sizes
from stretto.engine.sampler import uniforms
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


class Guesser:
    """The first head of a checkpoint, used again for each further guess. Its keys and values are one more layer of the
    engine's cache, so that slots are shared and copied with them."""

    def __init__(self, heads: Heads, cache: KVCache, count: int) -> None:
        spec = heads.spec
        self._count = count
        self._weights, self._sizes = _head(heads.head(0), heads)
        self._k, self._v = cache.arrays[spec.layers]
        self._cos, self._sin = angle_tables(spec, cache.tokens)
        slots = len(cache.k[0])
        self._hidden_SD = np.zeros((slots, spec.hidden_size), np.float32)  # of the last row sampled from
        self._row_S = np.full(slots, -1)  # its position
        self._guesses_K = np.zeros(count, np.int64)
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._warm_up()

    def _warm_up(self) -> None:
        """Have everything compiled now. Writes into the first row of the first slot."""
        width, vocab = self._sizes.width, self._sizes.vocab
        table, state, one = np.zeros(vocab * width, np.float32), np.zeros(width, np.float32), np.zeros(1, np.int64)
        rest = self._cos, self._sin, self._k, self._v
        chance = np.float32(1), np.zeros(1), np.zeros(vocab, bool)
        guess.guess(self._weights, self._sizes, table, table, state, 0, 0, 0, 0, *chance, *rest, self._guesses_K)
        guess.remember(self._weights, self._sizes, table, state, one, one, one, *rest)

    def propose(self, plan: Plan, scheduler: Scheduler, model: Transformer) -> list[list[int]]:
        embedding, head = self._table(model)
        guesses_B: list[list[int]] = []
        for slot, position, token in zip(
            plan.slots_T.tolist(), plan.positions_T.tolist(), plan.ids_T.tolist(), strict=True
        ):
            count = _room(scheduler, slot, self._count)
            if count == 0 or self._row_S[slot] != position - 1:
                guesses_B.append([])
                continue
            made = guess.guess(
                self._weights,
                self._sizes,
                embedding,
                head,
                self._hidden_SD.reshape(-1),
                slot,
                token,
                slot,
                position - 1,
                scheduler.temperature_S[slot],
                uniforms(np.full(count, scheduler.seed_S[slot]), np.arange(position + 1, position + 1 + count)),
                scheduler.stop_SV[slot],
                self._cos,
                self._sin,
                self._k,
                self._v,
                self._guesses_K,
            )
            guesses_B.append(self._guesses_K[:made].tolist())
        return guesses_B

    def absorb(self, plan: Plan, scheduler: Scheduler, model: Transformer, passed: Passed) -> None:
        """Keys and values of the rows whose next token is known, and the state that the next guesses start from."""
        self._hidden_SD[plan.samplers_N] = passed.hidden_ND.numpy()  # of several rows of a slot the last one stays
        self._row_S[plan.samplers_N] = plan.next_N - 1
        if len(plan.slots_T) == 1:
            return  # the next guesses begin with this very row
        assert passed.hidden_TD is not None
        slots = scheduler.slots
        rows = np.flatnonzero(plan.positions_T + 1 < slots.known_S[plan.slots_T])
        slots_N, positions_N = plan.slots_T[rows], plan.positions_T[rows]
        guess.remember(
            self._weights,
            self._sizes,
            self._table(model)[0],
            passed.hidden_TD.numpy()[rows].reshape(-1),
            slots.ids_SM[slots_N, positions_N + 1].astype(np.int64),
            slots_N,
            positions_N,
            self._cos,
            self._sin,
            self._k,
            self._v,
        )

    def _table(self, model: Transformer) -> tuple[np.ndarray, np.ndarray]:
        """Embedding and output head of the network that samples now; weights change in place and never move."""
        if (found := self._tables.get(id(model))) is None:
            found = self._tables[id(model)] = _flat(model.embed_tokens.weight), _flat(model.head_weight)
        return found


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
        *map(
            _flat,
            (
                head.enorm.weight,
                head.hnorm.weight,
                e_proj,
                h_proj,
                head.input_layernorm.weight,
                torch.cat([p.weight for p in projections]),
                torch.cat([p.bias for p in projections if p.bias is not None] or [none]),
                none if attention.q_norm is None else attention.q_norm.weight,
                none if attention.k_norm is None else attention.k_norm.weight,
                attention.o_proj.weight,
                none if attention.o_proj.bias is None else attention.o_proj.bias,
                head.post_attention_layernorm.weight,
                router,
                gate_up,
                down,
                head.shared_head["norm"].get_parameter("weight"),
            ),
        )
    )
    sizes = Sizes(
        spec.hidden_size, spec.vocab_size, spec.heads, *shape, spec.norm_topk_prob or shape[0] == 1, spec.rms_norm_eps
    )
    return parts, sizes


def _flat(x: Tensor) -> np.ndarray:
    return x.detach().contiguous().numpy().reshape(-1)
