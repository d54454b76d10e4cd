"""The checks' other processes with a fake driver: device memory is files, seen by CPU tensors.

torch is imported where a command needs it only: most do not, and it takes seconds.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_node.transport import cuda_driver, cuda_ipc
from asyncrl_node.transport.weights import DeviceArea
from tests.transport.shared_cuda import FOLDER, SharedCuda

if TYPE_CHECKING:
    import torch


def see(area: DeviceArea) -> torch.Tensor:
    """View fake device memory."""
    import torch

    memory = (ctypes.c_ubyte * area.num_bytes).from_address(area.address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def use(role: str, put: Callable[[object, str, object], None] = setattr) -> SharedCuda:
    """Put a fake in the driver's place; returns it."""
    library = SharedCuda(Path(os.environ[FOLDER]), role)
    put(cuda_driver, "load_library", lambda: library)
    put(cuda_ipc, "as_tensor", see)
    return library


def serve(pipe: Connection) -> None:
    """Be the other process."""
    use("sampler")
    from asyncrl_node.engines import cuda_flat
    from perf.gpu_checks.peer import PeerState, serve_peer

    fetch = PeerState.fetch

    def fetch_here(state: PeerState, *arguments: Any) -> Any:
        import torch

        setattr(torch.cuda, "current_device", lambda: 0)  # noqa: B010
        return fetch(state, *arguments)

    def pull_here(plan: Any, areas: Any, device: str) -> Any:
        return cuda_ipc.pull_tensors(plan, areas, "cpu")

    setattr(PeerState, "fetch", fetch_here)  # noqa: B010
    setattr(cuda_flat, "pull_tensors", pull_here)  # noqa: B010
    serve_peer(pipe)
