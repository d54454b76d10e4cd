"""Where each parameter lies in the flat weight buffer: in order, each at a 256-byte boundary.

256 bytes is what CUDA allocations are aligned to, so a view of any dtype is as well aligned as a
tensor of its own, and every vector load and copy kernel takes its fast path. The same layout is
used in host memory: one manifest serves every transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from asyncrl_node.messages import WeightEntry

ALIGNMENT_BYTES = 256

ParameterSpec = tuple[str, str, tuple[int, ...], int]
"""name, dtype without the torch prefix, shape, num_bytes"""


def layout_weights(parameters: Sequence[ParameterSpec]) -> tuple[tuple[WeightEntry, ...], int]:
    """Lay P parameters out one after the other; returns their entries and the buffer's num_bytes.

    The buffer's size is rounded up too, so that buffers can be put back to back.

    Example: two float32 parameters of 3 and 1 elements lie at 0 and 256, in 512 bytes.

    Raises: ValueError for a name that occurs twice, or bytes that do not fit the shape.
    """
    entries: list[WeightEntry] = []
    names: set[str] = set()
    offset = 0
    for name, dtype, shape, num_bytes in parameters:
        if name in names:
            raise ValueError(f"parameter {name} occurs twice")
        if num_bytes < 0 or num_bytes % max(1, prod(shape)):
            raise ValueError(f"parameter {name}: {num_bytes} bytes do not fit the shape {shape}")
        names.add(name)
        entries.append(WeightEntry(name, dtype, shape, offset, num_bytes))
        offset = _align(offset + num_bytes)
    return tuple(entries), offset


def _align(num_bytes: int) -> int:
    """Round up to the next boundary."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
