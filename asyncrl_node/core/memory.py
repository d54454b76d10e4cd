"""What a model takes on a card, byte by byte: the learner's side and the sampler's.

    config.json -> ModelShape -> learner_parts, sampler_parts

Everything here is arithmetic, an estimate for dense decoders with gated feed-forwards; nothing of
it was measured. GB is 1e9 bytes.

Words   P parameters, d hidden, h heads, kv key-value heads, hd head_dim, V vocabulary.
        T tokens of one forward pass of the learner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from asyncrl_node.errors import ConfigError

Optimizer = Literal["adamw", "adamw_bf16_sr", "adamw_cpu"]

STATE_BYTES: dict[Optimizer, int] = {"adamw": 16, "adamw_bf16_sr": 8, "adamw_cpu": 4}
"""GPU bytes per parameter, without the published copy.

adamw          fp32 parameter 4, fp32 gradient 4, two fp32 moments 8
adamw_bf16_sr  bf16 parameter 2 (rounded stochastically), bf16 gradient 2, two bf16 moments 4
adamw_cpu      bf16 parameter 2, bf16 gradient 2; the rest is in host memory
"""
HOST_BYTES: dict[Optimizer, int] = {"adamw": 0, "adamw_bf16_sr": 0, "adamw_cpu": 16}
"""Host bytes per parameter: fp32 parameter 4, gradient 4, moments 8."""
Build = Literal["planned", "present", "present_float32"]
"""Which program the bytes are of.

planned          passes in bf16, each layer recomputed for its backward pass; bf16 published and
                 sampled
present          what is built: one learner rank, nothing recomputed, the weights rounded to bf16
                 for a pass all at once; bf16 published and sampled
present_float32  the same where `dtype` is float32: nothing is rounded
"""
ITEM_BYTES: dict[Build, int] = {"planned": 2, "present": 2, "present_float32": 4}
"""Of a published weight, an activation, a key or a value."""

USABLE_SHARE = 0.93
"""Of a card's memory; the rest is for fragmentation and what the forecast does not know."""
LEARNER_FIXED_BYTES = 4_000_000_000
"""CUDA context, NCCL buffers, kernels' workspaces."""
SAMPLER_FIXED_BYTES = 3_000_000_000
"""CUDA context, graphs, activations of a sampler."""
HEAD_CHUNK_TOKENS = 2048
MIN_KV_TOKENS = 150_000
"""With less room for keys and values, a sampler decodes too few rollouts at once to be worth it."""
MAX_SEARCHED_GPUS = 64
"""How far `more GPUs` is searched as a way out."""


