"""Tests that need vLLM: skipped with the install line for a newcomer, failed without it in CI."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

import pytest

from asyncrl_node.engines.vllm_engine import CPU_INSTALL

REASON = f"vllm is not installed: {CPU_INSTALL}"
REQUIRE = "ASYNCRL_REQUIRE_VLLM"


def verdict(*, installed: bool, required: bool) -> Literal["run", "skip", "fail"]:
    """Say what becomes of tests that need vLLM."""
    if installed:
        return "run"
    return "fail" if required else "skip"


def need_vllm() -> None:
    """Call it first in a module that imports vLLM, or in the fixture that starts it."""
    installed = importlib.util.find_spec("vllm") is not None
    found = verdict(installed=installed, required=os.environ.get(REQUIRE) == "1")
    if found == "fail":
        pytest.fail(REASON, pytrace=False)
    if found == "skip":
        pytest.skip(REASON, allow_module_level=True)
