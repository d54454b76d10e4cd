"""Both shells of the weights against a strict fake driver: right bytes, nothing leaked, ever.

The cores decide, LearnerWeights and SamplerWeights obey, the messages go by hand: so every refusal
of CUDA's can be put anywhere. tests/system/test_transport.py has the real processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_node.config import Config
from asyncrl_node.core.layout import layout_weights
from asyncrl_node.core.publishing import PublishingCore, PublishingEvent, ToSampler
from asyncrl_node.core.sampling import SamplerCore, SamplerEvent, SamplerSettings, ToLearner
from asyncrl_node.core.transport import (
    CloseTest,
    ComparePattern,
    Decided,
    EndRun,
    EndTest,
    OpenTest,
    OpenWeights,
    PrepareTest,
    WriteTestPattern,
)
from asyncrl_node.engines.cuda_flat import CudaImport, gpu_handle
from asyncrl_node.errors import RunFault
from asyncrl_node.learner import weights as learner_weights
from asyncrl_node.learner.weights import LearnerWeights, fill_flat
from asyncrl_node.messages import (
    CudaIpcHandle,
    TransportVerdict,
    WeightEntry,
    WeightsManifest,
    WritePattern,
)
from asyncrl_node.sampler.weights import SamplerWeights
from asyncrl_node.transport.cuda_driver import CudaDevice, CudaDriver
from asyncrl_node.transport.cuda_ipc import CudaIpcExport, shard_manifest
from asyncrl_node.transport.gpu_weights import GpuImport, open_shards
from asyncrl_node.transport.weights import DeviceArea, layout_hash, weights_hash
from tests.transport.fake_cuda import (
    ILLEGAL_ADDRESS,
    MAP_FAILED,
    FakeGpu,
    FakeLibrary,
    FakeMachine,
    Faults,
)

TEST_BYTES = 4000

Model = list[tuple[str, torch.Tensor]]


def make_manifest(entries: tuple[WeightEntry, ...], num_bytes: int) -> WeightsManifest:
    return WeightsManifest(num_bytes, entries, layout_hash(entries))


MANIFEST = make_manifest(
    *layout_weights([("p0", "float32", (3,), 12), ("p1", "float32", (25,), 100)])
)


class ScriptedTrainer:
    """Writes bytes that depend on version and place."""

    def __init__(self) -> None:
        self.version = 0

    def content(self, version: int) -> bytes:
        area = bytearray(MANIFEST.num_bytes)
        for entry in MANIFEST.entries:
            data = np.random.default_rng(version).bytes(entry.num_bytes)
            area[entry.offset : entry.offset + entry.num_bytes] = data
        return bytes(area)

    def copy_weights_into(self, buffer: memoryview) -> None:
        buffer[:] = self.content(self.version)

    def manifest(self) -> tuple[tuple[WeightEntry, ...], int]:
        return MANIFEST.entries, MANIFEST.num_bytes


class Sampler:
    """One sampler process: its core, its shell, its view of the machine."""

    def __init__(self, world: World, number: int, incarnation: int, gpu: int) -> None:
        self.world = world
        self.core = SamplerCore(SamplerSettings(number, incarnation, 2, 4))
        self.library: FakeLibrary = world.machine.process([gpu])
        self.weights = SamplerWeights(
            number, world.path, has_gpu=True, open_device=lambda: open_device(self.library)
        )
        self.opened: list[OpenWeights] = []

    def digest(self, event: SamplerEvent) -> None:
        """Obey as sampler/process.py does."""
        for step in self.core.handle(event):
            match step:
                case ToLearner():
                    self.world.up.append(step.message)
                case OpenTest():
                    self.digest(self.weights.open_test(step))
                case ComparePattern():
                    self.digest(self.weights.compare(step))
                case CloseTest():
                    self.weights.close_test()
                case OpenWeights():
                    self.opened.append(step)
                    if (answer := self.weights.open(step)) is not None:
                        self.digest(answer)

    def read(self, version: int) -> bytes:
        content = bytes(self.weights.source.view(version))
        self.weights.source.check(version)
        return content


class World:
    """One learner with GPU 0, samplers by number, and the line between them."""

    def __init__(self, path: Path, transport: str = "auto", gpus: str | None = "3") -> None:
        self.path = path
        self.machine = FakeMachine([FakeGpu(bytes([0xA0 + n]) * 16) for n in range(3)])
        self.library = self.machine.process([0])
        self.trainer = ScriptedTrainer()
        self.config = Config(transport=transport, gpus=gpus)  # type: ignore[arg-type]
        self.samplers: dict[int, Sampler] = {}
        self.up: deque[PublishingEvent] = deque()
        self.decided: list[Decided] = []
        self.stopped: list[EndRun] = []
        self.verdicts: list[TransportVerdict] = []
        self.open_tests: set[int] = set()

    def start_learner(self) -> None:
        self.weights = LearnerWeights(
            self.config, MANIFEST, self.path, lambda: open_device(self.library), TEST_BYTES
        )
        self.core = PublishingCore(MANIFEST, 10.0, terms=self.weights.terms)

    def start_sampler(self, number: int, incarnation: int = 0, gpu: int = 1) -> Sampler:
        sampler = Sampler(self, number, incarnation, gpu)
        self.samplers[number] = sampler
        self.up.append(sampler.core.hello())
        return sampler

    def settle(self) -> None:
        while self.up:
            event = self.up.popleft()
            if isinstance(event, TransportVerdict):
                self.verdicts.append(event)
            self.learn(event)

    def learn(self, event: PublishingEvent) -> None:
        """Obey as learner/courier.py does."""
        for step in self.core.handle(event, 0.0):
            match step:
                case ToSampler():
                    self.samplers[step.sampler].digest(step.message)
                case PrepareTest():
                    self.learn(self.weights.prepare_test(step))
                case WriteTestPattern():
                    self.learn(self.weights.write_pattern(step))
                case EndTest():
                    self.weights.end_test(step)
                case Decided():
                    self.decided.append(step)
                case EndRun():
                    self.stopped.append(step)

    def publish(self, version: int) -> bytes:
        self.trainer.version = version
        content = self.trainer.content(version)
        assert self.weights.publish(version, self.trainer) == weights_hash(memoryview(content))
        return content

    def close(self) -> None:
        """End everything; nothing may be left."""
        self.machine.faults.fail.clear()
        for sampler in self.samplers.values():
            sampler.weights.close()
        self.weights.close()
        assert not self.path.exists()
        self.machine.assert_clean()


def open_device(library: FakeLibrary) -> CudaDevice:
    return CudaDriver(library).open_device(0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "weights")
    world.start_learner()
    yield world
    world.close()


# -- pairs ---------------------------------------------------------------------------------------


def test_two_samplers_on_two_ways_read_the_same_versions(world: World) -> None:
    good = world.start_sampler(0)
    world.settle()
    world.machine.faults.peer_copy = "shifted"
    bad = world.start_sampler(1, gpu=2)
    world.settle()
    assert [d.kind for d in world.decided] == ["cuda_ipc", "host"]
    assert [v.kind for v in world.verdicts] == ["cuda_ipc", "host"]
    assert "sampler 1" in world.decided[1].text
    assert "IOMMU" in world.decided[1].text
    for version in range(4):
        content = world.publish(version)
        assert good.read(version) == bad.read(version) == content
    for sampler in (good, bad):
        with pytest.raises(RunFault, match="torn_weights"):
            sampler.read(2)


def test_a_write_that_has_begun_is_a_torn_read_on_both_ways(world: World) -> None:
    world.start_sampler(0)
    world.settle()
    world.machine.faults.peer_copy = "flipped"
    world.start_sampler(1, gpu=2)
    world.settle()
    world.publish(0)
    world.weights.export.begin_write()
    for sampler in world.samplers.values():
        for version in (0, 1):
            with pytest.raises(RunFault, match="torn_weights"):
                sampler.read(version)
    world.weights.export.end_write(1)
    assert world.samplers[0].read(1) == world.samplers[1].read(1) == world.trainer.content(0)


class OnGpu(ScriptedTrainer):
    """A trainer whose weights are tensors: they are written by kernels, not through the host."""

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        torch.manual_seed(self.version)
        return [(entry.name, torch.randn(entry.shape)) for entry in MANIFEST.entries]

    def copy_weights_into(self, buffer: memoryview) -> None:
        raise AssertionError("through the host")


def test_tensors_are_written_straight_into_the_buffer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def see(area: DeviceArea) -> torch.Tensor:
        allocation, start = world.library._find(area.address, area.num_bytes, "saw")
        memory, count = allocation.memory, area.num_bytes
        return torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=count)

    monkeypatch.setattr(learner_weights, "as_tensor", see)
    sampler = world.start_sampler(0)
    world.settle()
    trainer = OnGpu()
    for version in (0, 1):
        trainer.version = version
        digest = world.weights.publish(version, trainer)
        content = sampler.read(version)
        assert digest == weights_hash(memoryview(content))
        for entry, (_, tensor) in zip(MANIFEST.entries, trainer.named_weights(), strict=True):
            raw = content[entry.offset : entry.offset + entry.num_bytes]
            assert raw == tensor.numpy().tobytes()


def test_a_sampler_that_was_killed_leaves_nothing_and_opens_the_same_handle_again(
    world: World,
) -> None:
    first = world.start_sampler(0)
    world.settle()
    world.publish(0)
    used = world.machine.used_bytes(0)
    first.library.kill()
    again = world.start_sampler(0, incarnation=1)
    world.settle()
    content = world.publish(1)
    assert again.read(1) == content
    assert again.opened[0].weights == first.opened[0].weights
    assert world.machine.used_bytes(0) == used


def test_a_sampler_killed_in_its_test_leaves_no_test_buffer(world: World) -> None:
    used = world.machine.used_bytes(0)
    victim = world.start_sampler(0)
    while not world.up or not isinstance(world.up[0], WritePattern):
        world.learn(world.up.popleft())
    assert world.machine.used_bytes(0) == used + (2 << 20)  # whole blocks
    victim.library.kill()
    world.start_sampler(0, incarnation=1)
    world.settle()
    assert world.machine.used_bytes(0) == used
    assert [d.kind for d in world.decided] == ["cuda_ipc"]


REFUSED_TO_SAMPLERS = [
    "cuInit",
    "cuDeviceGet",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuIpcOpenMemHandle_v2",
    "cuMemAlloc_v2",
    "cuMemsetD8_v2",
    "cuMemcpyDtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuCtxSynchronize",
]


@pytest.mark.parametrize("call", REFUSED_TO_SAMPLERS)
def test_every_call_refused_to_a_sampler_leads_to_host_memory_by_name(
    world: World, call: str
) -> None:
    sampler = world.start_sampler(0)
    fail_at_sampler(world, sampler, call)
    world.settle()
    (decided,) = world.decided
    assert decided.kind == "host"
    assert f"{call}" in decided.text
    assert "CUDA_ERROR_MAP_FAILED (205)" in decided.text
    content = world.publish(0)
    assert sampler.read(0) == content


def fail_at_sampler(world: World, sampler: Sampler, call: str) -> None:
    """Let a call fail in the sampler's process alone."""

    def failing(*arguments: object) -> int:
        sampler.library.calls.append(call)
        return MAP_FAILED

    setattr(sampler.library, call, failing)


