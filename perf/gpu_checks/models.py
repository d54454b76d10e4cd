"""Models of random weights, and groups of rollouts for a learner."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncrl_node.core.layout import layout_weights
from asyncrl_node.core.memory import ModelShape
from asyncrl_node.messages import GroupKey, WeightEntry, WeightsManifest
from asyncrl_node.transport.weights import layout_hash

if TYPE_CHECKING:
    from asyncrl_node.core.rollout import TrajectoryGroup
    from asyncrl_node.engines.torch_model import ModelConfig

_SIZES = {
    "0.6B": (1024, 3072, 28, 16),
    "1.7B": (2048, 6144, 28, 16),
    "8B": (4096, 12288, 36, 32),
}
"""Hidden, intermediate, layers, heads of Qwen3; 8 heads of keys and values, of 128."""
_TOY = (64, 96, 2, 4)


def qwen3(size: str) -> ModelConfig:
    """Return the shape of a Qwen3 model, or of a "toy" one of its kind ("toy_untied")."""
    from asyncrl_node.engines.torch_model import ModelConfig

    is_toy = size not in _SIZES
    hidden, wide, layers, heads = _TOY if is_toy else _SIZES[size]
    return ModelConfig(
        model_type="qwen3",
        vocab_size=200 if is_toy else 151_936,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2 if is_toy else 8,
        head_dim=32 if is_toy else 128,
        tie_word_embeddings=size not in ("8B", "toy_untied"),
        rope_theta=1e6,
    )


def entries_of(config: ModelConfig, dtype: str, itemsize: int) -> tuple[WeightEntry, ...]:
    """Lay a model out."""
    from asyncrl_node.engines.torch_model import parameter_shapes

    shapes = parameter_shapes(config).items()
    return layout_weights([(n, dtype, s, itemsize * math.prod(s)) for n, s in shapes])[0]


def manifest_of(entries: tuple[WeightEntry, ...]) -> WeightsManifest:
    """Describe the buffer of a whole model."""
    _, num_bytes = layout_weights([(e.name, e.dtype, e.shape, e.num_bytes) for e in entries])
    return WeightsManifest(num_bytes, entries, layout_hash(entries))


def flat_manifest(num_bytes: int) -> WeightsManifest:
    """Describe a buffer of one parameter."""
    return manifest_of(layout_weights([("flat", "uint8", (num_bytes,), num_bytes)])[0])


def write_random_model(size: str, folder: Path, device: str) -> Path:
    """Save a Qwen3 model with random weights, in Hugging Face form and bf16, once."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    target = folder / size
    if not target.exists():
        shape = qwen3(size)
        config = Qwen3Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            tie_word_embeddings=shape.tie_word_embeddings,
        )
        torch.manual_seed(0)
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
        model.bfloat16().save_pretrained(target)
    return target


def memory_shape(model_dir: Path) -> ModelShape:
    """Read a model's sizes as the planner does."""
    return ModelShape.from_config(json.loads((model_dir / "config.json").read_bytes()))


def make_groups(
    num_groups: int, length: int, vocabulary: int, logprob: float
) -> list[TrajectoryGroup]:
    """Make groups of 8 rollouts of `length` tokens, the last three quarters sampled."""
    from asyncrl_node.engines.base import Completion
    from asyncrl_node.sampler.rollouts import Rollout, build_group

    dice = np.random.default_rng(0)
    groups = []
    for number in range(num_groups):
        rollouts = []
        for place in range(8):
            rollout = Rollout()
            num_sampled = 3 * length // 4
            rollout.add_prompt(dice.integers(vocabulary, size=length - num_sampled).tolist())
            tokens = dice.integers(vocabulary, size=num_sampled).tolist()
            rollout.add_completion(
                Completion(tokens, [logprob] * num_sampled, [0] * num_sampled, "length")
            )
            rollout.reward = float(place % 2)
            rollouts.append(rollout)
        groups.append(build_group(GroupKey(number, 0), number, 0, rollouts))
    return groups


def document_lengths(num_tokens: int, count: int, longest: int = 8192) -> list[int]:
    """Draw log-uniform lengths in longest / 128 .. longest with this sum, longest first, and one
    of 1 token."""
    dice = random.Random(0)
    shortest = max(2, longest // 128)
    lengths = [
        int(math.exp(dice.uniform(math.log(shortest), math.log(longest)))) for _ in range(count)
    ]
    scale = (num_tokens - 1) / sum(lengths)
    lengths = [max(2, int(length * scale)) for length in lengths]
    lengths[0] += num_tokens - 1 - sum(lengths)
    return [*sorted(lengths, reverse=True), 1]


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Where each document begins."""
    return [sum(lengths[:place]) for place in range(len(lengths))]