class ModelShape(NamedTuple):
    """The sizes of a dense decoder that memory and speed depend on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    tied: bool
    """The head is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    reference: int = 0
    """Parameters of a frozen reference model that the learner scores with, beside it."""

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelShape:
        """Read a Hugging Face config.json; a `text_config` inside it is the one that counts.

        Raises: ConfigError for a key that is missing, or a kind of model that is not counted here.
        """
        nested = config.get("text_config")
        text = nested if isinstance(nested, Mapping) else config
        _refuse_other_kinds(text)
        heads = _integer(text, "num_attention_heads")
        hidden = _integer(text, "hidden_size")
        kind = str(text.get("model_type", ""))
        biased = bool(text.get("attention_bias", False))
        return cls(
            layers=_integer(text, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=_integer(text, "num_key_value_heads", heads),
            head_dim=_integer(text, "head_dim", hidden // heads),
            ff=_integer(text, "intermediate_size"),
            vocab=_integer(text, "vocab_size"),
            tied=bool(text.get("tie_word_embeddings", kind.startswith("gemma"))),
            qkv_bias=biased or kind == "qwen2",
            output_bias=biased,
            qk_norm=kind == "qwen3",
        )

    @property
    def layer(self) -> int:
        """Parameters of one layer: 2 d h hd + 2 d kv hd + 3 d ff, norms and biases."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = 2 * self.hidden * (query + key) + 3 * self.hidden * self.ff
        biases = self.qkv_bias * (query + 2 * key) + self.output_bias * self.hidden
        return matrices + biases + 2 * self.hidden + self.qk_norm * 2 * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding."""
        return self.vocab * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the head; 0 where it is the embedding."""
        return 0 if self.tied else self.embedding

    @property
    def parameters(self) -> int:
        """P, all of them."""
        return self.layers * self.layer + self.embedding + self.head + self.hidden


def _integer(config: Mapping[str, object], key: str, default: int = 0) -> int:
    value = config.get(key) or default
    if not isinstance(value, int) or value < 1:
        rule = f"its config.json must give {key}, a whole number above 0"
        raise ConfigError("model", rule, config.get(key, "nothing"))
    return value


def _refuse_other_kinds(config: Mapping[str, object]) -> None:
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank"):
        if config.get(key):
            rule = "must be a dense decoder with plain attention: placement counts no other kind"
            raise ConfigError("model", rule, f"{key} {config[key]}")


# -- the learner ---------------------------------------------------------------------------------


class LearnerBytes(NamedTuple):
    """Bytes on each GPU of the learner, by what they are for."""

    state: float
    """Parameters, gradients, moments."""
    published: float
    """The copy that samplers read."""
    reference: float
    """A frozen model."""
    gathered: float
    """Weights as a pass has them: layers gathered and reduced between ranks, or all rounded."""
    activations: float
    logits: float
    fixed: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def learner_parts(
    shape: ModelShape,
    ranks: int,
    micro_batch_tokens: int,
    optimizer: Optimizer = "adamw",
    build: Build = "planned",
) -> LearnerBytes:
    """Forecast the bytes on each of `ranks` GPUs that share one learner (FSDP2).

    (16 + 2) P / ranks      parameters, gradients, moments, published copy; 8 + 2 or 4 + 2 for the
                            other optimizers
    + 2 / ranks of each parameter of a frozen reference model, if there is one
    + 4 layers, and twice the embedding and head, in bf16     gathered and reduced (ranks > 1)
    + 2 layers T d          one bf16 input kept per layer: full activation checkpointing
    + 2.6 T (8 d + 3 ff + 2 (h + 2 kv) hd)      the layer that is being recomputed
    + 2.5 * 2048 V * 4      fp32 logits of one chunk of the head, with their gradient
    + 4 GB

    The present build keeps the last but two of every layer instead of recomputing it. In bf16 it
    has the weights a second time, rounded, and the gradient of the embedding.

    More ranks need less each, but for one case: where most parameters are a tied embedding, two
    ranks with adamw_cpu save less than gathering costs.
    """
    item = ITEM_BYTES[build]
    attention = 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer_values = 1.3 * (8 * shape.hidden + 3 * shape.ff + attention)
    if build == "planned":
        values = shape.layers * shape.hidden + layer_values
    else:
        values = shape.layers * layer_values
    rounded = shape.parameters + shape.embedding if build == "present" else 0
    gathered = 4 * shape.layer + 2 * (shape.embedding + shape.head) if ranks > 1 else 0
    return LearnerBytes(
        state=STATE_BYTES[optimizer] * shape.parameters / ranks,
        published=item * shape.parameters / ranks,
        reference=item * shape.reference / ranks,
        gathered=item * (rounded + gathered),
        activations=item * micro_batch_tokens * values,
        logits=2.5 * HEAD_CHUNK_TOKENS * shape.vocab * 4,
        fixed=LEARNER_FIXED_BYTES,
    )


def learner_bytes(
    shape: ModelShape,
    ranks: int,
    micro_batch_tokens: int,
    optimizer: Optimizer = "adamw",
    build: Build = "planned",
) -> float:
    """Sum `learner_parts`."""
    return learner_parts(shape, ranks, micro_batch_tokens, optimizer, build).total


def host_bytes(shape: ModelShape, optimizer: Optimizer) -> int:
    """Forecast the host memory that the optimizer of all learners together takes."""
    return HOST_BYTES[optimizer] * shape.parameters


def min_learner_ranks(
    shape: ModelShape,
    gpu_bytes: int,
    micro_batch_tokens: int,
    optimizer: Optimizer = "adamw",
    most: int = MAX_SEARCHED_GPUS,
) -> int | None:
    """The fewest GPUs that one learner fits on; None: not even on `most`."""
    limit = USABLE_SHARE * gpu_bytes
    fitting = (
        ranks
        for ranks in range(1, most + 1)
        if learner_bytes(shape, ranks, micro_batch_tokens, optimizer) <= limit
    )
    return next(fitting, None)


def fewer_tokens(
    shape: ModelShape,
    gpu_bytes: int,
    tokens: int,
    ranks: int,
    optimizer: Optimizer = "adamw",
    build: Build = "planned",
) -> int | None:
    """The greatest power of two below `tokens` whose pass fits on `ranks`; None below 1024."""
    tokens = 1 << (tokens - 1).bit_length() - 1
    while tokens >= 1024:
        if learner_bytes(shape, ranks, tokens, optimizer, build) <= USABLE_SHARE * gpu_bytes:
            return tokens
        tokens //= 2
    return None


# -- a sampler -----------------------------------------------------------------------------------


class SamplerBytes(NamedTuple):
    """Bytes on each GPU of a sampler, by what they are for."""

    weights: float
    reserve: float
    """Kept free to take new weights."""
    cache: float
    """Keys and values."""
    fixed: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def kv_bytes_per_token(shape: ModelShape, build: Build = "planned") -> int:
    """Bytes of the keys and values of one token, all layers; bf16: 2 * 2 * layers * kv * hd."""
    return 2 * ITEM_BYTES[build] * shape.layers * shape.kv_heads * shape.head_dim


def update_reserve_bytes(shape: ModelShape, build: Build = "planned") -> int:
    """Bytes a sampler keeps free to take new weights; bf16: 2 * max(layer, embedding) + 0.5 GB."""
    return 2 * ITEM_BYTES[build] * max(shape.layer, shape.embedding) + 500_000_000


def sampler_parts(
    shape: ModelShape, tensor_parallel: int, kv_tokens: int, build: Build = "planned"
) -> SamplerBytes:
    """Forecast the bytes on each GPU of one sampler that holds `kv_tokens` of keys and values.

    2 P / TP + 3 GB + update reserve + keys and values. The reserve is not divided: every rank
    takes full tensors. Key-value heads are copied where TP is more than there are.
    """
    share = 1 / min(tensor_parallel, shape.kv_heads)
    return SamplerBytes(
        weights=ITEM_BYTES[build] * shape.parameters / tensor_parallel,
        reserve=update_reserve_bytes(shape, build),
        cache=kv_tokens * kv_bytes_per_token(shape, build) * share,
        fixed=SAMPLER_FIXED_BYTES,
    )


def sampler_bytes(
    shape: ModelShape, tensor_parallel: int, kv_tokens: int, build: Build = "planned"
) -> float:
    """Sum `sampler_parts`."""
    return sampler_parts(shape, tensor_parallel, kv_tokens, build).total


def kv_tokens_of(
    shape: ModelShape, tensor_parallel: int, gpu_bytes: int, build: Build = "planned"
) -> int:
    """Tokens of keys and values that one sampler can hold; at least 0."""
    room = USABLE_SHARE * gpu_bytes - sampler_bytes(shape, tensor_parallel, 0, build)
    share = min(tensor_parallel, shape.kv_heads)
    return max(0, int(room * share / kv_bytes_per_token(shape, build)))
