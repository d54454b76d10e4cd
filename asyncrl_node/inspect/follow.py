"""Reading metrics.jsonl while it grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

Row = dict[str, Any]


class RowFollower:
    """Returns each whole row once; an unfinished last line is left for later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new_rows(self) -> list[Row]:
        """Read the rows that were added since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [msgspec.json.decode(line) for line in lines]


def read_rows(path: Path) -> list[Row]:
    """Read all whole rows of a file; none if there is no file."""
    return RowFollower(path).new_rows()
