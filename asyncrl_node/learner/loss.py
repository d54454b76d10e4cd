"""Token losses, summed over tokens; the trainer divides by the tokens of the whole update.

With r = exp(learner_logprob - sampler_logprob), the importance ratio of a sampled token, and A
the advantage of its rollout:

    ppo                    - sum min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    importance_sampling    - sum r A

ppo is the clipped surrogate of Schulman et al. 2017 (Proximal Policy Optimization, eq. 7,
arXiv:1707.06347), with a separate upper bound as in Yu et al. 2025 (DAPO, arXiv:2503.14476), and
their mean over tokens rather than over rollouts. importance_sampling is the off-policy policy
gradient of Degris et al. 2012 (arXiv:1205.4839) per token: unbiased for the token given its
prefix, but nothing bounds r; it destabilises from a staleness of about 3 (pacing.md).

The sampler's log-probabilities are the old policy, whatever mix of versions sampled the rollout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """A loss over N tokens; everything but `total` is for the record and carries no gradient."""

    total: Tensor
    """[] float32, the sum over the tokens."""
    num_clipped: Tensor
    """[] int64, tokens whose gradient the clip removed."""
    ratio_max: Tensor
    """[] float32, the largest importance ratio; at least 0."""


def ppo_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Stop pushing a token once its ratio has left the trust region in the direction of A.

    All three tensors are [N] float32, advantages repeated for each token of a rollout.
    """
    ratios = torch.exp(logprobs - sampler_logprobs)
    unclipped = ratios * advantages
    clipped = ratios.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    total = -torch.minimum(unclipped, clipped).sum()
    return TokenLoss(total, (clipped < unclipped).sum(), _largest(ratios))


def importance_sampling_loss(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor
) -> TokenLoss:
    """Weigh each token by its ratio, unbounded; all three tensors are [N] float32."""
    ratios = torch.exp(logprobs - sampler_logprobs)
    num_clipped = torch.zeros((), dtype=torch.int64, device=ratios.device)
    return TokenLoss(-(ratios * advantages).sum(), num_clipped, _largest(ratios))


def _largest(ratios: Tensor) -> Tensor:
    """Return the largest of N ratios, 0 if there are none."""
    return ratios.detach().max() if len(ratios) else ratios.new_zeros(())
