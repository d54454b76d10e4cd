"""Both ends of the weight transport where the learner's weights lie on a GPU.

    GpuExport (learner)   kernels fill device memory -> host memory -> hash -> both are marked
    GpuImport (sampler)   every rank's buffer is mapped; a version is pulled into host memory

GpuImport serves an engine in the sampler's process that takes a memoryview. vLLM's worker pulls
device to device instead (engines/cuda_flat.py).

Has never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl_node.core.shards import flat_copies
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import CudaIpcHandle, WeightsManifest
from asyncrl_node.transport.cuda_driver import CudaDevice
from asyncrl_node.transport.cuda_ipc import CudaIpcExport, CudaIpcImport, shard_manifest
from asyncrl_node.transport.weights import DeviceArea, SharedMemoryExport, layout_hash


class GpuExport:
    """A WeightExport of a learner of one rank: device memory, and host memory beside it.

    Samplers that CUDA IPC does not serve read the host memory. It costs little: the hash has to
    pass through the host anyway. Several ranks would each write their rows there, at the places of
    `core.shards.flat_copies`; the learner has one rank so far.
    """

    def __init__(
        self, device: CudaDevice, manifest: WeightsManifest, host: SharedMemoryExport
    ) -> None:
        """Allocate device memory; take over `host`, unless it raises.

        Raises: RunFault("mig"), CudaError.
        """
        self._device = device
        self._num_bytes = manifest.num_bytes
        self._host = host
        shard = shard_manifest(manifest.entries, 1, 0)
        self._export = CudaIpcExport(device, shard, device.synchronize)

    @property
    def handle(self) -> CudaIpcHandle:
        """How samplers open the device memory."""
        return self._export.handle

    def begin_write(self) -> DeviceArea:
        """Mark both as torn and return the device's weight area, to be written by kernels."""
        self._host.begin_write().release()
        return self._export.begin_write()

    def end_write(self, version: int) -> int:
        """Wait for the kernels, mark both as holding `version`; return the hash."""

        def copy_and_hash(area: DeviceArea) -> int:
            with self._host.begin_write() as memory:
                self._device.read(area.address, memory)
            return self._host.end_write(version)

        return self._export.end_write(version, copy_and_hash)

    def close(self) -> None:
        """Free the device memory and remove the host memory."""
        self._export.close()
        self._host.close()


class GpuImport:
    """A WeightImport: the buffers of all learner ranks, mapped for life, put together in host
    memory.
    """

    def __init__(
        self,
        device: CudaDevice,
        handles: Sequence[CudaIpcHandle],
        manifest: WeightsManifest,
        sampler: int,
    ) -> None:
        """Open the buffer of each rank; `sampler` rotates the order of pulling.

        Raises: RunFault("mig"), RunFault("weights_mismatch"), CudaError.
        """
        self._device = device
        self._shards = open_shards(device, handles, manifest)
        self._copies = flat_copies(manifest.entries, len(handles), sampler)
        self._flat = np.zeros(manifest.num_bytes, np.uint8)

    def view(self, version: int) -> memoryview:
        """Pull the weights, under a lease for `version`; the view is good until the next pull.

        Raises: RunFault("torn_weights").
        """
        areas = [shard.view(version) for shard in self._shards]
        flat = self._flat.data
        for copy in self._copies:
            source = areas[copy.rank].address + copy.source
            self._device.read(source, flat[copy.target : copy.target + copy.num_bytes])
        return flat.toreadonly()

    def check(self, version: int) -> None:
        """Check that every rank still holds `version`. Raises: RunFault("torn_weights")."""
        for shard in self._shards:
            shard.view(version)

    def close(self) -> None:
        """Unmap the buffers."""
        for shard in self._shards:
            shard.close()


def open_shards(
    device: CudaDevice, handles: Sequence[CudaIpcHandle], manifest: WeightsManifest
) -> list[CudaIpcImport]:
    """Open the buffer of each learner rank, all or none.

    Raises: RunFault("mig"), RunFault("weights_mismatch"), CudaError.
    """
    if layout_hash(manifest.entries) != manifest.layout_hash:
        raise RunFault("weights_mismatch", "the manifest does not hash to its own hash")
    shards: list[CudaIpcImport] = []
    try:
        for rank, handle in enumerate(handles):
            shard = shard_manifest(manifest.entries, len(handles), rank)
            shards.append(CudaIpcImport(device, handle, shard))
    except RunFault:
        for opened in shards:
            opened.close()
        raise
    return shards
