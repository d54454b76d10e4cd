"""Terms beside the policy loss, per token: KL to a reference model and an entropy bonus.

With x = logprobs - reference_logprobs [N], of tokens that the policy sampled:

    k1    x                      unbiased estimate of KL(policy || reference); varies most
    k2    x^2 / 2                biased, and its gradient is that of KL(policy || reference)
    k3    exp(-x) - 1 + x        unbiased, never negative, and its gradient is that of
                                 KL(reference || policy)

Estimators: Schulman 2020, "Approximating KL divergence". Gradients: of the mean under the policy,
on-policy; that of k1 *as a loss* is zero in the mean, it only adds noise: k1 belongs in a reward.
Off-policy all three are biased by what the sampler's distribution differs. tests/learner proves the
three gradients over a whole vocabulary.

Entropy: - entropies [N], which must carry a gradient (head_logprobs with entropy_gradient=True).
Both terms are aggregated with the weights of the policy loss.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl_node.learner.losses.base import LossInput, TokenLoss, given

KlKind = Literal["k1", "k2", "k3"]


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor, kind: KlKind) -> Tensor:
    """Estimate the KL from N sampled tokens, one by one; carries the gradient of `logprobs`."""
    difference = logprobs - reference_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    return torch.expm1(-difference) + difference


def regularise(
    loss: TokenLoss,
    tokens: LossInput,
    kl_coefficient: float = 0.0,
    kl_kind: KlKind = "k3",
    entropy_coefficient: float = 0.0,
) -> TokenLoss:
    """Add kl_coefficient * KL - entropy_coefficient * entropy to each of N losses.

    Raises: ValueError if there is a KL term and no reference log-probabilities.
    """
    losses = loss.losses
    if kl_coefficient:
        reference = given(tokens.reference_logprobs, "reference_logprobs")
        losses = losses + kl_coefficient * reference_kl(tokens.logprobs, reference, kl_kind)
    if entropy_coefficient:
        losses = losses - entropy_coefficient * tokens.entropies
    return loss._replace(losses=losses)
