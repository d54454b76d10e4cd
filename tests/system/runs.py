"""Starting real runs from tests, and judging them from their records alone.

This file reads trained.jsonl and metrics.jsonl with json and nothing of the project's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, str(ROOT / "launch.py")]


def launch(
    run_dir: Path, *flags: str, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run launch.py to its end."""
    command = [*LAUNCH, "--run-dir", str(run_dir), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False
    )


def fake_run(
    run_dir: Path, *flags: str, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run with the fake engine and short steps; it must end well."""
    quick = ("--engine", "fake", "--fake.train-s", "0.01", "--eval-problems", "0")
    done = launch(run_dir, *quick, *flags, timeout_s=timeout_s)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(run_dir)}"
    return done


def logs(run_dir: Path) -> str:
    """All logs of a run, for the message of a failure."""
    return "\n".join(f"== {p.name}\n{p.read_text()}" for p in sorted((run_dir / "logs").glob("*")))


def rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(run_dir: Path) -> list[dict[str, Any]]:
    """The learner's own record."""
    return rows(run_dir / "trained.jsonl")


def train_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The train rows of metrics.jsonl."""
    return [row for row in rows(run_dir / "metrics.jsonl") if row["kind"] == "train"]


def processes_of(run_id: str) -> list[int]:
    """Pids of processes whose title names this run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"run={run_id}".encode() in title:
                found.append(int(entry.name))
    return found


def pid_of(run_id: str, process: str) -> int | None:
    """Pid of one live process of a run, by its name ("learner", "sampler-0")."""
    for pid in processes_of(run_id):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if title.startswith(f"asyncrl-{process} "):
            return pid
    return None


def kill(run_id: str, process: str) -> None:
    """SIGKILL one process of a run."""
    pid = pid_of(run_id, process)
    assert pid is not None, f"no {process} of run {run_id}"
    os.kill(pid, signal.SIGKILL)
