"""The vLLM part of perf/gpu_check.py, on a CPU: the same probe, the same comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.gpu_checks import vllm
from perf.gpu_checks.models import write_random_model
from perf.gpu_checks.outcome import Session
from perf.gpu_checks.vllm_probe import Found, Order
from tests.vllm_gate import need_vllm

EXACT = Found("host", True, [1e-6, 2e-6], [1e-6, 1e-6], 0.3)


@pytest.mark.parametrize(
    "broken",
    [
        Found("host", False, [1e-6, 2e-6], [1e-6, 1e-6], 0.3),
        Found("host", True, [1e-6, 2e-3], [1e-6, 1e-6], 0.3),
        Found("host", True, [1e-6, 2e-6], [1e-6, 1e-3], 0.3),
        Found("host", True, [1e-6, 2e-6], [1e-6, 1e-6], 1e-4),
    ],
    ids=["hash", "a stale graph", "a stale head", "nothing moved"],
)
def test_what_is_stale_fails(broken: Found) -> None:
    assert vllm.judge_exact({"a": EXACT}).status == "PASS"
    assert vllm.judge_exact({"a": EXACT, "b": broken}).status == "FAIL"


def test_the_forecast_grows_with_what_is_in_the_cache(tmp_path: Path) -> None:
    folder = write_random_model("toy", tmp_path, "cpu")
    small = Order("price", str(folder), "cuda", num_requests=8, prompt_tokens=256, new_tokens=64)
    large = Order("price", str(folder), "cuda", num_requests=16, prompt_tokens=256, new_tokens=64)
    short = vllm.forecast_s(folder, small, "NVIDIA H200")
    assert vllm.forecast_s(folder, large, "NVIDIA H200") == pytest.approx(2 * short)
    assert vllm.forecast_s(folder, small, "NVIDIA A100") > 2 * short


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_probe_finds_vllm_and_the_learner_alike(tmp_path: Path) -> None:
    need_vllm()
    outcome = vllm.check_graphs(Session(tmp_path, "cpu"))
    assert outcome.status == "PASS", outcome
    assert outcome.exact
    assert "by host" in outcome.value


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_probe_times_an_update_in_the_middle(tmp_path: Path) -> None:
    need_vllm()
    folder = write_random_model("toy", tmp_path, "cpu")
    order = Order("price", str(folder), "cpu", num_requests=4, prompt_tokens=64, new_tokens=100)
    found = vllm.probe(order)
    assert found.resident_tokens == 4 * 64
    assert 0 < found.stall_s < found.updated_s
    assert found.plain_s > 0
