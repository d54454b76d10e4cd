"""Which GPUs a run may use, and which process gets which.

    NVML -> Inventory -> select_gpus(--gpus, CUDA_VISIBLE_DEVICES) -> place(Split) -> Placement
    Placement -> environment_for each process, placement_table for the person

A GPU's identity is its UUID, in every message, table and environment: indices differ between
NVML, CUDA and a process that sees only some of the cards. What the user's CUDA_VISIBLE_DEVICES
hides stays hidden, and its order is kept. This module reads; it never sets or resets anything on
a card, and makes no CUDA context.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import msgspec

from asyncrl_node.core.placement import Split
from asyncrl_node.errors import ConfigError

BUSY_BYTES = 1 << 30
"""More than this in use, and the card is somebody's, even if no process of it can be seen."""
NO_DEVICES = ("", "-1", "NoDevFiles")
"""In CUDA_VISIBLE_DEVICES: hides itself and everything after it."""
SHOWN_UUID_CHARACTERS = 12


class GpuProcess(NamedTuple):
    """A process with a compute context on a GPU."""

    pid: int
    """As the driver counts: inside a container it may be the host's."""
    used_bytes: int
    """0 where the driver does not say."""


class Gpu(msgspec.Struct, frozen=True):
    """One card, as NVML shows it."""

    index: int
    """As nvidia-smi shows it: in the order of the PCI bus; -1 for one that is made up."""
    uuid: str
    """Example: `GPU-8932f937-d72c-4106-c12f-20bd9faed9f6`."""
    name: str
    total_bytes: int
    used_bytes: int
    processes: tuple[GpuProcess, ...] = ()
    numa_node: int | None = None
    """The host memory nearest to it; None: unknown."""
    is_mig: bool = False
    """Split into MIG instances: not to be had as a whole."""


class Inventory(NamedTuple):
    """The GPUs of this machine, by index, and what kept others from being listed."""

    gpus: tuple[Gpu, ...]
    problem: str = ""
    """In words: why there is none, or which one does not answer. Empty: all is well."""


class Nvml(Protocol):
    """What the planner asks of NVIDIA's management library."""

    def list_gpus(self) -> Inventory:
        """List the GPUs as they are now. Raises nothing: a problem is part of the answer."""
        ...


# -- the real library ----------------------------------------------------------------------------


class RealNvml:
    """NVML by way of nvidia-ml-py; without library or driver there are no GPUs, with the reason."""

    def list_gpus(self) -> Inventory:
        """List the GPUs as they are now."""
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return Inventory((), "nvidia-ml-py is not installed: pip install nvidia-ml-py")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return Inventory((), f"the NVIDIA driver does not answer: {error}")
        try:
            return _read_all(nvml)
        except nvml.NVMLError as error:
            return Inventory((), f"the NVIDIA driver does not answer: {error}")
        finally:
            nvml.nvmlShutdown()


def _read_all(nvml: Any) -> Inventory:  # noqa: ANN401  an untyped module
    gpus: list[Gpu] = []
    problems: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_read(nvml, index))
        except nvml.NVMLError as error:
            problems.append(f"GPU {index} does not answer: {error}")
    if not gpus and not problems:
        problems.append("the NVIDIA driver shows no GPU")
    return Inventory(tuple(gpus), "; ".join(problems))


def _read(nvml: Any, index: int) -> Gpu:  # noqa: ANN401
    """Read one card; what only some cards or drivers can tell may be missing."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _memory(nvml, handle)
    listed = _if_known(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    mode = _if_known(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=memory.total,
        used_bytes=memory.used,
        processes=tuple(GpuProcess(each.pid, each.usedGpuMemory or 0) for each in listed),
        numa_node=_numa_node(nvml, handle),
        is_mig=mode is not None and mode[0] == 1,
    )


def _if_known(nvml: Any, ask: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Ask; None where this card or driver cannot tell. A card that is lost is still an error."""
    unknown = (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_ArgumentVersionMismatch,
    )
    try:
        return ask()
    except unknown:
        return None


def _memory(nvml: Any, handle: Any) -> Any:  # noqa: ANN401
    """Memory in use without what the driver reserves for itself; old drivers do not part them."""
    version = nvml.nvmlMemory_v2
    parted = _if_known(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=version))
    return parted if parted is not None else nvml.nvmlDeviceGetMemoryInfo(handle)


