"""Pins: log-probs, entropy and their gradients are the textbook's at any chunk, temperature and truncation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.engine.sampler import kept
from stretto.model import checkpoint
from stretto.model.logprobs import token_logprobs
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Transformer
from stretto.support import Support

torch.set_num_threads(1)
N = 23
SPEC = ModelSpec(
    model_type="llama",
    vocab_size=70,
    hidden_size=24,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=12,
    intermediate_size=8,
    tie_embeddings=True,
    initializer_range=0.5,
)
SAMPLINGS = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.9, 0), (1.0, 1.0, 5), (0.8, 0.6, 12)]


@pytest.fixture
def model() -> Transformer:
    return checkpoint.random_init(SPEC, seed=0)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 24, generator=generator), torch.randint(70, (N,), generator=generator)


def textbook(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    z_NV = logits_NV / temperature
    p_NV = z_NV.detach().softmax(-1)
    keep_NV = torch.zeros_like(p_NV, dtype=torch.bool)
    for p_V, keep_V, target in zip(p_NV, keep_NV, targets_N, strict=True):
        order = sorted(range(70), key=lambda v: -p_V[v].item())[: top_k or 70]
        total, mass = p_V[order].sum(), 0.0
        for token in order:
            if mass < top_p:
                keep_V[token] = True
            mass += (p_V[token] / total).item()
        keep_V[target] = True
    logp_NV = z_NV.masked_fill(~keep_NV, -torch.inf).log_softmax(-1)
    finite_NV = logp_NV.masked_fill(~keep_NV, 0.0)
    return logp_NV.gather(1, targets_N[:, None]).squeeze(1), -(finite_NV.exp() * finite_NV * keep_NV).sum(-1)


@torch.no_grad()
def cut(
    model: Transformer, hidden_ND: Tensor, targets_N: Tensor, temperature: float, top_p: float, top_k: int
) -> Support | None:
    """What the engine would keep, and the targets, which it has drawn."""
    if top_p == 1 and top_k == 0:
        return None
    kept_NV = kept(model.logits(hidden_ND) / temperature, top_p, top_k)
    return Support.of(kept_NV.scatter(1, targets_N[:, None], True).numpy())


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("parts", ["logp", "entropy", "both"])
def test_values_and_gradients_are_the_textbooks(
    model: Transformer, sampling: tuple[float, float, int], parts: str
) -> None:
    hidden_ND, targets_N = rows()
    results = []
    for mine in (True, False):
        model.zero_grad()
        hidden = hidden_ND.clone().requires_grad_()
        if mine:
            support = cut(model, hidden, targets_N, *sampling)
            logp_N, entropy_N = token_logprobs(model, hidden, targets_N, sampling[0], support, chunk=7)
        else:
            logp_N, entropy_N = textbook(model.logits(hidden), targets_N, *sampling)
        weights = torch.linspace(-1, 1, N)
        loss = (logp_N * weights).sum() * (parts != "entropy") + 3 * (entropy_N * weights).sum() * (parts != "logp")
        loss.backward()
        results.append((logp_N.detach(), entropy_N.detach(), hidden.grad, model.head_weight.grad.clone()))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_chunks_do_not_matter(model: Transformer, sampling: tuple[float, float, int]) -> None:
    hidden_ND, targets_N = rows()

    def all_of(chunk: int) -> list[Tensor]:
        hidden = hidden_ND.clone().requires_grad_()
        support = cut(model, hidden, targets_N, *sampling)
        logp_N, entropy_N = token_logprobs(model, hidden, targets_N, sampling[0], support, chunk=chunk)
        (logp_N.sum() + entropy_N.sum()).backward()
        return [logp_N.detach(), entropy_N.detach(), hidden.grad]

    whole = all_of(0)
    for chunk in (1, 5, N - 1, N, 1000):
        for one, two in zip(all_of(chunk), whole, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_the_set_that_was_sampled_from_counts_not_a_new_one(model: Transformer) -> None:
    """Also where it leaves out the tokens that are now the most likely ones, to a log-prob of 0 and no gradient."""
    hidden_ND, _ = rows()
    hidden = hidden_ND.clone().requires_grad_()
    worst_NV = model.logits(hidden_ND).detach().topk(2, largest=False).indices
    kept_NV = torch.zeros(N, 70, dtype=torch.bool).scatter(1, worst_NV, True)
    logp_N, entropy_N = token_logprobs(model, hidden, worst_NV[:, 0], 1.0, Support.of(kept_NV.numpy()))
    logp_N.sum().backward()
    two_N2 = model.logits(hidden_ND).gather(1, worst_NV).log_softmax(-1)
    torch.testing.assert_close(logp_N, two_N2[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N, -(two_N2.exp() * two_N2).sum(-1), atol=1e-5, rtol=1e-5)
    assert hidden.grad.isfinite().all() and hidden.grad.any()
    alone_NV = torch.zeros(N, 70, dtype=torch.bool).scatter(1, worst_NV[:, :1], True)
    logp_N, entropy_N = token_logprobs(model, hidden, worst_NV[:, 0], 1.0, Support.of(alone_NV.numpy()))
    assert not logp_N.any() and not entropy_N.any()


class Watched(Support):
    """Remembers how much of it was opened at once."""

    most = 0

    def mask(self, start: int, end: int) -> np.ndarray:
        Watched.most = max(Watched.most, end - start)
        return super().mask(start, end)


def test_supports_are_opened_one_chunk_at_a_time(model: Transformer) -> None:
    hidden_ND, targets_N = rows()
    support = cut(model, hidden_ND, targets_N, 1.0, 0.8, 0)
    watched = Watched(support.vocab, support.counts_N, support.data)
    token_logprobs(model, hidden_ND.requires_grad_(), targets_N, 1.0, watched, chunk=4)[0].sum().backward()
    assert Watched.most == 4


def test_supports_that_do_not_fit_are_refused(model: Transformer) -> None:
    hidden_ND, targets_N = rows()
    with pytest.raises(ValueError, match="23 tokens of a vocabulary of 70 .* over 3 supports in one of 71"):
        token_logprobs(model, hidden_ND, targets_N, 1.0, Support.of(np.ones((3, 71), bool)))


def test_huge_logits_stay_finite(model: Transformer) -> None:
    hidden = (rows()[0] * 1e4).requires_grad_()
    logp_N, entropy_N = token_logprobs(model, hidden, rows()[1])
    (logp_N + 5 * entropy_N).sum().backward()
    assert logp_N.isfinite().all() and entropy_N.isfinite().all() and hidden.grad.isfinite().all()


def test_no_tokens_and_no_gradient(model: Transformer) -> None:
    logp_N, entropy_N = token_logprobs(model, torch.empty(0, 24), torch.empty(0, dtype=torch.int64))
    assert logp_N.shape == entropy_N.shape == (0,)
    (logp_N.sum() + entropy_N.sum()).backward()  # a fully masked micro-batch still reaches the parameters
    assert model.head_weight.grad is not None and not model.head_weight.grad.any()


def test_temperature_zero_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="temperature = 0"):
        token_logprobs(model, *rows(), temperature=0.0)
