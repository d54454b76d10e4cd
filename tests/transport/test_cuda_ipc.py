"""CUDA IPC against a fake driver: right bytes, right order of calls, no leak, and honest fallback.

What only a GPU can show (that the driver does as the fake does, `as_tensor`): perf/gpu_check.py.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_node.core.layout import layout_weights
from asyncrl_node.core.shards import assemble
from asyncrl_node.errors import InvalidTransition, RunFault
from asyncrl_node.messages import CudaIpcHandle, WeightsManifest
from asyncrl_node.transport import cuda_driver
from asyncrl_node.transport.cuda_driver import (
    CudaDevice,
    CudaDriver,
    CudaError,
    DriverLibrary,
    load_library,
)
from asyncrl_node.transport.cuda_ipc import (
    SELF_TEST_BYTES,
    CudaIpcExport,
    CudaIpcImport,
    SelfTestExport,
    SelfTestImport,
    area_hash,
    pattern,
    pull_tensors,
    read_area,
    refusal,
    self_test,
    shard_manifest,
)
from asyncrl_node.transport.weights import DeviceArea, layout_hash, weights_hash
from tests.transport.fake_cuda import (
    ILLEGAL_ADDRESS,
    INVALID_DEVICE,
    INVALID_HANDLE,
    MAP_FAILED,
    OUT_OF_MEMORY,
    FakeGpu,
    FakeLibrary,
    FakeMachine,
    Faults,
)

TEST_BYTES = 5000

Fill = Callable[[DeviceArea, int], None]
Late = list[Callable[[], object]]


class Process(NamedTuple):
    library: FakeLibrary
    device: CudaDevice


def make_machine(num_gpus: int = 3, faults: Faults | None = None) -> FakeMachine:
    gpus = [FakeGpu(bytes([0xA0 + number]) * 16) for number in range(num_gpus)]
    return FakeMachine(gpus, faults)


def start(machine: FakeMachine, gpu: int) -> Process:
    """A process that sees one GPU, as the launcher starts them."""
    library = machine.process([gpu])
    return Process(library, CudaDriver(library).open_device(0))


def make_manifest(*sizes: int) -> WeightsManifest:
    specs = [(f"p{i}", "float32", (size,), 4 * size) for i, size in enumerate(sizes)]
    entries, num_bytes = layout_weights(specs)
    return WeightsManifest(num_bytes, entries, layout_hash(entries))


def nothing() -> None:
    """Synchronize with no stream."""


def publish(device: CudaDevice, export: CudaIpcExport, version: int, content: bytes) -> int:
    area = export.begin_write()
    if content:
        device.write(area.address, memoryview(content))
    return export.end_write(version)


def read(device: CudaDevice, area: DeviceArea) -> bytes:
    return b"".join(bytes(piece) for piece in read_area(device, area))


def fault_of(job: Callable[[], object]) -> str:
    with pytest.raises(RunFault) as caught:
        job()
    return caught.value.name


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    """A machine that must be clean at the end."""
    machine = make_machine()
    yield machine
    machine.assert_clean()


@pytest.fixture
def learner(machine: FakeMachine) -> Iterator[Process]:
    process = start(machine, 0)
    yield process
    process.device.close()


@pytest.fixture
def sampler(machine: FakeMachine) -> Iterator[Process]:
    process = start(machine, 1)
    yield process
    process.device.close()


@pytest.fixture
def manifest() -> WeightsManifest:
    return make_manifest(3, 100, 1)


@pytest.fixture
def export(learner: Process, manifest: WeightsManifest) -> Iterator[CudaIpcExport]:
    export = CudaIpcExport(learner.device, manifest, nothing)
    yield export
    export.close()


@pytest.fixture
def imported(
    sampler: Process, export: CudaIpcExport, manifest: WeightsManifest
) -> Iterator[CudaIpcImport]:
    imported = CudaIpcImport(sampler.device, export.handle, manifest)
    yield imported
    imported.close()


# -- round trip ----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    seeds=st.lists(st.integers(0, 1 << 32), min_size=1, max_size=4),
    sampler_gpu=st.integers(0, 2),
)
def test_round_trip_and_the_hash_of_the_host_transport(
    sizes: list[int], seeds: list[int], sampler_gpu: int
) -> None:
    machine, manifest = make_machine(), make_manifest(*sizes)
    learner, sampler = start(machine, 0), start(machine, sampler_gpu)
    export = CudaIpcExport(learner.device, manifest, nothing)
    imported = CudaIpcImport(sampler.device, export.handle, manifest)
    for version, seed in enumerate(seeds):
        content = np.random.default_rng(seed).bytes(manifest.num_bytes)
        digest = publish(learner.device, export, version, content)
        assert digest == weights_hash(memoryview(content))
        area = imported.view(version)
        assert area.address % 256 == 0
        assert read(sampler.device, area) == content
        assert area_hash(sampler.device, area) == digest
    for end in (imported, export, learner.device, sampler.device):
        end.close()
        end.close()
    machine.assert_clean()
    assert not machine.notes


class Pull(NamedTuple):
    sampler: int


class Restart(NamedTuple):
    sampler: int


class Publish(NamedTuple):
    byte: int


_events = st.one_of(
    st.builds(Pull, st.integers(0, 2)),
    st.builds(Restart, st.integers(0, 2)),
    st.builds(Publish, st.integers(0, 255)),
)


@settings(max_examples=40)
@given(events=st.lists(_events, max_size=20))
def test_samplers_come_and_go_and_every_pull_is_the_published_version(
    events: list[Pull | Restart | Publish],
) -> None:
    machine, manifest = make_machine(4), make_manifest(70, 5)
    learner = start(machine, 0)
    export = CudaIpcExport(learner.device, manifest, nothing)
    used = machine.used_bytes(0)
    ends: dict[int, tuple[Process, CudaIpcImport]] = {}

    def connect(number: int) -> None:
        process = start(machine, 1 + number)
        ends[number] = process, CudaIpcImport(process.device, export.handle, manifest)

    for number in range(3):
        connect(number)
    version, content = 0, bytes(manifest.num_bytes)
    publish(learner.device, export, version, content)
    for event in events:
        match event:
            case Pull(number):
                process, imported = ends[number]
                assert read(process.device, imported.view(version)) == content
            case Restart(number):
                ends[number][0].library.kill()
                connect(number)
            case Publish(byte):
                version, content = version + 1, bytes([byte]) * manifest.num_bytes
                publish(learner.device, export, version, content)
        assert machine.used_bytes(0) == used
    for process, imported in ends.values():
        imported.close()
        process.device.close()
    export.close()
    learner.device.close()
    machine.assert_clean()
    assert not machine.notes


def test_another_thread_of_the_process_may_publish(
    learner: Process,
    sampler: Process,
    export: CudaIpcExport,
    imported: CudaIpcImport,
    manifest: WeightsManifest,
) -> None:
    content = b"\x05" * manifest.num_bytes
    thread = threading.Thread(target=publish, args=(learner.device, export, 3, content))
    thread.start()
    thread.join()
    assert read(sampler.device, imported.view(3)) == content


# -- torn reads and the order of things ----------------------------------------------------------


def test_nothing_can_be_read_before_the_first_version(imported: CudaIpcImport) -> None:
    assert fault_of(lambda: imported.view(0)) == "torn_weights"


def test_a_write_that_has_begun_is_a_torn_read(
    learner: Process, export: CudaIpcExport, imported: CudaIpcImport, manifest: WeightsManifest
) -> None:
    publish(learner.device, export, 1, bytes(manifest.num_bytes))
    imported.view(1)
    export.begin_write()
    for version in (1, 2):
        assert fault_of(lambda version=version: imported.view(version)) == "torn_weights"
    export.end_write(2)
    assert fault_of(lambda: imported.view(1)) == "torn_weights"
    imported.view(2)


@pytest.mark.parametrize("offset", [192 + 16, 256 + 1024])
def test_a_version_that_differs_between_front_and_back_is_torn(
    learner: Process,
    export: CudaIpcExport,
    imported: CudaIpcImport,
    manifest: WeightsManifest,
    offset: int,
) -> None:
    assert manifest.num_bytes == 1024
    publish(learner.device, export, 1, bytes(manifest.num_bytes))
    start = imported.view(1).address - 256
    learner_start = export.begin_write().address - 256
    export.end_write(1)
    learner.device.write(learner_start + offset, memoryview((2).to_bytes(8, "little")))
    learner.device.synchronize()
    assert start != learner_start
    for version in (1, 2):
        assert fault_of(lambda version=version: imported.view(version)) == "torn_weights"


def test_the_streams_are_waited_for_before_hash_and_mark(
    machine: FakeMachine, learner: Process, sampler: Process, manifest: WeightsManifest
) -> None:
    """A kernel's writes arrive when its stream is synchronised; the mark must come later."""
    content = b"\x07" * manifest.num_bytes

    def finish_kernel() -> None:
        assert fault_of(lambda: imported.view(5)) == "torn_weights"
        learner.device.write(area.address, memoryview(content))
        learner.device.synchronize()

    export = CudaIpcExport(learner.device, manifest, finish_kernel)
    imported = CudaIpcImport(sampler.device, export.handle, manifest)
    area = export.begin_write()
    assert export.end_write(5) == weights_hash(memoryview(content))
    assert read(sampler.device, imported.view(5)) == content
    imported.close()
    export.close()


