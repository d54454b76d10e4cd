"""Shared by all tests: hypothesis profiles, and a guard that nothing of a run is left behind."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

IN_CREATE = 0x100


class RunWatch:
    """Names every run that was started with this folder as XDG_RUNTIME_DIR, also ended ones.

    The kernel keeps the list (inotify): a run makes a folder arl-RUN_ID there before anything else.
    So other runs on the machine are never taken for ours.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: set[str] = set()
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = libc.inotify_add_watch(self._descriptor, os.fsencode(folder), IN_CREATE)
        if self._descriptor < 0 or watch < 0:
            raise OSError(ctypes.get_errno(), "inotify")

    def names(self) -> set[str]:
        """Return arl-RUN_ID of every run so far."""
        while True:
            try:
                events = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return self._names
            at = 0
            while at < len(events):
                _, _, _, length = struct.unpack_from("iIII", events, at)
                at += 16
                self._names.add(events[at : at + length].rstrip(b"\0").decode())
                at += length

    def traces(self) -> set[Path]:
        """Return what our runs have left: shared memory and socket folders."""
        found = set(self.folder.glob("arl-*"))
        for path in Path("/dev/shm").glob("arl-*"):
            if any(path.name.startswith(f"{name}-") for name in self.names()):
                found.add(path)
        return found

    def close(self) -> None:
        """Remove the folder."""
        os.close(self._descriptor)
        shutil.rmtree(self.folder, ignore_errors=True)


_watch: RunWatch | None = None


@pytest.fixture(scope="session", autouse=True)
def watched_runs() -> Iterator[None]:
    """Let the runs of this session put their sockets where no other run does."""
    global _watch
    before = os.environ.get("XDG_RUNTIME_DIR")
    _watch = RunWatch(Path(tempfile.mkdtemp(prefix="arlt-", dir="/tmp")))  # socket paths are short
    os.environ["XDG_RUNTIME_DIR"] = str(_watch.folder)
    yield
    _watch.close()
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before


def traces_of_runs() -> set[Path]:
    """Return what the runs of this session have left, and no other run."""
    assert _watch is not None
    return _watch.traces()


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fail if the test leaves shared memory or sockets of a run behind."""
    before = traces_of_runs()
    yield
    assert traces_of_runs() <= before
