"""The whole negotiation between real processes, with device memory that is a fake driver's.

tests/transport/shared_cuda.py is in the place of libcuda.so.1: buffers and 64-byte handles cross
processes as they would on GPUs. The scripted engine checks every byte of every version, and the
learner compares its hash. The test is the launcher. What only GPUs can show, this cannot.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncrl_node.config import Config, FakeConfig, PacingConfig
from asyncrl_node.config_file import encode_config
from asyncrl_node.messages import (
    LauncherHello,
    LauncherMessage,
    LauncherReport,
    RunEnded,
    SamplerExited,
    Status,
    Warned,
)
from asyncrl_node.plan import run_slot_bytes, task_of
from asyncrl_node.process import FaultFile, read_fault
from asyncrl_node.run_directory import RunDirectory, left_behind, new_runtime, sweep
from asyncrl_node.transport.channel import Dealer, Peer, endpoint
from tests.system.runs import ROOT, logs, trained
from tests.transport.shared_cuda import FOLDER, WORKER_ENGINE

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

WITHIN_S = 60.0
WEIGHT_BYTES = 100_001
"""Of no round size: the last bytes count too."""


class Run:
    """A run with GPUs, as far as its processes know, started and watched by the test."""

    def __init__(self, folder: Path, cuda: Path, transport: str, steps: int) -> None:
        self.cuda = cuda
        self.config = Config(
            run_dir=str(folder / "run"),
            steps=steps,
            engine="fake",
            gpus="3",
            transport=transport,  # type: ignore[arg-type]
            samplers=2,
            eval_problems=0,
            pacing=PacingConfig(groups_per_batch=4),
            fake=FakeConfig(train_s=0.02, weight_bytes=WEIGHT_BYTES),
        )
        self.directory = RunDirectory(Path(self.config.run_dir))
        self.directory.create()
        self.directory.config.write_bytes(encode_config(self.config))
        self.runtime = new_runtime(run_slot_bytes(self.config, task_of(self.config)))
        self.directory.write_runtime(self.runtime)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.warnings: list[str] = []
        self.status: Status | None = None
        self.ended = False
        self._zmq = zmq.Context()
        address = endpoint(Path(self.runtime.sockets_dir), "scheduler")
        self._scheduler: Dealer[LauncherReport, LauncherMessage] = Dealer(
            self._zmq, address, Peer("launcher"), LauncherReport
        )

    def start(self) -> None:
        self._scheduler.send(LauncherHello())
        self._spawn("scheduler", "asyncrl_node.scheduler")
        self._spawn("learner", "tests.transport.shared_cuda", "learner")
        for index in (0, 1):
            self.start_sampler(index, 0)

    def start_sampler(self, index: int, incarnation: int) -> None:
        numbers = ("--index", str(index), "--incarnation", str(incarnation))
        self._spawn(f"sampler-{index}", "tests.transport.shared_cuda", "sampler", *numbers)

    def _spawn(self, name: str, module: str, *more: str) -> None:
        command = [sys.executable, "-m", module, *more, "--run-dir", str(self.directory.path)]
        with (self.directory.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT, env=os.environ | {FOLDER: str(self.cuda)}
            )

    def restart_sampler(self, index: int) -> None:
        """What the launcher does for one that was killed."""
        process = self.processes[f"sampler-{index}"]
        process.kill()
        process.wait()
        self._scheduler.send(SamplerExited(index, 0))
        self.start_sampler(index, 1)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Listen until something is so."""
        until_s = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < until_s, f"no {what}\n{logs(self.directory.path)}"
            self._scheduler.socket.poll(100)
            while (report := self._scheduler.receive()) is not None:
                self.ended = self.ended or isinstance(report, RunEnded)
                if isinstance(report, Status):
                    self.status = report
                elif isinstance(report, Warned):
                    self.warnings.append(report.text)

    def finish(self) -> None:
        """See every step trained on right weights, everything ended well, no memory left."""
        self.until(lambda: self.ended, "end of the run")
        codes = {name: p.wait(timeout=WITHIN_S) for name, p in self.processes.items()}
        assert set(codes.values()) == {0}, f"{codes}\n{logs(self.directory.path)}"
        steps = Counter(row["step"] for row in trained(self.directory.path))
        assert steps == Counter(dict.fromkeys(range(self.config.steps), 4))
        assert not list(self.cuda.glob("memory-*")), "device memory that nobody freed"
        left = [path for path in left_behind(self.runtime) if path.parent == Path("/dev/shm")]
        assert left == []

    def fault_of_learner(self) -> FaultFile:
        assert self.processes["learner"].wait(timeout=WITHIN_S) == 3
        fault = read_fault(self.directory, "learner")
        assert fault is not None
        return fault

    def log_of(self, process: str) -> str:
        return (self.directory.logs / f"{process}.log").read_text()

    def calls(self, role: str, process: str | None = None) -> list[Counter[str]]:
        """Driver calls of each process of a role, or of the present one of that name."""
        pid = "*" if process is None else str(self.processes[process].pid)
        files = sorted(self.cuda.glob(f"calls-{role}-{pid}"))
        return [Counter(path.read_text().split()) for path in files]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self._scheduler.close()
        self._zmq.term()
        sweep(self.runtime)


Start = Callable[..., Run]


