"""A whole run with vLLM samplers on a CPU: updates in the middle of generations, judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.judge import judge
from tests.system.runs import launch, logs
from tests.vllm_gate import need_vllm

need_vllm()

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("nothing_left_behind")]


def test_two_vllm_samplers_train_the_demo_with_updates_in_generation(tmp_path: Path) -> None:
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
