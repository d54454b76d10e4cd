"""What the scheduler's core remembers: settings, groups, samplers, counts. See scheduling.py."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl_node.core.pacing import PacingRule
from asyncrl_node.messages import GroupCompleted, GroupKey, Heartbeat, SamplerStatus


class SchedulerSettings(NamedTuple):
    """What the core needs to know of the configuration."""

    rule: PacingRule
    group_size: int
    num_substeps: int = 1
    seed: int = 0
    start_version: int = 0
    filter_constant_rewards: bool = False
    fixed_staleness: bool = False
    """Take only when every slot holds a completed group; PacingConfig says why."""
    eval_problems: int = 0
    warn_every_s: float = 120.0
    rollout_timeout_s: float = 3600.0
    silent_s: float = 60.0
    """A sampler that has not sent a heartbeat for so long is replaced."""


class GroupRecord:
    """What the scheduler knows of one outstanding group besides its pacing state."""

    __slots__ = ("admitted_s", "completed", "epoch", "key", "problem", "sampler")

    def __init__(self, key: GroupKey, problem: int, epoch: int, admitted_s: float) -> None:
        self.key = key
        self.problem = problem
        self.epoch = epoch
        self.admitted_s = admitted_s
        self.sampler = -1
        """Who holds it; -1 while it waits for a sampler."""
        self.completed: GroupCompleted | None = None


class SamplerLink:
    """What the scheduler knows of one sampler process."""

    __slots__ = ("groups", "heard_s", "heartbeat", "incarnation", "max_groups", "sampler")

    def __init__(self, sampler: int, incarnation: int, max_groups: int, now_s: float) -> None:
        self.sampler = sampler
        self.incarnation = incarnation
        self.max_groups = max_groups
        self.groups: set[int] = set()
        self.heartbeat: Heartbeat | None = None
        self.heard_s = now_s
        """When its last heartbeat came."""

    def status(self) -> SamplerStatus:
        """Describe it for the live view."""
        beat = self.heartbeat
        return SamplerStatus(
            sampler=self.sampler,
            ready=beat is not None and beat.policy_version >= 0,
            policy_version=-1 if beat is None else beat.policy_version,
            num_rollouts=0 if beat is None else beat.num_rollouts,
            num_groups=len(self.groups),
            loading=beat is not None and beat.loading,
        )


class Totals:
    """Counts over the whole run, and of the batch being collected."""

    def __init__(self) -> None:
        self.admitted = self.trained = self.filtered = self.failed = self.leftover = 0
        self.late_messages = 0
        self.restarted = 0
        self.filtered_in_a_row = 0
        self.failed_in_a_row = 0
        self.start_batch()

    def start_batch(self) -> None:
        """Forget the batch's figures: its rewards and tokens, before any filter."""
        self.reward_sum = 0.0
        self.num_rollouts = self.num_tokens = self.num_filtered_tokens = self.num_filtered = 0
        self.num_timeouts = self.num_dropped_samples = 0

    def count_sampled(self, done: GroupCompleted) -> None:
        """Count a group as sampled for this batch."""
        self.reward_sum += done.reward_sum
        self.num_rollouts += done.num_rollouts
        self.num_tokens += done.num_tokens
        self.num_timeouts += done.num_timeouts
        self.num_dropped_samples += done.num_dropped_samples
