"""The trainer against Hugging Face, one rollout at a time, on tiny random models."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from asyncrl_node.config import LearnerConfig
from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.errors import RunFault
from asyncrl_node.learner.base import GroupFault
from asyncrl_node.learner.losses.registry import LOSSES
from asyncrl_node.learner.trainer import Trainer

VOCAB = 29
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MODELS = {
    "qwen3_tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3_untied": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**SIZES),
    "granite": GraniteConfig(**SIZES, logits_scaling=8.0),
}
SUPPORTED = ["qwen3_tied", "qwen3_untied", "llama", "qwen2"]
# The gate has tests of its own; here log-probabilities are made up.
NO_GATE = {"parity_limit": None, "parity_mean_limit": None}
CONFIG = LearnerConfig(warmup_steps=0, max_grad_norm=1e9, **NO_GATE)
VERSION = 5


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory):
    """One folder per tiny model, as a user would have it."""
    transformers_logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(root / name)
        (root / name / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    transformers_logging.enable_progress_bar()
    return root


@pytest.fixture
def model_dir(model_dirs):
    return model_dirs / "qwen3_tied"


def make_group(group_id, masks, rewards, seed=0, version=VERSION):
    """One group with random tokens; each of `masks` is a rollout, 1 where the policy sampled."""
    rng = np.random.default_rng([seed, group_id])
    mask = np.concatenate([np.array(rollout, bool) for rollout in masks])
    logprobs = -math.log(VOCAB) + rng.normal(0, 0.5, len(mask))
    return TrajectoryGroup(
        group_id=group_id,
        problem=group_id + 100,
        epoch=0,
        tokens=rng.integers(0, VOCAB, len(mask), dtype=np.int32),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        on_older_kv=np.zeros(len(mask), bool),
        rollout_starts=np.cumsum([0] + [len(rollout) for rollout in masks]),
        rewards=np.array(rewards, np.float32),
        turn_ends=np.zeros(0, np.int64),
        turn_rewards=np.zeros(0, np.float32),
    )


def make_groups(count=4, seed=0):
    """Groups of three rollouts of all kinds; group 1's rewards are all equal."""
    rng = np.random.default_rng(seed)
    groups = []
    for group_id in range(count):
        masks = [
            [0, *rng.integers(0, 2, rng.integers(1, 15))],
            [0, 0, 1, 1, 0, 0, 1, 0, 0],
            [0] * int(rng.integers(1, 6)) + [1] * int(rng.integers(1, 9)),
        ]
        rewards = [1, 1, 1] if group_id == 1 else list(rng.integers(0, 5, 3))
        groups.append(make_group(group_id, masks, rewards, seed))
    return groups


def gradients(trainer):
    """The mean gradient over what was accumulated."""
    return {
        name: parameter.grad / trainer._divisor()
        for name, parameter in trainer._model.named_parameters()
    }


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def assert_same(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance)


class Oracle:
    """Loss, gradient and statistics by HF's sdpa and autograd, one rollout at a time."""

    def __init__(self, model_dir, groups, config, temperature=1.0, versions=(VERSION,)):
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, attn_implementation="sdpa", dtype=torch.float32
        )
        self.loss, self.log_ratios, self.entropies, self.same = 0.0, [], [], []
        for group in groups:
            self._add(model, group, config, temperature, versions)
        self.loss = self.loss / len(self.log_ratios)
        self.loss.backward()
        self.gradients = {name: p.grad for name, p in model.named_parameters()}

    def _add(self, model, group, config, temperature, versions):
        rewards = group.rewards.astype(float)
        advantages = rewards - rewards.mean()
        if config.advantage in (None, "mean_std"):
            advantages = advantages / (rewards.std() + 1e-4)
        for rollout, advantage in enumerate(advantages):
            place = slice(*group.rollout_starts[rollout : rollout + 2])
            tokens = torch.tensor(group.tokens[place], dtype=torch.int64)
            logits = model(tokens[None]).logits[0].double() / temperature
            log_softmax = logits.log_softmax(-1)
            for token in np.flatnonzero(group.loss_mask[place]):
                scores = log_softmax[token - 1]
                log_ratio = scores[tokens[token]] - float(group.sampler_logprobs[place][token])
                gain = log_ratio.exp() * advantage
                if config.loss == "ppo":
                    bounds = (0.8, 1.2)
                    gain = torch.minimum(gain, log_ratio.exp().clamp(*bounds) * advantage)
                self.loss = self.loss - gain
                self.log_ratios.append(float(log_ratio.detach()))
                self.entropies.append(float(-(scores.exp() * scores).sum().detach()))
                self.same.append(group.policy_versions[place][token] in versions)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("loss", ["ppo", "importance_sampling"])
