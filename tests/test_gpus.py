"""Which GPUs a run gets, against a fake NVML; nothing here needs or touches a card."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from asyncrl_node.core.placement import Split
from asyncrl_node.errors import ConfigError
from asyncrl_node.gpus import (
    Gpu,
    GpuProcess,
    Inventory,
    Nvml,
    RealNvml,
    environment_for,
    place,
    placement_table,
    select_gpus,
    stray_processes,
    visible_gpus,
    why_unusable,
)

GIB = 1 << 30


def uuid_of(index):
    """Distinct from the first digit on, but for 6 and 7: those share `GPU-ff`."""
    start = {6: "ff6", 7: "ff7"}.get(index, f"{index}ab")
    return f"GPU-{start}2f937-d72c-4106-c12f-20bd9faed9f6"


class FakeNvml:
    """A box of equal, idle cards; `changes` gives some of them other fields."""

    def __init__(self, num_gpus, changes=None, problem=""):
        self.problem = problem
        self.gpus = {
            index: Gpu(
                **{
                    "index": index,
                    "uuid": uuid_of(index),
                    "name": "NVIDIA H100 80GB HBM3",
                    "total_bytes": 81_559 << 20,
                    "used_bytes": 4 << 20,
                    "numa_node": index // 4,
                    **(changes or {}).get(index, {}),
                }
            )
            for index in range(num_gpus)
        }

    def list_gpus(self) -> Inventory:
        return Inventory(tuple(self.gpus.values()), self.problem)


def select(text, visible=None, nvml: Nvml | None = None, device_order=None):
    gpus, problem = (nvml or FakeNvml(8)).list_gpus()
    chosen = select_gpus(text, visible, gpus, problem=problem, device_order=device_order)
    return [gpu.index for gpu in chosen]


def refusal(*arguments, **keywords):
    with pytest.raises(ConfigError) as caught:
        select(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return caught.value


# -- what is asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("8", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("2", [0, 1]),
        ("2,", [2]),
        ("0,3", [0, 3]),
        ("3,0", [3, 0]),
        (" 3 , 0 ", [3, 0]),
        ("GPU-5ab", [5]),
        ("gpu-5AB", [5]),
        ("GPU-ff7,GPU-1", [7, 1]),
        (f"{uuid_of(6)},{uuid_of(2)}", [6, 2]),
        ("1,GPU-4", [1, 4]),
    ],
)
def test_counts_ids_and_uuids(text, chosen):
    assert select(text) == chosen


@pytest.mark.parametrize("text", ["", "all", "-1", "1.5", "abc", "²", "0-3"])
def test_what_is_none_of_the_three_is_refused(text):
    error = refusal(text)
    assert (error.key, error.value) == ("gpus", text)
    assert error.rule.startswith('must be a count ("8"), ids ("0,3", "3,") or UUIDs')


def test_no_gpu_is_too_few():
    assert "at least 1" in refusal("0").rule


def test_more_than_there_are_is_refused():
    error = refusal("9")
    assert str(error) == "gpus: must be at most the GPUs of this machine, 8 (got 9)"


def test_without_a_driver_the_reason_is_in_the_words():
    nvml = FakeNvml(0, problem="the NVIDIA driver does not answer: NVML Shared Library Not Found")
    error = refusal("8", nvml=nvml)
    assert "this machine, 0; the NVIDIA driver does not answer: NVML Shared" in error.rule


@pytest.mark.parametrize("text", ["8,9", "12,", "0,x", "0,,1", "GPU-e", "1,cpu"])
def test_an_unknown_gpu_is_refused(text):
    error = refusal(text)
    assert "there is no GPU" in error.rule
    assert "(ids: 0, 1, 2, 3, 4, 5, 6, 7)" in error.rule


def test_a_prefix_of_two_uuids_is_refused():
    assert refusal("GPU-ff").rule == "GPU-ff is the beginning of 2 UUIDs; give more of it"


@pytest.mark.parametrize("text", ["1,1", "1,GPU-1", f"GPU-1ab,{uuid_of(1)}", "1,01"])
def test_a_gpu_named_twice_is_refused(text):
    assert refusal(text).rule == "GPU 1 (GPU-1ab2f937) is named twice"


@pytest.mark.parametrize("text", ["MIG-1ab2f937", "mig-1ab2f937", "0,MIG-GPU-1ab/1/0"])
def test_mig_uuids_are_refused(text):
    assert "MIG instances cannot be used" in refusal(text).rule


# -- CUDA_VISIBLE_DEVICES ------------------------------------------------------------------------


def test_case_21_the_users_cuda_visible_devices_is_respected_never_overwritten():
    """CUDA_VISIBLE_DEVICES=2,3: only GPUs 2 and 3, in that order, in every form of --gpus.

    [prime-rl 1920, PipelineRL 85, ROLL 78, OpenRLHF 912, TRL 2913]
    """
    for text in ("2", "2,3", "GPU-2,GPU-3"):
        assert select(text, "2,3") == [2, 3]
    assert select("1", "2,3") == [2]
    assert refusal("3", "2,3").rule == (
        "must be at most the GPUs of this machine, 2; CUDA_VISIBLE_DEVICES=2,3 hides the others"
    )
    hidden = "GPU 0 (GPU-0ab2f937) is hidden by CUDA_VISIBLE_DEVICES=2,3"
    assert refusal("0,1", "2,3").rule == hidden
    assert refusal("GPU-0", "2,3").rule == hidden

    gpus = FakeNvml(8).list_gpus().gpus
    chosen = select_gpus("2", "2,3", gpus)
    placement = place(chosen, split(1, 1))
    learner = environment_for(placement.learners)["CUDA_VISIBLE_DEVICES"]
    sampler = environment_for(placement.samplers[0])["CUDA_VISIBLE_DEVICES"]
    assert [learner, sampler] == [uuid_of(2), uuid_of(3)]


def test_its_order_is_kept():
    assert select("2", "3,2") == [3, 2]
    assert select("3", "GPU-ff7,0,GPU-4") == [7, 0, 4]
    assert select("2,3", "3,2") == [2, 3]


@pytest.mark.parametrize("visible", ["", " ", "-1", "NoDevFiles", "-1,0"])
def test_it_can_hide_all(visible):
    error = refusal("1", visible)
    assert f"this machine, 0; CUDA_VISIBLE_DEVICES={visible} hides the others" in error.rule


def test_what_follows_minus_one_is_hidden():
    assert select("2", "0,2,-1,1") == [0, 2]
    assert "hides the others" in refusal("3", "0,2,-1,1").rule
    assert select("1", "0,") == [0]


@pytest.mark.parametrize(
    ("visible", "word"),
    [
        ("2,8", "there is no GPU 8"),
        ("GPU-e", "there is no GPU GPU-e"),
        ("zero", "there is no GPU zero"),
        ("GPU-ff", "the beginning of 2 UUIDs"),
        ("1,1", "names GPU 1 (GPU-1ab2f937) twice"),
        ("MIG-1ab", "MIG instances cannot be used"),
    ],
)
def test_a_mistake_in_it_is_named_where_cuda_would_hide_cards_silently(visible, word):
    error = refusal("1", visible)
    assert (error.key, error.value) == ("CUDA_VISIBLE_DEVICES", visible)
    assert word in error.rule


def test_ids_are_ambiguous_where_cards_differ():
    mixed = FakeNvml(3, {0: {"name": "NVIDIA T400"}})
    error = refusal("1", "1", mixed)
    assert error.key == "CUDA_VISIBLE_DEVICES"
    assert "CUDA_DEVICE_ORDER must be PCI_BUS_ID: the cards differ" in error.rule
    assert select("1", "1", mixed, device_order="PCI_BUS_ID") == [1]
    assert select("1", "GPU-1", mixed) == [1]
    assert select("1", None, mixed) == [0]


def test_unset_shows_all():
    gpus = FakeNvml(4).list_gpus().gpus
    assert visible_gpus(None, gpus) == gpus


# -- busy ----------------------------------------------------------------------------------------

BUSY = {1: {"processes": (GpuProcess(4242, 30 * GIB),), "used_bytes": 31 * GIB}}


def test_a_busy_gpu_is_refused_with_its_owner():
    error = refusal("0,1", nvml=FakeNvml(8, BUSY))
    assert error.rule == "GPU 1 (GPU-1ab2f937) is busy: process 4242 (30.0 GiB)"


def test_every_owner_is_named_even_if_it_holds_nothing_yet():
    owners = (GpuProcess(7, 0), GpuProcess(8, GIB // 2))
    gpu = FakeNvml(1, {0: {"processes": owners}}).gpus[0]
    assert why_unusable(gpu) == "is busy: process 7 (0.0 GiB), 8 (0.5 GiB)"


def test_memory_of_a_process_that_cannot_be_seen_makes_it_busy():
    nvml = FakeNvml(2, {0: {"used_bytes": GIB + 1}})
    assert "GPU 0 (GPU-0ab2f937) is busy: 1.0 GiB in use" in refusal("0,", nvml=nvml).rule
    assert select("0,", nvml=FakeNvml(2, {0: {"used_bytes": GIB}})) == [0]


def test_a_gpu_split_into_instances_is_refused():
    nvml = FakeNvml(2, {1: {"is_mig": True}})
    assert "is split into MIG instances" in refusal("1,", nvml=nvml).rule


def test_a_count_takes_free_ones_only():
    nvml = FakeNvml(8, BUSY)
    assert select("3", nvml=nvml) == [0, 2, 3]
    error = refusal("8", nvml=nvml)
    assert error.rule == "only 7 are free: GPU 1 (GPU-1ab2f937) is busy: process 4242 (30.0 GiB)"
    assert refusal("2", "1,2", nvml).rule.startswith("only 1 are free: GPU 1 ")


# -- placement -----------------------------------------------------------------------------------


def split(learners, samplers, tensor_parallel=1, idle=0):
    return Split(learners, samplers, tensor_parallel, idle, 0.0, 0, 0.0, 0.0, ())


def test_every_gpu_has_one_role_in_order():
    gpus = FakeNvml(8).list_gpus().gpus
    placement = place(gpus, split(3, 2, 2, idle=1))
    assert [gpu.index for gpu in placement.learners] == [0, 1, 2]
    assert [[gpu.index for gpu in each] for each in placement.samplers] == [[3, 4], [5, 6]]
    assert [gpu.index for gpu in placement.idle] == [7]


def test_a_split_of_another_number_of_gpus_is_our_bug():
    with pytest.raises(AssertionError):
        place(FakeNvml(8).list_gpus().gpus, split(3, 4))


def test_the_table_shows_id_uuid_name_and_role():
    gpus = FakeNvml(4, {3: {"numa_node": None}}).list_gpus().gpus
    lines = placement_table(place(gpus, split(1, 1, 2, idle=1)))
    heading, *rows = lines
    assert heading.split() == ["id", "UUID", "name", "memory", "NUMA", "role"]
    assert rows[0] == f"0   {uuid_of(0)}  NVIDIA H100 80GB HBM3  85.5 GB  0     learner 0"
    assert rows[2].endswith("0     sampler 0, rank 1")
    assert rows[3].endswith("-     idle")
    assert len(rows) == 4
    (single,) = placement_table(place(gpus[:2], split(1, 1)))[2:]
    assert single.endswith("sampler 0")


def test_a_childs_environment_names_its_gpus_by_uuid_in_order():
    gpus = FakeNvml(8).list_gpus().gpus
    assert environment_for([gpus[5], gpus[2]]) == {
        "CUDA_VISIBLE_DEVICES": f"{uuid_of(5)},{uuid_of(2)}",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert environment_for([])["CUDA_VISIBLE_DEVICES"] == ""


def test_a_context_on_a_foreign_card_is_named():
    both = (GpuProcess(10, GIB), GpuProcess(11, GIB // 2), GpuProcess(99, GIB))
    gpus = FakeNvml(2, {0: {"processes": both}, 1: {"processes": both[1:2]}}).list_gpus().gpus
    owned = {10: {uuid_of(0)}, 11: {uuid_of(1)}}
    assert stray_processes(gpus, owned) == [
        "process 11 has a context of 0.5 GiB on GPU 0 (GPU-0ab2f937)"
    ]
    assert stray_processes(gpus[1:], owned) == []


# -- the real library, over a fake of its module -------------------------------------------------


def fake_library(monkeypatch, num_gpus=2, **functions):
    """Put a module in pynvml's place: two cards, each with all there is to tell."""
    module = ModuleType("pynvml")
    error = type("NVMLError", (Exception,), {})
    names = ("NotSupported", "FunctionNotFound", "NoPermission", "ArgumentVersionMismatch")
    module.stopped = 0

    def stop():
        module.stopped += 1

    def processes(handle):
        return [SimpleNamespace(pid=42, usedGpuMemory=None)] if handle == 1 else []

    members = {
        "NVMLError": error,
        **{f"NVMLError_{name}": type(name, (error,), {}) for name in (*names, "GpuIsLost")},
        "nvmlMemory_v2": 2,
        "NVML_AFFINITY_SCOPE_NODE": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": stop,
        "nvmlDeviceGetCount": lambda: num_gpus,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": uuid_of,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda handle, version=1: SimpleNamespace(
            total=100, used={1: 9, 2: 5}[version]
        ),
        "nvmlDeviceGetComputeRunningProcesses": processes,
        "nvmlDeviceGetMigMode": lambda handle: [handle, 0],
        "nvmlDeviceGetMemoryAffinity": lambda handle, size, scope: [[0b1100, 0][handle]],
        **functions,
    }
    for name, member in members.items():
        setattr(module, name, member)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def raising(module, name):
    def ask(*arguments, **keywords):
        raise getattr(module, f"NVMLError_{name}" if name else "NVMLError")(name or "Unknown Error")

    return ask


