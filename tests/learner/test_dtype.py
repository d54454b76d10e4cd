"""The trainer in bfloat16: the bits it computes with are those that it publishes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl_node.config import LearnerConfig
from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.errors import RunFault
from asyncrl_node.learner.trainer import Trainer
from asyncrl_node.learner.weights import fill_flat
from asyncrl_node.plan import WARM_MODEL

CONFIG = LearnerConfig(warmup_steps=0)
TOKENS = [3, 14, 15, 9, 2, 6, 5, 3, 5, 8]
VERSION = 4


def make_trainer(config: LearnerConfig = CONFIG, dtype: str = "bfloat16") -> Trainer:
    return Trainer(config, WARM_MODEL, 1.0, 0, dtype=dtype)  # type: ignore[arg-type]


def nudge(trainer: Trainer, share: float = 1e-4) -> None:
    """Move every master off the numbers that bfloat16 has."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, master in trainer.named_weights():
            master.mul_(1 + share * torch.randn(master.shape, generator=generator))


def nearest_even(master: torch.Tensor) -> np.ndarray:
    """The upper 16 bits of float32 numbers, rounded: ties to the even one. By integers alone."""
    bits = master.numpy().view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def published(trainer: Trainer) -> dict[str, torch.Tensor]:
    entries, num_bytes = trainer.manifest()
    buffer = bytearray(num_bytes)
    trainer.copy_weights_into(memoryview(buffer))
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    return {
        e.name: flat[e.offset : e.offset + e.num_bytes].view(torch.bfloat16).view(e.shape)
        for e in entries
    }


def test_published_bits_are_the_masters_rounded_to_nearest_even() -> None:
    trainer = make_trainer()
    nudge(trainer)
    weights = trainer.named_weights()
    ties = weights[0][1].view(-1)[:2]
    ties.copy_(torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8]))  # half way: down, and up
    entries, num_bytes = trainer.manifest()
    assert {entry.dtype for entry in entries} == {"bfloat16"}
    host = published(trainer)
    device = torch.zeros(num_bytes, dtype=torch.uint8)  # as learner/weights.py fills a GPU's area
    fill_flat(device, entries, [tensor for _, tensor in weights])
    for entry, (name, master) in zip(entries, weights, strict=True):
        assert (entry.name, entry.num_bytes) == (name, 2 * master.numel())
        expected = nearest_even(master)
        assert np.array_equal(host[name].view(torch.uint16).numpy(), expected), name
        area = device[entry.offset : entry.offset + entry.num_bytes].view(torch.uint16)
        assert np.array_equal(area.view(entry.shape).numpy(), expected), name
    assert host[weights[0][0]].view(-1)[:2].tolist() == [1.0, 1.015625]


def test_a_pass_sees_nothing_but_the_published_bits() -> None:
    trainer, single = make_trainer(), make_trainer(dtype="float32")
    nudge(trainer)
    nudge(single)
    scores, exact = trainer.score(TOKENS), single.score(TOKENS)
    bits = published(trainer)
    for each in (trainer, single):
        with torch.no_grad():
            for name, master in each.named_weights():
                master.copy_(bits[name])
    assert trainer.score(TOKENS) == scores
    assert single.score(TOKENS) != exact, "or this shows nothing"


def test_scores_are_those_of_the_same_model_in_bfloat16() -> None:
    """Not those in float32, which are another model by the gate's own measure."""
    trainer = make_trainer()
    model = AutoModelForCausalLM.from_pretrained(WARM_MODEL, dtype=torch.bfloat16)
    with torch.no_grad():
        hidden = model.model(torch.tensor([TOKENS])).last_hidden_state[0, :-1]
        logprobs = (hidden.float() @ model.lm_head.weight.float().T).log_softmax(1)
    expected = logprobs.gather(1, torch.tensor(TOKENS)[1:, None])[:, 0]
    scores = torch.tensor(trainer.score(TOKENS))
    exact = torch.tensor(make_trainer(dtype="float32").score(TOKENS))
    assert (scores - expected).abs().max() < 1e-3
    assert (scores - exact).abs().max() > 1e-2


