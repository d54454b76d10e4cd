"""Does everything that only a GPU can show hold on this GPU? 17 lines in under four minutes.

    python perf/gpu_check.py [--all] [--only N ...] [--budget-s 210]

Each line is PASS, FAIL or SKIP, with the value, what was expected, the limit and the reason. A line
passes only by measuring; what this machine or this version cannot do is a SKIP that says why. The
last line is JSON: `copy_ratio` (IPC copy rate / local copy rate), `mfu` (learner step) and `exact`
(every byte that was compared was right); null for what did not run. Exit code 1 if a line failed.

One GPU is enough, and torch, numpy, pyzmq, msgspec, transformers; without xxhash a CRC stands in.
Limits in absolute units are of an H200. What needs several GPUs is listed by --all.

    parent (exporter, learner)  --pipe-->  Peer processes (importers), one GPU, the real driver
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

try:
    import xxhash as _xxhash  # noqa: F401
except ImportError:  # any hash will do to compare two ends of one run; both take this one
    sys.modules["xxhash"] = types.ModuleType("xxhash")
    sys.modules["xxhash"].__dict__.update(
        xxh3_64=lambda: _Crc(), xxh3_64_intdigest=lambda view: zlib.crc32(view)
    )

from asyncrl_node.config import LearnerConfig  # noqa: E402
from asyncrl_node.core.layout import layout_weights  # noqa: E402
from asyncrl_node.core.shards import assemble, shard_layout  # noqa: E402
from asyncrl_node.errors import RunFault  # noqa: E402
from asyncrl_node.messages import CudaIpcHandle, GroupKey, WeightEntry, WeightsManifest  # noqa: E402
from asyncrl_node.transport.cuda_driver import CudaDevice, CudaDriver, load_library  # noqa: E402
from asyncrl_node.transport.cuda_ipc import (  # noqa: E402
    CudaIpcExport,
    CudaIpcImport,
    SelfTestExport,
    area_hash,
    as_tensor,
    pull_tensors,
    self_test,
)
from asyncrl_node.transport.weights import DeviceArea, layout_hash  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl_node.core.rollout import TrajectoryGroup
    from asyncrl_node.engines.torch_model import ModelConfig

GIB = 1 << 30
MIB = 1 << 20
PEAK_FLOPS = 989e12
"""bf16, dense, of an H100 or H200 by datasheet."""
PIECE_WORDS = 32 * MIB


class _Crc:
    """Stands in for xxhash.xxh3_64."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, view: memoryview) -> None:
        self._value = zlib.crc32(view, self._value)

    def intdigest(self) -> int:
        return self._value


Status = Literal["PASS", "FAIL", "SKIP"]
Job = Callable[[], object]


class Outcome(NamedTuple):
    """What one check found."""

    status: Status
    value: str
    reason: str = ""
    figures: dict[str, float] = {}  # noqa: RUF012 - a NamedTuple's default, never changed
    exact: bool | None = None
    """Whether every byte was right; None where none was compared."""


def judge(passed: bool, value: str, reason: str = "", **figures: float) -> Outcome:
    """Pass or fail by what was measured."""
    return Outcome("PASS" if passed else "FAIL", value, reason, figures)


def judge_bytes(exact: bool, passed: bool, value: str, reason: str = "") -> Outcome:
    """Pass or fail where bytes were compared."""
    return Outcome("PASS" if exact and passed else "FAIL", value, reason, {}, exact)


@dataclass
class Session:
    """What checks hand on to each other."""

    folder: Path
    figures: dict[str, float] = field(default_factory=dict)
    opened: CudaDevice | None = None
    ipc: str | None = None
    """Why there is no CUDA IPC on this machine; empty if there is; None before the first try."""

    @property
    def device(self) -> CudaDevice:
        """The parent's GPU, by the driver. Raises: RunFault, CudaError."""
        if self.opened is None:
            self.opened = open_device()
        return self.opened


def open_device() -> CudaDevice:
    """Open the first visible GPU. Raises: RunFault, CudaError."""
    return CudaDriver(load_library()).open_device(0)


class Unavailable(Exception):
    """This machine lacks what a check needs: SKIP."""


def require_ipc(session: Session) -> CudaDevice:
    """Return the GPU if another process can map its memory at all.

    Only this first try may end in SKIP; once it has worked, every later failure is one.

    Raises: Unavailable.
    """
    if session.ipc is None:
        session.ipc = ""
        try:
            with peer() as other, plain_buffer(session.device, MIB) as (_, handle):
                other.call("map", handle)
                other.call("unmap", handle)
        except (PeerFault, RunFault) as error:
            if "cuIpc" not in str(error) and "no_cuda_driver" not in str(error):
                raise
            session.ipc = f"no CUDA IPC on this machine: {error}"
    if session.ipc:
        raise Unavailable(session.ipc)
    return session.device


# -- the other process ---------------------------------------------------------------------------


class PeerFault(Exception):
    """A command of the other process failed there."""