def test_loss_and_gradient_equal_hugging_face_one_by_one(model_dirs, name, loss):
    config = msgspec.structs.replace(CONFIG, loss=loss, micro_batch_tokens=40)
    groups = make_groups()
    trainer = Trainer(config, model_dirs / name, 0.8, seed=0)
    trainer.accumulate(groups, VERSION)
    oracle = Oracle(model_dirs / name, groups, config, temperature=0.8)
    assert_same(gradients(trainer), oracle.gradients, 1e-5)
    trainer.update()
    metrics = trainer.finish_step()
    assert metrics["loss/mean"] == pytest.approx(float(oracle.loss.detach()), abs=1e-5)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in oracle.gradients.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.fixture(scope="session")
def long_lived(model_dirs):
    return Trainer(CONFIG, model_dirs / "qwen3_tied", 1.0, seed=0)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 30)), min_size=2, max_size=8),
    st.integers(1, 120),
)
def test_any_lengths_and_budget_equal_hugging_face(model_dirs, long_lived, lengths, budget):
    masks = [[0] * prompt + [1] * sampled for prompt, sampled in lengths]
    group = make_group(0, masks, range(len(masks)), seed=budget)
    long_lived._config = msgspec.structs.replace(CONFIG, micro_batch_tokens=budget)
    long_lived._pending, long_lived._pending_tokens = [], 0
    long_lived._optimizer.zero_grad(set_to_none=False)
    long_lived.accumulate([group], VERSION)
    oracle = Oracle(model_dirs / "qwen3_tied", [group], CONFIG)
    assert_same(gradients(long_lived), oracle.gradients, 1e-5)


def train(model_dir, batches, config=CONFIG):
    """One optimizer update, a list of groups at a time; gradients, weights after it, metrics."""
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    for groups in batches:
        for array in (field for group in groups for field in group[3:]):
            array.setflags(write=False)  # as views into a slot are
        trainer.accumulate(groups, VERSION)
    grads = gradients(trainer)
    trainer.update()
    return grads, trainer.finish_step()


def test_streamed_equals_whole(model_dir):
    groups = make_groups(6)
    whole, metrics = train(model_dir, [groups])
    for batches in ([[g] for g in groups], [groups[3:], groups[:2], groups[2:3]]):
        streamed, streamed_metrics = train(model_dir, batches)
        assert_same(streamed, whole, 1e-6)
        assert streamed_metrics == pytest.approx(metrics, abs=1e-5)


@pytest.mark.parametrize("micro_batch_tokens", [1, 16, 50])
def test_micro_batch_size_does_not_matter(model_dir, micro_batch_tokens):
    groups = make_groups(6)
    whole, metrics = train(model_dir, [groups])
    config = msgspec.structs.replace(CONFIG, micro_batch_tokens=micro_batch_tokens)
    cut, cut_metrics = train(model_dir, [groups], config)
    assert_same(cut, whole, 1e-6)
    assert cut_metrics == pytest.approx(metrics, abs=1e-5)


