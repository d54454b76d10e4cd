"""Shared by all tests: hypothesis profiles, and a guard that nothing of a run is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def traces_of_runs() -> set[Path]:
    return set(Path("/dev/shm").glob("arl-*")) | set(Path("/tmp").glob("arl-*"))


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fail if the test leaves shared memory or sockets of a run behind."""
    before = traces_of_runs()
    yield
    assert traces_of_runs() <= before