@pytest.fixture
def cuda() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-cuda-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start(tmp_path: Path, cuda: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def start(transport: str = "auto", steps: int = 8, **faults: dict[str, Any]) -> Run:
        (cuda / "faults.json").write_text(json.dumps(faults))
        run = Run(tmp_path, cuda, transport, steps)
        runs.append(run)
        run.start()
        return run

    yield start
    for run in runs:
        run.close()


def test_a_pair_that_works_takes_cuda_ipc_and_gets_every_version_right(start: Start) -> None:
    run = start()
    run.finish()
    assert run.warnings == []
    for index in (0, 1):
        words = f"sampler {index} takes its weights by CUDA IPC: 3 test patterns"
        assert words in run.log_of("learner")
    samplers = run.calls("sampler")
    assert len(samplers) == 2
    for calls in samplers:
        assert calls["cuIpcOpenMemHandle_v2"] == 2, "the test buffer, then the weights, for life"
        assert calls["cuMemcpyDtoD_v2"] == 3, "one per pattern"
        assert calls["cuMemcpyDtoH_v2"] >= 3 * 1 + 5 * 4, "patterns, then versions: marks and bytes"
        assert calls["cuIpcCloseMemHandle"] == 2
    (learner,) = run.calls("learner")
    assert learner["cuMemAlloc_v2"] == learner["cuMemFree_v2"] == 3, "weights and two tests"
    assert learner["cuMemHostRegister_v2"] == learner["cuMemHostUnregister"] == 1


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (
            {"peer_copy": "flipped"},
            ("peer access from", "1 of 1048576 bytes arrived wrong", "IOMMU"),
        ),
        ({"name": "NVIDIA H100 MIG 1g.10gb"}, ("is a MIG instance",)),
        ({"fail": ["cuIpcOpenMemHandle_v2"]}, ("cuIpcOpenMemHandle_v2: CUDA_ERROR_MAP_FAILED",)),
        ({"fail": ["cuInit"]}, ("cuInit: CUDA_ERROR_MAP_FAILED",)),
    ],
)
def test_a_pair_that_does_not_takes_host_memory_and_the_user_reads_why(
    start: Start, faults: dict[str, Any], words: tuple[str, ...]
) -> None:
    run = start(sampler=faults)
    run.finish()
    assert len(run.warnings) == 2, run.warnings
    for index, text in enumerate(sorted(run.warnings)):
        assert text.startswith(f"sampler {index} takes its weights through host shared memory")
        assert all(word in text for word in words), text
        assert text in run.log_of("learner")
        assert "weights come through host shared memory" in run.log_of(f"sampler-{index}")


def test_a_learner_that_cannot_export_says_so_once_for_all(start: Start) -> None:
    run = start(learner={"name": "NVIDIA A100 MIG 3g.40gb"})
    run.finish()
    (text,) = run.warnings
    assert text.startswith("weights go through host shared memory: the learner cannot export")
    assert "is a MIG instance" in text
    assert all(not calls["cuIpcOpenMemHandle_v2"] for calls in run.calls("sampler"))


def test_host_by_setting_is_no_news_and_is_pinned_at_both_ends(start: Start) -> None:
    run = start("host")
    run.finish()
    assert run.warnings == []
    for role in ("learner", "sampler"):
        for calls in run.calls(role):
            assert calls["cuMemHostRegister_v2"] == calls["cuMemHostUnregister"] == 1
            assert not calls["cuMemAlloc_v2"]


def test_where_cuda_ipc_is_asked_for_a_broken_pair_stops_the_run_by_name(start: Start) -> None:
    fault = start("cuda_ipc", sampler={"peer_copy": "flipped"}).fault_of_learner()
    assert fault.name == "no_cuda_ipc"
    assert "bytes arrived wrong" in fault.story
    assert "`transport` is cuda_ipc; set it to auto" in fault.story


def test_where_cuda_ipc_is_asked_for_a_learner_without_it_stops_the_run_by_name(
    start: Start,
) -> None:
    fault = start("cuda_ipc", learner={"fail": ["cuIpcGetMemHandle"]}).fault_of_learner()
    assert fault.name == "no_cuda_ipc"
    assert "cuIpcGetMemHandle: CUDA_ERROR_MAP_FAILED" in fault.story


def test_an_engine_that_pulls_by_itself_gets_every_version_right(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's worker does; the sampler's process has given its own GPU back by then."""
    monkeypatch.setenv(WORKER_ENGINE, "1")
    run = start()
    run.finish()
    assert run.warnings == []
    for calls in run.calls("sampler"):
        assert calls["cuDevicePrimaryCtxRetain"] == calls["cuDevicePrimaryCtxRelease_v2"] == 2
        assert calls["cuIpcOpenMemHandle_v2"] == calls["cuIpcCloseMemHandle"] == 2


def test_a_sampler_that_was_killed_comes_back_to_the_same_buffer(start: Start) -> None:
    run = start(steps=60)
    run.until(lambda: run.status is not None and run.status.published >= 5, "fifth version")
    run.restart_sampler(0)
    assert run.status is not None
    since = run.status.published

    def is_back() -> bool:
        present = run.status.samplers if run.status else ()
        return any(s.sampler == 0 and s.policy_version > since for s in present)

    run.until(is_back, "version in the new process")
    run.finish()
    assert run.warnings == []
    words = "sampler 0 takes its weights by CUDA IPC"
    assert run.log_of("learner").count(words) == 2
    (calls,) = run.calls("sampler", "sampler-0")
    assert calls["cuIpcOpenMemHandle_v2"] == 2
    (learner,) = run.calls("learner")
    assert learner["cuIpcGetMemHandle"] == 4, "three tests, and one handle of the weights for all"
