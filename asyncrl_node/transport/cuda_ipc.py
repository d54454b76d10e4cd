"""The weight buffer in device memory: the learner's GPU holds it, every sampler maps it once.

    CudaIpcExport (learner)   allocate -> handle, then per version: begin_write, kernels, end_write
    CudaIpcImport (sampler)   open once, for life, then per version, leased: view, copies, view
    SelfTestExport (learner)  a test buffer of one pair: write a pattern when it is asked for
    SelfTestImport (sampler)  map it, then per pattern: pull and compare

The same idea, leases and faults as host shared memory (weights.py); what differs is that an area of
device memory is an address and not a memoryview, so kernels fill it and `read_area` or `as_tensor`
look into it. It is faster and barrier-free: a sampler pulls when it likes, and a restarted one
opens the same 64-byte handle again.

Layout: 192 unused bytes, 64-byte front (magic, layout hash, version, bytes), the weights at a
256-byte boundary, 8-byte back (version).

Peer access can be broken in silence: under an IOMMU every call succeeds and the data is wrong
(pytorch#84803, open-gpu-kernel-modules#1257). So before its first use every pair of learner and
sampler passes a self-test: patterns written after the mapping was opened, pulled as weights are,
compared byte by byte. What becomes of a pair is decided elsewhere (core/transport.py); `refusal`
tells what CUDA has refused from what has really gone wrong.

Has never run on a GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from asyncrl_node.core.shards import Assembly, layout_hash_input, shard_layout
from asyncrl_node.errors import InvalidTransition, RunFault
from asyncrl_node.messages import PATTERN_SEEDS, CudaIpcHandle, WeightEntry, WeightsManifest
from asyncrl_node.transport.cuda_driver import CudaDevice, CudaError
from asyncrl_node.transport.weights import DeviceArea

if TYPE_CHECKING:
    from torch import Tensor

SELF_TEST_BYTES = 64 << 20

_FRONT = struct.Struct("<8sQqQ")
_FRONT_OFFSET = 192
_AREA_OFFSET = 256
_BACK = struct.Struct("<q")
_MAGIC = b"ARLCUDA\0"
_WRITING = -1
_REFUSALS = frozenset({"cuda_error", "mig", "no_cuda_driver", "not_exportable"})
"""Faults that say: not this way. Any other, of a peer that has gone say, is not ours to hide."""
_BLOCK_BYTES = 2 << 20
"""Allocations of other sizes may share a block with their neighbours, and CUDA IPC maps blocks: an
importer would see the neighbours too (CUDA C++ Programming Guide, interprocess communication)."""
_PIECE_BYTES = 16 << 20
"""Device memory passes through the host in pieces of this size."""


def device_buffer_bytes(num_weight_bytes: int) -> int:
    """Size of the whole buffer."""
    return _AREA_OFFSET + num_weight_bytes + _BACK.size


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def shard_manifest(entries: tuple[WeightEntry, ...], num_ranks: int, rank: int) -> WeightsManifest:
    """Describe the buffer of one learner rank; both ends compute it and compare the hash."""
    layout = shard_layout(entries, num_ranks, rank)
    encoded = msgspec.msgpack.encode(layout_hash_input(entries, num_ranks, rank))
    return WeightsManifest(layout.num_bytes, layout.entries, xxhash.xxh3_64_intdigest(encoded))


# -- the two ends --------------------------------------------------------------------------------


class CudaIpcExport:
    """The learner's end: one rank's buffer. The device must outlive it."""

    def __init__(
        self, device: CudaDevice, manifest: WeightsManifest, synchronize: Callable[[], None]
    ) -> None:
        """Allocate the buffer. `synchronize` waits for the stream or event that fills it.

        Raises: RunFault("mig"), CudaError.
        """
        _refuse_mig(device.uuid)
        self._device = device
        self._manifest = manifest
        self._synchronize = synchronize
        self._writing = False
        size = device_buffer_bytes(manifest.num_bytes)
        self._address: int | None = device.allocate(_whole_blocks(size))
        try:
            handle = device.export_handle(self._address)
            device.fill(self._address, 0, size)  # padding is hashed too
            self._mark(_WRITING)
        except RunFault:
            self.close()
            raise
        self.handle = CudaIpcHandle(handle, size, device.uuid, manifest.layout_hash)

    def begin_write(self) -> DeviceArea:
        """Mark the buffer as torn and return its weight area, to be written by kernels."""
        self._writing = True
        self._mark(_WRITING)
        return self._area()

    def end_write(self, version: int, hash_area: Callable[[DeviceArea], int] | None = None) -> int:
        """Mark the buffer as holding `version`, complete; return the hash of the weight area.

        What was begun on the streams is waited for first: a version that is announced is there.
        `hash_area` hashes it then; unset: `area_hash`.
        """
        if not self._writing:
            raise InvalidTransition(f"end_write({version}) without begin_write")
        self._synchronize()
        area = self._area()
        digest = area_hash(self._device, area) if hash_area is None else hash_area(area)
        self._mark(version)
        self._writing = False
        return digest

    def close(self) -> None:
        """Free the buffer, once; importers that have it mapped keep it until they close it."""
        if self._address is not None:
            address, self._address = self._address, None
            self._device.free(address)

    def _area(self) -> DeviceArea:
        start = self._start() + _AREA_OFFSET
        return DeviceArea(start, self._manifest.num_bytes, self._device.ordinal)

    def _mark(self, version: int) -> None:
        """Write front and back; they are there when this returns."""
        layout, num_bytes = self._manifest.layout_hash, self._manifest.num_bytes
        front = _FRONT.pack(_MAGIC, layout, version, num_bytes)
        self._device.write(self._start() + _FRONT_OFFSET, memoryview(front))
        self._device.write(
            self._start() + _AREA_OFFSET + num_bytes, memoryview(_BACK.pack(version))
        )
        self._device.synchronize()

    def _start(self) -> int:
        if self._address is None:
            raise InvalidTransition("the weight buffer is closed")
        return self._address


class CudaIpcImport:
    """A sampler's end: one learner rank's buffer, mapped on the sampler's own device."""

    def __init__(
        self, device: CudaDevice, handle: CudaIpcHandle, manifest: WeightsManifest
    ) -> None:
        """Open the buffer, for life.

        Raises: RunFault("mig"), RunFault("weights_mismatch") if the two ends do not lay the weights
        out alike, CudaError, InvalidTransition if this process has it open.
        """
        _refuse_mig(device.uuid, handle.gpu_uuid)
        size = device_buffer_bytes(manifest.num_bytes)
        if handle.layout_hash != manifest.layout_hash or handle.num_bytes != size:
            raise RunFault(
                "weights_mismatch",
                f"the learner lays the weights out otherwise: {handle.num_bytes} bytes, hash "
                f"{handle.layout_hash:016x}; here {size} bytes, hash {manifest.layout_hash:016x}",
            )
        self._device = device
        self._manifest = manifest
        self._handle = handle.handle
        self._address: int | None = device.open_handle(handle.handle)

    def view(self, version: int) -> DeviceArea:
        """Return the weight area, under a lease for `version`; ask again when it is copied.

        Raises: RunFault("torn_weights") if the buffer does not hold exactly that version.
        """
        if self._address is None:
            raise InvalidTransition("the weight buffer is closed")
        manifest, start = self._manifest, self._address
        front, back = bytearray(_FRONT.size), bytearray(_BACK.size)
        self._device.read(start + _FRONT_OFFSET, memoryview(front))
        self._device.read(start + _AREA_OFFSET + manifest.num_bytes, memoryview(back))
        magic, layout, first, num_bytes = _FRONT.unpack(front)
        (last,) = _BACK.unpack(back)
        if (magic, layout, num_bytes) != (_MAGIC, manifest.layout_hash, manifest.num_bytes):
            raise RunFault("weights_mismatch", "the buffer is not the one of the manifest")
        if first != version or last != version:
            raise RunFault("torn_weights", f"leased version {version}, found {first} and {last}")
        return DeviceArea(start + _AREA_OFFSET, manifest.num_bytes, self._device.ordinal)

    def close(self) -> None:
        """Unmap the buffer, once; what was copied from it must be complete."""
        if self._address is not None:
            self._address = None
            self._device.close_handle(self._handle)


