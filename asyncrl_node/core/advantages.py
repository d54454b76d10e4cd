"""Group-relative advantages: a rollout is judged against its siblings, no value network needed.

    mean       A_i =  r_i - mean(r)
    mean_std   A_i = (r_i - mean(r)) / (std(r) + 1e-4)        std over the population

mean_std is the outcome-supervised advantage of GRPO (Shao et al. 2024, DeepSeekMath,
arXiv:2402.03300, section 4.1.2). mean leaves the division out, because it weighs problems whose
rewards hardly differ as much as those that separate good from bad (Liu et al. 2025, Dr. GRPO,
arXiv:2503.20783). A group whose rewards are all equal says nothing: its advantages are exactly
zero, not rounding noise divided by 1e-4.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt
from typing import Literal

STD_FLOOR = 1e-4
"""Added to the standard deviation; 1/0 rewards have at least 0.33 in a group of 8."""
MAX_REWARD = 3.5e38
"""Rewards are float32 in a slot; the bound also refuses infinities and NaN, in one comparison."""


def group_advantages(
    rewards: Sequence[float], kind: Literal["mean_std", "mean"] = "mean_std"
) -> list[float]:
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
    if kind == "mean":
        return deviations
    scale = sqrt(fsum(d * d for d in deviations) / len(rewards)) + STD_FLOOR
    return [deviation / scale for deviation in deviations]
