"""Shards: cut as torch.chunk cuts, laid out without padding, put together bit for bit."""

from __future__ import annotations

import itertools
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_node.core.layout import ALIGNMENT_BYTES, layout_weights
from asyncrl_node.core.shards import (
    assemble,
    flat_copies,
    layout_hash_input,
    shard_layout,
    shard_rows,
)
from asyncrl_node.messages import WeightEntry

Bytes = npt.NDArray[np.uint8]

_shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(0, 300)),
    st.tuples(st.integers(1, 20), st.integers(1, 70)),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)),
)
_models = st.lists(_shapes, min_size=1, max_size=6)
_ranks = st.integers(1, 7)


def make_entries(shapes: list[tuple[int, ...]]) -> tuple[WeightEntry, ...]:
    specs = [(f"p{i}", "float32", shape, 4 * prod(shape)) for i, shape in enumerate(shapes)]
    return layout_weights(specs)[0]


def make_tensors(shapes: list[tuple[int, ...]]) -> list[npt.NDArray[np.float32]]:
    """Finite numbers, all different."""
    counter = itertools.count(1.0)
    return [
        np.fromiter(itertools.islice(counter, prod(shape)), np.float32, prod(shape)).reshape(shape)
        for shape in shapes
    ]


def fsdp_shard(tensor: npt.NDArray[np.float32], num_ranks: int, rank: int) -> list[float]:
    """What FSDP2 keeps: rows of torch.chunk, narrowed out of a buffer whose padding is NaN."""
    whole = torch.from_numpy(np.atleast_1d(tensor))
    if not whole.shape[0]:
        return []
    chunks = torch.chunk(whole, num_ranks)
    padded = torch.full(chunks[0].shape, torch.nan)
    if rank >= len(chunks):
        return padded[:0].flatten().tolist()
    padded[: len(chunks[rank])] = chunks[rank]
    return padded[: len(chunks[rank])].flatten().tolist()


