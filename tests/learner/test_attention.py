"""Packed attention against one causal call per sequence, and what its plan promises."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from asyncrl_node.errors import RunFault
from asyncrl_node.learner.attention import packed_attention, plan_attention, ungrouped

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12).map(
    lambda lengths: sorted(lengths, reverse=True)
)
HEADS = st.sampled_from([(1, 1), (3, 1), (4, 2)])


def attend_packed(query, key, value, lengths, **options):
    plan = plan_attention(lengths)
    return packed_attention(torch.nn.Identity(), query, key, value, None, pack=plan, **options)[0]


def attend_apart(query, key, value, lengths, scaling=None):
    outputs = [
        scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True, scale=scaling)
        for parts in zip(*(states.split(lengths, 2) for states in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, 2).transpose(1, 2)


def random_states(lengths, heads, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    sizes = [heads[0], heads[1], heads[1]]
    return [
        torch.randn(1, size, num_tokens, 8, generator=generator, requires_grad=True)
        for size in sizes
    ]


@settings(max_examples=40, deadline=None)
@given(LENGTHS, HEADS, st.integers(0, 99))
def test_packed_equals_one_call_per_sequence(lengths, heads, seed):
    states = random_states(lengths, heads, seed)
    weight = torch.randn(sum(lengths), heads[0], 8, generator=torch.Generator().manual_seed(seed))
    results = []
    for attend in (attend_packed, attend_apart):
        output = attend(*states, lengths)
        results.append([output, *torch.autograd.grad((output[0] * weight).sum(), states)])
    for packed, apart in zip(*results, strict=True):
        assert packed.shape == apart.shape
        torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)


def test_a_scale_other_than_the_default_is_used():
    lengths = [7, 7, 4]
    states = random_states(lengths, (2, 1))
    torch.testing.assert_close(
        attend_packed(*states, lengths, scaling=0.7), attend_apart(*states, lengths, scaling=0.7)
    )


@pytest.mark.parametrize("lengths", [[9, 9, 9], [9, 8, 8]])
def test_a_broken_sequence_spoils_no_other(lengths):
    query, key, value = random_states(lengths, (2, 1))
    value.data[:, :, 9:17] = float("nan")
    output = attend_packed(query, key, value, lengths)
    assert output[:, :9].isfinite().all()
    assert output[:, sum(lengths[:2]) :].isfinite().all()
    assert not output[:, 9:17].isfinite().any()


def padding_over_tokens(lengths):
    places = sum(b.num_sequences * b.max_length for b in plan_attention(lengths).buckets)
    return places / sum(lengths) - 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_padding_is_at_most_a_quarter_of_the_tokens(lengths):
    lengths = sorted(lengths, reverse=True)
    plan = plan_attention(lengths)
    assert padding_over_tokens(lengths) <= 0.25
    assert sum(bucket.num_tokens for bucket in plan.buckets) == sum(lengths)
    assert sum(bucket.num_sequences for bucket in plan.buckets) == len(lengths)


def test_many_short_rollouts_need_few_calls():
    assert len(plan_attention([13] * 256).buckets) == 1
    assert plan_attention([13] * 256).buckets[0].pad is None
    drawn = random.Random(0)
    mixed = sorted((drawn.randint(7, 19) for _ in range(256)), reverse=True)
    assert len(plan_attention(mixed).buckets) <= 5
    assert len(plan_attention(list(range(48, 0, -1))).buckets) <= 13


def test_long_rollouts_are_not_padded():
    drawn = random.Random(0)
    tail = sorted((1 + int(drawn.expovariate(1 / 300)) for _ in range(256)), reverse=True)
    assert padding_over_tokens(tail) < 0.01
    assert len(plan_attention([500, 500, 500, 499]).buckets) == 2


def test_a_pack_out_of_order_or_empty_is_refused():
    with pytest.raises(ValueError, match="longest first"):
        plan_attention([3, 4])
    with pytest.raises(ValueError, match="at least one"):
        plan_attention([])
    with pytest.raises(ValueError, match="at least one token"):
        plan_attention([3, 0])


@pytest.mark.parametrize("options", [{"softcap": 50.0}, {"sliding_window": 4}])
def test_more_than_causal_attention_is_refused_by_name(options):
    states = random_states([5], (1, 1))
    with pytest.raises(RunFault, match="unsupported_attention"):
        attend_packed(*states, [5], **options)


def test_a_window_wider_than_every_rollout_changes_nothing():
    states = random_states([5], (1, 1))
    attend_packed(*states, [5], sliding_window=5)


def test_a_model_that_does_not_pass_the_pack_on_is_refused():
    states = random_states([5], (1, 1))
    with pytest.raises(RunFault, match="does not pass the pack on"):
        packed_attention(torch.nn.Identity(), *states, None)


def test_another_device_is_refused_by_name():
    states = [torch.empty(1, 1, 5, 8, device="meta")] * 3
    with pytest.raises(RunFault, match="unsupported_device"):
        attend_packed(*states, [5])


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
def test_heads_without_groups_attend_alike(heads):
    """What a GPU is handed: keys and values repeated for every query head."""
    query, key, value = random_states([7], heads)
    apart = [ungrouped(states[0].transpose(0, 1), heads[0]) for states in (key, value)]
    repeated = [states.transpose(0, 1)[None] for states in apart]
    assert [states.shape for states in repeated] == [query.shape] * 2
    output = scaled_dot_product_attention(query, *repeated, is_causal=True)
    torch.testing.assert_close(output.transpose(1, 2), attend_packed(query, key, value, [7]))
