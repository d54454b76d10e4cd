"""Where everything of one run lies: the run directory, its sockets, its shared memory."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from asyncrl_node.transport.slots import SlotFolder

SHM_FOLDER = Path("/dev/shm")
SOCKETS_PREFIX = "arl-"
OWNER_FILE = "owner.json"


class Runtime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the processes of a run need to find each other; RUN_DIR/runtime.json while it runs."""

    run_id: str
    """8 hex digits; in the name of every socket directory and shared-memory file of the run."""
    sockets_dir: str
    """A short private directory (0700): unix socket paths end at 107 bytes."""
    launcher_pid: int
    slot_bytes: int
    run_attempt: int = 0
    """0 for a new run, +1 with every resume."""
    learner_gpus: tuple[str, ...] = ()
    """UUIDs by rank; empty on a CPU."""
    sampler_gpus: tuple[tuple[str, ...], ...] = ()
    """UUIDs of each sampler's cards; one started by hand beside them has none."""


class RunDirectory:
    """Paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.trained = path / "trained.jsonl"
        self.ledger = path / "ledger.sqlite"
        self.checkpoints = path / "checkpoints"
        self.rollouts = path / "rollouts"
        self.logs = path / "logs"
        self.runtime = path / "runtime.json"

    def create(self) -> None:
        """Make the directories, private to the user."""
        for folder in (self.path, self.checkpoints, self.rollouts, self.logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read_runtime(self) -> Runtime:
        """Read how to reach the processes of this run."""
        return msgspec.json.decode(self.runtime.read_bytes(), type=Runtime)

    def write_runtime(self, runtime: Runtime) -> None:
        """Record how to reach the processes of this run."""
        write_atomically(self.runtime, msgspec.json.encode(runtime))

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after `step` finished steps."""
        return self.checkpoints / f"step-{step:06d}"


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which process a socket directory belongs to; its start time tells it from a later one."""

    pid: int
    created_s: float


def _sockets_base() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(base) > 60 or not os.access(base, os.W_OK):
        base = "/tmp"
    return Path(base)


def new_runtime(slot_bytes: int) -> Runtime:
    """Make a run id and its private socket directory, with the name of its owner in it."""
    run_id = secrets.token_hex(4)
    sockets_dir = _sockets_base() / f"{SOCKETS_PREFIX}{run_id}"
    sockets_dir.mkdir(mode=0o700)
    owner = Owner(os.getpid(), psutil.Process().create_time())
    write_atomically(sockets_dir / OWNER_FILE, msgspec.json.encode(owner))
    return Runtime(run_id, str(sockets_dir), os.getpid(), slot_bytes)


def sweep_dead_runs() -> int:
    """Remove what runs of this user left whose launcher was killed; return how many runs.

    A run whose owner lives, or whose directory says nothing of its owner, is left alone.
    """
    count = 0
    for sockets_dir in _sockets_base().glob(f"{SOCKETS_PREFIX}????????"):
        owner = _owner_of(sockets_dir)
        if owner is not None and not _is_alive(owner):
            run_id = sockets_dir.name.removeprefix(SOCKETS_PREFIX)
            sweep(Runtime(run_id, str(sockets_dir), owner.pid, 0))
            count += 1
    return count


def _owner_of(sockets_dir: Path) -> Owner | None:
    try:
        if sockets_dir.stat().st_uid != os.getuid():
            return None
        return msgspec.json.decode((sockets_dir / OWNER_FILE).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None


def _is_alive(owner: Owner) -> bool:
    try:
        return bool(abs(psutil.Process(owner.pid).create_time() - owner.created_s) < 1.0)
    except psutil.NoSuchProcess:
        return False


def shm_prefix(runtime: Runtime) -> str:
    """Prefix of every shared-memory file of the run."""
    return f"arl-{runtime.run_id}"


def slot_folder(runtime: Runtime) -> SlotFolder:
    """Open the slots of a run."""
    return SlotFolder(SHM_FOLDER, shm_prefix(runtime), runtime.slot_bytes)


def weights_path(runtime: Runtime) -> Path:
    """Path of the weight buffer in shared memory."""
    return SHM_FOLDER / f"{shm_prefix(runtime)}-weights"


def left_behind(runtime: Runtime) -> Iterator[Path]:
    """List the shared-memory files and sockets of a run."""
    yield from SHM_FOLDER.glob(f"{shm_prefix(runtime)}-*")
    sockets_dir = Path(runtime.sockets_dir)
    if sockets_dir.exists():
        yield from sockets_dir.iterdir()
        yield sockets_dir


def sweep(runtime: Runtime) -> int:
    """Remove what the processes of a dead run left; return how many things there were."""
    count = 0
    for path in list(left_behind(runtime)):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        count += 1
    return count


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is whole or not there: a new file, flushed, then renamed."""
    draft = path.with_name(f".{path.name}.draft")
    descriptor = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
