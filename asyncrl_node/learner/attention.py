"""Attention over packed sequences: one function, "packed", for every Hugging Face model.

    pack     [1, T] tokens of S sequences, back to back, longest first
       |  the model's own projections, norms, rotary embedding, MLP: no padding anywhere
       v
    packed_attention: the sequences fall into buckets of similar length
       bucket of equal lengths    a view [n, L], nothing is copied
       other bucket               gathered to [n, L], the tail of each row is padding
       one causal SDPA call per bucket, the padding dropped, the buckets put back to back

Why it is exact: a sequence is never beside another one in a row, and the padding comes after the
row's tokens, where causal attention cannot look. Padding queries are dropped, so they send no
gradient; padding keys are seen by padding queries alone, so they get none.

Why it is fast: calls on short sequences cost more than their attention, so a bucket opened by a
sequence of L <= 48 tokens takes those of at least 0.8 L. At least 80 % of its places are tokens
(padding <= 25 % of them), and all lengths up to 48 need at most 13 calls: 256 short rollouts are
one call, not 256. Beyond 48 tokens padding costs more than calls, so only equal lengths share one.
Bounds and index tensors are made once per pack (plan_attention), not once per layer.

On a GPU (where this has not run) the same calls are made; torch.nn.attention.varlen is the way to
one call for all, in bf16.

trainer.py registers packed_attention and no_mask; this module does not know transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from asyncrl_node.errors import RunFault

FILL = 0.8
"""The shortest sequence of a padded bucket has at least this share of the longest one's tokens."""
PADDED_LENGTH = 48
"""Sequences up to this length may be padded: between where padding breaks even with a call for
each sequence for 8 heads of 64 (about 32 tokens) and for 3 heads of 32 (about 96), one thread."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length: n of them, at most L tokens each, T tokens in all."""

    num_tokens: int
    num_sequences: int
    max_length: int
    pad: Tensor | None
    """[n * L] int64: the bucket's token in each place, a row's last token again in its tail.
    None: all sequences are equally long, there are no tails."""
    unpad: Tensor | None
    """[T] int64: the place of each token."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """How a pack is cut; every layer's attention gets the same one, as the keyword `pack`."""

    max_length: int
    buckets: tuple[Bucket, ...]


def plan_attention(lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedSequences:
    """Cut a pack of S sequences with `lengths` tokens into buckets; the lengths never rise.

    Raises: ValueError if the sequences are not sorted longest first, or one is empty.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError("a pack has at least one sequence, a sequence at least one token")
    if any(shorter > longer for longer, shorter in pairwise(lengths)):
        raise ValueError("a pack is sorted longest first")
    buckets: list[Bucket] = []
    start = 0
    while start < len(lengths):
        longest = lengths[start]
        shortest = FILL * longest if longest <= PADDED_LENGTH else longest
        end = start
        while end < len(lengths) and lengths[end] >= shortest:
            end += 1
        buckets.append(_bucket(lengths[start:end], device))
        start = end
    return PackedSequences(lengths[0], tuple(buckets))


def _bucket(lengths: Sequence[int], device: torch.device | str) -> Bucket:
    """Make the bucket of n sequences, longest first."""
    max_length, num_tokens = lengths[0], sum(lengths)
    pad = unpad = None
    if lengths[-1] != max_length:
        length = torch.tensor(lengths)[:, None]
        place = torch.arange(max_length)[None, :]
        start = length.cumsum(0) - length
        pad = (start + torch.minimum(place, length - 1)).flatten().to(device)
        unpad = (place < length).flatten().nonzero().flatten().to(device)
    return Bucket(num_tokens, len(lengths), max_length, pad, unpad)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pack: PackedSequences | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence of the pack; the signature is the one HF models call.

    query [1, H, T, d], key and value [1, H_kv, T, d] -> [1, T, H, d], no attention weights.

    Raises: RunFault for a model that needs more than causal attention, or a device without a path.
    """
    if pack is None:
        raise RunFault("unsupported_attention", "the model does not pass the pack on to attention")
    if softcap is not None or (sliding_window is not None and sliding_window < pack.max_length):
        raise RunFault(
            "unsupported_attention",
            "packed attention is plain causal attention; this model uses a soft cap or a sliding "
            f"window of {sliding_window} tokens, shorter than a rollout of {pack.max_length}",
        )
    if query.device.type not in ("cpu", "cuda"):
        raise RunFault("unsupported_device", f"no packed attention for {query.device} yet")
    # One split, not a slice per bucket: the gradient of a slice is as large as the whole pack.
    sizes = [bucket.num_tokens for bucket in pack.buckets]
    queries, keys, values = (
        states[0].transpose(0, 1).split_with_sizes(sizes) for states in (query, key, value)
    )
    outputs = [
        _attend(*rows, scaling) for rows in zip(pack.buckets, queries, keys, values, strict=True)
    ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _attend(
    bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """Attend within one bucket: query [T, H, d], key and value [T, H_kv, d] -> [T, H, d]."""
    if query.is_cuda:
        key, value = (ungrouped(states, query.shape[1]) for states in (key, value))
    output = scaled_dot_product_attention(
        _to_rows(bucket, query),
        _to_rows(bucket, key),
        _to_rows(bucket, value),
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    places = output.transpose(1, 2).flatten(0, 1)
    return places if bucket.unpad is None else places.index_select(0, bucket.unpad)


def ungrouped(states: Tensor, num_heads: int) -> Tensor:
    """Repeat keys or values for every query head: [T, H_kv, d] -> [T, H, d].

    On a GPU, SDPA's one float32 kernel that does not write out all L * L scores knows no groups.
    """
    return states.repeat_interleave(num_heads // states.shape[1], 1)


def _to_rows(bucket: Bucket, tokens: Tensor) -> Tensor:
    """Lay the bucket's tokens out in rows: [T, h, d] -> [n, h, L, d]."""
    places = tokens if bucket.pad is None else tokens.index_select(0, bucket.pad)
    rows = (bucket.num_sequences, bucket.max_length, *tokens.shape[1:])
    return places.reshape(rows).transpose(1, 2)


def no_mask(*_: object, **__: object) -> None:
    """Stand in for the mask that HF models build: a pack needs none."""
