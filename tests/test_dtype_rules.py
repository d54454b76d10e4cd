"""`dtype` and the limits that follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_node.cli import parse_command_line
from asyncrl_node.config import Config, LearnerConfig
from asyncrl_node.config_file import encode_config, read_config
from asyncrl_node.dtype_rules import Limits, dtype_of, limits_of, settled_dtype
from asyncrl_node.errors import ConfigError
from asyncrl_node.plan import check_config, describe, settle, weight_bytes


def parsed(*flags: str) -> Config:
    config = parse_command_line(["--run-dir", "here", *flags]).config
    check_config(config)
    return config


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ((), "float32"),
        (("--dtype", "none"), "float32"),
        (("--gpus", "2"), "bfloat16"),
        (("--gpus", "2", "--dtype", "float32"), "float32"),
        (("--dtype", "bfloat16"), "bfloat16"),
    ],
)
def test_an_unset_dtype_follows_the_gpus(flags: tuple[str, ...], dtype: str) -> None:
    assert dtype_of(parsed(*flags)) == dtype


def test_limits_that_are_not_set_follow_the_dtype() -> None:
    assert limits_of(LearnerConfig(), "float32") == Limits(5e-5, 5e-5, 5e-5)
    assert limits_of(LearnerConfig(), "bfloat16") == Limits(1.0, 0.03, 0.15)


def test_limits_that_are_set_stay_and_none_switches_one_off() -> None:
    flags = ("--learner.parity-limit", "none", "--learner.probe-limit", "0.01")
    limits = limits_of(parsed(*flags, "--dtype", "bfloat16").learner, "bfloat16")
    assert limits == Limits(None, 0.03, 0.01)
    again = limits_of(parsed("--learner.parity-mean-limit", "auto").learner, "float32")
    assert again.parity_mean == 5e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_record_of_a_run_holds_dtype_and_limits_in_figures(tmp_path: Path, dtype: str) -> None:
    settled = settle(parsed("--dtype", dtype, "--learner.probe-limit", "none"))
    path = tmp_path / "config.toml"
    path.write_bytes(encode_config(settled))
    read = read_config(path)
    assert read == settled
    assert read.dtype == dtype
    assert "auto" not in (read.learner.parity_limit, read.learner.parity_mean_limit)
    assert read.learner.probe_limit is None
    assert settled_dtype(read) == read, "settled once, it stays"


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--dtype", "float16"), "dtype"),
        (("--learner.parity-limit", "much"), "learner.parity_limit"),
        (("--learner.parity-limit", "nan"), "learner.parity_limit"),
        (("--learner.parity-mean-limit", "0"), "learner.parity_mean_limit"),
        (("--learner.probe-limit", "inf"), "learner.probe_limit"),
    ],
)
def test_other_values_are_refused_by_name(flags: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(*flags)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_the_forecast_counts_the_bytes_of_the_dtype() -> None:
    single, half = parsed("--dtype", "float32"), parsed("--dtype", "bfloat16")
    assert weight_bytes(single) == 2 * weight_bytes(half) == 4 * 220_064
    assert "learner 3.4 MiB of weights" in describe(single)
    assert "learner 3.8 MiB of weights" in describe(half)
