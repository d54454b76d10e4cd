"""The few calls of the CUDA driver that the weight transport needs, by ctypes on libcuda.so.1.

    load_library() -> CudaDriver(library) -> open_device(ordinal) -> CudaDevice

The driver and not torch: torch's private IPC calls bind both ends to one torch version, to its
allocator's settings and to one importer per export; a cuMemAlloc buffer and its 64-byte handle know
none of these. torch shares the device's primary context, so its kernels and these calls see the
same memory.

Every result is checked; a failure is a CudaError that names the call and CUDA's own name for it.
The library is a Protocol, so that tests put a fake in its place (tests/transport/fake_cuda.py).

Copies may return before their data has arrived, even from host to device (pageable memory is
staged): `synchronize` before telling anyone.

Has never run on a GPU.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import Any, Protocol

import numpy as np

from asyncrl_node.errors import InvalidTransition, RunFault
from asyncrl_node.messages import CUDA_HANDLE_BYTES as HANDLE_BYTES

LAZY_ENABLE_PEER_ACCESS = 1
REGISTER_PORTABLE = 1
REGISTER_READ_ONLY = 8

Out = Any
"""ctypes.byref(...) of what a call fills in."""

SUCCESS = 0
OUT_OF_MEMORY = 2
_CONTEXT_IS_LOST = frozenset({214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719})
"""Uncorrectable ECC or NVLink errors and everything that a kernel dies of: after one of these,
every call in this process fails alike."""


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: 64 opaque bytes, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class Uuid(ctypes.Structure):
    """CUuuid: 16 bytes."""

    _fields_ = (("octets", ctypes.c_ubyte * 16),)


class DriverLibrary(Protocol):
    """libcuda.so.1. Every call returns a CUresult."""

    def cuInit(self, flags: int, /) -> int:
        """Initialise the driver."""
        ...

    def cuGetErrorName(self, error: int, out: Out, /) -> int:
        """Name an error; out: char*."""
        ...

    def cuDeviceGet(self, out: Out, ordinal: int, /) -> int:
        """Find a visible device; out: int."""
        ...

    def cuDeviceGetUuid_v2(self, out: Out, device: int, /) -> int:
        """Identify a device, or its MIG instance; out: Uuid."""
        ...

    def cuDeviceGetName(self, out: Out, length: int, device: int, /) -> int:
        """Name the model of a device; out: char[length]."""
        ...

    def cuDevicePrimaryCtxRetain(self, out: Out, device: int, /) -> int:
        """Share the context that torch uses; out: pointer."""
        ...

    def cuDevicePrimaryCtxRelease_v2(self, device: int, /) -> int:
        """Give the context back."""
        ...

    def cuCtxSetCurrent(self, context: ctypes.c_void_p, /) -> int:
        """Make a context this thread's."""
        ...

    def cuCtxSynchronize(self, /) -> int:
        """Wait for all work of this thread's context."""
        ...

    def cuMemAlloc_v2(self, out: Out, num_bytes: int, /) -> int:
        """Allocate device memory; out: uint64."""
        ...

    def cuMemFree_v2(self, address: int, /) -> int:
        """Free device memory."""
        ...

    def cuMemsetD8_v2(self, address: int, value: int, num_bytes: int, /) -> int:
        """Fill device memory with one byte."""
        ...

    def cuMemcpyDtoH_v2(self, host: int, source: int, num_bytes: int, /) -> int:
        """Copy from the device."""
        ...

    def cuMemcpyHtoD_v2(self, target: int, host: int, num_bytes: int, /) -> int:
        """Copy to the device."""
        ...

    def cuMemcpyDtoD_v2(self, target: int, source: int, num_bytes: int, /) -> int:
        """Copy on the device, or from a mapped peer."""
        ...

    def cuMemHostRegister_v2(self, address: int, num_bytes: int, flags: int, /) -> int:
        """Lock pages of this process in memory, so that a GPU may copy from and to them itself."""
        ...

    def cuMemHostUnregister(self, address: int, /) -> int:
        """Unlock what was registered at this address."""
        ...

    def cuIpcGetMemHandle(self, out: Out, address: int, /) -> int:
        """Make an allocation openable by other processes; out: IpcHandle."""
        ...

    def cuIpcOpenMemHandle_v2(self, out: Out, handle: IpcHandle, flags: int, /) -> int:
        """Map another process's allocation into this thread's context; out: uint64."""
        ...

    def cuIpcCloseMemHandle(self, address: int, /) -> int:
        """Unmap it."""
        ...


