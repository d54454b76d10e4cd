"""Group-relative advantages: a rollout is judged against its siblings, no value network needed.

    mean             A_i =  r_i - mean(r)
    mean_std         A_i = (r_i - mean(r)) / (std(r) + 1e-4)        std over the population
    leave_one_out    A_i =  r_i - mean of the others' rewards       = (r_i - mean(r)) R / (R - 1)
    mean_normalised  A_i = (r_i - mean(r)) / mean(|r|)

mean_std is the outcome-supervised advantage of GRPO (Shao et al. 2024, DeepSeekMath,
arXiv:2402.03300, section 4.1.2). mean leaves the division out, because it weighs problems whose
rewards hardly differ as much as those that separate good from bad (Liu et al. 2025, Dr. GRPO,
arXiv:2503.20783). leave_one_out is RLOO (Ahmadian et al. 2024, arXiv:2402.14740): a baseline that
does not contain the rollout's own reward leaves the gradient unbiased. mean_normalised is maximum
likelihood RL (2026, arXiv:2602.02710): for 1/0 rewards, dividing by the success rate p turns the
gradient of p into that of log p; the absolute value only matters to rewards below 0.

A group whose rewards are all equal says nothing: its advantages are exactly zero, not rounding
noise divided by something small.

Where an environment rewards turns, `turn_advantages` compares the discounted return from each turn
on among the rollouts that got that far (returns as credit: Williams 1992, REINFORCE), and
`token_advantages` repeats each turn's advantage for its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum, sqrt
from typing import Literal

AdvantageKind = Literal["mean_std", "mean", "leave_one_out", "mean_normalised"]
GroupAdvantage = Callable[[Sequence[float]], Sequence[float]]
"""R rewards of one group -> R advantages."""

STD_FLOOR = 1e-4
"""Added to the standard deviation; 1/0 rewards have at least 0.33 in a group of 8."""
MAX_REWARD = 3.5e38
"""Rewards are float32 in a slot; the bound also refuses infinities and NaN, in one comparison."""


def group_advantages(rewards: Sequence[float], kind: AdvantageKind = "mean_std") -> list[float]:
    """Compare each of R rewards with the mean of its group; returns R advantages that sum to 0.

    Example: [1, 0, 0, 1] -> [0.5, -0.5, -0.5, 0.5] by "mean".

    Raises: ValueError naming a reward that is not a finite number.
    """
    for place, reward in enumerate(rewards):
        if not abs(reward) <= MAX_REWARD:
            raise ValueError(f"reward {place} of {len(rewards)} is {reward}")
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = fsum(rewards) / len(rewards)
    deviations = [reward - mean for reward in rewards]
    scale = _scale(rewards, deviations, kind)
    return [deviation / scale for deviation in deviations]


def turn_advantages(
    turn_rewards: Sequence[Sequence[float]],
    kind: AdvantageKind = "mean_std",
    discount: float = 1.0,
) -> list[list[float]]:
    """Turn rewards of R rollouts -> an advantage per turn, in the same shape.

    turn_rewards[i][k] is what rollout i earned by its turn k. Its return from k on, each later
    reward worth `discount` times less per turn, is compared with the returns from k on of all
    rollouts that have a turn k. A turn that only one rollout reached has nothing to be compared
    with: zero. With one turn each, this is `group_advantages`.

    Raises: ValueError naming a return that is not a finite number.
    """
    returns = [_returns(rewards, discount) for rewards in turn_rewards]
    advantages = [[0.0] * len(rewards) for rewards in turn_rewards]
    for turn in range(max(map(len, returns), default=0)):
        there = [place for place, values in enumerate(returns) if len(values) > turn]
        compared = group_advantages([returns[place][turn] for place in there], kind)
        for place, advantage in zip(there, compared, strict=True):
            advantages[place][turn] = advantage
    return advantages


def token_advantages(advantages: Sequence[float], num_tokens: Sequence[int]) -> list[float]:
    """Repeat each of K turns' advantage for its loss tokens; turns lie back to back.

    Example: [0.5, -1.0] with [1, 2] tokens -> [0.5, -1.0, -1.0].

    Raises: ValueError if there are not as many advantages as turns.
    """
    return [a for a, n in zip(advantages, num_tokens, strict=True) for _ in range(n)]


def _scale(rewards: Sequence[float], deviations: Sequence[float], kind: AdvantageKind) -> float:
    """Return what the deviations are divided by; rewards differ, so it is above 0."""
    count = len(rewards)
    if kind == "mean":
        return 1.0
    if kind == "leave_one_out":
        return (count - 1) / count
    if kind == "mean_normalised":
        return fsum(map(abs, rewards)) / count
    return sqrt(fsum(d * d for d in deviations) / count) + STD_FLOOR


def _returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Sum each turn's reward and the discounted ones after it."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]
