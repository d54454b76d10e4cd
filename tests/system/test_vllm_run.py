"""Whole runs with vLLM samplers on a CPU: updates in the middle of generations, judged; and kills.

What vLLM makes in a folder for temporary files or in /dev/shm is gone after a run, as what we make.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from asyncrl_node.run_directory import sweep_dead_runs
from tests.conftest import traces_of_runs
from tests.system.judge import judge
from tests.system.runs import (
    LAUNCH,
    ROOT,
    launch,
    logs,
    pid_of,
    processes_of,
    train_rows,
    trained,
)
from tests.system.test_shutdown import run_id_of, until, wait_for_line
from tests.vllm_gate import need_vllm

need_vllm()

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("nothing_left_behind")]

GONE_WITHIN_S = 5.0
SMALL = ("--engine", "vllm", "--eval-problems", "0", "--groups-per-batch", "4")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of every process started from here."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def litter(folder: Path) -> list[Path]:
    """What is left there, but for torch's cache, of which a user has one."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def test_two_vllm_samplers_train_the_demo_with_updates_in_generation(
    tmp_path: Path, temporary: Path
) -> None:
    run_dir = tmp_path / "run"
    done = launch(
        run_dir,
        *("--engine", "vllm", "--samplers", "2", "--steps", "40", "--eval-problems", "128"),
        *("--groups-per-batch", "16", "--pipeline-depth", "2"),
        *("--sampling.max-concurrent-rollouts", "32"),
        timeout_s=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs(run_dir)
    judged = judge(run_dir)
    assert len(judged.trained) == 40 * 16
    assert any(row["version_max"] > row["version_min"] for row in judged.trained)
    before, after = (row["eval/reward_mean"] for row in judged.evals)
    assert after > before + 0.2
    assert litter(temporary) == []


@contextmanager
def running(run_dir: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Run with one vLLM sampler."""
    command = [*LAUNCH, "--run-dir", str(run_dir), *SMALL, *flags]
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def sampler_of(run_id: str) -> psutil.Process:
    pid = pid_of(run_id, "sampler-0")
    assert pid is not None
    return psutil.Process(pid)


def engine_of(sampler: psutil.Process) -> psutil.Process:
    """vLLM's own process below the sampler."""
    (engine,) = [p for p in sampler.children(recursive=True) if "EngineCore" in p.name()]
    return engine


def shared_files_of(process: psutil.Process) -> set[Path]:
    """Files of /dev/shm that a process has mapped."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return {Path(path) for path in re.findall(r"(/dev/shm/\S+)", maps)}


def test_a_killed_sampler_takes_its_engine_with_it_and_the_run_goes_on(
    tmp_path: Path, temporary: Path
) -> None:
    run_dir = tmp_path / "run"
    with running(run_dir, "--steps", "20") as launcher:
        wait_for_line(launcher, "step 3/")
        sampler = sampler_of(run_id_of(run_dir))
        engine = engine_of(sampler)
        below = sampler.children(recursive=True)
        shared = shared_files_of(sampler) | shared_files_of(engine)
        assert any(path.name.startswith("arl-") for path in shared), "it has the weights mapped"
        sampler.kill()
        began_s = time.monotonic()
        _, alive = psutil.wait_procs(below, timeout=GONE_WITHIN_S)
        assert not alive, f"after {time.monotonic() - began_s} s"
        assert launcher.stdout is not None
        output = launcher.stdout.read()
        assert launcher.wait(timeout=60) == 0, output + logs(run_dir)
    assert "sampler 0 restarts, sampler_died: it was killed by SIGKILL" in output
    judged = judge(run_dir)
    assert judged.events["restarted"] > 0
    assert len(judged.trained) == 20 * 4
    assert [path for path in shared if path.exists()] == []
    assert litter(temporary) == []


def test_no_engine_outlives_a_killed_launcher_and_a_sweep_takes_the_rest(
    tmp_path: Path, temporary: Path
) -> None:
    run_dir = tmp_path / "run"
    with running(run_dir, "--steps", "1000") as launcher:
        wait_for_line(launcher, "step 1/")
        run_id = run_id_of(run_dir)
        engine = engine_of(sampler_of(run_id))
        shared = shared_files_of(engine)
        launcher.kill()
        until(lambda: processes_of(run_id) == [], "the end of the children", GONE_WITHIN_S)
        _, alive = psutil.wait_procs([engine], timeout=GONE_WITHIN_S)
        assert not alive
    assert [path for path in traces_of_runs() if run_id in path.name], "nobody was there to sweep"
    assert sweep_dead_runs() == 1
    assert [path for path in shared if path.exists()] == []
    assert litter(temporary) == []


def test_kept_caches_are_counted_apart_over_a_whole_run(tmp_path: Path, temporary: Path) -> None:
    """Tokens on older keys stand in their own row; those on their own version's still agree."""
    run_dir = tmp_path / "run"
    done = launch(
        run_dir,
        *(*SMALL, "--steps", "12", "--sampling.kv-after-update", "keep"),
        *("--pipeline-depth", "2", "--sampling.max-concurrent-rollouts", "16"),
        timeout_s=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs(run_dir)
    judged = judge(run_dir)
    assert len(judged.trained) == 12 * 4
    mixed = [row for row in train_rows(run_dir) if row["mismatch/num_tokens_older_kv"]]
    assert mixed, "no update came into a generation"
    same = [row["mismatch/kl_same_version"] for row in train_rows(run_dir)]
    assert max(abs(kl) for kl in same if kl is not None) < 1e-6
    assert max(row["mismatch/kl_older_kv"] for row in mixed) > 1e-6
    assert litter(temporary) == []


BREAK_VLLM = """
from asyncrl_node.engines import vllm_plugin

vllm_plugin.WORKER_EXTENSION = "tests.engines.BROKEN"
"""


@pytest.mark.parametrize(
    ("worker", "version", "story"),
    [
        pytest.param(
            *("stale_head.StaleHeadWorker", 0, "differ from the learner's"),
            marks=pytest.mark.slow,  # tests/engines has it too
        ),
        ("stale_decode.StaleDecodeWorker", 1, "it decodes otherwise than it scores"),
    ],
)
def test_case_16_a_head_left_stale_is_caught_at_the_first_load_it_spoils(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, version: int, story: str
) -> None:
    """The first is vLLM's own fault without our remedy; Python reads sitecustomize.py itself."""
    run_dir = tmp_path / "run"
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(BREAK_VLLM.replace("BROKEN", worker))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), str(ROOT)]))
    with running(run_dir, "--steps", "40") as launcher:
        assert launcher.stdout is not None
        warned = next(line for line in launcher.stdout if line.startswith("warning:"))
        launcher.send_signal(signal.SIGINT)
        output = launcher.stdout.read()
        assert launcher.wait(timeout=60) == 130, output + logs(run_dir)
    assert warned.startswith("warning: sampler 0 restarts, stale_weights: sampler 0 has the")
    assert f"the bytes of version {version} " in warned
    assert story in warned
    if version == 0:
        assert not trained(run_dir), "nothing that it sampled is trained"
