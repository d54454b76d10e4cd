"""From the rewards of a group to an advantage for each of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl_node.core.advantages import (
    GroupAdvantage,
    TurnCredit,
    compared_range,
    turn_advantages,
)
from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.errors import RunFault
from asyncrl_node.learner.base import GroupFault

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def turn_rewards_of(group: TrajectoryGroup) -> list[list[float]]:
    """Rewards of the turns of each of R rollouts; R empty lists where no turn is rewarded.

    A turn that ends where a rollout ends belongs to that one, not to the next.
    """
    cuts = np.searchsorted(group.turn_ends, group.rollout_starts, side="right").tolist()
    rewards = np.asarray(group.turn_rewards).tolist()
    return [rewards[first:last] for first, last in pairwise(cuts)]


def advantages_of(
    group: TrajectoryGroup, compare: GroupAdvantage, credit: TurnCredit, discount: float
) -> npt.NDArray[np.float32]:
    """Advantage of each token [T], that of its rollout or, where turns are rewarded, of its turn.

    Only those of loss tokens mean anything.

    Raises: GroupFault for a reward or advantage that float32 does not hold.
    """
    if credit == "off" or not len(group.turn_rewards):
        with _blaming(group):
            advantages = list(compare(group.rewards.tolist()))
        _check(group, advantages)
        return np.repeat(np.array(advantages, np.float32), np.diff(group.rollout_starts))
    with _blaming(group):
        turns = turn_advantages(turn_rewards_of(group), compare, credit, discount)
    advantages = [advantage for rollout in turns for advantage in rollout]
    _check(group, advantages)
    owner = np.searchsorted(group.turn_ends, np.arange(len(group.tokens)), side="right")
    last = len(advantages) - 1  # an observation that nothing follows has no turn
    owned: npt.NDArray[Any] = np.array(advantages, np.float32)[np.minimum(owner, last)]
    return owned


def is_constant(group: TrajectoryGroup, credit: TurnCredit, discount: float) -> bool:
    """Whether nothing tells the rollouts apart. Raises: GroupFault for a turn's reward."""
    with _blaming(group):
        turns = turn_rewards_of(group)
        low, high = compared_range(group.rewards.tolist(), turns, credit, discount)
    return low == high


@contextmanager
def _blaming(group: TrajectoryGroup) -> Iterator[None]:
    """Turn a ValueError, or a user's fault, into the fault of the group that it is about."""
    try:
        yield
    except ValueError as error:
        raise GroupFault("non_finite", group, f"{error}; this update changed nothing") from error
    except RunFault as fault:
        raise GroupFault(
            fault.name, group, f"{fault.story}; this update changed nothing"
        ) from fault


def _check(group: TrajectoryGroup, advantages: Sequence[float]) -> None:
    """Let only numbers through that float32 holds. Raises: GroupFault."""
    for place, advantage in enumerate(advantages):
        if not abs(advantage) <= LARGEST_FLOAT32:
            story = f"advantage {place} of {len(advantages)} is {advantage}: not a finite float32"
            raise GroupFault("non_finite", group, f"{story}; this update changed nothing")
