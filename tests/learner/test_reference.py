"""KL to a frozen reference model, as the trainer runs it."""

from __future__ import annotations

import shutil

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl_node.errors import RunFault
from asyncrl_node.learner.losses.regularizers import reference_kl
from asyncrl_node.learner.trainer import Trainer
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
ESTIMATOR = pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])


@pytest.fixture
def moved_dir(model_dir, tmp_path):
    """The same model after somebody else has trained it a little."""
    folder = tmp_path / "moved"
    shutil.copytree(model_dir, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for tensor in tensors.values():
        tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config_of(**settings):
    return msgspec.structs.replace(CONFIG, micro_batch_tokens=40, **settings)


def scores_by_hand(folder, group, temperature):
    """The model and the log-probability of each loss token, one rollout at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    scores = []
    for start, end in zip(group.rollout_starts[:-1], group.rollout_starts[1:], strict=True):
        tokens = torch.tensor(group.tokens[start:end].astype(np.int64))
        log_softmax = (model(tokens[None]).logits[0] / temperature).log_softmax(1)
        places = torch.tensor(np.flatnonzero(group.loss_mask[start:end]))
        scores.append(log_softmax[places - 1, tokens[places]])
    return model, torch.cat(scores)


@ESTIMATOR
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_a_constant_group_is_that_of_its_kl_alone(
    model_dir, moved_dir, estimator, weighted
):
    """Its advantages are zero, so all that moves the policy is the pull to the reference."""
    config = config_of(
        kl_coefficient=0.4,
        kl_estimator=estimator,
        kl_weighted=weighted,
        reference_model=str(moved_dir),
    )
    group = make_group(1, [[0, 1, 1, 0, 1], [0, 0, 1], [0] * 4 + [1] * 6], [2, 2, 2])
    trainer = Trainer(config, model_dir, 0.8, seed=0)
    trainer.accumulate([group], VERSION)
    model, new = scores_by_hand(model_dir, group, 0.8)
    _, reference = scores_by_hand(moved_dir, group, 0.8)
    kl = reference_kl(new, reference.detach(), estimator)
    ratios = (new - torch.tensor(group.sampler_logprobs[group.loss_mask])).exp()
    torch.autograd.backward(0.4 * (kl * ratios if weighted else kl).mean())
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert max(grad.abs().max() for grad in expected.values()) > 1e-3
    assert_same(gradients(trainer), expected, 2e-5)
    trainer.update()
    measured = trainer.finish_step()["kl/reference_mean"]
    assert measured == pytest.approx(float(kl.detach().mean()), abs=1e-5)


def test_the_reference_stays_while_the_policy_moves_away_and_is_pulled_back(model_dir):
    """Empty: the weights of the start. The same data with and without the pull."""
    groups = make_groups(4)
    distances = {}
    for coefficient in (1e-9, 5.0):
        config = config_of(kl_coefficient=coefficient, learning_rate=3e-3)
        trainer = Trainer(config, model_dir, 1.0, seed=0)
        frozen = [p.clone() for p in trainer._reference.model.parameters()]
        distances[coefficient] = []
        for _ in range(8):
            trainer.accumulate(groups, VERSION)
            trainer.update()
            distances[coefficient].append(trainer.finish_step()["kl/reference_mean"])
        for now, before in zip(trainer._reference.model.parameters(), frozen, strict=True):
            assert torch.equal(now, before)
            assert now.grad is None
    assert distances[1e-9][0] == distances[5.0][0] == pytest.approx(0, abs=1e-6)
    assert 0 < distances[5.0][-1] < 0.7 * distances[1e-9][-1]


def test_no_packing_changes_the_gradient(model_dir, moved_dir):
    grads = []
    for micro_batch_tokens in (1, 30, 8192):
        config = config_of(kl_coefficient=0.4, reference_model=str(moved_dir))
        config = msgspec.structs.replace(config, micro_batch_tokens=micro_batch_tokens)
        trainer = Trainer(config, model_dir, 1.0, seed=0)
        trainer.accumulate(make_groups(4), VERSION)
        grads.append(gradients(trainer))
    for other in grads[1:]:
        assert_same(other, grads[0], 1e-6)


def test_a_trained_folder_still_pulls_to_the_first_one(model_dir, tmp_path):
    """What a resumed run does: it goes on from a checkpoint, and names the first weights."""
    config = config_of(kl_coefficient=0.1, reference_model=str(model_dir), learning_rate=3e-3)
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    for _ in range(3):
        trainer.accumulate(make_groups(4), VERSION)
        trainer.update()
        trainer.finish_step()
    trainer.save(tmp_path / "step-3")
    resumed = Trainer(config, tmp_path / "step-3", 1.0, seed=0)
    rows = []
    for each in (trainer, resumed):
        each.accumulate(make_groups(4), VERSION)
        each.update()
        rows.append(each.finish_step()["kl/reference_mean"])
    assert rows[0] == rows[1] > 1e-4


def test_without_a_coefficient_there_is_no_reference(model_dir):
    trainer = Trainer(config_of(reference_model="/no/such"), model_dir, 1.0, seed=0)
    trainer.accumulate(make_groups(2), VERSION)
    trainer.update()
    assert "kl/reference_mean" not in trainer.finish_step()


def test_a_reference_with_other_tokens_is_refused(model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.resize_token_embeddings(31)
    model.save_pretrained(tmp_path)
    config = config_of(kl_coefficient=0.1, reference_model=str(tmp_path))
    with pytest.raises(
        RunFault, match=r"bad_model: .*a reference with 31 tokens for a model with 29"
    ):
        Trainer(config, model_dir, 1.0, seed=0)


def test_a_reference_that_is_broken_stops_the_step_by_name(model_dir, moved_dir):
    tensors = load_file(moved_dir / "model.safetensors")
    config = config_of(kl_coefficient=0.1, reference_model=str(moved_dir))
    tensors["model.embed_tokens.weight"][3, 0] = float("nan")
    save_file(tensors, moved_dir / "model.safetensors", metadata={"format": "pt"})
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    before = weights(trainer)
    with pytest.raises(
        RunFault, match=r"non_finite: the reference model .*this update changed nothing"
    ):
        trainer.accumulate(make_groups(2), VERSION)
    assert_same(weights(trainer), before, 0.0)