def test_metrics_cover_every_loss_token(model_dir):
    groups = make_groups(5)
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    stale = make_group(7, [[0, 0, 1, 1], [0, 1, 1, 1]], [0, 1], version=VERSION - 1)
    trainer.accumulate([*groups, stale], VERSION)
    trainer.update()
    metrics = trainer.finish_step()
    oracle = Oracle(model_dir, [*groups, stale], CONFIG)
    ratios = np.exp(oracle.log_ratios)
    kl, same = ratios - 1 - oracle.log_ratios, np.array(oracle.same)
    rewards = np.concatenate([group.rewards for group in [*groups, stale]])
    assert metrics == pytest.approx(
        {
            "reward/trained_mean": rewards.mean(),
            "reward/trained_std": rewards.std(),
            "reward/num_constant_groups": 1,
            "loss/mean": float(oracle.loss.detach()),
            "grad_norm": metrics["grad_norm"],
            "learning_rate": CONFIG.learning_rate,
            "ratio/max": ratios.max(),
            "ratio/clip_fraction": metrics["ratio/clip_fraction"],
            "entropy/mean": np.mean(oracle.entropies),
            "tokens/trained": len(ratios),
            "mismatch/kl_same_version": kl[same].mean(),
            "mismatch/num_tokens_same_version": same.sum(),
            "mismatch/kl_stale": kl[~same].mean(),
            "mismatch/num_tokens_stale": 5,
            "mismatch/kl_older_kv": 0,
            "mismatch/num_tokens_older_kv": 0,
        },
        rel=1e-4,
    )
    assert 0 < metrics["ratio/clip_fraction"] < 1


def test_after_the_first_substep_no_token_counts_as_same_version(model_dir):
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    groups = make_groups(4)
    for part in (groups[:2], groups[2:]):
        trainer.accumulate(part, VERSION)
        trainer.update()
    metrics = trainer.finish_step()
    first = sum(int(group.loss_mask.sum()) for group in groups[:2])
    assert metrics["mismatch/num_tokens_same_version"] == first
    assert metrics["mismatch/num_tokens_stale"] == metrics["tokens/trained"] - first


def test_tokens_on_older_kv_are_counted_apart(model_dir):
    """Of both groups the last two loss tokens of each rollout: one group is stale, one is not."""
    groups = [
        make_group(0, [[0, 1, 1, 1], [0, 0, 1, 1]], [1, 0]),
        make_group(1, [[0, 1, 1, 1], [0, 0, 1, 1]], [1, 0], version=VERSION - 1),
    ]
    older = np.array([0, 0, 1, 1, 0, 0, 1, 1], bool)
    groups = [group._replace(on_older_kv=older) for group in groups]
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    trainer.accumulate(groups, VERSION)
    trainer.update()
    metrics = trainer.finish_step()
    oracle = Oracle(model_dir, groups, CONFIG)
    kl, same = np.exp(oracle.log_ratios) - 1 - oracle.log_ratios, np.array(oracle.same)
    marked = np.concatenate([group.on_older_kv[group.loss_mask] for group in groups])
    assert same.sum() == 5
    for name, population in (
        ("same_version", same & ~marked),
        ("older_kv", marked),
        ("stale", ~same & ~marked),
    ):
        assert metrics[f"mismatch/num_tokens_{name}"] == population.sum() > 0
        assert metrics[f"mismatch/kl_{name}"] == pytest.approx(kl[population].mean(), rel=1e-4)


def test_a_new_step_starts_from_nothing(model_dir):
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    trainer.accumulate(make_groups(), VERSION)
    trainer.update()
    trainer.finish_step()
    assert set(trainer.finish_step().values()) == {0.0}


def test_a_group_left_over_is_our_bug(model_dir):
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    trainer.accumulate(make_groups(), VERSION)
    with pytest.raises(AssertionError, match="must follow"):
        trainer.finish_step()


def test_constant_groups_dilute_the_gradient_and_add_none(model_dir):
    groups = make_groups(1)
    constant = make_group(1, [[0, 1, 1], [0, 0, 1]], [2, 2])
    alone, _ = train(model_dir, [groups])
    diluted, _ = train(model_dir, [[*groups, constant]])
    tokens = int(groups[0].loss_mask.sum())
    expected = {name: grad * tokens / (tokens + 3) for name, grad in alone.items()}
    assert_same(diluted, expected, 1e-6)


