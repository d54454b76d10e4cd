"""The chunked log-probability head against the naive way in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import asyncrl_node
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


@settings(max_examples=60, deadline=None)
@given(**SIZES, temperature=st.floats(0.3, 3.0), chunk_elements=st.integers(1, 600))
def test_gradients_of_entropies_equal_the_naive_way(num, width, vocab, temperature, chunk_elements):
    """Of both outputs together, and of the entropies alone."""
    hidden, weight, targets, upstream = random_inputs(num, width, vocab)
    both = []
    for logprobs, entropies in (
        head_logprobs(hidden, weight, targets, temperature, chunk_elements, True),
        naive(hidden, weight, targets, temperature),
    ):
        alone = torch.autograd.grad(
            (entropies * upstream).sum(), (hidden, weight), retain_graph=True
        )
        sums = ((logprobs - 0.5 * entropies) * upstream).sum()
        both.append([*alone, *torch.autograd.grad(sums, (hidden, weight))])
    for ours, exact in zip(*both, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-4, atol=1e-5)


def test_a_sure_token_has_a_finite_entropy_gradient():
    hidden = torch.tensor([[200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    _, entropies = head_logprobs(hidden, weight, torch.tensor([0]), 1.0, entropy_gradient=True)
    for grad in torch.autograd.grad(entropies.sum(), (hidden, weight)):
        assert not grad.any()


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
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_logits_never_exist_for_more_than_a_chunk(backward, entropy_gradient):
    hidden, weight, targets, upstream = random_inputs(400, 4, 300)
    with LargestTensor() as largest:
        logprobs, entropies = head_logprobs(
            hidden, weight, targets, 1.0, 20 * 300, entropy_gradient=entropy_gradient
        )
        if backward:
            torch.autograd.backward(((logprobs - 0.1 * entropies) * upstream).sum())
    assert largest.elements <= 20 * 300


LINEAR_CROSS_ENTROPY = getattr(torch.nn.functional, "linear_cross_entropy", None)


@pytest.mark.skipif(LINEAR_CROSS_ENTROPY is None, reason="torch has no linear_cross_entropy yet")
def test_torchs_own_chunked_head_agrees():
    """Their per-token loss is our negative log-probability, and so are its gradients."""
    hidden, weight, targets, upstream = random_inputs(64, 16, 1000)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16)
    theirs = -LINEAR_CROSS_ENTROPY(hidden, weight, targets, reduction="none", options=options)
    ours, _ = head_logprobs(hidden, weight, targets, 1.0, chunk_elements=7000)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, other in zip(
        torch.autograd.grad((ours * upstream).sum(), (hidden, weight)),
        torch.autograd.grad((theirs * upstream).sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


PEAK = """
import json, resource, sys
import torch
from asyncrl_node.learner.logprobs import head_logprobs

way, num, width, vocab = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
hidden = torch.randn(num, width, generator=generator, requires_grad=True)
weight = (torch.randn(vocab, width, generator=generator) / width ** 0.5).requires_grad_()
targets = torch.randint(vocab, (num,), generator=generator)
upstream = torch.randn(num, generator=generator)
(hidden[:64] @ weight[:64].T).sum().backward()
hidden.grad = weight.grad = None

before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
if way == "ours":
    logprobs, entropies = head_logprobs(hidden, weight, targets, 1.0)
elif way == "torchs":
    logprobs = -torch.nn.functional.linear_cross_entropy(
        hidden, weight, targets, reduction="none",
        options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=512),
    )
    entropies = None
else:
    log_softmax = (hidden @ weight.T).log_softmax(-1)
    entropies = -(log_softmax.detach().exp() * log_softmax.detach()).sum(-1)
    logprobs = log_softmax.gather(1, targets[:, None])[:, 0]
(logprobs * upstream).sum().backward()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before

results = dict(logprobs=logprobs, entropies=entropies, hidden=hidden.grad, weight=weight.grad)
torch.save({k: v.detach() for k, v in results.items() if v is not None}, way + ".pt")
print(json.dumps(peak))
"""


def peak_bytes(way, folder, *sizes):
    """Memory above the inputs at the peak of one forward and backward pass, in its own process.

    Freed tensors go back to the system at once (glibc's threshold is fixed): else the peak of the
    resident size also has holes of its heap in it, which vary from run to run by twice our peak.
    """
    command = [sys.executable, "-c", PEAK, way, *map(str, sizes)]
    path = os.pathsep.join([str(Path(asyncrl_node.__file__).parents[1]), *sys.path])
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "1048576"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def assert_same_results(folder, way, names):
    ours, theirs = (torch.load(folder / f"{w}.pt", weights_only=True) for w in ("ours", way))
    assert theirs.keys() == names
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_peak_memory_is_a_fraction_of_the_naive_ways(tmp_path):
    """4096 tokens, 32768 words: at most 0.15, with the same values and gradients."""
    sizes = (4096, 256, 32768)
    naive_bytes, our_bytes = (peak_bytes(way, tmp_path, *sizes) for way in ("naive", "ours"))
    assert naive_bytes > 2 * 4096 * 32768 * 4
    assert our_bytes <= 0.15 * naive_bytes, f"{our_bytes / naive_bytes:.3f}"
    assert_same_results(tmp_path, "naive", {"logprobs", "entropies", "hidden", "weight"})
    if LINEAR_CROSS_ENTROPY is not None:
        peak_bytes("torchs", tmp_path, *sizes)
        assert_same_results(tmp_path, "torchs", {"logprobs", "hidden", "weight"})