def test_weights_that_cannot_be_opened_after_a_good_test_lead_to_host_memory(
    world: World,
) -> None:
    sampler = world.start_sampler(0)
    real = sampler.library.cuIpcOpenMemHandle_v2
    num_opened = 0

    def second_fails(*arguments: object) -> int:
        nonlocal num_opened
        num_opened += 1
        return MAP_FAILED if num_opened == 2 else real(*arguments)

    sampler.library.cuIpcOpenMemHandle_v2 = second_fails  # type: ignore[method-assign]
    world.settle()
    (decided,) = world.decided
    assert decided.kind == "host"
    assert "the weights cannot be mapped" in decided.text
    content = world.publish(0)
    assert sampler.read(0) == content


@pytest.mark.parametrize("end", ["learner", "sampler"])
def test_mig_goes_through_the_host(tmp_path: Path, end: str) -> None:
    world = World(tmp_path / "weights")
    world.machine.gpus[0 if end == "learner" else 1].name = "NVIDIA A100 MIG 3g.40gb"
    world.start_learner()
    sampler = world.start_sampler(0)
    world.settle()
    words = world.weights.terms.reason if end == "learner" else world.decided[0].text
    assert "is a MIG instance" in words
    assert (sampler.opened[0].kind, len(sampler.opened)) == ("host", 1)
    assert sampler.opened[0].reason in words
    content = world.publish(0)
    assert sampler.read(0) == content
    world.close()