def test_a_batch_of_constant_groups_moves_nothing_and_is_counted(model_dir):
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    before = weights(trainer)
    trainer.accumulate([make_group(1, [[0, 1, 1], [0, 0, 1]], [2, 2])], VERSION)
    trainer.update()
    metrics = trainer.finish_step()
    assert_same(weights(trainer), before, 0.0)
    assert (metrics["grad_norm"], metrics["tokens/trained"]) == (0.0, 3.0)
    assert metrics["entropy/mean"] > 0


def test_nothing_to_train_on_is_no_update(model_dir):
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    before = weights(trainer)
    trainer.accumulate([], VERSION)
    trainer.accumulate([make_group(1, [[0, 0], [0]], [1, 2])], VERSION)
    trainer.update()
    assert_same(weights(trainer), before, 0.0)
    assert trainer.finish_step()["reward/trained_mean"] == 1.5


@pytest.mark.parametrize("loss", ["ppo", "importance_sampling"])
def test_the_rewarded_rollout_becomes_likelier(model_dir, loss):
    config = msgspec.structs.replace(CONFIG, loss=loss)
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    group = make_group(0, [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1]], [1, 0])
    scores = []
    for _ in range(2):
        ((pack, _),) = trainer._packs([group])
        logprobs = trainer._score(pack)[0].detach()
        scores.append(logprobs.reshape(2, 3).sum(1))
        # On policy, so that no token starts outside the trust region.
        group.sampler_logprobs[group.loss_mask] = logprobs.numpy()
        trainer.accumulate([group], VERSION)
        trainer.update()
    moved = scores[1] - scores[0]
    assert moved[0] > 0 > moved[1]


def test_the_update_is_adamw_on_the_clipped_mean_gradient(model_dir):
    config = LearnerConfig(
        warmup_steps=4,
        max_grad_norm=0.05,
        weight_decay=0.1,
        parity_limit=None,
        parity_mean_limit=None,
    )
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    names = [name for name, _ in trainer.named_weights()]
    twins = [tensor.clone().requires_grad_() for _, tensor in trainer.named_weights()]
    optimizer = torch.optim.AdamW(twins, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    rates = []
    for step in range(6):
        trainer.accumulate(make_groups(2, seed=step), VERSION)
        for twin, grad in zip(twins, gradients(trainer).values(), strict=True):
            twin.grad = grad
        norm = float(torch.nn.utils.clip_grad_norm_(twins, 0.05))
        optimizer.param_groups[0]["lr"] = 3e-4 * min(1, (step + 1) / 4)
        optimizer.step()
        trainer.update()
        metrics = trainer.finish_step()
        rates.append(metrics["learning_rate"])
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert norm > 0.05
        expected = {name: twin.detach() for name, twin in zip(names, twins, strict=True)}
        assert_same(weights(trainer), expected, 1e-6)
    assert rates == pytest.approx([0.75e-4, 1.5e-4, 2.25e-4, 3e-4, 3e-4, 3e-4])


def set_sampler_logprob(group, value):
    group.sampler_logprobs[np.flatnonzero(group.loss_mask)[-1]] = value


def set_sampler_logprobs(group, value):
    group.sampler_logprobs[group.loss_mask] = value


def break_gradients(trainer):
    """The gradient by the embedding of token VOCAB - 1 is NaN."""

    def poison(_, inputs, output):
        spoiled = (inputs[0] == VOCAB - 1)[..., None]
        if output.requires_grad:
            output.register_hook(lambda grad: grad.masked_fill(spoiled, float("nan")))

    trainer._model.model.embed_tokens.register_forward_hook(poison)


def set_reward(group, value):
    group.rewards[0] = value


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (set_sampler_logprob, "the sampler log-probability of a token is"),
        (set_sampler_logprobs, "the sampler log-probability of a token is"),
        (set_reward, "reward 0 of 3 is"),
    ],
)
def test_a_number_that_is_not_finite_stops_the_run_by_name(model_dir, loss, spoil, value, problem):
    trainer = Trainer(msgspec.structs.replace(CONFIG, loss=loss), model_dir, 1.0, seed=0)
    before = weights(trainer)
    groups = make_groups(4)
    spoil(groups[2], float(value))
    story = rf"group 2 \(problem 102\): {problem} {value};"
    for batch in (groups, groups[2:3]):
        with pytest.raises(GroupFault, match=story) as fault:
            trainer.accumulate(batch, VERSION)
        assert fault.value.group is groups[2]
        assert fault.value.name == "non_finite"
    assert_same(weights(trainer), before, 0.0)
    assert not trainer._optimizer.state


