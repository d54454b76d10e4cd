"""The chunked log-probability head against the naive way in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl_node.learner.logprobs import head_logprobs

SIZES = {"num": st.integers(0, 30), "width": st.integers(1, 9), "vocab": st.integers(1, 40)}


def naive(hidden, weight, targets, temperature):
    log_softmax = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    entropies = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(1, targets[:, None])[:, 0], entropies


def random_inputs(num, width, vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, width, generator=generator, requires_grad=True)
    targets = torch.randint(vocab, (num,), generator=generator)
    return hidden, weight, targets, torch.randn(num, generator=generator)


def assert_equal_to_naive(inputs, temperature, chunk_elements):
    hidden, weight, targets, upstream = inputs
    results = []
    for logprobs, entropies in (
        head_logprobs(hidden, weight, targets, temperature, chunk_elements),
        naive(hidden, weight, targets, temperature),
    ):
        grads = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))
        results.append([logprobs, entropies, *grads])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(**SIZES, temperature=st.floats(0.3, 3.0), chunk_elements=st.integers(1, 600))
def test_values_and_gradients_equal_the_naive_way(num, width, vocab, temperature, chunk_elements):
    assert_equal_to_naive(random_inputs(num, width, vocab), temperature, chunk_elements)


@pytest.mark.parametrize("chunk_elements", [1 << 22, 3 * 5000, 1])
def test_a_large_vocabulary(chunk_elements):
    assert_equal_to_naive(random_inputs(10, 16, 5000), 0.7, chunk_elements)


def test_chunk_size_does_not_matter():
    hidden, weight, targets, _ = random_inputs(50, 8, 30)
    whole = head_logprobs(hidden, weight, targets, 1.3)
    for chunk_elements in (30, 7 * 30, 49 * 30, 50 * 30):
        parts = head_logprobs(hidden, weight, targets, 1.3, chunk_elements)
        for ours, theirs in zip(parts, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_large_logit_does_not_overflow():
    hidden = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]])
    logprobs, entropies = head_logprobs(hidden, weight, torch.tensor([0, 0]), 1.0)
    assert logprobs.tolist() == [0.0, -200.0]
    assert entropies.tolist() == pytest.approx([0.0, 0.0])


def test_entropies_carry_no_gradient():
    hidden, weight, targets, _ = random_inputs(3, 4, 5)
    logprobs, entropies = head_logprobs(hidden, weight, targets, 1.0)
    assert logprobs.requires_grad
    assert not entropies.requires_grad


class LargestTensor(TorchDispatchMode):
    """Remember the largest tensor that an operation returned, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("backward", [False, True])
def test_logits_never_exist_for_more_than_a_chunk(backward):
    hidden, weight, targets, upstream = random_inputs(400, 4, 300)
    with LargestTensor() as largest:
        logprobs, _ = head_logprobs(hidden, weight, targets, 1.0, chunk_elements=20 * 300)
        if backward:
            torch.autograd.backward((logprobs * upstream).sum())
    assert largest.elements <= 20 * 300
