"""Real processes, sockets, slots, weights and scheduler; only the model is scripted."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.system.runs import (
    ROOT,
    fake_run,
    kill,
    launch,
    logs,
    processes_of,
    rows,
    train_rows,
    trained,
)

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def verify(run_dir: Path) -> dict[str, object]:
    command = [sys.executable, "-m", "asyncrl_node", "verify", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    verdict: dict[str, object] = json.loads(done.stdout)
    assert done.returncode == (0 if verdict["ok"] else 1)
    return verdict


def stragglers(tmp_path: Path, slow_s: float = 0.5, fast_s: float = 0.01) -> str:
    path = tmp_path / "latencies.json"
    path.write_text(json.dumps([slow_s if i % 4 == 0 else fast_s for i in range(64)]))
    return str(path)


def test_two_samplers_train_each_problem_once_within_the_bound(tmp_path: Path) -> None:
    """The issue's own words: 2 samplers + 1 learner, judged from trained.jsonl alone."""
    run_dir = tmp_path / "run"
    fake_run(
        run_dir,
        *("--samplers", "2", "--steps", "100", "--epochs", "1", "--fake.num-problems", "64"),
        *("--groups-per-batch", "4", "--group-size", "4", "--pipeline-depth", "2"),
        *("--max-steps-off-policy", "3", "--fake.latencies", stragglers(tmp_path)),
    )
    records = trained(run_dir)
    assert Counter(row["problem"] for row in records) == Counter(range(64))
    assert all(0 <= row["step"] - row["version_min"] <= 3 for row in records)
    assert max(row["step"] - row["version_min"] for row in records) > 1
    assert Counter(row["step"] for row in records) == Counter(dict.fromkeys(range(16), 4))
    assert {row["num_rollouts"] for row in records} == {4}
    verdict = verify(run_dir)
    assert verdict["ok"] is True
    assert verdict["trained"] == verdict["problems"] == 64