class PeerState:
    """The commands of the other process; `ask` sends the parent a number, waits for its answer."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._device = open_device()
        self._imported: CudaIpcImport | None = None
        self._mapped: DeviceArea | None = None
        self._kept: list[object] = []

    def self_test(self, handle: CudaIpcHandle) -> tuple[bool, str]:
        """Run the product's self-test; the parent writes a pattern when asked."""
        return self_test(self._device, handle, self._ask)

    def map(self, handle: CudaIpcHandle) -> float:
        """Map a plain buffer; returns the seconds that took."""
        start = time.perf_counter()
        address = self._device.open_handle(handle.handle)
        self._mapped = DeviceArea(address, handle.num_bytes, self._device.ordinal)
        return time.perf_counter() - start

    def unmap(self, handle: CudaIpcHandle) -> None:
        """Unmap it."""
        self._mapped = None
        self._device.close_handle(handle.handle)

    def num_wrong_words(self, seed: int) -> int:
        """Pull the mapped buffer piece by piece and compare it with the pattern."""
        assert self._mapped is not None
        return num_wrong_words(as_tensor(self._mapped), seed)

    def copy_rates(self) -> tuple[float, float]:
        """Copy the mapped buffer here, and a local one of the size; bytes per second of both."""
        import torch

        assert self._mapped is not None
        mapped = as_tensor(self._mapped)
        local, target = torch.empty_like(mapped), torch.empty_like(mapped)
        mapped_s = seconds(lambda: target.copy_(mapped))
        local_s = seconds(lambda: target.copy_(local))
        return mapped.numel() / mapped_s, mapped.numel() / local_s

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

    def export(self, num_bytes: int, byte: int) -> CudaIpcHandle:
        """Allocate a buffer full of one byte, kept until this process ends."""
        address = self._device.allocate(num_bytes)
        self._device.fill(address, byte, num_bytes)
        self._device.synchronize()
        return CudaIpcHandle(self._device.export_handle(address), num_bytes, self._device.uuid, 0)

    def try_to_export_torch_memory(self) -> str:
        """Name the fault of exporting a tensor of torch's allocator."""
        import torch

        tensor = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        self._kept.append(tensor)
        try:
            self._device.export_handle(tensor.data_ptr())
        except RunFault as fault:
            return fault.name
        return "none"

    def read_pinned(self, path: str, num_bytes: int, seed: int) -> tuple[int, float]:
        """Map the parent's memfd, pin it, copy it to the GPU; wrong words and bytes per second."""
        import torch

        with Path(path).open("r+b") as file, pinned(file.fileno(), num_bytes) as host:
            target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
            rate = num_bytes / seconds(lambda: target.copy_(host, non_blocking=True))
            return num_wrong_words(target, seed), rate


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

    state: PeerState | None = None
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            state = state or PeerState(ask)
            answer = ("done", getattr(state, command)(*arguments))
        except Exception as error:  # noqa: BLE001 - handed to the parent, which raises it
            answer = ("failed", f"{type(error).__name__}: {error}")
        pipe.send(answer)


class Peer:
    """Another process with the real driver. Ended by `stop` or `kill`."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_peer, args=(theirs,), daemon=True)
        before = dict(os.environ)
        os.environ.update(environment or {})
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()

    def call(
        self, command: str, *arguments: object, answer: Callable[[int], None] | None = None
    ) -> Any:  # noqa: ANN401 - as many types as commands
        """Have a command run there; `answer` does what it asks for. Raises: PeerFault, EOFError."""
        self.pipe.send((command, arguments))
        while True:
            kind, result = self.pipe.recv()
            if kind == "done":
                return result
            if kind == "failed":
                raise PeerFault(result)
            assert answer is not None
            answer(result)
            self.pipe.send(None)

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
def peer(environment: dict[str, str] | None = None) -> Iterator[Peer]:
    """Run another process for a while."""
    other = Peer(environment)
    try:
        yield other
    finally:
        other.stop()


# -- measuring -----------------------------------------------------------------------------------


def seconds(job: Job, repeats: int = 5) -> float:
    """GPU seconds of a job: the median, after one round that does not count."""
    import torch

    job()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
        start.record()
        job()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(times)


def words_of(seed: int, start: int, num_words: int, device: str) -> Tensor:
    """Return int64 words that depend on position and seed; sums and products wrap around."""
    import torch

    words = torch.arange(start, start + num_words, dtype=torch.int64, device=device)
    words += seed << 40
    words *= 0x9E3779B97F4A7C15 - (1 << 64)
    words ^= words >> 29
    words *= 0xBF58476D1CE4E5B9 - (1 << 64)
    return words ^ (words >> 32)


def fill_words(target: Tensor, seed: int) -> None:
    """Write the pattern into uint8 [num_bytes], a multiple of 8."""
    import torch

    words = target.view(torch.int64)
    for start in range(0, len(words), PIECE_WORDS):
        piece = words[start : start + PIECE_WORDS]
        piece.copy_(words_of(seed, start, len(piece), str(target.device)))


def num_wrong_words(source: Tensor, seed: int) -> int:
    """Count the words of uint8 [num_bytes] that are not the pattern's, pulled piece by piece."""
    import torch

    words = source.view(torch.int64)
    wrong = 0
    for start in range(0, len(words), PIECE_WORDS):
        local = words[start : start + PIECE_WORDS].clone()
        expected = words_of(seed, start, len(local), str(source.device))
        wrong += int((local != expected).sum())
    return wrong


@contextmanager
def pinned(descriptor: int, num_bytes: int) -> Iterator[Tensor]:
    """Map a file and register its pages with CUDA. Raises: RunFault("cannot_pin")."""
    import torch

    memory = mmap.mmap(descriptor, num_bytes)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = int(runtime.cudaHostRegister(host.data_ptr(), num_bytes, 0))
    if result:
        raise RunFault("cannot_pin", f"cudaHostRegister of {num_bytes} bytes: error {result}")
    try:
        yield host
    finally:
        runtime.cudaHostUnregister(host.data_ptr())


