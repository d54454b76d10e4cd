"""However a run ends, it leaves no process, no shared memory and no socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import traces_of_runs
from tests.system.runs import ROOT, fake_run, logs, pid_of, processes_of, trained


@contextmanager
def running(run_dir: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [
        *(sys.executable, str(ROOT / "launch.py"), "--run-dir", str(run_dir), "--engine", "fake"),
        *("--steps", "1000", "--eval-problems", "0", "--groups-per-batch", "4", *flags),
    ]
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def wait_for_line(launcher: subprocess.Popen[str], beginning: str) -> None:
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"no line begins with {beginning!r}")


def run_id_of(run_dir: Path) -> str:
    runtime: dict[str, str] = json.loads((run_dir / "runtime.json").read_text())
    return runtime["run_id"]


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait for a condition of the system; the test fails by name when it does not come."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {timeout_s} s"
        os.sched_yield()


@pytest.mark.parametrize("beginning", ["run directory", "step 2/"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("nothing_left_behind")
def test_ctrl_c_saves_and_leaves_nothing(tmp_path: Path, beginning: str, number: int) -> None:
    run_dir = tmp_path / "run"
    with running(run_dir) as launcher:
        wait_for_line(launcher, beginning)
        until(lambda: (run_dir / "runtime.json").exists(), "the run's start")
        run_id = run_id_of(run_dir)
        launcher.send_signal(number)
        output, errors = launcher.communicate(timeout=30)
        assert launcher.returncode == 130, output + errors + logs(run_dir)
    assert "interrupted after" in output
    assert processes_of(run_id) == []
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    steps = {row["step"] for row in trained(run_dir)}
    assert checkpoint.name == f"step-{len(steps):06d}"


@pytest.mark.usefixtures("nothing_left_behind")
def test_ctrl_c_never_waits_for_a_straggler(tmp_path: Path) -> None:
    """Problem 0 hangs and the learner waits for it: the open batch goes back at once."""
    run_dir = tmp_path / "run"
    flags = ("--fake.hang-problems", ",".join(map(str, range(8))), "--fake.num-problems", "8")
    with running(run_dir, *flags, "--warn-every-s", "0.2") as launcher:
        wait_for_line(launcher, "warning:")
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate(timeout=30)
        assert launcher.returncode == 130, output + logs(run_dir)
    assert "8 leftover" in output


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    """The learner is in the middle of a step of an hour; nobody waits for it."""
    run_dir = tmp_path / "run"
    with running(run_dir, "--fake.train-s", "3600") as launcher:
        wait_for_line(launcher, "run directory")
        ledger = run_dir / "ledger.sqlite"
        until(lambda: ledger.exists() and b"taken" in wal_of(ledger), "the first take")
        run_id = run_id_of(run_dir)
        launcher.send_signal(signal.SIGINT)
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=20)
        assert launcher.returncode == 130
    assert "killed after 0 steps" in output
    assert processes_of(run_id) == []


def wal_of(ledger: Path) -> bytes:
    wal = ledger.with_name(f"{ledger.name}-wal")
    return ledger.read_bytes() + (wal.read_bytes() if wal.exists() else b"")


def test_no_process_outlives_a_killed_launcher_and_the_next_run_sweeps(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running(run_dir) as launcher:
        wait_for_line(launcher, "step 2/")
        run_id = run_id_of(run_dir)
        assert len(processes_of(run_id)) == 3
        launcher.kill()
        launcher.wait(timeout=10)
        until(lambda: processes_of(run_id) == [], "the end of the children")
    left = [path for path in traces_of_runs() if run_id in path.name]
    assert left, "nobody was there to sweep"
    fake_run(tmp_path / "next", "--steps", "1", "--groups-per-batch", "4")
    assert [path for path in traces_of_runs() if run_id in path.name] == []


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_sampler_that_always_dies_ends_the_run_by_name(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running(run_dir) as launcher:
        wait_for_line(launcher, "step 2/")
        run_id = run_id_of(run_dir)
        killed: set[int | None] = {None}
        for _ in range(4):
            until(lambda: pid_of(run_id, "sampler-0") not in killed, "a new sampler")
            pid = pid_of(run_id, "sampler-0")
            killed.add(pid)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        output, errors = launcher.communicate(timeout=60)
        assert launcher.returncode == 3, output
    assert errors.startswith("stopped: crash_loop: sampler 0 ended 4 times")