def test_no_room_for_a_test_buffer_is_a_reason(world: World) -> None:
    world.machine.gpus[0].num_bytes = world.machine.used_bytes(0) + (2 << 20) - 1
    sampler = world.start_sampler(0)
    world.settle()
    assert "the learner cannot make a test buffer" in world.decided[0].text
    assert "the GPU is full" in world.decided[0].text
    assert sampler.opened[0].kind == "host"


def test_where_it_is_required_the_sampler_opens_nothing_and_the_run_stops(tmp_path: Path) -> None:
    world = World(tmp_path / "weights", "cuda_ipc")
    world.start_learner()
    world.machine.faults.peer_copy = "dropped"
    sampler = world.start_sampler(0)
    world.settle()
    (stop,) = world.stopped
    assert stop.name == "no_cuda_ipc"
    assert sampler.opened == []
    world.close()


@pytest.mark.parametrize("call", ["cuInit", "cuMemAlloc_v2", "cuIpcGetMemHandle", "cuMemsetD8_v2"])
@pytest.mark.parametrize("transport", ["auto", "cuda_ipc"])
def test_a_learner_to_which_cuda_is_refused_says_so(
    tmp_path: Path, call: str, transport: str
) -> None:
    world = World(tmp_path / "weights", transport)
    world.machine.faults.fail[call] = MAP_FAILED
    if transport == "cuda_ipc":
        with pytest.raises(RunFault, match=f"{call}.*set `transport` to auto") as caught:
            world.start_learner()
        assert caught.value.name == "no_cuda_ipc"
        assert not world.path.exists()
        world.machine.assert_clean()
        return
    world.start_learner()
    assert world.weights.terms.weights == ()
    assert call in world.weights.terms.reason
    world.machine.faults.fail.clear()
    sampler = world.start_sampler(0)
    world.settle()
    content = world.publish(0)
    assert sampler.read(0) == content
    world.close()


