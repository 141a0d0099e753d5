"""A few fixed tokens whose log-probs the trainer computed: does this network say the same of them?

A fingerprint says that the right bits are in memory; the canary, that the network made of them computes what the
trainer's does: a scale that was not applied, a kernel that kept a packed copy of old weights or another rotation shows
here and nowhere else. It costs one pass of a few tokens, into a cache of its own, beside generation.
"""

from __future__ import annotations

import numpy as np
import torch

from stretto.engine.contract import WeightsRefused
from stretto.engine.forward import Forward, logits
from stretto.engine.scheduler import Chunk, Plan
from stretto.model.numerics import Numerics
from stretto.model.transformer import Transformer
from stretto.records import Canary

TOKENS = 32
"""The longest canary."""


def tolerance(numerics: Numerics) -> float:
    """Nats by which log-probs may be off on average. Rounded activations now and then choose another expert."""
    if numerics.exact:
        return 1e-6
    return 0.1 if numerics.rounding else 1e-3


@torch.inference_mode()
def logprobs(model: Transformer, forward: Forward, ids: list[int]) -> np.ndarray:
    """float32 [T - 1]: of each id but the first, at temperature 1. `forward` writes into slot 0 of its cache."""
    count = len(ids)
    zero_T, each_T = np.zeros(count, np.int64), np.arange(count)
    plan = Plan(
        copies=[],
        slots_T=zero_T,
        positions_T=each_T,
        ids_T=np.asarray(ids, np.int64),
        decoding=0,
        chunks=[Chunk(0, 0, count, 0)],
        sampled_N=each_T,
        samplers_N=zero_T,
        next_N=each_T + 1,
        twins=[],
        serial=0,
    )
    scores_NV = torch.log_softmax(logits(model, forward(plan).hidden_ND).float(), dim=-1)
    return scores_NV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def check(model: Transformer, forward: Forward, canary: Canary, version: int) -> float:
    """The mean distance from the trainer's log-probs. Raises WeightsRefused when it is too large, or no number."""
    ids, vocabulary = canary.ids, model.spec.vocab_size
    if not 2 <= len(ids) <= TOKENS or len(canary.logprobs) != len(ids) - 1 or max(ids) >= vocabulary or min(ids) < 0:
        raise WeightsRefused(
            f"the canary of version {version} has {len(ids)} tokens and {len(canary.logprobs)} log-probs: it needs 2 "
            f"to {TOKENS} of a vocabulary of {vocabulary}, and a log-prob for each but the first"
        )
    return judge(logprobs(model, forward, ids), canary, version, tolerance(model.numerics))


def judge(found: np.ndarray, canary: Canary, version: int, limit: float) -> float:
    """The mean distance of log-probs from the trainer's. Raises WeightsRefused above `limit`."""
    apart = float(np.abs(found - np.asarray(canary.logprobs, np.float32)).mean())
    if not apart <= limit:  # a NaN is no match
        raise WeightsRefused(
            f"the canary of version {version} fails: log-probs here are {apart:.3g} nats from the trainer's on "
            f"average, more than {limit:g}, although the weights have the right fingerprint: this engine computes "
            "another network than the trainer; compare model.numerics, engine.dtype and the versions of both programs"
        )
    return apart
