"""The same tensors through TRL's GRPOTrainer._compute_loss and RLOOTrainer's advantages: numbers.

TRL is not a dependency. Of TRL's loss only the function runs, on a stand-in for its trainer
that answers log-probabilities. Its advantages are part of sampling, so there its real trainers
sample a few tokens of the demo's model and are given scripted rewards.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import pstdev, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import asyncrl_node
from asyncrl_node.config import LearnerConfig
from asyncrl_node.core.advantages import group_advantages
from asyncrl_node.learner.losses.aggregation import token_weights
from asyncrl_node.learner.losses.registry import load_loss
from asyncrl_node.learner.losses.regularizers import regularise
from asyncrl_node.learner.losses.settings import LossSettings
from asyncrl_node.loss_rules import effective, loss_settings
from tests.learner.oracles import random_case
from tests.optional_package import need_trl

need_trl()

HORIZON = 9
LENGTHS = [[4, 1, 9, 6], [3, 0, 9, 0, 2], [1], [5, 5, 5]]


@pytest.fixture(scope="module")
def compute_loss():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOTrainer

        return GRPOTrainer._compute_loss


class OneProcess:
    """TRL's accelerator, alone."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values):
        return values

    def reduce(self, values, reduction):
        return values


def trainer(logprobs, entropies, **settings):
    """What _compute_loss reads of a GRPOTrainer."""
    names = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, entropies, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=HORIZON,
        accelerator=OneProcess(),
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=0.0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    for name in ("delta", "use_bias_correction_kl"):
        setattr(names.args, name, settings.pop(name, getattr(names.args, name)))
    names.__dict__.update(settings)
    return names


def padded(values, lengths, fill=0.0):
    """[N] -> [R, T]"""
    matrix = torch.full((len(lengths), max(1, *lengths, 1)), fill, dtype=torch.float64)
    for row, part in enumerate(torch.split(torch.as_tensor(values), lengths)):
        matrix[row, : len(part)] = part
    return matrix


def theirs(compute_loss, case, old, entropies=None, reference=None, weights=None, **settings):
    """TRL's loss, and its gradient by each token's log-probability, [N]."""
    lengths = case.lengths
    logprobs = padded(case.new, lengths).requires_grad_()
    mask = padded(np.ones(len(case.new)), lengths)
    entropies = padded(np.ones(len(case.new)) if entropies is None else entropies, lengths)
    firsts = np.cumsum([0, *lengths])[:-1]
    advantages = [case.advantages[f] if n else 0.0 for f, n in zip(firsts, lengths, strict=True)]
    inputs = {
        "prompt_ids": torch.zeros(len(lengths), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(lengths), 1, dtype=torch.int64),
        "completion_ids": mask.long(),
        "completion_mask": mask,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "old_per_token_logps": padded(old, lengths),
        "num_items_in_batch": mask.sum(),
    }
    if reference is not None:
        inputs["ref_per_token_logps"] = padded(reference, lengths)
    if weights is not None:
        inputs["importance_sampling_ratio"] = padded(weights, lengths)
    stand_in = trainer(logprobs, entropies, **settings)
    loss = compute_loss(stand_in, stand_in.model, inputs)
    (grad,) = torch.autograd.grad(loss, logprobs)
    return float(loss.detach()), grad[mask.bool()].numpy()


def ours(name, case, chosen, aggregation, entropies=None, **terms):
    tokens = case.tensors()
    if entropies is not None:
        tokens = replace(tokens, entropies=torch.tensor(entropies))
    result = regularise(load_loss(name)(tokens, chosen), tokens, **terms)
    per_rollout = token_weights(aggregation, case.lengths, HORIZON)
    weights = torch.tensor(np.repeat(per_rollout, case.lengths))
    loss = (result.losses * weights).sum()
    (grad,) = torch.autograd.grad(loss, tokens.logprobs)
    return float(loss.detach()), grad.numpy()


def assert_same(mine, other):
    assert mine[0] == pytest.approx(other[0], rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(mine[1], other[1], rtol=1e-10, atol=1e-12)


@pytest.fixture(params=range(8))
def case(request):
    return random_case(LENGTHS[request.param % len(LENGTHS)], request.param, spread=0.5)


@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [
        ("grpo", "sequence_mean"),
        ("bnpo", "token_mean"),
        ("dapo", "token_mean"),
        ("dr_grpo", "constant"),
    ],
)
def test_ppo_in_every_aggregation(compute_loss, case, loss_type, aggregation):
    chosen = LossSettings(clip_low=0.2, clip_high=0.28)
    settings = {"loss_type": loss_type, "epsilon_high": 0.28}
    assert_same(
        ours("ppo", case, chosen, aggregation), theirs(compute_loss, case, case.old, **settings)
    )


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_recipes_are_their_losses_of_the_same_name(compute_loss, case, name):
    learner = LearnerConfig(loss=name)
    aggregation, chosen = effective(learner).aggregation, loss_settings(learner)
    settings = {"loss_type": name, "epsilon_high": 0.28 if name == "dapo" else 0.2}
    assert_same(
        ours(name, case, chosen, aggregation), theirs(compute_loss, case, case.old, **settings)
    )


