"""No bias is an identity: what is trained is what was sampled, less what is excused by name.

In virtual time, on the same latencies: a quarter of the problems 100 times slower, K = 2. The two
policies that wait keep the identity; the one that throws late groups away breaks it, and the slow
problems are what is missing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

import pytest

from asyncrl_node.core.pacing import GroupState
from perf.simulation import (
    DiscardPolicy,
    OlderPolicy,
    Outcome,
    Settings,
    ShippedPolicy,
    simulate,
    slow_share,
)

NUM_STEPS = 60
BATCH = 16
SETTINGS = Settings(BATCH, 2, 2, 2.0, NUM_STEPS)
FAST_S, SLOW_S = 1.0, 100.0
NUM_PROBLEMS = 4096
SLOW = {p for p in range(NUM_PROBLEMS) if random.Random(p).random() < 0.25}
LATENCIES = [SLOW_S if problem in SLOW else FAST_S for problem in range(NUM_PROBLEMS)]
WINDOW = 10


class Difference(NamedTuple):
    """Where the identity fails; both are empty if it holds."""

    missing: Counter[int]
    """Sampled, never trained, and nothing on record says why."""
    unexplained: Counter[int]
    """Trained or excused more often than sampled."""


def difference(
    sampled: Iterable[int], trained: Iterable[int], excused: Iterable[int]
) -> Difference:
    """Compare the multiset of trained problems with sampled minus excused."""
    offered = Counter(sampled)
    accounted = Counter(trained) + Counter(excused)
    return Difference(offered - accounted, accounted - offered)


def windows(outcome: Outcome) -> str:
    """Report the slow share of what is trained, in windows of steps, and of what was sampled."""
    shares = []
    for first in range(0, NUM_STEPS, WINDOW):
        steps = range(first, first + WINDOW)
        shares.append(slow_share([g.problem for g in outcome.trained if g.step in steps], SLOW))
    offered = slow_share(list(dict.fromkeys(outcome.sampled)), SLOW)
    words = " ".join(f"{share:.2f}" for share in shares)
    return f"slow share over windows of {WINDOW} steps: {words}; offered {offered:.2f}"


def outstanding(policy: ShippedPolicy | OlderPolicy | DiscardPolicy) -> set[int]:
    """Groups that the policy still has in its own books when the last step is published."""
    if isinstance(policy, ShippedPolicy):
        states = (GroupState.IN_FLIGHT, GroupState.COMPLETED)
        return {g for state in states for g in policy._pacing.outstanding_ids(state)}
    return policy._in_flight | {group for _, group in policy._completed}


def measure(kind: type[ShippedPolicy | OlderPolicy | DiscardPolicy]) -> tuple[Difference, str]:
    """Run one policy; return what breaks the identity, and words for a failure."""
    policy = kind(SETTINGS)
    problem_of: dict[int, int] = {}
    outcome = simulate(policy, SETTINGS, LATENCIES, count(), problem_of.__setitem__)
    assert len(outcome.trained) == NUM_STEPS * BATCH
    assert max(outcome.sampled) < NUM_PROBLEMS, "each index is one problem"
    left_over = [problem_of[group] for group in outstanding(policy)]
    found = difference(outcome.sampled, [g.problem for g in outcome.trained], left_over)
    words = f"{kind.__name__}: {found.missing.total()} missing; {windows(outcome)}"
    return found, words


@pytest.mark.parametrize("kind", [ShippedPolicy, OlderPolicy])
def test_what_is_trained_is_what_was_sampled_less_what_is_left_over(
    kind: type[ShippedPolicy | OlderPolicy],
) -> None:
    found, words = measure(kind)
    assert found == (Counter(), Counter()), words


def test_throwing_late_groups_away_breaks_the_identity() -> None:
    found, words = measure(DiscardPolicy)
    assert found.unexplained == Counter(), words
    assert found.missing.total() > 100, words
    assert set(found.missing) <= SLOW, f"only slow problems are thrown away; {words}"


@pytest.mark.parametrize("kind", [ShippedPolicy, OlderPolicy])
def test_slow_problems_are_trained_as_often_as_they_are_offered(
    kind: type[ShippedPolicy | OlderPolicy],
) -> None:
    """A window may lag; all the steps after the first window may not."""
    outcome = simulate(kind(SETTINGS), SETTINGS, LATENCIES, count())
    later = [g.problem for g in outcome.trained if g.step >= WINDOW]
    offered = len(SLOW) / NUM_PROBLEMS
    assert slow_share(later, SLOW) == pytest.approx(offered, abs=0.05), windows(outcome)


def test_the_identity_counts_a_problem_as_often_as_it_was_sampled() -> None:
    assert difference([1, 2, 2], [2, 2], [1]) == (Counter(), Counter())
    assert difference([1, 2, 2], [2], [1]).missing == Counter({2: 1})
    assert difference([1, 2], [1, 2, 2], []).unexplained == Counter({2: 1})
    assert difference([1], [1], [1]).unexplained == Counter({1: 1})
