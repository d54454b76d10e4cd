"""Bad input: one line `error: KEY: rule (got VALUE)`, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.runs import ROOT, launch

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LINE = re.compile(r"error: (?P<key>[^:]+): (?P<rule>.+) \(got (?P<value>.*)\)\n")


def refused(run_dir: Path, *flags: str) -> re.Match[str]:
    """Launch; expect one line and nothing else. Returns its parts."""
    done = launch(run_dir, *flags, timeout_s=30)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    match = LINE.fullmatch(done.stderr)
    assert match is not None, done.stderr
    return match


@pytest.mark.parametrize(
    ("flags", "key", "rule", "value"),
    [
        (("--model", "/no/such"), "model", "must be a folder that exists", "/no/such"),
        (("--task", "knitting"), "task", "must be one of sort_digits", "knitting"),
        (
            ("--pipeline-depth", "9"),
            "pacing.pipeline_depth",
            "must be at most max_steps_off_policy, which is 8",
            "9",
        ),
        (("--group-size", "1"), "pacing.group_size", "must be at least 2", "1"),
        (("--steps", "0"), "steps", "must be at least 1", "0"),
        (("--steps", "many"), "steps", "expected `int`", "many"),
        (("--learning-rate", "nan"), "learner.learning_rate", "must be a number above 0", "nan"),
        (("--no-such-flag", "1"), "--no-such-flag", "unknown flag", "1"),
        (("--loss", "magic"), "learner.loss", "invalid enum value", "magic"),
        (("--num-substeps", "3"), "pacing.groups_per_batch", "must be a multiple", "32"),
        (("--gpus", "8"), "engine", "vllm is not installed: pip install", "auto"),
        (("--engine", "torch", "--gpus", "99"), "gpus", "must be at most the GPUs", "99"),
        (("--engine", "fake", "--fake.latencies", "/no"), "fake.latencies", "readable file", "/no"),
        (("--resume", "/no/run"), "resume", "", "/no/run"),
        (("no_such_file.toml",), "config", "must be a readable file", "no_such_file.toml"),
        (("--eval-problems", "999999"), "eval_problems", "must be at most", "999999"),
    ],
)
def test_one_line_names_key_rule_and_value(
    tmp_path: Path, flags: tuple[str, ...], key: str, rule: str, value: str
) -> None:
    match = refused(tmp_path / "run", *flags)
    assert match["key"] == key
    assert rule in match["rule"]
    assert match["value"] == value
    assert not (tmp_path / "run").exists()


def test_an_unknown_key_of_the_file_is_named_with_its_section(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[pacing]\ngroups_per_bach = 4\n")
    match = refused(tmp_path / "run", str(path))
    assert match["key"] == "pacing.groups_per_bach"
    assert match["rule"] == "unknown key"
    assert match["value"] == "4"


def test_broken_toml(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[pacing\n")
    assert refused(tmp_path / "run", str(path))["key"] == "config"


def test_a_busy_run_directory_is_refused_and_untouched(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("precious\n")
    match = refused(run_dir, "--engine", "fake")
    assert match["key"] == "run_dir"
    assert [p.read_text() for p in run_dir.iterdir()] == ["precious\n"]


def test_a_run_directory_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("")
    assert refused(path, "--engine", "fake")["rule"] == "must be a directory"
    assert refused(path / "below", "--engine", "fake")["key"] == "run_dir"


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights to meet a forbidden folder")
def test_no_permission_to_write(tmp_path: Path) -> None:
    """Root may write anywhere, so the launcher is run as nobody here."""
    code = (
        "import os, sys; from asyncrl_node.plan import check_run_dir; "
        "from asyncrl_node.config import Config; from asyncrl_node.errors import ConfigError; "
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: check_run_dir(Config(run_dir=sys.argv[1]))\n"
        "except ConfigError as error: print(error)"
    )
    tmp_path.chmod(0o755)
    for parent in (tmp_path, *tmp_path.parents):
        if parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert "must be a writable directory" in done.stdout, done.stderr


def test_too_little_shared_memory_names_the_flag_that_helps(tmp_path: Path) -> None:
    match = refused(
        tmp_path / "run",
        *("--engine", "fake", "--fake.tokens-per-rollout", "100000000"),
    )
    assert "docker run --shm-size=" in match["rule"]


def test_a_weird_model_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert refused(tmp_path / "run", "--model", str(folder))["rule"] == "must hold a config.json"
    (folder / "config.json").write_text(json.dumps({}))
    assert "safetensors" in refused(tmp_path / "run", "--model", str(folder))["rule"]


def test_dry_run_says_what_the_settings_mean_and_starts_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = launch(run_dir, "--dry-run", "--max-steps-off-policy", "3", "--groups-per-batch", "16")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert (
        "each group is trained at most 3 steps after the weights that started it; typically 1"
        in words
    )
    assert "16 groups x 8 rollouts = 128 rollouts a step" in words
    assert "/dev/shm 32 slots" in words
    assert not run_dir.exists()


def test_dry_run_plans_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    done = launch(tmp_path / "run", "--dry-run", "--gpus", "8")
    assert done.returncode == 0, done.stderr
    assert "8 GPUs" in done.stdout


def test_an_unclipped_loss_on_stale_data_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path / "run", "--dry-run", "--loss", "importance_sampling")
    assert "no two-sided trust region" in done.stdout
    done = launch(
        tmp_path / "run", "--dry-run", "--loss", "importance_sampling", "--pipeline-depth", "0"
    )
    assert "no two-sided trust region" not in done.stdout
