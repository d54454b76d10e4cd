"""A fake libcuda: several GPUs, several "processes" in one, and the rules that CUDA has for them.

    machine = FakeMachine([gpu, gpu]);  machine.process(visible=[0]) is a DriverLibrary

It takes the same ctypes arguments as libcuda, so the calling code is tested down to its structures.
What a program may not do is answered as CUDA would answer and noted in `violations`; what it may do
but had better know of (freeing what others have mapped, a context on a second GPU) in `notes`.
`assert_clean` finds both violations and leaks.

Copies are late on purpose: a write is carried out when its context synchronises, reads it back or
frees memory. Whoever announces before synchronising announces old bytes.

Misbehaviour: FakeGpu.num_bytes (memory full), Faults.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl_node.transport.cuda_driver import HANDLE_BYTES, IpcHandle

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
MAP_FAILED = 205
ALREADY_MAPPED = 208
INVALID_HANDLE = 400
ILLEGAL_ADDRESS = 700
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
NAMES = {
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    NOT_INITIALIZED: b"CUDA_ERROR_NOT_INITIALIZED",
    INVALID_DEVICE: b"CUDA_ERROR_INVALID_DEVICE",
    INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
    MAP_FAILED: b"CUDA_ERROR_MAP_FAILED",
    ALREADY_MAPPED: b"CUDA_ERROR_ALREADY_MAPPED",
    INVALID_HANDLE: b"CUDA_ERROR_INVALID_HANDLE",
    ILLEGAL_ADDRESS: b"CUDA_ERROR_ILLEGAL_ADDRESS",
    ALREADY_REGISTERED: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    NOT_REGISTERED: b"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
}


class FakeCudaError(Exception):
    """A call's result other than success."""

    def __init__(self, code: int) -> None:
        super().__init__(NAMES[code])
        self.code = code


@dataclass
class FakeGpu:
    octets: bytes
    name: str = "NVIDIA Fake"
    num_bytes: int = 1 << 30


@dataclass
class Faults:
    """What is broken in this machine."""

    peer_copy: Literal["right", "dropped", "flipped", "shifted"] = "right"
    """Copies from another GPU: an active IOMMU."""
    fail: dict[str, int] = field(default_factory=dict)
    """Result by call, instead of doing it."""
    num_pinnable_bytes: int = 1 << 40
    """What one process may lock in memory."""


@dataclass(eq=False)
class Context:
    process: FakeLibrary
    gpu: int
    number: int
    references: int = 0
    pending: list[Callable[[], None]] = field(default_factory=list)

    def finish(self) -> None:
        for write in self.pending:
            write()
        self.pending.clear()


@dataclass(eq=False)
class Allocation:
    gpu: int
    owner: FakeLibrary
    context: Context
    memory: bytearray
    freed: bool = False
    handle: bytes | None = None


@dataclass(eq=False)
class Mapping:
    """A range of one process's addresses, in one context."""

    address: int
    allocation: Allocation
    context: Context
    is_peer: bool


class FakeMachine:
    def __init__(self, gpus: Sequence[FakeGpu], faults: Faults | None = None) -> None:
        self.gpus = list(gpus)
        self.faults = faults or Faults()
        self.allocations: list[Allocation] = []
        self.processes: list[FakeLibrary] = []
        self.violations: list[str] = []
        self.notes: list[str] = []
        self.numbers = itertools.count(1)

    def process(self, visible: Sequence[int]) -> FakeLibrary:
        """Start a process that sees these GPUs, in this order."""
        library = FakeLibrary(self, visible)
        self.processes.append(library)
        return library

    def used_bytes(self, gpu: int) -> int:
        """Memory in use: a freed buffer stays while somebody has it mapped."""
        mapped = {m.allocation for p in self.processes for m in p.mappings.values()}
        return sum(
            len(allocation.memory)
            for allocation in self.allocations
            if allocation.gpu == gpu and (not allocation.freed or allocation in mapped)
        )

    def assert_clean(self) -> None:
        """Nothing forbidden was done and nothing is left."""
        assert not self.violations, self.violations
        left = [a for a in self.allocations if not a.freed]
        assert not left, f"{len(left)} allocations leak"
        mappings = [mapping for p in self.processes for mapping in p.mappings.values()]
        assert not mappings, f"{len(mappings)} mappings leak"
        pinned = [address for p in self.processes for address in p.registered]
        assert not pinned, f"{len(pinned)} pieces of pinned memory leak"
        contexts = [c for p in self.processes for c in p.contexts.values() if c.references]
        assert not contexts, f"{len(contexts)} contexts leak"


