"""Every token loss against slow float64 oracles; gradients, signs, and what holds for all."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl_node.config import LearnerConfig
from asyncrl_node.core.advantages import group_advantages
from asyncrl_node.learner.losses.base import LossInput, needs_of
from asyncrl_node.learner.losses.corrections import correct_weights
from asyncrl_node.learner.losses.off_policy import m2po_limit
from asyncrl_node.learner.losses.registry import LOSSES, load_loss, loss_facts
from asyncrl_node.learner.losses.settings import RECIPES, LossSettings
from asyncrl_node.loss_rules import effective
from asyncrl_node.loss_rules import loss_settings as settings_of
from tests.learner import oracles
from tests.learner.oracles import ORACLES, Case, random_case

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6)
SEEDS = st.integers(0, 10_000)
SETTINGS = st.builds(
    LossSettings,
    clip_low=st.sampled_from([0.1, 0.2, 0.4]),
    clip_high=st.sampled_from([0.1, 0.28, 0.6]),
    dual_clip=st.sampled_from([None, 2.0, 3.0]),
    ratio_cap=st.sampled_from([1.2, 2.0, 5.0]),
    ratio_floor=st.sampled_from([0.0, 0.8]),
    weight_correction=st.sampled_from(["off", "truncate", "mask"]),
    weight_low=st.sampled_from([0.0, 0.9]),
    weight_high=st.sampled_from([1.1, 2.0]),
)
ALL = pytest.mark.parametrize("name", sorted(LOSSES))


def run(name, tokens: LossInput, loss_settings):
    """Losses, gradient of their sum, and the whole result."""
    result = load_loss(name)(tokens, loss_settings)
    (grad,) = torch.autograd.grad(result.losses.sum(), tokens.logprobs)
    return result.losses.detach(), grad, result


def test_every_loss_has_an_oracle():
    assert set(ORACLES) == set(LOSSES)


@ALL
@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, per_token=st.booleans(), chosen=SETTINGS)
def test_values_and_gradients_equal_the_oracle(name, lengths, seed, per_token, chosen):
    case = random_case(lengths, seed, per_token=per_token, settings=chosen)
    losses, grad, result = run(name, case.tensors(), chosen)
    expected = ORACLES[name](case, case.new, case.new)
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-12, atol=1e-12)
    oracles.assert_gradient(grad.numpy(), case, ORACLES[name])
    assert int(result.num_clipped) <= len(losses)
    ratios = np.exp(case.new - case.old)
    assert float(result.ratio_max) == pytest.approx(max(ratios, default=0.0), rel=1e-12)


@ALL
@settings(max_examples=10, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS)
def test_single_precision_is_enough(name, lengths, seed):
    case = random_case(lengths, seed)
    losses, _, _ = run(name, case.tensors(torch.float32), case.settings)
    expected = ORACLES[name](case, case.new, case.new)
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "decoupled_ppo", "m2po"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_gradcheck_away_from_the_kinks(name, dual_clip):
    """The losses that take no value "without gradient" from the point itself."""
    chosen = LossSettings(dual_clip=dual_clip)
    case = random_case([4, 0, 7, 3], 11, settings=chosen)
    tokens = case.tensors()

    def losses(logprobs):
        return load_loss(name)(replace(tokens, logprobs=logprobs), chosen).losses

    assert torch.autograd.gradcheck(losses, (tokens.logprobs,), eps=1e-7, atol=1e-6)


@ALL
@pytest.mark.parametrize("dual_clip", [None, 1.3])
@pytest.mark.parametrize("correction", ["off", "mask"])
def test_tokens_without_gradient_are_counted(name, dual_clip, correction):
    """num_clipped is exactly the tokens with a signal that do not move; for cispo, those cut."""
    chosen = LossSettings(
        dual_clip=dual_clip, weight_correction=correction, weight_low=0.9, weight_high=1.1
    )
    case = random_case([2] * 35, 5, settings=chosen)
    case.advantages[:] = np.where(np.arange(70) % 2, 1.0, -1.0)
    _, grad, result = run(name, case.tensors(), chosen)
    if name == "cispo":
        expected = int((np.exp(case.new - case.old) > chosen.ratio_cap).sum())
    else:
        expected = int((grad == 0).sum())
    assert int(result.num_clipped) == expected
    assert expected > 0 or name == "importance_sampling"


def test_a_truncated_weight_is_counted():
    chosen = LossSettings(weight_low=0.9, weight_high=1.1, clip_low=1.0, clip_high=1e9)
    case = random_case([2] * 35, 5, settings=chosen)
    weights = np.exp(case.proximal - case.old)
    _, grad, result = run("decoupled_ppo", case.tensors(), chosen)
    assert int(result.num_clipped) == int(((weights < 0.9) | (weights > 1.1)).sum()) > 0
    assert bool((grad[torch.tensor(case.advantages) != 0] != 0).all())


# -- what holds for all --------------------------------------------------------------------------


@ALL
@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS)
def test_on_policy_every_loss_is_the_policy_gradient(name, lengths, seed):
    case = random_case(lengths, seed, spread=0.0)
    case.staleness[:] = 0
    _, grad, result = run(name, case.tensors(), case.settings)
    np.testing.assert_allclose(grad.numpy(), -case.advantages, atol=1e-12)
    assert int(result.num_clipped) == 0


@ALL
@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, reward=st.floats(-3, 3))
def test_equal_rewards_move_nothing(name, lengths, seed, reward):
    case = random_case(lengths, seed)
    case.advantages = np.repeat(group_advantages([reward] * len(lengths)), lengths)
    losses, grad, _ = run(name, case.tensors(), case.settings)
    assert not losses.any()
    assert not grad.any()


@ALL
@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, cut=st.integers(0, 6))
def test_cutting_between_rollouts_changes_nothing(name, lengths, seed, cut):
    case = random_case(lengths, seed)
    whole = ORACLES[name](case, case.new, case.new)
    parts, clipped = [], 0
    for first, last in ((0, cut), (cut, len(lengths))):
        part = rollouts_of(case, range(first, min(last, len(lengths))))
        losses, _, result = run(name, part.tensors(), part.settings)
        parts += losses.tolist()
        clipped += int(result.num_clipped)
    np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-12)
    assert clipped == int(load_loss(name)(case.tensors(), case.settings).num_clipped)


@ALL
@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS)
def test_the_order_of_rollouts_does_not_matter(name, lengths, seed):
    case = random_case(lengths, seed)
    order = np.random.default_rng(seed).permutation(len(lengths))
    losses, _, _ = run(name, rollouts_of(case, order).tensors(), case.settings)
    whole = np.array(ORACLES[name](case, case.new, case.new))
    np.testing.assert_allclose(losses.numpy(), whole[token_order(case, order)], atol=1e-12)


@ALL
def test_no_tokens_are_no_loss(name):
    case = random_case([0, 0], 0)
    losses, grad, result = run(name, case.tensors(), case.settings)
    assert losses.shape == grad.shape == (0,)
    assert (int(result.num_clipped), float(result.ratio_max)) == (0, 0.0)


@ALL
@pytest.mark.parametrize("field", ["logprobs", "sampler_logprobs", "advantages"])
@pytest.mark.parametrize("correction", ["off", "truncate", "mask"])
def test_a_value_that_is_not_finite_is_never_hidden(name, field, correction):
    """Neither a clip nor a mask may swallow it: the guard looks at losses and ratios."""
    tokens = random_case([3, 2], 1).tensors()
    broken = getattr(tokens, field).detach().clone()
    broken[1] = math.nan
    chosen = LossSettings(weight_correction=correction)
    result = load_loss(name)(replace(tokens, **{field: broken}), chosen)
    assert torch.isnan(result.losses[1])


@ALL
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_descent_moves_a_token_the_way_its_advantage_says(name, advantage):
    """Near the sampler, where nothing is clipped, a good token goes up and a bad one down."""
    case = random_case([20], 2, spread=0.01)
    case.advantages[:] = advantage
    _, grad, _ = run(name, case.tensors(), case.settings)
    assert (torch.sign(-grad) == advantage).all()


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "moves"),
    [
        ("ppo", 1.19, 1.0, True),
        ("ppo", 1.21, 1.0, False),
        ("ppo", 0.79, -1.0, False),
        ("ppo", 9.0, -1.0, True),
        ("importance_sampling", 9.0, 1.0, True),
        ("cispo", 9.0, 1.0, True),
        ("gspo", 1.21, 1.0, False),
        ("a3po", 1.21, 1.0, True),  # 4 steps stale: trusted up to 1.2 ** 4
        ("a3po", 1.2**4 + 0.01, 1.0, False),
        ("a3po", 0.8**4 - 0.01, -1.0, False),
        ("m2po", math.exp(0.34), 1.0, True),
        ("m2po", math.exp(0.36), 1.0, False),
        ("m2po", math.exp(-0.36), -1.0, False),
        ("m2po", math.exp(-0.36), 1.0, True),
    ],
)
def test_where_the_trust_region_ends(name, ratio, advantage, moves):
    case = Case(
        lengths=[1],
        new=np.log([ratio]),
        old=np.zeros(1),
        advantages=np.array([advantage]),
        staleness=np.array([4]),
        proximal=np.zeros(1),
    )
    _, grad, result = run(name, case.tensors(), case.settings)
    assert bool(grad[0]) == moves
    if moves:
        assert float(torch.sign(-grad[0])) == advantage
    if name != "cispo":
        assert bool(result.num_clipped) != moves


# -- one by one ----------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, chosen=SETTINGS)
def test_gspo_is_the_papers_sequence_loss_where_rollouts_count_the_same(lengths, seed, chosen):
    case = random_case(lengths, seed, settings=chosen)
    weights = np.repeat([1.0 / max(1, n) for n in lengths], lengths)
    tokens = case.tensors()
    result = load_loss("gspo")(tokens, chosen)
    total = (result.losses * torch.tensor(weights)).sum()
    (grad,) = torch.autograd.grad(total, tokens.logprobs)
    assert float(total.detach()) == pytest.approx(
        sum(oracles.gspo_sequence(case, case.new, case.new))
    )
    oracles.assert_gradient(grad.numpy(), case, oracles.gspo_sequence)


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS)
def test_a3po_of_fresh_tokens_is_ppo_and_of_stale_ones_is_decoupled_ppo(lengths, seed):
    case = random_case(lengths, seed)
    case.staleness[:] = np.random.default_rng(seed).integers(0, 2, len(case.new))
    ours, theirs = (run(name, case.tensors(), case.settings) for name in ("a3po", "ppo"))
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    case.staleness[:] = 4
    case.proximal = case.old + 0.75 * (case.new - case.old)
    ours, theirs = (run(name, case.tensors(), case.settings) for name in ("a3po", "decoupled_ppo"))
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_decoupled_ppo_in_the_first_update_of_a_step_is_weighted_and_never_clipped():
    case = random_case([40], 3, spread=0.8, settings=LossSettings(weight_high=1e9))
    case.proximal = case.new.copy()
    ours, theirs = (run(n, case.tensors(), case.settings) for n in ("decoupled_ppo", "cispo"))
    plain = run("importance_sampling", case.tensors(), case.settings)
    torch.testing.assert_close(ours[1], plain[1])
    assert int(ours[2].num_clipped) == 0 < int(theirs[2].num_clipped)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, budget=st.sampled_from([1e-4, 0.01, 0.04, 0.2]))
def test_m2po_limit_equals_bisection(lengths, seed, budget):
    case = random_case(lengths, seed, per_token=True)
    tokens = case.tensors()
    log_ratios = (tokens.logprobs - tokens.sampler_logprobs).detach()
    limit = m2po_limit(log_ratios, tokens.advantages, budget)
    assert limit == pytest.approx(oracles.m2po_limit(case, budget), rel=1e-9)
    order = torch.randperm(len(log_ratios))
    assert m2po_limit(log_ratios[order], tokens.advantages[order], budget) == pytest.approx(limit)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS)
def test_m2po_keeps_the_second_moment_within_the_budget(lengths, seed):
    case = random_case(lengths, seed, spread=1.0)
    log_ratios = torch.tensor(case.new - case.old)
    advantages = torch.tensor(case.advantages)
    limit = m2po_limit(log_ratios, advantages, 0.04)
    assume(math.isfinite(limit))
    pushing = log_ratios * advantages.sign() > 0
    moments = log_ratios[pushing].abs().clamp(max=limit).square()
    assert float(moments.mean()) == pytest.approx(0.04)
    case.limit = limit
    case.settings = LossSettings(clip_low=0.0, clip_high=0.0)
    _, grad, _ = run("m2po", case.tensors(), case.settings)
    signal = advantages != 0
    beyond = pushing & (log_ratios.abs() > limit * (1 + 1e-9))
    torch.testing.assert_close((grad == 0) & signal, beyond)


FLOATS = st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1e-30, 0.1, 0.3, math.inf, -math.inf])
PUSHING = st.lists(st.tuples(FLOATS, st.sampled_from([1.0, -1.0, 0.0])), max_size=40)


@settings(max_examples=400, deadline=None)
@given(tokens=PUSHING, ulps=st.integers(-3, 3), free=st.none() | st.floats(0, 900))
def test_m2po_limit_holds_for_any_numbers_and_where_the_budget_is_the_mean(tokens, ulps, free):
    log_ratios = torch.tensor([x for x, _ in tokens], dtype=torch.float64)
    advantages = torch.tensor([a for _, a in tokens], dtype=torch.float64)
    squares = [x * x for x, a in tokens if x * a > 0]
    mean = math.fsum(squares) / len(squares) if squares else 1.0
    budget = mean if free is None and math.isfinite(mean) else free or 0.04
    for _ in range(abs(ulps)):
        budget = math.nextafter(budget, math.inf if ulps > 0 else 0.0)
    limit = m2po_limit(log_ratios, advantages, budget)
    left = [min(square, limit * limit) for square in squares]
    slack = 1e-9 * budget
    if math.isinf(limit):
        assert math.fsum(squares) <= (budget + slack) * len(squares)
    else:
        assert math.fsum(left) == pytest.approx(budget * len(squares), rel=1e-9, abs=1e-300)
        assert mean >= budget - slack


@pytest.mark.parametrize("seed", range(200))
def test_m2po_limit_next_to_the_mean_however_its_sum_was_rounded(seed):
    log_ratios = torch.tensor(np.random.default_rng(seed).normal(0, 0.3, 300)).abs()
    mean = float(log_ratios.square().mean())
    for budget in (math.nextafter(mean, 0.0), mean, math.nextafter(mean, math.inf)):
        limit = m2po_limit(log_ratios, torch.ones(300), budget)
        assert limit == math.inf or limit == pytest.approx(float(log_ratios.max()), rel=1e-6)


def test_m2po_limit_is_infinite_where_the_budget_is_exactly_the_mean():
    log_ratios = torch.tensor([0.5, 0.25, 0.5, 0.25])
    assert m2po_limit(log_ratios, torch.ones(4), 0.15625) == math.inf
    assert m2po_limit(log_ratios, torch.ones(4), 0.15) < 0.5


@pytest.mark.parametrize("weight", [0.0, 0.49, 0.5, 1.0, 5.0, 5.1, 400.0])
def test_corrections(weight):
    weights = torch.tensor([weight])
    bounds = {"weight_low": 0.5, "weight_high": 5.0}

    def corrected(kind):
        return float(correct_weights(weights, LossSettings(weight_correction=kind, **bounds)))

    assert corrected("off") == pytest.approx(weight)
    assert corrected("truncate") == pytest.approx(min(max(weight, 0.5), 5.0))
    assert corrected("mask") == pytest.approx(weight if 0.5 <= weight <= 5.0 else 0.0)


def test_who_needs_what():
    needs = {name: set(needs_of(load_loss(name))) for name in LOSSES}
    some = {name: names for name, names in needs.items() if names}
    assert some == {"decoupled_ppo": {"proximal_logprobs"}, "m2po": {"log_ratio_limit"}}
    assert {name: set(facts.needs) for name, facts in LOSSES.items()} == needs


@ALL
def test_what_is_known_of_a_trust_region_is_what_the_loss_does(name):
    """Far outside, on both sides: does a token that pushes further out still have a gradient?"""
    tokens = random_case([1, 1], 0).tensors()
    gap = torch.tensor([2.0, -2.0], dtype=torch.float64)
    logprobs = (tokens.sampler_logprobs + gap).requires_grad_()
    anchor = logprobs.detach()
    tokens = replace(
        tokens,
        logprobs=logprobs,
        advantages=gap.sign(),
        staleness=torch.ones(2, dtype=torch.int64),
        proximal_logprobs=anchor,
        log_ratio_limit=0.1,
    )
    (grad,) = torch.autograd.grad(load_loss(name)(tokens, LossSettings()).losses.sum(), logprobs)
    assert LOSSES[name].two_sided == (not grad.any())


def at_the_clamp(name, gap, advantage, dual_clip):
    """What base.py says of LARGEST_LOG_RATIO: gradient of one token, and whether it is clipped."""
    beyond = abs(gap) > 20
    ratio = math.exp(max(-20.0, min(20.0, gap)))
    if name == "importance_sampling":
        return (0.0 if beyond else -advantage * ratio), beyond
    if name == "cispo":
        return -advantage * min(ratio, 2.0), beyond or ratio > 2.0
    if advantage * gap > 0 or (advantage < 0 and gap > 0 and dual_clip):
        return 0.0, True
    if name == "gspo":
        return -advantage * ratio, beyond
    return (0.0 if beyond else -advantage * ratio), beyond


@ALL
@pytest.mark.parametrize("gap", [19.0, 21.0, -19.0, -21.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_the_largest_log_ratio_is_no_trust_region(name, gap, advantage, dual_clip):
    """Just within it and just beyond. The proximal policy is the sampler, d = 1."""
    case = Case(
        lengths=[1],
        new=np.array([gap]),
        old=np.zeros(1),
        advantages=np.array([advantage]),
        staleness=np.array([1]),
        proximal=np.zeros(1),
    )
    _, grad, result = run(name, case.tensors(), LossSettings(dual_clip=dual_clip))
    expected, clipped = at_the_clamp(name, gap, advantage, dual_clip)
    assert float(grad[0]) == pytest.approx(expected, rel=1e-9, abs=0)
    assert int(result.num_clipped) == clipped
    assert float(result.ratio_max) == pytest.approx(math.exp(max(-20, min(20, gap))))


@ALL
@pytest.mark.parametrize("far", ["behaviour", "learner"])
def test_what_lies_beyond_the_clamp_on_either_side_of_the_proximal_policy_is_clipped(name, far):
    case = Case(
        lengths=[1],
        new=np.array([-21.0]),
        old=np.zeros(1),
        advantages=np.ones(1),
        staleness=np.array([1]),
        proximal=np.array([-21.0 if far == "behaviour" else 0.0]),
    )
    _, _, result = run(name, case.tensors(), LossSettings(weight_correction="off"))
    assert int(result.num_clipped) == 1


@ALL
@pytest.mark.parametrize("gap", [1e4, 40.0, -40.0, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_absurd_ratio_is_a_finite_loss_and_gradient(name, gap, advantage):
    tokens = random_case([1], 0).tensors(torch.float32)
    logprobs = tokens.logprobs.detach().requires_grad_()
    tokens = replace(
        tokens,
        logprobs=logprobs,
        sampler_logprobs=logprobs.detach() - gap,
        advantages=torch.tensor([advantage]),
        proximal_logprobs=logprobs.detach(),
        log_ratio_limit=0.1,
    )
    result = load_loss(name)(tokens, LossSettings())
    (grad,) = torch.autograd.grad(result.losses.sum(), logprobs)
    assert torch.isfinite(grad).all()
    assert torch.isfinite(result.losses).all()
    assert float(result.ratio_max) == pytest.approx(np.exp(np.clip(gap, -20, 20)), rel=1e-5)


@pytest.mark.parametrize("name", ["decoupled_ppo", "m2po"])
def test_what_is_needed_and_missing_is_named(name):
    (need,) = needs_of(load_loss(name))
    tokens = replace(random_case([2], 0).tensors(), **{need: None})
    with pytest.raises(ValueError, match=f"needs {need}"):
        load_loss(name)(tokens, LossSettings())


@pytest.mark.parametrize(
    ("name", "bounds", "aggregation", "advantage"),
    [
        ("grpo", (0.2, 0.2), "sequence_mean", "mean_std"),
        ("dapo", (0.2, 0.28), "token_mean", "mean_std"),
        ("dr_grpo", (0.2, 0.2), "constant", "mean"),
    ],
)
def test_recipes_are_ppo_with_the_papers_numbers(name, bounds, aggregation, advantage):
    assert load_loss(name) is load_loss("ppo")
    assert loss_facts(name) == loss_facts("ppo")
    chosen = effective(LearnerConfig(loss=name))
    assert (chosen.clip_low, chosen.clip_high) == bounds
    assert (chosen.aggregation, chosen.advantage) == (aggregation, advantage)
    assert not set(RECIPES) & set(LOSSES)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_has_settings_of_its_own_and_a_runs_settings_win(name):
    own = effective(LearnerConfig(loss=name))
    assert (own.clip_low, own.clip_high) == LOSSES[name].clip == (0.2, 0.2)
    assert (own.aggregation, own.advantage) == ("token_mean", "mean_std")
    for loss in (name, "dr_grpo", "dapo", "mine.py:f"):
        set_by_hand = LearnerConfig(
            loss=loss, clip_low=0.0, clip_high=4e-4, aggregation="sequence_mean", advantage="mean"
        )
        recipe = effective(set_by_hand)
        assert (recipe.clip_low, recipe.clip_high) == (0.0, 4e-4)
        assert (recipe.aggregation, recipe.advantage) == ("sequence_mean", "mean")
        numbers = settings_of(set_by_hand)
        assert (numbers.clip_low, numbers.clip_high) == (0.0, 4e-4)
        assert numbers == LossSettings(clip_low=0.0, clip_high=4e-4)


# -- pieces of cases -----------------------------------------------------------------------------


def token_order(case, rollouts):
    """Places of the tokens of `rollouts`, in that order."""
    ends = np.cumsum(case.lengths)
    pieces = [np.arange(ends[r] - case.lengths[r], ends[r]) for r in rollouts]
    return np.concatenate([np.zeros(0, np.int64), *pieces]).astype(np.int64)


def rollouts_of(case, rollouts):
    places = token_order(case, rollouts)
    return replace(
        case,
        lengths=[case.lengths[r] for r in rollouts],
        new=case.new[places],
        old=case.old[places],
        advantages=case.advantages[places],
        staleness=case.staleness[places],
        proximal=case.proximal[places],
    )