def make_shard(
    entries: tuple[WeightEntry, ...],
    tensors: list[npt.NDArray[np.float32]],
    num_ranks: int,
    rank: int,
) -> Bytes:
    """One rank's flat buffer; whatever is not a parameter is NaN."""
    layout = shard_layout(entries, num_ranks, rank)
    flat = np.full(layout.num_bytes // 4, np.nan, np.float32)
    for entry, tensor in zip(layout.entries, tensors, strict=True):
        rows = fsdp_shard(tensor, num_ranks, rank)
        assert 4 * len(rows) == entry.num_bytes
        flat[entry.offset // 4 : (entry.offset + entry.num_bytes) // 4] = rows
    return flat.view(np.uint8)


@given(shapes=_models, num_ranks=_ranks, sampler=st.integers(0, 9))
def test_assembly_is_bit_equal_and_reads_no_padding(
    shapes: list[tuple[int, ...]], num_ranks: int, sampler: int
) -> None:
    entries, tensors = make_entries(shapes), make_tensors(shapes)
    shards = [make_shard(entries, tensors, num_ranks, rank) for rank in range(num_ranks)]
    assemblies = assemble(entries, num_ranks, sampler)
    assert [assembly.entry for assembly in assemblies] == list(entries)
    for assembly, tensor in zip(assemblies, tensors, strict=True):
        whole = np.full(tensor.size, np.nan, np.float32).view(np.uint8)
        for copy in assembly.copies:
            part = shards[copy.rank][copy.source : copy.source + copy.num_bytes]
            assert len(part) == copy.num_bytes
            whole[copy.target : copy.target + copy.num_bytes] = part
        assert whole.tobytes() == tensor.tobytes()


@given(shapes=_models, num_ranks=_ranks, sampler=st.integers(0, 9))
def test_the_ranks_fill_one_weight_area_bit_equal_and_leave_its_padding_alone(
    shapes: list[tuple[int, ...]], num_ranks: int, sampler: int
) -> None:
    specs = [(f"p{i}", "float32", shape, 4 * prod(shape)) for i, shape in enumerate(shapes)]
    (entries, num_bytes), tensors = layout_weights(specs), make_tensors(shapes)
    shards = [make_shard(entries, tensors, num_ranks, rank) for rank in range(num_ranks)]
    area, expected = np.zeros(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    for copy in flat_copies(entries, num_ranks, sampler):
        part = shards[copy.rank][copy.source : copy.source + copy.num_bytes]
        area[copy.target : copy.target + copy.num_bytes] = part
    for entry, tensor in zip(entries, tensors, strict=True):
        raw = np.frombuffer(tensor.tobytes(), np.uint8)
        expected[entry.offset : entry.offset + entry.num_bytes] = raw
    assert area.tobytes() == expected.tobytes()


@given(shapes=_models, num_ranks=_ranks, sampler=st.integers(0, 9))
def test_copies_cover_each_tensor_once_in_rotated_order(
    shapes: list[tuple[int, ...]], num_ranks: int, sampler: int
) -> None:
    for assembly in assemble(make_entries(shapes), num_ranks, sampler):
        ranges = sorted((copy.target, copy.target + copy.num_bytes) for copy in assembly.copies)
        assert all(start < end for start, end in ranges)
        edges = [0, *itertools.chain.from_iterable(ranges), assembly.entry.num_bytes]
        assert edges[::2] == edges[1::2]
        distances = [(copy.rank - sampler) % num_ranks for copy in assembly.copies]
        assert distances == sorted(set(distances))


@given(shapes=_models, num_ranks=_ranks)
def test_a_shard_is_aligned_in_order_without_overlap_and_no_larger_than_its_rows(
    shapes: list[tuple[int, ...]], num_ranks: int
) -> None:
    entries = make_entries(shapes)
    total = 0
    for rank in range(num_ranks):
        layout = shard_layout(entries, num_ranks, rank)
        assert [e.name for e in layout.entries] == [e.name for e in entries]
        end = 0
        for entry in layout.entries:
            assert entry.offset % ALIGNMENT_BYTES == 0
            assert end <= entry.offset < end + ALIGNMENT_BYTES
            assert entry.num_bytes == 4 * prod(entry.shape)
            end = entry.offset + entry.num_bytes
            total += entry.num_bytes
        assert end <= layout.num_bytes < end + ALIGNMENT_BYTES
    assert total == sum(entry.num_bytes for entry in entries)


@given(num_rows=st.integers(1, 2000), num_ranks=_ranks)
def test_rows_are_those_of_torch_chunk(num_rows: int, num_ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.chunk(torch.arange(num_rows), num_ranks)]
    chunks += [[]] * (num_ranks - len(chunks))
    assert [list(shard_rows(num_rows, num_ranks, rank)) for rank in range(num_ranks)] == chunks


@pytest.mark.parametrize(
    ("num_rows", "num_ranks", "sizes"),
    [
        (5, 4, [2, 2, 1, 0]),
        (1, 3, [1, 0, 0]),
        (0, 2, [0, 0]),
        (7, 7, [1] * 7),
        (9, 7, [2, 2, 2, 2, 1, 0, 0]),
        (151936, 3, [50646, 50646, 50644]),
    ],
)
def test_uneven_and_empty_shards(num_rows: int, num_ranks: int, sizes: list[int]) -> None:
    assert [len(shard_rows(num_rows, num_ranks, rank)) for rank in range(num_ranks)] == sizes


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(num_ranks: int, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {num_ranks}"):
        shard_rows(4, num_ranks, rank)


def test_a_scalar_lies_on_rank_0_and_a_rank_may_hold_nothing() -> None:
    entries = make_entries([(), (2, 3)])
    first, last = (shard_layout(entries, 3, rank) for rank in (0, 2))
    assert [entry.shape for entry in first.entries] == [(), (1, 3)]
    assert [entry.shape for entry in last.entries] == [(0,), (0, 3)]
    assert last.num_bytes == 0


def test_one_rank_is_the_full_layout() -> None:
    entries = make_entries([(3, 5), (), (300,)])
    assert shard_layout(entries, 1, 0).entries == entries
    for assembly in assemble(entries, 1, 5):
        (copy,) = assembly.copies
        assert (copy.source, copy.target) == (assembly.entry.offset, 0)


def test_the_hash_input_tells_ranks_and_models_apart() -> None:
    three, two = make_entries([(3, 4)]), make_entries([(2, 4)])
    assert shard_layout(three, 3, 0) == shard_layout(two, 2, 0)
    inputs = {
        msgspec.msgpack.encode(layout_hash_input(entries, num_ranks, rank))
        for entries in (three, two)
        for num_ranks in (1, 2, 3)
        for rank in range(num_ranks)
    }
    assert len(inputs) == 12
