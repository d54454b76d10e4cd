"""A fake libcuda across real processes: device memory is a file that its importers map too.

    FAKE_CUDA=FOLDER python -m tests.transport.shared_cuda learner --run-dir ...

runs a process of a run with this library in the place of libcuda.so.1. It is the process's only
change. Addresses are real ones, so copies are memmove; unlike fake_cuda.py it polices little:
what it is for is that the bytes pass between processes by handle alone, and that both ends go on
when one is killed.

With WORKER_ENGINE set, the sampler's engine takes its weights as vLLM does: it opens the learner's
memory itself (engines/cuda_flat.py), with a view of the fake memory in the place of `as_tensor`.

FOLDER/faults.json may say what is broken: {"ROLE": {"name": of the GPU, "fail": [calls],
"peer_copy": "flipped"}}, by "learner" or "sampler". FOLDER/calls-ROLE-PID holds the calls made.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl_node.messages import WeightsManifest
from asyncrl_node.process import run_process
from asyncrl_node.transport import cuda_driver, cuda_ipc
from asyncrl_node.transport.weights import DeviceArea

FOLDER = "FAKE_CUDA"
WORKER_ENGINE = "FAKE_CUDA_WORKER"
TEST_BYTES = 1 << 20
"""The self-test's buffer: 64 MB of patterns would cost the two cores seconds for each pair."""
MAP_FAILED = 205
INVALID_HANDLE = 400
_NAMES = {MAP_FAILED: b"CUDA_ERROR_MAP_FAILED", INVALID_HANDLE: b"CUDA_ERROR_INVALID_HANDLE"}


class Mapping:
    """A file mapped for reading and writing, at an address that stays."""

    def __init__(self, path: Path, *, is_peer: bool) -> None:
        self.path = path
        self.is_peer = is_peer
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.num_bytes = len(self._map)
        self._anchor: Any = ctypes.c_ubyte.from_buffer(self._map)
        self.address: int = ctypes.addressof(self._anchor)

    def close(self) -> None:
        self._anchor = None
        self._map.close()


