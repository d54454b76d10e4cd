"""The GPUs of a run while it runs: what each process sees of them, and who is on them.

    Placement -> environment_of(role, index)      when a process is started
    NVML      -> why_not_free(sampler)            before a killed sampler is started again
              -> strays(owned)                    once, after the first update

A killed process's memory comes back a little later, or not at all while something of it lives on:
its engine's process, or an importer of its buffer. A start before that fails in the middle of a
load; so it waits, and names who is in the way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from typing import Literal

from asyncrl_node.gpus import (
    Gpu,
    Nvml,
    Placement,
    environment_for,
    label,
    stray_processes,
    why_unusable,
)

Role = Literal["scheduler", "learner", "sampler"]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class GpuWatch:
    """Cards and processes of one run."""

    def __init__(self, placement: Placement, nvml: Nvml) -> None:
        self.placement = placement
        self._nvml = nvml

    def gpus_of(self, role: Role, index: int = 0) -> tuple[Gpu, ...]:
        """Cards of a process; none for the scheduler."""
        if role == "scheduler":
            return ()
        return self.placement.learners if role == "learner" else self.placement.samplers[index]

    def environment_of(
        self, role: Role, index: int, cores: int, environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Make what is added to a process's environment: its cards, its share of the cores.

        The learner packs sequences of ever new lengths, which tears torch's memory to pieces unless
        its segments may grow; a setting of the user's own stands.
        """
        num_processes = 2 + len(self.placement.samplers)
        threads = str(max(1, cores // num_processes))
        own = environment_for(self.gpus_of(role, index)) | dict.fromkeys(THREAD_VARIABLES, threads)
        if role == "learner" and not any(name in environ for name in ALLOCATOR_VARIABLES):
            own["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        return own

    def why_not_free(self, sampler: int) -> str:
        """Say who is still on the cards of a sampler whose process is gone; empty: nobody."""
        gpus, problem = self._nvml.list_gpus()
        now = {gpu.uuid: gpu for gpu in gpus}
        reasons = []
        for gpu in self.placement.samplers[sampler]:
            seen = now.get(gpu.uuid)
            reason = f"does not answer: {problem}" if seen is None else why_unusable(seen)
            if reason is not None:
                reasons.append(f"{label(gpu)} {reason}")
        return "; ".join(reasons)

    def strays(self, owned: Mapping[int, Set[str]]) -> list[str]:
        """Name each process of ours with a context on a card that is not its own.

        `owned` maps pid to UUIDs. Inside a container NVML may count pids as the host does; then
        nothing is found.
        """
        return stray_processes(self._nvml.list_gpus().gpus, owned)


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
