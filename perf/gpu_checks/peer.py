"""The other process: importer or exporter, with a driver of its own.

    parent --(command, arguments)--> Peer --("done" | "failed" | "ask", result)--> parent

Commands are the methods of `PeerState`. Has not run on a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asyncrl_node.errors import RunFault
from asyncrl_node.messages import CudaIpcHandle, WeightsManifest
from asyncrl_node.transport import cuda_driver, cuda_ipc
from asyncrl_node.transport.cuda_driver import CudaDevice
from asyncrl_node.transport.cuda_ipc import CudaIpcImport, SelfTestExport, area_hash, self_test
from asyncrl_node.transport.pinned import PinnedMemory
from asyncrl_node.transport.weights import DeviceArea, SharedMemoryImport
from perf.gpu_checks.measure import Footprint, num_wrong_words, seconds
from perf.gpu_checks.outcome import MIB


class PeerFault(Exception):
    """A command of the other process failed there."""


class PeerState:
    """The commands of the other process; `ask` sends the parent a number, waits for its answer."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._own: CudaDevice | None = None
        self._imported: CudaIpcImport | None = None
        self._mapped: DeviceArea | None = None
        self._offer: SelfTestExport | None = None
        self._kept: list[object] = []

    @property
    def _device(self) -> CudaDevice:
        if self._own is None:
            self._own = cuda_driver.open_own_gpu()
        return self._own

    # -- the importer ------------------------------------------------------------------------

    def self_test(self, handle: CudaIpcHandle) -> tuple[bool, str]:
        """Run the product's self-test; the parent writes a pattern when asked."""
        return self_test(self._device, handle, self._ask)

    def map(self, handle: CudaIpcHandle) -> float:
        """Map a plain buffer; returns the seconds that took."""
        start = time.perf_counter()
        address = self._device.open_handle(handle.handle)
        opened_s = time.perf_counter() - start
        self._mapped = DeviceArea(address, handle.num_bytes, self._device.ordinal)
        return opened_s

    def unmap(self, handle: CudaIpcHandle) -> None:
        """Unmap it."""
        self._mapped = None
        self._device.close_handle(handle.handle)

    def num_wrong_words(self, seed: int) -> int:
        """Pull the mapped buffer piece by piece and compare it with the pattern."""
        assert self._mapped is not None
        return num_wrong_words(cuda_ipc.as_tensor(self._mapped), seed)

    def copy_rates(self) -> tuple[float, float]:
        """Copy the mapped buffer here, and a local one of the size; bytes per second of both."""
        import torch

        assert self._mapped is not None
        mapped = cuda_ipc.as_tensor(self._mapped)
        local, target = torch.empty_like(mapped), torch.empty_like(mapped)
        mapped_s = seconds(lambda: target.copy_(mapped))
        local_s = seconds(lambda: target.copy_(local))
        return mapped.numel() / mapped_s, mapped.numel() / local_s

    def pull_s(self, repeats: int) -> float:
        """Copy the mapped buffer so often; the seconds of one copy, by this process's clock."""
        import torch

        assert self._mapped is not None
        mapped = cuda_ipc.as_tensor(self._mapped)
        target = torch.empty_like(mapped)
        return seconds(lambda: target.copy_(mapped), repeats)

    def open(self, handle: CudaIpcHandle, manifest: WeightsManifest) -> None:
        """Open a weight buffer, for life."""
        self._imported = CudaIpcImport(self._device, handle, manifest)

    def close(self) -> None:
        """Close it."""
        assert self._imported is not None
        self._imported.close()

    def pull(self, version: int, ask_between: bool = False) -> int:
        """Copy a version under its lease and return the copy's hash; see CudaIpcImport.view."""
        return pull(self._device, self._imported, version, self._ask if ask_between else None)

    def fetch(
        self,
        handles: tuple[CudaIpcHandle, ...],
        manifest: WeightsManifest,
        sampler: int,
        version: int,
        repeats: int = 0,
    ) -> tuple[int, float]:
        """Pull a version as vLLM's worker does; its hash, and seconds (0 if not repeated)."""
        import torch

        from asyncrl_node.engines.cuda_flat import CudaImport, gpu_handle

        if torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
        flat = CudaImport.of_handle(gpu_handle(handles, sampler), manifest)
        try:
            flat.fetch(version)
            digest, times = flat.digest(), [0.0]
            for _ in range(repeats):
                began_s = time.perf_counter()
                flat.fetch(version)
                times.append(time.perf_counter() - began_s)
            return digest, min(times[1:] or times)
        finally:
            flat.close()

    def footprint(self) -> Footprint:
        """Say what this process holds."""
        return Footprint.now()

    # -- the exporter ------------------------------------------------------------------------

    def export(self, num_bytes: int, byte: int) -> CudaIpcHandle:
        """Allocate a buffer full of one byte, kept until this process ends."""
        address = self._device.allocate(num_bytes)
        self._device.fill(address, byte, num_bytes)
        self._device.synchronize()
        return CudaIpcHandle(self._device.export_handle(address), num_bytes, self._device.uuid, 0)

    def export_weights(self, manifest: WeightsManifest, byte: int) -> CudaIpcHandle:
        """Export a weight buffer that holds version 0, one byte over and over; kept for life."""
        export = cuda_ipc.CudaIpcExport(self._device, manifest, self._device.synchronize)
        area = export.begin_write()
        self._device.fill(area.address, byte, area.num_bytes)
        export.end_write(0, lambda _: 0)
        self._kept.append(export)
        return export.handle

    def offer_test(self, num_bytes: int) -> CudaIpcHandle:
        """Make a test buffer; the next commands `write_test` fill it, until the next offer."""
        self.end_test()
        self._offer = SelfTestExport(self._device, num_bytes)
        return self._offer.handle

    def write_test(self, seed: int) -> None:
        """Write a pattern of the self-test."""
        assert self._offer is not None
        self._offer.write(seed)

    def end_test(self) -> None:
        """Free the test buffer, if there is one."""
        if self._offer is not None:
            self._offer.close()
        self._offer = None

    def try_to_export_torch_memory(self) -> str:
        """Name the fault of exporting a tensor of torch's allocator."""
        import torch

        on = "cuda" if torch.cuda.is_available() else "cpu"
        tensor = torch.zeros(64 * MIB, dtype=torch.uint8, device=on)
        self._kept.append(tensor)
        try:
            self._device.export_handle(tensor.data_ptr())
        except RunFault as fault:
            return fault.name
        return "none"

    # -- host memory, and ranks --------------------------------------------------------------

    def read_host(self, path: str, manifest: WeightsManifest, seed: int) -> tuple[int, float, str]:
        """Open version 0 in host memory, pin it, copy it to the GPU.

        Returns wrong words, bytes per second, and why it could not be pinned.
        """
        source = SharedMemoryImport(Path(path), manifest)
        pinned, refusal = None, ""
        try:
            try:
                with source.memory() as memory:
                    pinned = PinnedMemory(self._device, memory, read_only=True)
            except RunFault as fault:
                refusal = f"not pinned by the reader: {fault}"
            with source.view(0) as view:
                wrong, copy_s = _copy_up(view, seed)
            source.check(0)
        finally:
            if pinned is not None:
                pinned.close()
            source.close()
        return wrong, manifest.num_bytes / copy_s, refusal

    def shard_bits(self, rank: int, world: int, meet: str) -> tuple[int, float]:
        """Be one FSDP2 rank; see fsdp.compare_rank."""
        from perf.gpu_checks.fsdp import compare_rank

        return compare_rank(rank, world, meet, _torch_device())


