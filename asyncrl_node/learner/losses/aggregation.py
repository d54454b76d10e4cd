"""From losses per token to the loss of an update; R rollouts, n_i loss tokens in rollout i.

    token_mean       sum over tokens          / sum of n_i      every token counts the same
    sequence_mean    sum over tokens / n_i    / R               every rollout counts the same
    constant         sum over tokens          / (R horizon)     nothing depends on lengths

token_mean is DAPO's (Yu et al. 2025, arXiv:2503.14476), sequence_mean GRPO's (Shao et al. 2024,
arXiv:2402.03300), constant Dr. GRPO's (Liu et al. 2025, arXiv:2503.20783): dividing by n_i makes
long wrong answers cheap, dividing by a constant does not.

Each is a weight that depends on the token's own rollout, over a divisor that depends on totals of
the whole update. So losses are weighted and summed in any packs, micro-batches and ranks, and
divided once, when the totals are known: the result is the same for every way of cutting. R counts
every rollout of the update, those without a loss token and those of constant groups as well: none
may weigh more because a sibling is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def rollout_weight(aggregation: Aggregation, num_tokens: int) -> float:
    """Weight, before the divisor, of each loss token of a rollout with `num_tokens` of them."""
    if aggregation == "sequence_mean":
        return 1.0 / max(1, num_tokens)
    return 1.0


def divisor(
    aggregation: Aggregation, num_tokens: int, num_rollouts: int, horizon: int | None = None
) -> float:
    """What the weighted sum is divided by, from the totals of the update over all ranks.

    horizon: the most loss tokens a rollout could have; "constant" needs it.

    Raises: ValueError for "constant" without a horizon.
    """
    if aggregation == "token_mean":
        return float(max(1, num_tokens))
    if aggregation == "sequence_mean":
        return float(max(1, num_rollouts))
    if horizon is None:
        raise ValueError("the constant aggregation needs a horizon")
    return float(max(1, num_rollouts)) * horizon


def token_weights(
    aggregation: Aggregation, rollout_lengths: Sequence[int], horizon: int | None = None
) -> list[float]:
    """Weight of each token of rollout i, divisor included; `rollout_lengths` of the whole update.

    Example: token_weights("sequence_mean", [1, 4]) -> [0.5, 0.125].
    """
    total = divisor(aggregation, sum(rollout_lengths), len(rollout_lengths), horizon)
    return [rollout_weight(aggregation, length) / total for length in rollout_lengths]
