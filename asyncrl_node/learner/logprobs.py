"""Log-probabilities of the sampled tokens, straight from hidden states and the head's weight.

With V tokens in the vocabulary, logits of N positions are N * V floats: 0.5 GB for 1024 positions
of a 128k vocabulary, and autograd keeps two or three of them. Here logits exist for a chunk at a
time, in the forward and again in the backward pass (recomputation, as in Wijmans et al. 2024, Cut
Your Losses, arXiv:2411.09009):

    l = h W^T / T      log p(y) = l_y - logsumexp(l)      d log p(y) / d l = onehot(y) - softmax(l)
                       H = - sum p log p                  d H / d l = - p (log p + H)

If all N * V logits fit into one chunk, their softmax is kept for the backward pass instead:
the same numbers, without the second product. An entropy bonus needs log p again, and recomputes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl_node.head_logits import head_logits

Context = Any
"""autograd's context: it takes any attribute."""
CHUNK_ELEMENTS = 1 << 22
"""Logits that exist at one time: 16 MiB in float32."""


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_elements: int = CHUNK_ELEMENTS,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Score N target tokens under softmax(hidden @ weight^T / temperature).

    hidden [N, D], weight [V, D], targets [N] int64 -> log-probabilities [N] and entropies [N],
    natural log, float32. The log-probabilities carry gradients to `hidden` and `weight`; the
    entropies do so only with `entropy_gradient`, else they are for the record.
    """
    chunk = max(1, chunk_elements // weight.shape[0])
    scores: tuple[Tensor, Tensor] = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, 1.0 / temperature, chunk, entropy_gradient
    )
    return scores


class _HeadLogprobs(torch.autograd.Function):
    """The chunked head; `chunk` is in positions."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        kept = None
        for rows in _chunks(len(hidden), chunk):
            log_softmax = _log_softmax(hidden[rows], weight, scale)
            torch.gather(log_softmax, 1, targets[rows, None], out=logprobs[rows, None])
            softmax = log_softmax.exp()
            torch.sum(log_softmax.mul_(softmax), 1, out=entropies[rows])
            kept = softmax
        entropies.neg_()
        if entropy_gradient or len(hidden) > chunk:
            kept = None
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(hidden, weight, targets, kept, entropies)
        ctx.scale, ctx.chunk = scale, chunk
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Context, grad: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, kept, entropies = ctx.saved_tensors
        grad = torch.zeros_like(entropies) if grad is None else grad
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(len(hidden), ctx.chunk):
            softmax, from_entropies = kept, None
            if softmax is None:
                log_softmax = _log_softmax(hidden[rows], weight, ctx.scale)
                if grad_entropies is None:
                    softmax = log_softmax.exp_()
                else:
                    softmax = log_softmax.exp()
                    upstream = (grad_entropies[rows] * -ctx.scale)[:, None]
                    from_entropies = log_softmax.add_(entropies[rows, None]).mul_(softmax)
                    from_entropies.mul_(upstream)
            scaled = (grad[rows] * ctx.scale)[:, None]
            grad_logits = softmax * -scaled if softmax is kept else softmax.mul_(-scaled)
            grad_logits.scatter_add_(1, targets[rows, None], scaled)
            if from_entropies is not None:
                grad_logits += from_entropies
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            grad_weight += grad_logits.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(num_positions: int, chunk: int) -> list[slice]:
    """Cut the positions into slices of at most `chunk`."""
    return [slice(first, first + chunk) for first in range(0, num_positions, chunk)]


def _log_softmax(hidden: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Log-probabilities of the whole vocabulary, [n, V] float32."""
    return head_logits(hidden, weight).mul_(scale).log_softmax(1)
