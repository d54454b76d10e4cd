"""Packing by token budget, and the layout of the weight buffer."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncrl_node.core.layout import ALIGNMENT_BYTES, layout_weights
from asyncrl_node.core.packing import pack_rollouts

LENGTHS = st.lists(st.integers(1, 60), max_size=40)
BUDGETS = st.integers(1, 80)


@given(LENGTHS, BUDGETS)
def test_every_rollout_is_in_one_pack_within_the_budget_or_alone(lengths, budget):
    packs = pack_rollouts(lengths, budget)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    for pack in packs:
        assert len(pack) == 1 or sum(lengths[index] for index in pack) <= budget


@given(LENGTHS, BUDGETS)
def test_longest_first_in_each_pack(lengths, budget):
    for pack in pack_rollouts(lengths, budget):
        assert sorted(pack, key=lambda index: (-lengths[index], index)) == list(pack)


@given(st.permutations(range(24)), st.integers(40, 80))
def test_packs_hold_the_same_lengths_whatever_the_order(order, budget):
    lengths = [1 + index**2 % 37 for index in range(24)]
    shuffled = [lengths[index] for index in order]
    assert _lengths(shuffled, pack_rollouts(shuffled, budget)) == _lengths(
        lengths, pack_rollouts(lengths, budget)
    )


def _lengths(lengths, packs):
    return [[lengths[index] for index in pack] for pack in packs]


@given(LENGTHS, BUDGETS)
def test_no_more_packs_than_first_fit_needs(lengths, budget):
    rooms = []
    for length in sorted(lengths, reverse=True):
        room = next((r for r in rooms if r[0] >= length), None)
        if room is None:
            rooms.append([max(0, budget - length)])
        else:
            room[0] -= length
    assert len(pack_rollouts(lengths, budget)) <= len(rooms)


@given(st.lists(st.integers(1, 10), min_size=1, max_size=60))
def test_short_rollouts_fill_their_packs_about_equally(lengths):
    packs = pack_rollouts(lengths, 40)
    # Emptiest first overshoots the mean by less than one rollout: with this room it always fits.
    assume(sum(lengths) <= 30 * len(packs))
    totals = [sum(lengths[index] for index in pack) for pack in packs]
    assert max(totals) - min(totals) <= max(lengths)


def test_equal_halves_are_found():
    assert pack_rollouts([6, 6, 4, 4, 4], 12) == ((0, 1), (2, 3, 4))
    assert pack_rollouts([3, 9, 4, 3], 7) == ((1,), (2,), (0, 3))


def test_first_fit_stands_where_emptiest_first_needs_more_packs():
    # Emptiest first puts the threes apart and then has no room for the last two.
    assert pack_rollouts([3, 3, 2, 2, 2], 6) == ((0, 1), (2, 3, 4))


def test_nothing_to_pack_and_nothing_to_pack_into():
    assert pack_rollouts([], 8) == ()
    assert pack_rollouts([9, 10], 8) == ((1,), (0,))
    with pytest.raises(ValueError, match="at least one token"):
        pack_rollouts([3], 0)
    with pytest.raises(ValueError, match="at least one token"):
        pack_rollouts([3, 0], 8)


SHAPES = st.lists(st.lists(st.integers(1, 20), max_size=3).map(tuple), max_size=10)


@given(SHAPES, st.sampled_from([("float32", 4), ("bfloat16", 2)]))
def test_parameters_are_aligned_in_order_and_apart(shapes, kind):
    dtype, itemsize = kind
    sizes = [itemsize * _product(shape) for shape in shapes]
    specs = [
        (f"p{place}", dtype, shape, size)
        for place, (shape, size) in enumerate(zip(shapes, sizes, strict=True))
    ]
    entries, total = layout_weights(specs)
    assert [(e.name, e.dtype, e.shape, e.num_bytes) for e in entries] == specs
    end = 0
    for entry in entries:
        assert entry.offset % ALIGNMENT_BYTES == 0
        assert 0 <= entry.offset - end < ALIGNMENT_BYTES
        end = entry.offset + entry.num_bytes
    assert total % ALIGNMENT_BYTES == 0
    assert 0 <= total - end < ALIGNMENT_BYTES


def _product(shape):
    product = 1
    for size in shape:
        product *= size
    return product


def test_a_wrong_parameter_is_refused():
    with pytest.raises(ValueError, match="a occurs twice"):
        layout_weights([("a", "float32", (1,), 4), ("a", "float32", (1,), 4)])
    with pytest.raises(ValueError, match="do not fit"):
        layout_weights([("a", "float32", (3,), 13)])
    with pytest.raises(ValueError, match="do not fit"):
        layout_weights([("a", "float32", (), -4)])
