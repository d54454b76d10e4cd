"""Does a process sit on the GPUs that it was given? Asked of the driver itself, at its start.

Indices differ between NVML, CUDA and a mask, and a mistake is silent: two processes on one card,
or a second context on the learner's. So each process reads the UUIDs of what it sees and compares
them with the placement, before it touches a card. No context is made.

Has not run on a GPU; tests put a fake in the driver's place.
"""

from __future__ import annotations

import ctypes
import logging
import os
import uuid
from collections.abc import Callable, Sequence

from asyncrl_node.errors import RunFault
from asyncrl_node.transport.cuda_driver import (
    CudaDriver,
    CudaError,
    DriverLibrary,
    Uuid,
    load_library,
)

log = logging.getLogger(__name__)

_NO_SUCH_DEVICE = ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE")


def check_own_gpus(given: Sequence[str], load: Callable[[], DriverLibrary] = load_library) -> None:
    """Compare the GPUs that this process sees with those it was `given`, UUIDs in order.

    Raises: RunFault("wrong_gpu") for any difference; "no_cuda_driver" or "cuda_error".
    """
    seen = visible_uuids(load(), most=len(given) + 1)
    log.info("sits on %s", ", ".join(seen) or "no GPU")
    if seen != list(given):
        raise RunFault(
            "wrong_gpu",
            f"this process was given {', '.join(given)} and sees {', '.join(seen) or 'none'}; "
            f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}",
        )


def visible_uuids(library: DriverLibrary, most: int) -> list[str]:
    """Read the UUIDs of the first `most` devices that this process sees, in its own order.

    Raises: CudaError
    """
    uuids: list[str] = []
    try:
        driver = CudaDriver(library)
        for ordinal in range(most):
            device, octets = ctypes.c_int(), Uuid()
            driver.check("cuDeviceGet", library.cuDeviceGet(ctypes.byref(device), ordinal))
            result = library.cuDeviceGetUuid_v2(ctypes.byref(octets), device.value)
            driver.check("cuDeviceGetUuid_v2", result)
            uuids.append(f"GPU-{uuid.UUID(bytes=bytes(octets.octets))}")
    except CudaError as error:
        if error.cuda_name not in _NO_SUCH_DEVICE:
            raise
    return uuids