def test_a_stream_that_was_not_waited_for_shows_in_the_hash(
    learner: Process, sampler: Process, export: CudaIpcExport, imported: CudaIpcImport
) -> None:
    """The negative control: `synchronize` does nothing, and the kernel is late."""
    area = export.begin_write()
    digest = export.end_write(1)
    learner.device.write(area.address, memoryview(b"late"))
    learner.device.synchronize()
    assert area_hash(sampler.device, imported.view(1)) != digest


def test_the_buffer_is_marked_torn_for_everybody_before_it_is_written(
    learner: Process, export: CudaIpcExport, imported: CudaIpcImport, manifest: WeightsManifest
) -> None:
    publish(learner.device, export, 1, bytes(manifest.num_bytes))
    learner.library.calls.clear()
    export.begin_write()
    assert learner.library.calls[-1] == "cuCtxSynchronize"
    export.end_write(2)
    assert learner.library.calls[-1] == "cuCtxSynchronize"


def test_end_write_needs_begin_write(export: CudaIpcExport) -> None:
    with pytest.raises(InvalidTransition, match="without begin_write"):
        export.end_write(1)
    export.begin_write()
    export.end_write(1)
    with pytest.raises(InvalidTransition, match="without begin_write"):
        export.end_write(2)


def test_closed_ends_refuse_to_work(
    export: CudaIpcExport, imported: CudaIpcImport, learner: Process, machine: FakeMachine
) -> None:
    imported.close()
    export.close()
    for job in (export.begin_write, lambda: imported.view(0)):
        with pytest.raises(InvalidTransition, match="closed"):
            job()


