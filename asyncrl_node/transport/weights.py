"""The weight buffer: one flat area that the learner writes and every sampler maps once.

The buffer is read under a lease and written when no lease is out (core/publishing.py), so no read
ever sees two versions; the version stands before and after the data all the same, and is checked
by every reader: a torn read would be a named fault, not silently mixed weights.

Host shared memory here; gpu_weights.py has the same two ends where the weights lie on a GPU.

Layout: 64-byte front (magic, layout hash, version, bytes), the parameters at their manifest
offsets, 8-byte back (version).
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import xxhash

from asyncrl_node.errors import RunFault
from asyncrl_node.messages import WeightEntry, WeightsManifest

_FRONT = struct.Struct("<8sQqQ")
_FRONT_BYTES = 64
_BACK = struct.Struct("<q")
_MAGIC = b"ARLWGHT\0"
_WRITING = -1


class DeviceArea(NamedTuple):
    """Weights in device memory, readable from the device `ordinal` of this process."""

    address: int
    num_bytes: int
    ordinal: int


class WeightExport(Protocol):
    """The learner's end."""

    def begin_write(self) -> memoryview | DeviceArea:
        """Mark the buffer as torn and return its weight area, writable."""
        ...

    def end_write(self, version: int) -> int:
        """Mark the buffer as holding `version`, complete; return the hash of the weight area."""
        ...

    def close(self) -> None:
        """Remove the buffer."""
        ...


class WeightImport(Protocol):
    """A sampler's end, for an engine in the sampler's own process."""

    def view(self, version: int) -> memoryview:
        """Return the whole weight area in host memory, read-only, under a lease for `version`.

        It is good until the lease goes back; `check` again when it was copied.

        Raises: RunFault("torn_weights") if the buffer does not hold exactly that version.
        """
        ...

    def check(self, version: int) -> None:
        """Check that the buffer holds exactly `version`. Raises: RunFault("torn_weights")."""
        ...

    def close(self) -> None:
        """Unmap the buffer."""
        ...


def layout_hash(entries: tuple[WeightEntry, ...]) -> int:
    """Hash the manifest: both ends must lay the parameters out alike."""
    return int(xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(entries)))


def weights_hash(view: memoryview) -> int:
    """Hash a weight area, padding included."""
    return int(xxhash.xxh3_64_intdigest(view))


def buffer_bytes(num_weight_bytes: int) -> int:
    """Size of the whole buffer."""
    return _FRONT_BYTES + num_weight_bytes + _BACK.size


def _free_bytes(folder: Path) -> int:
    filesystem = os.statvfs(folder)
    return filesystem.f_bavail * filesystem.f_frsize


def _shm_full(folder: Path, size: int, why: str) -> RunFault:
    return RunFault(
        "shm_full",
        f"{folder} has no room for {size} bytes of weights ({why}); give it more "
        "(docker run --shm-size)",
    )


class SharedMemoryExport:
    """The learner's end, in host shared memory."""

    def __init__(self, path: Path, manifest: WeightsManifest) -> None:
        """Reserve it, whole and private. Raises: RunFault("shm_full")."""
        self._path = path
        self._manifest = manifest
        size = buffer_bytes(manifest.num_bytes)
        free = _free_bytes(path.parent)
        if free < size:
            raise _shm_full(path.parent, size, f"{free} are free")
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._memory = mmap.mmap(descriptor, size)
        except OSError as error:
            path.unlink()
            raise _shm_full(path.parent, size, str(error)) from error
        finally:
            os.close(descriptor)
        self._mark(_WRITING)

    def begin_write(self) -> memoryview:
        """Mark the buffer as torn and return its weight area, writable."""
        self._mark(_WRITING)
        return self._area()

    def end_write(self, version: int) -> int:
        """Mark the buffer as holding `version`, complete; return the hash of the weight area."""
        with self._area() as area:
            digest = weights_hash(area)
        self._mark(version)
        return digest

    def memory(self) -> memoryview:
        """The whole buffer, to be pinned; it stays mapped as long as the process lives."""
        return memoryview(self._memory)

    def close(self) -> None:
        """Remove the buffer; readers that have it mapped keep it until they unmap it."""
        self._path.unlink(missing_ok=True)

    def _area(self) -> memoryview:
        return memoryview(self._memory)[_FRONT_BYTES : _FRONT_BYTES + self._manifest.num_bytes]

    def _mark(self, version: int) -> None:
        _FRONT.pack_into(
            self._memory, 0, _MAGIC, self._manifest.layout_hash, version, self._manifest.num_bytes
        )
        _BACK.pack_into(self._memory, _FRONT_BYTES + self._manifest.num_bytes, version)


class SharedMemoryImport:
    """A sampler's end, in host shared memory."""

    def __init__(self, path: Path, manifest: WeightsManifest) -> None:
        if layout_hash(manifest.entries) != manifest.layout_hash:
            raise RunFault("weights_mismatch", "the manifest does not hash to its own hash")
        self._manifest = manifest
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = buffer_bytes(manifest.num_bytes)
            self._memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def view(self, version: int) -> memoryview:
        """Return the weight area, read-only, under a lease for `version`."""
        self.check(version)
        return memoryview(self._memory)[_FRONT_BYTES : _FRONT_BYTES + self._manifest.num_bytes]

    def check(self, version: int) -> None:
        """Check that the buffer holds exactly `version`. Raises: RunFault("torn_weights")."""
        manifest = self._manifest
        magic, layout, front, num_bytes = _FRONT.unpack_from(self._memory, 0)
        (back,) = _BACK.unpack_from(self._memory, _FRONT_BYTES + manifest.num_bytes)
        if magic != _MAGIC or layout != manifest.layout_hash or num_bytes != manifest.num_bytes:
            raise RunFault("weights_mismatch", "the buffer is not the one of the manifest")
        if front != version or back != version:
            raise RunFault("torn_weights", f"leased version {version}, found {front} and {back}")

    def memory(self) -> memoryview:
        """The whole buffer, to be pinned: released and unpinned before `close`."""
        return memoryview(self._memory)

    def close(self) -> None:
        """Unmap the buffer."""
        self._memory.close()
