"""Tests that need a package which users need not have.

Without it: skipped with the install line for a newcomer, failed in CI, which sets a variable.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

import pytest

TRL_INSTALL = "pip install -e '.[trl]'"


def verdict(*, installed: bool, required: bool) -> Literal["run", "skip", "fail"]:
    """Say what becomes of tests that need a package."""
    if installed:
        return "run"
    return "fail" if required else "skip"


def need_package(name: str, install: str) -> None:
    """Call it first in a module that imports `name`, or in the fixture that starts it.

    ASYNCRL_REQUIRE_NAME=1 makes its absence a failure.
    """
    required = os.environ.get(f"ASYNCRL_REQUIRE_{name.upper()}") == "1"
    installed = importlib.util.find_spec(name) is not None
    found, reason = verdict(installed=installed, required=required), f"no {name}: {install}"
    if found == "fail":
        pytest.fail(reason, pytrace=False)
    if found == "skip":
        pytest.skip(reason, allow_module_level=True)


def need_trl() -> None:
    """TRL is the oracle of the losses: numbers, not code."""
    need_package("trl", TRL_INSTALL)