def used_bytes() -> int:
    """GPU memory in use, by all processes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


class Footprint(NamedTuple):
    """What a leak would show in."""

    gpu_bytes: int
    num_files: int
    num_shm: int
    rss_bytes: int

    @classmethod
    def now(cls) -> Footprint:
        """Look."""
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        num_files, num_shm = (len(os.listdir(f)) for f in ("/proc/self/fd", "/dev/shm"))
        return cls(used_bytes(), num_files, num_shm, rss)

    def leaks_since(self, before: Footprint) -> str:
        """Name what has grown; empty if nothing has."""
        grown = [b - a for a, b in zip(before, self, strict=True)]
        allowed = (2 * MIB, 0, 0, 10 * MIB)
        pairs = zip(self._fields, grown, allowed, strict=True)
        return ", ".join(f"{name} +{more}" for name, more, limit in pairs if more > limit)


def qwen3(size: str) -> ModelConfig:
    """Return the shape of a Qwen3 model."""
    from asyncrl_node.engines.torch_model import ModelConfig

    hidden, wide, layers, heads = {
        "0.6B": (1024, 3072, 28, 16),
        "1.7B": (2048, 6144, 28, 16),
        "8B": (4096, 12288, 36, 32),
    }[size]
    return ModelConfig(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=size != "8B",
        rope_theta=1e6,
    )


def entries_of(config: ModelConfig, dtype: str, itemsize: int) -> tuple[WeightEntry, ...]:
    """Lay a model out."""
    from asyncrl_node.engines.torch_model import parameter_shapes

    shapes = parameter_shapes(config).items()
    return layout_weights([(n, dtype, s, itemsize * math.prod(s)) for n, s in shapes])[0]


def flat_manifest(num_bytes: int) -> WeightsManifest:
    """Describe a buffer of one parameter."""
    entries, size = layout_weights([("flat", "uint8", (num_bytes,), num_bytes)])
    return WeightsManifest(size, entries, layout_hash(entries))


def rate(num_bytes: float) -> str:
    """Write bytes per second."""
    return f"{num_bytes / 1e12:.2f} TB/s" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.1f} GB/s"


# -- 1: ceilings ---------------------------------------------------------------------------------


def check_ceilings(session: Session) -> Outcome:
    """Measure a local copy and a matmul: what all other rates are held against."""
    import torch

    source = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() / seconds(lambda: target.copy_(source))
    side = 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * side**3 / seconds(lambda: torch.mm(a, b), 10)
    session.figures.update(copy_bytes_per_s=copied, matmul_flops=flops)
    value = f"{rate(copied)} read + written, {flops / 1e12:.0f} TFLOP/s"
    name = torch.cuda.get_device_name()
    if "H200" not in name:
        return Outcome("SKIP", value, f"the limits are of an H200, this is {name}")
    return judge(copied >= 3.5e12 and flops >= 650e12, value)


# -- 2 to 8: CUDA IPC ----------------------------------------------------------------------------


@contextmanager
def plain_buffer(device: CudaDevice, num_bytes: int) -> Iterator[tuple[DeviceArea, CudaIpcHandle]]:
    """Export a buffer without header, for a while."""
    address = device.allocate(num_bytes)
    try:
        handle = CudaIpcHandle(device.export_handle(address), num_bytes, device.uuid, 0)
        yield DeviceArea(address, num_bytes, device.ordinal), handle
    finally:
        device.free(address)


def check_ipc_bytes(session: Session) -> Outcome:
    """Compare what another process pulls: the self-test, then 4 GiB in three patterns."""
    import torch

    device = require_ipc(session)
    offer = SelfTestExport(device)
    with peer() as other, plain_buffer(device, 4 * GIB) as (area, handle):
        passed, words = other.call("self_test", offer.handle, answer=offer.write)
        offer.close()
        opened_s = other.call("map", handle)
        wrong = 0
        for seed in (1, 2, 3):
            fill_words(as_tensor(area), seed)
            torch.cuda.synchronize()
            wrong += other.call("num_wrong_words", seed)
        other.call("unmap", handle)
    value = f"{wrong} wrong words in 3 x 4 GiB, opened in {1e3 * opened_s:.1f} ms"
    return judge_bytes(passed and not wrong, opened_s <= 1.0, value, words)


def check_ipc_rate(session: Session) -> Outcome:
    """Compare a copy out of the mapping with a local one, both in the importing process."""
    device = require_ipc(session)
    with peer() as other, plain_buffer(device, 4 * GIB) as (_, handle):
        other.call("map", handle)
        mapped, local = other.call("copy_rates")
        other.call("unmap", handle)
    ratio = mapped / local
    value = f"{ratio:.3f} ({rate(2 * mapped)} against {rate(2 * local)}, read + written)"
    return judge(ratio >= 0.95, value, copy_ratio=ratio)


class ShardFigures(NamedTuple):
    """One model pulled from virtual shards."""

    exact: bool
    ratio: float
    """Rate of assembling / rate of one flat copy."""
    pull_s: float


def pull_virtual_shards(
    entries: Sequence[WeightEntry], num_ranks: int, device: str, time_it: Callable[[Job], float]
) -> ShardFigures:
    """Cut random weights as FSDP2 does, by torch.chunk, pull them, compare with the source."""
    import torch

    num_bytes = entries[-1].offset + entries[-1].num_bytes
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    layouts = [shard_layout(entries, num_ranks, rank) for rank in range(num_ranks)]
    shards = [
        torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8, device=device)
        for layout in layouts
    ]
    for place, entry in enumerate(entries):
        whole = source[entry.offset : entry.offset + entry.num_bytes]
        for rank, chunk in enumerate(torch.chunk(whole.view(entry.shape[0], -1), num_ranks)):
            held = layouts[rank].entries[place]
            shards[rank][held.offset : held.offset + held.num_bytes] = chunk.flatten()
    plan = assemble(entries, num_ranks, sampler=1)
    exact = True
    for entry, (_, tensor) in zip(entries, pull_tensors(plan, shards, device), strict=True):
        pulled = tensor.view(-1).view(torch.uint8)
        exact &= torch.equal(pulled, source[entry.offset : entry.offset + entry.num_bytes])

    def pull_all() -> None:
        for _ in pull_tensors(plan, shards, device):
            pass

    target = torch.empty_like(source)
    flat_s = time_it(lambda: target.copy_(source))
    pull_s = time_it(pull_all)
    return ShardFigures(exact, flat_s / pull_s, pull_s)


def check_virtual_shards(session: Session) -> Outcome:
    """Assemble whole models in module order; from one rank they are views, so only bits count."""
    import torch

    exact, passed, values = True, True, []
    for size, num_ranks, limit in (
        ("8B", 1, 0.0),
        ("8B", 3, 0.7),
        ("8B", 4, 0.7),
        ("8B", 7, 0.7),
        ("0.6B", 4, 0.4),
    ):
        entries = entries_of(qwen3(size), "bfloat16", 2)
        found = pull_virtual_shards(entries, num_ranks, "cuda", lambda job: seconds(job, 3))
        torch.cuda.empty_cache()
        exact &= found.exact
        passed &= found.ratio >= limit
        timed = "views" if num_ranks == 1 else f"{found.ratio:.2f} in {1e3 * found.pull_s:.0f} ms"
        values.append(f"{size}/{num_ranks} {timed}")
    reason = "small copies are bound by their launches (a few us each), not by memory"
    value = f"{'bit-equal' if exact else 'WRONG'}, {', '.join(values)}"
    return judge_bytes(exact, passed, value, reason)


Fill = Callable[[DeviceArea, int], None]
"""Write a version into an area, on some stream."""
Pull = Callable[[int], int]
"""Have the other process pull a version; its hash. Returns when the lease is back."""


def publish_many(export: CudaIpcExport, fill: Fill, pull_there: Pull, versions: range) -> int:
    """Publish and pull each version under its lease; count the pulls that hash otherwise."""
    torn = 0
    for version in versions:
        fill(export.begin_write(), version)
        digest = export.end_write(version)
        torn += pull_there(version) != digest
    return torn


def check_publishing(session: Session) -> Outcome:
    """Publish 200 versions of 64 MiB while matmuls run beside; nothing may leak."""
    import torch

    device = require_ipc(session)
    writer, other_work = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def fill(area: DeviceArea, version: int) -> None:
        with torch.cuda.stream(other_work):
            for _ in range(20):
                torch.mm(matrix, matrix)
        with torch.cuda.stream(writer):
            fill_words(as_tensor(area), version)

    manifest = flat_manifest(64 * MIB)
    export = CudaIpcExport(device, manifest, writer.synchronize)
    try:
        with peer() as other:
            other.call("open", export.handle, manifest)
            torn = publish_many(export, fill, lambda v: int(other.call("pull", v)), range(5))
            before = Footprint.now()
            torn += publish_many(export, fill, lambda v: int(other.call("pull", v)), range(5, 205))
            leaks = Footprint.now().leaks_since(before)
            other.call("close")
    finally:
        export.close()
    return judge_bytes(not torn, not leaks, f"{torn} torn of 205; grown: {leaks or 'nothing'}")


def detects_ignored_lease(
    export: CudaIpcExport, fill: Fill, pull_there: Callable[[Callable[[int], None]], object]
) -> bool:
    """Overwrite the buffer in the middle of a pull; `pull_there` gets what to do in its middle."""
    fill(export.begin_write(), 1)
    export.end_write(1)
    try:
        pull_there(lambda _: fill(export.begin_write(), 2))
    except (PeerFault, RunFault) as error:
        return "torn_weights" in str(error)
    return False


def detects_skipped_wait(export: CudaIpcExport, late_fill: Fill, pull_there: Pull) -> bool:
    """Announce before the stream is done: `export` was made with a `synchronize` that does not."""
    late_fill(export.begin_write(), 3)  # a pattern that cannot be there already
    digest = export.end_write(3)
    return pull_there(3) != digest


def check_negative_controls(session: Session) -> Outcome:
    """Break the two rules on purpose: every break must be seen."""
    import torch

    device = require_ipc(session)
    manifest = flat_manifest(64 * MIB)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def fill(area: DeviceArea, version: int) -> None:
        fill_words(as_tensor(area), version)
        torch.cuda.synchronize()

    def late_fill(area: DeviceArea, version: int) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
            fill_words(as_tensor(area), version)

    export = CudaIpcExport(device, manifest, lambda: None)
    try:
        with peer() as other:
            other.call("open", export.handle, manifest)
            lease = detects_ignored_lease(
                export, fill, lambda between: other.call("pull", 1, True, answer=between)
            )
            wait = detects_skipped_wait(export, late_fill, lambda v: int(other.call("pull", v)))
            other.call("close")
    finally:
        export.close()
    value = f"ignored lease {'seen' if lease else 'NOT SEEN'}, skipped wait "
    return judge(lease and wait, value + ("seen" if wait else "NOT SEEN"))


def check_kills(session: Session) -> Outcome:
    """Kill three importers, and an exporter whose buffer is mapped here."""
    device = require_ipc(session)
    before = used_bytes()
    manifest = flat_manifest(256 * MIB)
    export = CudaIpcExport(device, manifest, lambda: None)
    served = 0
    try:
        for version in range(3):
            area = export.begin_write()
            device.fill(area.address, version, area.num_bytes)
            digest = export.end_write(version)
            other = Peer()
            other.call("open", export.handle, manifest)
            served += other.call("pull", version) == digest
            other.kill()
            other.stop()
    finally:
        export.close()
    exporter = Peer()
    handle = exporter.call("export", GIB, 0x5A)
    device.open_handle(handle.handle)
    killed_s = time.perf_counter()
    exporter.kill()
    with suppress(EOFError, ConnectionError):
        exporter.pipe.recv()
    noticed_s = time.perf_counter() - killed_s
    exporter.stop()
    device.close_handle(handle.handle)
    left = wait_for_memory(before + 64 * MIB) - before
    value = (
        f"{served} of 3 restarts served, exporter's end noticed in {noticed_s:.2f} s, "
        f"{max(0, left) / MIB:.0f} MiB left"
    )
    return judge(
        served == 3 and noticed_s <= 5.0 and left <= 64 * MIB,
        value,
        "memory by cuMemGetInfo; that a whole sampler ends by name is the launcher's test",
    )


def wait_for_memory(limit: int, patience_s: float = 5.0) -> int:
    """Wait until memory in use is back at the limit, or patience ends; returns what is in use."""
    end_s = time.perf_counter() + patience_s
    while (used := used_bytes()) > limit and time.perf_counter() < end_s:
        time.sleep(0.05)
    return used


def check_expandable_segments(session: Session) -> Outcome:
    """Export from a process whose torch allocator uses expandable segments."""
    import torch

    device = require_ipc(session)
    with peer({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}) as other:
        refusal = other.call("try_to_export_torch_memory")
        handle = other.call("export", 64 * MIB, 0x5A)
        address = device.open_handle(handle.handle)
        area = DeviceArea(address, handle.num_bytes, device.ordinal)
        exact = bool((as_tensor(area) == 0x5A).all())
        torch.cuda.synchronize()
        device.close_handle(handle.handle)
    value = f"raw buffer {'right' if exact else 'WRONG'}, torch's own memory: {refusal}"
    return judge_bytes(exact, refusal == "not_exportable", value)


# -- 9: host memory ------------------------------------------------------------------------------


def check_pinned_host(session: Session) -> Outcome:
    """Copy 2 GiB through one memfd that both processes have pinned."""
    import torch

    num_bytes, seed = 2 * GIB, 7
    descriptor = os.memfd_create("gpu_check")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        fill_words(source, seed)
        start = time.perf_counter()
        with pinned(descriptor, num_bytes) as host:
            pinned_s = (time.perf_counter() - start) * 1e9 / num_bytes
            down = num_bytes / seconds(lambda: host.copy_(source, non_blocking=True))
            torch.cuda.synchronize()
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            with peer() as other:
                wrong, up = other.call("read_pinned", path, num_bytes, seed)
    finally:
        os.close(descriptor)
    value = (
        f"{wrong} wrong words, down {rate(down)}, up {rate(up)}, pinned in {pinned_s:.2f} s per GB"
    )
    return judge_bytes(not wrong, min(down, up) >= 20e9, value, "not the product's path yet")


# -- 11, 12, 10: attention, head, publish cast -----------------------------------------------------


def check_attention(session: Session) -> Outcome:
    """Compare packed attention with plain attention per document, and look for leaks."""
    import torch

    from asyncrl_node.learner.attention import packed_attention, plan_attention

    lengths = document_lengths(32_768, 32)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (1, heads, sum(lengths), 128)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    inputs = [draw(heads).requires_grad_() for heads in (16, 8, 8)]
    plan = plan_attention(lengths, "cuda")

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(torch.nn.Module(), query, key, value, None, pack=plan)[0]

    output = forward(*inputs)
    upstream = torch.randn_like(output)
    grads = torch.autograd.grad(output, inputs, upstream)
    expected, expected_grads = attend_by_document(lengths, inputs, upstream)
    error = float((output.float() - expected).abs().max())
    grad_error = max(
        float((g.float() - e).norm() / e.norm()) for g, e in zip(grads, expected_grads, strict=True)
    )
    leaks = leaking_documents(forward, lengths, [t.detach() for t in inputs])
    squares = 2 * 16 * 128 * sum(length**2 for length in lengths)
    forward_flops = squares / seconds(lambda: forward(*[t.detach() for t in inputs]))
    both_s = seconds(lambda: torch.autograd.grad(forward(*inputs), inputs, upstream))
    backward_flops = 2.5 * squares / max(1e-9, both_s - squares / forward_flops)
    value = (
        f"error {error:.1e}, gradients {grad_error:.1e}, {leaks} leaks, "
        f"{forward_flops / 1e12:.0f} / {backward_flops / 1e12:.0f} TFLOP/s"
    )
    fast = forward_flops >= 300e12 and backward_flops >= 200e12
    return judge(error <= 2e-2 and grad_error <= 2e-2 and not leaks and fast, value)


def document_lengths(num_tokens: int, count: int) -> list[int]:
    """Draw log-uniform lengths in 64 .. 8192 with this sum, longest first, and one of 1 token."""
    dice = random.Random(0)
    lengths = [int(math.exp(dice.uniform(math.log(64), math.log(8192)))) for _ in range(count)]
    scale = (num_tokens - 1) / sum(lengths)
    lengths = [max(2, int(length * scale)) for length in lengths]
    lengths[0] += num_tokens - 1 - sum(lengths)
    return [*sorted(lengths, reverse=True), 1]


def attend_by_document(
    lengths: Sequence[int], inputs: Sequence[Tensor], upstream: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Plain causal attention in float32, one document at a time: [1, T, H, d] and gradients."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    parts = [torch.split(tensor, list(lengths), 2) for tensor in exact]
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for q, k, v in zip(*parts, strict=True)
    ]
    output = torch.cat(outputs, 2).transpose(1, 2)
    return output.detach(), list(torch.autograd.grad(output, exact, upstream.float()))


def leaking_documents(
    forward: Callable[..., Tensor], lengths: Sequence[int], inputs: Sequence[Tensor]
) -> int:
    """Change one token's key and value; count outputs before it, and of others, that move."""
    import torch

    plain = forward(*inputs)[0]
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    leaks = 0
    for place in (0, 1):
        token = starts[place] + lengths[place] - 1
        query, key, value = inputs[0], inputs[1].clone(), inputs[2].clone()
        key[:, :, token] += 1.0
        value[:, :, token] += 1.0
        changed = forward(query, key, value)[0]
        moved = torch.nonzero((changed != plain).flatten(1).any(1)).flatten().tolist()
        leaks += sum(position != token for position in moved) + (token not in moved)
    return leaks


