"""Every loss, advantage and aggregation as the trainer runs them, and what it must not change."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import numpy as np
import pytest
import torch

from asyncrl_node.errors import RunFault
from asyncrl_node.learner.base import GroupFault
from asyncrl_node.learner.losses.aggregation import token_weights
from asyncrl_node.learner.losses.base import LossInput
from asyncrl_node.learner.losses.off_policy import m2po_limit
from asyncrl_node.learner.losses.registry import LOSSES, load_advantage, load_loss
from asyncrl_node.learner.losses.settings import RECIPES, LossSettings, Recipe
from asyncrl_node.learner.trainer import Trainer
from asyncrl_node.loss_rules import effective, loss_settings
from tests.learner.test_trainer import (
    CONFIG,
    VERSION,
    assert_same,
    gradients,
    make_group,
    make_groups,
    model_dir,
    model_dirs,
    weights,
)

__all__ = ["model_dir", "model_dirs"]
LOSS = pytest.mark.parametrize("loss", sorted({*LOSSES, *RECIPES}))
AGGREGATION = pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])


def config_of(**settings):
    return msgspec.structs.replace(CONFIG, horizon=9, **settings)


def stale_groups(trainer, count=4, version=VERSION - 3):
    """Groups whose sampler is the trainer's own model, moved a little, `VERSION - version` ago."""
    return sampled_by(trainer, make_groups(count), version)


def sampled_by(trainer, groups, version):
    """Write into groups what the trainer's own model, moved a little, makes of their tokens."""
    for group in groups:
        group.policy_versions[group.loss_mask] = version
        noise = np.random.default_rng(group.group_id)
        for start, end in zip(group.rollout_starts[:-1], group.rollout_starts[1:], strict=True):
            tokens = group.tokens[start:end].tolist()
            scores = np.array([0.0, *trainer.score(tokens)]) if len(tokens) > 1 else np.zeros(1)
            scores += noise.normal(0, 0.4, len(tokens))
            mask = group.loss_mask[start:end]
            group.sampler_logprobs[start:end] = np.where(mask, scores, 0)
    return groups


def by_hand(trainer, groups, config, proximal=None):
    """`by_settings`, with what the package itself makes of the configuration."""
    recipe, settings = effective(config), loss_settings(config)
    return by_settings(trainer, groups, recipe, settings, config.horizon, proximal, config.loss)