def read_area(device: CudaDevice, area: DeviceArea) -> Iterator[memoryview]:
    """Yield the area's bytes in pieces; each is good until the next."""
    piece = np.empty(min(_PIECE_BYTES, area.num_bytes), np.uint8)
    for start in range(0, area.num_bytes, _PIECE_BYTES):
        view = piece[: min(_PIECE_BYTES, area.num_bytes - start)].data
        device.read(area.address + start, view)
        yield view


def area_hash(device: CudaDevice, area: DeviceArea) -> int:
    """Hash an area through the host; equals weights.weights_hash of the same bytes."""
    digest = xxhash.xxh3_64()
    for piece in read_area(device, area):
        digest.update(piece)
    return digest.intdigest()


def _refuse_mig(*uuids: str) -> None:
    """Raises: RunFault("mig"): CUDA IPC does not exist between MIG instances."""
    for uuid in uuids:
        if uuid.startswith("MIG-"):
            raise RunFault("mig", f"{uuid} is a MIG instance; they have no CUDA IPC")


# -- tensors -------------------------------------------------------------------------------------


def as_tensor(area: DeviceArea) -> Tensor:
    """View an area as uint8 [num_bytes] on `cuda:ordinal`; it must outlive the tensor.

    The device is told, not asked for: what CUDA says about the pointer of a masked peer is nothing
    to rely on. Cannot run without a GPU.
    """
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    device = torch.device("cuda", area.ordinal)
    storage = torch._C._construct_storage_from_data_pointer(area.address, device, area.num_bytes)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return empty.set_(storage, 0, (area.num_bytes,), (1,))