def make_group(trainer: Trainer, shift: float = 0.0, worst: float = 0.0) -> TrajectoryGroup:
    """Two rollouts of TOKENS, scored by the trainer, all tokens `shift` off and one by `worst`."""
    logprobs = np.array([0.0, *trainer.score(TOKENS)] * 2, np.float32)
    mask = np.array([False, *[True] * (len(TOKENS) - 1)] * 2)
    logprobs[mask] += shift
    logprobs[5] += worst
    return TrajectoryGroup(
        group_id=7,
        problem=1,
        epoch=0,
        tokens=np.array(TOKENS * 2, np.int32),
        loss_mask=mask,
        sampler_logprobs=logprobs,
        policy_versions=np.where(mask, VERSION, -1).astype(np.int32),
        on_older_kv=np.zeros(len(mask), bool),
        rollout_starts=np.array([0, len(TOKENS), 2 * len(TOKENS)]),
        rewards=np.array([0, 1], np.float32),
    )


def gradient(trainer: Trainer) -> torch.Tensor:
    """The accumulated gradient, all parameters."""
    second = make_group(trainer)
    second.tokens[len(TOKENS) :] = second.tokens[len(TOKENS) :][::-1]
    trainer.accumulate([second], VERSION + 1)
    grads = [parameter.grad for parameter in trainer._parameters.values()]
    assert {grad.dtype for grad in grads} == {torch.float32}
    return torch.cat([grad.flatten() for grad in grads])


def test_gradients_reach_the_float32_masters() -> None:
    ours, exact = gradient(make_trainer()), gradient(make_trainer(dtype="float32"))
    assert torch.cosine_similarity(ours, exact, dim=0) > 0.99
    assert ours.norm() / exact.norm() == pytest.approx(1, abs=0.05)


def test_updates_too_small_for_bfloat16_add_up_in_the_masters() -> None:
    config = LearnerConfig(warmup_steps=0, learning_rate=2e-6, parity_limit=None)
    trainer = make_trainer(msgspec.structs.replace(config, parity_mean_limit=None))
    before = {name: bits.clone() for name, bits in published(trainer).items()}
    masters = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    group = make_group(trainer)
    group.tokens[len(TOKENS) :] = group.tokens[len(TOKENS) :][::-1]

    def moved_bits() -> float:
        after = published(trainer)
        total = sum(bits.numel() for bits in before.values())
        return sum(int((after[n] != before[n]).sum()) for n in before) / total

    shares = []
    for _ in range(12):
        trainer.accumulate([group], VERSION)
        trainer.update()
        trainer.finish_step()
        shares.append(moved_bits())
    moved = [bool((t != masters[n]).any()) for n, t in trainer.named_weights()]
    assert all(moved)
    assert 0 < shares[0] < 0.1
    assert shares[-1] > 4 * shares[0]


def test_a_checkpoint_holds_the_masters_and_loads_as_the_published_bits(tmp_path: Path) -> None:
    trainer = make_trainer()
    nudge(trainer)
    trainer.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, master in trainer.named_weights():
        assert saved[name].dtype == torch.float32
        assert torch.equal(saved[name], master)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    bits = published(trainer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, bits[name]), name


@pytest.mark.parametrize(
    ("dtype", "shift", "worst", "key", "limit"),
    [
        ("bfloat16", 0.0, 30.0, "parity_limit", "1"),
        ("bfloat16", 0.5, 0.0, "parity_mean_limit", "0.03"),
        ("bfloat16", 0.02, 0.3, None, None),
        ("float32", 0.0, 1e-3, "parity_limit", "5e-05"),
        ("float32", 1e-6, 3e-5, None, None),
    ],
)
def test_the_gate_has_the_limits_of_the_dtype(
    dtype: str, shift: float, worst: float, key: str | None, limit: str | None
) -> None:
    trainer = make_trainer(dtype=dtype)
    before = [tensor.clone() for _, tensor in trainer.named_weights()]
    trainer.accumulate([make_group(trainer, shift, worst)], VERSION)
    if key is None:
        trainer.update()
        return
    with pytest.raises(RunFault, match=rf"limit of the .* is {limit}, and learner\.{key} raises"):
        trainer.update()
    after = [tensor for _, tensor in trainer.named_weights()]
    assert all(map(torch.equal, before, after)), "it refuses before anything has moved"
    off = {"parity_limit": None, "parity_mean_limit": None}
    willing = make_trainer(msgspec.structs.replace(CONFIG, **off), dtype)
    willing.accumulate([make_group(willing, shift, worst)], VERSION)
    willing.update()
