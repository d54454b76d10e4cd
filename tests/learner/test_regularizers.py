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


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_terms_are_added_token_by_token(kind):
    case = random_case([4, 0, 3], 6)
    tokens = replace(case.tensors(), entropies=torch.linspace(0.1, 2.0, 7, dtype=torch.float64))
    plain = ppo(tokens, LossSettings())
    both = regularise(plain, tokens, 0.3, kind, 0.01)
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