def by_settings(trainer, groups, recipe, settings, horizon=None, proximal=None, loss=None):
    """The gradient by one rollout at a time and the loss of all tokens at once, in one graph.

    `proximal` scores tokens by the weights at the start of the step; None: those in use. `loss`:
    another name than the recipe's, of a user's function.
    """
    columns = {"new": [], "old": [], "advantage": [], "index": [], "anchor": []}
    lengths = []
    for group in groups:
        advantages = load_advantage(recipe.advantage)(group.rewards.tolist())
        for rollout, advantage in enumerate(advantages):
            place = slice(*group.rollout_starts[rollout : rollout + 2])
            tokens, mask = (
                torch.tensor(group.tokens[place].astype(np.int64)),
                group.loss_mask[place],
            )
            scored = torch.tensor(np.flatnonzero(mask))
            lengths.append(len(scored))
            if not len(scored):
                continue
            scores = scores_of(trainer._model, tokens, scored)
            columns["new"].append(scores)
            anchor = scores if proximal is None else scores_of(proximal, tokens, scored)
            columns["anchor"].append(anchor.detach())
            columns["old"].append(torch.tensor(group.sampler_logprobs[place][mask]))
            columns["advantage"].append(torch.full((len(scored),), float(advantage)))
            columns["index"].append(torch.full((len(scored),), len(lengths) - 1))
    new, old, advantage, index, anchor = (torch.cat(parts) for parts in columns.values())
    tokens = LossInput(
        logprobs=new,
        sampler_logprobs=old,
        advantages=advantage,
        rollout_index=index,
        num_rollouts=len(lengths),
        staleness=torch.full_like(index, 3),
        entropies=torch.zeros_like(new),
        proximal_logprobs=anchor,
        log_ratio_limit=m2po_limit((new - old).detach(), advantage, settings.m2_budget),
    )
    shares = torch.tensor(token_weights(recipe.aggregation, lengths, horizon))
    total = (load_loss(loss or recipe.loss)(tokens, settings).losses * shares[index]).sum()
    names, parameters = zip(*trainer._model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def scores_of(model, tokens, scored):
    """Log-probabilities of `scored` places of one rollout, through the model's own logits."""
    model.set_attn_implementation("eager")
    logits = model(tokens[None], use_cache=False).logits[0]
    model.set_attn_implementation("packed")
    return logits.log_softmax(1)[scored - 1, tokens[scored]]


@LOSS
@AGGREGATION
def test_the_gradient_is_that_of_one_rollout_at_a_time(model_dir, loss, aggregation):
    config = config_of(loss=loss, aggregation=aggregation, micro_batch_tokens=40)
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    groups = stale_groups(trainer)
    trainer.accumulate(groups, VERSION)
    assert_same(gradients(trainer), by_hand(trainer, groups, config), 2e-5)


@AGGREGATION
@LOSS
def test_no_packing_and_no_minibatch_changes_the_gradient(model_dir, loss, aggregation):
    grads = []
    for micro_batch_tokens in (1, 30, 8192):
        config = config_of(loss=loss, aggregation=aggregation)
        config = msgspec.structs.replace(config, micro_batch_tokens=micro_batch_tokens)
        trainer = Trainer(config, model_dir, 1.0, seed=0)
        groups = stale_groups(trainer, 5)
        parts = [groups] if loss == "m2po" else [groups[:2], groups[2:]]
        for part in parts:
            trainer.accumulate(part, VERSION)
        grads.append(gradients(trainer))
    assert any(grad.abs().max() > 1e-3 for grad in grads[0].values())
    for other in grads[1:]:
        assert_same(other, grads[0], 1e-6)


TIGHT = {"weight_low": 0.9, "weight_high": 1.1}
WIDE = {"clip_low": 0.0, "clip_high": 0.0}
LITERAL = [
    ("ppo", {}, "clip_low", 0.05),
    ("ppo", {}, "clip_high", 0.05),
    ("gspo", {}, "clip_low", 3e-4),
    ("m2po", {"m2_budget": 1e-6}, "clip_high", 0.05),
    ("ppo", {}, "dual_clip", 1.3),
    ("m2po", {}, "dual_clip", 1.9),
    ("a3po", {}, "dual_clip", 1.21),
    ("cispo", {}, "ratio_cap", 1.1),
    ("cispo", {}, "ratio_floor", 0.9),
    *(
        (loss, TIGHT, "weight_correction", kind)
        for loss in ("decoupled_ppo", "a3po")
        for kind in ("off", "mask")
    ),
    *(
        (loss, {}, field, value)
        for loss in ("decoupled_ppo", "a3po")
        for field, value in TIGHT.items()
    ),
    ("m2po", WIDE, "m2_budget", 0.01),
    ("m2po", WIDE, "m2_budget", 0.15),
]
"""loss, settings beside, and the one field that is not the default."""


def test_every_field_of_the_settings_is_in_the_table():
    assert {field for _, _, field, _ in LITERAL} == {field.name for field in fields(LossSettings)}


@pytest.mark.parametrize(("loss", "beside", "field", "value"), LITERAL)
def test_a_setting_of_the_run_reaches_the_loss(model_dir, loss, beside, field, value):
    config = config_of(loss=loss, **beside, **{field: value})
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    groups = stale_groups(trainer, 6)
    trainer.accumulate(groups, VERSION)
    ours, recipe = gradients(trainer), Recipe(loss)
    told = LossSettings(**beside, **{field: value})
    assert_same(ours, by_settings(trainer, groups, recipe, told), 2e-5)
    assert_differs(ours, by_settings(trainer, groups, recipe, LossSettings(**beside)))


@pytest.mark.parametrize(
    ("settings", "recipe", "horizon", "usual"),
    [
        ({"aggregation": "sequence_mean"}, Recipe("ppo", aggregation="sequence_mean"), None, None),
        ({"aggregation": "constant"}, Recipe("ppo", aggregation="constant"), 9, None),
        (
            {"aggregation": "constant", "horizon": 21},
            Recipe("ppo", aggregation="constant"),
            21,
            (Recipe("ppo", aggregation="constant"), 9),
        ),
        ({"loss": "grpo"}, Recipe("ppo", aggregation="sequence_mean"), None, None),
        ({"loss": "dapo"}, Recipe("ppo", clip_high=0.28), None, None),
        ({"loss": "dr_grpo"}, Recipe("ppo", aggregation="constant", advantage="mean"), 9, None),
    ],
)
def test_an_aggregation_a_horizon_and_a_recipe_reach_the_gradient(
    model_dir, settings, recipe, horizon, usual
):
    config = msgspec.structs.replace(config_of(), **settings)
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    groups = stale_groups(trainer, 6)
    trainer.accumulate(groups, VERSION)
    ours, numbers = gradients(trainer), LossSettings(clip_high=recipe.clip_high)
    assert_same(ours, by_settings(trainer, groups, recipe, numbers, horizon), 2e-5)
    other, other_horizon = usual or (Recipe("ppo"), None)
    assert_differs(ours, by_settings(trainer, groups, other, LossSettings(), other_horizon))


def assert_differs(ours, theirs):
    """By far more than the tolerance of the comparison."""
    scale = max(float(grad.abs().max()) for grad in ours.values())
    gap = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    assert gap > 1e-3 * scale > 0


@pytest.mark.parametrize("advantage", ["mean", "leave_one_out", "mean_normalised"])
def test_advantages_by_name_reach_the_gradient(model_dir, advantage):
    config = config_of(loss="importance_sampling", advantage=advantage)
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    groups = stale_groups(trainer)
    trainer.accumulate(groups, VERSION)
    assert_same(gradients(trainer), by_hand(trainer, groups, config), 2e-5)


def test_the_proximal_policy_of_later_updates_is_that_at_the_start_of_the_step(model_dir):
    config = config_of(loss="decoupled_ppo", learning_rate=0.01)
    trainer, start = (Trainer(config, model_dir, 1.0, seed=0) for _ in range(2))
    groups = stale_groups(trainer)
    for _ in range(2):  # in the second step from other weights than in the first
        trainer.keep_proximal(groups[2:])
        for part in (groups[:2], groups[2:]):
            trainer.accumulate(part, VERSION)
            expected = by_hand(trainer, part, config, start._model)
            assert_same(gradients(trainer), expected, 5e-5)
            trainer.update()
        trainer.finish_step()
        trainer.copy_weights_into(memoryview(buffer := bytearray(trainer.manifest()[1])))
        with torch.no_grad():
            for target, source in zip(
                start._model.parameters(), trainer._model.parameters(), strict=True
            ):
                target.copy_(source)
        assert any(buffer)
    different = by_hand(trainer, groups[2:], config)
    assert any((different[name] - expected[name]).abs().max() > 1e-4 for name in expected)


def test_a_proximal_policy_that_nobody_kept_is_no_silent_mistake(model_dir):
    trainer = Trainer(config_of(loss="decoupled_ppo"), model_dir, 1.0, seed=0)
    groups = stale_groups(trainer)
    trainer.accumulate(groups[:1], VERSION)
    trainer.update()
    with pytest.raises(AssertionError, match="the weights have moved"):
        trainer.keep_proximal(groups[2:])
    with pytest.raises(GroupFault, match="the loss of a token is nan"):
        trainer.accumulate(groups[2:], VERSION)


def test_m2po_takes_an_update_at_once(model_dir):
    trainer = Trainer(config_of(loss="m2po"), model_dir, 1.0, seed=0)
    groups = stale_groups(trainer)
    trainer.accumulate(groups[:2], VERSION)
    with pytest.raises(AssertionError, match="accumulate it at once"):
        trainer.accumulate(groups[2:], VERSION)


def test_an_entropy_bonus_spreads_the_policy_of_constant_groups_too(model_dir):
    """Three updates by the bonus alone: the only group says nothing about rewards."""
    group = make_group(1, [[0, 0, 1, 1, 1], [0, 1, 1]], [2, 2])
    entropies = []
    for coefficient in (0.0, 0.1):
        config = config_of(entropy_coefficient=coefficient, learning_rate=1e-3)
        trainer = Trainer(config, model_dir, 1.0, seed=0)
        for _ in range(4):
            trainer.accumulate([group], VERSION)
            trainer.update()
            entropies.append(trainer.finish_step()["entropy/mean"])
    assert entropies[0] == entropies[3] == entropies[4]
    assert entropies[4] < entropies[5] < entropies[6] < entropies[7]


MINE = """
from asyncrl_node.learner.losses.base import importance_ratios, token_loss

def pull(tokens, settings):
    '''A gradient where the advantage is zero, too.'''
    ratios = importance_ratios(tokens.logprobs, tokens.sampler_logprobs)
    return token_loss((tokens.logprobs - tokens.sampler_logprobs) ** 2, ratios > 9, ratios)

def explode(tokens, settings):
    ratios = importance_ratios(tokens.logprobs, tokens.sampler_logprobs)
    return token_loss(tokens.logprobs * float("inf"), ratios > 9, ratios)

def summed(tokens, settings):
    ratios = importance_ratios(tokens.logprobs, tokens.sampler_logprobs)
    return token_loss((ratios * tokens.advantages).sum(), ratios > 9, ratios)

def first_only(rewards):
    return [1.0] + [0.0] * (len(rewards) - 1)

def huge(rewards):
    return [1e39] * len(rewards)
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_users_loss_gets_its_gradient_where_the_advantage_is_zero(model_dir, mine):
    trainer = Trainer(config_of(loss=f"{mine}:pull"), model_dir, 1.0, seed=0)
    trainer.accumulate([make_group(1, [[0, 1, 1], [0, 0, 1]], [2, 2])], VERSION)
    assert any(grad.abs().max() > 0 for grad in gradients(trainer).values())


def test_a_users_loss_that_sums_is_refused(model_dir, mine):
    trainer = Trainer(config_of(loss=f"{mine}:summed"), model_dir, 1.0, seed=0)
    with pytest.raises(RunFault, match=r"bad_loss: .*shape \[\] for \d+ tokens: it must be \["):
        trainer.accumulate(make_groups(2), VERSION)


def test_a_users_advantage_trains(model_dir, mine):
    config = config_of(advantage=f"{mine}:first_only", loss="importance_sampling")
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    groups = stale_groups(trainer)
    trainer.accumulate(groups, VERSION)
    assert_same(gradients(trainer), by_hand(trainer, groups, config), 2e-5)


@pytest.mark.parametrize(
    ("setting", "story"),
    [
        ({"loss": "explode"}, "group 0 .*the loss of a token is -?inf"),
        ({"advantage": "huge"}, r"group 0 .*advantage 0 of 3 is 1e\+39: not a finite float32"),
    ],
)
def test_what_overflows_is_named_before_anything_moves(model_dir, mine, setting, story):
    named = {key: f"{mine}:{name}" for key, name in setting.items()}
    trainer = Trainer(config_of(**named), model_dir, 1.0, seed=0)
    before = weights(trainer)
    groups = make_groups(1)
    with pytest.raises(GroupFault, match=story) as fault:
        trainer.accumulate(groups, VERSION)
    assert (fault.value.name, fault.value.group) == ("non_finite", groups[0])
    assert_same(weights(trainer), before, 0.0)


@LOSS
@pytest.mark.parametrize("logprob", [-1e4, 1e4])
def test_one_absurd_token_stops_no_run(model_dir, loss, logprob):
    trainer = Trainer(config_of(loss=loss), model_dir, 1.0, seed=0)
    groups = stale_groups(trainer)
    groups[2].sampler_logprobs[np.flatnonzero(groups[2].loss_mask)[-1]] = logprob
    trainer.accumulate(groups, VERSION)
    trainer.update()
    metrics = trainer.finish_step()
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["ratio/max"] <= np.exp(20) * (1 + 1e-6)
