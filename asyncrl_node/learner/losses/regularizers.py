"""Terms beside the policy loss, per token: KL to a reference model and an entropy bonus.

With x = logprobs - reference_logprobs [N], of tokens that the policy sampled:

          value                  gradient of the mean     weighted: of the mean of r k
    k1    x                      0                        KL(policy || reference)
    k2    x^2 / 2                KL(policy || reference)  the mean of x^2 / 2
    k3    exp(-x) - 1 + x        KL(reference || policy)  KL(policy || reference)

k1 and k3 estimate the value of KL(policy || reference) without bias, k2 with one; k1 varies most,
k2 and k3 are never negative (Schulman 2020, Approximating KL Divergence). As a *loss* each has the
gradient above, which is another matter: that of k1 is zero in the mean, it only adds noise and, on
stale data, pushes down whatever was sampled. k1 belongs in a reward, where its gradient would be
that of k2 here.

Both columns are what a token contributes given its prefix; that it also leads to later tokens is
left out. The first one holds on-policy; off-policy it is biased by how far the sampler is away. The
second one, weighted by the importance ratio r with its gradient (DeepSeek-AI 2025, DeepSeek-V3.2,
arXiv:2512.02556, "unbiased KL estimate"), holds for whatever sampled the token; nothing but
LARGEST_LOG_RATIO bounds r. tests/learner proves each entry over a whole vocabulary.

Entropy: - entropies [N], which must carry a gradient (head_logprobs with entropy_gradient=True).
Both terms are aggregated with the weights of the policy loss.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl_node.learner.losses.base import (
    LARGEST_LOG_RATIO,
    LossInput,
    TokenLoss,
    given,
    importance_ratios,
)

KlKind = Literal["k1", "k2", "k3"]


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor, kind: KlKind) -> Tensor:
    """Estimate the KL from N sampled tokens, one by one; carries the gradient of `logprobs`.

    The difference is clamped to LARGEST_LOG_RATIO, as ratios are: beyond it there is no gradient.
    """
    difference = (logprobs - reference_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
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
    kl_weighted: bool = True,
    entropy_coefficient: float = 0.0,
) -> TokenLoss:
    """Add kl_coefficient * KL - entropy_coefficient * entropy to each of N losses.

    kl_weighted: the KL counts r times, r the ratio to the sampler.

    Raises: ValueError if there is a KL term and no reference log-probabilities.
    """
    losses = loss.losses
    if kl_coefficient:
        reference = given(tokens.reference_logprobs, "reference_logprobs")
        kl = reference_kl(tokens.logprobs, reference, kl_kind)
        if kl_weighted:
            kl = importance_ratios(tokens.logprobs, tokens.sampler_logprobs) * kl
        losses = losses + kl_coefficient * kl
    if entropy_coefficient:
        losses = losses - entropy_coefficient * tokens.entropies
    return loss._replace(losses=losses)
