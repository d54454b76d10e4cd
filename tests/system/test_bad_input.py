"""Bad input: one line `error: KEY: rule (got VALUE)`, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_node.cli import config_keys, parse_command_line
from asyncrl_node.config import Config
from asyncrl_node.errors import ConfigError
from asyncrl_node.loss_rules import other_kind
from asyncrl_node.plan import WARM_MODEL, check_config, check_run_dir, describe, weight_bytes
from tests.system.runs import LAUNCH, ROOT, launch, rows

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LINE = re.compile(r"error: (?P<key>[^:]+): (?P<rule>.+) \(got (?P<value>.*)\)\n")


def refused(run_dir: Path, *flags: str) -> re.Match[str]:
    """Launch, also with --dry-run in the flags; expect one line. Returns its parts."""
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
        (("--loss", "magic"), "learner.loss", "must be one of a3po, cispo", "magic"),
        (("--loss", "no/my.py:f"), "learner.loss", "a file that exists", "no/my.py:f"),
        (("--learner.advantage", "median"), "learner.advantage", "one of mean_std", "median"),
        (
            ("--loss", "m2po", "--num-minibatches", "2"),
            "learner.num_minibatches",
            "must be 1 with m2po: its clip range comes from",
            "2",
        ),
        (
            ("--loss", "decoupled_ppo", "--num-substeps", "2", "--streaming"),
            "pacing.streaming",
            "must be off with decoupled_ppo and num_substeps > 1",
            "true",
        ),
        (
            ("--pacing.fixed-staleness", "--streaming"),
            "pacing.streaming",
            "must be off with fixed_staleness: nothing is taken before everything",
            "true",
        ),
        (("--learner.dual-clip", "1.2"), "learner.dual_clip", "must be above 1 + clip_high", "1.2"),
        (("--learner.weight-low", "6"), "learner.weight_low", "must be at most weight_high", "6.0"),
        (("--learner.ratio-floor", "3"), "learner.ratio_floor", "must be at most ratio_cap", "3.0"),
        (("--learner.kl-estimator", "k4"), "learner.kl_estimator", "invalid enum value", "k4"),
        (
            ("--learner.kl-coefficient", "0.1", "--learner.reference-model", "/no/such"),
            "learner.reference_model",
            "must be a folder that exists",
            "/no/such",
        ),
        (("--num-substeps", "3"), "pacing.groups_per_batch", "must be a multiple", "32"),
        (("--gpus", "8"), "engine", "vllm is not installed: pip install", "auto"),
        (("--engine", "torch", "--gpus", "99"), "gpus", "must be at most the GPUs", "99"),
        (("--engine", "fake", "--fake.latencies", "/no"), "fake.latencies", "readable file", "/no"),
        (("--resume", "/no/run"), "resume", "", "/no/run"),
        (("no_such_file.toml",), "config", "must be a readable file", "no_such_file.toml"),
        (("--eval-problems", "999999"), "eval_problems", "must be at most", "999999"),
        (("--fake.raise-rate", "nan", "--dry-run"), "fake.raise_rate", "in [0, 1]", "nan"),
        (("--samplers", "1025"), "samplers", "must be at most 1024", "1025"),
        (("--gpus", "abc", "--dry-run"), "gpus", "must be a count", "abc"),
        (("--transport", "cuda_ipc"), "transport", "must be auto or host without GPUs", "cuda_ipc"),
        (("--transport", "nccl"), "transport", "invalid enum value", "nccl"),
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


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"model_type": "llama"}, "of the model's kind: its model_type is llama, and the model's"),
        ({"vocab_size": 47}, "of the model's kind: its vocab_size is 47, and the model's 46"),
        ({"vocab_size": "many"}, "vocab_size must be at least 46, and is many"),
        ({"model_type": "gpt2"}, "must have a model_type of qwen3"),
        ({"max_position_embeddings": 5}, "must leave rollouts of at most 5 tokens"),
    ],
)
def test_a_reference_of_another_kind_is_refused(
    tmp_path: Path, change: dict[str, object], rule: str
) -> None:
    folder = tmp_path / "reference"
    shutil.copytree(WARM_MODEL, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | change))
    error = reference_error(folder)
    assert rule in error.rule
    assert error.key == "learner.reference_model"


def reference_error(folder: Path) -> ConfigError:
    return error_of(
        *("--engine", "torch", "--learner.kl-coefficient", "0.1"),
        *("--learner.reference-model", str(folder)),
    )


def test_a_reference_with_other_tokens_is_refused(tmp_path: Path) -> None:
    """Where a task does not look at the tokenizer itself, the two are compared."""
    folder = tmp_path / "reference"
    shutil.copytree(WARM_MODEL, folder)
    flags = ("--engine", "torch", "--learner.reference-model", str(folder))
    accept(*flags, "--learner.kl-coefficient", "0.1")
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    words = fields["model"]["vocab"]
    words["3"], words["4"] = words["4"], words["3"]
    path.write_text(json.dumps(fields))
    assert other_kind(WARM_MODEL, folder) == "its tokenizer has other tokens"
    assert reference_error(folder).key == "learner.reference_model"
    accept(*flags)  # nobody asks it
    for content in (None, "not JSON", "{}"):
        path.unlink() if content is None else path.write_text(content)
        assert other_kind(WARM_MODEL, folder) is None


# -- ranges --------------------------------------------------------------------------------------


def error_of(*flags: str) -> ConfigError:
    """The error of check_config, which is what the launcher prints."""
    with pytest.raises(ConfigError) as caught:
        check_config(parse_command_line(["--engine", "fake", "--run-dir", "here", *flags]).config)
    assert re.fullmatch(r"[^:]+: .+ \(got .*\)", str(caught.value))
    return caught.value


def accept(*flags: str) -> None:
    check_config(parse_command_line(["--engine", "fake", "--run-dir", "here", *flags]).config)


def keys_of(kind: type) -> list[str]:
    return [k.name for k in config_keys() if kind in (k.type, *getattr(k.type, "__args__", ()))]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1e-9"])
@pytest.mark.parametrize("key", keys_of(float))
def test_no_number_is_infinite_or_negative(key: str, value: str) -> None:
    assert error_of(f"--{key.replace('_', '-')}={value}").key == key


INTEGERS = sorted({*keys_of(int)} - {"fake.raise_problems", "fake.hang_problems"})


@pytest.mark.parametrize("key", INTEGERS)
def test_no_count_is_negative(key: str) -> None:
    assert error_of(f"--{key.replace('_', '-')}=-1").key == key


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("learner.adam_beta1", "1", "must be in [0, 1)"),
        ("learner.adam_beta2", "1.5", "must be in [0, 1)"),
        ("learner.clip_low", "1.01", "must be in [0, 1]"),
        ("fake.raise_rate", "1.01", "must be in [0, 1]"),
        ("fake.constant_share", "2", "must be in [0, 1]"),
        ("learner.parity_limit", "0", "must be a number above 0"),
        ("learner.parity_mean_limit", "-1", "must be a number above 0"),
        ("learner.probe_limit", "inf", "must be a number above 0"),
        ("samplers", "0", "must be at least 1"),
        ("samplers", "1025", "must be at most 1024"),
        ("steps", "2147483648", "start_version + steps must be at most 2147483647"),
        ("pacing.groups_per_batch", "625001", "must be at most 10000000, and is 10000016"),
    ],
)
def test_ranges_have_ends(key: str, value: str, rule: str) -> None:
    error = error_of(f"--{key.replace('_', '-')}={value}")
    assert (error.key, error.value) == (key, float(value))
    assert rule in error.rule


def test_the_ends_of_ranges_that_belong_to_them() -> None:
    accept("--learner.adam-beta1", "0", "--learner.adam-beta2", "0.999999")
    accept("--learner.clip-low", "1", "--learner.clip-high", "0", "--learner.warmup-steps", "0")
    accept("--learner.clip-low", "0", "--learner.clip-high", "1e9", "--learner.weight-decay", "0")
    accept("--fake.raise-rate", "1", "--fake.constant-share", "0", "--fake.load-s", "0")
    accept("--learner.parity-limit", "none", "--samplers", "1024", "--epochs", "1")
    accept("--logging.num-logged-rollouts", "0", "--groups-per-batch", "625000")


@pytest.mark.parametrize(
    "gpus",
    ["abc", "-1", "0", "00", "1.5", "99999", ",", "3,,4", "0,x", " ", "GPU-", "GPU-xyz", "0,0",
     "MIG-1", "\u00b2", "1e3", ""],
)  # fmt: skip
def test_gpus_that_cannot_be_read(gpus: str) -> None:
    error = error_of(f"--gpus={gpus}")
    assert (error.key, error.value) == ("gpus", gpus)


@pytest.mark.parametrize("gpus", ["1", "8", "3,", "0,3", "0, 3", "GPU-8932f937,GPU-1b"])
def test_gpus_that_can_be_read(gpus: str) -> None:
    accept(f"--gpus={gpus}")


# -- paths and files -----------------------------------------------------------------------------


@pytest.mark.parametrize("run_dir", ["x" * 300, "a\0b"])
def test_a_run_directory_that_cannot_be_one(run_dir: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run_dir(Config(run_dir=run_dir))
    assert caught.value.key == "run_dir"


def test_a_model_folder_that_cannot_be_one() -> None:
    assert error_of("--engine", "torch", "--model", "x" * 300).key == "model"


def test_a_flag_that_is_not_text(tmp_path: Path) -> None:
    done = subprocess.run(
        [*map(os.fsencode, LAUNCH), b"--run-dir", b"\xff", b"--engine", b"fake"],
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == b"error: run_dir: must be UTF-8 text (got '\\udcff')\n"


@pytest.mark.parametrize("content", ["x = " + "[" * 100_000, "steps = " + "9" * 5000])
def test_toml_that_is_too_much(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(content)
    assert error_of(str(path)).key == "config"


# -- the model folder ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo's model, to be damaged."""
    return Path(shutil.copytree(WARM_MODEL, tmp_path / "model"))


