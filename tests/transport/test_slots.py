"""Slots: what is written is what is mapped, and anything else is a named fault."""

from __future__ import annotations

import itertools
import mmap
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import GroupKey
from asyncrl_node.transport.slots import ArrayPlace, SlotFolder, SlotHeader, slot_bytes

ARRAYS = (
    "tokens",
    "loss_mask",
    "sampler_logprobs",
    "policy_versions",
    "on_older_kv",
    "rollout_starts",
    "rewards",
    "turn_ends",
    "turn_rewards",
)
SHM = Path("/dev/shm")
KEY = GroupKey(7, 0)

_numbers = itertools.count(100)


def make_group(lengths: list[int], seed: int = 0, group_id: int = 7) -> TrajectoryGroup:
    random = np.random.default_rng(seed)
    total = sum(lengths)
    mask = random.random(total) < 0.7
    turns = seed % 3 * len(lengths)
    return TrajectoryGroup(
        group_id=group_id,
        problem=int(random.integers(1 << 31)),
        epoch=int(random.integers(1 << 20)),
        tokens=random.integers(0, 1 << 31, total).astype(np.int32),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, -random.random(total), 0.0).astype(np.float32),
        policy_versions=np.where(mask, random.integers(0, 1 << 31, total), -1).astype(np.int32),
        on_older_kv=mask & (random.random(total) < 0.5),
        rollout_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rewards=random.normal(size=len(lengths)).astype(np.float32),
        turn_ends=np.sort(random.integers(0, total + 1, turns)),
        turn_rewards=random.normal(size=turns).astype(np.float32),
    )


def assert_same(read: TrajectoryGroup, written: TrajectoryGroup) -> None:
    assert read[:3] == written[:3]
    for name in ARRAYS:
        left, right = getattr(read, name), getattr(written, name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right, err_msg=name)


def memory_of(array: np.ndarray) -> mmap.mmap:
    """Walk from a view down to what owns its bytes."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    while isinstance(base, memoryview):
        base = base.obj
    assert isinstance(base, mmap.mmap)
    return base


@pytest.fixture
def slots(tmp_path: Path) -> SlotFolder:
    return SlotFolder(tmp_path, "arl-test", 16384)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the examples of a property; each uses a group id of its own."""
    return tmp_path_factory.mktemp("slots")


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHM, prefix="test-slots-") as folder:
        yield Path(folder)


# -- what is written is what is read -------------------------------------------------------------


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=9), seed=st.integers(0, 999))
def test_round_trip_of_ragged_groups(shared: Path, lengths: list[int], seed: int) -> None:
    slots = SlotFolder(shared, "arl-test", slot_bytes(len(lengths), max(1, *lengths, 0), 2))
    group = make_group(lengths, seed, next(_numbers))
    key = GroupKey(group.group_id, 3)
    slots.reserve(key)
    num_bytes, checksum = slots.write_group(key, group)
    assert num_bytes <= slots.slot_bytes
    assert_same(slots.read_group(key, num_bytes, checksum), group)
    slots.release(key)


def test_arrays_are_read_only_views_of_the_slot_itself(slots: SlotFolder) -> None:
    group = make_group([5, 9, 2], seed=1)
    slots.reserve(KEY)
    read = slots.read_group(KEY, *slots.write_group(KEY, group))
    memories = [memory_of(getattr(read, name)) for name in ARRAYS]
    assert all(memory is memories[0] for memory in memories)
    start = np.frombuffer(memories[0], np.uint8).ctypes.data
    descriptor = os.open(slots.path(KEY), os.O_RDWR)
    try:
        for name in ARRAYS:
            array = getattr(read, name)
            assert not array.flags.writeable
            assert not array.flags.owndata
            offset = array.ctypes.data - start
            assert offset % 64 == 0
            before = array.tobytes()
            os.pwrite(descriptor, bytes([before[0] ^ 1]), offset)
            assert array.tobytes() != before, f"{name} is a copy"
    finally:
        os.close(descriptor)
    with pytest.raises(ValueError, match="read-only"):
        read.tokens[0] = 1


def test_release_keeps_open_mappings_valid(slots: SlotFolder) -> None:
    group = make_group([30, 1])
    slots.reserve(KEY)
    read = slots.read_group(KEY, *slots.write_group(KEY, group))
    slots.release(KEY)
    slots.release(KEY)
    assert list(slots.folder.iterdir()) == []
    slots.reserve(KEY)
    slots.write_group(KEY, make_group([30, 1], seed=1))
    assert_same(read, group)


# -- reserving -----------------------------------------------------------------------------------