def one_update(trainer, groups):
    trainer.accumulate(groups, VERSION)
    trainer.update()


def set_hook(group, value):
    """Mark the token whose gradient `break_gradients` breaks."""
    group.tokens[0] = VOCAB - 1


def set_token(group, value):
    group.tokens[0] = VOCAB - 2


@pytest.mark.parametrize("loss", ["ppo", "m2po", "decoupled_ppo"])
@pytest.mark.parametrize("spoil", [set_sampler_logprob, set_reward, set_hook, set_token])
def test_a_fault_in_a_later_update_of_a_step_leaves_the_first_one_as_it_is(model_dirs, spoil, loss):
    config = msgspec.structs.replace(CONFIG, num_substeps=2, loss=loss)
    trainer = Trainer(config, model_dirs / "qwen3_untied", 1.0, seed=0)
    groups = make_groups(4)
    for group in groups:
        group.tokens[:] = group.tokens % (VOCAB - 2)
    trainer.keep_proximal(groups[2:])
    start = weights(trainer)
    trainer.accumulate(groups[:2], VERSION)
    trainer.update()
    first = weights(trainer)
    assert any((first[name] != start[name]).any() for name in start)
    spoil(groups[2], float("nan"))
    if spoil is set_token:
        trainer._model.model.embed_tokens.weight.data[VOCAB - 2] = float("nan")
    break_gradients(trainer)
    first = weights(trainer)
    with pytest.raises(GroupFault, match=r"group 2 .*; this update changed nothing$") as fault:
        one_update(trainer, groups[2:])
    assert "no weight" not in fault.value.story
    for name, tensor in weights(trainer).items():
        torch.testing.assert_close(tensor, first[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_group_of_a_later_update_is_looked_at_before_the_first(model_dir, value):
    config = msgspec.structs.replace(CONFIG, loss="decoupled_ppo", num_substeps=2)
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    groups = make_groups(4)
    set_sampler_logprob(groups[2], float(value))
    with pytest.raises(GroupFault, match=f"sampler log-probability of a token is {value}") as fault:
        trainer.keep_proximal(groups[2:])
    assert fault.value.group is groups[2]


def test_a_broken_weight_is_named_by_the_group_that_meets_it(model_dirs):
    # Untied: the broken row is met as an input only.
    trainer = Trainer(CONFIG, model_dirs / "qwen3_untied", 1.0, seed=0)
    groups = [make_group(group_id, 3 * [[0, 0, 1, 1]], [0, 1, 2]) for group_id in range(3)]
    for group in groups:
        group.tokens[:] = group.tokens % (VOCAB - 1)
    groups[2].tokens[0] = VOCAB - 1
    weights = trainer._model.model.embed_tokens.weight.data
    weights[VOCAB - 1] = float("nan")
    with pytest.raises(RunFault, match=r"group 2 .*learner log-probability of a token is nan"):
        trainer.accumulate(groups, VERSION)


def test_a_gradient_that_is_not_finite_is_traced_to_its_group(model_dir):
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    before = weights(trainer)
    groups = make_groups(5)
    for group in groups:
        group.tokens[:] = group.tokens % (VOCAB - 1)
    groups[3].tokens[0] = VOCAB - 1

    break_gradients(trainer)
    trainer.accumulate(groups, VERSION)
    with pytest.raises(RunFault, match=r"group 3 \(problem 103\): its gradient is not finite"):
        trainer.update()
    assert_same(weights(trainer), before, 0.0)
    assert not trainer._optimizer.state


def test_numbers_that_overflow_only_in_sum_are_told_apart(model_dir):
    trainer = Trainer(msgspec.structs.replace(CONFIG, advantage="mean"), model_dir, 1.0, seed=0)
    trainer.accumulate(make_groups(2), VERSION)
    trainer._grads[0].fill_(float("inf"))
    with pytest.raises(RunFault, match="the gradients of 2 groups overflow in sum"):
        trainer.update()
    huge = make_group(4, [[0, 1, 1], [0, 0]], [3e38, -3e38])
    ((pack, _),) = trainer._packs([huge])
    huge.sampler_logprobs[huge.loss_mask] = trainer._score(pack)[0].detach().numpy()
    with pytest.raises(RunFault, match="the losses of 1 groups overflow in sum"):
        trainer.accumulate([huge], VERSION)


def test_a_rollout_without_a_prompt_is_refused_by_name(model_dir):
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    groups = [*make_groups(2), make_group(9, [[0, 1], [1, 1]], [0, 1])]
    with pytest.raises(RunFault, match=r"group 9 \(problem 109\): a rollout without a prompt"):
        trainer.accumulate(groups, VERSION)


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_flat_buffer_holds_every_parameter_by_the_manifest(model_dirs, name):
    trainer = Trainer(CONFIG, model_dirs / name, 1.0, seed=0)
    entries, num_bytes = trainer.manifest()
    reference = AutoModelForCausalLM.from_pretrained(model_dirs / name, dtype=torch.float32)
    assert [e.name for e in entries] == [name for name, _ in reference.named_parameters()]
    assert ("lm_head.weight" in [e.name for e in entries]) == (name in ("qwen3_untied", "llama"))
    for buffer in (bytearray(num_bytes), bytearray(num_bytes + 64)):
        for _ in range(2):
            trainer.accumulate(make_groups(2), VERSION)
            trainer.update()
            trainer.copy_weights_into(memoryview(buffer))
            for entry, (_, tensor) in zip(entries, trainer.named_weights(), strict=True):
                place = slice(entry.offset, entry.offset + entry.num_bytes)
                assert bytes(buffer[place]) == tensor.numpy().tobytes()
                assert (entry.dtype, entry.shape) == ("float32", tuple(tensor.shape))


def test_a_buffer_that_cannot_hold_the_weights_is_refused(model_dir):
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    num_bytes = trainer.manifest()[1]
    for buffer in (bytes(num_bytes), bytearray(num_bytes - 1)):
        with pytest.raises(ValueError, match="a writable buffer of"):
            trainer.copy_weights_into(memoryview(buffer))


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_checkpoint_is_a_hugging_face_folder(model_dirs, name, tmp_path):
    trainer = Trainer(CONFIG, model_dirs / name, 1.0, seed=0)
    trainer.accumulate(make_groups(), VERSION)
    trainer.update()
    trainer.save(tmp_path / "step")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step")
    assert_same(dict(loaded.named_parameters()), weights(trainer), 0.0)
    files = {path.name for path in (tmp_path / "step").iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "optimizer.json",
        "tokenizer_config.json",
    }
    assert "packed" not in (tmp_path / "step" / "config.json").read_text()


def step(trainer, seed):
    for part in range(2):
        trainer.accumulate(make_groups(2, seed=10 * seed + part), VERSION)
        trainer.update()
    return trainer.finish_step()


def test_two_steps_and_two_more_after_a_restart_equal_four(model_dir, tmp_path):
    config = LearnerConfig(warmup_steps=6, **NO_GATE)
    straight = Trainer(config, model_dir, 1.0, seed=0)
    metrics = [step(straight, seed) for seed in range(4)]
    first = Trainer(config, model_dir, 1.0, seed=0)
    for seed in range(2):
        step(first, seed)
    first.save(tmp_path)
    second = Trainer(config, tmp_path, 1.0, seed=0)
    second.load_optimizer(tmp_path)
    assert [step(second, seed) for seed in (2, 3)] == metrics[2:]
    assert_same(weights(second), weights(straight), 0.0)
    second.save(tmp_path)
    third = Trainer(config, tmp_path, 1.0, seed=0)
    third.load_optimizer(tmp_path)
    assert step(third, 5) == step(straight, 5)


def test_a_checkpoint_before_the_first_update(model_dir, tmp_path):
    Trainer(CONFIG, model_dir, 1.0, seed=0).save(tmp_path)
    trainer = Trainer(CONFIG, tmp_path, 1.0, seed=0)
    trainer.load_optimizer(tmp_path)
    step(trainer, 0)
    trainer.load_optimizer(tmp_path)
    assert not trainer._optimizer.state


def test_a_checkpoint_that_does_not_fit_is_refused(model_dirs, tmp_path):
    llama = Trainer(CONFIG, model_dirs / "llama", 1.0, seed=0)
    with pytest.raises(RunFault, match=r"bad_checkpoint: .* holds no optimizer state"):
        llama.load_optimizer(tmp_path)
    qwen = Trainer(CONFIG, model_dirs / "qwen2", 1.0, seed=0)
    step(qwen, 0)
    qwen.save(tmp_path)
    with pytest.raises(RunFault, match="another model's optimizer state"):
        llama.load_optimizer(tmp_path)
    (tmp_path / "optimizer.json").write_text(json.dumps({"format": 0, "num_updates": 1}))
    with pytest.raises(RunFault, match="format 0"):
        qwen.load_optimizer(tmp_path)


def test_a_model_with_missing_weights_is_refused(model_dir, tmp_path):
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    tensors = load_file(model_dir / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunFault, match=r"bad_model: .*missing.*model\.norm\.weight"):
        Trainer(CONFIG, tmp_path, 1.0, seed=0)
    with pytest.raises(RunFault, match="bad_model"):
        Trainer(CONFIG, tmp_path / "nowhere", 1.0, seed=0)


@pytest.mark.parametrize(
    ("name", "fault"), [("gemma2", "unsupported_attention"), ("granite", "unsupported_model")]
)
def test_a_model_that_computes_something_else_is_refused_at_load(model_dirs, name, fault):
    with pytest.raises(RunFault) as raised:
        Trainer(CONFIG, model_dirs / name, 1.0, seed=0)
    assert raised.value.name == fault


def test_weights_do_not_live_in_the_file_they_came_from(model_dir, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    trainer = Trainer(CONFIG, tmp_path, 1.0, seed=0)
    size = (tmp_path / "model.safetensors").stat().st_size
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes(size))
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert_same(weights(trainer), dict(reference.named_parameters()), 0.0)


def test_dropout_is_off(model_dir):
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    assert not any(module.training for module in trainer._model.modules())


def test_the_parity_gate_stays_closed_until_tokens_of_the_weights_in_use_come(model_dir):
    """A first step of stale tokens shows nothing; it must not open the gate for all others."""
    trainer = Trainer(LearnerConfig(warmup_steps=0), model_dir, 1.0, 0)
    masks = [[0, 1, 1, 1], [0, 0, 1, 1]]
    trainer.accumulate([make_group(0, masks, [1, 0], version=VERSION - 1)], VERSION)
    trainer.update()
    trainer.finish_step()
    before = weights(trainer)
    trainer.accumulate([make_group(1, masks, [1, 0], version=VERSION + 1)], VERSION + 1)
    with pytest.raises(RunFault) as caught:
        trainer.update()
    assert caught.value.name == "parity"
    assert_same(weights(trainer), before, 0.0)


def test_the_parity_gate_closes_before_anything_moves(model_dir):
    """The same groups, judged: their made-up log-probabilities are another model's."""
    trainer = Trainer(LearnerConfig(warmup_steps=0), model_dir, 1.0, 0)
    before = weights(trainer)
    trainer.accumulate(make_groups(), VERSION)
    with pytest.raises(RunFault) as caught:
        trainer.update()
    assert caught.value.name == "parity"
    assert_same(weights(trainer), before, 0.0)


def test_nothing_is_printed(model_dir, tmp_path, capfd):
    transformers_logging.enable_progress_bar()
    trainer = Trainer(CONFIG, model_dir, 1.0, seed=0)
    step(trainer, 0)
    trainer.save(tmp_path)
    trainer.load_optimizer(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.is_progress_bar_enabled()


def test_only_the_trainer_needs_transformers():
    program = (
        "import sys; import asyncrl_node.learner.attention, asyncrl_node.learner.logprobs; "
        "import asyncrl_node.learner.losses.base; sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
