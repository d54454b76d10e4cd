"""Group-relative advantages against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_node.core.advantages import compared_range, group_advantages, turn_advantages

REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=16)
ALL_KINDS = ["mean", "mean_std", "leave_one_out", "mean_normalised"]
KINDS = st.sampled_from(ALL_KINDS)


@given(REWARDS)
def test_mean_equals_exact_arithmetic(rewards):
    mean = sum(map(Fraction, rewards)) / len(rewards)
    exact = [float(Fraction(reward) - mean) for reward in rewards]
    assert group_advantages(rewards, "mean") == pytest.approx(exact, abs=1e-12)


@given(REWARDS)
def test_mean_std_divides_by_the_population_deviation(rewards):
    mean = sum(map(Fraction, rewards)) / len(rewards)
    variance = float(sum((Fraction(r) - mean) ** 2 for r in rewards) / len(rewards))
    exact = [float(Fraction(r) - mean) / (variance**0.5 + 1e-4) for r in rewards]
    assert group_advantages(rewards, "mean_std") == pytest.approx(exact, rel=1e-9, abs=1e-9)


@given(REWARDS)
def test_leave_one_out_compares_with_the_mean_of_the_others(rewards):
    if len(rewards) == 1:
        assert group_advantages(rewards, "leave_one_out") == [0.0]
        return
    exact = []
    for place, reward in enumerate(rewards):
        others = rewards[:place] + rewards[place + 1 :]
        exact.append(float(Fraction(reward) - sum(map(Fraction, others)) / len(others)))
    assert group_advantages(rewards, "leave_one_out") == pytest.approx(exact, abs=1e-11)


@given(REWARDS)
def test_mean_normalised_divides_by_the_mean_size_of_a_reward(rewards):
    mean = sum(map(Fraction, rewards)) / len(rewards)
    size = sum(abs(Fraction(reward)) for reward in rewards) / len(rewards)
    exact = [float((Fraction(r) - mean) / size) if size else 0.0 for r in rewards]
    if len(set(rewards)) == 1:
        exact = [0.0] * len(rewards)
    assert group_advantages(rewards, "mean_normalised") == pytest.approx(exact, rel=1e-9, abs=1e-9)


@given(st.integers(1, 15))
def test_mean_normalised_of_successes_is_the_gradient_of_the_log_success_rate(successes):
    """sum of A_i g_i = sum over successes g_i / p - sum over all g_i, for any g."""
    rewards = [1.0] * successes + [0.0] * (16 - successes)
    rate = successes / 16
    expected = [1 / rate - 1] * successes + [-1.0] * (16 - successes)
    assert group_advantages(rewards, "mean_normalised") == pytest.approx(expected)


@given(REWARDS, KINDS)
def test_a_better_rollout_has_a_larger_advantage_and_they_sum_to_zero(rewards, kind):
    advantages = group_advantages(rewards, kind)
    for reward, advantage in zip(rewards, advantages, strict=True):
        for other, its in zip(rewards, advantages, strict=True):
            assert not (reward < other and advantage > its)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9 * (1 + sum(map(abs, advantages))))


def test_one_success_in_four():
    assert group_advantages([1, 0, 0, 0], "mean") == [0.75, -0.25, -0.25, -0.25]
    scale = 0.1875**0.5 + 1e-4
    assert group_advantages([1, 0, 0, 0]) == pytest.approx([0.75 / scale] + 3 * [-0.25 / scale])


@given(st.floats(-100, 100, width=32), st.integers(0, 9), KINDS)
def test_equal_rewards_give_exact_zeros(reward, count, kind):
    assert group_advantages([reward] * count, kind) == [0.0] * count


def test_equal_rewards_whose_mean_is_another_float_give_exact_zeros():
    reward = 0.49543508709194095
    assert 3 * reward / 3 != reward
    assert group_advantages([reward] * 3) == [0.0] * 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e39])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_reward_that_is_no_finite_float32_is_refused_by_place(bad, kind):
    with pytest.raises(ValueError, match="reward 1 of 3 is"):
        group_advantages([0.0, bad, 1.0], kind)


def test_the_largest_float32_rewards_stay_finite():
    largest = 3.4028234663852886e38
    assert group_advantages([largest, -largest]) == pytest.approx([1.0, -1.0])


# -- credit per turn -----------------------------------------------------------------------------

QUARTERS = st.integers(-40, 40).map(lambda quarters: quarters / 4)
"""Their discounted sums are exact in any order, so equal returns are equal in both versions."""
TURNS = st.lists(st.lists(QUARTERS, min_size=0, max_size=4), min_size=1, max_size=6)


def by(kind):
    return partial(group_advantages, kind=kind)


def turn_oracle(turn_rewards, kind, discount):
    """One turn of one rollout at a time, each return written out."""

    def value(rewards, turn):
        return sum(discount ** (k - turn) * rewards[k] for k in range(turn, len(rewards)))

    result = []
    for rewards in turn_rewards:
        mine = []
        for turn in range(len(rewards)):
            reached = [other for other in turn_rewards if len(other) > turn]
            values = [value(other, turn) for other in reached]
            place = next(p for p, other in enumerate(reached) if other is rewards)
            mine.append(group_advantages(values, kind)[place])
        result.append(mine)
    return result


@given(TURNS, KINDS, st.sampled_from([0.0, 0.5, 1.0]))
def test_turns_are_compared_with_the_same_turn_of_the_siblings(turn_rewards, kind, discount):
    turn_rewards = [list(rewards) for rewards in turn_rewards]
    ours = turn_advantages(turn_rewards, by(kind), discount=discount)
    for mine, theirs in zip(ours, turn_oracle(turn_rewards, kind, discount), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12, abs=1e-12)


@given(REWARDS, KINDS)
def test_one_turn_each_is_the_group_advantage(rewards, kind):
    turns = turn_advantages([[reward] for reward in rewards], by(kind))
    assert [advantage for (advantage,) in turns] == group_advantages(rewards, kind)


def test_credit_goes_to_the_turns_before_the_reward_and_to_none_after():
    late, early = [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]
    assert turn_advantages([late, early, [0.0, 0.0]], by("mean")) == [
        [pytest.approx(1 / 3), pytest.approx(2 / 3), 0.0],
        [pytest.approx(1 / 3), pytest.approx(-1 / 3), 0.0],
        [pytest.approx(-2 / 3), pytest.approx(-1 / 3)],
    ]


def test_a_turn_that_one_rollout_reached_alone_moves_nothing():
    assert turn_advantages([[0.0, 5.0], [1.0]], by("mean")) == [[2.0, 0.0], [-2.0]]

    def to_nobody(rewards):
        assert len(rewards) > 1
        return [1.0] * len(rewards)

    assert turn_advantages([[0.0, 5.0], [1.0]], to_nobody) == [[1.0, 0.0], [1.0]]


def test_rollouts_without_turns():
    assert turn_advantages([]) == []
    assert turn_advantages([[], []]) == [[], []]


def test_a_turn_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="reward 1 of 2 is nan"):
        turn_advantages([[0.0, 1.0], [float("nan")]])


@given(TURNS)
def test_credit_as_given_is_left_alone(turn_rewards):
    assert turn_advantages(turn_rewards, by("mean"), "as_given") == turn_rewards


@given(TURNS, st.sampled_from(["return_to_go", "as_given"]), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_range_is_a_point_exactly_where_every_advantage_is_zero(turn_rewards, credit, discount):
    rewards = [float(place) for place in range(len(turn_rewards))]
    low, high = compared_range(rewards, turn_rewards, credit, discount)
    advantages = turn_advantages(turn_rewards, by("mean"), credit, discount)
    if any(turn_rewards):
        assert (low == high) == (not any(map(any, advantages)))
    else:
        assert (low, high) == (0.0, float(len(rewards) - 1))


def test_a_range_of_rewards_where_turns_do_not_count():
    turns = [[1.0, 0.0], [0.0, 1.0]]
    assert compared_range([3.0, 1.0], turns, "off") == (1.0, 3.0)
    assert compared_range([3.0, 1.0], []) == (1.0, 3.0)
    assert compared_range([1.0, 1.0], turns) == (0.0, 1.0)
    assert compared_range([1.0, 2.0], [[1.0, 0.0], [1.0, 0.0]]) == (1.0, 1.0)
    assert compared_range([1.0, 1.0], [[1.0], [1.0]], "as_given") == (0.0, 1.0)


@pytest.mark.parametrize(("kind", "independent"), [("leave_one_out", True), ("mean", False)])
def test_only_the_baseline_of_leave_one_out_does_not_depend_on_the_turn_itself(kind, independent):
    """The baseline is what is taken off the turn's return; rollout 0's turn 1 earns ever more."""
    baselines = []
    for earned in (0.0, 1.0, 8.0):
        turns = [[0.5, earned], [1.0, 2.0], [0.0, 1.0, 3.0], [4.0]]
        advantages = turn_advantages(turns, partial(group_advantages, kind=kind))
        baselines.append(earned - advantages[0][1])
    if independent:
        assert baselines == pytest.approx([3.0] * 3)
    else:
        assert baselines == pytest.approx([2.0, 7.0 / 3.0, 14.0 / 3.0])
