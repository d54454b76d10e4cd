"""Scheduling policies in virtual time, on the same latencies: for comparison, in perf/ only.

The shipped rule is simulated through the shipped core. The other two are what the field uses; they
are written here so that no policy switch enters the product.

    discard   all B * (D + 1) places in flight; a group older than K at its take is thrown away and
              its problem sampled again
    older     at most B in flight; the learner waits only for groups that are due now
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from asyncrl_node.core.pacing import Pacing, PacingRule, Taken


class Settings(NamedTuple):
    """One simulated run."""

    groups_per_batch: int
    pipeline_depth: int
    max_steps_off_policy: int
    train_s: float
    num_steps: int


class TrainedGroup(NamedTuple):
    """One trained group."""

    problem: int
    version: int
    step: int


class Outcome(NamedTuple):
    """What a policy did; times are virtual seconds."""

    trained: list[TrainedGroup]
    sampled: list[int]
    """Problem of every group that was started."""
    discarded: list[int]
    """Every group that was thrown away."""
    step_ends_s: list[float]


class Policy(Protocol):
    """Decides which groups start and which are trained."""

    def may_start(self) -> bool:
        """Say whether one more group may start now."""
        ...

    def start(self, group: int, problem: int) -> None:
        """Note that a group starts, sampled by the newest version."""
        ...

    def complete(self, group: int) -> None:
        """Note that a group is whole."""
        ...

    def take(self) -> list[tuple[int, int]] | None:
        """Return the batch as (group, version), or None to wait."""
        ...

    def publish(self) -> None:
        """Note that the next version is public."""
        ...

    def requeued(self) -> list[int]:
        """Return groups that were thrown away since the last call; their problems come again."""
        ...


def simulate(
    policy: Policy,
    settings: Settings,
    latencies: list[float],
    problems: Iterator[int],
    on_start: Callable[[int, int], None] | None = None,
    on_train: Callable[[int, list[int]], None] | None = None,
) -> Outcome:
    """Run a policy: one learner, sampling speed independent of concurrency."""
    now_s = 0.0
    next_group = 0
    running: list[tuple[float, int]] = []
    problem_of: dict[int, int] = {}
    again: deque[int] = deque()
    outcome = Outcome([], [], [], [])
    step = 0
    train_ends_s: float | None = None

    def fill() -> None:
        nonlocal next_group
        while policy.may_start():
            problem = again.popleft() if again else next(problems)
            problem_of[next_group] = problem
            policy.start(next_group, problem)
            outcome.sampled.append(problem)
            if on_start is not None:
                on_start(next_group, problem)
            heapq.heappush(running, (now_s + latencies[problem % len(latencies)], next_group))
            next_group += 1

    fill()
    while step < settings.num_steps:
        if train_ends_s is None and (batch := policy.take()) is not None:
            trained = [TrainedGroup(problem_of[g], version, step) for g, version in batch]
            outcome.trained.extend(trained)
            if on_train is not None:
                on_train(step, [g for g, _ in batch])
            train_ends_s = now_s + settings.train_s
        dropped = policy.requeued()
        outcome.discarded.extend(dropped)
        again.extend(problem_of[group] for group in dropped)
        fill()
        if train_ends_s is not None and (not running or train_ends_s <= running[0][0]):
            now_s, train_ends_s = train_ends_s, None
            step += 1
            outcome.step_ends_s.append(now_s)
            policy.publish()
        else:
            now_s, group = heapq.heappop(running)
            policy.complete(group)
        fill()
    return outcome


class ShippedPolicy:
    """The product's own core."""

    def __init__(self, settings: Settings) -> None:
        self._batch = settings.groups_per_batch
        bound = settings.max_steps_off_policy
        self._pacing = Pacing(PacingRule(self._batch, settings.pipeline_depth, bound))

    def may_start(self) -> bool:
        """Ask the core."""
        return self._pacing.can_admit()

    def start(self, group: int, problem: int) -> None:
        """Admit."""
        self._pacing.admit(group)

    def complete(self, group: int) -> None:
        """Complete at the version it started with (weights change between groups)."""
        paced = self._pacing.group(group)
        assert paced is not None
        self._pacing.complete(group, paced.source)

    def take(self) -> list[tuple[int, int]] | None:
        """Take a whole batch."""
        if self._pacing.left < self._batch:
            return None
        answer = self._pacing.take(self._batch)
        if not isinstance(answer, Taken):
            return None
        groups = [self._pacing.group(g) for g in answer.group_ids]
        return [(g.group_id, g.source) for g in groups if g is not None]

    def publish(self) -> None:
        """Publish the next version."""
        self._pacing.publish(self._pacing.published + 1)

    def requeued(self) -> list[int]:
        """Nothing is ever thrown away."""
        return []


class _SimplePolicy:
    """What the two others share: versions, completed groups oldest first."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._version = 0
        self._source: dict[int, int] = {}
        self._in_flight: set[int] = set()
        self._completed: list[tuple[int, int]] = []
        """Heap of (version, group)."""
        self._num_taken = 0
        self._requeued: list[int] = []

    def start(self, group: int, problem: int) -> None:
        """Note a start."""
        self._source[group] = self._version
        self._in_flight.add(group)

    def complete(self, group: int) -> None:
        """Note a completion."""
        self._in_flight.discard(group)
        heapq.heappush(self._completed, (self._source[group], group))

    def publish(self) -> None:
        """Move to the next version; the batch is done."""
        self._version += 1
        self._num_taken = 0

    def requeued(self) -> list[int]:
        """Return what was thrown away since the last call."""
        dropped, self._requeued = self._requeued, []
        return dropped

    def _pop_batch(self) -> list[tuple[int, int]] | None:
        if self._num_taken or len(self._completed) < self._settings.groups_per_batch:
            return None
        batch = [heapq.heappop(self._completed) for _ in range(self._settings.groups_per_batch)]
        self._num_taken = len(batch)
        return [(group, version) for version, group in batch]

    @property
    def _outstanding(self) -> int:
        return len(self._in_flight) + len(self._completed) + self._num_taken


class DiscardPolicy(_SimplePolicy):
    """Throw away what is older than the bound, and sample its problem again."""

    def may_start(self) -> bool:
        """Fill all places."""
        settings = self._settings
        return self._outstanding < settings.groups_per_batch * (settings.pipeline_depth + 1)

    def take(self) -> list[tuple[int, int]] | None:
        """Discard, then take the oldest that are left."""
        bound = self._settings.max_steps_off_policy
        while self._completed and self._version - self._completed[0][0] > bound:
            _, group = heapq.heappop(self._completed)
            self._requeued.append(group)
        return self._pop_batch()


class OlderPolicy(_SimplePolicy):
    """At most B in flight; wait only for what is due now."""

    def may_start(self) -> bool:
        """Keep at most B in flight."""
        settings = self._settings
        limit = settings.groups_per_batch * (settings.pipeline_depth + 1)
        return len(self._in_flight) < settings.groups_per_batch and self._outstanding < limit

    def take(self) -> list[tuple[int, int]] | None:
        """Wait while any group in flight is due in this step."""
        due = self._version - self._settings.max_steps_off_policy
        if any(self._source[group] <= due for group in self._in_flight):
            return None
        return self._pop_batch()


def mean_staleness(trained: list[TrainedGroup]) -> float:
    """Mean over groups, by oldest token."""
    return sum(g.step - g.version for g in trained) / max(1, len(trained))


def slow_share(problems: list[int], slow: set[int]) -> float:
    """Share of slow problems among these."""
    counts = Counter(problem in slow for problem in problems)
    return counts[True] / max(1, len(problems))
