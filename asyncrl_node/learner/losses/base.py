"""What every loss takes and returns.

    loss(tokens: LossInput, settings: LossSettings) -> TokenLoss

A loss is a pure function of the loss tokens of one forward pass. It returns a loss per token,
neither weighted nor summed; aggregation.py does that, the same way for every loss. Importance
ratios are taken per token against the log-probability recorded when that token was sampled, so a
rollout whose tokens come from several versions needs no special care.

What one forward pass cannot know is given: the proximal policy's log-probabilities (the weights at
the start of the step), and statistics of the whole update. A loss says by `@needs` which of these
it reads; what it does not name may be None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from asyncrl_node.learner.losses.settings import LossSettings

Need = Literal["proximal_logprobs", "log_ratio_limit"]
Anything = TypeVar("Anything")
LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to it on both sides: exp(20), half a billion, is far from overflow, so one
absurd token stops no run. A token beyond it counts as clipped and has no gradient, but in cispo and
gspo, where only its weight is cut.

It is no trust region. Within it a negative advantage at a large ratio is what ppo, gspo, a3po,
decoupled_ppo and m2po leave unbounded, as importance_sampling does: at a log-ratio of 19 and A = -1
the gradient is exp(19). `dual_clip` bounds it (not in importance_sampling, which reads no setting),
and max_grad_norm the step that comes of it."""


@dataclass(frozen=True, slots=True)
class LossInput:
    """N loss tokens of R rollouts; each rollout has all of its loss tokens here."""

    logprobs: Tensor
    """[N] float, the learner's, natural log; carries the gradient."""
    sampler_logprobs: Tensor
    """[N] float, recorded when the token was sampled."""
    advantages: Tensor
    """[N] float; equal within a rollout unless the environment gives credit per turn or token."""
    rollout_index: Tensor
    """[N] int64, each token's rollout, 0 .. R - 1."""
    num_rollouts: int
    """R"""
    staleness: Tensor
    """[N] int, version of the weights in use minus the version that sampled the token."""
    entropies: Tensor
    """[N] float, of the learner's distribution; carries a gradient if there is an entropy bonus."""
    proximal_logprobs: Tensor | None = None
    """[N] float, by the weights at the start of the step; no gradient."""
    reference_logprobs: Tensor | None = None
    """[N] float, by the frozen reference model; no gradient."""
    log_ratio_limit: float | None = None
    """What `m2po_limit` gave for the whole update."""


class TokenLoss(NamedTuple):
    """A loss per token; the counts are for the record and carry no gradient."""

    losses: Tensor
    """[N], neither weighted nor summed."""
    num_clipped: Tensor
    """[] int64, tokens whose gradient the loss removed or whose weight it cut, or that lie beyond
    LARGEST_LOG_RATIO."""
    ratio_max: Tensor
    """[], the largest importance ratio to the sampler; 0 without tokens."""


Loss = Callable[[LossInput, LossSettings], TokenLoss]


def importance_ratios(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(logprobs - old_logprobs) [N], the exponent within LARGEST_LOG_RATIO of 0.

    A clamped token has no gradient; a NaN stays one.
    """
    return torch.exp((logprobs - old_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def beyond_largest(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Whether `importance_ratios` clamps each of N tokens, [N] bool."""
    return (logprobs - old_logprobs).detach().abs() > LARGEST_LOG_RATIO


def token_loss(losses: Tensor, clipped: Tensor, ratios: Tensor) -> TokenLoss:
    """Put a result together: losses [N], clipped [N] bool, ratios [N]."""
    largest = ratios.detach().max() if len(ratios) else ratios.new_zeros(())
    return TokenLoss(losses, clipped.sum(), largest)


def needs(*names: Need) -> Callable[[Loss], Loss]:
    """Mark a loss as one that reads these fields of LossInput."""

    def mark(loss: Loss) -> Loss:
        loss.__dict__["needs"] = frozenset(names)
        return loss

    return mark


def needs_of(loss: Loss) -> frozenset[Need]:
    """Return what a loss was marked with; nothing, if it was not."""
    found: frozenset[Need] = getattr(loss, "needs", frozenset())
    return found


def given(value: Anything | None, name: str) -> Anything:
    """Return what a loss needs. Raises: ValueError if the caller left it out."""
    if value is None:
        raise ValueError(f"this loss needs {name}, and got none")
    return value
