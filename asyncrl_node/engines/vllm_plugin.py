"""What vLLM loads into each of its processes (entry point group `vllm.general_plugins`).

It makes our weight-transfer engine known, and ties vLLM's own processes to the sampler: without
that, a sampler killed by SIGKILL leaves an engine process of its own behind (vllm#55510). And it
has workers meet in the folder of the run's sockets: a killed engine would leave the file in /tmp.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import uuid

BACKEND = "arl_flat"
"""The name of our weight-transfer engine in vLLM's factory."""
WORKER_EXTENSION = "asyncrl_node.engines.vllm_weights.FlatWorker"
"""The methods that vLLM's worker gets from us."""

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Names the folder of the run's sockets, which is swept after the run."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Set up this process; vLLM calls it in the sampler and in every child, perhaps repeatedly."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if multiprocessing.parent_process() is not None:
        _die_with_parent()
    if SOCKETS_VARIABLE in os.environ:
        _meet_in(os.environ[SOCKETS_VARIABLE])
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


def _meet_in(folder: str) -> None:
    """Have vLLM make the file by which the workers of an engine find each other in `folder`."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    for module in (multiproc_executor, uniproc_executor):
        assert callable(module.get_file_store_init_method), "vllm 0.32 has it"
        module.get_file_store_init_method = lambda: f"file://{folder}/vllm_dist_{uuid.uuid4().hex}"