def check_head(session: Session) -> Outcome:
    """Compare the chunked log-probability head with the plain one: memory, and float32 numbers."""
    import torch

    from asyncrl_node.learner.logprobs import head_logprobs

    num, width, vocabulary = 16_384, 2048, 151_936
    hidden = torch.randn(num, width, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda") * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (num,), device="cuda")

    def chunked() -> Tensor:
        return head_logprobs(hidden, weight, targets, 1.0, 2048 * vocabulary)[0]

    def naive() -> Tensor:
        logits = (hidden @ weight.T).float()
        return logits.log_softmax(1).gather(1, targets[:, None])[:, 0]

    peaks = []
    for score in (chunked, naive):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(score().sum(), (hidden, weight))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    with torch.no_grad():
        exact = torch.cat(
            [
                (rows.float() @ weight.float().T).log_softmax(1).gather(1, wanted[:, None])[:, 0]
                for rows, wanted in zip(
                    torch.split(hidden, 2048), torch.split(targets, 2048), strict=True
                )
            ]
        )
        errors = (chunked() - exact).abs()
    ratio = peaks[0] / peaks[1]
    value = f"peak {ratio:.3f} of naive ({peaks[1] / GIB:.1f} GiB), error {errors.mean():.1e}"
    reason = f"the mean error; {errors.max():.1e} at most, the rounding of bf16 logits"
    return judge(ratio <= 0.15 and float(errors.mean()) <= 5e-3, value, reason)


def check_cast(session: Session) -> Outcome:
    """Cast 1.7B parameters into the flat bf16 buffer, alone and beside a matmul."""
    import torch

    from asyncrl_node.engines.torch_model import parameter_shapes

    if "copy_bytes_per_s" not in session.figures:
        check_ceilings(session)
    shapes = parameter_shapes(qwen3("1.7B")).values()
    sources = [torch.randn(shape, device="cuda") for shape in shapes]
    targets = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]

    def cast() -> None:
        torch._foreach_copy_(targets, sources)

    cast_s = seconds(cast)
    share = 6 * sum(s.numel() for s in sources) / cast_s / session.figures["copy_bytes_per_s"]
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def matmuls() -> None:
        for _ in range(20):  # about 28 ms: the cast in front of them would be +11 %
            torch.mm(matrix, matrix)

    def beside() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            cast()
        matmuls()

    slower = seconds(beside) / seconds(matmuls) - 1
    value = f"{1e3 * cast_s:.1f} ms, {share:.2f} of the copy rate, matmuls {slower:+.1%}"
    return judge(share >= 0.40 and slower <= 0.15, value)


