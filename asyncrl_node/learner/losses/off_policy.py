"""Trust regions made for stale data.

With p = proximal, b = sampler (behaviour), l = learner log-probabilities [N], A [N], sg = without
gradient, clip as in ppo, d = staleness [N]:

    decoupled_ppo   - sg(correct(exp(p - b))) min(r A, clip(r) A)         r = exp(l - p)
    a3po            decoupled_ppo with p = b + (1 - 1/d) sg(l - b), and p = b where d = 0
    m2po            ppo with a clip range that the whole update's log-ratios decide
"""

from __future__ import annotations

from math import exp, inf, sqrt

import torch
from torch import Tensor

from asyncrl_node.learner.losses.base import (
    LossInput,
    TokenLoss,
    beyond_largest,
    given,
    importance_ratios,
    needs,
    token_loss,
)
from asyncrl_node.learner.losses.corrections import correct_weights
from asyncrl_node.learner.losses.policy import clipped_surrogate
from asyncrl_node.learner.losses.settings import LossSettings


@needs("proximal_logprobs")
def decoupled_ppo(tokens: LossInput, settings: LossSettings) -> TokenLoss:
    """Correct for the sampler by a weight, and trust only steps away from the proximal policy.

    Hilton et al. 2021 (Batch size-invariance for policy optimization, arXiv:2110.00641); for
    asynchronous RL of language models Fu et al. 2025 (AReaL, arXiv:2505.24298). The proximal policy
    is the weights at the start of the step, an extra forward pass. In a step's first update r is
    exactly 1 and nothing clips: with one update per step this is importance sampling with corrected
    weights, so it needs num_substeps > 1, or a bound on the weights, to be a trust region at all.
    Reads clip_low, clip_high, dual_clip, weight_correction, weight_low, weight_high.
    """
    return _decoupled(tokens, given(tokens.proximal_logprobs, "proximal_logprobs"), settings)


def a3po(tokens: LossInput, settings: LossSettings) -> TokenLoss:
    """Decoupled PPO without the extra forward pass: the proximal policy is interpolated.

    Li et al. 2025 (A-3PO, arXiv:2512.06547). The anchor lies on the line in log-probability between
    the sampler (d steps old) and the learner, one step before the learner: r = w^(1/d) with
    w = exp(l - b). So w itself is trusted within [(1 - clip_low)^d, (1 + clip_high)^d]: the older
    the token, the wider. At d <= 1 this is ppo. The anchor has no gradient. Formula checked against
    the documentation of AReaL, to which the authors contributed it, and summaries of the paper; the
    paper's text itself was not at hand. Reads what decoupled_ppo reads.
    """
    share = 1.0 - 1.0 / tokens.staleness.clamp(min=1).to(tokens.logprobs.dtype)
    drift = (tokens.logprobs - tokens.sampler_logprobs).detach()
    return _decoupled(tokens, tokens.sampler_logprobs + share * drift, settings)


@needs("log_ratio_limit")
def m2po(tokens: LossInput, settings: LossSettings) -> TokenLoss:
    """Clip no more tokens than it takes to bound the second moment of the log-ratios.

    Zheng et al. 2025 (M2PO, Prosperity before Collapse, arXiv:2510.01161). `m2po_limit` finds the
    limit t over the whole update, in advance; here the clip range is [exp(-t), exp(t)], never
    tighter than [1 - clip_low, 1 + clip_high] (the authors' code: 0.3 and 0.5). The limit is one
    number, so micro-batches and ranks that share it clip exactly the same tokens. After an update
    log-ratios have moved: find the limit anew before each update, or keep the step's first.
    Checked against the authors' published code; they round t down to a token's own log-ratio, here
    it is exact. Reads clip_low, clip_high, dual_clip; `m2_budget` belongs to `m2po_limit`.
    """
    limit = given(tokens.log_ratio_limit, "log_ratio_limit")
    low = min(1.0 - settings.clip_low, exp(-limit))
    high = max(1.0 + settings.clip_high, exp(min(limit, _LARGEST_EXPONENT)))
    ratios = importance_ratios(tokens.logprobs, tokens.sampler_logprobs)
    wide = LossSettings(clip_low=1.0 - low, clip_high=high - 1.0, dual_clip=settings.dual_clip)
    losses, clipped = clipped_surrogate(ratios, tokens.advantages, wide)
    clamped = beyond_largest(tokens.logprobs, tokens.sampler_logprobs)
    return token_loss(losses, clipped | clamped, ratios)


def m2po_limit(log_ratios: Tensor, advantages: Tensor, budget: float) -> float:
    """Largest |log-ratio| t for which the mean of min(log-ratio^2, t^2) stays within `budget`.

    log_ratios, advantages [N]: *all* loss tokens of the update, from every micro-batch and rank, in
    any order. The mean runs over the tokens that clipping can stop, A > 0 at r > 1 and A < 0 at
    r < 1; the others pull towards the sampler and are left alone. inf if all fit. A log-ratio that
    is infinite is cut like any large one; NaN is left to the guard.
    """
    pushing = (log_ratios * advantages.sign()) > 0
    squares = log_ratios[pushing].double().square().sort().values
    count = len(squares)
    below = torch.cat([squares.new_zeros(1), squares.cumsum(0)])[:-1]
    above = torch.arange(count, 0, -1, dtype=torch.float64, device=squares.device)
    candidates = (budget * count - below) / above
    cut = (candidates < squares).nonzero()
    return sqrt(max(0.0, float(candidates[cut[0, 0]]))) if len(cut) else inf


_LARGEST_EXPONENT = 80.0
"""exp of it is still a float32."""


def _decoupled(tokens: LossInput, proximal: Tensor, settings: LossSettings) -> TokenLoss:
    """Decoupled PPO with N proximal log-probabilities that carry no gradient."""
    behaviour = importance_ratios(proximal, tokens.sampler_logprobs)
    weights = correct_weights(behaviour, settings)
    ratios = importance_ratios(tokens.logprobs, proximal)
    losses, clipped = clipped_surrogate(ratios, tokens.advantages, settings)
    to_sampler = importance_ratios(tokens.logprobs, tokens.sampler_logprobs)
    cut = clipped | (weights != behaviour)
    for new, old in ((tokens.logprobs, proximal), (proximal, tokens.sampler_logprobs)):
        cut = cut | beyond_largest(new, old)
    return token_loss(weights * losses, cut, to_sampler)