# -- lifetimes -----------------------------------------------------------------------------------


def test_a_handle_is_opened_once_in_a_process(
    sampler: Process, export: CudaIpcExport, imported: CudaIpcImport, manifest: WeightsManifest
) -> None:
    with pytest.raises(InvalidTransition, match="opened once"):
        CudaIpcImport(sampler.device, export.handle, manifest)
    assert sampler.library.calls.count("cuIpcOpenMemHandle_v2") == 1
    imported.close()
    CudaIpcImport(sampler.device, export.handle, manifest).close()


def test_the_exporter_may_free_or_die_and_the_importer_reads_on() -> None:
    machine, manifest = make_machine(), make_manifest(64)
    content = b"\x09" * manifest.num_bytes
    for how in ("free", "die"):
        learner, sampler = start(machine, 0), start(machine, 1)
        export = CudaIpcExport(learner.device, manifest, nothing)
        publish(learner.device, export, 1, content)
        imported = CudaIpcImport(sampler.device, export.handle, manifest)
        if how == "free":
            export.close()
            learner.device.close()
            assert machine.notes == ["freed a buffer that 1 others have mapped"]
        else:
            learner.library.kill()
            late = start(machine, 2)
            with pytest.raises(CudaError) as caught:
                CudaIpcImport(late.device, export.handle, manifest)
            assert caught.value.code == INVALID_HANDLE
            late.device.close()
        assert read(sampler.device, imported.view(1)) == content
        assert machine.used_bytes(0) == 2 << 20, "whole blocks"
        imported.close()
        assert machine.used_bytes(0) == 0
        sampler.device.close()
    machine.assert_clean()


