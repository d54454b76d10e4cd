"""The learner's time, each second attributed to exactly one cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Cause = Literal[
    "train", "publish", "waiting_for_fill", "waiting_for_stragglers", "eval", "checkpoint"
]
CAUSES: tuple[Cause, ...] = (
    "train",
    "publish",
    "waiting_for_fill",
    "waiting_for_stragglers",
    "eval",
    "checkpoint",
)


class CauseClock:
    """Adds up seconds by cause between two rows; what no cause claims is "other"."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._row_began_s = now_s()
        self._spent_s: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)

    @contextmanager
    def cause(self, cause: Cause) -> Iterator[None]:
        """Attribute the time inside to `cause`. Not nested."""
        began_s = self._now_s()
        try:
            yield
        finally:
            self._spent_s[cause] += self._now_s() - began_s

    def move(self, source: Cause, target: Cause, seconds: float) -> None:
        """Re-attribute seconds, at most as many as the source has."""
        seconds = min(seconds, self._spent_s[source])
        self._spent_s[source] -= seconds
        self._spent_s[target] += seconds

    def row(self) -> dict[str, float]:
        """Return `time/total` and the causes that sum to it, since the last row; start anew."""
        now_s = self._now_s()
        total_s = now_s - self._row_began_s
        row = {f"time/{cause}": spent for cause, spent in self._spent_s.items()}
        row["time/other"] = total_s - sum(self._spent_s.values())
        row["time/total"] = total_s
        self._row_began_s = now_s
        self._spent_s = dict.fromkeys(CAUSES, 0.0)
        return row
