"""The learner's GPU memory as vLLM's worker takes it: every parameter a tensor of its own.

    fetch     under the lease: check, pull each tensor in module order, wait, check again
    tensors   hand them over
    digest    hash of them, made on a thread meanwhile

The lease goes back after `fetch`, before vLLM loads, so all of a version is here once: it costs the
size of the model on the sampler's GPU, from `fetch` until it is loaded and hashed.

Has never run on a GPU: its copies are tested with the CPU in the GPU's place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from asyncrl_node.core.shards import assemble
from asyncrl_node.engines.base import FlatHandle
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import CudaIpcHandle, WeightsManifest
from asyncrl_node.transport import cuda_driver
from asyncrl_node.transport.cuda_driver import CudaDevice, CudaDriver
from asyncrl_node.transport.cuda_ipc import as_tensor, pull_tensors, tensors_hash
from asyncrl_node.transport.gpu_weights import open_shards
from asyncrl_node.transport.weights import DeviceArea

if TYPE_CHECKING:
    from torch import Tensor


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The learner's buffers, and which sampler pulls them."""

    weights: tuple[CudaIpcHandle, ...]
    sampler: int


def gpu_handle(weights: tuple[CudaIpcHandle, ...], sampler: int) -> FlatHandle:
    """Make what vLLM's worker is given: {"kind": "cuda_ipc", "place": _Place in msgpack}."""
    return {"kind": "cuda_ipc", "place": msgspec.msgpack.encode(_Place(weights, sampler))}


class CudaImport:
    """The receiving end in device memory; see `vllm_weights.FlatImport`."""

    def __init__(
        self,
        device: CudaDevice,
        weights: Sequence[CudaIpcHandle],
        manifest: WeightsManifest,
        sampler: int,
        *,
        on: str,
        see: Callable[[DeviceArea], Tensor] = as_tensor,
    ) -> None:
        """Map the buffer of each learner rank, for life.

        on   torch's name of the device that `device` is
        see  views a mapped area as uint8

        Raises: RunFault("mig"), RunFault("weights_mismatch"), CudaError.
        """
        self._device = device
        self._manifest = manifest
        self._on = on
        self._see = see
        self._shards = open_shards(device, weights, manifest)
        self._plan = assemble(manifest.entries, len(weights), sampler)
        self._tensors: deque[tuple[str, Tensor]] = deque()
        """What was pulled and not handed over yet."""
        self._thread = ThreadPoolExecutor(1, "weights-hash")
        self._digest: Future[int] | None = None

    @classmethod
    def of_handle(cls, handle: FlatHandle, manifest: WeightsManifest) -> CudaImport:
        """Open what `gpu_handle` names, on the worker's own GPU.

        Raises: RunFault("bad_handle"), and what the constructor raises.
        """
        import torch

        encoded = handle["place"]
        assert isinstance(encoded, bytes)
        try:
            place = msgspec.msgpack.decode(encoded, type=_Place)
        except msgspec.MsgspecError as error:
            raise RunFault("bad_handle", f"not the handle of weight buffers: {error}") from error
        ordinal = torch.cuda.current_device()
        device = CudaDriver(cuda_driver.load_library()).open_device(ordinal)
        return cls(device, place.weights, manifest, place.sampler, on=f"cuda:{ordinal}")

    def fetch(self, version: int) -> None:
        """Pull every parameter, and check the version before and after.

        Raises: RunFault("torn_weights") if a rank's buffer does not hold exactly that version.
        """
        if self._digest is not None:
            self._digest.result()  # it reads what is about to be let go
        self._tensors.clear()
        areas = [self._see(shard.view(version)) for shard in self._shards]
        for name, tensor in pull_tensors(self._plan, areas, self._on):
            # Of one rank they are views of the learner's memory, which is overwritten later.
            self._tensors.append((name, tensor.clone() if len(areas) == 1 else tensor))
        self._device.synchronize()
        for shard in self._shards:
            shard.view(version)
        pulled = [tensor for _, tensor in self._tensors]
        self._digest = self._thread.submit(
            tensors_hash, self._manifest.entries, self._manifest.num_bytes, pulled
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter with its Hugging Face name, in the manifest's order, once."""
        while self._tensors:
            yield self._tensors.popleft()

    def digest(self) -> int:
        """Return the hash of what was pulled; the wait is ended by the thread."""
        assert self._digest is not None, "nothing was fetched"
        return self._digest.result()

    def close(self) -> None:
        """Unmap the buffers and give the device back."""
        self._thread.shutdown()
        self._tensors.clear()
        for shard in self._shards:
            shard.close()
        self._device.close()
