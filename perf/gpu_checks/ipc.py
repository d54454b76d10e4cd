"""Checks 2 to 8: the weight buffer in device memory, between two processes. Not run on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from asyncrl_node.core.shards import assemble, shard_layout
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import CudaIpcHandle, WeightEntry
from asyncrl_node.transport import cuda_ipc
from asyncrl_node.transport.cuda_driver import CudaDevice
from asyncrl_node.transport.cuda_ipc import (
    CudaIpcExport,
    SelfTestExport,
    area_hash,
    pull_tensors,
    shard_manifest,
)
from asyncrl_node.transport.weights import DeviceArea
from perf.gpu_checks.measure import (
    Footprint,
    Job,
    fill_words,
    rate,
    seconds,
    synchronize,
    used_bytes,
    wait_for_memory,
)
from perf.gpu_checks.models import entries_of, flat_manifest, manifest_of, qwen3
from perf.gpu_checks.outcome import GIB, MIB, Outcome, Session, Unavailable, judge, judge_bytes
from perf.gpu_checks.peer import Peer, PeerFault, peer


def require_ipc(session: Session) -> CudaDevice:
    """Return the GPU if another process can map its memory at all.

    Only this first try may end in SKIP; once it has worked, every later failure is one.

    Raises: Unavailable.
    """
    if session.ipc is None:
        session.ipc = ""
        try:
            with peer() as other, plain_buffer(session.device, 2 * MIB) as (_, handle):
                other.call("map", handle)
                other.call("unmap", handle)
        except (PeerFault, RunFault) as error:
            if "cuIpc" not in str(error) and "no_cuda_driver" not in str(error):
                raise
            session.ipc = f"no CUDA IPC on this machine: {error}"
    if session.ipc:
        raise Unavailable(session.ipc)
    return session.device


@contextmanager
def plain_buffer(device: CudaDevice, num_bytes: int) -> Iterator[tuple[DeviceArea, CudaIpcHandle]]:
    """Export a buffer without header, for a while."""
    address = device.allocate(num_bytes)
    try:
        handle = CudaIpcHandle(device.export_handle(address), num_bytes, device.uuid, 0)
        yield DeviceArea(address, num_bytes, device.ordinal), handle
    finally:
        device.free(address)


# -- 2, 3: the mapping ---------------------------------------------------------------------------


def check_ipc_bytes(session: Session) -> Outcome:
    """Compare what another process pulls: the self-test, then a large buffer in three patterns."""
    device, scale = require_ipc(session), session.scale
    with peer() as other, plain_buffer(device, scale.buffer_bytes) as (area, handle):
        offer = SelfTestExport(device, scale.self_test_bytes)
        try:
            passed, words = other.call("self_test", offer.handle, answer=offer.write)
        finally:
            offer.close()
        opened_s = other.call("map", handle)
        wrong = 0
        for seed in (1, 2, 3):
            fill_words(cuda_ipc.as_tensor(area), seed)
            synchronize()
            wrong += other.call("num_wrong_words", seed)
        other.call("unmap", handle)
    size = f"{scale.buffer_bytes / GIB:g} GiB"
    value = f"{wrong} wrong words in 3 x {size}, opened in {1e3 * opened_s:.1f} ms"
    return judge_bytes(passed and not wrong, opened_s <= 1.0, value, words)


def check_ipc_rate(session: Session) -> Outcome:
    """Compare a copy out of the mapping with a local one, both in the importing process."""
    device = require_ipc(session)
    with peer() as other, plain_buffer(device, session.scale.buffer_bytes) as (_, handle):
        other.call("map", handle)
        mapped, local = other.call("copy_rates")
        other.call("unmap", handle)
    ratio = mapped / local
    value = f"{ratio:.3f} ({rate(2 * mapped)} against {rate(2 * local)}, read + written)"
    return judge(ratio >= 0.95, value, copy_ratio=ratio)


# -- 4: shards -----------------------------------------------------------------------------------


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


def fetched_like_the_source(session: Session, num_ranks: int) -> bool:
    """Have another process pull a model from `num_ranks` buffers, as vLLM's worker does; compare
    its hash with that of the whole."""
    device = require_ipc(session)
    manifest = manifest_of(entries_of(qwen3(session.scale.pulled_model), "bfloat16", 2))
    exports: list[CudaIpcExport] = []
    whole = device.allocate(manifest.num_bytes)
    try:
        area = DeviceArea(whole, manifest.num_bytes, device.ordinal)
        device.fill(whole, 0, manifest.num_bytes)  # padding is hashed too
        for rank in range(num_ranks):
            shard = shard_manifest(manifest.entries, num_ranks, rank)
            exports.append(CudaIpcExport(device, shard, device.synchronize))
        areas = [export.begin_write() for export in exports]
        for place, assembly in enumerate(assemble(manifest.entries, num_ranks)):
            for copy in assembly.copies:
                source = areas[copy.rank].address + copy.source
                device.fill(source, 1 + (place + 31 * copy.rank) % 255, copy.num_bytes)
                target = whole + assembly.entry.offset + copy.target
                device.copy(target, source, copy.num_bytes)
        for export in exports:
            export.end_write(1, lambda _: 0)
        device.synchronize()
        with peer() as other:
            handles = tuple(export.handle for export in exports)
            digest, _ = other.call("fetch", handles, manifest, 1, 1)
        return bool(digest == area_hash(device, area))
    finally:
        device.free(whole)
        for export in exports:
            export.close()


def check_virtual_shards(session: Session) -> Outcome:
    """Assemble whole models in module order; from one rank they are views, so only bits count."""
    import torch

    exact, passed, values = True, True, []
    for size, num_ranks, limit in session.scale.sharded:
        entries = entries_of(qwen3(size), "bfloat16", 2)
        found = pull_virtual_shards(entries, num_ranks, session.on, lambda job: seconds(job, 3))
        torch.cuda.empty_cache()
        exact &= found.exact
        passed &= found.ratio >= limit
        timed = "views" if num_ranks == 1 else f"{found.ratio:.2f} in {1e3 * found.pull_s:.0f} ms"
        values.append(f"{size}/{num_ranks} {timed}")
    try:
        fetched = fetched_like_the_source(session, 4)
        exact &= fetched
        values.append(f"{session.scale.pulled_model}/4 by CudaImport {'equal' * fetched}")
    except Unavailable as error:
        values.append(f"CudaImport not tried: {error}")
    reason = "small copies are bound by their launches (a few us each), not by memory"
    value = f"{'bit-equal' if exact else 'WRONG'}, {', '.join(values)}"
    return judge_bytes(exact, passed, value, reason)


# -- 5, 6: publications --------------------------------------------------------------------------

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


def _busy_fill(on: str) -> tuple[Fill, Callable[[], None]]:
    """Fill on one stream while another multiplies; and what waits for the first."""
    import torch

    if on == "cpu":
        return lambda area, version: fill_words(cuda_ipc.as_tensor(area), version), lambda: None
    writer, other_work = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    matrix = torch.randn(4096, 4096, device=on, dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    torch.cuda.synchronize()

    def fill(area: DeviceArea, version: int) -> None:
        with torch.cuda.stream(other_work):
            for _ in range(20):
                torch.mm(matrix, matrix, out=product)
        with torch.cuda.stream(writer):
            fill_words(cuda_ipc.as_tensor(area), version)

    return fill, writer.synchronize


def check_publishing(session: Session) -> Outcome:
    """Publish version after version while matmuls run beside; nothing may leak, at either end."""
    device, scale = require_ipc(session), session.scale
    fill, wait = _busy_fill(session.on)
    manifest = flat_manifest(scale.version_bytes)
    export = CudaIpcExport(device, manifest, wait)
    try:
        with peer() as other:
            pull_there: Pull = lambda version: int(other.call("pull", version))  # noqa: E731
            other.call("open", export.handle, manifest)
            torn = publish_many(export, fill, pull_there, range(5))
            before = (Footprint.now(), other.call("footprint"), used_bytes(session))
            last = 5 + scale.num_publications
            torn += publish_many(export, fill, pull_there, range(5, last))
            leaks = [f"here {leak}" for leak in Footprint.now().leaks_since(before[0])]
            theirs = other.call("footprint").leaks_since(before[1])
            leaks += [f"there {leak}" for leak in theirs]
            if (grown := used_bytes(session) - before[2]) > 2 * MIB:
                leaks.append(f"GPU +{grown}")
            other.call("close")
    finally:
        export.close()
    value = f"{torn} torn of {last}; grown: {', '.join(leaks) or 'nothing'}"
    return judge_bytes(not torn, not leaks, value)


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
    """Announce before the stream is done: `export` was made with a `synchronize` that does not.

    The learner's hash is of what was there before; marking the version waits for every stream, so
    the pull sees what came after.
    """
    late_fill(export.begin_write(), 3)  # a pattern that cannot be there already
    digest = export.end_write(3)
    return pull_there(3) != digest


def check_negative_controls(session: Session) -> Outcome:
    """Break the two rules on purpose: every break must be seen."""
    import torch

    device = require_ipc(session)
    manifest = flat_manifest(session.scale.version_bytes)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def fill(area: DeviceArea, version: int) -> None:
        fill_words(cuda_ipc.as_tensor(area), version)
        torch.cuda.synchronize()

    def late_fill(area: DeviceArea, version: int) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
            fill_words(cuda_ipc.as_tensor(area), version)

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


# -- 7, 8: deaths and torch's allocator ----------------------------------------------------------


def check_kills(session: Session) -> Outcome:
    """Kill three importers, and an exporter whose buffer is mapped here."""
    device = require_ipc(session)
    before = used_bytes(session)
    manifest = flat_manifest(session.scale.version_bytes)
    export = CudaIpcExport(device, manifest, lambda: None)
    served = 0
    try:
        for version in range(3):
            area = export.begin_write()
            device.fill(area.address, version, area.num_bytes)
            device.synchronize()
            digest = export.end_write(version)
            other = Peer()
            other.call("open", export.handle, manifest)
            served += other.call("pull", version) == digest
            other.kill()
            other.stop()
    finally:
        export.close()
    exporter = Peer()
    handle = exporter.call("export", session.scale.killed_bytes, 0x5A)
    device.open_handle(handle.handle)
    killed_s = time.perf_counter()
    exporter.kill()
    with suppress(EOFError, ConnectionError):
        exporter.pipe.recv()
    noticed_s = time.perf_counter() - killed_s
    exporter.stop()
    device.close_handle(handle.handle)
    left = wait_for_memory(session, before + 64 * MIB) - before
    value = (
        f"{served} of 3 restarts served, exporter's end noticed in {noticed_s:.2f} s, "
        f"{max(0, left) / MIB:.0f} MiB left"
    )
    return judge(
        served == 3 and noticed_s <= 5.0 and left <= 64 * MIB,
        value,
        "that a run ends by name is the launcher's, and is in tests/system",
    )


def check_expandable_segments(session: Session) -> Outcome:
    """Export from a process whose torch allocator uses expandable segments."""
    device = require_ipc(session)
    with peer({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}) as other:
        refusal = other.call("try_to_export_torch_memory")
        handle = other.call("export", session.scale.version_bytes, 0x5A)
        address = device.open_handle(handle.handle)
        area = DeviceArea(address, handle.num_bytes, device.ordinal)
        exact = bool((cuda_ipc.as_tensor(area) == 0x5A).all())
        synchronize()
        device.close_handle(handle.handle)
    value = f"raw buffer {'right' if exact else 'WRONG'}, torch's own memory: {refusal}"
    return judge_bytes(exact, refusal == "not_exportable", value)