# -- 13 and 16: the learner ------------------------------------------------------------------------


def write_random_model(size: str, folder: Path) -> Path:
    """Save a Qwen3 model with random weights, in Hugging Face form."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    target = folder / size
    if not target.exists():
        shape = qwen3(size)
        config = Qwen3Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            tie_word_embeddings=shape.tie_word_embeddings,
        )
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(config)
        model.bfloat16().save_pretrained(target)
    return target


def make_groups(
    num_groups: int, length: int, vocabulary: int, logprob: float
) -> list[TrajectoryGroup]:
    """Make groups of 8 rollouts of `length` tokens, the last three quarters sampled."""
    from asyncrl_node.engines.base import Completion
    from asyncrl_node.sampler.rollouts import Rollout, build_group

    dice = np.random.default_rng(0)
    groups = []
    for number in range(num_groups):
        rollouts = []
        for place in range(8):
            rollout = Rollout()
            num_sampled = 3 * length // 4
            rollout.add_prompt(dice.integers(vocabulary, size=length - num_sampled).tolist())
            tokens = dice.integers(vocabulary, size=num_sampled).tolist()
            rollout.add_completion(
                Completion(tokens, [logprob] * num_sampled, [0] * num_sampled, "length")
            )
            rollout.reward = float(place % 2)
            rollouts.append(rollout)
        groups.append(build_group(GroupKey(number, 0), number, 0, rollouts))
    return groups


def step_seconds(
    model_dir: Path, device: str, groups: list[TrajectoryGroup], num_steps: int = 2
) -> float:
    """Seconds of one optimizer step of the product's learner, without the publication."""
    from asyncrl_node.learner.trainer import Trainer

    config = LearnerConfig(micro_batch_tokens=sum(len(group.tokens) for group in groups))
    trainer = Trainer(config, model_dir, 1.0, 0, device)
    times = []
    for step in range(1 + num_steps):
        start = time.perf_counter()
        trainer.accumulate(groups, 1 + step)  # the log-probabilities are of no version
        trainer.update()
        trainer.finish_step()  # reads numbers back, so the GPU is done
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def check_learner_step(session: Session) -> Outcome:
    """Time a whole optimizer step on 32,768 packed tokens; MFU is causal, without recomputation."""
    import torch

    from asyncrl_node.engines.torch_model import parameter_shapes

    values, passed = [], True
    for size, limit in (("0.6B", 0.18), ("1.7B", 0.28)):
        shape = qwen3(size)
        length = 1024
        groups = make_groups(4, length, shape.vocab_size, -math.log(shape.vocab_size))
        model_dir = write_random_model(size, session.folder)
        tokens_per_s = 4 * 8 * length / step_seconds(model_dir, "cuda", groups)
        torch.cuda.empty_cache()
        num_parameters = sum(math.prod(s) for s in parameter_shapes(shape).values())
        heads = shape.num_hidden_layers * shape.num_attention_heads * shape.head_size
        mfu = (6 * num_parameters + 6 * heads * length) * tokens_per_s / PEAK_FLOPS
        session.figures["mfu"] = mfu
        passed &= mfu >= limit
        values.append(f"{size} {tokens_per_s:,.0f} tok/s, MFU {mfu:.1%}")
    reason = "no FSDP, no activation checkpointing; publication not included"
    return judge(passed, "; ".join(values), reason, mfu=session.figures["mfu"])


