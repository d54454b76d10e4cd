"""Small things in the place of packages that a bare GPU box may lack, so that the checks still run.

The checks promise to need torch, numpy, pyzmq, msgspec and transformers only; the program needs a
few more. A package that is there is never replaced.

xxhash        a CRC: any hash will do to compare two ends of one run, and both take this one
psutil        when a process began: launchers beside us sweep what belongs to none that lives. Only
              lent to the one module that asks: transformers looks whether there is a psutil
setproctitle  nothing: processes keep their names
tomli_w       what tomllib reads back, of the few types that a configuration has
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import types
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Crc:
    """Stands in for xxhash.xxh3_64."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, view: memoryview) -> None:
        """Go on with more bytes."""
        self._value = zlib.crc32(view, self._value)

    def intdigest(self) -> int:
        """Return the checksum so far."""
        return self._value


class Process:
    """Stands in for psutil.Process."""

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid or os.getpid()

    def create_time(self) -> float:
        """Return when it began, in seconds since the epoch. Raises: ProcessLookupError."""
        try:
            words = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError as error:
            raise ProcessLookupError(self.pid) from error
        lines = Path("/proc/stat").read_text().splitlines()
        booted_s = next(float(line.split()[1]) for line in lines if line.startswith("btime "))
        return booted_s + int(words[19]) / os.sysconf("SC_CLK_TCK")


def dumps(table: Mapping[str, Any], prefix: str = "") -> str:
    """Write nested tables of numbers, strings, booleans and lists as TOML."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{key}"
            lines += [f"[{name}]", dumps(value, f"{name}.")]
    return "\n".join(lines)


STAND_INS: dict[str, dict[str, Any]] = {
    "xxhash": {"xxh3_64": Crc, "xxh3_64_intdigest": zlib.crc32},
    "psutil": {"Process": Process, "NoSuchProcess": ProcessLookupError},
    "setproctitle": {"setproctitle": lambda title: None},
    "tomli_w": {"dumps": dumps},
}

LENT = {"psutil": "asyncrl_node.run_directory"}
"""Who gets a stand-in that nobody else may see."""


def install() -> None:
    """Put a stand-in in the place of every package that is missing."""
    missing = {name for name in STAND_INS if sys.modules.get(name) is None and not _is_there(name)}
    hidden = {name for name in LENT if name in sys.modules}
    for name in missing:
        module = types.ModuleType(name)
        module.__dict__.update(STAND_INS[name])
        sys.modules[name] = module
    for name in missing & LENT.keys():
        importlib.import_module(LENT[name])
        del sys.modules[name]
        if name in hidden:
            sys.modules[name] = None  # type: ignore[assignment]


def _is_there(name: str) -> bool:
    if name in sys.modules:  # None: hidden on purpose
        return False
    return importlib.util.find_spec(name) is not None
