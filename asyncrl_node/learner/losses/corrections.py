"""What to do with behaviour weights w = proximal / sampler that are far from 1.

    off        w
    truncate   min(max(w, low), high)
    mask       w where low <= w <= high, else 0

A sampler computes log-probabilities with other kernels, precisions and batch shapes than the
learner, so w differs from 1 even at equal version. truncate is truncated importance sampling
(Ionides 2008; for RL with a separate inference engine: Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training"): low 0, high 2 there. mask is IcePop (Ling
team 2025, arXiv:2510.18855): low 0.5, high 5 there; a token far off is more likely broken than
informative. Weights carry no gradient. A masked token stays in the aggregation's denominator.

ppo, gspo, cispo and importance_sampling have the sampler in their ratio already; these weights
belong to losses whose ratio is learner over *proximal*: decoupled_ppo with truncate is TIS, with
mask it is IcePop.
"""

from __future__ import annotations

from torch import Tensor

from asyncrl_node.learner.losses.settings import LossSettings


def correct_weights(weights: Tensor, settings: LossSettings) -> Tensor:
    """Bound N weights; reads weight_correction, weight_low, weight_high."""
    low, high = settings.weight_low, settings.weight_high
    if settings.weight_correction == "truncate":
        return weights.clamp(low, high)
    if settings.weight_correction == "mask":
        outside = (weights < low) | (weights > high)  # a NaN is in neither: it must stay visible
        return weights.masked_fill(outside, 0.0)
    return weights
