"""What vLLM loads into each of its processes (entry point group `vllm.general_plugins`).

It makes our weight-transfer engine known, and ties vLLM's own processes to the sampler: without
that, a sampler killed by SIGKILL leaves an engine process of its own behind (vllm#55510).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

BACKEND = "arl_flat"
"""The name of our weight-transfer engine in vLLM's factory."""
WORKER_EXTENSION = "asyncrl_node.engines.vllm_weights.FlatWorker"
"""The methods that vLLM's worker gets from us."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Set up this process; vLLM calls it in the sampler and in every child, perhaps repeatedly."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if multiprocessing.parent_process() is not None:
        _die_with_parent()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "asyncrl_node.engines.vllm_weights", "FlatWeightTransferEngine"
        )


def _die_with_parent() -> None:
    """Have the kernel kill this process when the thread that made it ends, however it ends.

    So an engine must be made on a thread that lives as long as the sampler: its main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() != parent.pid:  # it died before the call
        os._exit(1)