def _numa_node(nvml: Any, handle: Any) -> int | None:  # noqa: ANN401
    """The lowest of the nearest NUMA nodes: a mask of 64 bits."""
    scope = nvml.NVML_AFFINITY_SCOPE_NODE
    mask = _if_known(nvml, lambda: nvml.nvmlDeviceGetMemoryAffinity(handle, 1, scope))
    if mask is None or not mask[0]:
        return None
    bits = int(mask[0])
    return (bits & -bits).bit_length() - 1


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# -- which GPUs ----------------------------------------------------------------------------------


def select_gpus(
    text: str,
    visible: str | None,
    gpus: Sequence[Gpu],
    *,
    problem: str = "",
    device_order: str | None = None,
) -> tuple[Gpu, ...]:
    """Find the GPUs that `--gpus` means, in order.

    text          a count ("8"), ids as nvidia-smi shows them ("0,3", and "3," for one), or UUIDs
                  ("GPU-8932f937,GPU-1b"; as much of each as makes it unique)
    visible       CUDA_VISIBLE_DEVICES of this process; None: unset, "": no GPU
    problem       Inventory.problem, for the words
    device_order  CUDA_DEVICE_ORDER of this process

    A count takes the first visible GPUs that are free, in the order of CUDA_VISIBLE_DEVICES; named
    GPUs must be free and come in the order of their naming.

    Raises: ConfigError, saying which GPU and why.
    """
    shown = visible_gpus(visible, gpus, device_order)
    words = [word.strip() for word in text.split(",")]
    if len(words) == 1 and not words[0].upper().startswith(("GPU-", "MIG-")):
        return _first_free(words[0], visible, shown, problem)
    if words[-1] == "":
        words.pop()
    chosen: list[Gpu] = []
    for word in words:
        gpu = _find(word, gpus, "gpus", text)
        _require(gpu in shown, f"{label(gpu)} is hidden by {_setting(visible)}", text)
        _require(gpu not in chosen, f"{label(gpu)} is named twice", text)
        reason = why_unusable(gpu)
        _require(reason is None, f"{label(gpu)} {reason}", text)
        chosen.append(gpu)
    return tuple(chosen)


