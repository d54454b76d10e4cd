"""Weights from the learner's flat buffer into a running vLLM; this is code of vLLM's worker.

    init      map the buffer; compare the manifest with the model, name by name
    fetch     copy it, under the lease, while decoding goes on before and after
    start     every parameter back to the shape a checkpoint has (vLLM's layerwise reload)
    update    hand the copy's tensors to the model's own loader
    finish    processed weights into the storage they had, so captured graphs stay valid
    digest    hash of the copy, made on a thread meanwhile

Between start and finish the model cannot run: the sampler pauses vLLM's scheduler around the
three. The loader keeps the tensors until a layer is complete, hence the copy; the learner may
overwrite its buffer as soon as `fetch` has returned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from asyncrl_node.engines.base import FlatHandle
from asyncrl_node.engines.cuda_flat import CudaImport
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import WeightEntry, WeightsManifest
from asyncrl_node.transport.weights import SharedMemoryImport, weights_hash

_NAMES_SHOWN = 5

# At every load vLLM warns of modules for which nothing comes: the rotary table, which is put back
# as it was, and a tied head (see _renew_tied_heads). check_names is stricter, and not a warning.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: "Failed to load weights" not in str(record.msg)
)


class FlatImport(Protocol):
    """One transport's receiving end: it copies the weight area to where this worker reads it."""

    def fetch(self, version: int) -> None:
        """Copy the buffer, under a lease for `version`.

        Raises: RunFault("torn_weights") if the buffer does not hold exactly that version.
        """
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter with its Hugging Face name, in the manifest's order.

        vLLM keeps them until their layer is complete: each stays as it is until the next `fetch`.
        """
        ...

    def digest(self) -> int:
        """Return the hash of the copy (transport.weights.weights_hash)."""
        ...

    def close(self) -> None:
        """Let go of the buffer and of the copy."""
        ...


def import_flat(handle: FlatHandle, manifest: WeightsManifest) -> FlatImport:
    """Open the learner's buffer; `handle` says by which transport.

    handle  {"kind": "host", "path": the file in shared memory}, or cuda_flat.gpu_handle's

    Raises: RunFault("weights_mismatch"), CudaError.
    """
    if handle["kind"] == "host":
        return HostImport(Path(str(handle["path"])), manifest)
    if handle["kind"] == "cuda_ipc":
        return CudaImport.of_handle(handle, manifest)
    raise RunFault("weights_mismatch", f"no transport of the kind {handle['kind']!r} here")


class HostImport:
    """The receiving end in host shared memory: one private copy, hashed on a thread."""

    def __init__(self, path: Path, manifest: WeightsManifest) -> None:
        self._entries = manifest.entries
        self._import = SharedMemoryImport(path, manifest)
        pin = torch.cuda.is_available()  # then vLLM copies it on at the bus's full rate
        self._copy = torch.empty(manifest.num_bytes, dtype=torch.uint8, pin_memory=pin)
        self._thread = ThreadPoolExecutor(1, "weights-hash")
        self._digest: Future[int] | None = None

    def fetch(self, version: int) -> None:
        """Copy, and check the version before and after; see `FlatImport.fetch`."""
        if self._digest is not None:
            self._digest.result()  # it reads what is about to be overwritten
        copy = self._copy.numpy().data
        copy[:] = self._import.view(version)
        self._import.check(version)
        self._digest = self._thread.submit(weights_hash, copy)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """View every parameter in the copy."""
        for entry in self._entries:
            area = self._copy[entry.offset : entry.offset + entry.num_bytes]
            yield entry.name, area.view(getattr(torch, entry.dtype)).view(entry.shape)

    def digest(self) -> int:
        """Return the hash of the copy; the wait is ended by the thread."""
        assert self._digest is not None, "nothing was fetched"
        return self._digest.result()

    def close(self) -> None:
        """Unmap the buffer."""
        self._thread.shutdown()
        self._import.close()


@dataclass
class FlatInit(WeightTransferInitInfo):  # type: ignore[misc]
    """How to reach the learner's buffer."""

    manifest: bytes
    """WeightsManifest, in msgpack."""
    handle: FlatHandle
    """See `import_flat`."""


