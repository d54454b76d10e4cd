"""What a process that runs vLLM is given; needs no vLLM."""

from __future__ import annotations

import os

import pytest

from asyncrl_node.engines.vllm_start import ONEDNN_CACHE, vllm_environment

SPEED_AGAINST_MEMORY = [(True, ONEDNN_CACHE, "16"), (False, "TRITON_F32_DEFAULT", "ieee")]


@pytest.mark.parametrize(("cpu", "name", "ours"), SPEED_AGAINST_MEMORY)
def test_a_value_of_the_users_own_stands(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, name: str, ours: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert (os.environ | vllm_environment(cpu, -1))[name] == ours
    monkeypatch.setenv(name, "1024")
    assert (os.environ | vllm_environment(cpu, -1))[name] == "1024"
    assert name not in vllm_environment(not cpu, -1)


def test_threads_and_sockets_are_not_left_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "elsewhere")
    environment = os.environ | vllm_environment(True, 3, "sockets")
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "3"
    assert environment["VLLM_RPC_BASE_PATH"] == "sockets"
