"""Whole runs on GPUs that a fake NVML shows: real processes, the scripted engine, no card.

The launcher runs in this process, so that the fake can be handed in; `Spy` is asked by it in the
middle of the run, and looks at its children then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from asyncrl_node.config import Config
from asyncrl_node.config_file import encode_config, read_config
from asyncrl_node.gpus import GpuProcess, Inventory
from asyncrl_node.process import FaultFile
from asyncrl_node.run_directory import RunDirectory, new_runtime, sweep
from asyncrl_node.supervisor import main
from tests.system.judge import judge
from tests.system.runs import ROOT, launch, logs
from tests.test_gpus import GIB, FakeNvml, uuid_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

QUICK = ("--engine", "fake", "--fake.train-s", "0.02", "--eval-problems", "0", "--gpus", "4")
HELD = GpuProcess(4242, 30 * GIB)


def children() -> dict[str, psutil.Process]:
    """The launcher's children by what they are called: learner, sampler-0."""
    found = {}
    for process in psutil.Process().children():
        title = process.cmdline()[0]
        if title.startswith("asyncrl-"):
            found[title.removeprefix("asyncrl-").split()[0]] = process
    return found


class Spy(FakeNvml):
    """Four cards; `look` is called each time the launcher asks, and may change them."""

    def __init__(self, look: Callable[[Spy], None]) -> None:
        super().__init__(4)
        self.look = look
        self.num_asked = 0

    def list_gpus(self) -> Inventory:
        self.num_asked += 1
        self.look(self)
        return super().list_gpus()

    def occupy(self, gpu: int, *processes: GpuProcess) -> None:
        self.gpus[gpu] = msgspec.structs.replace(self.gpus[gpu], processes=processes)


def run(run_dir: Path, spy: Spy, *flags: str) -> int:
    return main(["--run-dir", str(run_dir), *QUICK, *flags], spy)


def test_every_child_sees_its_own_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked of the kernel, after the first update; the user's mask is respected (case 21)."""
    monkeypatch.setenv("SPT_NOENV", "1")  # a title of its own would be written over it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1,0")
    seen: dict[str, dict[str, str]] = {}

    def look(spy: Spy) -> None:
        if spy.num_asked > 1:
            seen.update({name: child.environ() for name, child in children().items()})

    spy = Spy(look)
    assert main(["--run-dir", str(tmp_path / "run"), *QUICK[:-1], "3", "--steps", "12"], spy) == 0
    visible = {name: environ["CUDA_VISIBLE_DEVICES"] for name, environ in seen.items()}
    assert visible == {
        "scheduler": "",
        "learner": uuid_of(3),
        "sampler-0": uuid_of(1),
        "sampler-1": uuid_of(0),
    }
    assert {environ["CUDA_DEVICE_ORDER"] for environ in seen.values()} == {"PCI_BUS_ID"}
    growing = {name for name, environ in seen.items() if "PYTORCH_ALLOC_CONF" in environ}
    assert growing == {"learner"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,GPU-1,0"
    config = read_config(tmp_path / "run" / "config.toml")
    assert (config.learners, config.samplers, config.tensor_parallel) == (1, 2, 1)
    printed = capsys.readouterr().out
    assert f"3   {uuid_of(3)}  NVIDIA H100 80GB HBM3  85.5 GB  0     learner 0" in printed
    assert "1:2: 1 learner, 2 samplers" in printed
    assert spy.num_asked == 2, "at the start, and once after the first update"
    judge(tmp_path / "run")


def test_a_context_on_a_foreign_card_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(spy: Spy) -> None:
        if spy.num_asked == 2:
            own = GpuProcess(children()["learner"].pid, GIB)
            foreign = GpuProcess(children()["sampler-1"].pid, GIB // 2)
            spy.occupy(0, own, foreign, GpuProcess(1, GIB))

    assert run(tmp_path / "run", Spy(look), "--steps", "12") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "has a context" in line]
    assert len(lines) == 1
    assert lines[0].startswith("warning: process ")
    assert lines[0].endswith(
        "has a context of 0.5 GiB on GPU 0 (GPU-0ab2f937), which is not its own: its memory is "
        "missing there"
    )


def test_a_killed_sampler_starts_again_when_its_card_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(spy: Spy) -> None:
        if spy.num_asked == 2:  # the look for strays, after the first update
            children()["sampler-0"].send_signal(signal.SIGKILL)
            spy.occupy(1, HELD)
        if spy.num_asked == 4:
            spy.occupy(1)

    spy = Spy(look)
    assert run(tmp_path / "run", spy, "--steps", "150") == 0
    printed = capsys.readouterr().out
    told = "warning: sampler 0 waits: GPU 1 (GPU-1ab2f937) is busy: process 4242 (30.0 GiB)"
    assert printed.count(told) == 1
    assert spy.num_asked == 4
    assert judge(tmp_path / "run").events["restarted"] > 0


def test_a_card_that_never_becomes_free_stops_the_run_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(spy: Spy) -> None:
        if spy.num_asked == 2:
            children()["sampler-0"].send_signal(signal.SIGKILL)
            spy.occupy(1, HELD)

    flags = ("--steps", "100000", "--weights-overdue-s", "2")
    assert run(tmp_path / "run", Spy(look), *flags) == 3
    assert (
        "stopped: gpu_not_free: sampler 0 cannot start again: GPU 1 (GPU-1ab2f937) is busy: "
        "process 4242 (30.0 GiB), "
    ) in capsys.readouterr().err


def test_a_busy_card_keeps_a_run_from_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "run", Spy(lambda spy: spy.occupy(2, HELD))) == 2
    assert capsys.readouterr().err == (
        "error: gpus: only 3 are free: GPU 2 (GPU-2ab2f937) is busy: process 4242 (30.0 GiB) "
        "(got 4)\n"
    )
    assert not (tmp_path / "run").exists()


def test_without_gpus_a_start_is_refused_in_one_line(tmp_path: Path) -> None:
    done = launch(tmp_path / "run", "--engine", "fake", "--gpus", "99")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: gpus: must be at most the GPUs of this machine, ")
    assert done.stderr.count("\n") == 1


def test_a_process_that_is_not_on_its_card_ends_by_name(tmp_path: Path) -> None:
    """Started by hand, where the card of the placement is not (and here no driver either)."""
    config = Config(run_dir=str(tmp_path / "run"), engine="torch", gpus="2")
    directory = RunDirectory(Path(config.run_dir))
    directory.create()
    directory.config.write_bytes(encode_config(config))
    runtime = new_runtime(1000)
    directory.write_runtime(msgspec.structs.replace(runtime, learner_gpus=(uuid_of(0),)))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl_node.learner", "--run-dir", str(directory.path)],
            capture_output=True,
            timeout=60,
            cwd=ROOT,
            check=False,
        )
    finally:
        sweep(runtime)
    assert done.returncode == 3, logs(directory.path)
    fault = msgspec.json.decode((directory.logs / "learner.fault").read_bytes(), type=FaultFile)
    assert fault.name in ("wrong_gpu", "no_cuda_driver")