def test_everything_that_nvml_tells_is_read(monkeypatch):
    module = fake_library(monkeypatch)
    gpus, problem = RealNvml().list_gpus()
    assert problem == ""
    assert gpus == (
        Gpu(0, uuid_of(0), "NVIDIA H200", 100, 5, (), 2, False),
        Gpu(1, uuid_of(1), "NVIDIA H200", 100, 5, (GpuProcess(42, 0),), None, True),
    )
    assert module.stopped == 1


@pytest.mark.parametrize("name", ["NotSupported", "FunctionNotFound", "NoPermission"])
def test_what_a_card_cannot_tell_is_left_open(monkeypatch, name):
    module = fake_library(monkeypatch, num_gpus=1)
    for function in ("ComputeRunningProcesses", "MigMode", "MemoryAffinity"):
        monkeypatch.setattr(module, f"nvmlDeviceGet{function}", raising(module, name))
    (gpu,) = RealNvml().list_gpus().gpus
    assert (gpu.processes, gpu.is_mig, gpu.numa_node) == ((), False, None)


def test_an_old_driver_tells_memory_in_one_number(monkeypatch):
    module = fake_library(monkeypatch, num_gpus=1)

    def memory(handle, version=None):
        if version:
            raise module.NVMLError_FunctionNotFound
        return SimpleNamespace(total=100, used=9)

    monkeypatch.setattr(module, "nvmlDeviceGetMemoryInfo", memory)
    assert RealNvml().list_gpus().gpus[0].used_bytes == 9