def model_error(folder: Path) -> ConfigError:
    error = error_of("--engine", "torch", "--model", str(folder))
    assert error.key == "model"
    return error


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_copy_of_the_model_is_accepted(folder: Path) -> None:
    accept("--engine", "torch", "--model", str(folder))
    assert weight_bytes(Config(model=str(folder))) == 220_064 * 4


def test_a_weird_model_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert refused(tmp_path / "run", "--model", str(folder))["rule"] == "must hold a config.json"
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "safetensors" in refused(tmp_path / "run", "--model", str(folder))["rule"]


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_truncated_weights_are_one_line(
    tmp_path: Path, folder: Path, more: tuple[str, ...]
) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    match = refused(tmp_path / "run", "--model", str(folder), *more)
    assert match["key"] == "model"
    assert match["rule"].startswith("must hold readable safetensors: ")
    assert match["value"] == str(path)


def with_header(header: bytes, weights: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + weights


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1",
        b"\xff" * 64,
        b"not safetensors at all, but long enough",
        with_header(b"[]"),
        with_header(b"\xff\xff"),
        with_header(b"[" * 100_000),
        with_header(b"{}"),
        with_header(b'{"__metadata__": {"dtype": "F32"}}'),
        with_header(b'{"a": 1}'),
        with_header(b'{"a": {"dtype": "F32"}}'),
        with_header(b'{"a": {"dtype": "F32", "data_offsets": ["x", 1]}}'),
        with_header(b'{"a": {"dtype": "F32", "data_offsets": [4, 0]}}'),
        with_header(b'{"a": {"dtype": "F32", "data_offsets": [-4, 0]}}'),
        with_header(b'{"a": {"dtype": "F32", "data_offsets": [0, 8]}}', bytes(4)),
        with_header(b'{"a": {"dtype": "F32", "data_offsets": [0, 4]}}', bytes(8)),
    ],
)
def test_damaged_weights(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert model_error(folder).rule.startswith("must hold readable safetensors: ")


@given(content=st.binary(max_size=200), honest=st.booleans())
def test_no_weights_can_do_more_than_be_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, honest: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-bytes"
    folder.mkdir(exist_ok=True)
    (folder / "a.safetensors").write_bytes(with_header(content) if honest else content)
    with pytest.raises(ConfigError, match="must hold readable safetensors"):
        weight_bytes(Config(model=str(folder)))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"model_type": 3}', "[" * 100_000])
