"""The learner's weights on their way out: the buffer, what is offered, the tests of pairs.

    trainer -> fill -> export (host memory, or a GPU's and host memory) -> samplers

Which way each sampler takes is decided in core/transport.py; here it is made possible. The main
thread publishes, the courier's thread serves the tests; they touch different buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from asyncrl_node.config import Config
from asyncrl_node.core.transport import (
    HOST_ONLY,
    EndTest,
    PatternDone,
    PrepareTest,
    SelfTestReady,
    SelfTestUnavailable,
    TransportTerms,
    WriteTestPattern,
)
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import WeightEntry, WeightsManifest
from asyncrl_node.transport.cuda_driver import CudaDevice, open_own_gpu
from asyncrl_node.transport.cuda_ipc import SELF_TEST_BYTES, SelfTestExport, as_tensor, refusal
from asyncrl_node.transport.gpu_weights import GpuExport
from asyncrl_node.transport.pinned import PinnedMemory
from asyncrl_node.transport.weights import SharedMemoryExport, WeightExport

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class WeightSource(Protocol):
    """What has weights to publish: a trainer."""

    def copy_weights_into(self, area: memoryview) -> None:
        """Write every parameter at its manifest offset."""
        ...


@runtime_checkable
class TensorTrainer(Protocol):
    """A trainer whose weights are torch tensors, which may lie on a GPU."""

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Return the parameters in the manifest's order."""
        ...


class LearnerWeights:
    """The export of this process, with everything of its GPU that it needs."""

    def __init__(
        self,
        config: Config,
        manifest: WeightsManifest,
        path: Path,
        open_device: Callable[[], CudaDevice] = open_own_gpu,
        test_bytes: int = SELF_TEST_BYTES,
    ) -> None:
        """Reserve the buffers. `open_device` is called once, where the run has GPUs.

        Raises: RunFault("shm_full"); "no_cuda_ipc" if the setting `transport` asks for it.
        """
        self._manifest = manifest
        self._test_bytes = test_bytes
        self._device: CudaDevice | None = None
        self._pinned: PinnedMemory | None = None
        self._tests: dict[int, SelfTestExport] = {}
        self._host = SharedMemoryExport(path, manifest)
        self.export: WeightExport = self._host
        self.terms = HOST_ONLY
        if config.gpus:
            try:
                self._use_gpu(config.transport, open_device)
            except RunFault:
                self.close()
                raise

    # -- versions ----------------------------------------------------------------------------

    def publish(self, version: int, trainer: WeightSource) -> int:
        """Write the trainer's weights as `version`, complete; return their hash."""
        area = self.export.begin_write()
        if isinstance(area, memoryview):
            with area:
                trainer.copy_weights_into(area)
        elif isinstance(trainer, TensorTrainer):
            tensors = [tensor for _, tensor in trainer.named_weights()]
            fill_flat(as_tensor(area), self._manifest.entries, tensors)
        else:
            staged = bytearray(self._manifest.num_bytes)
            trainer.copy_weights_into(memoryview(staged))
            assert self._device is not None
            self._device.write(area.address, memoryview(staged))
        return self.export.end_write(version)

    def close(self) -> None:
        """Unpin, free and remove everything."""
        for test in self._tests.values():
            test.close()
        self._tests.clear()
        if self._pinned is not None:
            self._pinned.close()
        self.export.close()
        self._host.close()
        if self._device is not None:
            self._device.close()

    # -- tests of pairs ------------------------------------------------------------------------

    def prepare_test(self, order: PrepareTest) -> SelfTestReady | SelfTestUnavailable:
        """Make the test buffer for one sampler."""
        assert self._device is not None
        assert order.sampler not in self._tests, f"sampler {order.sampler} has a test already"
        try:
            test = SelfTestExport(self._device, self._test_bytes)
        except RunFault as fault:
            reason = f"the learner cannot make a test buffer ({refusal(fault)})"
            return SelfTestUnavailable(order.sampler, order.incarnation, reason)
        self._tests[order.sampler] = test
        return SelfTestReady(order.sampler, order.incarnation, (test.handle,))

    def write_pattern(self, order: WriteTestPattern) -> PatternDone:
        """Write a pattern; it is there when this returns. Raises: CudaError."""
        self._tests[order.sampler].write(order.seed)
        return PatternDone(order.sampler, order.incarnation, order.rank, order.seed)

    def end_test(self, order: EndTest) -> None:
        """Free the test buffer of one sampler."""
        self._tests.pop(order.sampler).close()

    # -- the GPU -----------------------------------------------------------------------------

    def _use_gpu(self, setting: str, open_device: Callable[[], CudaDevice]) -> None:
        """Export from the GPU, if it can be; else say why not, and be quick through the host."""
        try:
            self._device = open_device()
            if setting == "host":
                self.terms = TransportTerms(reason="`transport` is host")
            else:
                export = GpuExport(self._device, self._manifest, self._host)
                self.export = export
                self.terms = TransportTerms((export.handle,), "", setting == "cuda_ipc")
        except RunFault as fault:
            reason = f"the learner cannot export its GPU's memory ({refusal(fault)})"
            if setting == "cuda_ipc":
                way_out = "set `transport` to auto and weights go through host memory"
                raise RunFault("no_cuda_ipc", f"{reason}; {way_out}") from fault
            self.terms = TransportTerms(reason=reason)
        if self._device is not None:
            self._pin(self._device)

    def _pin(self, device: CudaDevice) -> None:
        try:
            self._pinned = PinnedMemory(device, self._host.memory())
        except RunFault as fault:
            log.warning("weights in host memory stay unpinned, slower: %s", refusal(fault))


def fill_flat(flat: Tensor, entries: tuple[WeightEntry, ...], tensors: list[Tensor]) -> None:
    """Write `tensors` into `flat`, uint8 [num_bytes], at the places and in the types of `entries`.

    The same round-to-nearest-even cast as FSDP2's, so sampler and learner see the same bits.
    """
    import torch

    views = [
        flat[entry.offset : entry.offset + entry.num_bytes]
        .view(getattr(torch, entry.dtype))
        .view(entry.shape)
        for entry in entries
    ]
    with torch.no_grad():
        torch._foreach_copy_(views, tensors)
