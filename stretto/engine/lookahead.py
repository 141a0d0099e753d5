"""Speculative decoding without a change of text: guesses are rows of a pass, and the plain sampler judges them.

    plain pass     row of t_n                      ─▶ t_n+1
    with guesses   rows of t_n, g_n+1, g_n+2, …    ─▶ draws t_n+1, t_n+2, … kept up to the first that differs from the
                                                      guess its successor was computed with

Every row is drawn from as always, with the uniform that its position has anyway (`sampler`). The draw of a row is right
if the row before it was computed with right ids, so exactly those draws are kept. This is the acceptance of Leviathan
et al. (arXiv 2211.17192) for a drafter that is sure of its guess g (q = 1 there): it passes with probability
min(1, p(g) / q(g)) = p(g), and otherwise the token comes from max(p - q, 0) renormalised, which is p without g. Both
happen by the one draw from p. So a seed gives the same tokens with and without guesses, whoever guesses, up to the
rounding of products of another number of rows.

Pure: no tensors, no time. Letters: `B` decoding slots, `T` rows of the pass, as in `scheduler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stretto.engine.scheduler import Plan

SLOTS = 2
"""Sequences in a pass up to which guesses are made: with more, the rows of wrong guesses cost more than they save. Then
rows share the reading of weights anyway."""


def suits(plan: Plan) -> bool:
    """Whether this pass is one to guess in: some sequences that decode, and nothing else."""
    return not plan.chunks and plan.decoding <= SLOTS


def extended(plan: Plan, guesses_B: Sequence[Sequence[int]]) -> Plan:
    """The same pass with a row more for each guess; all of its rows are sampled from."""
    slots, positions, ids = [], [], []
    each = zip(plan.slots_T.tolist(), plan.positions_T.tolist(), plan.ids_T.tolist(), guesses_B, strict=True)
    for slot, position, known, guesses in each:
        ids += [known, *guesses]
        slots += [slot] * (len(guesses) + 1)
        positions += range(position, position + len(guesses) + 1)
    slots_T, positions_T = np.array(slots), np.array(positions)
    return replace(
        plan,
        slots_T=slots_T,
        positions_T=positions_T,
        ids_T=np.array(ids, np.int64),
        decoding=len(ids),
        sampled_N=np.arange(len(ids)),
        samplers_N=slots_T,
        next_N=positions_T + 1,
    )


def accepted(plan: Plan, ids_T: np.ndarray, logprobs_T: np.ndarray, stop_SV: np.ndarray) -> np.ndarray:
    """The rows, ascending, whose draws `ids_T` count. Nothing follows a stop token or a row that is not finite."""
    kept: list[int] = []
    finite_T = np.isfinite(logprobs_T).tolist()
    slots, given, drawn = plan.slots_T.tolist(), plan.ids_T.tolist(), ids_T.tolist()
    for row, slot in enumerate(slots):
        before = row - 1
        if row and slots[before] == slot:
            right = kept[-1] == before and drawn[before] == given[row] and finite_T[before]
            if not right or stop_SV[slot, drawn[before]]:
                continue
        kept.append(row)
    return np.array(kept)


def narrowed(plan: Plan, kept: np.ndarray) -> Plan:
    """The pass as if it had been made of these rows alone. Keys and values of the others lie beyond the rows that a
    slot is said to have, and are written over."""
    return replace(
        plan,
        slots_T=plan.slots_T[kept],
        positions_T=plan.positions_T[kept],
        ids_T=plan.ids_T[kept],
        decoding=len(kept),
        sampled_N=np.arange(len(kept)),
        samplers_N=plan.samplers_N[kept],
        next_N=plan.next_N[kept],
    )