def visible_gpus(
    visible: str | None, gpus: Sequence[Gpu], device_order: str | None = None
) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does, but for typos: those are refused, not obeyed.

    CUDA silently hides everything from an unknown entry on; only -1 and nothing at all are taken to
    mean that. Ids are those of nvidia-smi. CUDA by itself counts the fastest card first, so where
    cards differ, ids say too little unless CUDA_DEVICE_ORDER is PCI_BUS_ID.

    Raises: ConfigError
    """
    if visible is None:
        return tuple(gpus)
    shown: list[Gpu] = []
    for word in (word.strip() for word in visible.split(",")):
        if word in NO_DEVICES:
            break
        gpu = _find(word, gpus, "CUDA_VISIBLE_DEVICES", visible)
        if word.isdigit() and len({each.name for each in gpus}) > 1:
            rule = "must hold UUIDs, or CUDA_DEVICE_ORDER must be PCI_BUS_ID: the cards differ"
            _require(device_order == "PCI_BUS_ID", rule, visible, "CUDA_VISIBLE_DEVICES")
        rule = f"names {label(gpu)} twice"
        _require(gpu not in shown, rule, visible, "CUDA_VISIBLE_DEVICES")
        shown.append(gpu)
    return tuple(shown)


def why_unusable(gpu: Gpu) -> str | None:
    """Say why a run cannot have a GPU now, or None if it can.

    Also what a restart and `--resume` wait on: a killed owner's memory comes back a little later.
    """
    if gpu.is_mig:
        return "is split into MIG instances, which cannot share weights; switch MIG off"
    if gpu.processes:
        owners = ", ".join(f"{each.pid} ({_gib(each.used_bytes)})" for each in gpu.processes)
        return f"is busy: process {owners}"
    if gpu.used_bytes > BUSY_BYTES:
        return f"is busy: {_gib(gpu.used_bytes)} in use by a process that cannot be seen from here"
    return None


def _require(condition: bool, rule: str, value: object, key: str = "gpus") -> None:
    if not condition:
        raise ConfigError(key, rule, value)


def _first_free(
    text: str, visible: str | None, shown: Sequence[Gpu], problem: str
) -> tuple[Gpu, ...]:
    rule = 'must be a count ("8"), ids ("0,3", "3,") or UUIDs ("GPU-8932f937,GPU-1b")'
    _require(text.isascii() and text.isdigit(), rule, text)
    count = int(text)
    _require(count >= 1, "must be at least 1; leave it out to run on the CPU", text)
    limits = [f"{len(shown)}"]
    if visible is not None:
        limits.append(f"{_setting(visible)} hides the others")
    if problem:
        limits.append(problem)
    rule = f"must be at most the GPUs of this machine, {'; '.join(limits)}"
    _require(count <= len(shown), rule, text)
    free = [gpu for gpu in shown if why_unusable(gpu) is None]
    taken = (f"{label(gpu)} {reason}" for gpu in shown if (reason := why_unusable(gpu)))
    _require(count <= len(free), f"only {len(free)} are free: {'; '.join(taken)}", text)
    return tuple(free[:count])


def _find(word: str, gpus: Sequence[Gpu], key: str, value: str) -> Gpu:
    """Find the one GPU that an id, a UUID or the beginning of one names."""
    no_mig = "MIG instances cannot be used: they cannot share weights; name whole GPUs"
    _require(not word.upper().startswith("MIG-"), no_mig, value, key)
    if word.isascii() and word.isdigit():
        found = [gpu for gpu in gpus if gpu.index == int(word)]
    elif word.lower().startswith("gpu-"):
        found = [gpu for gpu in gpus if gpu.uuid.lower().startswith(word.lower())]
    else:
        found = []
    have = ", ".join(str(gpu.index) for gpu in gpus) or "none"
    unknown = f"there is no GPU {word or 'without a name'}; nvidia-smi -L lists them (ids: {have})"
    _require(bool(found), unknown, value, key)
    several = f"{word} is the beginning of {len(found)} UUIDs; give more of it"
    _require(len(found) == 1, several, value, key)
    return found[0]


def label(gpu: Gpu) -> str:
    """Name a card for a person: its id and the beginning of its UUID."""
    return f"GPU {gpu.index} ({_short(gpu.uuid)})"


def _short(uuid: str) -> str:
    return uuid[:SHOWN_UUID_CHARACTERS]


def _setting(visible: str | None) -> str:
    return f"CUDA_VISIBLE_DEVICES={visible}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


# -- which process gets which --------------------------------------------------------------------


class Placement(NamedTuple):
    """The GPUs of every process of a run."""

    learners: tuple[Gpu, ...]
    """By rank."""
    samplers: tuple[tuple[Gpu, ...], ...]
    """Of each sampler, by rank within it."""
    idle: tuple[Gpu, ...] = ()


def place(gpus: Sequence[Gpu], split: Split) -> Placement:
    """Hand the GPUs out in order: learners first, then sampler after sampler."""
    assert len(gpus) == split.learners + split.sampler_gpus + split.idle, (len(gpus), split)
    width = split.tensor_parallel
    starts = range(split.learners, split.learners + split.sampler_gpus, width)
    return Placement(
        learners=tuple(gpus[: split.learners]),
        samplers=tuple(tuple(gpus[start : start + width]) for start in starts),
        idle=tuple(gpus[split.learners + split.sampler_gpus :]),
    )


def environment_for(gpus: Iterable[Gpu]) -> dict[str, str]:
    """Environment of a process that shall see these GPUs, in this order, and no other.

    For the children only: in them it takes the place of the user's CUDA_VISIBLE_DEVICES, of whose
    GPUs these are some.
    """
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def placement_table(placement: Placement) -> list[str]:
    """Lines of id, full UUID, name, memory, NUMA node and role, under a heading."""
    rows = [("id", "UUID", "name", "memory", "NUMA", "role")]
    for gpu, role in _roles(placement):
        node = "-" if gpu.numa_node is None else str(gpu.numa_node)
        memory = f"{gpu.total_bytes / 1e9:.1f} GB"
        index = "-" if gpu.index < 0 else str(gpu.index)
        rows.append((index, gpu.uuid, gpu.name, memory, node, role))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _roles(placement: Placement) -> list[tuple[Gpu, str]]:
    roles = [(gpu, f"learner {rank}") for rank, gpu in enumerate(placement.learners)]
    for number, gpus in enumerate(placement.samplers):
        for rank, gpu in enumerate(gpus):
            within = f", rank {rank}" if len(gpus) > 1 else ""
            roles.append((gpu, f"sampler {number}{within}"))
    roles.extend((gpu, "idle") for gpu in placement.idle)
    return roles


def stray_processes(gpus: Iterable[Gpu], owned: Mapping[int, Set[str]]) -> list[str]:
    """Name every process of ours that has a context on a GPU that is not its own.

    A second context costs memory on a learner's card and comes from opening a handle by the
    exporter's ordinal. `owned` maps pid to the UUIDs it was given; ask after the first update.
    Other people's processes are not looked at.
    """
    return [
        f"process {each.pid} has a context of {_gib(each.used_bytes)} on {label(gpu)}"
        for gpu in gpus
        for each in gpu.processes
        if each.pid in owned and gpu.uuid not in owned[each.pid]
    ]
