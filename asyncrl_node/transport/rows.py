"""metrics.jsonl: one JSON object a row, whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class RowFile:
    """Append-only; each row is one write, so a crash can leave at most one unfinished last line."""

    def __init__(self, path: Path) -> None:
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._encoder = msgspec.json.Encoder()

    def write(self, row: object) -> None:
        """Append one row; a struct or a mapping."""
        line = self._encoder.encode(row) + b"\n"
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"wrote {written} of {len(line)} bytes of a row: disk full?")

    def close(self) -> None:
        """Make the rows durable and close."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)
