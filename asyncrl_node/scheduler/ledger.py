"""The ledger: every event of every group's life, in a crash-safe SQLite file (WAL).

Written by the scheduler only. Rows are appended in one transaction a batch; `verify` reads them
with code of its own.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from asyncrl_node.core.instructions import Record

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY,
    time_s REAL NOT NULL,
    run_attempt INTEGER NOT NULL,
    event TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    problem INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,
    version_max INTEGER NOT NULL,
    sampler INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    reason TEXT NOT NULL
)
"""
_INSERT = (
    "INSERT INTO events (time_s, run_attempt, event, group_id, attempt, problem, epoch, step, "
    "version, version_max, sampler, num_tokens, reason) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)"
)


class Ledger:
    """Append-only; `flush` makes what was added durable against a crash of the process."""

    def __init__(self, path: Path, run_attempt: int) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        self._run_attempt = run_attempt
        self._database = sqlite3.connect(path)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.execute(_SCHEMA)
        self._database.commit()
        self._rows: list[tuple[object, ...]] = []

    def add(self, record: Record, time_s: float) -> None:
        """Queue one event; `time_s` is seconds since the epoch."""
        key = record.key
        self._rows.append(
            (time_s, self._run_attempt, record.event, key.group_id, key.attempt, *record[2:])
        )

    def add_end(self, reason: str, time_s: float) -> None:
        """Note that the run has ended and every group has an end."""
        blank = (-1,) * 8
        self._rows.append((time_s, self._run_attempt, "ended", -1, *blank, reason))

    def flush(self) -> None:
        """Write what is queued, in one transaction."""
        if self._rows:
            with self._database:
                self._database.executemany(_INSERT, self._rows)
            self._rows.clear()

    def close(self) -> None:
        """Write what is queued and close."""
        self.flush()
        self._database.close()
