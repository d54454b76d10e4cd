"""Token losses against a slow float64 NumPy oracle, and the signs of their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_node.learner.loss import importance_sampling_loss, ppo_loss

LOW, HIGH = 0.2, 0.3


def ppo_oracle(logprobs, sampler_logprobs, advantages, low, high):
    """One token at a time, float64: loss, gradient by log-probability, clipped tokens."""
    loss, grads, clipped = 0.0, [], 0
    for new, old, advantage in zip(logprobs, sampler_logprobs, advantages, strict=True):
        ratio = np.exp(np.float64(new) - np.float64(old))
        if advantage > 0 and ratio > 1 + high:
            loss, grad, clipped = loss - (1 + high) * advantage, 0.0, clipped + 1
        elif advantage < 0 and ratio < 1 - low:
            loss, grad, clipped = loss - (1 - low) * advantage, 0.0, clipped + 1
        else:
            loss, grad = loss - ratio * advantage, -ratio * advantage
        grads.append(grad)
    return loss, grads, clipped


def random_tokens(seed, count=50):
    rng = np.random.default_rng(seed)
    sampler = rng.normal(-2, 1, count)
    learner = sampler + rng.normal(0, 0.4, count)
    advantages = rng.normal(0, 1, count) * (rng.random(count) < 0.9)
    return [torch.tensor(values, dtype=torch.float32) for values in (learner, sampler, advantages)]


def loss_and_grad(function, logprobs, *rest):
    logprobs = logprobs.clone().requires_grad_()
    loss = function(logprobs, *rest)
    (grad,) = torch.autograd.grad(loss.total, logprobs)
    return loss._replace(total=loss.total.detach()), grad


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_ppo_equals_the_oracle(seed):
    tokens = random_tokens(seed)
    loss, grad = loss_and_grad(ppo_loss, *tokens, LOW, HIGH)
    expected, grads, clipped = ppo_oracle(*(t.numpy() for t in tokens), LOW, HIGH)
    assert float(loss.total) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(grad.numpy(), grads, rtol=1e-5, atol=1e-6)
    assert int(loss.num_clipped) == clipped
    assert float(loss.ratio_max) == pytest.approx(float((tokens[0] - tokens[1]).exp().max()))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_importance_sampling_equals_the_oracle(seed):
    tokens = random_tokens(seed)
    loss, grad = loss_and_grad(importance_sampling_loss, *tokens)
    expected, grads, _ = ppo_oracle(*(t.numpy() for t in tokens), np.inf, np.inf)
    assert float(loss.total) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(grad.numpy(), grads, rtol=1e-5, atol=1e-6)
    assert int(loss.num_clipped) == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.0, 1.0, "up"),
        (1.0, -1.0, "down"),
        (1.29, 1.0, "up"),
        (1.31, 1.0, "not"),
        (0.5, 1.0, "up"),
        (0.81, -1.0, "down"),
        (0.79, -1.0, "not"),
        (1.9, -1.0, "down"),
        (1.0, 0.0, "not"),
    ],
)
def test_which_way_descent_moves_a_token(ratio, advantage, moves):
    logprobs = torch.tensor([ratio]).log()
    _, grad = loss_and_grad(
        ppo_loss, logprobs, torch.zeros(1), torch.tensor([advantage]), LOW, HIGH
    )
    assert {-1.0: "up", 1.0: "down", 0.0: "not"}[float(grad.sign())] == moves


def test_on_policy_both_losses_are_the_policy_gradient():
    logprobs, _, advantages = random_tokens(3)
    for function, rest in ((ppo_loss, (LOW, HIGH)), (importance_sampling_loss, ())):
        loss, grad = loss_and_grad(function, logprobs, logprobs, advantages, *rest)
        torch.testing.assert_close(grad, -advantages)
        assert float(loss.ratio_max) == 1.0
        assert int(loss.num_clipped) == 0


def test_no_tokens_are_no_loss():
    nothing = torch.zeros(0)
    for loss in (ppo_loss(nothing, nothing, nothing, LOW, HIGH),
                 importance_sampling_loss(nothing, nothing, nothing)):  # fmt: skip
        assert [float(value) for value in loss] == [0.0, 0.0, 0.0]
