"""Pins: the gradient, the normalizers, and that wrong log-probs are refused."""

import math

import pytest
import torch

from stretto.trainer.losses import BehaviourLogprobs, CurrentLogprobs, policy_loss, token_share


def loss(current, behaviour, advantage, correction="tis", cap=2.0):
    share = torch.full_like(current, 0.1)
    return policy_loss(CurrentLogprobs(current), BehaviourLogprobs(behaviour), advantage, share, correction, cap)


def test_on_policy_gradient_is_the_plain_policy_gradient():
    current = (torch.randn(20) - 2).requires_grad_()
    advantage = torch.randn(20)
    loss(current, current.detach(), advantage).total.backward()
    assert torch.equal(current.grad, -(0.1 * advantage))


def test_no_gradient_flows_through_the_weight():
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    behaviour = torch.tensor([-1.3, -0.5])
    advantage = torch.tensor([1.0, -1.0])
    loss(current, behaviour, advantage).total.backward()
    ratio = (current.detach() - behaviour).exp()
    # With the weight differentiated it would be share * ratio * advantage * (1 + logp).
    assert torch.allclose(current.grad, -(0.1 * ratio * advantage))


def test_truncated_and_masked_tokens():
    current = torch.tensor([-1.0, -1.0, -6.0], requires_grad=True)
    behaviour = torch.tensor([-6.0, -1.0, -1.0])
    advantage = torch.ones(3)
    loss(current, behaviour, advantage, "tis").total.backward()
    assert current.grad.tolist() == pytest.approx([-0.2, -0.1, -0.1 * math.exp(-5)])
    current.grad = None
    loss(current, behaviour, advantage, "icepop").total.backward()
    assert current.grad.tolist() == pytest.approx([0.0, -0.1, 0.0])


def test_a_token_outside_the_nucleus_is_no_nan():
    current = torch.tensor([-math.inf, -1.0], requires_grad=True)
    result = loss(current, torch.tensor([-1.0, -1.0]), torch.ones(2))
    result.total.backward()
    assert result.total.isfinite() and current.grad.tolist() == pytest.approx([0.0, -0.1])


def test_log_ratio_of_ten_thousand_stays_finite():
    current = torch.tensor([-1.0, -1e4], requires_grad=True)
    result = loss(current, torch.tensor([-1e4, -1.0]), torch.tensor([-1.0, 1.0]))
    result.total.backward()
    assert result.total.isfinite() and current.grad.isfinite().all()


def test_wrong_kinds_of_logprobs_are_refused():
    current, behaviour = torch.zeros(2, requires_grad=True), torch.zeros(2)
    one = torch.ones(2)
    with pytest.raises(TypeError, match="BehaviourLogprobs"):
        policy_loss(BehaviourLogprobs(behaviour), CurrentLogprobs(current), one, one, "tis", 2.0)
    with pytest.raises(TypeError, match="CurrentLogprobs"):
        policy_loss(current, BehaviourLogprobs(behaviour), one, one, "tis", 2.0)
    with pytest.raises(TypeError, match="gradient"):
        BehaviourLogprobs(current)


def test_shares_of_each_normalizer():
    lengths = [3, 5, 12]  # sampled tokens of three rollouts, whatever their segments

    def shares(normalizer):
        return [token_share(normalizer, len(lengths), sum(lengths), n, budget=40) for n in lengths]

    assert shares("token") == [1 / 20] * 3
    assert [s * n for s, n in zip(shares("sequence"), lengths, strict=True)] == pytest.approx([1 / 3] * 3)
    assert shares("constant") == [1 / 120] * 3
    with pytest.raises(ValueError, match="normalizer"):
        token_share("mean", 1, 1, 1, 1)
