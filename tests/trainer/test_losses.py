"""Pins: each objective has the gradient of its paper's surrogate, the normalizers, the penalty on the distance to a
reference, and that wrong log-probs are refused."""

import math

import pytest
import torch

from stretto.config import TrainerConfig
from stretto.trainer.corrections import Sequences
from stretto.trainer.losses import (
    BehaviourLogprobs,
    CurrentLogprobs,
    ProximalLogprobs,
    ReferenceLogprobs,
    policy_loss,
    token_share,
)

LENGTHS = [7, 1, 12, 20]
SHARE = 0.1


def loss(current, behaviour, advantage, proximal=None, reference=None, lengths=None, **settings):
    return policy_loss(
        CurrentLogprobs(current),
        BehaviourLogprobs(behaviour),
        advantage,
        torch.full_like(current, SHARE),
        Sequences.of_lengths(lengths or [len(current)]),
        TrainerConfig.model_validate(settings),
        None if proximal is None else ProximalLogprobs(proximal),
        None if reference is None else ReferenceLogprobs(reference),
    )


@pytest.fixture
def policies():
    """(current with gradient, proximal, behaviour, advantage), some way apart."""
    generator = torch.Generator().manual_seed(5)
    behaviour = torch.randn(sum(LENGTHS), generator=generator).abs().neg() - 0.05
    proximal = (behaviour + 0.8 * torch.randn(len(behaviour), generator=generator)).clamp(max=-0.01)
    current = (proximal + 0.8 * torch.randn(len(behaviour), generator=generator)).clamp(max=-0.01).requires_grad_()
    gains = torch.tensor([1.0, -1.0, -0.5, 0.5])
    return current, proximal, behaviour, gains.repeat_interleave(torch.tensor(LENGTHS))


def means(values):
    """Mean over each sequence, again per token, with gradient."""
    parts = values.split(LENGTHS)
    return torch.cat([part.mean().expand(len(part)) for part in parts])


def ppo(ratio, advantage, low, high, dual):
    """The surrogate as papers write it: min(r A, clip(r) A), and for negative A not below `dual` * A."""
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return torch.where(advantage < 0, torch.maximum(surrogate, dual * advantage), surrogate)


def surrogate(preset, current, proximal, behaviour, advantage):
    """What each paper maximises, summed over tokens; only `current` has a gradient."""
    ratio = (current - behaviour).exp()
    match preset:
        case "grpo" | "reinforce++":
            return ppo(ratio, advantage, 0.2, 0.2, 3.0)
        case "dapo":
            return ppo(ratio, advantage, 0.2, 0.28, 3.0)
        case "deepseek-v3.2":
            kept = ~((means(behaviour - current.detach()) > 0.1) & (advantage < 0))
            return kept * ppo(ratio, advantage, 0.2, 0.28, 3.0)
        case "gspo":  # its token-level form: the mean over tokens stands in the exponent
            return ppo(means(current - behaviour).exp(), advantage, 0.03, 0.04, 3.0)
        case "cispo":
            return ratio.detach().clamp(max=5.0) * advantage * current
        case "dppo":
            moved = current.exp() - behaviour.exp()
            cut = ((moved > 0.2) & (advantage > 0)) | ((moved < -0.2) & (advantage < 0)) | (ratio > 3.0)
            return ~cut * ratio * advantage
        case "decoupled-ppo":
            weight = (proximal - behaviour).exp().clamp(max=5.0)
            return weight * ppo((current - proximal).exp(), advantage, 0.2, 0.2, 3.0)
        case "icepop":
            inside = (ratio >= 0.5) & (ratio <= 5.0)
            return (inside * ratio).detach() * advantage * current
        case "dr-grpo":
            return ratio.detach().clamp(max=2.0) * advantage * current
    raise AssertionError(preset)


@pytest.mark.parametrize(
    "preset", "grpo reinforce++ dapo deepseek-v3.2 gspo cispo dppo decoupled-ppo icepop dr-grpo".split()
)
def test_the_gradient_is_that_of_the_papers_surrogate(policies, preset):
    current, proximal, behaviour, advantage = policies
    (expected,) = torch.autograd.grad(
        (SHARE * surrogate(preset, current, proximal, behaviour, advantage)).sum(), current
    )
    between = proximal if preset == "decoupled-ppo" else None
    result = loss(current, behaviour, advantage, between, lengths=LENGTHS, preset=preset)
    (found,) = torch.autograd.grad(result.total, current)
    assert torch.allclose(-found, expected, atol=1e-6) and found.abs().sum() > 0.1
    assert 0 < result.changed_N.float().mean() < 1 or preset in ("cispo",), "the case must exercise the clip or mask"


@pytest.mark.parametrize("preset", "dr-grpo grpo cispo gspo dppo decoupled-ppo deepseek-v3.2 icepop".split())
def test_on_policy_every_objective_is_the_plain_policy_gradient(preset):
    current = (torch.randn(20) - 3).requires_grad_()
    advantage = torch.randn(20)
    settings = TrainerConfig.model_validate({"preset": preset})
    proximal = current.detach() if settings.proximal == "ema" else None
    result = loss(current, current.detach(), advantage, proximal, preset=preset)
    result.total.backward()
    assert torch.equal(current.grad, -(SHARE * advantage)) and not result.changed_N.any()


