"""The pacing rule: staleness is bounded by when a group starts and by what training waits for.

Words   step t turns policy version t into t + 1. A group's *source* s is the version that sampled
        its oldest token (until known: the least it can be). Its staleness is t - s when trained in
        step t. It is *due* at step s + K, its last chance.
        B groups_per_batch, D pipeline_depth, K max_steps_off_policy, 0 <= D <= K.
        *outstanding* = in flight + completed + taken.

Rule    1. Admit while fewer than B * (D + 1) groups are outstanding. The slot and its bytes are
           charged at admission and freed when the step that trained the group is *published*.
        2. s starts as the newest published version and only moves up: to the version that sampled
           the first token, or after a restart.
        3. With `left` places of the batch of step t open, the n stalest completed groups may be
           taken exactly when for every j = 0 .. K

               untaken groups due by step t + j  <=  B * j + (left - n)

           in flight and completed alike, after the n are taken. Otherwise wait.

Proof   Invariant I(j): untaken groups due by t + j number at most B * j + left, for every j >= 0.
        Take     keeps I: it is the test.
        Publish  turns left = 0 into B and t into t + 1: the same groups now face
                 B * (j + 1) = B * j + B at horizon j. I holds.
        Admit    adds a group due at t + K: only j >= K changes. The B - left taken groups still
                 hold their slots, so untaken <= B * (D + 1) - (B - left) = B * D + left, which is
                 at most B * K + left. I holds.
        Start, restart, drop   move due steps later or remove groups. I holds.
        Hand back  restores what the take removed. I holds.
        Collecting the batch of t + 1 before t + 1 is published (`collect_next`): the taken B still
                 hold slots, so untaken <= B * (D - 1) + left, and s <= t is due by
                 (t + 1) + (K - 1). I holds at horizon K - 1.
        I(-1) is "nothing is past due", which I(0) at the step before guarantees.
        No deadlock: once nothing is in flight, the n stalest completed groups are the n due
        soonest, so the test is I itself (n <= left). If it fails then, the state was impossible
        from the start (a resume under a smaller bound): stop by name.

        Freeing slots when the batch is *taken* would let staleness reach K + 1.

Every event costs O(number of distinct sources), at most K + 2, whatever the number of groups.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from enum import Enum
from itertools import islice
from typing import Literal, NamedTuple

from asyncrl_node.errors import InvalidTransition, RunFault

WaitReason = Literal["fill", "stragglers"]


class PacingRule(NamedTuple):
    """The settings of one run; `check` refuses what breaks a rule."""

    groups_per_batch: int
    """B >= 1"""
    pipeline_depth: int
    """D >= 0"""
    max_steps_off_policy: int | None
    """K >= D, or None: no bound, oldest first, no waiting for anybody."""
    slot_bytes: int = 1
    """The most bytes that one group may need."""
    max_bytes: int | None = None
    """Most bytes reserved at once; None: as many as the slots. At least B * slot_bytes."""
    last_version: int | None = None
    """Training ends when this version is published; None: no step limit."""

    @property
    def num_slots(self) -> int:
        """B * (D + 1)."""
        return self.groups_per_batch * (self.pipeline_depth + 1)

    def problem(self) -> str | None:
        """Say which rule the settings break, or None."""
        bound = self.max_steps_off_policy
        if self.groups_per_batch < 1:
            return "groups_per_batch must be at least 1"
        if self.pipeline_depth < 0:
            return "pipeline_depth must be at least 0"
        if bound is not None and self.pipeline_depth > bound:
            return "pipeline_depth must be at most max_steps_off_policy"
        if self.max_bytes is not None and self.max_bytes < self.groups_per_batch * self.slot_bytes:
            return "the byte limit must hold at least one batch"
        return None


class GroupState(Enum):
    """Where a group is; a freed group is forgotten."""

    IN_FLIGHT = "in flight"
    COMPLETED = "completed"
    TAKEN = "taken"


class Group:
    """One outstanding group."""

    __slots__ = ("dropped", "group_id", "min_version", "num_bytes", "source", "state", "step")

    def __init__(self, group_id: int, source: int, num_bytes: int) -> None:
        self.group_id = group_id
        self.source = source
        """s: the oldest version that can be in its data; moves up, never down."""
        self.min_version = source
        """The oldest version that the present attempt may be sampled by."""
        self.num_bytes = num_bytes
        self.state = GroupState.IN_FLIGHT
        self.step = -1
        """The step that took it; -1 while untaken."""
        self.dropped = False
        """True if it was dropped after it was taken: it holds its place, and trains nobody."""


class Taken(NamedTuple):
    """The answer to a take: these groups, stalest first."""

    group_ids: tuple[int, ...]
    closes_batch: bool
    """True when the batch of this step is complete, short or not."""


class Wait(NamedTuple):
    """The answer to a take: not now, because of ..."""

    reason: WaitReason


class EndOfTraining(NamedTuple):
    """The answer to a take: nothing is left to train, ever."""


TakeAnswer = Taken | Wait | EndOfTraining


class Gauges(NamedTuple):
    """Counts at one instant; outstanding = in_flight + completed + taken."""

    in_flight: int
    completed: int
    taken: int

    @property
    def outstanding(self) -> int:
        """Admitted and not yet freed."""
        return self.in_flight + self.completed + self.taken


class Pacing:
    """The state of the rule. Events in, answers out; an illegal event raises and changes nothing.

    Raises: InvalidTransition for an event that the state does not allow; RunFault("past_due") and
    RunFault("stuck") where the bound can no longer be kept.
    """

    def __init__(self, rule: PacingRule, start_version: int = 0) -> None:
        problem = rule.problem()
        if problem is not None:
            raise InvalidTransition(problem)
        self.rule = rule
        self.published = start_version
        """The newest published version."""
        self.step = start_version
        """The step whose batch is being collected: `published`, or one more with prefetch."""
        self.left = rule.groups_per_batch
        """Open places of that batch."""
        self.exhausted = False
        """True once no more groups will ever be offered."""
        self._groups: dict[int, Group] = {}
        self._untaken: Counter[int] = Counter()
        """Untaken groups by source; zero counts are removed."""
        self._completed: dict[int, OrderedDict[int, None]] = {}
        """Completed groups by source, in the order they completed; empty buckets are removed."""
        self._num_completed = 0
        self._taken: dict[int, list[int]] = {}
        """Taken and not yet freed groups by the step that took them."""
        self._num_taken = 0
        self._reserved_bytes = 0
        self._story: deque[str] = deque(maxlen=20)

    # -- what a caller may ask ---------------------------------------------------------------

    @property
    def num_outstanding(self) -> int:
        """Groups admitted and not yet freed."""
        return len(self._groups)

    @property
    def num_in_flight(self) -> int:
        """Groups admitted and not yet completed."""
        return len(self._groups) - self._num_completed - self._num_taken

    @property
    def num_completed(self) -> int:
        """Groups completed and not yet taken."""
        return self._num_completed

    @property
    def reserved_bytes(self) -> int:
        """Bytes charged to outstanding groups."""
        return self._reserved_bytes

    def gauges(self) -> Gauges:
        """Count the outstanding groups by state."""
        return Gauges(self.num_in_flight, self._num_completed, self._num_taken)

    def group(self, group_id: int) -> Group | None:
        """Look up an outstanding group."""
        return self._groups.get(group_id)

    def outstanding_ids(self, state: GroupState) -> list[int]:
        """List the groups in a state (a scan: for warnings and checkpoints, not for events)."""
        return [g.group_id for g in self._groups.values() if g.state is state]

    def taken_in(self, step: int) -> tuple[int, ...]:
        """List the groups that step `step` took and still holds; dropped ones are left out."""
        ids = self._taken.get(step, ())
        return tuple(group_id for group_id in ids if not self._groups[group_id].dropped)

    def due_step(self, group_id: int) -> int | None:
        """The last step that may train the group; None without a bound."""
        bound = self.rule.max_steps_off_policy
        return None if bound is None else self._groups[group_id].source + bound

    def places_left(self) -> int | None:
        """How many more groups can ever be taken under the step limit; None without one."""
        if self.rule.last_version is None:
            return None
        steps_after = self.rule.last_version - 1 - self.step
        if steps_after < 0:
            return 0
        return self.left + self.rule.groups_per_batch * steps_after

    def can_admit(self, num_bytes: int | None = None) -> bool:
        """Say whether a group of `num_bytes` (default: a whole slot) may start now."""
        if self.exhausted or len(self._groups) >= self.rule.num_slots:
            return False
        wanted = self.rule.slot_bytes if num_bytes is None else num_bytes
        limit = self.rule.max_bytes
        if limit is not None and self._reserved_bytes + wanted > limit:
            return False
        places = self.places_left()
        untaken = len(self._groups) - self._num_taken
        return places is None or untaken < places

    # -- events ------------------------------------------------------------------------------

    def admit(self, group_id: int, num_bytes: int | None = None) -> int:
        """Charge a slot and its bytes; return `min_version`, the least version that may sample."""
        wanted = self.rule.slot_bytes if num_bytes is None else num_bytes
        self._require(self.can_admit(wanted), "admit", group_id, "no slot, byte or place is free")
        self._require(wanted <= self.rule.slot_bytes, "admit", group_id, "larger than a slot")
        self._require(group_id not in self._groups, "admit", group_id, "already outstanding")
        self._add(Group(group_id, self.published, wanted))
        self._tell("admit", group_id)
        return self.published

    def carry(self, group_id: int, source: int, num_bytes: int | None = None) -> None:
        """Bring in a completed group of an earlier run (resume), before training goes on.

        Call `check_possible` when all are in: a smaller bound may have made the state impossible.
        """
        self._require(group_id not in self._groups, "carry", group_id, "already outstanding")
        self._require(source <= self.published, "carry", group_id, "sampled by a later version")
        wanted = self.rule.slot_bytes if num_bytes is None else num_bytes
        group = Group(group_id, source, wanted)
        self._add(group)
        self._put_completed(group)
        self._tell("carry", group_id)

    def start(self, group_id: int, version: int) -> None:
        """Note the version that sampled the first token: the due step may move later."""
        group = self._in_state(group_id, GroupState.IN_FLIGHT, "start")
        self._require(version >= group.min_version, "start", group_id, "older than min_version")
        self._raise_source(group, version)
        self._tell("start", group_id)

    def complete(self, group_id: int, version_min: int) -> None:
        """Note that the group is whole in its slot; `version_min` is the oldest in its data."""
        group = self._in_state(group_id, GroupState.IN_FLIGHT, "complete")
        self._require(version_min >= group.source, "complete", group_id, "older than its start")
        self._raise_source(group, version_min)
        self._put_completed(group)
        self._tell("complete", group_id)

    def restart(self, group_id: int) -> int:
        """Start an in-flight group anew on its slot; return the least version that may sample.

        The lost attempt may have been sampled by a version that is public but not yet announced
        here; the new one must be at least that new, since due steps never move back.
        """
        group = self._in_state(group_id, GroupState.IN_FLIGHT, "restart")
        self._raise_source(group, self.published)
        group.min_version = group.source
        self._tell("restart", group_id)
        return group.min_version

    def drop(self, group_id: int) -> bool:
        """Give a group up (filtered, failed); return True if its slot is free now.

        An untaken group frees its slot at once. A taken one holds slot and place until the step
        is published, whatever becomes of it: freeing it would let one more group in than the
        proof counts.
        """
        group = self._groups.get(group_id)
        self._require(group is not None, "drop", group_id, "not outstanding")
        assert group is not None
        self._tell("drop", group_id)
        if group.state is GroupState.TAKEN:
            group.dropped = True
            return False
        if group.state is GroupState.COMPLETED:
            self._pop_completed(group)
        self._count(group.source, -1)
        self._free(group)
        return True

    def end_of_data(self) -> None:
        """Note that no more groups will be offered."""
        self.exhausted = True
        self._tell("end_of_data", -1)

    def take(self, num_groups: int) -> TakeAnswer:
        """Take the n stalest completed groups if the rest still fits; see rule 3.

        At the end of the data, with nothing in flight, fewer are taken and close the batch.
        """
        self._require(
            0 < num_groups <= self.left and self.rule.groups_per_batch % num_groups == 0,
            "take",
            -1,
            f"cannot take {num_groups} with {self.left} places left",
        )
        if self.places_left() == 0:
            return EndOfTraining()
        self._check_past_due()
        if self._num_completed < num_groups:
            return self._take_short()
        chosen = self._stalest(num_groups)
        if not self._fits(chosen):
            if self.num_in_flight == 0:
                raise RunFault("stuck", self._impossible())
            return Wait("stragglers")
        return self._take(chosen, closes=num_groups == self.left)

    def collect_next(self) -> None:
        """Begin collecting the next batch before the present step is published (prefetch)."""
        self._require(self.left == 0, "collect_next", -1, "the batch is still open")
        self._require(self.step == self.published, "collect_next", -1, "one batch ahead already")
        self.step += 1
        self.left = self.rule.groups_per_batch
        self._tell("collect_next", -1)

    def hand_back(self) -> tuple[int, ...]:
        """Undo the takes of the open batch (shutdown while collecting); return what came back.

        A group dropped after it was taken does not come back: untaken, it frees its slot at once.
        """
        self._require(self.left > 0, "hand_back", -1, "the batch is closed")
        returned = self.taken_in(self.step)
        for group_id in self._taken.pop(self.step, ()):
            group = self._groups[group_id]
            self._num_taken -= 1
            if group.dropped:
                self._free(group)
                continue
            self._count(group.source, +1)
            self._put_completed(group)
            group.step = -1
        self.left = self.rule.groups_per_batch
        self._tell("hand_back", -1)
        return returned

    def close_short(self) -> Taken:
        """Close the open batch with what is whole (shutdown after its first optimizer update).

        As many of the stalest completed groups as there are places go in: left behind, those due
        in this step would be past due in the next, and no resume could train them in time. What is
        in flight is sampled anew after a resume.
        """
        self._require(self.left > 0, "close_short", -1, "the batch is closed")
        self._require(bool(self._taken.get(self.step)), "close_short", -1, "nothing is taken")
        self._tell("close_short", -1)
        return self._take(self._stalest(min(self.left, self._num_completed)), closes=True)

    def publish(self, version: int) -> tuple[int, ...]:
        """Note that the weights after the taken batch are public; return the groups now freed."""
        self._require(version == self.published + 1, "publish", version, "out of order")
        collected = self.step > self.published or self.left == 0
        self._require(collected, "publish", -1, "the batch is still open")
        freed = tuple(self._taken.pop(self.published, ()))
        for group_id in freed:
            self._num_taken -= 1
            self._free(self._groups[group_id])
        self.published = version
        if self.step < version:
            self.step = version
            self.left = self.rule.groups_per_batch
        self._tell("publish", -1)
        return freed

    # -- checks ------------------------------------------------------------------------------

    def check_possible(self) -> None:
        """Test the invariant at every horizon; for a state carried over from another run.

        Raises: RunFault("impossible_resume") naming what does not fit.
        """
        rule = self.rule
        if len(self._groups) > rule.num_slots:
            raise RunFault(
                "impossible_resume",
                f"{len(self._groups)} groups are carried over, there are {rule.num_slots} slots; "
                f"raise pipeline_depth or groups_per_batch; {self._recent()}",
            )
        # A group larger than a slot could leave no bytes for the rest of its batch, for ever.
        largest = max((group.num_bytes for group in self._groups.values()), default=0)
        too_many_bytes = rule.max_bytes is not None and self._reserved_bytes > rule.max_bytes
        if largest > rule.slot_bytes or too_many_bytes:
            raise RunFault(
                "impossible_resume",
                f"the groups carried over need {self._reserved_bytes} bytes, the largest "
                f"{largest}; allowed are {rule.max_bytes} and {rule.slot_bytes}; "
                f"raise the limits; {self._recent()}",
            )
        if not self._fits([]):
            raise RunFault("impossible_resume", self._impossible())

    def validate(self) -> None:
        """Recount everything and test the invariant (a scan: for tests)."""
        states = Counter(g.state for g in self._groups.values())
        assert states[GroupState.COMPLETED] == self._num_completed
        assert states[GroupState.TAKEN] == self._num_taken == sum(map(len, self._taken.values()))
        untaken = [g for g in self._groups.values() if g.state is not GroupState.TAKEN]
        assert Counter(g.source for g in untaken) == self._untaken
        assert sum(map(len, self._completed.values())) == self._num_completed
        assert all(self._completed.values())
        assert self._reserved_bytes == sum(g.num_bytes for g in self._groups.values())
        assert len(self._groups) <= self.rule.num_slots
        assert 0 <= self.left <= self.rule.groups_per_batch
        assert self.step - self.published in (0, 1)
        self._check_past_due()
        assert self._fits([]), self._impossible()

    # -- inside ------------------------------------------------------------------------------

    def _add(self, group: Group) -> None:
        self._groups[group.group_id] = group
        self._reserved_bytes += group.num_bytes
        self._count(group.source, +1)

    def _free(self, group: Group) -> None:
        del self._groups[group.group_id]
        self._reserved_bytes -= group.num_bytes

    def _count(self, source: int, change: int) -> None:
        self._untaken[source] += change
        if self._untaken[source] == 0:
            del self._untaken[source]

    def _raise_source(self, group: Group, version: int) -> None:
        if version > group.source:
            self._count(group.source, -1)
            group.source = version
            self._count(version, +1)

    def _put_completed(self, group: Group) -> None:
        group.state = GroupState.COMPLETED
        self._completed.setdefault(group.source, OrderedDict())[group.group_id] = None
        self._num_completed += 1

    def _pop_completed(self, group: Group) -> None:
        bucket = self._completed[group.source]
        del bucket[group.group_id]
        if not bucket:
            del self._completed[group.source]
        self._num_completed -= 1

    def _stalest(self, num_groups: int) -> list[tuple[int, int]]:
        """Plan a take of the stalest: (source, how many of its bucket), stalest first."""
        plan = []
        for source in sorted(self._completed):
            if num_groups == 0:
                break
            count = min(num_groups, len(self._completed[source]))
            plan.append((source, count))
            num_groups -= count
        return plan

    def _fits(self, chosen: Iterable[tuple[int, int]]) -> bool:
        """Test rule 3 at every horizon that has a group due, once `chosen` are taken.

        Horizons in between need no test: the right-hand side only grows with j.
        """
        bound = self.rule.max_steps_off_policy
        if bound is None:
            return True
        removed = dict(chosen)
        places = self.left - sum(removed.values())
        due = 0
        for source in sorted(self._untaken):
            due += self._untaken[source] - removed.get(source, 0)
            horizon = source + bound - self.step
            if due > self.rule.groups_per_batch * horizon + places:
                return False
        return True

    def _take(self, chosen: list[tuple[int, int]], closes: bool) -> Taken:
        group_ids = []
        for source, count in chosen:
            for group_id in list(islice(self._completed[source], count)):
                group = self._groups[group_id]
                self._pop_completed(group)
                self._count(source, -1)
                group.state = GroupState.TAKEN
                group.step = self.step
                self._num_taken += 1
                group_ids.append(group_id)
        self._taken.setdefault(self.step, []).extend(group_ids)
        self.left = 0 if closes else self.left - len(group_ids)
        self._tell("take", len(group_ids))
        return Taken(tuple(group_ids), closes)

    def _take_short(self) -> TakeAnswer:
        """Answer a take that too few completed groups are there for."""
        if not self.exhausted or self.num_in_flight > 0:
            return Wait("fill")
        if self._num_completed > 0:
            return self._take(self._stalest(self._num_completed), closes=True)
        if self._taken.get(self.step):
            return self._take([], closes=True)
        return EndOfTraining()

    def _check_past_due(self) -> None:
        bound = self.rule.max_steps_off_policy
        if bound is None or not self._untaken:
            return
        oldest = min(self._untaken)
        if oldest + bound < self.step:
            raise RunFault(
                "past_due",
                f"a group sampled by version {oldest} is untaken at step {self.step}, "
                f"bound {bound}; {self._recent()}",
            )

    def _in_state(self, group_id: int, state: GroupState, event: str) -> Group:
        group = self._groups.get(group_id)
        self._require(group is not None, event, group_id, "not outstanding")
        assert group is not None
        self._require(group.state is state, event, group_id, f"it is {group.state.value}")
        return group

    def _require(self, condition: bool, event: str, group_id: int, why: str) -> None:
        if not condition:
            raise InvalidTransition(f"{event}({group_id}): {why}; {self._recent()}")

    def _tell(self, event: str, number: int) -> None:
        self._story.append(event if number < 0 else f"{event}({number})")

    def _recent(self) -> str:
        return (
            f"step {self.step}, published {self.published}, left {self.left}, "
            f"{self.gauges()}, recent events: {' '.join(self._story)}"
        )

    def _impossible(self) -> str:
        due = ", ".join(f"{count} from version {s}" for s, count in sorted(self._untaken.items()))
        return (
            f"with {self.rule} the untaken groups ({due or 'none'}) cannot all be trained within "
            f"the bound; raise max_steps_off_policy or groups_per_batch; {self._recent()}"
        )
