"""KL to a reference and entropy bonus: values token by token, gradients over a whole vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_node.learner.losses.policy import ppo
from asyncrl_node.learner.losses.regularizers import reference_kl, regularise
from asyncrl_node.learner.losses.settings import LossSettings
from tests.learner.oracles import random_case

KINDS = ["k1", "k2", "k3"]


def kl_oracle(new, reference, kind):
    values = []
    for n, r in zip(new, reference, strict=True):
        ratio = math.exp(r) / math.exp(n)
        values.append(
            {"k1": n - r, "k2": (n - r) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[kind]
        )
    return values


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 9999))
def test_estimators_equal_the_oracle(kind, seed):
    case = random_case([9], seed)
    ours = reference_kl(torch.tensor(case.new), torch.tensor(case.proximal), kind)
    np.testing.assert_allclose(ours, kl_oracle(case.new, case.proximal, kind), atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    case = random_case([9], 4)
    new = torch.tensor(case.new, requires_grad=True)
    reference = torch.tensor(case.proximal)
    assert torch.autograd.gradcheck(lambda x: reference_kl(x, reference, kind), (new,))


def vocabulary(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits, logits.log_softmax(0), reference


def kl(p, q):
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("seed", range(5))
def test_means_over_the_policy_and_their_gradients(seed):
    """What the docstring says of k1, k2 and k3, summed over every possible token."""
    logits, policy, reference = vocabulary(seed)

    def grad_of(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    sampled = policy.exp().detach()
    means = {kind: (sampled * reference_kl(policy, reference, kind)).sum() for kind in KINDS}
    torch.testing.assert_close(means["k1"], kl(policy, reference))
    torch.testing.assert_close(means["k3"], kl(policy, reference))
    torch.testing.assert_close(grad_of(means["k1"]), torch.zeros_like(logits))
    torch.testing.assert_close(grad_of(means["k2"]), grad_of(kl(policy, reference)))
    torch.testing.assert_close(grad_of(means["k3"]), grad_of(kl(reference, policy)))


@pytest.mark.parametrize("seed", range(5))
def test_weighted_means_over_any_sampler_and_their_gradients(seed):
    """The second column of the docstring: the tokens come from a stale policy."""
    logits, policy, reference = vocabulary(seed)
    stale = vocabulary(seed + 100)[1].detach()

    def grad_of(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    ratios = (policy - stale).exp()
    means = {
        kind: (stale.exp() * ratios * reference_kl(policy, reference, kind)).sum() for kind in KINDS
    }
    for kind in ("k1", "k3"):
        torch.testing.assert_close(means[kind], kl(policy, reference))
        torch.testing.assert_close(grad_of(means[kind]), grad_of(kl(policy, reference)))
    squares = (policy.exp() * (policy - reference) ** 2 / 2).sum()
    torch.testing.assert_close(grad_of(means["k2"]), grad_of(squares))
    unweighted = (stale.exp() * reference_kl(policy, reference, "k2")).sum()
    assert not torch.allclose(grad_of(unweighted), grad_of(kl(policy, reference)), rtol=0.1)


@pytest.mark.parametrize(("kind", "weighted"), [("k2", False), ("k1", True), ("k3", True)])
def test_rollouts_of_two_tokens_are_pulled_back_prefix_by_prefix(kind, weighted):
    """All 25 rollouts of a policy over 5 words: the gradient is that of each prefix's own KL.

    That the first token decides which prefix comes next has no part in it.
    """
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(1)  # row 0 without a prefix, row 1 + w after word w
    reference = torch.randn(6, 5, generator=generator, dtype=torch.float64).log_softmax(1)
    sampled = policy.detach()
    total = torch.zeros((), dtype=torch.float64)
    expected = kl(policy[0], reference[0])
    for first in range(5):
        chance = sampled[0, first].exp()
        expected = expected + chance * kl(policy[1 + first], reference[1 + first])
        for second in range(5):
            places = ((0, 1 + first), (first, second))
            terms = reference_kl(policy[places], reference[places], kind)
            if weighted:
                terms = (policy[places] - sampled[places]).exp() * terms
            total = total + chance * sampled[1 + first, second].exp() * terms.sum()
    grads = [
        torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (total, expected)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_the_ratio_to_the_sampler_with_its_gradient(kind):
    case = random_case([4, 0, 3], 6)
    tokens = case.tensors()
    plain = ppo(tokens, LossSettings())
    both = regularise(plain, tokens, 0.3, kind)
    expected = [
        0.3 * math.exp(new - old) * value
        for new, old, value in zip(
            case.new, case.old, kl_oracle(case.new, case.proximal, kind), strict=True
        )
    ]
    added = (both.losses - plain.losses).detach().numpy()
    np.testing.assert_allclose(added, expected, atol=1e-12)
    (grad,) = torch.autograd.grad((both.losses - plain.losses).sum(), tokens.logprobs)
    step = 1e-6
    moved = [
        0.3 * math.exp(new - old + side) * value
        for side in (step, -step)
        for new, old, value in zip(
            case.new, case.old, kl_oracle(case.new + side, case.proximal, kind), strict=True
        )
    ]
    count = len(case.new)
    slopes = [
        (up - down) / (2 * step) for up, down in zip(moved[:count], moved[count:], strict=True)
    ]
    np.testing.assert_allclose(grad.numpy(), slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_an_absurd_difference_is_finite_and_has_no_gradient(kind):
    policy = torch.tensor([-300.0, -0.1], requires_grad=True)
    values = reference_kl(policy, torch.tensor([-0.1, -300.0]), kind)
    assert torch.isfinite(values).all()
    (grad,) = torch.autograd.grad(values.sum(), policy)
    assert not grad.any()
    assert reference_kl(torch.tensor([math.nan]), torch.zeros(1), kind).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_terms_are_added_token_by_token(kind):
    case = random_case([4, 0, 3], 6)
    tokens = replace(case.tensors(), entropies=torch.linspace(0.1, 2.0, 7, dtype=torch.float64))
    plain = ppo(tokens, LossSettings())
    both = regularise(plain, tokens, 0.3, kind, False, 0.01)
    penalty = np.array(kl_oracle(case.new, case.proximal, kind))
    expected = plain.losses.detach().numpy() + 0.3 * penalty - 0.01 * tokens.entropies.numpy()
    np.testing.assert_allclose(both.losses.detach().numpy(), expected, atol=1e-12)
    assert int(both.num_clipped) == int(plain.num_clipped)


def test_without_coefficients_nothing_is_read():
    tokens = replace(random_case([4], 6).tensors(), reference_logprobs=None)
    plain = ppo(tokens, LossSettings())
    assert regularise(plain, tokens).losses is plain.losses


def test_a_missing_reference_is_named():
    tokens = replace(random_case([4], 6).tensors(), reference_logprobs=None)
    with pytest.raises(ValueError, match="needs reference_logprobs"):
        regularise(ppo(tokens, LossSettings()), tokens, kl_coefficient=0.1)
