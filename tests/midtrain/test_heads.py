"""Pins: a head is taught on the tokens that the policy samples, the network stays as it was, and guesses get better."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from stretto.midtrain.demonstrator import Document
from stretto.midtrain.heads import train_heads
from stretto.model import checkpoint
from stretto.model.mtp import Distilled

from ..engine.conftest import SPEC

torch.set_num_threads(1)


def batches(weight: float = 1.0):
    for seed in itertools.count():
        rng = random.Random(seed)
        yield [Document([rng.randrange(20) for _ in range(30)], [0.1] * 8 + [weight] * 22) for _ in range(4)]


def test_a_head_learns_and_the_network_stays() -> None:
    model = checkpoint.random_init(SPEC, 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[Distilled] = []
    heads = train_heads(model, batches(), 60, lr=1e-2, guesses=2, watch=lambda step, found: seen.append(found))
    assert len(seen) == 60 and heads.spec.mtp_layers == 1
    assert seen[-1].loss.item() < 0.5 * seen[0].loss.item()
    assert min(seen[-1].overlaps) > max(seen[0].overlaps)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_documents_without_a_token_of_full_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="no token is wanted"):
        train_heads(checkpoint.random_init(SPEC, 0), batches(weight=0.5), 1)
