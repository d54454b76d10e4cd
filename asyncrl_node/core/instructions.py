"""What the scheduler's core tells its process to do; the process obeys, in order."""

from __future__ import annotations

from typing import Literal, NamedTuple

from asyncrl_node.messages import (
    GroupKey,
    LauncherReport,
    LearnerOrder,
    SamplerOrder,
)

LedgerEvent = Literal[
    "admitted",
    "started",
    "completed",
    "restarted",
    "taken",
    "handed_back",
    "trained",
    "published",
    "filtered",
    "failed",
    "leftover",
]


class ToSampler(NamedTuple):
    """Send to one sampler."""

    sampler: int
    message: SamplerOrder


class ToLearner(NamedTuple):
    """Send to the learner."""

    message: LearnerOrder


class ToLauncher(NamedTuple):
    """Send to the launcher, if one listens."""

    message: LauncherReport


class ReserveSlot(NamedTuple):
    """Make the slot file of this attempt, with all its bytes."""

    key: GroupKey


class ReleaseSlot(NamedTuple):
    """Remove the slot file of this attempt."""

    key: GroupKey


NO_GROUP = GroupKey(-1, 0)
"""The key of an event that belongs to no group: published."""


class Record(NamedTuple):
    """Append to the ledger. Fields that do not apply are -1 or empty."""

    event: LedgerEvent
    key: GroupKey
    problem: int
    epoch: int
    step: int = -1
    version: int = -1
    """admitted, restarted: min_version; started: the first token's; completed: the oldest."""
    version_max: int = -1
    sampler: int = -1
    num_tokens: int = -1
    reason: str = ""


class WriteRow(NamedTuple):
    """Append to metrics.jsonl."""

    row: dict[str, object]


class Finish(NamedTuple):
    """Everything is recorded: end the process."""

    reason: str


Instruction = (
    ToSampler | ToLearner | ToLauncher | ReserveSlot | ReleaseSlot | Record | WriteRow | Finish
)