class Parity(NamedTuple):
    """Learner against sampler, over the sampled tokens."""

    num_tokens: int
    max_difference: float
    """Natural log of the largest learner / sampler probability ratio."""
    rms_difference: float
    """From the k3 estimate: r - 1 - log r is half the squared difference of log-probabilities."""


def parity(model_dir: Path, device: str, num_requests: int, num_new: int) -> Parity:
    """Sample with the torch engine at T = 0.7, score with the learner, on the same weights."""
    from asyncrl_node.engines.base import Completion, GenerateRequest
    from asyncrl_node.engines.torch_engine import TorchEngine
    from asyncrl_node.learner.trainer import Trainer
    from asyncrl_node.sampler.rollouts import Rollout, build_group

    trainer = Trainer(LearnerConfig(), model_dir, 0.7, 0, device)
    entries, num_bytes = trainer.manifest()
    weights = memoryview(bytearray(num_bytes))
    trainer.copy_weights_into(weights)
    engine = TorchEngine(model_dir, num_requests, 8 + num_new, device)
    engine.load_weights(0, entries, weights.toreadonly())
    rollouts: list[Rollout] = []

    def submit(number: int) -> None:
        rollout = Rollout()
        rollout.add_prompt([(number + place) % 40 for place in range(8)])
        rollout.reward = float(number % 2)
        rollouts.append(rollout)

        def done(completion: Completion) -> None:
            rollout.add_completion(completion)

        engine.submit(GenerateRequest(number, rollout.tokens[:], num_new, 0.7, number), done)

    for number in range(num_requests):
        submit(number)
    while engine.step():
        pass
    trainer.accumulate([build_group(GroupKey(0, 0), 0, 0, rollouts)], 0)
    trainer.update()
    metrics = trainer.finish_step()
    engine.close()
    return Parity(
        int(metrics["tokens/trained"]),
        math.log(metrics["ratio/max"]),
        math.sqrt(2 * max(0.0, metrics["mismatch/kl_same_version"])),
    )