@dataclass
class FlatUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Nothing but the version: what was fetched is what is loaded."""

    version: int


class FlatWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's "arl_flat" (vllm_plugin.py registers it)."""

    init_info_cls = FlatInit
    update_info_cls = FlatUpdate

    _flat: FlatImport | None = None
    _parameters: frozenset[str]
    """vLLM's names, as they are between loads: during one, a tied head stands apart."""
    _fetched = -1

    def init_transfer_engine(self, init_info: FlatInit) -> None:
        """Map the buffer. Raises: RunFault("weights_mismatch") for another model's manifest."""
        self.shutdown()
        manifest = msgspec.msgpack.decode(init_info.manifest, type=WeightsManifest)
        check_names(expected_names(self.model), manifest.entries)
        self._parameters = frozenset(name for name, _ in self.model.named_parameters())
        self._flat = import_flat(init_info.handle, manifest)

    def fetch(self, version: int) -> None:
        """Copy the buffer, under the lease; the model stays as it is."""
        assert self._flat is not None, "fetch before init"
        self._flat.fetch(version)
        self._fetched = version

    def digest(self) -> int:
        """Return the hash of what was fetched."""
        assert self._flat is not None, "digest before init"
        return self._flat.digest()

    def start_weight_update(self) -> None:
        """Put every parameter back to the shape a checkpoint has; the model cannot run now."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FlatUpdate) -> None:
        """Hand over the copy. Raises: RunFault("weights_mismatch"); the model is lost then."""
        assert self._flat is not None
        assert self._fetched == update_info.version, f"{self._fetched} is what was fetched"
        loaded = self.model.load_weights(self._flat.tensors())
        if missing := sorted(self._parameters - loaded):
            raise RunFault("weights_mismatch", f"vllm did not load: {_shown(missing)}")

    def finish_weight_update(self) -> None:
        """Process the weights into the storage they had; the model runs again."""
        finalize_layerwise_reload(self.model, self.model_config)
        _renew_tied_heads(self.model)

    def shutdown(self) -> None:
        """Let go of the learner's buffer."""
        if self._flat is not None:
            self._flat.close()
        self._flat = None


class FlatWorker:
    """What our engine adds to vLLM's worker; the sampler calls it by name (collective_rpc)."""

    weight_transfer_engine: FlatWeightTransferEngine

    def arl_fetch(self, version: int) -> None:
        """Copy the learner's buffer, under the lease."""
        self.weight_transfer_engine.fetch(version)

    def arl_digest(self) -> int:
        """Return the hash of the copy."""
        return self.weight_transfer_engine.digest()


def expected_names(model: nn.Module) -> set[str]:
    """Give the names that a checkpoint of `model` has: fused parameters taken apart.

    vLLM's own check is a warning: it would run on with whatever a missing part held before.
    """
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    names: set[str] = set()
    for name, _ in model.named_parameters():
        *path, module, kind = name.split(".")
        names.update(".".join([*path, part, kind]) for part in fused.get(module, [module]))
    return names


def check_names(expected: set[str], entries: tuple[WeightEntry, ...]) -> None:
    """Compare the manifest with the model's names.

    Raises: RunFault("weights_mismatch") that lists what is missing or left over.
    """
    given = {entry.name for entry in entries}
    faults = {"missing": sorted(expected - given), "left over": sorted(given - expected)}
    story = "; ".join(f"{what}: {_shown(names)}" for what, names in faults.items() if names)
    if story:
        raise RunFault(
            "weights_mismatch",
            f"the learner's parameters are not this model's: {story}. "
            "Start sampler and learner from the same model folder",
        )


def _renew_tied_heads(model: nn.Module) -> None:
    """Pack a tied head anew: nothing is loaded for it, so finish leaves its packed copy stale.

    Only on CPUs, where a linear layer multiplies by a packed copy (vllm 0.32).
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            weight = module.weight
            if isinstance(weight, Tensor) and weight.numel():
                module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]


def _shown(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
