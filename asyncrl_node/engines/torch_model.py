"""Dense Qwen3, Qwen2 and Llama for inference, over one flat buffer of Hugging Face parameters.

    learner's buffer --one memcpy--> flat bytes --views--> HF parameters --fused--> layers

HF parameters are views into the flat buffer. A fused matrix (query, key and value; gate and up) is
a view too where its parts lie back to back in the buffer, which is so in Hugging Face's own order;
otherwise it is a copy, made again after every load.

The network knows no cache: `forward` calls `attend(layer, qkv)` once per layer, and whoever calls
`forward` stores keys and values as it likes.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl_node.errors import ConfigError, RunFault
from asyncrl_node.head_logits import head_logits
from asyncrl_node.messages import WeightEntry

Attend = Callable[[int, Tensor], Tensor]
"""(layer, qkv [N, H + 2 KV, D] with queries and keys rotated) -> [N, H * D]."""

_NAMES_SHOWN = 20


class ModelConfig(msgspec.Struct, frozen=True):
    """The part of a Hugging Face config.json that shapes a dense decoder."""

    model_type: str
    """"qwen3", "qwen2" or "llama"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    rope_theta: float = 10000.0
    """Where older files keep it; `rope_parameters` wins."""
    rope_scaling: dict[str, Any] | None = None
    """Where older files keep the scaling; `rope_parameters` wins."""
    rope_parameters: dict[str, Any] | None = None

    @property
    def head_size(self) -> int:
        """Numbers per head, D."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope(self) -> dict[str, Any]:
        """The rotary settings of both generations of files, with "rope_type" and "rope_theta"."""
        found = self.rope_parameters or self.rope_scaling or {}
        kind = found.get("rope_type", found.get("type", "default"))
        return {"rope_theta": self.rope_theta} | found | {"rope_type": kind}


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read `config.json` in `model_dir`.

    Raises: ConfigError for a file that is missing or broken, or a model that this code cannot run.
    """
    path = model_dir / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=ModelConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError("model", f"needs a readable config.json: {error}", model_dir) from error
    _refuse_unsupported(config)
    return config