def check_parity(session: Session) -> Outcome:
    """Score what the torch engine sampled; float32 on both sides, TF32 off."""
    import torch

    assert torch.get_float32_matmul_precision() == "highest"
    found = parity(write_random_model("0.6B", session.folder), "cuda", 32, 64)
    value = (
        f"fp32, {found.num_tokens} tokens: ratio up to exp({found.max_difference:.1e}), "
        f"rms {found.rms_difference:.1e}"
    )
    passed = abs(found.max_difference) <= 5e-5 and found.rms_difference <= 5e-5
    return judge(passed, value, "bf16 is not compared: the learner computes in float32 only")


# -- several GPUs ----------------------------------------------------------------------------------


def each_other_gpu() -> list[str]:
    """Name the GPUs after the first, as CUDA_VISIBLE_DEVICES takes them."""
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = hidden.split(",") if hidden else [str(n) for n in range(torch.cuda.device_count())]
    return names[1 : torch.cuda.device_count()]


def check_masked_pairs(session: Session) -> Outcome:
    """Self-test from GPU 0 to every other GPU, each process seeing its own alone."""
    device = require_ipc(session)
    offer = SelfTestExport(device)
    failed = []
    try:
        for name in each_other_gpu():
            with peer({"CUDA_VISIBLE_DEVICES": name}) as other:
                passed, words = other.call("self_test", offer.handle, answer=offer.write)
                failed += [] if passed else [f"GPU {name}: {words}"]
    finally:
        offer.close()
    value = f"{len(failed)} of {len(each_other_gpu())} pairs failed"
    return judge_bytes(not failed, True, value, "; ".join(failed))


def check_peer_rate(session: Session) -> Outcome:
    """Pull 4 GiB from GPU 0 into every other GPU, one at a time."""
    device = require_ipc(session)
    rates = []
    for name in each_other_gpu():
        environment = {"CUDA_VISIBLE_DEVICES": name}
        with peer(environment) as other, plain_buffer(device, 4 * GIB) as (_, handle):
            other.call("map", handle)
            rates.append(other.call("copy_rates")[0])
            other.call("unmap", handle)
    slowest = min(rates)
    value = f"{rate(slowest)} to {rate(max(rates))}"
    return judge(slowest >= 250e9, value, "the limit is of NVLink 4 pairs")


# -- the table -------------------------------------------------------------------------------------


class Check(NamedTuple):
    """One line; `run` is a reason where nothing is built that could be checked."""

    number: str
    title: str
    expected: str
    limit: str
    run: Callable[[Session], Outcome] | str


CHECKS = (
    Check(
        "1",
        "ceilings: copy of 4 GiB, bf16 matmul",
        "4.3 TB/s, 770-800 TFLOP/s",
        ">= 3.5 TB/s, >= 650 TFLOP/s",
        check_ceilings,
    ),
    Check(
        "2",
        "raw IPC, two processes, patterns after open",
        "exact, open < 50 ms",
        "every byte, open <= 1 s",
        check_ipc_bytes,
    ),
    Check("3", "IPC copy rate / local copy rate", "1.0", ">= 0.95", check_ipc_rate),
    Check(
        "4",
        "virtual shards, assembled in module order",
        "bit-equal, 0.9 of a flat copy",
        "every byte, 8B >= 0.7, 0.6B >= 0.4",
        check_virtual_shards,
    ),
    Check(
        "5",
        "200 publications beside matmuls",
        "0 torn, nothing grows",
        "0 torn; GPU 2 MiB, RSS 10 MiB, files 0",
        check_publishing,
    ),
    Check("6", "negative controls", "both seen", "both seen", check_negative_controls),
    Check(
        "7",
        "SIGKILL of importers and of an exporter",
        "serves on, noticed, memory back",
        "3 of 3, <= 5 s, <= 64 MiB",
        check_kills,
    ),
    Check(
        "8",
        "expandable segments in the exporter",
        "raw works, torch memory refused",
        "both",
        check_expandable_segments,
    ),
    Check(
        "9",
        "pinned host memory, 2 GiB memfd",
        "0.1 s/GB, 45-55 GB/s each way",
        "exact, >= 20 GB/s",
        check_pinned_host,
    ),
    Check(
        "11",
        "packed attention: 33 documents, 32k tokens",
        "fp32 numbers, no leak, fast",
        "2e-2, 2e-2, 0 leaks, >= 300 / 200 TFLOP/s",
        check_attention,
    ),
    Check(
        "12",
        "log-probability head, 16k x 152k",
        "<= 0.15 of naive, fp32 numbers",
        "<= 0.15, <= 5e-3",
        check_head,
    ),
    Check(
        "10",
        "fp32 -> bf16 publish cast, 1.7B",
        "3 ms, >= 0.6 of the copy rate",
        ">= 0.40, matmul <= +15 %",
        check_cast,
    ),
    Check(
        "13",
        "learner step, 32,768 tokens",
        "60k / 28k tok/s, MFU 25-30 / 33-40 %",
        ">= 18 % / >= 28 %",
        check_learner_step,
    ),
    Check(
        "14",
        "fully_shard: published bits, gradients",
        "equal",
        "equal, 1e-6",
        "not built: the learner has no FSDP",
    ),
    Check(
        "15",
        "planner forecast against memory used",
        "within -5..+15 %",
        "-5..+15 %",
        "not built: the planner forecasts no GPU memory",
    ),
    Check("16", "parity: torch engine against learner", "5e-5 in fp32", "5e-5", check_parity),
    Check(
        "17",
        "20 RL steps on one GPU, verify",
        "ok, update <= 0.1 s",
        "ok, <= 0.1 s",
        "not built: a run cannot be placed on GPUs yet",
    ),
)