def _call(function: Callable[..., None]) -> Callable[..., int]:
    """Make a driver call of a method: it returns a result and wants an initialised driver."""
    name = function.__name__

    def call(self: FakeLibrary, *arguments: Any) -> int:
        self.calls.append(name)
        try:
            if not self.initialised:
                raise FakeCudaError(NOT_INITIALIZED)
            if name in self.machine.faults.fail:
                raise FakeCudaError(self.machine.faults.fail[name])
            function(self, *arguments)
        except FakeCudaError as error:
            return error.code
        return 0

    return call


class FakeLibrary:
    """libcuda as one process sees it; implements cuda_driver.DriverLibrary."""

    def __init__(self, machine: FakeMachine, visible: Sequence[int]) -> None:
        self.machine = machine
        self.visible = list(visible)
        self.initialised = False
        self.calls: list[str] = []
        self.contexts: dict[int, Context] = {}
        """By GPU."""
        self.mappings: dict[int, Mapping] = {}
        """By first address; allocations of this process too."""
        self.registered: dict[int, int] = {}
        """Bytes of pinned host memory, by first address."""
        self._current: dict[int, Context] = {}
        """By thread."""

    def kill(self) -> None:
        """End the process: its memory is freed, its mappings go, nothing is a violation."""
        for mapping in list(self.mappings.values()):
            if not mapping.is_peer:
                mapping.allocation.freed = True
        self.mappings.clear()
        self.registered.clear()
        self.contexts.clear()
        self._current.clear()
        self.initialised = False

    # -- the calls ---------------------------------------------------------------------------

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        self.calls.append("cuInit")
        failed = self.machine.faults.fail.get("cuInit", 0)
        self.initialised = not failed
        return failed

    def cuGetErrorName(self, error: int, out: Any) -> int:
        if error not in NAMES:
            return INVALID_VALUE
        out._obj.value = NAMES[error]
        return 0

    @_call
    def cuDeviceGet(self, out: Any, ordinal: int) -> None:
        if not 0 <= ordinal < len(self.visible):
            raise FakeCudaError(INVALID_DEVICE)
        out._obj.value = self.visible[ordinal]

    @_call
    def cuDeviceGetUuid_v2(self, out: Any, device: int) -> None:
        octets = self.machine.gpus[device].octets
        ctypes.memmove(ctypes.addressof(out._obj), octets, len(octets))

    @_call
    def cuDeviceGetName(self, out: Any, length: int, device: int) -> None:
        assert length == len(out._obj)
        out._obj.value = self.machine.gpus[device].name.encode()

    @_call
    def cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        if device not in self.contexts:
            if self.contexts:
                self.machine.notes.append(f"a second context, on GPU {device}")
            self.contexts[device] = Context(self, device, next(self.machine.numbers))
        self.contexts[device].references += 1
        out._obj.value = self.contexts[device].number

    @_call
    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:
        context = self.contexts.get(device)
        if context is None or not context.references:
            self._forbidden(INVALID_CONTEXT, f"released the context of GPU {device} once too often")
        context.references -= 1

    @_call
    def cuCtxSetCurrent(self, context: Any) -> None:
        number = context.value if isinstance(context, ctypes.c_void_p) else context
        for known in self.contexts.values():
            if known.number == number and known.references:
                self._current[threading.get_ident()] = known
                return
        self._forbidden(INVALID_CONTEXT, "set a context that does not exist")

    @_call
    def cuCtxSynchronize(self) -> None:
        self._context().finish()

    @_call
    def cuMemAlloc_v2(self, out: Any, num_bytes: int) -> None:
        context = self._context()
        if num_bytes < 1:
            raise FakeCudaError(INVALID_VALUE)
        gpu = context.gpu
        if self.machine.used_bytes(gpu) + num_bytes > self.machine.gpus[gpu].num_bytes:
            raise FakeCudaError(OUT_OF_MEMORY)
        memory = bytearray(b"\xdd" * num_bytes)
        allocation = Allocation(gpu, self, context, memory)
        self.machine.allocations.append(allocation)
        out._obj.value = self._map(allocation, context, is_peer=False)

    @_call
    def cuMemFree_v2(self, address: int) -> None:
        mapping = self._mapping_at(address, "freed")
        if mapping.is_peer:
            self._forbidden(INVALID_VALUE, "freed memory of another process")
        mapping.context.finish()
        del self.mappings[address]
        mapping.allocation.freed = True
        others = sum(
            m.allocation is mapping.allocation
            for process in self.machine.processes
            for m in process.mappings.values()
        )
        if others:
            self.machine.notes.append(f"freed a buffer that {others} others have mapped")

    @_call
    def cuMemsetD8_v2(self, address: int, value: int, num_bytes: int) -> None:
        allocation, start = self._find(address, num_bytes, "filled")
        self._later(allocation, start, bytes([value]) * num_bytes)

    @_call
    def cuMemcpyDtoH_v2(self, host: int, source: int, num_bytes: int) -> None:
        self._context().finish()
        allocation, start = self._find(source, num_bytes, "read")
        ctypes.memmove(host, bytes(allocation.memory[start : start + num_bytes]), num_bytes)

    @_call
    def cuMemcpyHtoD_v2(self, target: int, host: int, num_bytes: int) -> None:
        allocation, start = self._find(target, num_bytes, "wrote")
        self._later(allocation, start, ctypes.string_at(host, num_bytes))

    @_call
    def cuMemcpyDtoD_v2(self, target: int, source: int, num_bytes: int) -> None:
        into, start = self._find(target, num_bytes, "wrote")
        of, begin = self._find(source, num_bytes, "read")

        def copy() -> None:
            data = bytes(of.memory[begin : begin + num_bytes])
            broken = self.machine.faults.peer_copy if of.gpu != into.gpu else "right"
            if broken == "flipped":
                data = data[:-1] + bytes([data[-1] ^ 1])
            elif broken == "shifted":
                data = data[8:] + data[:8]
            if broken != "dropped":
                into.memory[start : start + num_bytes] = data

        self._context().pending.append(copy)

    @_call
    def cuMemHostRegister_v2(self, address: int, num_bytes: int, flags: int) -> None:
        self._context()
        if not flags & 1:
            self._forbidden(INVALID_VALUE, f"registered memory of one context alone: {flags}")
        if address % mmap.PAGESIZE or num_bytes < 1:
            self._forbidden(INVALID_VALUE, f"registered {num_bytes} bytes at {address:#x}")
        for start, size in self.registered.items():
            if start < address + num_bytes and address < start + size:
                self._forbidden(ALREADY_REGISTERED, "registered memory twice")
        access = access_of(address, num_bytes)
        if "r" not in access or ("w" not in access and not flags & 8):
            self._forbidden(INVALID_VALUE, f"registered memory mapped {access or 'nowhere'}")
        if sum(self.registered.values()) + num_bytes > self.machine.faults.num_pinnable_bytes:
            raise FakeCudaError(OUT_OF_MEMORY)
        self.registered[address] = num_bytes

    @_call
    def cuMemHostUnregister(self, address: int) -> None:
        self._context()
        if address not in self.registered:
            self._forbidden(NOT_REGISTERED, f"unregistered {address:#x}, which is not registered")
        if not access_of(address, self.registered.pop(address)):
            self._forbidden(INVALID_VALUE, "unregistered memory that was unmapped before")

    @_call
    def cuIpcGetMemHandle(self, out: Any, address: int) -> None:
        mapping = self._mapping_at(address, "exported")
        if mapping.is_peer:
            self._forbidden(INVALID_VALUE, "exported memory of another process")
        allocation = mapping.allocation
        if allocation.handle is None:
            number = next(self.machine.numbers)
            allocation.handle = number.to_bytes(8, "little") + b"\0\xff" * 28
        assert len(allocation.handle) == HANDLE_BYTES
        ctypes.memmove(ctypes.addressof(out._obj), allocation.handle, HANDLE_BYTES)

    @_call
    def cuIpcOpenMemHandle_v2(self, out: Any, handle: IpcHandle, flags: int) -> None:
        context = self._context()
        if flags != 1:
            self._forbidden(INVALID_VALUE, f"opened a handle with flags {flags}")
        found = [a for a in self.machine.allocations if a.handle == bytes(handle)]
        if not found or (found[0].freed and not found[0].owner.initialised):
            raise FakeCudaError(INVALID_HANDLE)
        (allocation,) = found
        if allocation.freed:
            self._forbidden(INVALID_HANDLE, "opened a buffer that was freed")
        if allocation.owner is self:
            self._forbidden(INVALID_CONTEXT, "opened its own buffer")
        if any(m.allocation is allocation for m in self.mappings.values()):
            self._forbidden(ALREADY_MAPPED, "opened a handle twice")
        out._obj.value = self._map(allocation, context, is_peer=True)

    @_call
    def cuIpcCloseMemHandle(self, address: int) -> None:
        mapping = self._mapping_at(address, "closed")
        if not mapping.is_peer:
            self._forbidden(INVALID_VALUE, "closed a buffer of its own")
        mapping.context.finish()
        del self.mappings[address]

    # -- behind them -------------------------------------------------------------------------

    def _forbidden(self, code: int, what: str) -> Any:
        self.machine.violations.append(what)
        raise FakeCudaError(code)

    def _context(self) -> Context:
        context = self._current.get(threading.get_ident())
        if context is None or not context.references:
            self._forbidden(INVALID_CONTEXT, "called without a current context")
        return context

    def _map(self, allocation: Allocation, context: Context, is_peer: bool) -> int:
        """Give addresses that no process ever had: one of another process is nobody's here."""
        address = 0x7F00_0000_0000 + (next(self.machine.numbers) << 32)
        self.mappings[address] = Mapping(address, allocation, context, is_peer)
        return address

    def _mapping_at(self, address: int, verb: str) -> Mapping:
        self._context()
        if address not in self.mappings:
            self._forbidden(INVALID_VALUE, f"{verb} {address:#x}, where nothing begins")
        return self.mappings[address]

    def _find(self, address: int, num_bytes: int, verb: str) -> tuple[Allocation, int]:
        """Find the range; one outside all that is mapped here is used after free, or foreign."""
        context = self._context()
        for mapping in self.mappings.values():
            start = address - mapping.address
            if 0 <= start <= start + num_bytes <= len(mapping.allocation.memory):
                if mapping.context is not context:
                    self._forbidden(INVALID_VALUE, f"{verb} memory of another context")
                return mapping.allocation, start
        return self._forbidden(INVALID_VALUE, f"{verb} {num_bytes} bytes at {address:#x}: unmapped")

    def _later(self, allocation: Allocation, start: int, data: bytes) -> None:
        def write() -> None:
            allocation.memory[start : start + len(data)] = data

        self._context().pending.append(write)


def access_of(address: int, num_bytes: int) -> str:
    """Return how this process has a range of memory mapped ("rw-s"); empty if not all of it is."""
    end = address + num_bytes
    with open("/proc/self/maps") as lines:
        for line in lines:
            area, access, _ = line.split(maxsplit=2)
            first, last = (int(number, 16) for number in area.split("-"))
            if first <= address < last:
                if end <= last:
                    return access
                address = last
    return ""
