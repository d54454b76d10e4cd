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

Where an environment rewards turns, with K_i turns in rollout i and r_ik for turn k:

    return_to_go     A_ik = the advantage, as above, of G_ik among the G_jk of all j with K_j > k
                     G_ik = r_ik + discount G_i,k+1      what rollout i still earned from turn k on
    as_given         A_ik = r_ik                         the environment has done the comparing

Every sampled token of turn k has the advantage A_ik. A turn is credited with what came of it and
with nothing before it (returns as credit: Williams 1992, REINFORCE). Turn k of the siblings has
other histories than its own; the mean of their G_jk is a baseline all the same, for it does not
depend on what turn k itself does. That is leave_one_out; the others' mean contains G_ik too.
mean is leave_one_out times (R_k - 1) / R_k, R_k the rollouts that reached turn k; mean_std and
mean_normalised also divide by what contains G_ik.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import fsum, sqrt
from typing import Literal

AdvantageKind = Literal["mean_std", "mean", "leave_one_out", "mean_normalised"]
TurnCredit = Literal["return_to_go", "as_given", "off"]
"""off: turns' rewards are left alone, all that counts is the rollout's."""
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
    compare: GroupAdvantage = group_advantages,
    credit: TurnCredit = "return_to_go",
    discount: float = 1.0,
) -> list[list[float]]:
    """Turn rewards of R rollouts -> an advantage per turn, in the same shape.

    turn_rewards[i][k] is what rollout i earned by its turn k; `compare` is the group's advantage.
    A turn that only one rollout reached has nothing to be compared with: zero. With one turn each,
    return_to_go is `compare`. `credit` is not off.

    Raises: ValueError naming a return that is not a finite number, or whatever `compare` raises.
    """
    if credit == "as_given":
        return [list(rewards) for rewards in turn_rewards]
    returns = [_returns(rewards, discount) for rewards in turn_rewards]
    advantages = [[0.0] * len(rewards) for rewards in turn_rewards]
    for turn in range(max(map(len, returns), default=0)):
        there = [place for place, values in enumerate(returns) if len(values) > turn]
        if len(there) == 1:
            continue
        compared = compare([returns[place][turn] for place in there])
        for place, advantage in zip(there, compared, strict=True):
            advantages[place][turn] = advantage
    return advantages


def compared_range(
    rewards: Sequence[float],
    turn_rewards: Sequence[Sequence[float]],
    credit: TurnCredit = "return_to_go",
    discount: float = 1.0,
) -> tuple[float, float]:
    """Least and greatest of what R siblings are told apart by; equal where that is nothing.

    Rewards, where no turn is rewarded or it does not count; else the turns' returns, or, as given,
    the turns' rewards and zero.
    """
    if credit == "off" or not any(turn_rewards):
        return min(rewards), max(rewards)
    if credit == "as_given":
        values = [0.0, *(reward for turns in turn_rewards for reward in turns)]
        return min(values), max(values)
    values = [value for turns in turn_rewards for value in _returns(turns, discount)]
    mean = partial(group_advantages, kind="mean")
    if any(map(any, turn_advantages(turn_rewards, mean, credit, discount))):
        return min(values), max(values)
    return values[0], values[0]


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