def test_a_device_is_not_closed_under_its_buffers(learner: Process, export: CudaIpcExport) -> None:
    with pytest.raises(InvalidTransition, match="1 buffers, 0 mappings"):
        learner.device.close()


def test_memory_of_others_is_not_exported_freed_or_closed(learner: Process) -> None:
    assert fault_of(lambda: learner.device.export_handle(0x7F00)) == "not_exportable"
    with pytest.raises(InvalidTransition, match="not allocated here"):
        learner.device.free(0x7F00)
    with pytest.raises(InvalidTransition, match="not open"):
        learner.device.close_handle(bytes(64))


def test_a_closed_device_does_nothing(machine: FakeMachine) -> None:
    process = start(machine, 0)
    process.device.close()
    with pytest.raises(InvalidTransition, match="the device is closed"):
        process.device.allocate(1)


# -- ordinals ------------------------------------------------------------------------------------


def test_the_receivers_ordinal_opens_a_gpu_it_cannot_see(
    machine: FakeMachine, sampler: Process, imported: CudaIpcImport
) -> None:
    assert sampler.library.visible == [1]
    assert list(sampler.library.contexts) == [1]
    assert not machine.notes


def test_the_exporters_ordinal_does_not_exist_on_the_receiver(machine: FakeMachine) -> None:
    library = machine.process([1])
    with pytest.raises(CudaError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE") as caught:
        CudaDriver(library).open_device(1)
    assert caught.value.code == INVALID_DEVICE


def test_a_second_context_on_the_exporters_gpu_is_noted(machine: FakeMachine) -> None:
    driver = CudaDriver(machine.process([1, 0]))
    devices = [driver.open_device(ordinal) for ordinal in (0, 1)]
    assert machine.notes == ["a second context, on GPU 0"]
    for device in devices:
        device.close()


def test_the_uuid_reads_as_nvml_writes_it(learner: Process) -> None:
    assert learner.device.uuid == "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0"


# -- refusals ------------------------------------------------------------------------------------


def test_another_layout_is_refused_before_anything_is_opened(
    sampler: Process, export: CudaIpcExport, manifest: WeightsManifest
) -> None:
    for sizes in ((3, 100), (100, 3, 1), (3, 100, 1, 1)):
        other = make_manifest(*sizes)
        job = lambda other=other: CudaIpcImport(sampler.device, export.handle, other)  # noqa: E731
        assert fault_of(job) == "weights_mismatch"
    short = msgspec.structs.replace(export.handle, num_bytes=export.handle.num_bytes - 1)
    assert fault_of(lambda: CudaIpcImport(sampler.device, short, manifest)) == "weights_mismatch"
    assert "cuIpcOpenMemHandle_v2" not in sampler.library.calls


def test_a_buffer_with_another_front_is_refused(
    learner: Process, export: CudaIpcExport, imported: CudaIpcImport
) -> None:
    area = export.begin_write()
    export.end_write(1)
    learner.device.write(area.address - 64, memoryview(b"OTHER"))
    learner.device.synchronize()
    assert fault_of(lambda: imported.view(1)) == "weights_mismatch"


def test_mig_is_refused_at_both_ends_before_any_memory() -> None:
    machine = make_machine()
    machine.gpus[1].name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    learner, slice_of_gpu, manifest = start(machine, 0), start(machine, 1), make_manifest(4)
    assert slice_of_gpu.device.uuid.startswith("MIG-a1a1")
    assert fault_of(lambda: CudaIpcExport(slice_of_gpu.device, manifest, nothing)) == "mig"
    assert fault_of(lambda: SelfTestExport(slice_of_gpu.device)) == "mig"
    export = CudaIpcExport(learner.device, manifest, nothing)
    for handle in (export.handle, msgspec.structs.replace(export.handle, gpu_uuid="MIG-1")):
        job = lambda handle=handle: CudaIpcImport(slice_of_gpu.device, handle, manifest)  # noqa: E731
        assert fault_of(job) == "mig"
    assert machine.used_bytes(1) == 0


_handles = msgspec.msgpack.Decoder(CudaIpcHandle)


def is_refused(encoded: bytes) -> bool:
    """As a message, which is what the channel does with it: dropped and counted."""
    with pytest.raises(msgspec.MsgspecError):
        _handles.decode(encoded)
    return True


@given(size=st.integers(0, 200).filter(lambda size: size != 64))
def test_a_handle_has_exactly_64_bytes(size: int) -> None:
    good = CudaIpcHandle(bytes(64), 1, "GPU-1", 0)
    fields = {**msgspec.to_builtins(good), "type": "CudaIpcHandle", "handle": bytes(size)}
    assert is_refused(msgspec.msgpack.encode(fields))
    with pytest.raises(ValueError, match=f"64 bytes, this one {size}"):
        msgspec.structs.replace(good, handle=bytes(size))


@given(
    handle=st.binary(min_size=64, max_size=64),
    num_bytes=st.integers(1, 1 << 62),
    digest=st.integers(0, (1 << 64) - 1),
)
def test_a_handle_survives_the_wire(handle: bytes, num_bytes: int, digest: int) -> None:
    message = CudaIpcHandle(handle, num_bytes, "GPU-1", digest)
    assert _handles.decode(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize(
    "change", [{"more": 1}, {"num_bytes": 0}, {"num_bytes": "1"}, {"gpu_uuid": 7}, {"type": "Stop"}]
)
def test_what_is_not_a_handle_is_refused(change: dict[str, object]) -> None:
    handle = CudaIpcHandle(bytes(64), 1, "GPU-1", 0)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(handle)) | change
    assert is_refused(msgspec.msgpack.encode(fields))
    assert is_refused(b"\xc1junk")


def test_full_memory_is_named() -> None:
    machine = FakeMachine([FakeGpu(bytes(16), num_bytes=1000)])
    process = start(machine, 0)
    with pytest.raises(CudaError, match=r"4096 bytes: CUDA_ERROR_OUT_OF_MEMORY .* is full"):
        process.device.allocate(4096)
    process.device.close()
    machine.assert_clean()


EXPORTING = [
    "cuMemAlloc_v2",
    "cuIpcGetMemHandle",
    "cuMemsetD8_v2",
    "cuMemcpyHtoD_v2",
    "cuCtxSynchronize",
]


@pytest.mark.parametrize("call", EXPORTING)
def test_an_export_that_fails_names_the_call_and_leaves_nothing(call: str) -> None:
    machine = make_machine()
    learner = start(machine, 0)
    machine.faults.fail[call] = MAP_FAILED
    with pytest.raises(CudaError, match=f"{call}.*: CUDA_ERROR_MAP_FAILED") as caught:
        CudaIpcExport(learner.device, make_manifest(4), nothing)
    assert call in refusal(caught.value)
    if call in EXPORTING[:2]:
        assert fault_of(lambda: SelfTestExport(learner.device, TEST_BYTES)) == "cuda_error"
    machine.faults.fail.clear()
    learner.device.close()
    machine.assert_clean()


def test_an_error_without_a_name_is_an_error() -> None:
    machine = make_machine(faults=Faults(fail={"cuInit": 12345}))
    with pytest.raises(CudaError, match=r"cuInit: unknown error \(12345\)"):
        CudaDriver(machine.process([0]))


# -- the driver library --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["libnothing-at-all.so.1", "libc.so.6"])
def test_a_library_that_is_not_the_driver_is_a_named_fault(name: str) -> None:
    assert fault_of(lambda: load_library(name)) == "no_cuda_driver"


def test_every_call_has_its_argument_types_and_a_fake() -> None:
    calls = {name: call for name, call in vars(DriverLibrary).items() if name.startswith("cu")}
    assert calls.keys() == cuda_driver._ARGUMENTS.keys()
    for name, call in calls.items():
        num_arguments = len(inspect.signature(call).parameters) - 1
        assert num_arguments == len(cuda_driver._ARGUMENTS[name]), name
        assert hasattr(FakeLibrary, name)


# -- the self-test -------------------------------------------------------------------------------


def test_the_self_test_passes_and_pulls_what_was_written_after_the_mapping(
    machine: FakeMachine, learner: Process, sampler: Process
) -> None:
    offer = SelfTestExport(learner.device, TEST_BYTES)
    opened_before = []

    def order_write(seed: int) -> None:
        opened_before.append("cuIpcOpenMemHandle_v2" in sampler.library.calls)
        offer.write(seed)

    verdict = self_test(sampler.device, offer.handle, order_write)
    assert verdict.passed
    assert verdict.reason == f"3 patterns of {TEST_BYTES} bytes arrived right"
    assert opened_before == [True] * 3
    assert SELF_TEST_BYTES >= 64 << 20
    offer.close()
    with pytest.raises(InvalidTransition, match="closed"):
        offer.write(1)


@pytest.mark.parametrize(
    ("peer_copy", "wrong"), [("dropped", ""), ("flipped", "1 of 5000"), ("shifted", "")]
)
def test_data_that_differ_are_found_and_explained(peer_copy: str, wrong: str) -> None:
    machine = make_machine(faults=Faults(peer_copy=peer_copy))  # type: ignore[arg-type]
    learner, sampler = start(machine, 0), start(machine, 1)
    offer = SelfTestExport(learner.device, TEST_BYTES)
    verdict = self_test(sampler.device, offer.handle, offer.write)
    assert not verdict.passed
    assert f"peer access from {sampler.device.uuid} to {learner.device.uuid}" in verdict.reason
    assert "IOMMU" in verdict.reason
    assert wrong in verdict.reason
    same = start(machine, 0)
    assert self_test(same.device, offer.handle, offer.write).passed  # no peer in between
    for end in (offer, same.device, sampler.device, learner.device):
        end.close()
    machine.assert_clean()


def test_a_writer_that_does_not_synchronise_fails_the_self_test(
    learner: Process, sampler: Process
) -> None:
    offer = SelfTestExport(learner.device, TEST_BYTES)
    address = offer._address
    assert address is not None

    def write_only(seed: int) -> None:
        learner.device.write(address, pattern(seed, 0, TEST_BYTES).data)

    verdict = self_test(sampler.device, offer.handle, write_only)
    assert not verdict.passed
    assert "of pattern 1, " in verdict.reason
    offer.close()


@given(seed=st.integers(0, 1 << 40), start=st.integers(0, 4096), num_bytes=st.integers(0, 300))
def test_a_pattern_depends_on_position_and_seed(seed: int, start: int, num_bytes: int) -> None:
    start *= 8
    whole = pattern(seed, 0, start + num_bytes)
    assert np.array_equal(pattern(seed, start, num_bytes), whole[start:])
    if num_bytes >= 64:
        for other in (pattern(seed + 1, start, num_bytes), pattern(seed, start + 8, num_bytes)):
            assert np.mean(other == whole[start:]) < 0.2


def test_a_closed_end_of_the_test_compares_nothing(learner: Process, sampler: Process) -> None:
    offer = SelfTestExport(learner.device, TEST_BYTES)
    end = SelfTestImport(sampler.device, offer.handle)
    offer.write(2)
    assert end.compare(2) == ""
    assert "of pattern 3" in end.compare(3)
    end.close()
    end.close()
    with pytest.raises(InvalidTransition, match="closed"):
        end.compare(2)
    offer.close()


def test_a_lost_gpu_and_a_lost_learner_are_not_hidden_by_falling_back(
    machine: FakeMachine, learner: Process
) -> None:
    gone = RunFault("learner_gone", "no answer")
    assert fault_of(lambda: refusal(gone)) == "learner_gone"
    lost = CudaError("cuMemsetD8_v2", ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert fault_of(lambda: refusal(lost)) == "cuda_context_lost"
    full = CudaError("cuMemAlloc_v2", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
    assert "the GPU is full" in refusal(full)
    assert "no_cuda_driver" in refusal(RunFault("no_cuda_driver", "none"))


# -- shards --------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    shapes=st.lists(
        st.one_of(
            st.just(()),
            st.tuples(st.integers(0, 9)),
            st.tuples(st.integers(1, 9), st.integers(1, 40)),
        ),
        min_size=1,
        max_size=4,
    ),
    num_ranks=st.integers(1, 4),
    sampler_index=st.integers(0, 5),
)
def test_shards_of_several_learners_are_pulled_into_whole_tensors(
    shapes: list[tuple[int, ...]], num_ranks: int, sampler_index: int
) -> None:
    """FSDP learners on GPUs 0 .., each with its rows; the sampler assembles the model."""
    machine = make_machine(num_ranks + 1)
    model = {f"p{i}": torch.randn(shape).bfloat16() for i, shape in enumerate(shapes)}
    specs = [(name, "bfloat16", tuple(t.shape), t.nbytes) for name, t in model.items()]
    entries, _ = layout_weights(specs)
    sampler = start(machine, num_ranks)
    shards, ends = [], []
    for rank in range(num_ranks):
        learner, manifest = start(machine, rank), shard_manifest(entries, num_ranks, rank)
        export = CudaIpcExport(learner.device, manifest, nothing)
        content = bytearray(b"\xff" * manifest.num_bytes)  # NaN wherever no row lies
        for entry, tensor in zip(manifest.entries, model.values(), strict=True):
            rows = torch.chunk(torch.atleast_1d(tensor), num_ranks) if tensor.numel() else ()
            if rank < len(rows):
                raw = rows[rank].reshape(-1).view(torch.uint8).numpy().tobytes()
                content[entry.offset : entry.offset + entry.num_bytes] = raw
        publish(learner.device, export, 1, bytes(content))
        imported = CudaIpcImport(sampler.device, export.handle, manifest)
        pulled = bytearray(read(sampler.device, imported.view(1)))
        shards.append(torch.tensor(list(pulled), dtype=torch.uint8))
        ends += [imported, export, learner.device]
    plan = assemble(entries, num_ranks, sampler_index)
    whole = list(pull_tensors(plan, shards, "cpu"))
    assert [name for name, _ in whole] == list(model)
    for name, tensor in whole:
        assert tensor.shape == model[name].shape
        assert torch.equal(tensor.view(-1), model[name].view(-1))
    for end in (*ends, sampler.device):
        end.close()
    machine.assert_clean()


def test_each_rank_has_a_layout_of_its_own() -> None:
    entries = make_manifest(8, 3).entries
    hashes = {shard_manifest(entries, m, r).layout_hash for m in (1, 2, 3) for r in range(m)}
    assert len(hashes) == 6


# -- the fake itself -----------------------------------------------------------------------------

MISUSES: dict[str, Callable[[Process, Process], object]] = {
    "opened a handle twice": lambda learner, sampler: open_raw(sampler, learner, times=2),
    "opened its own buffer": lambda learner, _: open_raw(learner, learner),
    "wrote 1 bytes at": lambda learner, _: use_after_free(learner),
    "where nothing begins": lambda learner, _: [
        learner.device.synchronize(),
        learner.library.cuMemFree_v2(1),
    ],
    "without a current context": lambda learner, _: in_a_thread(learner.library.cuCtxSynchronize),
    "closed a buffer of its own": lambda learner, _: learner.library.cuIpcCloseMemHandle(
        learner.device.allocate(1)
    ),
    "once too often": lambda learner, _: [
        learner.library.cuDevicePrimaryCtxRelease_v2(0) for _ in range(2)
    ],
}


def open_raw(opener: Process, owner: Process, times: int = 1) -> None:
    """Open behind the back of CudaDevice, which would refuse."""
    handle = cuda_driver.IpcHandle.from_buffer_copy(
        owner.device.export_handle(owner.device.allocate(8))
    )
    opener.device.synchronize()
    for _ in range(times):
        opener.library.cuIpcOpenMemHandle_v2(ctypes.byref(ctypes.c_uint64()), handle, 1)


def use_after_free(process: Process) -> None:
    address = process.device.allocate(8)
    process.device.free(address)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        process.device.write(address, memoryview(b"x"))


def in_a_thread(job: Callable[[], object]) -> None:
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()


@pytest.mark.parametrize("misuse", MISUSES)
def test_the_fake_notes_what_a_program_may_not_do(misuse: str) -> None:
    machine = make_machine()
    MISUSES[misuse](start(machine, 0), start(machine, 1))
    assert [misuse in violation for violation in machine.violations] == [True]
    with pytest.raises(AssertionError, match=misuse):
        machine.assert_clean()


@pytest.mark.parametrize("leak", ["allocations", "mappings", "contexts"])
def test_the_fake_finds_leaks(leak: str) -> None:
    machine = make_machine()
    learner, sampler = start(machine, 0), start(machine, 1)
    address = learner.device.allocate(8)
    sampler.device.open_handle(learner.device.export_handle(address))
    if leak != "allocations":
        learner.device.free(address)
    if leak == "contexts":
        sampler.device.close_handle(next(iter(sampler.device._opened)))
    with pytest.raises(AssertionError, match=f"{leak} leak"):
        machine.assert_clean()