_POINTER = ctypes.c_void_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, _POINTER),
    "cuDeviceGet": (_POINTER, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_POINTER, ctypes.c_int),
    "cuDeviceGetName": (_POINTER, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_POINTER, ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxSetCurrent": (_POINTER,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (_POINTER, ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuMemsetD8_v2": (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t),
    "cuMemcpyDtoH_v2": (_POINTER, ctypes.c_uint64, ctypes.c_size_t),
    "cuMemcpyHtoD_v2": (ctypes.c_uint64, _POINTER, ctypes.c_size_t),
    "cuMemcpyDtoD_v2": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t),
    "cuMemHostRegister_v2": (_POINTER, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (_POINTER,),
    "cuIpcGetMemHandle": (_POINTER, ctypes.c_uint64),
    "cuIpcOpenMemHandle_v2": (_POINTER, IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (ctypes.c_uint64,),
}
"""Argument types by call, as in cuda.h; out parameters are passed by reference."""


class CudaError(RunFault):
    """A driver call failed."""

    def __init__(self, call: str, code: int, cuda_name: str) -> None:
        way_out = "; the GPU is full" if code == OUT_OF_MEMORY else ""
        super().__init__("cuda_error", f"{call}: {cuda_name} ({code}){way_out}")
        self.call = call
        self.code = code
        self.cuda_name = cuda_name

    @property
    def context_is_lost(self) -> bool:
        """True if nothing on the GPU works in this process any more."""
        return self.code in _CONTEXT_IS_LOST


def load_library(name: str = "libcuda.so.1") -> DriverLibrary:
    """Load the driver's library. Raises: RunFault("no_cuda_driver")."""
    try:
        library: Any = ctypes.CDLL(name)
        for call, arguments in _ARGUMENTS.items():
            function = getattr(library, call)
            function.argtypes, function.restype = arguments, ctypes.c_int
    except (OSError, AttributeError) as error:
        raise RunFault("no_cuda_driver", f"no usable NVIDIA driver here: {error}") from error
    loaded: DriverLibrary = library
    return loaded


class CudaDriver:
    """The driver of this process, initialised."""

    def __init__(self, library: DriverLibrary) -> None:
        self.library = library
        self.check("cuInit", library.cuInit(0))

    def check(self, call: str, result: int) -> None:
        """Turn a result into an error. Raises: CudaError unless it is a success."""
        if result == SUCCESS:
            return
        name = ctypes.c_char_p()
        self.library.cuGetErrorName(result, ctypes.byref(name))
        raise CudaError(call, result, name.value.decode() if name.value else "unknown error")

    def open_device(self, ordinal: int) -> CudaDevice:
        """Open a visible device by this process's own number for it. Raises: CudaError."""
        return CudaDevice(self, ordinal)


def open_own_gpu() -> CudaDevice:
    """Open this process's GPU: the first it sees, as the launcher shows each process its own.

    Raises: RunFault("no_cuda_driver"), CudaError.
    """
    return CudaDriver(load_library()).open_device(0)


class CudaDevice:
    """One GPU of this process: its primary context, and what was allocated and opened in it.

    Contexts belong to threads, and the learner has two (courier.py): every method sets the context
    first. Invariant: what is in `_allocated`, `_opened` and `_registered` exists in the driver, and
    nothing else.
    """

    def __init__(self, driver: CudaDriver, ordinal: int) -> None:
        self.ordinal = ordinal
        self._driver = driver
        self._library = driver.library
        device = ctypes.c_int()
        driver.check("cuDeviceGet", self._library.cuDeviceGet(ctypes.byref(device), ordinal))
        self._device = device.value
        self.uuid = self._read_uuid()
        context = ctypes.c_void_p()
        result = self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device)
        driver.check("cuDevicePrimaryCtxRetain", result)
        self._context: ctypes.c_void_p | None = context
        self._allocated: set[int] = set()
        self._opened: dict[bytes, int] = {}
        self._registered: set[int] = set()

    def close(self) -> None:
        """Give the context back, once. Raises: InvalidTransition while memory is still held."""
        if self._allocated or self._opened or self._registered:
            raise InvalidTransition(
                f"{len(self._allocated)} buffers, {len(self._opened)} mappings and "
                f"{len(self._registered)} pieces of host memory are still held"
            )
        if self._context is not None:
            self._context = None
            result = self._library.cuDevicePrimaryCtxRelease_v2(self._device)
            self._driver.check("cuDevicePrimaryCtxRelease_v2", result)

    def allocate(self, num_bytes: int) -> int:
        """Allocate `num_bytes` and return their address, a multiple of 256. Raises: CudaError."""
        self._enter()
        address = ctypes.c_uint64()
        result = self._library.cuMemAlloc_v2(ctypes.byref(address), num_bytes)
        self._driver.check(f"cuMemAlloc_v2 of {num_bytes} bytes", result)
        self._allocated.add(address.value)
        return address.value

    def free(self, address: int) -> None:
        """Free what `allocate` returned; importers keep what they have mapped."""
        if address not in self._allocated:
            raise InvalidTransition(f"{address:#x} is not allocated here")
        self._enter()
        self._allocated.remove(address)
        self._driver.check("cuMemFree_v2", self._library.cuMemFree_v2(address))

    def export_handle(self, address: int) -> bytes:
        """Return the 64 bytes by which any number of processes may open an allocation.

        Raises: RunFault("not_exportable") for memory that `allocate` did not return: torch's
        allocator may put it in segments that have no such handle. CudaError.
        """
        if address not in self._allocated:
            raise RunFault(
                "not_exportable",
                f"{address:#x} was not allocated by the weight transport; memory of torch's "
                "allocator cannot be exported: copy into the transport's own buffer",
            )
        self._enter()
        handle = IpcHandle()
        result = self._library.cuIpcGetMemHandle(ctypes.byref(handle), address)
        self._driver.check("cuIpcGetMemHandle", result)
        return bytes(handle)

    def open_handle(self, handle: bytes) -> int:
        """Map another process's allocation here, on this device; return its address.

        The receiver's own device, wherever the bytes lie: the exporter's would mean a second
        context on the exporter's GPU. Peer access is enabled by the mapping.

        Raises: InvalidTransition if it is mapped already; CudaError.
        """
        if handle in self._opened:
            raise InvalidTransition("this handle is open in this process; it is opened once")
        self._enter()
        address = ctypes.c_uint64()
        result = self._library.cuIpcOpenMemHandle_v2(
            ctypes.byref(address), IpcHandle.from_buffer_copy(handle), LAZY_ENABLE_PEER_ACCESS
        )
        self._driver.check("cuIpcOpenMemHandle_v2", result)
        self._opened[handle] = address.value
        return address.value

    def close_handle(self, handle: bytes) -> None:
        """Unmap what `open_handle` mapped. Raises: InvalidTransition if it is not open."""
        if handle not in self._opened:
            raise InvalidTransition("this handle is not open in this process")
        self._enter()
        result = self._library.cuIpcCloseMemHandle(self._opened.pop(handle))
        self._driver.check("cuIpcCloseMemHandle", result)

    def read(self, address: int, target: memoryview) -> None:
        """Copy device memory into `target`, writable; complete on return."""
        self._enter()
        result = self._library.cuMemcpyDtoH_v2(host_address(target), address, target.nbytes)
        self._driver.check("cuMemcpyDtoH_v2", result)

    def write(self, address: int, source: memoryview) -> None:
        """Copy `source` into device memory; `synchronize` before anyone else reads it."""
        self._enter()
        result = self._library.cuMemcpyHtoD_v2(address, host_address(source), source.nbytes)
        self._driver.check("cuMemcpyHtoD_v2", result)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy within the device, or from a mapped peer; complete after `synchronize`."""
        self._enter()
        result = self._library.cuMemcpyDtoD_v2(target, source, num_bytes)
        self._driver.check("cuMemcpyDtoD_v2", result)

    def fill(self, address: int, value: int, num_bytes: int) -> None:
        """Set every byte to `value`; complete after `synchronize`."""
        self._enter()
        result = self._library.cuMemsetD8_v2(address, value, num_bytes)
        self._driver.check("cuMemsetD8_v2", result)

    def register_host(self, address: int, num_bytes: int, *, read_only: bool = False) -> None:
        """Pin host memory. `read_only` is for pages mapped read-only, which are refused otherwise.

        Raises: CudaError. The driver keeps no error after a call that failed, as the runtime does
        (whose next caller, torch, would report it as its own): there is nothing to clear.
        """
        self._enter()
        flags = REGISTER_PORTABLE | (REGISTER_READ_ONLY if read_only else 0)
        result = self._library.cuMemHostRegister_v2(address, num_bytes, flags)
        self._driver.check(f"cuMemHostRegister_v2 of {num_bytes} bytes", result)
        self._registered.add(address)

    def unregister_host(self, address: int) -> None:
        """Unpin what `register_host` pinned at `address`, before it is unmapped."""
        if address not in self._registered:
            raise InvalidTransition(f"{address:#x} is not registered here")
        self._enter()
        self._registered.remove(address)
        self._driver.check("cuMemHostUnregister", self._library.cuMemHostUnregister(address))

    def synchronize(self) -> None:
        """Wait until everything begun in this process on this device is complete."""
        self._enter()
        self._driver.check("cuCtxSynchronize", self._library.cuCtxSynchronize())

    def _enter(self) -> None:
        """Make the context this thread's."""
        if self._context is None:
            raise InvalidTransition("the device is closed")
        self._driver.check("cuCtxSetCurrent", self._library.cuCtxSetCurrent(self._context))

    def _read_uuid(self) -> str:
        """Return the UUID as NVML and CUDA_VISIBLE_DEVICES write it.

        The driver gives bare octets; that they are a MIG instance's shows in the device's name
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb").
        """
        octets, name = Uuid(), ctypes.create_string_buffer(256)
        result = self._library.cuDeviceGetUuid_v2(ctypes.byref(octets), self._device)
        self._driver.check("cuDeviceGetUuid_v2", result)
        result = self._library.cuDeviceGetName(ctypes.byref(name), len(name), self._device)
        self._driver.check("cuDeviceGetName", result)
        prefix = "MIG" if b" MIG " in name.value else "GPU"
        return f"{prefix}-{uuid.UUID(bytes=bytes(octets))}"


def host_address(view: memoryview) -> int:
    """Return where the bytes of a contiguous view begin."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
