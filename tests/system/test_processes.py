"""Processes as such: weight faults, names, starting by hand."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from asyncrl_node.config import Config, FakeConfig, PacingConfig
from asyncrl_node.config_file import encode_config
from asyncrl_node.plan import run_slot_bytes, task_of
from asyncrl_node.run_directory import RunDirectory, left_behind, new_runtime, sweep
from tests.system.judge import judge
from tests.system.runs import ROOT, fake_run, launch, logs, trained

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_an_overdue_weight_load_is_a_named_fault(tmp_path: Path) -> None:
    """Loading takes longer than allowed, on every incarnation: a crash loop, named."""
    run_dir = tmp_path / "run"
    done = launch(
        run_dir,
        *("--engine", "fake", "--eval-problems", "0", "--steps", "5"),
        *("--fake.load-s", "1.5", "--weights-overdue-s", "0.2"),
    )
    assert done.returncode == 3, done.stdout + logs(run_dir)
    ended = "stopped: crash_loop: sampler 0 ended 4 times in 10 minutes, the last time by "
    assert f"{ended}weights_overdue" in done.stderr
    assert "began loading version 0" in done.stderr


@pytest.mark.parametrize(
    ("key", "start", "steps", "story"),
    [
        ("--fake.stale-after-version", 0, 6, "they are those of version 4"),
        ("--fake.decode-stale-after-version", 4, 3, "it decodes otherwise than it scores"),
    ],
)
def test_case_16_weights_that_never_arrive_restart_the_sampler(
    tmp_path: Path, key: str, start: int, steps: int, story: str
) -> None:
    """Case 16: each process computes with its first weights for ever; two steps have a second.

    The tokens of the fake engine are versions: none of a stale update is trained.
    """
    run_dir = tmp_path / "run"
    done = launch(
        run_dir,
        *("--engine", "fake", "--eval-problems", "0", "--groups-per-batch", "4"),
        *("--start-version", str(start), "--steps", str(steps), key, "4"),
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs(run_dir)
    warned = [line for line in done.stdout.splitlines() if "stale_weights" in line]
    assert warned[0].startswith("warning: sampler 0 restarts, stale_weights: sampler 0 has the")
    assert story in warned[0]
    judged = judge(run_dir)
    assert len(judged.trained) == steps * 4


def test_case_16_weights_that_never_arrive_again_and_again_end_the_run_by_name(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    done = launch(
        run_dir,
        *("--engine", "fake", "--eval-problems", "0", "--steps", "40", "--groups-per-batch", "4"),
        *("--fake.stale-after-version", "0"),
    )
    assert done.returncode == 3, done.stdout + logs(run_dir)
    ended = "stopped: crash_loop: sampler 0 ended 4 times in 10 minutes, the last time by "
    assert f"{ended}stale_weights" in done.stderr
    assert "learner.probe_limit" in done.stderr


def test_fixed_staleness_is_the_depth_in_what_is_trained(tmp_path: Path) -> None:
    """Latencies from a hundredth of a second to half a one; two samplers."""
    run_dir = tmp_path / "run"
    latencies = tmp_path / "latencies.json"
    latencies.write_text("[0.5, 0.01, 0.03, 0.01, 0.1]")
    fake_run(
        run_dir,
        *("--steps", "10", "--groups-per-batch", "4", "--group-size", "2", "--samplers", "2"),
        *("--pipeline-depth", "3", "--max-steps-off-policy", "5", "--fake.train-s", "0.01"),
        *("--pacing.fixed-staleness", "true", "--fake.latencies", str(latencies)),
    )
    judged = judge(run_dir)
    stale = [(row["step"], row["step"] - row["version_min"]) for row in judged.trained]
    assert stale == [(step, min(step, 3)) for step in range(10) for _ in range(4)]


def test_a_slow_rollout_is_never_at_fault(tmp_path: Path) -> None:
    """Rollouts ten times longer than the weight deadline, with weights swapped inside them."""
    run_dir = tmp_path / "run"
    latencies = tmp_path / "latencies.json"
    latencies.write_text("[2.0, 0.01, 0.01, 0.01]")
    fake_run(
        run_dir,
        *("--weights-overdue-s", "0.2", "--fake.latencies", str(latencies), "--steps", "12"),
        *("--groups-per-batch", "4", "--pipeline-depth", "4", "--group-size", "2"),
    )
    judged = judge(run_dir)
    assert judged.events["restarted"] == 0
    assert any(row["version_max"] > row["version_min"] for row in judged.trained)


def test_every_process_starts_by_hand(tmp_path: Path) -> None:
    """No launcher: three commands, a config.toml and a runtime.json."""
    config = Config(
        run_dir=str(tmp_path / "run"),
        steps=4,
        engine="fake",
        eval_problems=0,
        pacing=PacingConfig(groups_per_batch=4),
        fake=FakeConfig(train_s=0.01),
    )
    directory = RunDirectory(Path(config.run_dir))
    directory.create()
    directory.config.write_bytes(encode_config(config))
    runtime = new_runtime(run_slot_bytes(config, task_of(config)))
    directory.write_runtime(runtime)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"asyncrl_node.{role}", "--run-dir", str(directory.path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        for role in ("sampler", "learner", "scheduler")
    ]
    try:
        assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert Counter(row["step"] for row in trained(directory.path)) == Counter(
        dict.fromkeys(range(4), 4)
    )
    # The processes removed their own slots and buffer; the sockets are the launcher's to sweep.
    assert {path.name for path in left_behind(runtime) if path.parent == Path("/dev/shm")} == set()
    sweep(runtime)


def test_a_config_round_trips_through_its_file(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fake_run(run_dir, "--steps", "2", "--groups-per-batch", "4", "--max-steps-off-policy", "none")
    again = tmp_path / "again"
    done = launch(again, str(run_dir / "config.toml"))
    assert done.returncode == 0, done.stderr
    first, second = ((d / "config.toml").read_text() for d in (run_dir, again))
    assert second == first.replace(str(run_dir), str(again))
    assert msgspec.toml.decode(first)["pacing"]["max_steps_off_policy"] == "none"
