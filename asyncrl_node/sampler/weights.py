"""The sampler's end of the weights: it obeys the open phase of core/transport.py.

What CUDA refuses is an answer (TransportRefused), and leads to host memory. A test takes a second
or less and the sampler has no work yet, so nothing here waits in the background.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl_node.core.transport import (
    ComparePattern,
    OpenTest,
    OpenWeights,
    PatternCompared,
    SelfTestOpened,
    TransportRefused,
    WeightsOpened,
)
from asyncrl_node.engines.base import Decoded, Engine
from asyncrl_node.errors import RunFault
from asyncrl_node.transport.cuda_driver import CudaDevice, open_own_gpu
from asyncrl_node.transport.cuda_ipc import SelfTestImport, refusal
from asyncrl_node.transport.gpu_weights import GpuImport
from asyncrl_node.transport.pinned import PinnedMemory
from asyncrl_node.transport.weights import SharedMemoryImport, WeightImport

log = logging.getLogger(__name__)


class SamplerWeights:
    """What this process has open of the learner's memory."""

    def __init__(
        self,
        sampler: int,
        path: Path,
        *,
        has_gpu: bool,
        open_device: Callable[[], CudaDevice] = open_own_gpu,
    ) -> None:
        """Open nothing yet. `path` is the host memory; `open_device` is called at most once."""
        self._sampler = sampler
        self._path = path
        self._has_gpu = has_gpu
        self._open_device = open_device
        self._device: CudaDevice | None = None
        self._tests: list[SelfTestImport] = []
        self._pinned: PinnedMemory | None = None
        self._import: WeightImport | None = None

    @property
    def source(self) -> WeightImport:
        """The open weights, for an engine in this process."""
        assert self._import is not None, "weights before OpenWeights"
        return self._import

    # -- the self-test -----------------------------------------------------------------------

    def open_test(self, order: OpenTest) -> SelfTestOpened | TransportRefused:
        """Map the test buffer of each rank."""
        try:
            device = self._gpu()
            for handle in order.tests:
                self._tests.append(SelfTestImport(device, handle))
        except RunFault as fault:
            return TransportRefused(f"the learner's memory cannot be mapped ({refusal(fault)})")
        return SelfTestOpened()

    def compare(self, order: ComparePattern) -> PatternCompared | TransportRefused:
        """Pull one pattern and compare it."""
        try:
            fault = self._tests[order.rank].compare(order.seed)
        except RunFault as error:
            return TransportRefused(f"the learner's memory cannot be read ({refusal(error)})")
        return PatternCompared(order.rank, order.seed, fault)

    def close_test(self) -> None:
        """Unmap the test buffers."""
        for test in self._tests:
            test.close()
        self._tests.clear()

    # -- the weights ---------------------------------------------------------------------------

    def open(self, order: OpenWeights) -> WeightsOpened | TransportRefused | None:
        """Open the weights for an engine in this process; None for host memory.

        Raises: RunFault("weights_mismatch").
        """
        self._close_import()
        if order.kind == "cuda_ipc":
            try:
                self._import = GpuImport(self._gpu(), order.weights, order.manifest, self._sampler)
            except RunFault as fault:
                return TransportRefused(f"the weights cannot be mapped ({refusal(fault)})")
            return WeightsOpened()
        host = SharedMemoryImport(self._path, order.manifest)
        self._import = host
        if self._has_gpu:
            self._pin(host)
        return None

    def leave_gpu(self) -> None:
        """Give this process's context back: the engine's own process opens the weights."""
        self.close_test()
        if self._device is not None:
            self._device.close()
            self._device = None

    def close(self) -> None:
        """Let go of everything."""
        self._close_import()
        self.leave_gpu()

    def _close_import(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        if self._import is not None:
            self._import.close()
            self._import = None

    def _gpu(self) -> CudaDevice:
        if self._device is None:
            self._device = self._open_device()
        return self._device

    def _pin(self, host: SharedMemoryImport) -> None:
        try:
            with host.memory() as memory:
                self._pinned = PinnedMemory(self._gpu(), memory, read_only=True)
        except RunFault as fault:
            log.warning("weights in host memory stay unpinned, slower: %s", refusal(fault))


async def answer_canary(
    engine: Engine, tokens: Sequence[int], num_decoded: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Decode `num_decoded` tokens after the canary and score all of them in one pass.

    Returns: scores of tokens[1:] and of what was decoded; the latter's logprobs as decoded. None
    of either without a canary.
    """
    if not tokens:
        return (), ()
    decoded = Decoded([], [])
    if num_decoded:
        decoded = await engine.decode(tokens, num_decoded)
    scores = await engine.score([*tokens, *decoded.tokens])
    return tuple(scores), tuple(decoded.logprobs)