def _refuse_unsupported(config: ModelConfig) -> None:
    rules: list[tuple[str, object, bool]] = [
        ("model_type", config.model_type, config.model_type in ("qwen3", "qwen2", "llama")),
        ("hidden_act", config.hidden_act, config.hidden_act == "silu"),
        ("attention_bias", config.attention_bias, not config.attention_bias),
        ("mlp_bias", config.mlp_bias, not config.mlp_bias),
        ("use_sliding_window", config.use_sliding_window, not config.use_sliding_window),
        ("rope_type", config.rope["rope_type"], config.rope["rope_type"] in ("default", "llama3")),
    ]
    for key, value, supported in rules:
        if not supported:
            raise ConfigError("model", f"the torch engine cannot run this {key}", value)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """List every parameter by Hugging Face name, in Hugging Face's order."""
    hidden, wide, head = config.hidden_size, config.intermediate_size, config.head_size
    rows = {
        "q": config.num_attention_heads * head,
        "k": config.num_key_value_heads * head,
        "v": config.num_key_value_heads * head,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for part, num_rows in rows.items():
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (num_rows, hidden)
            if config.model_type == "qwen2":
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (num_rows,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, rows["q"])
        if config.model_type == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = (head,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (head,)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (wide, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (wide, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, wide)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotary pair, [D / 2] float32; "llama3" slows the long waves."""
    rope, head = config.rope, config.head_size
    exponents = torch.arange(0, head, 2, dtype=torch.int64).float() / head
    frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
    if rope["rope_type"] == "default":
        return frequencies
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = float(rope["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / float(rope["factor"]))


class Rope:
    """Cosines and sines of some positions, in the form that `rotate` needs."""

    def __init__(self, table: Tensor) -> None:
        """`table` [positions, 2, 1, D]: cosines, then sines with the first half negated."""
        self.table = table
        self._cos, self._sin = table.unbind(1)

    @classmethod
    def of_positions(
        cls, config: ModelConfig, num_positions: int, device: str, dtype: torch.dtype
    ) -> Rope:
        """Tabulate positions 0 .. num_positions - 1."""
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, rope_frequencies(config))
        cos, sin = angles.cos(), angles.sin()
        halves = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1)
        return cls(halves.unsqueeze(2).to(device, dtype))

    def at(self, positions: Tensor) -> Rope:
        """Pick positions, [N] int64."""
        return Rope(self.table.index_select(0, positions))

    def rotate(self, heads: Tensor, source: Tensor) -> None:
        """Write the rotation of `source` into `heads`; both [N, heads, D], or the same tensor.

        Number i turns with number i + D / 2: a roll brings the other one, the sign is in the sines.
        """
        half = source.shape[-1] // 2
        torch.addcmul(source * self._cos, source.roll(half, -1), self._sin, out=heads)


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer as the forward pass wants it; E hidden, H and KV heads of D, W wide."""

    norm_attention: Tensor
    """[E]"""
    qkv: Tensor
    """[(H + 2 KV) D, E]: query heads, then key heads, then value heads."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[H + KV, D]"""
    out_t: Tensor
    """[H D, E]"""
    norm_mlp: Tensor
    """[E]"""
    gate_up: Tensor
    """[2 W, E]"""
    down_t: Tensor
    """[W, E]"""


class FlatWeights:
    """The flat buffer, the parameters in it, and the copies that have to follow every load."""

    def __init__(
        self,
        entries: tuple[WeightEntry, ...],
        source: npt.NDArray[np.uint8],
        device: str,
        dtype: torch.dtype,
    ) -> None:
        """Make room for `source`, laid out by `entries`, already checked; nothing is copied yet.

        Tensors are given out as `dtype`.
        """
        self.entries = entries
        self.host = _memory_for(source)
        self._host_tensor = torch.from_numpy(self.host)
        self._flat = self._host_tensor.to(device)  # on a CPU: the same memory
        self._dtype = dtype
        self._by_name = {entry.name: entry for entry in entries}
        self._copies: list[tuple[Tensor, Tensor]] = []

    def load(self, source: memoryview) -> None:
        """Copy `source`, of the size laid out, in one go; then renew the copies."""
        np.copyto(self.host, np.frombuffer(source, np.uint8))
        if self._flat.device.type != "cpu":
            self._flat.copy_(self._host_tensor)
        for target, parameter in self._copies:
            target.copy_(parameter)

    def fused(self, *names: str) -> Tensor:
        """Stack parameters along their first dimension: a view if they lie so, else a copy."""
        parts = [self._by_name[name] for name in names]
        num_rows = sum(part.shape[0] for part in parts)
        shape = (num_rows, *parts[0].shape[1:])
        if self._are_adjacent(parts) and _torch_dtype(parts[0]) == self._dtype:
            return self._view(parts[0].offset, _end(parts[-1]), self._dtype).view(shape)
        stacked = torch.empty(shape, dtype=self._dtype, device=self._flat.device)
        targets = torch.split(stacked, [part.shape[0] for part in parts])
        self._copies += zip(targets, map(self._parameter, parts), strict=True)
        return stacked

    def repeated(self, *times_and_names: tuple[int, str]) -> Tensor:
        """Stack parameters [D], each so many times, into [sum of times, D]."""
        times = [count for count, _ in times_and_names]
        parts = [self._parameter(self._by_name[name]) for _, name in times_and_names]
        stacked = torch.empty(
            (sum(times), *parts[0].shape), dtype=self._dtype, device=self._flat.device
        )
        self._copies += zip(torch.split(stacked, times), parts, strict=True)
        return stacked

    def _parameter(self, entry: WeightEntry) -> Tensor:
        return self._view(entry.offset, _end(entry), _torch_dtype(entry)).view(entry.shape)

    def _view(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self._flat[start:end].view(dtype)

    @staticmethod
    def _are_adjacent(parts: list[WeightEntry]) -> bool:
        pairs = pairwise(parts)
        return all(_end(a) == b.offset and a.dtype == b.dtype for a, b in pairs)


class TorchModel:
    """The network. `forward` runs on N packed tokens, of whatever sequences and positions."""

    def __init__(self, config: ModelConfig, device: str, dtype: torch.dtype) -> None:
        self.config = config
        self._device = device
        self._dtype = dtype
        self._shapes = parameter_shapes(config)
        self._weights: FlatWeights | None = None
        self._layers: list[LayerWeights] = []
        self._embedding = self._head = self._norm = torch.empty(0)

    @property
    def flat_bytes(self) -> memoryview:
        """The flat buffer as it was last loaded, read-only; empty before the first load."""
        if self._weights is None:
            return memoryview(b"")
        return self._weights.host.data.toreadonly()

    @torch.inference_mode()
    def load(self, entries: tuple[WeightEntry, ...], source: memoryview) -> None:
        """Copy every parameter out of `source`; the layout is kept from load to load.

        Raises: RunFault "weights_mismatch", having changed nothing, if `entries` are not exactly
        this model's parameters or do not fit `source`.
        """
        held = self._weights
        if held is None or held.entries != entries or held.host.nbytes != source.nbytes:
            check_entries(self._shapes, entries, source.nbytes)
            there = np.frombuffer(source, np.uint8)
            held = FlatWeights(entries, there, self._device, self._dtype)
            self._bind(held)
        held.load(source)

    def free(self) -> None:
        """Let go of the weights."""
        self._weights, self._layers = None, []
        self._embedding = self._head = self._norm = torch.empty(0)

    def forward(self, tokens: Tensor, rope: Rope, attend: Attend, rows: Tensor | None) -> Tensor:
        """Return float32 logits [n, vocabulary] of the tokens picked by `rows`; all if None.

        tokens  [N] int64
        rope    the tables at the positions of the N tokens, or of one that all share
        rows    [n] int64, indices into the N tokens; keys and values are made for all N
        """
        eps, hidden_size = self.config.rms_norm_eps, (self.config.hidden_size,)
        num_kv, head = self.config.num_key_value_heads, self.config.head_size
        num_rotated = self.config.num_attention_heads + num_kv
        x = self._embedding.index_select(0, tokens)
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(x, hidden_size, layer.norm_attention, eps)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
            qkv = qkv.view(-1, num_rotated + num_kv, head)
            _norm_and_rotate(qkv[:, :num_rotated], layer.qk_norm, rope, eps)
            mixed = attend(index, qkv)
            if rows is not None and index == len(self._layers) - 1:
                mixed, x = mixed.index_select(0, rows), x.index_select(0, rows)
            x.addmm_(mixed, layer.out_t)
            normed = F.rms_norm(x, hidden_size, layer.norm_mlp, eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, 1)
            x.addmm_(F.silu(gate).mul_(up), layer.down_t)
        return head_logits(F.rms_norm(x, hidden_size, self._norm, eps), self._head)

    def _bind(self, weights: FlatWeights) -> None:
        self._weights = weights
        self._layers = [self._layer(weights, i) for i in range(self.config.num_hidden_layers)]
        self._embedding = weights.fused("model.embed_tokens.weight")
        self._norm = weights.fused("model.norm.weight")
        tied = self.config.tie_word_embeddings
        self._head = self._embedding if tied else weights.fused("lm_head.weight")

    def _layer(self, weights: FlatWeights, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        attention, kind = f"{prefix}self_attn.", self.config.model_type
        qkv = [f"{attention}{part}_proj" for part in "qkv"]
        num_heads, num_kv = self.config.num_attention_heads, self.config.num_key_value_heads
        q_norm, k_norm = f"{attention}q_norm.weight", f"{attention}k_norm.weight"
        return LayerWeights(
            norm_attention=weights.fused(f"{prefix}input_layernorm.weight"),
            qkv=weights.fused(*(f"{name}.weight" for name in qkv)),
            qkv_bias=weights.fused(*(f"{n}.bias" for n in qkv)) if kind == "qwen2" else None,
            qk_norm=weights.repeated((num_heads, q_norm), (num_kv, k_norm))
            if kind == "qwen3"
            else None,
            out_t=weights.fused(f"{attention}o_proj.weight").t(),
            norm_mlp=weights.fused(f"{prefix}post_attention_layernorm.weight"),
            gate_up=weights.fused(f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"),
            down_t=weights.fused(f"{prefix}mlp.down_proj.weight").t(),
        )


def _memory_for(source: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Allocate zeros where copies of `source` are quick to make.

    By numpy, which asks the kernel for huge pages as torch does not; and just behind the source's
    place in its page, for which glibc's memcpy takes its faster way: 400 MB in 28 ms instead of 37
    (perf/weights.py). Aligned to 64 bytes.
    """
    page, line = mmap.PAGESIZE, 64
    raw = np.zeros(source.nbytes + 2 * page, np.uint8)
    place = (source.ctypes.data % page // line + 1) * line
    start = -raw.ctypes.data % page + place
    return raw[start : start + source.nbytes]


def check_entries(
    shapes: dict[str, tuple[int, ...]], entries: tuple[WeightEntry, ...], num_bytes: int
) -> None:
    """Compare a layout with the parameters a model has.

    Raises: RunFault "weights_mismatch" that lists what is missing, left over or misshapen.
    """
    given = {entry.name: entry for entry in entries}
    counts = Counter(entry.name for entry in entries)
    common = [(given[name], shape) for name, shape in shapes.items() if name in given]
    faults = {
        "missing": [name for name in shapes if name not in given],
        "left over": [name for name in given if name not in shapes],
        "twice": [name for name, count in counts.items() if count > 1],
        "wrong shape": [e.name for e, shape in common if tuple(e.shape) != shape],
        "wrong layout": [e.name for e in entries if not _is_laid_out(e, num_bytes)],
    }
    story = "; ".join(f"{what}: {_shown(names)}" for what, names in faults.items() if names)
    if story:
        raise RunFault(
            "weights_mismatch",
            f"the learner's parameters are not this model's: {story}. "
            "Start sampler and learner from the same model folder",
        )


def _shown(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _is_laid_out(entry: WeightEntry, num_bytes: int) -> bool:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return False
    fits = entry.offset >= 0 and _end(entry) <= num_bytes and entry.offset % 256 == 0
    return fits and entry.num_bytes == math.prod(entry.shape) * dtype.itemsize


def _torch_dtype(entry: WeightEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _end(entry: WeightEntry) -> int:
    return entry.offset + entry.num_bytes


def _norm_and_rotate(heads: Tensor, weight: Tensor | None, rope: Rope, eps: float) -> None:
    """Norm (Qwen3) and rotate queries and keys in place; heads [N, H + KV, D]."""
    source = heads
    if weight is not None:
        source = F.rms_norm(heads, (heads.shape[-1],), None, eps).mul_(weight)
    rope.rotate(heads, source)
