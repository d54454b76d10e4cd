"""The order of problems: every epoch whole, and the same on every machine and in every release."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_node.core.order import mix, problem_order, rollout_seed, shuffled

seeds = st.integers(0, (1 << 63) - 1)


@given(num_problems=st.integers(0, 300), seed=seeds, epoch=st.integers(0, 1000))
def test_an_epoch_is_a_permutation(num_problems: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(num_problems, seed, epoch)) == list(range(num_problems))


@settings(max_examples=50)
@given(seed=seeds, epoch=st.integers(0, 1000))
def test_epochs_and_seeds_differ(seed: int, epoch: int) -> None:
    this = shuffled(50, seed, epoch)
    assert this != shuffled(50, seed, epoch + 1)
    assert this != shuffled(50, seed + 1, epoch)
    assert this != sorted(this)


def test_no_problem_prefers_a_place() -> None:
    """Over many epochs each problem comes first about equally often."""
    num_problems, num_epochs = 8, 4000
    first = [0] * num_problems
    for epoch in range(num_epochs):
        first[shuffled(num_problems, 0, epoch)[0]] += 1
    expected = num_epochs / num_problems
    chi_squared = sum((count - expected) ** 2 / expected for count in first)
    assert chi_squared < 24.3, first  # the 0.1 % tail of 7 degrees of freedom


@settings(max_examples=30)
@given(num_problems=st.integers(1, 30), seed=seeds, num_epochs=st.integers(0, 4))
def test_every_epoch_is_offered_once_in_its_order(
    num_problems: int, seed: int, num_epochs: int
) -> None:
    offered = list(problem_order(num_problems, seed, num_epochs))
    assert offered == [
        (epoch, problem)
        for epoch in range(num_epochs)
        for problem in shuffled(num_problems, seed, epoch)
    ]


def test_without_a_number_of_epochs_it_never_ends() -> None:
    endless = problem_order(3, 0, None)
    offered = list(itertools.islice(endless, 3000))
    assert offered[-1][0] == 999
    assert offered[:6] == list(problem_order(3, 0, 2))


@settings(max_examples=20)
@given(group_seed=seeds)
def test_rollout_seeds_are_distinct_and_fit_a_signed_word(group_seed: int) -> None:
    groups = [group_seed, group_seed + 1, group_seed + 2]
    drawn = [
        rollout_seed(group, rollout, retry)
        for group in groups
        for rollout in range(32)
        for retry in range(4)
    ]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < 1 << 63 for seed in drawn)


@settings(max_examples=200)
@given(
    one=st.lists(st.integers(-(1 << 70), 1 << 70), max_size=4),
    two=st.lists(st.integers(-(1 << 70), 1 << 70), max_size=4),
)
def test_mix_is_64_bits_that_depend_on_every_number(one: list[int], two: list[int]) -> None:
    assert 0 <= mix(*one) < 1 << 64
    same = [number % (1 << 64) for number in one] == [number % (1 << 64) for number in two]
    assert (mix(*one) == mix(*two)) == same


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((), 0x9E3779B97F4A7C15),
        ((0,), 0x6E789E6AA1B965F4),
        ((1,), 0xBEEB8DA1658EEC67),
        ((0, 0), 0x46B73E79F0C37C00),
        ((1, 2, 3), 0xD306214C1FE59365),
        ((-1,), 0xE99FF867DBF682C9),
        ((18446744073709551616,), 0x6E789E6AA1B965F4),
        ((12345, 678, 9), 0x7DC02E04353D75A7),
    ],
)
def test_mix_never_changes(numbers: tuple[int, ...], expected: int) -> None:
    """A change here silently changes the data order of everybody's runs.

    The second case is a published one: the second output of splitmix64 seeded with 0.
    """
    assert mix(*numbers) == expected


def test_the_order_never_changes() -> None:
    assert shuffled(10, 0, 0) == [8, 4, 2, 7, 0, 3, 6, 9, 1, 5]
    assert shuffled(10, 0, 1) == [8, 0, 1, 3, 4, 6, 7, 9, 2, 5]
    assert shuffled(10, 1, 0) == [0, 8, 4, 7, 5, 6, 2, 9, 3, 1]
    assert rollout_seed(0, 0, 0) == 4635879678023765015
    assert rollout_seed(12345, 7, 2) == 7199018598234146324