def test_a_gpu_that_is_lost_is_not_hidden(tmp_path: Path) -> None:
    world = World(tmp_path / "weights")
    world.machine.faults.fail["cuMemsetD8_v2"] = ILLEGAL_ADDRESS
    with pytest.raises(RunFault) as caught:
        world.start_learner()
    assert caught.value.name == "cuda_context_lost"


# -- pinned --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "host"])
def test_host_memory_is_pinned_at_both_ends_and_unpinned_before_it_goes(
    tmp_path: Path, transport: str
) -> None:
    world = World(tmp_path / "weights", transport)
    world.start_learner()
    world.machine.faults.peer_copy = "flipped"
    sampler = world.start_sampler(0)
    world.settle()
    assert len(world.library.registered) == len(sampler.library.registered) == 1
    world.close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path / "weights", "host")
    world.machine.faults.num_pinnable_bytes = 1
    world.start_learner()
    sampler = world.start_sampler(0)
    world.settle()
    content = world.publish(0)
    assert sampler.read(0) == content
    assert [record.getMessage() for record in caplog.records] == [
        "weights in host memory stay unpinned, slower: cuda_error: cuMemHostRegister_v2 of "
        f"{64 + MANIFEST.num_bytes + 8} bytes: CUDA_ERROR_OUT_OF_MEMORY (2); the GPU is full"
    ] * 2
    world.close()