def test_all_bytes_are_reserved_at_admission_and_private(slots: SlotFolder) -> None:
    umask = os.umask(0)
    try:
        slots.reserve(KEY)
    finally:
        os.umask(umask)
    status = slots.path(KEY).stat()
    assert status.st_size == slots.slot_bytes
    assert status.st_blocks * 512 >= slots.slot_bytes
    assert stat.S_IMODE(status.st_mode) == 0o600


def test_full_shared_memory_is_a_named_fault_that_leaves_nothing(shm: Path) -> None:
    filesystem = os.statvfs(shm)
    whole = filesystem.f_blocks * filesystem.f_frsize
    assert whole > 0, "/dev/shm has no size limit here"
    slots = SlotFolder(shm, "arl-test", whole + mmap.PAGESIZE)
    with pytest.raises(RunFault, match="--shm-size") as caught:
        slots.reserve(KEY)
    assert caught.value.name == "shm_full"
    assert list(shm.iterdir()) == []


def test_a_slot_is_never_reserved_twice(slots: SlotFolder) -> None:
    slots.reserve(KEY)
    reserved = slots.path(KEY).stat().st_ino
    with pytest.raises(FileExistsError):
        slots.reserve(KEY)
    assert slots.path(KEY).stat().st_ino == reserved


def test_a_planted_link_is_not_followed(slots: SlotFolder, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    slots.path(KEY).symlink_to(target)
    with pytest.raises(FileExistsError):
        slots.reserve(KEY)
    assert target.read_bytes() == b"precious"


# -- attempts ------------------------------------------------------------------------------------


def test_a_late_writer_finds_no_slot_and_leaves_the_newer_attempt_alone(slots: SlotFolder) -> None:
    old, new = GroupKey(7, 0), GroupKey(7, 1)
    slots.reserve(old)
    slots.release(old)
    slots.reserve(new)
    with pytest.raises(FileNotFoundError):
        slots.write_group(old, make_group([4, 4]))
    assert [path.name for path in slots.folder.iterdir()] == [slots.path(new).name]
    assert not any(slots.path(new).read_bytes())


def test_a_writer_caught_in_the_middle_writes_into_memory_that_nobody_reads(
    slots: SlotFolder,
) -> None:
    old, new = GroupKey(7, 0), GroupKey(7, 1)
    slots.reserve(old)
    descriptor = os.open(slots.path(old), os.O_RDWR)
    with mmap.mmap(descriptor, slots.slot_bytes) as memory:
        slots.release(old)
        slots.reserve(new)
        group = make_group([6, 3])
        written = slots.write_group(new, group)
        memory[:] = b"\xee" * slots.slot_bytes
    os.close(descriptor)
    assert_same(slots.read_group(new, *written), group)


# -- sizes ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(group_size=st.integers(1, 24), tokens=st.integers(1, 400))
def test_slot_bytes_holds_the_largest_group(shared: Path, group_size: int, tokens: int) -> None:
    turns = group_size * tokens
    slots = SlotFolder(shared, "arl-test", slot_bytes(group_size, tokens, tokens))
    group = make_group([tokens] * group_size)._replace(
        problem=(1 << 63) - 1,
        epoch=(1 << 63) - 1,
        turn_ends=np.arange(1, turns + 1),
        turn_rewards=np.ones(turns, np.float32),
    )
    key = GroupKey((1 << 62) + next(_numbers), (1 << 63) - 1)
    slots.reserve(key)
    num_bytes, _ = slots.write_group(key, group)
    slots.release(key)
    assert num_bytes <= slots.slot_bytes
    assert slots.slot_bytes % mmap.PAGESIZE == 0


def test_a_group_larger_than_its_slot_is_a_named_fault_and_writes_nothing(
    slots: SlotFolder,
) -> None:
    slots.reserve(KEY)
    with pytest.raises(RunFault, match="needs") as caught:
        slots.write_group(KEY, make_group([slots.slot_bytes // 14 + 1]))
    assert caught.value.name == "slot_overflow"
    assert not any(slots.path(KEY).read_bytes())
    assert slots.path(KEY).stat().st_size == slots.slot_bytes


# -- corruption ----------------------------------------------------------------------------------


def refused(slots: SlotFolder, key: GroupKey, num_bytes: int, checksum: int) -> str:
    """Read what must be refused; return the story."""
    with pytest.raises(RunFault) as caught:
        slots.read_group(key, num_bytes, checksum)
    assert caught.value.name == "corrupt_slot"
    return caught.value.story


def test_every_flipped_byte_is_caught(slots: SlotFolder) -> None:
    group = make_group([3, 1])
    slots.reserve(KEY)
    written = slots.write_group(KEY, group)
    content = slots.path(KEY).read_bytes()
    descriptor = os.open(slots.path(KEY), os.O_RDWR)
    try:
        for position in range(written[0]):
            mask = 1 << position % 8
            os.pwrite(descriptor, bytes([content[position] ^ mask]), position)
            assert refused(slots, KEY, *written)
            os.pwrite(descriptor, content[position : position + 1], position)
    finally:
        os.close(descriptor)
    assert_same(slots.read_group(KEY, *written), group)


@pytest.mark.parametrize("size", [0, 10, 64, 16383])
def test_a_truncated_slot_is_caught(slots: SlotFolder, size: int) -> None:
    slots.reserve(KEY)
    written = slots.write_group(KEY, make_group([3, 1]))
    os.truncate(slots.path(KEY), size)
    assert refused(slots, KEY, *written)


def test_what_the_message_says_must_be_what_the_slot_says(slots: SlotFolder) -> None:
    slots.reserve(KEY)
    num_bytes, checksum = slots.write_group(KEY, make_group([3, 1]))
    assert "expected" in refused(slots, KEY, num_bytes + 64, checksum)
    assert "checksum" in refused(slots, KEY, num_bytes, checksum ^ 1)
    assert "No such file" in refused(slots, GroupKey(7, 1), num_bytes, checksum)
    other = GroupKey(8, 0)
    slots.path(KEY).rename(slots.path(other))
    assert "GroupKey(group_id=7, attempt=0)" in refused(slots, other, num_bytes, checksum)


def forge(slots: SlotFolder, header: bytes, header_bytes: int | None = None) -> tuple[int, int]:
    """Write a slot by hand, with a checksum that fits; return (bytes, checksum)."""
    total = slots.slot_bytes - 64
    count = len(header) if header_bytes is None else header_bytes
    preamble = struct.pack("<8sIIQ", b"ARLSLOT\0", 2, count, total)
    content = (preamble.ljust(64, b"\0") + header).ljust(total, b"\0")[:total]
    slots.path(KEY).write_bytes(content.ljust(slots.slot_bytes, b"\0"))
    return total, xxhash.xxh3_64_intdigest(content)


def honest_places() -> list[ArrayPlace]:
    lengths = {"rollout_starts": 2, "rewards": 1}
    dtypes = ("<i4", "|b1", "<f4", "<i4", "|b1", "<i8", "<f4", "<i8", "<f4")
    return [
        ArrayPlace(name, dtype, lengths.get(name, 4), 1024 + 64 * number)
        for number, (name, dtype) in enumerate(zip(ARRAYS, dtypes, strict=True))
    ]


def encode(places: list[ArrayPlace]) -> bytes:
    return msgspec.msgpack.encode(SlotHeader(KEY, 1, 0, tuple(places)))


def change(places: list[ArrayPlace], number: int, **changes: object) -> list[ArrayPlace]:
    places[number] = msgspec.structs.replace(places[number], **changes)
    return places


def test_a_forged_slot_that_is_right_is_read(slots: SlotFolder) -> None:
    read = slots.read_group(KEY, *forge(slots, encode(honest_places())))
    assert read.tokens.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "bend",
    [
        lambda p: p[:-1],
        lambda p: [p[1], p[0], *p[2:]],
        lambda p: [*p, p[-1]],
        lambda p: change(p, 0, dtype="|O"),
        lambda p: change(p, 0, dtype="<i8"),
        lambda p: change(p, 0, name="prompts"),
        lambda p: change(p, 0, length=-1),
        lambda p: change(p, 0, length=1 << 62),
        lambda p: change(p, 3, offset=-64),
        lambda p: change(p, 3, offset=0),
        lambda p: change(p, 3, offset=1025),
        lambda p: change(p, 5, offset=1 << 62),
        lambda p: change(p, 5, offset=16384 - 64),
    ],
)
def test_arrays_that_are_not_what_they_should_be_are_caught(
    slots: SlotFolder, bend: Callable[[list[ArrayPlace]], list[ArrayPlace]]
) -> None:
    assert refused(slots, KEY, *forge(slots, encode(bend(honest_places()))))


@pytest.mark.parametrize("header_bytes", [0, (64 << 10) + 1, (1 << 32) - 1])
def test_a_header_of_impossible_size_is_caught(tmp_path: Path, header_bytes: int) -> None:
    slots = SlotFolder(tmp_path, "arl-test", 256 << 10)
    written = forge(slots, encode(honest_places()), header_bytes)
    assert f"header of {header_bytes}" in refused(slots, KEY, *written)


@settings(max_examples=300)
@given(header=st.binary(min_size=1, max_size=300))
def test_no_header_can_do_more_than_be_refused(shared: Path, header: bytes) -> None:
    slots = SlotFolder(shared, "arl-fuzz", 4096)
    assert refused(slots, KEY, *forge(slots, header))