EXTRA_CHECKS = (
    Check("A1", "peer mapping under masks", "all pairs exact", "every byte", check_masked_pairs),
    Check("A2", "peer copy rate", "350 GB/s", ">= 250 GB/s", check_peer_rate),
    Check("A3", "fan-out to all samplers", "rotated, no hot spot", "-", "not built"),
    Check("A4", "NCCL FSDP2 with several ranks", "equal", "-", "not built: no FSDP"),
    Check("A5", "vLLM: CUDA graphs after an update", "equal", "-", "not built: no vLLM engine"),
    Check("A6", "vLLM: tied head on CUDA", "equal", "-", "not built: no vLLM engine"),
    Check("A7", "vLLM: TP slicing", "equal", "-", "not built: no vLLM engine"),
    Check("A8", "vLLM: price of recomputing KV", "forecast", "-", "not built: no vLLM engine"),
)
_NOT_BUILT = ("unsupported_device",)
"""Faults by which the product says that it has no path for this device yet."""


def run_check(check: Check, session: Session) -> Outcome:
    """Run one check; whatever it raises becomes its line."""
    if isinstance(check.run, str):
        return Outcome("SKIP", "-", check.run)
    import torch

    try:
        outcome = check.run(session)
    except Exception as error:  # noqa: BLE001 - one line fails, the others are still worth running
        return outcome_of(error)
    finally:
        torch.cuda.empty_cache()
    session.figures.update(outcome.figures)
    return outcome


def outcome_of(error: Exception) -> Outcome:
    """Tell what is not there (SKIP) from what is broken (FAIL)."""
    story = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if isinstance(error, RunFault) and error.name in _NOT_BUILT:
        return Outcome("SKIP", "-", f"not built: {error.story}")
    if isinstance(error, Unavailable):
        return Outcome("SKIP", "-", str(error))
    return Outcome("FAIL", "-", story)


def print_line(check: Check, outcome: Outcome, took_s: float) -> None:
    """Print one line of the report."""
    parts = [
        f"{check.number:>2} {outcome.status} {check.title}: {outcome.value}",
        f"expected {check.expected}",
        f"limit {check.limit}",
    ]
    if outcome.reason:
        parts.append(f"reason: {outcome.reason}")
    print("; ".join(parts) + f" [{took_s:.1f} s]", flush=True)


def print_result(session: Session, outcomes: dict[str, Outcome]) -> None:
    """Print the last line."""
    compared = [outcome.exact for outcome in outcomes.values() if outcome.exact is not None]
    statuses = [outcome.status for outcome in outcomes.values()]
    result = {
        "copy_ratio": session.figures.get("copy_ratio"),
        "mfu": session.figures.get("mfu"),
        "exact": all(compared) if compared else None,
        "num_passed": statuses.count("PASS"),
        "num_failed": statuses.count("FAIL"),
        "num_skipped": statuses.count("SKIP"),
        "checks": {number: outcome.status for number, outcome in outcomes.items()},
    }
    print(json.dumps(result), flush=True)


def blockers(checks: Sequence[Check]) -> dict[str, str]:
    """Say which checks cannot run here, and why."""
    import torch

    if not torch.cuda.is_available():
        built = {c.number: f"; {c.run}" if isinstance(c.run, str) else "" for c in checks}
        return {number: f"no CUDA GPU here{missing}" for number, missing in built.items()}
    if torch.cuda.device_count() < 2:
        return {check.number: "one GPU only" for check in EXTRA_CHECKS[:4]}
    return {}


def describe_machine() -> str:
    """Say what this ran on."""
    import torch

    runtime = "gVisor" if "gvisor" in Path("/proc/version").read_text().lower() else "Linux"
    versions = f"torch {torch.__version__}, transformers " + metadata.version("transformers")
    text = f"{versions}, {runtime}"
    if not torch.cuda.is_available():
        return f"{text}, no GPU"
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        driver = "driver version not readable"
    return f"{text}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {driver}"


def print_memory(when: str) -> None:
    """Print the memory in use on the first GPU."""
    import torch

    if torch.cuda.is_available():
        print(f"GPU memory in use at the {when}: {used_bytes() / MIB:.0f} MiB", flush=True)


def give_up(running: list[Check], session: Session, outcomes: dict[str, Outcome]) -> None:
    """End the process when a check does not return: a hang is a failure with a line of its own."""
    outcomes[running[-1].number] = Outcome("FAIL", "-", "did not return within the budget")
    print_line(running[-1], outcomes[running[-1].number], 0.0)
    print_result(session, outcomes)
    os._exit(1)


def run_checks(checks: Sequence[Check], budget_s: float, folder: Path) -> dict[str, Outcome]:
    """Run and print every check; those that the budget leaves no time for are skipped."""
    session, outcomes = Session(folder), dict[str, Outcome]()
    started_s = time.monotonic()
    blocked = blockers(checks)
    running: list[Check] = []
    watchdog = threading.Timer(budget_s + 25.0, give_up, (running, session, outcomes))
    watchdog.daemon = True
    watchdog.start()
    for check in checks:
        check_started_s = time.monotonic()
        running.append(check)
        if check.number in blocked:
            outcome = Outcome("SKIP", "-", blocked[check.number])
        elif check_started_s - started_s > budget_s:
            outcome = Outcome("SKIP", "-", f"the budget of {budget_s:.0f} s is spent")
        else:
            outcome = run_check(check, session)
        outcomes[check.number] = outcome
        print_line(check, outcome, time.monotonic() - check_started_s)
    watchdog.cancel()
    print_memory("end")
    print_result(session, outcomes)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--all", action="store_true", help="also what needs several GPUs or vLLM")
    parser.add_argument("--only", nargs="+", default=[], help="numbers of checks to run")
    parser.add_argument("--budget-s", type=float, default=210.0)
    options = parser.parse_args(arguments)
    checks: Sequence[Check] = (*CHECKS, *EXTRA_CHECKS) if options.all else CHECKS
    if options.only:
        checks = [check for check in checks if check.number in options.only]
    print(describe_machine(), flush=True)
    print_memory("start")
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_checks(checks, options.budget_s, Path(folder))
    return int(any(outcome.status == "FAIL" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