@pytest.mark.parametrize("dual_clip", [1.5, 3.0])
def test_dual_clip_is_their_delta(compute_loss, case, dual_clip):
    chosen = LossSettings(dual_clip=dual_clip)
    assert_same(
        ours("ppo", case, chosen, "token_mean"),
        theirs(compute_loss, case, case.old, loss_type="dapo", delta=dual_clip),
    )


@pytest.mark.parametrize("cap", [1.2, 5.0])
def test_cispo(compute_loss, case, cap):
    chosen = LossSettings(ratio_cap=cap)
    assert_same(
        ours("cispo", case, chosen, "token_mean"),
        theirs(compute_loss, case, case.old, loss_type="cispo", epsilon_high=cap),
    )


@pytest.mark.parametrize("clips", [(0.2, 0.2), (3e-4, 4e-4)])
@pytest.mark.parametrize(
    ("loss_type", "aggregation"), [("grpo", "sequence_mean"), ("dr_grpo", "constant")]
)
def test_gspo(compute_loss, case, clips, loss_type, aggregation):
    chosen = LossSettings(clip_low=clips[0], clip_high=clips[1])
    settings = {"loss_type": loss_type, "epsilon_low": clips[0], "epsilon_high": clips[1]}
    assert_same(
        ours("gspo", case, chosen, aggregation),
        theirs(compute_loss, case, case.old, importance_sampling_level="sequence", **settings),
    )


@pytest.mark.parametrize(
    ("correction", "low", "high"), [("truncate", 0.0, 1.2), ("mask", 0.8, 1.2), ("off", 0, 9)]
)
def test_decoupled_ppo_is_their_correction_for_vllm(compute_loss, case, correction, low, high):
    """Their old policy is our proximal one; TIS truncates the weight, IcePop masks it.

    In TRL that happens while it samples, out of reach of _compute_loss: the weights are bounded
    here, by hand, and handed to it. So what is compared is where and how the weight multiplies the
    loss, not the bounding; tests/learner/oracles.py does that.
    """
    chosen = LossSettings(weight_correction=correction, weight_low=low, weight_high=high)
    weights = np.exp(case.proximal - case.old)
    if correction == "truncate":
        weights = np.clip(weights, low, high)
    if correction == "mask":
        weights = np.where((weights < low) | (weights > high), 0.0, weights)
    assert_same(
        ours("decoupled_ppo", case, chosen, "token_mean"),
        theirs(compute_loss, case, case.proximal, weights=weights, loss_type="dapo", use_vllm=True),
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_kl_k3(compute_loss, case, weighted):
    terms = {"kl_coefficient": 0.3, "kl_kind": "k3", "kl_weighted": weighted}
    settings = {"beta": 0.3, "use_bias_correction_kl": weighted}
    assert_same(
        ours("ppo", case, LossSettings(), "sequence_mean", **terms),
        theirs(compute_loss, case, case.old, reference=case.proximal, **settings),
    )


def test_entropy_bonus(compute_loss, case):
    entropies = np.linspace(0.1, 2.0, len(case.new))
    assert_same(
        ours("ppo", case, LossSettings(), "token_mean", entropies, entropy_coefficient=0.05),
        theirs(
            compute_loss,
            case,
            case.old,
            entropies=entropies,
            loss_type="dapo",
            _entropy_bonus_enabled=True,
            entropy_coef=0.05,
        ),
    )


# -- advantages ----------------------------------------------------------------------------------

GROUPS = [[1.0, 0.0, 0.0, 3.0], [0.5, 0.5, 0.5, 0.5], [-2.0, 0.25, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
MODEL = Path(asyncrl_node.__file__).parent / "tasks" / "sort_digits_warm"


def trl_advantages(folder, trainer_name, **settings):
    """Let a TRL trainer sample 4 completions for each of 4 prompts and reward them as scripted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl
        from datasets import Dataset

        prompts = [{"prompt": "5391>"}] * 16
        config = getattr(trl, trainer_name.replace("Trainer", "Config"))(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=2,
            report_to=[],
            **settings,
        )
        made = getattr(trl, trainer_name)(
            model=str(MODEL),
            reward_funcs=lambda completions, **_: [r for group in GROUPS for r in group],
            args=config,
            train_dataset=Dataset.from_list(prompts),
        )
        made.model.train()
        sampled = made._generate_and_score_completions(prompts)
    return sampled["advantages"].reshape(4, 4).tolist()


@pytest.mark.parametrize(
    ("kind", "trainer_name", "settings"),
    [
        ("mean", "GRPOTrainer", {"scale_rewards": "none"}),
        ("leave_one_out", "RLOOTrainer", {}),
    ],
)
def test_advantages(tmp_path, kind, trainer_name, settings):
    expected = trl_advantages(tmp_path, trainer_name, **settings)
    for rewards, advantages in zip(GROUPS, expected, strict=True):
        assert group_advantages(rewards, kind) == pytest.approx(advantages, rel=1e-6, abs=1e-6)


def test_mean_std_but_for_the_divisor_of_the_variance(tmp_path):
    """They divide the variance by R - 1, we by R."""
    expected = trl_advantages(tmp_path, "GRPOTrainer", scale_rewards="group")
    for rewards, advantages in zip(GROUPS, expected, strict=True):
        factor = (stdev(rewards) + 1e-4) / (pstdev(rewards) + 1e-4)
        rescaled = [advantage * factor for advantage in advantages]
        assert group_advantages(rewards, "mean_std") == pytest.approx(rescaled, rel=1e-5, abs=1e-6)
