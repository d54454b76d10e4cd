"""What a process sees of the GPUs, and who is on them, against a fake NVML and a fake driver."""

from __future__ import annotations

import pytest

from asyncrl_node.errors import RunFault
from asyncrl_node.gpu_watch import ALLOCATOR_VARIABLES, THREAD_VARIABLES, GpuWatch
from asyncrl_node.gpus import GpuProcess, place
from asyncrl_node.own_gpus import check_own_gpus, visible_uuids
from asyncrl_node.process import given_gpus
from asyncrl_node.run_directory import Runtime
from tests.test_gpus import GIB, FakeNvml, split, uuid_of
from tests.transport.fake_cuda import OUT_OF_MEMORY, FakeGpu, FakeMachine, Faults

UUIDS = ["GPU-0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a", "GPU-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b"]


def watch(nvml=None, tensor_parallel=2):
    nvml = nvml or FakeNvml(5)
    gpus = nvml.list_gpus().gpus
    return GpuWatch(
        place(gpus, split(1, (len(gpus) - 1) // tensor_parallel, tensor_parallel)), nvml
    )


def environment(role, index=0, cores=32, **environ):
    return watch().environment_of(role, index, cores, environ)


# -- the environment of each process -------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "index", "visible"),
    [
        ("scheduler", 0, ""),
        ("learner", 0, uuid_of(0)),
        ("sampler", 0, f"{uuid_of(1)},{uuid_of(2)}"),
        ("sampler", 1, f"{uuid_of(3)},{uuid_of(4)}"),
    ],
)
def test_each_process_sees_its_own_cards_by_uuid(role, index, visible):
    own = environment(role, index)
    assert own["CUDA_VISIBLE_DEVICES"] == visible
    assert own["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(("cores", "threads"), [(32, "8"), (7, "1"), (2, "1")])
def test_the_cores_are_shared_out(cores, threads):
    """Scheduler, learner, two samplers."""
    own = environment("sampler", 0, cores)
    assert [own[name] for name in THREAD_VARIABLES] == [threads] * 3


def test_segments_grow_on_the_learner_only_unless_the_user_says_otherwise():
    assert environment("learner")["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in environment("sampler")
    assert "PYTORCH_ALLOC_CONF" not in environment("scheduler")
    for name in ALLOCATOR_VARIABLES:
        assert "PYTORCH_ALLOC_CONF" not in environment("learner", **{name: "max_split_size_mb:64"})


# -- who is on them ------------------------------------------------------------------------------


def test_a_card_is_free_when_nobody_is_on_it():
    assert watch().why_not_free(0) == ""


def test_who_is_still_on_a_samplers_cards_is_named():
    left = {"processes": (GpuProcess(4242, 30 * GIB),), "used_bytes": 31 * GIB}
    nvml = FakeNvml(5, {0: left, 2: left})
    assert watch(nvml).why_not_free(0) == "GPU 2 (GPU-2ab2f937) is busy: process 4242 (30.0 GiB)"
    assert watch(nvml).why_not_free(1) == ""


def test_a_card_that_no_longer_answers_is_not_free():
    nvml = FakeNvml(5)
    watching = watch(nvml)
    del nvml.gpus[3]
    nvml.problem = "GPU 3 does not answer: GPU is lost"
    story = watching.why_not_free(1)
    assert story == "GPU 3 (GPU-3ab2f937) does not answer: GPU 3 does not answer: GPU is lost"


def test_a_process_on_a_foreign_card_is_named():
    nvml = FakeNvml(3, {0: {"processes": (GpuProcess(10, GIB), GpuProcess(11, GIB // 2))}})
    assert watch(nvml, 1).strays({10: {uuid_of(0)}, 11: {uuid_of(1)}}) == [
        "process 11 has a context of 0.5 GiB on GPU 0 (GPU-0ab2f937)"
    ]


# -- does a process sit where it should ----------------------------------------------------------


def driver(*visible, faults=None):
    return FakeMachine([FakeGpu(b"\x0a" * 16), FakeGpu(b"\x0b" * 16)], faults).process(visible)


def test_a_process_on_its_own_cards_goes_on():
    for visible in ([0], [1], [0, 1], [1, 0]):
        library = driver(*visible)
        check_own_gpus([UUIDS[number] for number in visible], lambda library=library: library)
        assert not library.contexts, "looking must cost no memory on a card"


@pytest.mark.parametrize(
    ("given", "visible", "sees"),
    [
        ([0], [1], [1]),
        ([0], [], []),
        ([0, 1], [0], [0]),
        ([0], [0, 1], [0, 1]),
        ([0, 1], [1, 0], [1, 0]),
    ],
)
def test_a_process_on_other_cards_ends_by_name(monkeypatch, given, visible, sees):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(RunFault) as caught:
        check_own_gpus([UUIDS[number] for number in given], lambda: driver(*visible))
    assert caught.value.name == "wrong_gpu"
    named = ", ".join(UUIDS[number] for number in sees) or "none"
    assert f"and sees {named}; CUDA_VISIBLE_DEVICES is 7" in caught.value.story


def test_a_driver_that_fails_is_named_as_such():
    broken = Faults(fail={"cuDeviceGetUuid_v2": OUT_OF_MEMORY})
    with pytest.raises(RunFault, match="cuDeviceGetUuid_v2: CUDA_ERROR_OUT_OF_MEMORY"):
        visible_uuids(driver(0, faults=broken), 1)


def test_without_a_driver_no_process_on_a_gpu():
    def load():
        raise RunFault("no_cuda_driver", "no usable NVIDIA driver here")

    with pytest.raises(RunFault, match="no_cuda_driver"):
        check_own_gpus(UUIDS[:1], load)


def test_each_process_knows_the_cards_that_it_was_given():
    runtime = Runtime("1", "/", 1, 1, 0, ("a",), (("b", "c"), ("d", "e")))
    assert given_gpus("scheduler", 0, runtime) == ()
    assert given_gpus("learner", 0, runtime) == ("a",)
    assert given_gpus("sampler", 1, runtime) == ("d", "e")
    assert given_gpus("sampler", 2, runtime) == (), "one more, started by hand"