def test_a_lost_card_is_named_and_the_others_are_listed(monkeypatch):
    module = fake_library(monkeypatch)

    def handle(index):
        if index == 0:
            raise module.NVMLError_GpuIsLost("GPU is lost")
        return index

    monkeypatch.setattr(module, "nvmlDeviceGetHandleByIndex", handle)
    gpus, problem = RealNvml().list_gpus()
    assert [gpu.index for gpu in gpus] == [1]
    assert problem == "GPU 0 does not answer: GPU is lost"


def test_no_library_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert RealNvml().list_gpus() == ((), "nvidia-ml-py is not installed: pip install nvidia-ml-py")


@pytest.mark.parametrize(("function", "stopped"), [("nvmlInit", 0), ("nvmlDeviceGetCount", 1)])
def test_no_driver_no_gpus(monkeypatch, function, stopped):
    module = fake_library(monkeypatch)
    monkeypatch.setattr(module, function, raising(module, ""))
    gpus, problem = RealNvml().list_gpus()
    assert (gpus, problem) == ((), "the NVIDIA driver does not answer: Unknown Error")
    assert module.stopped == stopped


def test_a_driver_without_cards_says_so(monkeypatch):
    fake_library(monkeypatch, num_gpus=0)
    assert RealNvml().list_gpus() == ((), "the NVIDIA driver shows no GPU")


def test_the_installed_library_has_the_names_that_are_used(monkeypatch):
    real = importlib.import_module("pynvml")
    fake = fake_library(monkeypatch)
    used = {name for name in vars(fake) if name.startswith(("nvml", "NVML"))}
    assert not {name for name in used if not hasattr(real, name)}