def test_a_config_json_that_is_not_one(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    error = model_error(folder)
    assert error.rule.startswith("must hold a config.json that is JSON: ")
    assert error.value == folder


@pytest.mark.parametrize("kind", ["gpt2", "", "qwen3_moe"])
def test_a_model_of_another_type(tmp_path: Path, folder: Path, kind: str) -> None:
    change_json(folder / "config.json", model_type=kind)
    error = model_error(folder)
    assert "model_type of qwen3, qwen2, llama" in error.rule
    assert error.value == kind


def test_another_type_is_refused_by_a_dry_run_too(tmp_path: Path, folder: Path) -> None:
    change_json(folder / "config.json", model_type="gpt2")
    match = refused(tmp_path / "run", "--model", str(folder), "--dry-run")
    assert (match["key"], match["value"]) == ("model", "gpt2")


def test_a_model_that_does_not_fit_the_task(tmp_path: Path, folder: Path) -> None:
    """A random Qwen3 with 500 tokens: without a tokenizer nobody can say what they mean."""
    change_json(folder / "config.json", vocab_size=500)
    (folder / "tokenizer.json").unlink()
    match = refused(tmp_path / "run", "--model", str(folder))
    assert match["rule"] == (
        "must fit task sort_digits: tokenizer.json must be readable: No such file or directory"
    )
    assert match["value"] == str(folder)


def another_vocabulary(path: Path) -> None:
    model = json.loads(path.read_text())["model"]
    model["vocab"]["0"], model["vocab"]["1"] = model["vocab"]["1"], model["vocab"]["0"]
    change_json(path, model=model)


def one_more_symbol(path: Path) -> None:
    added = json.loads(path.read_text())["added_tokens"]
    change_json(path, added_tokens=[*added, {"content": "<more>", "id": 46}])


@pytest.mark.parametrize(
    "damage",
    [
        another_vocabulary,
        one_more_symbol,
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: change_json(path, model={"vocab": [["a", 0]]}),
        lambda path: change_json(path.with_name("config.json"), vocab_size=45),
        lambda path: change_json(path.with_name("config.json"), vocab_size="many"),
    ],
)
def test_a_tokenizer_that_is_not_the_task_s(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / "tokenizer.json")
    assert model_error(folder).rule.startswith("must fit task sort_digits: ")


# -- dry run -------------------------------------------------------------------------------------


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
    assert "would stop  error: " in done.stdout


def test_dry_run_says_what_would_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    flags = ("--engine", "fake", "--fake.tokens-per-rollout", "100000000")
    done = launch(tmp_path, "--dry-run", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    stops = [line for line in done.stdout.splitlines() if line.startswith("would stop  ")]
    assert len(stops) == 2
    for line, key in zip(stops, ("run_dir", "pacing.groups_per_batch"), strict=True):
        real = LINE.fullmatch(line.removeprefix("would stop  ") + "\n")
        assert real is not None
        assert real["key"] == key
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_dry_run_of_a_run_that_would_start_says_nothing_of_stopping(tmp_path: Path) -> None:
    config = msgspec.structs.replace(Config(), run_dir=str(tmp_path / "run"))
    assert "would stop" not in describe(config)


def test_an_unclipped_loss_on_stale_data_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path / "run", "--dry-run", "--loss", "importance_sampling")
    assert "no two-sided trust region" in done.stdout
    done = launch(
        tmp_path / "run", "--dry-run", "--loss", "importance_sampling", "--pipeline-depth", "0"
    )
    assert "no two-sided trust region" not in done.stdout


# -- signals and pipes ---------------------------------------------------------------------------


def catches(pid: int, number: int) -> bool:
    """Does the process have a handler of its own for a signal?"""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"SigCgt:\s*([0-9a-f]+)", status)
    assert match is not None
    return bool(int(match[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2, 0.4])
def test_ctrl_c_at_any_time_of_the_start_is_silent(
    tmp_path: Path, after_s: float, number: int
) -> None:
    """The clock starts at the first line of launch.py: before it the interpreter is Python's own,
    which has a handler for SIGINT but never one for SIGTERM."""
    command = [*LAUNCH, "--run-dir", str(tmp_path / "run"), "--engine", "fake", "--steps", "1000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        while not catches(process.pid, signal.SIGTERM):
            assert process.poll() is None
        time.sleep(after_s)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (130, "")


SHORT_RUN = ("--engine", "fake", "--steps", "6", "--eval-problems", "0", "--fake.train-s", "0.05")


def check_whole(run_dir: Path) -> None:
    steps = [row["step"] for row in rows(run_dir / "metrics.jsonl") if row["kind"] == "train"]
    assert steps == list(range(6))


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    """As `launch.py ... | head -1`."""
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        [*LAUNCH, "--run-dir", str(run_dir), *SHORT_RUN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"run directory {run_dir}\n".encode()
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    check_whole(run_dir)


def test_a_full_disk_under_the_output_does_not_end_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*LAUNCH, "--run-dir", str(run_dir), *SHORT_RUN],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            cwd=ROOT,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
    check_whole(run_dir)
