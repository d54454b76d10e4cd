"""Losses whose ratio is learner over sampler, token by token or rollout by rollout.

All take N tokens. With r = exp(logprobs - sampler_logprobs) [N], A = advantages [N], sg = without
gradient:

    importance_sampling   - r A
    ppo                   - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
                            and at least -dual_clip A in size where A < 0, if dual_clip is set
    cispo                 - sg(clip(r, ratio_floor, ratio_cap)) A logprobs
    gspo                  ppo, with the rollout's ratio s = exp(mean of its tokens' log r) for r
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl_node.learner.losses.base import (
    LARGEST_LOG_RATIO,
    LossInput,
    TokenLoss,
    beyond_largest,
    importance_ratios,
    token_loss,
)
from asyncrl_node.learner.losses.settings import LossSettings


def importance_sampling(tokens: LossInput, settings: LossSettings) -> TokenLoss:
    """Weigh each token by its ratio, up to exp(LARGEST_LOG_RATIO). Reads no setting.

    The off-policy policy gradient of Degris et al. 2012 (arXiv:1205.4839), per token: unbiased for
    a token given its prefix, but nothing else bounds r. It destabilises from a staleness of about
    3.
    """
    ratios = importance_ratios(tokens.logprobs, tokens.sampler_logprobs)
    clamped = beyond_largest(tokens.logprobs, tokens.sampler_logprobs)
    return token_loss(-(ratios * tokens.advantages), clamped, ratios)


def ppo(tokens: LossInput, settings: LossSettings) -> TokenLoss:
    """Stop pushing a token once its ratio has left the trust region in the direction of A.

    Schulman et al. 2017 (Proximal Policy Optimization, eq. 7, arXiv:1707.06347), with an upper
    bound of its own (clip-higher; Yu et al. 2025, DAPO, arXiv:2503.14476). dual_clip bounds what
    min() leaves unbounded, a negative advantage at a large ratio (Ye et al. 2019,
    arXiv:1912.09729). Reads clip_low, clip_high, dual_clip.
    """
    ratios = importance_ratios(tokens.logprobs, tokens.sampler_logprobs)
    losses, clipped = clipped_surrogate(ratios, tokens.advantages, settings)
    clamped = beyond_largest(tokens.logprobs, tokens.sampler_logprobs)
    return token_loss(losses, clipped | clamped, ratios)


def cispo(tokens: LossInput, settings: LossSettings) -> TokenLoss:
    """Cut the weight of a token, never its gradient.

    MiniMax 2025 (MiniMax-M1, eq. 4-5, arXiv:2506.13585); ratio_floor 0 and a cap of about 5 as in
    ScaleRL (Khatri et al. 2025, arXiv:2510.13786). Not a trust region: every token keeps pushing,
    and with caps of 2 and 4 it destabilised at a mean staleness of about 2.5.
    Reads ratio_floor, ratio_cap. The value of the loss means nothing, only its gradient does.
    """
    ratios = importance_ratios(tokens.logprobs.detach(), tokens.sampler_logprobs)
    weights = ratios.clamp(settings.ratio_floor, settings.ratio_cap)
    losses = -(weights * tokens.advantages * tokens.logprobs)
    clamped = beyond_largest(tokens.logprobs, tokens.sampler_logprobs)
    return token_loss(losses, (weights != ratios) | clamped, ratios)


def gspo(tokens: LossInput, settings: LossSettings) -> TokenLoss:
    """Judge whole rollouts: one ratio, the geometric mean of its tokens', and one clip decision.

    Zheng et al. 2025 (GSPO, arXiv:2507.18071), in the form of its section 4.3 (GSPO-token):
    value s for each token, gradient through that token alone. Where A is constant in a rollout it
    has the value and the gradient of the sequence form, and it stays right where A is not. Means
    vary less than tokens, so the paper clips at 3e-4 and 4e-4. Here the default is 0.2 and 0.2, as
    for every loss, because nothing measured speaks for less on short answers: on the demo's task
    (60 steps, learning rate 3e-4) held-out reward ended, at 0.2 and at the paper's bounds, at depth
    1 at .90 and .90 (seed 0), .80 and .89 (seed 1), at depth 8 at .90 and .85 (seed 0); clipped
    tokens were below 2 % and 18 to 56 %. That is no ordering. Reads clip_low, clip_high, dual_clip.
    """
    to_sampler = importance_ratios(tokens.logprobs.detach(), tokens.sampler_logprobs)
    log_ratios = (tokens.logprobs - tokens.sampler_logprobs).detach()
    log_ratios = log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    means = rollout_means(log_ratios, tokens.rollout_index, tokens.num_rollouts)
    sequence = means.index_select(0, tokens.rollout_index)
    ratios = torch.exp(sequence + (tokens.logprobs - tokens.logprobs.detach()))
    losses, clipped = clipped_surrogate(ratios, tokens.advantages, settings)
    clamped = beyond_largest(tokens.logprobs, tokens.sampler_logprobs)
    return token_loss(losses, clipped | clamped, to_sampler)


def clipped_surrogate(
    ratios: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """PPO's surrogate of N ratios; returns the losses [N] and which have no gradient [N] bool."""
    unclipped = ratios * advantages
    clipped = ratios.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    flat = clipped < unclipped
    if settings.dual_clip is not None:
        bound = settings.dual_clip * advantages
        cut = (advantages < 0) & (surrogate < bound)
        surrogate, flat = torch.where(cut, bound, surrogate), flat | cut
    return -surrogate, flat


def rollout_means(values: Tensor, rollout_index: Tensor, num_rollouts: int) -> Tensor:
    """Mean of N values over each of R rollouts; 0 for a rollout without tokens."""
    sums = values.new_zeros(num_rollouts).index_add_(0, rollout_index, values)
    counts = torch.bincount(rollout_index, minlength=num_rollouts)
    return sums / counts.clamp(min=1)
