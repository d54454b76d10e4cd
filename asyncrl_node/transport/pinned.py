"""Host memory pinned for a GPU: it is copied at the bus's full rate, without a staging copy.

Registering costs about 0.1 s per GB, and one call fails from 512 GiB on: so it is done in pieces.
Unpinned memory works too, only slower: a failure is told and the run goes on.

Has never run on a GPU.
"""

from __future__ import annotations

from asyncrl_node.errors import RunFault
from asyncrl_node.transport.cuda_driver import CudaDevice, host_address

PIECE_BYTES = 16 << 30


class PinnedMemory:
    """One contiguous piece of host memory, pinned until `close`, which comes before unmapping it.

    `memory` begins at a page boundary; it is not kept, so a mapping can be closed afterwards.
    """

    def __init__(
        self,
        device: CudaDevice,
        memory: memoryview,
        *,
        read_only: bool = False,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Pin all of it, or nothing. Raises: CudaError."""
        self._device = device
        self._pinned: list[int] = []
        address, end = host_address(memory), memory.nbytes
        try:
            for start in range(0, end, piece_bytes):
                size = min(piece_bytes, end - start)
                device.register_host(address + start, size, read_only=read_only)
                self._pinned.append(address + start)
        except RunFault:
            self.close()
            raise

    def close(self) -> None:
        """Unpin it, once."""
        while self._pinned:
            self._device.unregister_host(self._pinned.pop())