class SharedCuda:
    """One process's library; implements cuda_driver.DriverLibrary."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder = folder
        self._octets = bytes([role == "sampler"]) * 16
        faults = folder / "faults.json"
        broken = json.loads(faults.read_text()).get(role, {}) if faults.exists() else {}
        self._gpu_name = broken.get("name", "NVIDIA Shared Fake")
        self._fail = set(broken.get("fail", ()))
        self._peer_copy = broken.get("peer_copy", "right")
        self._num_allocated = 0
        self._mappings: dict[int, Mapping] = {}
        self._registered: set[int] = set()
        self._calls = (folder / f"calls-{role}-{os.getpid()}").open("a", buffering=1)

    def __getattribute__(self, name: str) -> Any:
        """Note every call; fail those that are to fail."""
        found = super().__getattribute__(name)
        if not name.startswith("cu") or name == "cuGetErrorName":
            return found
        call: Callable[..., int] = found

        def noted(*arguments: Any) -> int:
            self._calls.write(f"{name}\n")
            return MAP_FAILED if name in self._fail else call(*arguments)

        return noted

    def cuInit(self, flags: int) -> int:
        return 0

    def cuGetErrorName(self, error: int, out: Any) -> int:
        out._obj.value = _NAMES[error]
        return 0

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:
        out._obj.value = 0
        return 0

    def cuDeviceGetUuid_v2(self, out: Any, device: int) -> int:
        ctypes.memmove(ctypes.addressof(out._obj), self._octets, 16)
        return 0

    def cuDeviceGetName(self, out: Any, length: int, device: int) -> int:
        out._obj.value = self._gpu_name.encode()
        return 0

    def cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> int:
        out._obj.value = 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        return 0

    def cuCtxSynchronize(self) -> int:
        return 0

    def cuMemAlloc_v2(self, out: Any, num_bytes: int) -> int:
        self._num_allocated += 1
        path = self._folder / f"memory-{os.getpid()}-{self._num_allocated}"
        with path.open("wb") as file:
            file.truncate(num_bytes)
        return self._map(path, out, is_peer=False)

    def cuMemFree_v2(self, address: int) -> int:
        mapping = self._mappings.pop(address)
        assert not mapping.is_peer
        mapping.path.unlink()
        mapping.close()
        return 0

    def cuMemsetD8_v2(self, address: int, value: int, num_bytes: int) -> int:
        self._check(address, num_bytes)
        ctypes.memset(address, value, num_bytes)
        return 0

    def cuMemcpyDtoH_v2(self, host: int, source: int, num_bytes: int) -> int:
        self._check(source, num_bytes)
        ctypes.memmove(host, source, num_bytes)
        return 0

    def cuMemcpyHtoD_v2(self, target: int, host: int, num_bytes: int) -> int:
        self._check(target, num_bytes)
        ctypes.memmove(target, host, num_bytes)
        return 0

    def cuMemcpyDtoD_v2(self, target: int, source: int, num_bytes: int) -> int:
        self._check(target, num_bytes)
        self._check(source, num_bytes)
        ctypes.memmove(target, source, num_bytes)
        if self._peer_copy == "flipped":
            last = ctypes.c_ubyte.from_address(target + num_bytes - 1)
            last.value ^= 1
        return 0

    def cuMemHostRegister_v2(self, address: int, num_bytes: int, flags: int) -> int:
        assert address not in self._registered
        self._registered.add(address)
        return 0

    def cuMemHostUnregister(self, address: int) -> int:
        self._registered.remove(address)
        return 0

    def cuIpcGetMemHandle(self, out: Any, address: int) -> int:
        handle = self._mappings[address].path.name.encode().ljust(64, b"\0")
        ctypes.memmove(ctypes.addressof(out._obj), handle, 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, out: Any, handle: cuda_driver.IpcHandle, flags: int) -> int:
        path = self._folder / bytes(handle).rstrip(b"\0").decode()
        if not path.exists():
            return INVALID_HANDLE
        return self._map(path, out, is_peer=True)

    def cuIpcCloseMemHandle(self, address: int) -> int:
        mapping = self._mappings.pop(address)
        assert mapping.is_peer
        mapping.close()
        return 0

    def _map(self, path: Path, out: Any, *, is_peer: bool) -> int:
        mapping = Mapping(path, is_peer=is_peer)
        self._mappings[mapping.address] = mapping
        out._obj.value = mapping.address
        return 0

    def _check(self, address: int, num_bytes: int) -> None:
        inside = any(
            m.address <= address and address + num_bytes <= m.address + m.num_bytes
            for m in self._mappings.values()
        )
        assert inside, f"{num_bytes} bytes at {address:#x} are nobody's"


def use_worker_engine() -> None:
    """Have the sampler make an engine that copies the weights itself."""
    import torch

    def see(area: DeviceArea) -> torch.Tensor:
        memory = (ctypes.c_ubyte * area.num_bytes).from_address(area.address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    setattr(cuda_ipc, "as_tensor", see)  # noqa: B010
    setattr(torch.cuda, "current_device", lambda: 0)  # noqa: B010
    from asyncrl_node.engines.cuda_flat import CudaImport
    from asyncrl_node.engines.fake_engine import FakeEngine
    from asyncrl_node.sampler import process

    class WorkerEngine(FakeEngine):
        """The scripted engine, loading as base.OwnProcessLoader says."""

        def open_weights(
            self, manifest: WeightsManifest, path: Path, handle: dict[str, Any] | None = None
        ) -> None:
            self._manifest = manifest
            assert handle is not None, "host memory"
            self._flat = CudaImport.of_handle(handle, manifest)

        async def copy_weights(self, version: int) -> None:
            self._flat.fetch(version)

        async def use_weights(self, version: int) -> int:
            ((name, tensor),) = self._flat.tensors()
            assert name == self._manifest.entries[0].name
            self.load_weights(version, self._manifest.entries, tensor.numpy().data)
            return self._flat.digest()

        def close(self) -> None:
            super().close()
            self._flat.close()

    make = lambda config, task: WorkerEngine(config.fake, config.seed)  # noqa: E731
    setattr(process, "make_engine", make)  # noqa: B010


def main() -> None:
    """Run one process of a run, on the fake."""
    role = sys.argv.pop(1)
    folder = os.environ[FOLDER]
    setattr(cuda_driver, "load_library", lambda: SharedCuda(Path(folder), role))  # noqa: B010
    setattr(cuda_ipc, "SELF_TEST_BYTES", TEST_BYTES)  # noqa: B010
    if os.environ.get(WORKER_ENGINE):
        use_worker_engine()
    if role == "learner":
        from asyncrl_node.learner.process import main as process
    else:
        from asyncrl_node.sampler.process import main as process
    run_process(role, process)


if __name__ == "__main__":
    main()
