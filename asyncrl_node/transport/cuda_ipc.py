"""The weight buffer in device memory: the learner's GPU holds it, every sampler maps it once.

    CudaIpcExport (learner)   allocate -> handle, then per version: begin_write, kernels, end_write
    CudaIpcImport (sampler)   open once, for life, then per version, leased: view, copies, view

The same idea, leases and faults as host shared memory (weights.py); what differs is that an area of
device memory is an address and not a memoryview, so kernels fill it and `read_area` or `as_tensor`
look into it. It is faster and barrier-free: a sampler pulls when it likes, and a restarted one
opens the same 64-byte handle again.

Layout: 192 unused bytes, 64-byte front (magic, layout hash, version, bytes), the weights at a
256-byte boundary, 8-byte back (version).

Peer access can be broken in silence: under an IOMMU every call succeeds and the data is wrong
(pytorch#84803, open-gpu-kernel-modules#1257). So before its first use every pair of learner and
sampler passes a self-test: patterns written after the mapping was opened, pulled as weights are,
compared byte by byte. Whatever stands in the way, `choose_transport` says so in words for the log
and the run goes on through host shared memory.

Has never run on a GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from asyncrl_node.core.shards import Assembly, layout_hash_input, shard_layout
from asyncrl_node.errors import InvalidTransition, RunFault
from asyncrl_node.messages import Message, WeightEntry, WeightsManifest
from asyncrl_node.transport.cuda_driver import HANDLE_BYTES, CudaDevice, CudaError

if TYPE_CHECKING:
    from torch import Tensor

SELF_TEST_BYTES = 64 << 20
PATTERNS = (1, 2, 3)
"""Seeds of the self-test's patterns."""

_FRONT = struct.Struct("<8sQqQ")
_FRONT_OFFSET = 192
_AREA_OFFSET = 256
_BACK = struct.Struct("<q")
_MAGIC = b"ARLCUDA\0"
_WRITING = -1
_REFUSALS = frozenset({"cuda_error", "mig", "no_cuda_driver", "not_exportable"})
"""Faults that say: not this way. Any other, of a peer that has gone say, is not ours to hide."""
_PIECE_BYTES = 16 << 20
"""Device memory passes through the host in pieces of this size."""


class DeviceArea(NamedTuple):
    """Weights in device memory, readable from the device `ordinal` of this process."""

    address: int
    num_bytes: int
    ordinal: int


class CudaIpcHandle(Message, frozen=True):
    """How to open a buffer of another process. Raises: ValueError for a handle of another size."""

    handle: bytes
    """64 opaque bytes, good for any number of processes while the exporter lives."""
    num_bytes: int
    """The whole allocation, front and back included."""
    gpu_uuid: str
    """The GPU that the bytes lie on."""
    layout_hash: int

    def __post_init__(self) -> None:
        if len(self.handle) != HANDLE_BYTES:
            raise ValueError(f"a handle has {HANDLE_BYTES} bytes, this one {len(self.handle)}")
        if self.num_bytes < 1:
            raise ValueError(f"a buffer of {self.num_bytes} bytes")


_handle_decoder = msgspec.msgpack.Decoder(CudaIpcHandle)


def decode_handle(encoded: bytes) -> CudaIpcHandle:
    """Decode a handle. Raises: RunFault("bad_handle") for anything else."""
    try:
        return _handle_decoder.decode(encoded)
    except msgspec.MsgspecError as error:
        raise RunFault("bad_handle", f"not the handle of a weight buffer: {error}") from error


def device_buffer_bytes(num_weight_bytes: int) -> int:
    """Size of the whole buffer."""
    return _AREA_OFFSET + num_weight_bytes + _BACK.size


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
        self._address: int | None = device.allocate(size)
        try:
            handle = device.export_handle(self._address)
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

    def end_write(self, version: int) -> int:
        """Mark the buffer as holding `version`, complete; return the hash of the weight area.

        What was begun on the streams is waited for first: a version that is announced is there.
        """
        if not self._writing:
            raise InvalidTransition(f"end_write({version}) without begin_write")
        self._synchronize()
        digest = area_hash(self._device, self._area())
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


# -- the self-test of a pair ---------------------------------------------------------------------


class Verdict(NamedTuple):
    """What the self-test of one (learner, sampler) pair found."""

    passed: bool
    reason: str


