"""Sampler and learner under the same weights, in both types: the demo's model and its own prompts.

The mean is what tells a sound sampler; in bfloat16 some single token is always far.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from asyncrl_node.config import LearnerConfig
from asyncrl_node.dtype_rules import DEFAULT_LIMITS, DType
from asyncrl_node.learner.trainer import Trainer
from asyncrl_node.plan import WARM_MODEL
from asyncrl_node.tasks.registry import load_task
from perf.parity import compare, make_engine
from tests.system.runs import ROOT
from tests.vllm_gate import need_vllm


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_engine_is_within_the_limits(dtype: DType) -> None:
    limits = DEFAULT_LIMITS[dtype]
    assert limits.parity_mean is not None
    assert limits.probe is not None
    trainer = Trainer(LearnerConfig(), WARM_MODEL, 1.0, 0, dtype=dtype)
    engine = make_engine("torch", WARM_MODEL, dtype)
    (apart, _), (canary, _) = asyncio.run(
        compare(engine, trainer, load_task("sort_digits", 0, WARM_MODEL), 64)
    )
    engine.close()
    assert len(apart) > 300
    assert apart.mean() <= limits.parity_mean
    assert apart.max() <= (5e-5 if dtype == "float32" else 1.0)
    assert 0 < canary.max() <= limits.probe


@pytest.mark.vllm
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("dtype", "largest", "mean"),
    [
        pytest.param("float32", 5e-5, 5e-5, marks=pytest.mark.slow),  # as tests/engines have it
        ("bfloat16", 1.0, 0.03),
    ],
)
def test_vllm_is_within_the_limits(dtype: str, largest: float, mean: float) -> None:
    """In a process of its own: vLLM keeps one engine a process."""
    need_vllm()
    flags = ["--model", str(WARM_MODEL), "--task", "sort_digits", "--engine", "vllm"]
    command = [sys.executable, "perf/parity.py", *flags, "--dtype", dtype]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ, timeout=200
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "canary" in line]
    figures = [float(part.split()[-1]) for part in line.replace(";", ",").split(",")[4:]]
    assert len(figures) == 7, line
    assert figures[0] <= largest
    assert figures[2] <= mean
    assert figures[5] <= (5e-5 if dtype == "float32" else 0.15)
