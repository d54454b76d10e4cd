"""Tests that need vLLM: skipped with the install line for a newcomer, failed without it in CI."""

from __future__ import annotations

from asyncrl_node.engines.vllm_start import CPU_INSTALL
from tests.optional_package import need_package


def need_vllm() -> None:
    """Call it first in a module that imports vLLM, or in the fixture that starts it."""
    need_package("vllm", CPU_INSTALL)