def pull_tensors(
    assemblies: Sequence[Assembly], shards: Sequence[Tensor], device: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the full model in module order, from each rank's area as uint8.

    From one rank alone they are views into its area. From several each is a tensor of its own:
    vLLM keeps them until their layer is complete, so no staging buffer could be used again. The
    copies run on the current stream; synchronize before the lease goes back.
    """
    import torch

    for entry, copies in assemblies:
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if len(shards) == 1:
            area = shards[0][copies[0].source :][: entry.num_bytes] if copies else shards[0][:0]
            yield entry.name, area.view(dtype).view(entry.shape)
            continue
        tensor = torch.empty(entry.shape, dtype=dtype, device=device)
        whole = tensor.view(-1).view(torch.uint8)
        for copy in copies:
            part = shards[copy.rank][copy.source : copy.source + copy.num_bytes]
            whole[copy.target : copy.target + copy.num_bytes].copy_(part, non_blocking=True)
        yield entry.name, tensor


def tensors_hash(entries: Sequence[WeightEntry], num_bytes: int, tensors: Sequence[Tensor]) -> int:
    """Hash tensors as weights.weights_hash hashes the weight area they are laid out in.

    Padding is zero there. Waits for the device, tensor by tensor, on the current stream.
    """
    import torch

    digest, end = xxhash.xxh3_64(), 0
    for entry, tensor in zip(entries, tensors, strict=True):
        digest.update(bytes(entry.offset - end))
        digest.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data)
        end = entry.offset + entry.num_bytes
    digest.update(bytes(num_bytes - end))
    return digest.intdigest()


# -- the self-test of a pair ---------------------------------------------------------------------


class Verdict(NamedTuple):
    """What the self-test of one (learner, sampler) pair found."""

    passed: bool
    reason: str


def pattern(seed: int, start: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return bytes that depend on their position and the seed; `start` is a multiple of 8.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a byte from another place, or of another
    pattern, is wrong in 255 of 256 cases, so a displaced page cannot look right.
    """
    first = start // 8
    words = np.arange(first, first - (-num_bytes // 8), dtype=np.uint64)
    words += np.uint64(seed % (1 << 32) << 32)
    words *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words.view(np.uint8)[:num_bytes]


class SelfTestExport:
    """The learner's end of a self-test: writes a pattern when the sampler's end asks for it."""

    def __init__(self, device: CudaDevice, num_bytes: int = SELF_TEST_BYTES) -> None:
        """Allocate a buffer of its own, next to the weights. Raises: RunFault("mig"), CudaError."""
        _refuse_mig(device.uuid)
        self._device = device
        self._num_bytes = num_bytes
        self._address: int | None = device.allocate(_whole_blocks(num_bytes))
        try:
            handle = device.export_handle(self._address)
        except RunFault:
            self.close()
            raise
        self.handle = CudaIpcHandle(handle, num_bytes, device.uuid, 0)

    def write(self, seed: int) -> None:
        """Write the pattern; it is there when this returns."""
        if self._address is None:
            raise InvalidTransition("the self-test is closed")
        for start in range(0, self._num_bytes, _PIECE_BYTES):
            piece = pattern(seed, start, min(_PIECE_BYTES, self._num_bytes - start))
            self._device.write(self._address + start, piece.data)
        self._device.synchronize()

    def close(self) -> None:
        """Free the buffer, once."""
        if self._address is not None:
            address, self._address = self._address, None
            self._device.free(address)


class SelfTestImport:
    """The sampler's end of a self-test: the learner's test buffer, mapped until it is closed."""

    def __init__(self, device: CudaDevice, handle: CudaIpcHandle) -> None:
        """Map it. Raises: RunFault("mig"), CudaError."""
        _refuse_mig(device.uuid, handle.gpu_uuid)
        self._device = device
        self._handle = handle
        self._source: int | None = device.open_handle(handle.handle)
        self._target: int | None = None
        try:
            self._target = device.allocate(handle.num_bytes)
        except RunFault:
            self.close()
            raise

    def compare(self, seed: int) -> str:
        """Pull what the learner has written; return what is wrong with it, in words, or "".

        The bytes are pulled by the copy that weights take, into memory that held something else.
        """
        if self._source is None or self._target is None:
            raise InvalidTransition("the self-test is closed")
        device, num_bytes = self._device, self._handle.num_bytes
        device.fill(self._target, 0xA5, num_bytes)
        device.copy(self._target, self._source, num_bytes)
        device.synchronize()
        wrong, first = _differences(device, self._target, num_bytes, seed)
        if not wrong:
            return ""
        return (
            f"peer access from {device.uuid} to {self._handle.gpu_uuid} is broken: of pattern "
            f"{seed}, {wrong} of {num_bytes} bytes arrived wrong, the first at {first}; often an "
            "active IOMMU or ACS"
        )

    def close(self) -> None:
        """Unmap it, once."""
        target, self._target = self._target, None
        if target is not None:
            self._device.free(target)
        if self._source is not None:
            self._source = None
            self._device.close_handle(self._handle.handle)


def self_test(
    device: CudaDevice, handle: CudaIpcHandle, order_write: Callable[[int], None]
) -> Verdict:
    """Test one pair from the sampler's end, for a caller that can wait for each pattern.

    `order_write(seed)` has the learner's end write a pattern and returns when that is done; it is
    called only after the mapping was opened.

    Raises: CudaError, RunFault("mig").
    """
    end = SelfTestImport(device, handle)
    try:
        for seed in PATTERN_SEEDS:
            order_write(seed)
            if fault := end.compare(seed):
                return Verdict(False, fault)
    finally:
        end.close()
    return Verdict(True, f"{len(PATTERN_SEEDS)} patterns of {handle.num_bytes} bytes arrived right")


def _differences(device: CudaDevice, address: int, num_bytes: int, seed: int) -> tuple[int, int]:
    """Count the bytes that are not the pattern's, and find the first; (0, 0) if all are right."""
    wrong = first = position = 0
    for piece in read_area(device, DeviceArea(address, num_bytes, device.ordinal)):
        expected = pattern(seed, position, len(piece))
        broken = np.flatnonzero(np.frombuffer(piece, np.uint8) != expected)
        if len(broken) and not wrong:
            first = position + int(broken[0])
        wrong += len(broken)
        position += len(piece)
    return wrong, first


def refusal(fault: RunFault) -> str:
    """Say in words what CUDA has refused, for a run that goes on another way.

    Raises: RunFault where another way would not help: "cuda_context_lost" if the GPU no longer
    works in this process; the fault itself if CUDA did not refuse.
    """
    if fault.name not in _REFUSALS:
        raise fault
    if isinstance(fault, CudaError) and fault.context_is_lost:
        raise RunFault(
            "cuda_context_lost",
            f"{fault.story}: this process has lost its GPU; if it does again, set `transport` to "
            "host",
        ) from fault
    return str(fault)