def test_without_gpus_no_driver_is_touched(tmp_path: Path) -> None:
    world = World(tmp_path / "weights", gpus=None)
    world.start_learner()
    world.start_sampler(0).weights._has_gpu = False
    world.settle()
    assert world.library.calls == world.samplers[0].library.calls == []
    assert world.weights.terms.reason == ""
    world.close()


# -- several learner ranks -----------------------------------------------------------------------

_shapes = st.one_of(
    st.just(()), st.tuples(st.integers(0, 9)), st.tuples(st.integers(1, 9), st.integers(1, 40))
)


class Ranks:
    """Learners of several ranks, each on a GPU with its rows; a sampler on the last GPU."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], num_ranks: int) -> None:
        gpus = [FakeGpu(bytes([number]) * 16) for number in range(num_ranks + 1)]
        self.machine = FakeMachine(gpus, Faults())
        specs = [(f"p{i}", "bfloat16", s, 2 * torch.Size(s).numel()) for i, s in enumerate(shapes)]
        self.manifest = make_manifest(*layout_weights(specs))
        self.learners = [open_device(self.machine.process([rank])) for rank in range(num_ranks)]
        self.exports = []
        for rank, device in enumerate(self.learners):
            shard = shard_manifest(self.manifest.entries, num_ranks, rank)
            self.exports.append(CudaIpcExport(device, shard, device.synchronize))
        self.handles = tuple(export.handle for export in self.exports)
        self.sampler_library = self.machine.process([num_ranks])
        self.sampler = open_device(self.sampler_library)

    def publish(self, version: int) -> tuple[Model, bytes]:
        """Write random rows on every rank; return the model and its full weight area."""
        torch.manual_seed(version)
        model = [(e.name, torch.randn(e.shape).bfloat16()) for e in self.manifest.entries]
        flat = torch.zeros(self.manifest.num_bytes, dtype=torch.uint8)
        fill_flat(flat, self.manifest.entries, [tensor for _, tensor in model])
        num_ranks = len(self.exports)
        for rank, (export, device) in enumerate(zip(self.exports, self.learners, strict=True)):
            area = export.begin_write()
            shard = shard_manifest(self.manifest.entries, num_ranks, rank)
            for entry, (_, tensor) in zip(shard.entries, model, strict=True):
                rows = torch.chunk(torch.atleast_1d(tensor), num_ranks) if tensor.numel() else ()
                if rank < len(rows):
                    raw = rows[rank].reshape(-1).view(torch.uint8).numpy().tobytes()
                    device.write(area.address + entry.offset, memoryview(raw))
            export.end_write(version)
        return model, flat.numpy().tobytes()

    def see(self, area: DeviceArea) -> torch.Tensor:
        """View a mapped area, as `as_tensor` does on a GPU: not a copy."""
        self.sampler.synchronize()
        if not area.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        allocation, start = self.sampler_library._find(area.address, area.num_bytes, "saw")
        memory, count = allocation.memory, area.num_bytes
        return torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=count)

    def close(self) -> None:
        for export in self.exports:
            export.close()
        for device in (*self.learners, self.sampler):
            device.close()
        self.machine.assert_clean()


@given(
    shapes=st.lists(_shapes, min_size=1, max_size=4),
    num_ranks=st.integers(1, 4),
    sampler=st.integers(0, 5),
)
def test_both_imports_put_the_ranks_rows_together_bit_equal(
    shapes: list[tuple[int, ...]], num_ranks: int, sampler: int
) -> None:
    ranks = Ranks(shapes, num_ranks)
    flat = GpuImport(ranks.sampler, ranks.handles, ranks.manifest, sampler)
    for version in (0, 1):
        model, content = ranks.publish(version)
        assert bytes(flat.view(version)) == content
        flat.check(version)
    flat.close()
    worker = CudaImport(
        ranks.sampler, ranks.handles, ranks.manifest, sampler, on="cpu", see=ranks.see
    )
    for version in (2, 3):
        model, content = ranks.publish(version)
        worker.fetch(version)
        ranks.publish(version + 10)  # the lease is back: what was fetched must not change
        pulled = list(worker.tensors())
        assert [name for name, _ in pulled] == [name for name, _ in model]
        for (_, tensor), (_, wanted) in zip(pulled, model, strict=True):
            assert tensor.shape == wanted.shape
            assert torch.equal(tensor.view(torch.int16), wanted.view(torch.int16))
        assert worker.digest() == weights_hash(memoryview(content))
    worker.close()
    ranks.close()


def test_a_rank_that_holds_another_version_is_a_torn_read() -> None:
    ranks = Ranks([(4, 4)], 3)
    flat = GpuImport(ranks.sampler, ranks.handles, ranks.manifest, 0)
    ranks.publish(5)
    ranks.exports[2].begin_write()
    for job in (flat.view, flat.check):
        with pytest.raises(RunFault, match="torn_weights"):
            job(5)
    flat.close()
    ranks.close()


def test_a_rank_overwritten_while_it_is_pulled_is_a_torn_read() -> None:
    """The negative control of the check after the copies: a learner that ignores the lease."""
    ranks = Ranks([(4, 4)], 2)

    def see(area: DeviceArea) -> torch.Tensor:
        seen = ranks.see(area)
        ranks.exports[0].begin_write()
        return seen

    worker = CudaImport(ranks.sampler, ranks.handles, ranks.manifest, 0, on="cpu", see=see)
    ranks.publish(5)
    with pytest.raises(RunFault, match="torn_weights"):
        worker.fetch(5)
    for export in ranks.exports:
        export.close()
    worker.close()
    for device in ranks.learners:
        device.close()
    ranks.machine.assert_clean()


def test_all_ranks_are_opened_or_none() -> None:
    ranks = Ranks([(4, 4)], 3)
    bad = msgspec.structs.replace(ranks.handles[2], layout_hash=1)
    with pytest.raises(RunFault, match="weights_mismatch"):
        open_shards(ranks.sampler, (*ranks.handles[:2], bad), ranks.manifest)
    other = msgspec.structs.replace(ranks.manifest, layout_hash=1)
    with pytest.raises(RunFault, match="does not hash to its own hash"):
        open_shards(ranks.sampler, ranks.handles, other)
    ranks.close()


def test_the_handle_for_vllms_worker_survives_the_wire_and_anything_else_is_refused() -> None:
    weights = (CudaIpcHandle(b"h" * 64, 10, "GPU-1", 3),)
    handle = gpu_handle(weights, 2)
    assert handle["kind"] == "cuda_ipc"
    for place in (b"junk", msgspec.msgpack.encode({"weights": [], "sampler": 0, "more": 1})):
        with pytest.raises(RunFault, match="bad_handle"):
            CudaImport.of_handle({"kind": "cuda_ipc", "place": place}, MANIFEST)
    assert msgspec.msgpack.decode(handle["place"])["sampler"] == 2  # type: ignore[arg-type]


def test_filling_casts_as_fsdp_does_and_keeps_to_its_places() -> None:
    model = [torch.randn(5, 3), torch.randn(()), torch.randn(300)]
    specs = [(f"p{i}", "bfloat16", tuple(t.shape), 2 * t.numel()) for i, t in enumerate(model)]
    entries, num_bytes = layout_weights(specs)
    flat = torch.full((num_bytes,), 0xEE, dtype=torch.uint8)
    fill_flat(flat, entries, model)
    covered = torch.zeros(num_bytes, dtype=torch.bool)
    for entry, tensor in zip(entries, model, strict=True):
        part = flat[entry.offset : entry.offset + entry.num_bytes]
        assert torch.equal(part.view(torch.bfloat16).view(entry.shape), tensor.to(torch.bfloat16))
        covered[entry.offset : entry.offset + entry.num_bytes] = True
    assert (flat[~covered] == 0xEE).all()
