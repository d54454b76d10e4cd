"""Sharded weights: which rank holds which rows, where, and the copies that make a tensor whole.

    M learner ranks, each with a flat buffer of its own rows  --copies-->  full tensors, in order

FSDP2 shards dimension 0 by torch.chunk: with d0 rows and c = ceil(d0 / M), rank r holds the rows
[r c, min((r + 1) c, d0)); the last ranks may hold fewer rows, or none. Rows are contiguous in a
row-major tensor, so a shard is one byte range of the full tensor, and assembling the tensor takes
at most M plain copies: no kernel, no all-gather.

Both ends compute everything here from (entries, M), and compare `layout_hash_input` by hash when
they meet. Only rows that exist are laid out: FSDP2 pads its own buffers, that padding is never
published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncrl_node.core.layout import layout_weights
from asyncrl_node.messages import WeightEntry


class ShardLayout(NamedTuple):
    """One rank's flat buffer."""

    entries: tuple[WeightEntry, ...]
    """One for each parameter, in module order, with the shape and offset of the rank's rows; one
    without rows has num_bytes 0."""
    num_bytes: int
    """Size of the weight area, a multiple of 256; 0 for a rank without any rows."""


class ShardCopy(NamedTuple):
    """One contiguous copy."""

    rank: int
    """The learner rank to read from."""
    source: int
    """Bytes from the start of that rank's weight area."""
    target: int
    """Bytes from the start of the full tensor (assemble) or weight area (flat_copies)."""
    num_bytes: int


class Assembly(NamedTuple):
    """How one full tensor is put together."""

    entry: WeightEntry
    """The full tensor."""
    copies: tuple[ShardCopy, ...]
    """In pull order; they cover the tensor exactly once."""


def shard_rows(num_rows: int, num_ranks: int, rank: int) -> range:
    """Return the rows of dimension 0 that `rank` holds.

    Example: 5 rows on 4 ranks are cut 2, 2, 1, 0.

    Raises: ValueError for a rank that does not exist.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} of {num_ranks}")
    most = -(-num_rows // num_ranks)
    return range(min(rank * most, num_rows), min((rank + 1) * most, num_rows))


def shard_layout(entries: Sequence[WeightEntry], num_ranks: int, rank: int) -> ShardLayout:
    """Lay the rows of `rank` out, in module order, each parameter at a 256-byte boundary.

    A scalar counts as one row, so rank 0 holds it (FSDP2 itself refuses to shard scalars).
    """
    specs = []
    for entry in entries:
        rows = _rows(entry, num_ranks, rank)
        shape = entry.shape if len(rows) and not entry.shape else (len(rows), *entry.shape[1:])
        specs.append((entry.name, entry.dtype, shape, len(rows) * _row_bytes(entry)))
    return ShardLayout(*layout_weights(specs))


def assemble(
    entries: Sequence[WeightEntry], num_ranks: int, sampler: int = 0
) -> tuple[Assembly, ...]:
    """List the copies that make every tensor whole, in module order.

    `sampler` rotates the pull order, beginning at rank `sampler` mod M: else all samplers would
    pull from rank 0 first, and each copy would take as many times longer as there are samplers.
    """
    layouts = [shard_layout(entries, num_ranks, rank).entries for rank in range(num_ranks)]
    order = [(sampler + step) % num_ranks for step in range(num_ranks)]
    assemblies = []
    for place, entry in enumerate(entries):
        copies = [
            ShardCopy(
                rank,
                layouts[rank][place].offset,
                _rows(entry, num_ranks, rank).start * _row_bytes(entry),
                layouts[rank][place].num_bytes,
            )
            for rank in order
        ]
        kept = tuple(copy for copy in copies if copy.num_bytes)
        assemblies.append(Assembly(entry, kept))
    return tuple(assemblies)


def flat_copies(
    entries: Sequence[WeightEntry], num_ranks: int, sampler: int = 0
) -> tuple[ShardCopy, ...]:
    """List the copies of `assemble` with targets in one full weight area, not in single tensors."""
    return tuple(
        copy._replace(target=assembly.entry.offset + copy.target)
        for assembly in assemble(entries, num_ranks, sampler)
        for copy in assembly.copies
    )


def layout_hash_input(
    entries: Sequence[WeightEntry], num_ranks: int, rank: int
) -> tuple[str, int, int, tuple[WeightEntry, ...]]:
    """Return what decides the contents of one rank's buffer, for hashing.

    The full tensors, the number of ranks and the rank; the rank's own layout would not do, because
    one row of three on three ranks lies like one row of two on two.
    """
    return "dim0-chunk", num_ranks, rank, tuple(entries)


def _rows(entry: WeightEntry, num_ranks: int, rank: int) -> range:
    """Rows of the parameter that `rank` holds; a scalar is one row."""
    return shard_rows(entry.shape[0] if entry.shape else 1, num_ranks, rank)


def _row_bytes(entry: WeightEntry) -> int:
    return entry.num_bytes // max(1, entry.shape[0] if entry.shape else 1)