class TransportChoice(NamedTuple):
    """Which way the weights go."""

    transport: Literal["cuda_ipc", "host"]
    words: str
    """Why, for the log."""


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
        self._address: int | None = device.allocate(num_bytes)
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


def self_test(
    device: CudaDevice, handle: CudaIpcHandle, order_write: Callable[[int], None]
) -> Verdict:
    """Test one pair from the sampler's end; maps the learner's test buffer and unmaps it again.

    `order_write(seed)` has the learner's end write a pattern and returns when that is done; it is
    called only after the mapping was opened. The bytes are pulled by the copy that weights take,
    into memory that held something else before.

    Raises: CudaError, RunFault("mig").
    """
    _refuse_mig(device.uuid, handle.gpu_uuid)
    address = device.open_handle(handle.handle)
    try:
        target = device.allocate(handle.num_bytes)
        try:
            for seed in PATTERNS:
                device.fill(target, 0xA5, handle.num_bytes)
                order_write(seed)
                device.copy(target, address, handle.num_bytes)
                device.synchronize()
                wrong, first = _differences(device, target, handle.num_bytes, seed)
                if wrong:
                    reason = (
                        f"of pattern {seed}, {wrong} of {handle.num_bytes} bytes arrived wrong, "
                        f"the first at {first}"
                    )
                    return Verdict(False, reason)
        finally:
            device.free(target)
    finally:
        device.close_handle(handle.handle)
    return Verdict(True, f"{len(PATTERNS)} patterns of {handle.num_bytes} bytes arrived right")


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


# -- the choice ----------------------------------------------------------------------------------


def offer_transport(
    open_device: Callable[[], CudaDevice], num_bytes: int = SELF_TEST_BYTES
) -> SelfTestExport | TransportChoice:
    """Make the learner's end of the self-test, or say why there is none: then it is host memory.

    `open_device` returns the process's one CudaDevice; it stays the caller's.

    Raises: RunFault("cuda_context_lost") if the GPU no longer works in this process.
    """
    try:
        return SelfTestExport(open_device(), num_bytes)
    except RunFault as fault:
        return _host(fault, "the learner cannot export its memory")


def choose_transport(
    open_device: Callable[[], CudaDevice],
    offer: CudaIpcHandle,
    order_write: Callable[[int], None],
) -> TransportChoice:
    """Choose for one (learner, sampler) pair, at the sampler's end, by testing it.

    `open_device` returns the process's one CudaDevice, on its own GPU; it stays the caller's.
    `offer` and `order_write` are of the learner's end (offer_transport). Whatever CUDA refuses
    leads to host memory.

    Raises: RunFault("cuda_context_lost") if the GPU no longer works in this process; what
    `order_write` raises because the learner has gone.
    """
    try:
        device = open_device()
        verdict = self_test(device, offer, order_write)
    except RunFault as fault:
        return _host(fault, f"no mapping of {offer.gpu_uuid}")
    if not verdict.passed:
        words = (
            f"peer access from {device.uuid} to {offer.gpu_uuid} is broken: {verdict.reason}; "
            "often an active IOMMU or ACS. Weights go through host shared memory"
        )
        return TransportChoice("host", words)
    words = f"CUDA IPC from {offer.gpu_uuid} to {device.uuid}: {verdict.reason}"
    return TransportChoice("cuda_ipc", words)


def agree(choices: Sequence[TransportChoice]) -> TransportChoice:
    """Decide for the run: CUDA IPC if every pair has it, else host memory, in the words of the
    first pair that has not.
    """
    for choice in choices:
        if choice.transport == "host":
            return choice
    if not choices:
        return TransportChoice("host", "no pair was tested: host shared memory")
    return TransportChoice("cuda_ipc", f"CUDA IPC: all {len(choices)} pairs passed the self-test")


def _host(fault: RunFault, what: str) -> TransportChoice:
    """Fall back. Raises: RunFault where falling back would not help."""
    if fault.name not in _REFUSALS:
        raise fault
    if isinstance(fault, CudaError) and fault.context_is_lost:
        raise RunFault(
            "cuda_context_lost",
            f"{fault.story}: this process has lost its GPU; restart it with weights through "
            "host shared memory",
        ) from fault
    return TransportChoice("host", f"{what} ({fault}): weights go through host shared memory")