def test_GRP_4_the_weight_is_a_constant_of_the_gradient():
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    behaviour = torch.tensor([-1.3, -1.5])
    advantage = torch.tensor([1.0, -1.0])
    loss(current, behaviour, advantage).total.backward()
    ratio = (current.detach() - behaviour).exp()
    # With the weight differentiated it would be share * ratio * advantage * (1 + logp).
    assert torch.allclose(current.grad, -(SHARE * ratio * advantage))


def test_GRP_5_what_is_masked_stays_in_the_denominator():
    """Half of the tokens masked: half of the gradient, not the same gradient from fewer tokens."""
    behaviour = torch.tensor([-1.0, -1.0, -9.0, -9.0])
    current = torch.full((4,), -1.0, requires_grad=True)
    for correction in ("icepop", "sequence-mask", "geometric-mask"):
        current.grad = None
        loss(current, behaviour, torch.ones(4), lengths=[2, 2], correction=correction).total.backward()
        assert current.grad.tolist() == pytest.approx([-SHARE, -SHARE, 0.0, 0.0])


def test_GRP_7_the_default_masks_or_clips(policies):
    """Whatever the ratio, no token weighs more than the cap; weights without a bound have to be asked for."""
    _, _, behaviour, advantage = policies
    for distance in (3.0, 10.0, 1e4):
        current = (behaviour + distance).requires_grad_()
        assert loss(current, behaviour, advantage).weight_N.max() <= TrainerConfig().correction_cap
        result = loss(current, behaviour, advantage, correction="none")
        assert torch.equal(result.weight_N, torch.ones_like(result.weight_N))


def test_a_token_outside_the_nucleus_is_no_nan():
    current = torch.tensor([-math.inf, -1.0], requires_grad=True)
    result = loss(current, torch.tensor([-1.0, -1.0]), torch.ones(2))
    result.total.backward()
    assert result.total.isfinite() and current.grad.tolist() == pytest.approx([0.0, -SHARE])


@pytest.mark.parametrize("preset", ["dr-grpo", "icepop", "cispo", "gspo", "dapo", "dppo"])
def test_GRP_6_log_ratio_of_ten_thousand_makes_a_finite_loss(preset):
    current = torch.tensor([-1.0, -1e4], requires_grad=True)
    result = loss(current, torch.tensor([-1e4, -1.0]), torch.tensor([-1.0, 1.0]), preset=preset)
    result.total.backward()
    assert result.total.isfinite() and current.grad.isfinite().all()


def test_the_penalty_holds_to_the_reference():
    """Tokens that have become more likely than under the reference lose, the others gain; at the reference, nothing."""
    current = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    reference = torch.tensor([-2.0, -0.5, -1.0])
    result = loss(current, current.detach(), torch.zeros(3), reference=reference, kl=0.2)
    result.total.backward()
    assert result.k1_N.tolist() == [1.0, -0.5, 0.0]
    assert current.grad.tolist() == pytest.approx([SHARE * 0.2 * 1.0, -SHARE * 0.2 * 0.5, 0.0])


def test_the_penaltys_expected_gradient_is_that_of_the_kl():
    """Over all tokens of a small vocabulary, each with its probability: exact, no sampling."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0, 0.5, -0.5]), 0)
    logp = torch.log_softmax(logits, 0)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    weights = logp.detach().exp() / SHARE
    found = torch.zeros(4)
    for token in range(4):
        one = torch.log_softmax(logits, 0)[token : token + 1]
        result = loss(one, one.detach(), torch.zeros(1), reference=reference[token : token + 1], kl=1.0)
        (gradient,) = torch.autograd.grad(result.total, logits)
        found += weights[token] * gradient
    assert torch.allclose(found, expected, atol=1e-6)


def test_ENG_7_wrong_kinds_of_logprobs_are_refused():
    current, behaviour = torch.zeros(2, requires_grad=True), torch.zeros(2)
    rest = (torch.ones(2), torch.ones(2), Sequences.of_lengths([2]), TrainerConfig())
    with pytest.raises(TypeError, match="BehaviourLogprobs"):
        policy_loss(BehaviourLogprobs(behaviour), CurrentLogprobs(current), *rest)
    with pytest.raises(TypeError, match="CurrentLogprobs"):
        policy_loss(current, BehaviourLogprobs(behaviour), *rest)
    for kind in (BehaviourLogprobs, ProximalLogprobs, ReferenceLogprobs):
        with pytest.raises(TypeError, match="gradient"):
            kind(current)


def test_shares_of_each_normalizer():
    lengths = [3, 5, 12]  # sampled tokens of three rollouts, whatever their segments

    def shares(normalizer):
        return [token_share(normalizer, len(lengths), sum(lengths), n, budget=40) for n in lengths]

    assert shares("token") == [1 / 20] * 3
    assert [s * n for s, n in zip(shares("sequence"), lengths, strict=True)] == pytest.approx([1 / 3] * 3)
    assert shares("constant") == [1 / 120] * 3
    with pytest.raises(ValueError, match="normalizer"):
        token_share("mean", 1, 1, 1, 1)