def _torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _copy_up(view: memoryview, seed: int) -> tuple[int, float]:
    """Copy host memory to the GPU; wrong words, and seconds of one copy."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        host = torch.frombuffer(view, dtype=torch.uint8)
    target = torch.empty_like(host, device=_torch_device())
    copy_s = seconds(lambda: target.copy_(host, non_blocking=True))
    return num_wrong_words(target, seed), copy_s


def pull(
    device: CudaDevice,
    imported: CudaIpcImport | None,
    version: int,
    between: Callable[[int], None] | None = None,
) -> int:
    """Copy a version and hash the copy; `between` runs after the first look at the header."""
    assert imported is not None
    area = imported.view(version)
    if between is not None:
        between(version)
    local = device.allocate(area.num_bytes)
    try:
        device.copy(local, area.address, area.num_bytes)
        device.synchronize()
        imported.view(version)
        return area_hash(device, DeviceArea(local, area.num_bytes, device.ordinal))
    finally:
        device.free(local)


def serve_peer(pipe: Connection) -> None:
    """Answer the parent's commands until it hangs up."""

    def ask(number: int) -> None:
        pipe.send(("ask", number))
        pipe.recv()

    state = PeerState(ask)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("done", getattr(state, command)(*arguments))
        except Exception as error:  # noqa: BLE001 - handed to the parent, which raises it
            answer = ("failed", f"{type(error).__name__}: {error}")
        pipe.send(answer)


TARGET: Callable[[Connection], None] = serve_peer
"""What the other process runs; tests give it a fake driver first."""


class Peer:
    """Another process with the real driver. Ended by `stop` or `kill`."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=TARGET, args=(theirs,), daemon=True)
        before = dict(os.environ)
        os.environ.update(environment or {})
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()

    def start(self, command: str, *arguments: object) -> None:
        """Have a command run there; `finish` waits for it."""
        self.pipe.send((command, arguments))

    def finish(self, answer: Callable[[int], None] | None = None) -> Any:  # noqa: ANN401 - as many types as commands
        """Wait for a command; `answer` does what it asks for. Raises: PeerFault, EOFError."""
        while True:
            kind, result = self.pipe.recv()
            if kind == "done":
                return result
            if kind == "failed":
                raise PeerFault(result)
            assert answer is not None
            answer(result)
            self.pipe.send(None)

    def call(
        self, command: str, *arguments: object, answer: Callable[[int], None] | None = None
    ) -> Any:  # noqa: ANN401 - as many types as commands
        """Have a command run there and wait for it. Raises: PeerFault, EOFError."""
        self.start(command, *arguments)
        return self.finish(answer)

    def kill(self) -> None:
        """SIGKILL it."""
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """Hang up and wait."""
        self.pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self.kill()


@contextmanager
def peer(environment: Mapping[str, str] | None = None) -> Iterator[Peer]:
    """Run another process for a while."""
    other = Peer(environment)
    try:
        yield other
    finally:
        other.stop()
