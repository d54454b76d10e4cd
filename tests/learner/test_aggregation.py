"""Aggregation: the same number however an update is cut into packs, micro-batches and ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_node.learner.losses.aggregation import divisor, rollout_weight, token_weights

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12)
KINDS = st.sampled_from(["token_mean", "sequence_mean", "constant"])
HORIZON = 9


def losses_of(lengths, seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 1, length) for length in lengths]


def oracle(kind, losses):
    """From a padded [R, T] matrix and its mask, as the papers write it."""
    mask = np.zeros((len(losses), HORIZON))
    matrix = np.zeros((len(losses), HORIZON))
    for row, values in enumerate(losses):
        matrix[row, : len(values)] = values
        mask[row, : len(values)] = 1
    if kind == "token_mean":
        return (matrix * mask).sum() / max(1, mask.sum())
    if kind == "sequence_mean":
        return np.mean((matrix * mask).sum(1) / np.maximum(1, mask.sum(1)))
    return (matrix * mask).sum() / (len(losses) * HORIZON)


@given(KINDS, LENGTHS, st.integers(0, 999))
def test_weights_equal_the_padded_matrix(kind, lengths, seed):
    losses = losses_of(lengths, seed)
    weights = token_weights(kind, lengths, HORIZON)
    ours = sum(weight * values.sum() for weight, values in zip(weights, losses, strict=True))
    assert ours == pytest.approx(oracle(kind, losses), abs=1e-12)


@given(KINDS, LENGTHS, st.integers(0, 999), st.integers(1, 4), st.data())
def test_any_cut_into_ranks_and_micro_batches_gives_the_same(kind, lengths, seed, ranks, data):
    """Each part sums with what it knows itself; only the totals are shared, at the end."""
    losses = losses_of(lengths, seed)
    parts: dict[int, list[int]] = {}
    for rollout in range(len(lengths)):
        parts.setdefault(data.draw(st.integers(0, ranks * 3 - 1)), []).append(rollout)
    total, num_tokens, num_rollouts = 0.0, 0, 0
    for members in parts.values():
        for rollout in members:
            total += rollout_weight(kind, lengths[rollout]) * losses[rollout].sum()
            num_tokens += lengths[rollout]
            num_rollouts += 1
    ours = total / divisor(kind, num_tokens, num_rollouts, HORIZON)
    assert ours == pytest.approx(oracle(kind, losses), abs=1e-12)


@given(KINDS, LENGTHS, st.integers(0, 999))
def test_an_empty_sibling_changes_no_other_rollouts_share_of_the_gradient(kind, lengths, seed):
    """Only sequence_mean and constant count it, and both as one rollout with loss 0."""
    before = token_weights(kind, lengths, HORIZON)
    after = token_weights(kind, [*lengths, 0], HORIZON)[:-1]
    factor = 1.0 if kind == "token_mean" else len(lengths) / (len(lengths) + 1)
    assert after == pytest.approx([weight * factor for weight in before])


def test_what_each_does_with_a_long_rollout():
    lengths = [1, 4]
    assert token_weights("token_mean", lengths) == [0.2, 0.2]
    assert token_weights("sequence_mean", lengths) == [0.5, 0.125]
    assert token_weights("constant", lengths, 8) == [0.0625, 0.0625]


def test_constant_needs_a_horizon():
    with pytest.raises(ValueError, match="needs a horizon"):
        token_weights("constant", [3])


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant"])
def test_an_update_without_tokens_divides_by_something(kind):
    assert divisor(kind, 0, 0, HORIZON) > 0
    assert token_weights(kind, [], HORIZON) == []
