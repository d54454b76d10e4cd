"""Credit per turn: what reaches each token, and the gradient of it, against float64 NumPy."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_node.config import FakeConfig
from asyncrl_node.core.advantages import compared_range
from asyncrl_node.learner.base import GroupFault
from asyncrl_node.learner.credit import advantages_of, turn_rewards_of
from asyncrl_node.learner.losses.aggregation import token_weights
from asyncrl_node.learner.losses.base import LossInput
from asyncrl_node.learner.losses.registry import load_advantage, load_loss
from asyncrl_node.learner.losses.settings import LossSettings
from asyncrl_node.learner.records import write_samples
from asyncrl_node.learner.trainer import Trainer
from asyncrl_node.tasks.fake import FakeTask
from tests.learner.test_trainer import (
    CONFIG,
    VERSION,
    assert_same,
    gradients,
    make_group,
    model_dir,
    model_dirs,
)
from tests.learner.test_trainer_losses import sampled_by, scores_of

__all__ = ["model_dir", "model_dirs"]

KINDS = ["mean", "mean_std", "leave_one_out", "mean_normalised"]
TURN = st.tuples(
    st.integers(0, 3), st.integers(0, 4), st.integers(-8, 8).map(lambda quarters: quarters / 4)
)
"""Observation tokens, sampled tokens, reward; any of them may be nothing."""
ROLLOUTS = st.lists(
    st.tuples(st.lists(TURN, min_size=1, max_size=4), st.integers(0, 2)), min_size=2, max_size=5
)
"""Turns of each rollout, and the tokens of an observation that nothing followed."""


def turned_group(rollouts, group_id=1):
    """A group of rollouts with rewarded turns; each begins with one prompt token."""
    masks, ends, rewards, start = [], [], [], 0
    for turns, rest in rollouts:
        mask = [0]
        for observed, sampled, reward in turns:
            mask += [0] * observed + [1] * sampled
            ends.append(start + len(mask))
            rewards.append(reward)
        masks.append(mask + [0] * rest)
        start += len(masks[-1])
    group = make_group(group_id, masks, [sum(t[2] for t in turns) for turns, _ in rollouts])
    return group._replace(
        turn_ends=np.array(ends, np.int64), turn_rewards=np.array(rewards, np.float32)
    )


def oracle(rollouts, kind, credit, discount):
    """Advantage of each sampled token, one at a time, in float64."""
    per_turn = [[reward for _, _, reward in turns] for turns, _ in rollouts]
    tokens = []
    for turns, rewards in zip((t for t, _ in rollouts), per_turn, strict=True):
        for place, (_, sampled, reward) in enumerate(turns):
            reached = [
                sum(r * discount**ahead for ahead, r in enumerate(other[place:]))
                for other in per_turn
                if len(other) > place
            ]
            mine = sum(r * discount**ahead for ahead, r in enumerate(rewards[place:]))
            gap = np.float64(mine) - np.mean(reached)
            if credit == "as_given":
                gap = reward
            elif max(reached) == min(reached):
                gap = 0.0
            elif kind == "mean_std":
                gap /= np.std(reached) + 1e-4
            elif kind == "leave_one_out":
                gap *= len(reached) / (len(reached) - 1)
            elif kind == "mean_normalised":
                gap /= np.mean(np.abs(reached))
            tokens += [gap] * sampled
    return np.array(tokens)


@settings(max_examples=150, deadline=None)
@given(
    ROLLOUTS,
    st.sampled_from(KINDS),
    st.sampled_from(["return_to_go", "as_given"]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_each_token_has_the_advantage_of_its_turn(rollouts, kind, credit, discount):
    group = turned_group(rollouts)
    ours = advantages_of(group, load_advantage(kind), credit, discount)
    assert ours.dtype == np.float32
    assert ours.shape == group.tokens.shape
    expected = oracle(rollouts, kind, credit, discount)
    np.testing.assert_allclose(ours[group.loss_mask], expected, rtol=1e-6, atol=1e-6)
    assert turn_rewards_of(group) == [[reward for *_, reward in turns] for turns, _ in rollouts]


@given(ROLLOUTS, st.sampled_from(KINDS))
def test_switched_off_or_never_rewarded_a_token_has_the_advantage_of_its_rollout(rollouts, kind):
    group = turned_group(rollouts)
    compare = load_advantage(kind)
    expected = np.repeat(np.float32(compare(group.rewards.tolist())), np.diff(group.rollout_starts))
    np.testing.assert_array_equal(advantages_of(group, compare, "off", 1.0), expected)
    plain = group._replace(turn_ends=np.zeros(0, np.int64), turn_rewards=np.zeros(0, np.float32))
    np.testing.assert_array_equal(advantages_of(plain, compare, "return_to_go", 1.0), expected)
    assert turn_rewards_of(plain) == [[] for _ in rollouts]


RAGGED = [
    [
        ([(1, 3, 1.0), (2, 2, 0.0), (0, 4, -1.0)], 2),
        ([(0, 2, 0.5)], 0),
        ([(1, 0, 2.0), (1, 3, 1)], 1),
    ],
    [([(3, 1, 0.0), (1, 5, 1.0)], 0), ([(0, 4, 1.0), (2, 2, 0.0)], 1)],
    [([(1, 2, 1.0)], 0), ([(1, 6, 1.0)], 0)],
]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "a3po", "m2po", "importance_sampling"])
@pytest.mark.parametrize("credit", ["return_to_go", "as_given"])
def test_the_gradient_is_that_of_the_oracles_credit(model_dir, loss, credit):
    """Ragged turns in ragged rollouts, through packing, against one rollout at a time."""
    config = msgspec.structs.replace(
        CONFIG, loss=loss, turn_credit=credit, turn_discount=0.5, micro_batch_tokens=20
    )
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    groups = [turned_group(rollouts, number) for number, rollouts in enumerate(RAGGED)]
    groups = sampled_by(trainer, groups, VERSION - 3)
    trainer.accumulate(groups, VERSION)
    new, index, lengths = [], [], []
    for group in groups:
        for start, end in zip(group.rollout_starts[:-1], group.rollout_starts[1:], strict=True):
            tokens = torch.tensor(group.tokens[start:end].astype(np.int64))
            places = torch.tensor(np.flatnonzero(group.loss_mask[start:end]))
            new.append(scores_of(trainer._model, tokens, places))
            index += [len(lengths)] * len(places)
            lengths.append(len(places))
    advantages = [oracle(rollouts, "mean_std", credit, 0.5) for rollouts in RAGGED]
    new, advantages = torch.cat(new), torch.tensor(np.concatenate(advantages), dtype=torch.float32)
    old = torch.tensor(np.concatenate([g.sampler_logprobs[g.loss_mask] for g in groups]))
    tokens = LossInput(
        logprobs=new,
        sampler_logprobs=old,
        advantages=advantages,
        rollout_index=torch.tensor(index),
        num_rollouts=len(lengths),
        staleness=torch.full((len(index),), 3),
        entropies=torch.zeros_like(new),
        log_ratio_limit=trainer._limit,
    )
    shares = torch.tensor(token_weights("token_mean", lengths))[torch.tensor(index)]
    total = (load_loss(loss)(tokens, LossSettings()).losses * shares).sum()
    names, parameters = zip(*trainer._model.named_parameters(), strict=True)
    expected = dict(zip(names, torch.autograd.grad(total, parameters), strict=True))
    assert max(grad.abs().max() for grad in expected.values()) > 1e-3
    assert_same(gradients(trainer), expected, 2e-5)


def test_a_group_that_only_its_turns_tell_apart_is_trained_and_not_counted_as_constant(model_dir):
    group = turned_group([([(1, 3, 1.0), (1, 3, 0.0)], 0), ([(1, 3, 0.0), (1, 3, 1.0)], 0)])
    assert group.rewards.tolist() == [1.0, 1.0]
    for credit, constant in (("return_to_go", 0), ("off", 1)):
        config = msgspec.structs.replace(CONFIG, turn_credit=credit)
        trainer = Trainer(config, model_dir, 1.0, seed=0)
        trainer.accumulate([group], VERSION)
        moved = max(grad.abs().max() for grad in gradients(trainer).values())
        assert (moved > 1e-4) == (not constant)
        trainer.update()
        assert trainer.finish_step()["reward/num_constant_groups"] == constant
        low, high = compared_range([1.0, 1.0], turn_rewards_of(group), credit)
        assert (low == high) == bool(constant)


@pytest.mark.parametrize(
    ("reward", "credit", "story"),
    [
        (float("nan"), "return_to_go", "group 1 .*reward . of 2 is nan"),
        (float("inf"), "as_given", "group 1 .*advantage 0 of 3 is inf: not a finite float32"),
    ],
)
def test_a_turn_reward_that_is_not_finite_names_the_group(model_dir, reward, credit, story):
    group = turned_group([([(1, 3, reward)], 0), ([(1, 3, 0.0), (1, 3, 1.0)], 0)])
    config = msgspec.structs.replace(CONFIG, turn_credit=credit)
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    with pytest.raises(GroupFault, match=story):
        trainer.accumulate([group], VERSION)


def test_a_sample_for_people_has_its_turns(tmp_path):
    group = turned_group(RAGGED[0])
    group.turn_rewards[0] = np.nan
    write_samples(tmp_path / "rows.jsonl", 0, [group], FakeTask(FakeConfig(), 0), 3)
    rows = map(msgspec.json.decode, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert [row["turn_rewards"] for row in rows] == [["nan", 0.0, -1.0], [0.5], [2.0, 1.0]]
