"""Trajectory groups in shared memory: one file per attempt, reserved whole at admission.

    scheduler  reserve(key)   O_EXCL, 0600, posix_fallocate: a full /dev/shm is an error here
    sampler    write_group    into the reserved file; it can neither make nor grow one
    learner    read_group     maps it read-only; the arrays are views, nothing is copied
    scheduler  release(key)   unlink; a mapping that is still open stays valid

The name carries group and attempt, and each attempt has an inode of its own, so a late writer of
an older attempt writes into memory that nobody will ever read. Ownership passes by message: no
locks.

Contents: preamble (64 bytes: magic, format, header bytes, total bytes), msgpack header, then each
array at a 64-byte boundary. The checksum (xxh3-64 of all of it) travels in the message.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import GroupKey

_ALIGN = 64
_PREAMBLE = struct.Struct("<8sIIQ")
_MAGIC = b"ARLSLOT\0"
_FORMAT = 2
_MAX_HEADER_BYTES = 64 << 10

_ARRAYS: tuple[tuple[str, str], ...] = (
    ("tokens", "<i4"),
    ("loss_mask", "|b1"),
    ("sampler_logprobs", "<f4"),
    ("policy_versions", "<i4"),
    ("on_older_kv", "|b1"),
    ("rollout_starts", "<i8"),
    ("rewards", "<f4"),
    ("turn_ends", "<i8"),
    ("turn_rewards", "<f4"),
)


class ArrayPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one array lies in the slot."""

    name: str
    dtype: str
    length: int
    offset: int


class SlotHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the slot says of itself; compared with the message that names it."""

    key: GroupKey
    problem: int
    epoch: int
    arrays: tuple[ArrayPlace, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SlotHeader)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def slot_bytes(group_size: int, max_rollout_tokens: int, max_turns: int = 1) -> int:
    """Bytes that the largest group can need.

    Per token: 4 for the token, 1 for the mask, 4 each for logprob and version, 1 for the KV mark.
    Per turn: 8 for its end, 4 for its reward.
    """
    per_token = sum(np.dtype(dtype).itemsize for _, dtype in _ARRAYS[:5])
    per_rollout = max_rollout_tokens * per_token + max_turns * (8 + 4) + 8 + 4
    overhead = 4096 + _ALIGN * len(_ARRAYS)
    page = mmap.PAGESIZE
    return -(-(group_size * per_rollout + overhead) // page) * page


class SlotFolder:
    """The slots of one run: files `PREFIX-g<group>-a<attempt>` in a folder of shared memory."""

    def __init__(self, folder: Path, prefix: str, slot_bytes: int) -> None:
        self.folder = folder
        self.prefix = prefix
        self.slot_bytes = slot_bytes

    def path(self, key: GroupKey) -> Path:
        """Path of an attempt's slot; messages carry numbers only, so no message can name a file."""
        return self.folder / f"{self.prefix}-g{key.group_id}-a{key.attempt}"

    def reserve(self, key: GroupKey) -> None:
        """Make the slot with all its bytes. Raises: RunFault("shm_full")."""
        path = self.path(key)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.slot_bytes)
        except OSError as error:
            path.unlink()
            raise RunFault(
                "shm_full",
                f"{self.folder} has no room for a slot of {self.slot_bytes} bytes ({error}); give "
                "it more (docker run --shm-size) or lower groups_per_batch or pipeline_depth",
            ) from error
        finally:
            os.close(descriptor)

    def release(self, key: GroupKey) -> None:
        """Remove the slot; who has it mapped keeps the memory until they unmap it."""
        self.path(key).unlink(missing_ok=True)

    def write_group(self, key: GroupKey, group: TrajectoryGroup) -> tuple[int, int]:
        """Write a group into its reserved slot; return (bytes used, checksum).

        Raises: FileNotFoundError if the slot was taken away (the attempt is late).
        """
        arrays = {
            name: np.ascontiguousarray(getattr(group, name), dtype=dtype) for name, dtype in _ARRAYS
        }
        header, total = _plan(key, group, arrays)
        if total > self.slot_bytes:
            raise RunFault(
                "slot_overflow",
                f"group {key.group_id} needs {total} bytes, a slot has {self.slot_bytes}",
            )
        descriptor = os.open(self.path(key), os.O_RDWR | os.O_CLOEXEC)
        try:
            with mmap.mmap(descriptor, self.slot_bytes) as memory:
                _write(memory, header, arrays, total)
                with memoryview(memory) as view, view[:total] as used:
                    return total, xxhash.xxh3_64_intdigest(used)
        finally:
            os.close(descriptor)

    def read_group(self, key: GroupKey, num_bytes: int, checksum: int) -> TrajectoryGroup:
        """Map a group; its arrays are read-only views that keep the mapping alive.

        Raises: RunFault("corrupt_slot") for anything that is not exactly what was written.
        """
        try:
            return self._read(key, num_bytes, checksum)
        except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
            raise RunFault("corrupt_slot", f"slot of {key}: {error}") from error

    def _read(self, key: GroupKey, num_bytes: int, checksum: int) -> TrajectoryGroup:
        descriptor = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(descriptor, self.slot_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        view = memoryview(memory)
        magic, version, header_bytes, total = _PREAMBLE.unpack_from(view)
        if magic != _MAGIC or version != _FORMAT or total != num_bytes:
            raise ValueError(f"preamble {magic!r} {version} {total}, expected {num_bytes} bytes")
        if not 0 < header_bytes <= _MAX_HEADER_BYTES or total > self.slot_bytes:
            raise ValueError(f"header of {header_bytes}, total of {total} bytes")
        if xxhash.xxh3_64_intdigest(view[:total]) != checksum:
            raise ValueError("checksum differs")
        header = _decoder.decode(view[_ALIGN : _ALIGN + header_bytes])
        if header.key != key:
            raise ValueError(f"holds {header.key}")
        return _views(header, view, total)


def _plan(
    key: GroupKey, group: TrajectoryGroup, arrays: dict[str, npt.NDArray[Any]]
) -> tuple[bytes, int]:
    """Lay the arrays out behind the largest header there can be; return (header, total bytes)."""
    num_header_bytes = 0
    for _ in range(3):  # offsets are in the header, whose size depends on them a little
        offset = _aligned(_ALIGN + num_header_bytes)
        places = []
        for name, dtype in _ARRAYS:
            array = arrays[name]
            places.append(ArrayPlace(name, dtype, len(array), offset))
            offset = _aligned(offset + array.nbytes)
        header = _encoder.encode(SlotHeader(key, group.problem, group.epoch, tuple(places)))
        if _aligned(_ALIGN + len(header)) == _aligned(_ALIGN + num_header_bytes):
            break
        num_header_bytes = len(header)
    return header, offset


def _write(
    memory: mmap.mmap, header: bytes, arrays: dict[str, npt.NDArray[Any]], total: int
) -> None:
    _PREAMBLE.pack_into(memory, 0, _MAGIC, _FORMAT, len(header), total)
    memory[_ALIGN : _ALIGN + len(header)] = header
    for place in _decoder.decode(header).arrays:
        array = arrays[place.name]
        memory[place.offset : place.offset + array.nbytes] = array.tobytes()


def _views(header: SlotHeader, view: memoryview, total: int) -> TrajectoryGroup:
    if tuple((p.name, p.dtype) for p in header.arrays) != _ARRAYS:
        raise ValueError("unexpected arrays")
    arrays = {}
    for place in header.arrays:
        dtype = np.dtype(place.dtype)
        end = place.offset + place.length * dtype.itemsize
        if place.length < 0 or place.offset < _ALIGN or place.offset % _ALIGN or end > total:
            raise ValueError(f"{place.name} lies outside the slot")
        arrays[place.name] = np.frombuffer(view, dtype, place.length, place.offset)
    return TrajectoryGroup(
        group_id=header.key.group_id, problem=header.problem, epoch=header.epoch, **arrays
    )