def test_the_last_step_is_short_when_the_data_ends(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fake_run(run_dir, "--epochs", "1", "--fake.num-problems", "10", "--groups-per-batch", "4")
    assert Counter(row["step"] for row in trained(run_dir)) == Counter({0: 4, 1: 4, 2: 2})
    assert verify(run_dir)["ok"] is True


def test_fixed_staleness_is_exact_although_groups_are_filtered(tmp_path: Path) -> None:
    """No bound, and two samplers with less room than there are slots."""
    run_dir = tmp_path / "run"
    fake_run(
        run_dir,
        *("--pacing.fixed-staleness", "--pipeline-depth", "3", "--max-steps-off-policy", "none"),
        *("--steps", "12", "--groups-per-batch", "4", "--group-size", "4", "--samplers", "2"),
        *("--sampling.max-concurrent-rollouts", "20", "--fake.constant-share", "0.2"),
        *("--pacing.filter-constant-rewards", "--fake.latencies", stragglers(tmp_path, 0.2)),
    )
    records = trained(run_dir)
    assert Counter(row["step"] for row in records) == Counter(dict.fromkeys(range(12), 4))
    assert all(row["version_min"] == row["version_max"] for row in records)
    assert all(row["step"] - row["version_min"] == min(row["step"], 3) for row in records)
    assert any(row["async/filtered_groups"] for row in train_rows(run_dir))
    assert all(row["time/waiting_for_stragglers"] == 0 for row in train_rows(run_dir))
    assert verify(run_dir)["ok"] is True


def test_depth_zero_is_synchronous(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fake_run(run_dir, "--steps", "5", "--max-steps-off-policy", "0", "--groups-per-batch", "4")
    assert all(row["version_min"] == row["version_max"] == row["step"] for row in trained(run_dir))
    assert all(row["time/waiting_for_stragglers"] == 0 for row in train_rows(run_dir))


def test_metrics_say_what_the_records_say(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fake_run(
        run_dir,
        *("--steps", "12", "--groups-per-batch", "4", "--fake.latencies", stragglers(tmp_path)),
        *("--max-steps-off-policy", "2", "--fake.num-problems", "64"),
    )
    records = trained(run_dir)
    metrics = train_rows(run_dir)
    assert [row["step"] for row in metrics] == list(range(12))
    for row in metrics:
        mine = [r for r in records if r["step"] == row["step"]]
        staleness = [r["step"] - r["version_min"] for r in mine]
        assert row["async/staleness_max"] == max(staleness)
        assert row["async/staleness_min"] == min(staleness)
        assert row["async/staleness_mean"] == pytest.approx(sum(staleness) / len(staleness))
        assert row["tokens/trained"] == sum(r["num_tokens"] for r in mine)
        assert row["tokens/sampled"] == row["tokens/trained"]
        assert row["async/outstanding_groups"] == (
            row["async/in_flight_groups"]
            + row["async/completed_buffer_size"]
            + row["async/taken_groups"]
        )
        causes = [v for k, v in row.items() if k.startswith("time/") and k != "time/total"]
        assert sum(causes) == pytest.approx(row["time/total"])
        assert row["time/other"] >= 0


def test_substeps_and_streaming_publish_once_a_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fake_run(
        run_dir,
        *("--steps", "6", "--groups-per-batch", "8", "--num-substeps", "2"),
        *("--num-minibatches", "2", "--streaming"),
    )
    assert Counter(row["step"] for row in trained(run_dir)) == Counter(dict.fromkeys(range(6), 8))
    assert verify(run_dir)["ok"] is True


def test_a_sampler_that_dies_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [
        *(sys.executable, str(ROOT / "launch.py"), "--run-dir", str(run_dir), "--engine", "fake"),
        *("--steps", "30", "--fake.train-s", "0.05", "--eval-problems", "0", "--samplers", "2"),
        *("--groups-per-batch", "4", "--fake.latencies", stragglers(tmp_path)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if line.startswith("step 5/"):
                runtime = json.loads((run_dir / "runtime.json").read_text())
                kill(runtime["run_id"], "sampler-0")
                break
        rest = launcher.stdout.read()
        assert launcher.wait(timeout=60) == 0, rest + logs(run_dir)
    assert "warning: sampler 0 restarts, sampler_died: it was killed by SIGKILL" in rest
    verdict = verify(run_dir)
    assert verdict["ok"] is True
    assert verdict["trained"] == 120
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        (restarted,) = ledger.execute(
            "SELECT count(*) FROM events WHERE event = 'restarted'"
        ).fetchone()
    assert restarted > 0


def test_one_prompt_that_always_raises_is_recorded_as_failed(tmp_path: Path) -> None:
    """Case 7: retried up to the limit, then failed; its slot is free again."""
    run_dir = tmp_path / "run"
    fake_run(
        run_dir,
        *("--epochs", "1", "--fake.num-problems", "12", "--groups-per-batch", "4"),
        *("--fake.raise-problems", "3"),
    )
    assert Counter(row["problem"] for row in trained(run_dir)) == Counter(set(range(12)) - {3})
    verdict = verify(run_dir)
    assert verdict["ok"] is True
    assert (verdict["failed"], verdict["lost"]) == (1, 0)


def test_a_hung_rollout_is_cut_off_graded_and_trained(tmp_path: Path) -> None:
    """Case 9 with a timeout: the partial is trained like any other."""
    run_dir = tmp_path / "run"
    fake_run(
        run_dir,
        *("--epochs", "1", "--fake.num-problems", "12", "--groups-per-batch", "4"),
        *("--fake.hang-problems", "5", "--rollout-timeout-s", "0.5"),
    )
    assert Counter(row["problem"] for row in trained(run_dir)) == Counter(range(12))
    assert sum(row["async/timed_out_rollouts"] for row in train_rows(run_dir)) == 8


def test_a_hung_rollout_without_a_timeout_is_named(tmp_path: Path) -> None:
    """Case 9: 48 problems, B = 4, K = 2, problem 0 hung: the warning names the way out."""
    run_dir = tmp_path / "run"
    done = launch(
        run_dir,
        *("--engine", "fake", "--fake.train-s", "0.01", "--eval-problems", "0", "--epochs", "1"),
        *("--fake.num-problems", "48", "--groups-per-batch", "4", "--max-steps-off-policy", "2"),
        *("--fake.hang-problems", "0", "--warn-every-s", "0.3", "--rollout-timeout-s", "4"),
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning:")]
    assert warnings
    assert "(problem 0) on sampler 0" in warnings[0]
    assert "rollout_timeout_s (now 4 s)" in warnings[0]


def test_evaluation_rows_name_their_versions(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    quick = ("--engine", "fake", "--fake.train-s", "0.01", "--steps", "6", "--eval-every", "3")
    done = launch(run_dir, *quick, "--eval-problems", "8", "--groups-per-batch", "4")
    assert done.returncode == 0, done.stderr
    evals = [row for row in rows(run_dir / "metrics.jsonl") if row["kind"] == "eval"]
    assert [row["step"] for row in evals] == [0, 3, 6]
    assert all(row["eval/reward_mean"] == 0.5 for row in evals)
    assert all(row["eval/num_problems"] == 8 for row in evals)
    assert all(row["eval/version_min"] >= row["step"] for row in evals)
    assert evals[0]["eval/version_max"] == 0
    assert evals[-1]["eval/version_min"] == evals[-1]["eval/version_max"] == 6


def test_a_run_writes_what_the_contract_names(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fake_run(run_dir, "--steps", "4", "--save-every", "2", "--groups-per-batch", "4")
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.toml", "metrics.jsonl", "trained.jsonl", "ledger.sqlite"} <= names
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000004",
    ]
    assert {"scheduler.log", "learner.log", "sampler-0.log"} <= {
        path.name for path in (run_dir / "logs").iterdir()
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in run_dir.glob("*.*"))
    first = trained(run_dir)[0]
    assert set(first) == {
        *("step", "group", "problem", "epoch", "version_min", "version_max"),
        *("num_rollouts", "num_tokens", "run_attempt"),
    }
    wanted = {
        *("step", "reward/mean", "async/staleness_max", "async/staleness_min"),
        *("async/staleness_mean", "async/token_staleness_mean", "async/in_flight_groups"),
        *("async/completed_buffer_size", "async/outstanding_groups", "time/total", "time/train"),
        *("time/publish", "time/waiting_for_fill", "time/waiting_for_stragglers", "time/eval"),
        *("time/checkpoint", "time/other", "tokens/sampled", "tokens/trained"),
        *("tokens/discarded", "mismatch/kl_same_version", "mismatch/kl_stale"),
    }
    assert wanted <= set(train_rows(run_dir)[0])


@pytest.mark.parametrize("process", ["learner", "scheduler"])
def test_losing_the_learner_or_the_scheduler_stops_the_run_by_name(
    tmp_path: Path, process: str
) -> None:
    run_dir = tmp_path / "run"
    command = [
        *(sys.executable, str(ROOT / "launch.py"), "--run-dir", str(run_dir), "--engine", "fake"),
        *("--steps", "1000", "--eval-problems", "0", "--groups-per-batch", "4"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        for line in launcher.stdout:
            if line.startswith("step 2/"):
                break
        run_id = json.loads((run_dir / "runtime.json").read_text())["run_id"]
        kill(run_id, process)
        launcher.stdout.read()
        error = launcher.stderr.read()
        assert launcher.wait(timeout=30) == 3
    assert error.startswith(f"stopped: {process}_died: the {process} was killed by SIGKILL")
    assert processes_of(run_id) == []
