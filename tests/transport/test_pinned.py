"""Pinned host memory against a fake driver: in pieces, all or none, unpinned before unmapping."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_node.errors import InvalidTransition
from asyncrl_node.transport.cuda_driver import CudaDevice, CudaDriver, CudaError, host_address
from asyncrl_node.transport.pinned import PIECE_BYTES, PinnedMemory
from tests.transport.fake_cuda import (
    INVALID_VALUE,
    NOT_REGISTERED,
    FakeGpu,
    FakeLibrary,
    FakeMachine,
    access_of,
)

PAGE = mmap.PAGESIZE


class Rig:
    """One process with one GPU."""

    def __init__(self) -> None:
        self.machine = FakeMachine([FakeGpu(bytes(16))])
        self.library: FakeLibrary = self.machine.process([0])
        self.device: CudaDevice = CudaDriver(self.library).open_device(0)

    def close(self) -> None:
        self.device.close()
        self.machine.assert_clean()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


@given(num_bytes=st.integers(1, 20 * PAGE), piece=st.integers(1, 6))
def test_pieces_cover_the_memory_once(num_bytes: int, piece: int) -> None:
    rig = Rig()
    with mmap.mmap(-1, num_bytes) as area:
        with memoryview(area) as memory:
            first = host_address(memory)
            pinned = PinnedMemory(rig.device, memory, piece_bytes=piece * PAGE)
        ends = [first]
        for start, size in sorted(rig.library.registered.items()):
            assert start == ends[-1]
            assert 0 < size <= piece * PAGE
            ends.append(start + size)
        assert ends[-1] == first + num_bytes
        pinned.close()
        pinned.close()
        assert not rig.library.registered
    rig.close()


def test_a_piece_is_far_below_what_one_call_can_take() -> None:
    assert PIECE_BYTES == 16 << 30
    assert PIECE_BYTES % PAGE == 0


def test_what_cannot_be_pinned_whole_is_not_pinned_at_all_and_calls_go_on(rig: Rig) -> None:
    rig.machine.faults.num_pinnable_bytes = 5 * PAGE
    with mmap.mmap(-1, 6 * PAGE) as area, memoryview(area) as memory:
        with pytest.raises(CudaError, match=r"cuMemHostRegister_v2 of 8192 bytes: .*OUT_OF_MEMORY"):
            PinnedMemory(rig.device, memory, piece_bytes=2 * PAGE)
        assert rig.library.calls.count("cuMemHostRegister_v2") == 3
        assert rig.library.calls.count("cuMemHostUnregister") == 2
        assert not rig.library.registered
    rig.device.free(rig.device.allocate(8))  # nothing of the failure is left to be reported here


def test_memory_mapped_read_only_is_pinned_as_such(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "area"
    path.write_bytes(bytes(PAGE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), PAGE, prot=mmap.PROT_READ) as area:
        with memoryview(area) as memory:
            with pytest.raises(CudaError) as caught:
                PinnedMemory(rig.device, memory)
            assert caught.value.code == INVALID_VALUE
            assert "mapped r--" in rig.machine.violations.pop()
            pinned = PinnedMemory(rig.device, memory, read_only=True)
        pinned.close()


def test_a_device_is_not_closed_while_memory_is_pinned_for_it(rig: Rig) -> None:
    with mmap.mmap(-1, PAGE) as area:
        with memoryview(area) as memory:
            pinned = PinnedMemory(rig.device, memory)
        with pytest.raises(InvalidTransition, match="1 pieces of host memory"):
            rig.device.close()
        pinned.close()
        with pytest.raises(InvalidTransition, match="not registered here"):
            rig.device.unregister_host(PAGE)


def test_the_fake_sees_memory_unmapped_too_early_registered_twice_or_left() -> None:
    rig = Rig()
    with mmap.mmap(-1, PAGE) as area:
        with memoryview(area) as memory:
            pinned = PinnedMemory(rig.device, memory)
            address = host_address(memory)
            with pytest.raises(CudaError, match="ALREADY_REGISTERED"):
                PinnedMemory(rig.device, memory)
        with pytest.raises(AssertionError, match="registered memory twice"):
            rig.machine.assert_clean()
        rig.machine.violations.clear()
        with pytest.raises(AssertionError, match="pinned memory leak"):
            rig.machine.assert_clean()
    assert not access_of(address, PAGE)
    with pytest.raises(CudaError):
        pinned.close()
    assert rig.machine.violations == ["unregistered memory that was unmapped before"]
    assert rig.library.cuMemHostUnregister(address) == NOT_REGISTERED
