"""What a check finds, and what checks hand on to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from asyncrl_node.errors import RunFault
from asyncrl_node.gpus import Nvml, RealNvml
from asyncrl_node.transport import cuda_driver
from asyncrl_node.transport.cuda_driver import CudaDevice

GIB = 1 << 30
MIB = 1 << 20

Status = Literal["PASS", "FAIL", "SKIP"]


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


class Unavailable(Exception):
    """This machine lacks what a check needs: SKIP."""


class Scale(NamedTuple):
    """How large everything is; the defaults are gpu.md's, tests take less."""

    buffer_bytes: int = 4 * GIB
    """Of the buffers that checks 2, 3 and A2 pull."""
    self_test_bytes: int = 64 * MIB
    version_bytes: int = 32 * MIB
    """Of what checks 5 and 6 publish; more would be hashed for a minute where xxhash is missing."""
    num_publications: int = 200
    killed_bytes: int = GIB
    """Of the buffer whose exporter is killed."""
    host_bytes: int = 2 * GIB
    sharded: tuple[tuple[str, int, float], ...] = (
        ("8B", 1, 0.0),
        ("8B", 3, 0.7),
        ("8B", 4, 0.7),
        ("8B", 7, 0.7),
        ("0.6B", 4, 0.4),
    )
    """Model, learner ranks, least share of a flat copy's rate; one rank's tensors are views."""
    pulled_model: str = "0.6B"
    """What check 4 has another process pull from virtual ranks."""
    matmul_side: int = 8192
    packed_tokens: int = 32_768
    longest_document: int = 8192
    head: tuple[int, int, int] = (16_384, 2048, 151_936)
    """Tokens, width, vocabulary of check 12."""
    cast_model: str = "1.7B"
    learner_models: tuple[tuple[str, float], ...] = (("0.6B", 0.18), ("1.7B", 0.28))
    """Model, least MFU in bf16."""
    rollout_tokens: int = 1024
    micro_batch_tokens: int = 16_384
    """Of one pass: twice that would not fit, because nothing is recomputed."""
    parity: tuple[str, int, int] = ("0.6B", 32, 64)
    """Model, requests, tokens of each."""
    run_model: str = "0.6B"
    run_steps: int = 20


@dataclass
class Session:
    """What checks hand on to each other."""

    folder: Path
    on: str = "cuda"
    """torch's name of the device; tests put the CPU in its place."""
    scale: Scale = Scale()  # noqa: RUF009 - never changed
    nvml: Nvml = field(default_factory=RealNvml)
    figures: dict[str, float] = field(default_factory=dict)
    learner_bytes: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each model: most bytes that torch had allocated, and the planner's forecast of them."""
    opened: CudaDevice | None = None
    ipc: str | None = None
    """Why there is no CUDA IPC on this machine; empty if there is; None before the first try."""

    @property
    def device(self) -> CudaDevice:
        """The parent's GPU, by the driver. Raises: RunFault, CudaError."""
        if self.opened is None:
            self.opened = cuda_driver.open_own_gpu()
        return self.opened


class Check(NamedTuple):
    """One line of the report."""

    number: str
    title: str
    expected: str
    limit: str
    run: Callable[[Session], Outcome]
    num_gpus: int = 1
    """At least; fewer: SKIP."""
    needs_vllm: bool = False


def outcome_of(error: Exception) -> Outcome:
    """Tell what is not there (SKIP) from what is broken (FAIL)."""
    if isinstance(error, Unavailable):
        return Outcome("SKIP", "-", str(error))
    if isinstance(error, RunFault) and error.name == "unsupported_device":
        return Outcome("SKIP", "-", f"not built: {error.story}")
    if isinstance(error, RunFault) and error.name == "shm_full":
        return Outcome("SKIP", "-", error.story)
    story = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return Outcome("FAIL", "-", story)
