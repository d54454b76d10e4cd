"""Group-relative advantages against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_node.core.advantages import group_advantages

REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=16)
KINDS = st.sampled_from(["mean", "mean_std"])


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
@pytest.mark.parametrize("kind", ["mean", "mean_std"])
def test_a_reward_that_is_no_finite_float32_is_refused_by_place(bad, kind):
    with pytest.raises(ValueError, match="reward 1 of 3 is"):
        group_advantages([0.0, bad, 1.0], kind)


def test_the_largest_float32_rewards_stay_finite():
    largest = 3.4028234663852886e38
    assert group_advantages([largest, -largest]) == pytest.approx([1.0, -1.0])
