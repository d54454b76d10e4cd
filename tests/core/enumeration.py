"""A model checker of the shipped Pacing class: every interleaving of every event, breadth first.

It runs the class itself, not a model of it: a state is thawed into a Pacing, one event is applied,
and the result is frozen into a key. Keys are canonical, so that the graph is finite and small:

    versions   are relative to `published`; without a bound (K = none) only their order matters
    groups     are interchangeable within (state, source, min_version, bytes, step, dropped)

What the world may do (`_World`): a sampler holds any version from its order's `min_version` up to
the newest made, which may be public before the scheduler hears of it (one more for each batch
that is closed and not yet published). It may die, its data may be dropped, in any state. The
learner takes any n that divides B, mixed at will (so all learners with one n are covered), may
prefetch, hand back, close short and publish. Data may end at any moment.

Two ways of keying; test_pacing_enumeration.py checks that the second leaves out no behaviour:

    exact      everything above is in the key
    reduced    left out of the key, because nothing reads it until one event that is tried here
               with every value it can have:
                 - min_version: it is at most the source (asserted at each event), and sources only
                   move up, so what it still allows is what the source allows
                 - the sources and `dropped` marks of taken groups: only hand_back reads them; it is
                   tried with every multiset of sources that a take can have let through
                 - `exhausted`: end_of_data commutes with all but admit and take; so it is tried
                   before every take, and the states that only it can reach are explored

Every state is checked against definitions written out literally below, not only by validate().
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations, combinations_with_replacement
from types import ModuleType
from typing import Any, NamedTuple

from asyncrl_node.core import pacing as shipped
from asyncrl_node.errors import InvalidTransition, RunFault

BASE = 1000
"""`published` of every thawed state; any number would do."""

FIELDS = {
    "rule", "published", "step", "left", "exhausted", "_groups", "_untaken", "_completed",
    "_num_completed", "_taken", "_num_taken", "_reserved_bytes", "_story",
}  # fmt: skip
"""The fields of a Pacing; a new one must be thawed too (see `test_the_key_knows_every_field`)."""


class Setting(NamedTuple):
    """What one graph is about."""

    groups_per_batch: int
    pipeline_depth: int
    max_steps_off_policy: int | None
    num_steps: int | None = None
    """Steps until last_version; None: no step limit."""
    carry: bool = True
    """Start also from every resume state that check_possible accepts, not only from nothing."""
    exact: bool = False
    group_bytes: tuple[int, ...] = (1,)
    """What a group may need; a slot is as large as the largest."""
    max_bytes: int | None = None
    thin: bool = False
    """Leave out the events of a sampler that lead where two others in a row lead."""

    def __str__(self) -> str:
        b, d, k, steps, *_ = self
        words = [f"B={b} D={d} K={'none' if k is None else k}"]
        words += [f"steps={steps}"] if steps is not None else []
        words += ["exact"] if self.exact else ["thin"] if self.thin else []
        words += [] if self.carry else ["fresh"]
        words += [f"bytes={self.group_bytes}/{self.max_bytes}"] if self.max_bytes else []
        return " ".join(words)

    @property
    def takes(self) -> tuple[int, ...]:
        """Every n that divides B."""
        batch = self.groups_per_batch
        return tuple(n for n in range(1, batch + 1) if batch % n == 0)


class Key(NamedTuple):
    """A canonical state. Groups are small integers, see `_code`; sources relative to published."""

    exhausted: bool
    ahead: bool
    """True when the batch collected is that of step published + 1."""
    left: int
    first: tuple[int, ...]
    """Taken by step `published`."""
    second: tuple[int, ...]
    """Taken by step `published` + 1 (prefetch)."""
    flight: tuple[int, ...]
    """In flight, sorted."""
    completed: tuple[int, ...]
    """Completed and untaken, in the order in which takes choose."""
    remaining: int
    """Steps to the step limit; -1 without one."""


Event = tuple[str, Any, Key]
"""Its name, its detail and the state that it leads to."""

HELPFUL = {"admit", "finish", "publish"}
"""Events that bring the run forward, besides takes."""


class Report(NamedTuple):
    """What a graph came to."""

    setting: Setting
    states: int
    transitions: int
    worst_staleness: int
    waits_for_stragglers: int
    cpu_s: float

    def __str__(self) -> str:
        return (
            f"{self.setting!s:34s} {self.states:8d} states {self.transitions:9d} transitions "
            f"worst staleness {'-' if self.setting[2] is None else self.worst_staleness} "
            f"{self.waits_for_stragglers:6d} waits {self.cpu_s:6.1f} s"
        )


class Breach(AssertionError):
    """A property that does not hold, with the way there."""


# -- codes: one group as a small integer, ordered by source ---------------------------------------

_OFFSET = 32


def _code(source: int, min_version: int, num_bytes: int, dropped: bool = False) -> int:
    return (source + _OFFSET) << 16 | (min_version + _OFFSET) << 8 | dropped << 7 | num_bytes


def source_of(code: int) -> int:
    """The source of a group, relative to `published`."""
    return (code >> 16) - _OFFSET


def _min_version_of(code: int) -> int:
    return (code >> 8 & 255) - _OFFSET


def _bytes_of(code: int) -> int:
    return code & 127


def _dropped_of(code: int) -> bool:
    return bool(code >> 7 & 1)


# -- thaw and freeze ------------------------------------------------------------------------------


class Freezer:
    """Turns keys into Pacing objects of `core` (the shipped module or a mutant) and back."""

    def __init__(self, core: ModuleType | Any, setting: Setting) -> None:
        self.core = core
        self.setting = setting
        self._rules: dict[int, Any] = {}
        self.states = (
            core.GroupState.IN_FLIGHT,
            core.GroupState.COMPLETED,
            core.GroupState.TAKEN,
        )

    def rule(self, remaining: int) -> Any:
        """The rule, with its step limit `remaining` steps after BASE."""
        if remaining not in self._rules:
            setting = self.setting
            self._rules[remaining] = self.core.PacingRule(
                groups_per_batch=setting.groups_per_batch,
                pipeline_depth=setting.pipeline_depth,
                max_steps_off_policy=setting.max_steps_off_policy,
                slot_bytes=max(setting.group_bytes),
                max_bytes=setting.max_bytes,
                last_version=None if remaining < 0 else BASE + remaining,
            )
        return self._rules[remaining]

    def thaw(self, key: Key) -> Any:
        """Make a Pacing in the state of `key`; groups are numbered flight, completed, taken."""
        return Mold(self, key).cast()

    def freeze(self, pacing: Any) -> Key:
        """Name the state of `pacing`, recounting on the way everything that it keeps counted."""
        exact = self.setting.exact
        in_flight_state, completed_state, _ = self.states
        shift = _OFFSET - pacing.published
        flight: list[int] = []
        untaken: dict[int, int] = {}
        reserved = num_completed = num_taken = 0
        groups = pacing._groups
        for group in groups.values():
            state = group.state
            num_bytes = group.num_bytes
            reserved += num_bytes
            if state is in_flight_state:
                source = group.source
                min_version = group.min_version
                untaken[source] = untaken.get(source, 0) + 1
                assert min_version <= source, "an attempt may be older than its due step says"
                assert not group.dropped, "a dropped group is in flight"
                lowest = min_version if exact else source
                flight.append((source + shift) << 16 | (lowest + shift) << 8 | num_bytes)
            elif state is completed_state:
                source = group.source
                untaken[source] = untaken.get(source, 0) + 1
                num_completed += 1
                assert not group.dropped, "a dropped group is completed again"
            else:
                num_taken += 1
        assert dict.__eq__(untaken, pacing._untaken), "untaken groups by source"
        assert num_completed == pacing._num_completed, "completed groups"
        assert num_taken == pacing._num_taken, "taken groups"
        assert reserved == pacing._reserved_bytes, "reserved bytes"
        completed: list[int] = []
        buckets = pacing._completed
        for source in sorted(buckets):
            assert buckets[source], "an empty bucket"
            for group_id in buckets[source]:
                group = groups[group_id]
                assert group.source == source, "a group in another's bucket"
                assert group.state is completed_state, "a bucket holds what is not completed"
                completed.append((source + shift) << 16 | group.num_bytes)
        assert len(completed) == num_completed, "buckets of completed groups"
        ahead = pacing.step - pacing.published
        assert ahead in (0, 1), "the step is not published or one more"
        first: tuple[int, ...] = ()
        second: tuple[int, ...] = ()
        for step, ids in pacing._taken.items():
            num_taken -= len(ids)
            if step == pacing.published:
                first = self._freeze_taken(pacing, step, ids, shift)
            else:
                assert step == pacing.published + 1, "taken by no present step"
                second = self._freeze_taken(pacing, step, ids, shift)
        assert num_taken == 0, "taken groups by step"
        flight.sort()
        if self.setting.max_steps_off_policy is None:
            flight, completed = _close_gaps(flight, completed)
        last = pacing.rule.last_version
        return Key(
            pacing.exhausted,
            ahead == 1,
            pacing.left,
            first,
            second,
            tuple(flight),
            tuple(completed),
            -1 if last is None else last - pacing.published,
        )

    def _freeze_taken(self, pacing: Any, step: int, ids: list[int], shift: int) -> tuple[int, ...]:
        codes = []
        is_open = step == pacing.step and pacing.left > 0
        exact = self.setting.exact
        for group_id in ids:
            group = pacing._groups[group_id]
            assert group.state is self.states[2], "a batch holds what is not taken"
            assert group.step == step, "a group in another's batch"
            code = group.num_bytes
            if exact:
                code |= group.dropped << 7
                if is_open:
                    code |= (group.source + shift) << 16
            codes.append(code)
        codes.sort()
        return tuple(codes)

    def start_keys(self) -> Iterator[Key]:
        """Yield the states in which a run may begin: empty, or carried over from another."""
        setting = self.setting
        slots = setting.groups_per_batch * (setting.pipeline_depth + 1)
        remaining = -1 if setting.num_steps is None else setting.num_steps
        bound = setting.max_steps_off_policy
        oldest = -slots if bound is None else -bound
        kinds = [_code(s, -_OFFSET, b) for s in range(oldest, 1) for b in setting.group_bytes]
        seen = set()
        for count in range(slots + 1 if setting.carry else 1):
            for carried in combinations_with_replacement(kinds, count):
                if bound is None and carried != tuple(_close_gaps([], list(carried))[1]):
                    continue
                pacing = self.resume(carried, remaining)
                if pacing is not None:
                    key = self.freeze(pacing)
                    assert key not in seen, "a resume state twice"
                    seen.add(key)
                    yield key

    def resume(self, carried: tuple[int, ...], remaining: int = -1) -> Any | None:
        """Carry completed groups into a new Pacing; None if it refuses them."""
        pacing = self.core.Pacing(self.rule(remaining), BASE)
        for number, code in enumerate(carried):
            pacing.carry(number, source_of(code) + BASE, _bytes_of(code))
        try:
            pacing.check_possible()
        except RunFault as fault:
            if fault.name != "impossible_resume":
                raise
            return None
        return pacing


class Mold:
    """Casts as many equal Pacing objects of one state as there are events to try on it."""

    def __init__(self, freezer: Freezer, key: Key) -> None:
        in_flight, completed, taken = freezer.states
        rows = [(code, in_flight, -1) for code in key.flight]
        rows += [(code, completed, -1) for code in key.completed]
        rows += [(code, taken, BASE) for code in key.first]
        rows += [(code, taken, BASE + 1) for code in key.second]
        self.core = freezer.core
        self.rule = freezer.rule(key.remaining)
        self.key = key
        self.num_groups = len(rows)
        self.fields = []
        self.untaken: dict[int, int] = {}
        self.buckets: dict[int, OrderedDict[int, None]] = {}
        self.taken: dict[int, list[int]] = {}
        for number, (code, state, step) in enumerate(rows):
            source = source_of(code) + BASE
            least = _min_version_of(code) + BASE if state is in_flight else source
            dropped = _dropped_of(code)
            self.fields.append((number, source, least, _bytes_of(code), state, step, dropped))
            if state is taken:
                self.taken.setdefault(step, []).append(number)
                continue
            self.untaken[source] = self.untaken.get(source, 0) + 1
            if state is completed:
                self.buckets.setdefault(source, OrderedDict())[number] = None
        self.reserved = sum(_bytes_of(code) for code, _, _ in rows)
        self.groups = {row[0]: self._group(*row) for row in self.fields}

    def _group(self, number, source, least, num_bytes, state, step, dropped) -> Any:
        group = object.__new__(self.core.Group)
        group.group_id = number
        group.source = source
        group.min_version = least
        group.num_bytes = num_bytes
        group.state = state
        group.step = step
        group.dropped = dropped
        return group

    def cast(self, named: Iterable[int] | None = None) -> Any:
        """Make one. Groups that the event does not name are shared, see `check`; None: all new."""
        key = self.key
        groups = self.groups.copy()
        for number in groups if named is None else named:
            groups[number] = self._group(*self.fields[number])
        pacing = object.__new__(self.core.Pacing)
        pacing.rule = self.rule
        pacing.published = BASE
        pacing.step = BASE + key.ahead
        pacing.left = key.left
        pacing.exhausted = key.exhausted
        pacing._groups = groups
        pacing._untaken = untaken = Counter.__new__(Counter)
        dict.update(untaken, self.untaken)
        pacing._completed = {source: ids.copy() for source, ids in self.buckets.items()}
        pacing._num_completed = len(key.completed)
        pacing._taken = {step: ids[:] for step, ids in self.taken.items()}
        pacing._num_taken = len(key.first) + len(key.second)
        pacing._reserved_bytes = self.reserved
        pacing._story = deque(maxlen=20)
        return pacing

    def check(self) -> None:
        """Fail if an event has changed a group that it does not name."""
        for number, source, least, num_bytes, state, step, dropped in self.fields:
            group = self.groups[number]
            assert group.group_id == number
            assert group.source == source
            assert group.min_version == least
            assert group.num_bytes == num_bytes
            assert group.state is state
            assert group.step == step
            assert group.dropped == dropped


def _close_gaps(flight: list[int], completed: list[int]) -> tuple[list[int], list[int]]:
    """Without a bound only the order of old sources matters: number them -1, -2, ..."""
    old = sorted({s for s in map(source_of, flight + completed) if s < 0}, reverse=True)
    rank = {source: -1 - place for place, source in enumerate(old)}

    def renumber(code: int) -> int:
        source = source_of(code)
        moved = rank.get(source, source) - source
        low = moved if _min_version_of(code) == source else 0
        return code + (moved << 16) + (low << 8)

    return [renumber(code) for code in flight], [renumber(code) for code in completed]


# -- the definitions, literally -------------------------------------------------------------------


def due_within(sources: list[int], step: int, bound: int, horizon: int) -> int:
    """Count the groups due by step + horizon; the source s is due at s + bound."""
    return sum(1 for s in sources if s + bound <= step + horizon)


def rule_3(untaken: list[int], step: int, batch: int, bound: int | None, places: int) -> bool:
    """Rule 3 as written, `places` being left - n, `untaken` the sources after the n are taken."""
    if bound is None:
        return True
    return all(due_within(untaken, step, bound, j) <= batch * j + places for j in range(bound + 1))


@cache
def can_all_be_trained(due: tuple[int, ...], batch: int) -> bool:
    """Search every assignment: `due[j]` groups are due j steps from now, at most `batch` a step."""
    if not due or sum(due) == 0:
        return True
    must, *later = due
    if must > batch:
        return False
    return any(
        can_all_be_trained(tuple(rest), batch) for rest in _remove_up_to(batch - must, later)
    )


def _remove_up_to(count: int, due: list[int]) -> Iterator[list[int]]:
    """Every way of training up to `count` of the groups that are not due yet."""
    if not due:
        yield []
        return
    for now in range(min(count, due[0]) + 1):
        for rest in _remove_up_to(count - now, due[1:]):
            yield [due[0] - now, *rest]


# -- the graph ------------------------------------------------------------------------------------


class Graph:
    """All states reachable in one setting; building it checks every state and every event."""

    def __init__(
        self,
        setting: Setting,
        core: ModuleType | Any = shipped,
        max_states: int = 2_000_000,
        refusals: bool = False,
    ) -> None:
        self.setting = setting
        self.core = core
        self.freezer = Freezer(core, setting)
        self.batch = setting.groups_per_batch
        self.bound = setting.max_steps_off_policy
        self.slots = self.batch * (setting.pipeline_depth + 1)
        self.staleness_limit = self.bound
        if setting.pipeline_depth == 0 and not setting.carry:
            self.staleness_limit = 0
        self.refusals = refusals
        self.max_states = max_states
        self.keys: list[Key] = []
        self.index: dict[Key, int] = {}
        self.came_from: list[tuple[int, str, Any]] = []
        self.helpful: list[list[int]] = []
        """For each state, from which it is reached by admit, complete (at the source), publish."""
        self.by_take: dict[int, list[list[int]]] = {n: [] for n in setting.takes}
        """For each n and each state, from which it is reached by take(n)."""
        self.ends: dict[int, set[int]] = {n: set() for n in setting.takes}
        """States that answer take(n) with EndOfTraining."""
        self.resumable: set[tuple[int, ...]] = set()
        """The completed groups of checkpoints that are known to be resumable."""
        self.transitions = 0
        self.worst_staleness = 0
        self.waits = 0
        self._now = -1
        begin = time.process_time()
        for key in self.freezer.start_keys():
            self._reach(key, "begin", key.completed or None)
        while self._now + 1 < len(self.keys):
            self._now += 1
            self._explore(self.keys[self._now])
        self.cpu_s = time.process_time() - begin

    def report(self) -> Report:
        """Sum up."""
        return Report(
            self.setting,
            len(self.keys),
            self.transitions,
            self.worst_staleness,
            self.waits,
            self.cpu_s,
        )

    def way_to(self, state: int) -> str:
        """Tell the events that lead to a state."""
        events = []
        while state >= 0:
            state, event, detail = self.came_from[state]
            events.append(event if detail is None else f"{event}{detail}")
        return " > ".join(reversed(events))

    # -- liveness ------------------------------------------------------------------------------

    def states_without_progress(self, num_groups: int) -> list[int]:
        """Search backwards from publication and from the end, for a learner that takes n at a time.

        Only helpful events count: admissions, completions at the group's own source, takes and
        publications. No drop, no crash, no newer weights are needed to get on. A state that is
        left over can never publish again: a deadlock.
        """
        takes = self.by_take[num_groups]
        good = [self.keys[i].left == 0 or self.keys[i].ahead for i in range(len(self.keys))]
        for state in self.ends[num_groups]:
            good[state] = True
        queue = [state for state, is_good in enumerate(good) if is_good]
        while queue:
            state = queue.pop()
            for before in self.helpful[state] + takes[state]:
                if not good[before]:
                    good[before] = True
                    queue.append(before)
        return [
            state
            for state, is_good in enumerate(good)
            if not is_good and self.keys[state].left % num_groups == 0
        ]

    def check_progress(self) -> None:
        """Fail if some state cannot get on; see `states_without_progress`."""
        for num_groups in self.setting.takes:
            stuck = self.states_without_progress(num_groups)
            if stuck:
                raise Breach(
                    f"{self.setting}, n = {num_groups}: {len(stuck)} states can never publish "
                    f"again, the first after {self.way_to(stuck[0])}: {self.keys[stuck[0]]}"
                )

    # -- breadth-first search --------------------------------------------------------------------

    def _reach(self, key: Key, event: str, detail: Any) -> int:
        state = self.index.setdefault(key, len(self.keys))
        if state == len(self.keys):
            if state >= self.max_states:
                raise Breach(f"{self.setting}: more than {self.max_states} states, not finite?")
            self.keys.append(key)
            self.came_from.append((self._now, event, detail))
            self.helpful.append([])
            for takes in self.by_take.values():
                takes.append([])
        return state

    def _explore(self, key: Key) -> None:
        event, detail = "validate", None
        try:
            world = _World(self, key)
            pacing = world.thaw()
            pacing.validate()
            self._check_state(key, pacing)
            for event, detail, successor in world.events():
                self.transitions += 1
                reached = self._reach(successor, event, detail)
                if event == "take":
                    self.by_take[detail][reached].append(self._now)
                elif event in HELPFUL:
                    self.helpful[reached].append(self._now)
        except (AssertionError, RunFault) as error:
            raise Breach(
                f"{self.setting}: {type(error).__name__}: {error}\n"
                f"after {self.way_to(self._now)} (tried after {event}{detail})\nin {key}"
            ) from error

    def _check_state(self, key: Key, pacing: Any) -> None:
        """Test the invariant and the rules, each as it is written."""
        step = int(key.ahead)
        untaken = [source_of(code) for code in (*key.flight, *key.completed)]
        taken = len(key.first) + len(key.second)
        assert len(untaken) + taken <= self.slots, "more outstanding than slots"
        if self.bound is not None:
            assert all(s + self.bound >= step for s in untaken), "past due"
            for horizon in range(self.bound + 1):
                due = due_within(untaken, step, self.bound, horizon)
                assert due <= self.batch * horizon + key.left, f"invariant at {horizon}"
        open_taken = key.second if key.ahead else key.first
        if key.left > 0:
            assert len(open_taken) + key.left == self.batch, "places of the open batch"
        if key.ahead and not key.exhausted:
            assert len(key.first) == self.batch, "a closed batch that is not whole"
        if key.left == self.batch and not key.ahead:
            assert taken == 0, "slots held after publication"
            self.check_checkpoint(key.completed)
        if self.setting.num_steps is not None and not self.setting.carry:
            assert len(untaken) <= self._places(key), "a group that can never be trained"
        gauges = pacing.gauges()
        assert gauges == (len(key.flight), len(key.completed), taken)
        assert gauges.outstanding == pacing.num_outstanding == len(untaken) + taken

    def check_checkpoint(self, completed: tuple[int, ...]) -> None:
        """What is completed right after a publication or a hand back can be carried over."""
        if completed not in self.resumable:
            resumed = self.freezer.resume(completed)
            assert resumed is not None, "a checkpoint cannot be resumed"
            self.resumable.add(completed)

    def _places(self, key: Key) -> int:
        """Places of this and all later batches up to the step limit."""
        steps_after = key.remaining - 1 - int(key.ahead)
        return 0 if steps_after < 0 else key.left + self.batch * steps_after


class _World:
    """Everything that may happen in one state."""

    def __init__(self, graph: Graph, key: Key, before_the_end: _World | None = None) -> None:
        self.graph = graph
        self.key = key
        self.setting = graph.setting
        self.freezer = graph.freezer
        self.mold = before_the_end.mold if before_the_end else Mold(graph.freezer, key)
        self.is_twin = before_the_end is not None
        """True for the twin of the present state right after the end of the data."""
        self.next_id = self.mold.num_groups
        self.num_flight = len(key.flight)
        self.num_untaken = len(key.flight) + len(key.completed)
        self.newest = int(key.ahead) + (key.left == 0)
        """The newest version that a sampler may hold: one more for each closed batch."""

    def thaw(self, named: Iterable[int] | None = None) -> Any:
        """Make a Pacing in this state for an event that changes the groups named."""
        pacing = self.mold.cast(named)
        if self.is_twin:
            pacing.end_of_data()
        return pacing

    def events(self) -> Iterator[Event]:
        """Yield every event with the state that it leads to; check its answer."""
        yield from self.admissions()
        for place, code in enumerate(self.key.flight):
            if place == 0 or self.key.flight[place - 1] != code:
                yield from self.sampling(place, code)
        yield from self.drops_of_completed()
        yield from self.drops_of_taken()
        if self.key.left > 0:
            for num_groups in self.setting.takes:
                if num_groups <= self.key.left:
                    yield from self.take(num_groups)
            yield from self.hand_backs()
        yield from self.publications()
        if not self.key.exhausted:
            yield from self.end_of_data()
        if self.graph.refusals:
            self.refuse()
        self.mold.check()

    # -- the samplers ----------------------------------------------------------------------------

    def admissions(self) -> Iterator[Event]:
        key, setting = self.key, self.setting
        everybody = (*key.flight, *key.completed, *key.first, *key.second)
        room = not key.exhausted and len(everybody) < self.graph.slots
        if key.remaining >= 0:
            room = room and self.num_untaken < self.graph._places(key)
        for num_bytes in setting.group_bytes:
            fits = room
            if setting.max_bytes is not None:
                fits = room and sum(map(_bytes_of, everybody)) + num_bytes <= setting.max_bytes
            pacing = self.thaw(())
            assert pacing.can_admit(num_bytes) == fits, f"can_admit is not {fits}"
            if fits:
                least = pacing.admit(self.next_id, num_bytes)
                group = pacing.group(self.next_id)
                assert least == BASE == group.source == group.min_version, "min_version"
                assert group.num_bytes == num_bytes, "the bytes reserved"
                yield "admit", num_bytes, self.freezer.freeze(pacing)

    def sampling(self, place: int, code: int) -> Iterator[Event]:
        """What a sampler can do with one in-flight group.

        Thin: to start at version s + 2 is to start at s + 1, then at s + 2; a restart is a start
        at `published`; to complete with newer data is to start at them and finish; to fail is to
        finish and be filtered.
        """
        source, least = source_of(code), _min_version_of(code)
        started = source > least
        newest = self.newest if not self.setting.thin else min(self.newest, source + 1)
        for version in range(least, newest + 1):
            if started or (version <= source and not self.setting.exact):
                continue  # an attempt starts once, and nothing changes
            pacing = self.thaw((place,))
            pacing.start(place, BASE + version)
            assert pacing.group(place).source == BASE + max(source, version), "source on start"
            yield "start", (source, version), self.freezer.freeze(pacing)
        newest = source if self.setting.thin else max(self.newest, source)
        for version in range(source, newest + 1):
            pacing = self.thaw((place,))
            pacing.complete(place, BASE + version)
            assert pacing.group(place).source == BASE + version, "source on completion"
            word = "finish" if version == source else "complete"
            yield word, (source, version), self.freezer.freeze(pacing)
        if self.setting.thin:
            return
        pacing = self.thaw((place,))
        least = pacing.restart(place)
        group = pacing.group(place)
        assert least == group.min_version, "a restart is told another min_version"
        assert least >= BASE, "a restart is sampled by old weights"
        assert group.source >= BASE + source, "a due step moves down"
        assert least >= group.source, "the new attempt may be older than its due step says"
        yield "restart", source, self.freezer.freeze(pacing)
        yield from self.drop(place, "lose", source)

    def drops_of_completed(self) -> Iterator[Event]:
        for place, code in enumerate(self.key.completed):
            if place == 0 or self.key.completed[place - 1] != code:
                yield from self.drop(self.num_flight + place, "filter", source_of(code))

    def drop(self, group_id: int, event: str, source: int) -> Iterator[Event]:
        pacing = self.thaw((group_id,))
        before = pacing.num_outstanding
        assert pacing.drop(group_id) is True, "an untaken group keeps its slot"
        assert pacing.group(group_id) is None
        assert pacing.num_outstanding == before - 1
        yield event, source, self.freezer.freeze(pacing)

    def drops_of_taken(self) -> Iterator[Event]:
        """A taken group holds slot and place, whatever becomes of it."""
        taken = (*self.key.first, *self.key.second)
        for place, code in enumerate(taken):
            if place > 0 and taken[place - 1] == code and place != len(self.key.first):
                continue
            group_id = self.num_untaken + place
            pacing = self.thaw((group_id,))
            assert pacing.drop(group_id) is False, "a taken group frees its slot"
            assert pacing.group(group_id).dropped
            assert pacing.left == self.key.left
            step = BASE if place < len(self.key.first) else BASE + 1
            assert group_id not in pacing.taken_in(step), "a dropped group is trained"
            after = self.freezer.freeze(pacing)
            if not self.setting.exact:
                assert after == self.key, "dropping a taken group changes something"
            yield "drop_taken", place, after

    # -- the learner -----------------------------------------------------------------------------

    def take(self, num_groups: int) -> Iterator[Event]:
        key, graph = self.key, self.graph
        pacing = self.thaw(range(self.num_flight, self.num_untaken))
        expected = self.expected_answer(num_groups)
        answer = pacing.take(num_groups)
        word = type(answer).__name__
        if word == "Wait":
            word = answer.reason
        assert word == expected, f"take({num_groups}) answers {word}, the rule says {expected}"
        after = self.freezer.freeze(pacing)
        if word == "EndOfTraining":
            assert after == key, "the end changes something"
            self.check_end()
            if not self.is_twin:
                graph.ends[num_groups].add(graph._now)
        elif word == "Taken":
            self.check_taken(pacing, answer, num_groups)
            yield "take", num_groups, after
        else:
            assert after == key, "waiting changes something"
            graph.waits += not self.is_twin and word == "stragglers"
            if word == "fill" and not key.flight:
                assert pacing.can_admit() or key.ahead, "waits for a fill that cannot come"

    def expected_answer(self, num_groups: int) -> str:
        """Answer a take from the definitions alone."""
        key, graph = self.key, self.graph
        if key.remaining >= 0 and graph._places(key) == 0:
            return "EndOfTraining"
        completed = [source_of(code) for code in key.completed]
        if len(completed) < num_groups:
            if not key.exhausted or key.flight:
                return "fill"
            has_any = completed or (key.second if key.ahead else key.first)
            return "Taken" if has_any else "EndOfTraining"
        flight = [source_of(code) for code in key.flight]
        places = key.left - num_groups
        step = int(key.ahead)

        def passes(rest: list[int]) -> bool:
            return rule_3(flight + rest, step, graph.batch, graph.bound, places)

        stalest_first = passes(completed[num_groups:])
        if not stalest_first and len(completed) <= 6:
            everybody = range(len(completed))
            assert not any(
                passes([completed[i] for i in everybody if i not in chosen])
                for chosen in map(set, combinations(everybody, num_groups))
            ), "another set passes where the stalest do not"
        assert stalest_first or flight, "the rule fails with nothing in flight"
        return "Taken" if stalest_first else "stragglers"

    def check_taken(self, pacing: Any, answer: Any, num_groups: int) -> None:
        key, graph = self.key, self.graph
        step = BASE + key.ahead
        short = len(key.completed) < num_groups
        expected = [source_of(code) for code in key.completed[:num_groups]]
        got = [pacing.group(group_id).source - BASE for group_id in answer.group_ids]
        assert got == expected, "not the stalest, in order"
        assert answer.closes_batch == (short or num_groups == key.left), "closes_batch"
        assert pacing.left == (0 if answer.closes_batch else key.left - num_groups), "left"
        assert set(answer.group_ids) <= set(pacing.taken_in(step)), "taken_in"
        for source in got:
            staleness = key.ahead - source
            assert staleness >= 0, "trained before it was sampled"
            assert graph.staleness_limit is None or staleness <= graph.staleness_limit, (
                f"staleness {staleness}"
            )
            graph.worst_staleness = max(graph.worst_staleness, staleness)

    def check_end(self) -> None:
        """Nothing is left at the end, but what a resume carried beyond the step limit."""
        if self.key.remaining < 0 or not self.setting.carry:
            assert self.num_untaken == 0, "the end leaves groups behind"

    def hand_backs(self) -> Iterator[Event]:
        """Undo the takes of the open batch, whatever their sources are."""
        key = self.key
        open_taken = key.second if key.ahead else key.first
        first_id = self.next_id - len(open_taken)
        for taken in self.possible_takes(open_taken):
            pacing = self.thaw(range(first_id, self.next_id))
            for group_id, code in enumerate(taken, first_id):
                group = pacing.group(group_id)
                group.source, group.dropped = source_of(code) + BASE, _dropped_of(code)
            dropped = sum(map(_dropped_of, taken))
            outstanding = pacing.num_outstanding
            returned = pacing.hand_back()
            assert len(returned) == len(taken) - dropped, "handed back"
            assert pacing.num_outstanding == outstanding - dropped, "a dropped group came back"
            assert pacing.left == self.graph.batch, "places after a hand back"
            assert all(pacing.group(g).state.name == "COMPLETED" for g in returned)
            yield "hand_back", len(returned), self.freezer.freeze(pacing)
        if open_taken:
            self.close_short()

    def possible_takes(self, open_taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Every multiset of sources that the open batch may have taken."""
        if self.setting.exact or not open_taken:
            yield open_taken
            return
        limit = self.graph.staleness_limit
        step = int(self.key.ahead)
        oldest = min(map(source_of, self.key.completed), default=0) if limit is None else 0
        oldest = oldest - 1 if limit is None else step - limit
        newest = min(self.newest, step)
        for sources in combinations_with_replacement(range(oldest, newest + 1), len(open_taken)):
            pairs = zip(sources, open_taken, strict=True)
            yield tuple(_code(s, s, _bytes_of(code)) for s, code in pairs)
        for num_dropped in range(1, len(open_taken) + 1):
            yield tuple(
                _code(step, step, _bytes_of(code), dropped=place < num_dropped)
                for place, code in enumerate(open_taken)
            )

    def close_short(self) -> None:
        """Shutdown after the first update: what is whole fills the batch, which ends the run.

        A resume must be able to train the rest in time. What is in flight is sampled anew.
        """
        key, graph = self.key, self.graph
        pacing = self.thaw(range(self.num_flight, self.num_untaken))
        answer = pacing.close_short()
        assert answer.closes_batch
        assert pacing.left == 0
        filled = [pacing.group(group_id).source - BASE for group_id in answer.group_ids]
        assert filled == [source_of(code) for code in key.completed[: key.left]], "the stalest"
        assert graph.bound is None or all(key.ahead - s <= graph.bound for s in filled)
        freed = len(pacing.publish(BASE + 1))
        if key.ahead:
            assert pacing.left == 0, "the short batch is open again"
            freed += len(pacing.publish(BASE + 2))
        assert freed == len(key.first) + len(key.second) + len(filled), "freed by publications"
        assert pacing.gauges() == (len(key.flight), len(key.completed) - len(filled), 0)
        graph.check_checkpoint(self.freezer.freeze(pacing).completed)

    def publications(self) -> Iterator[Event]:
        key = self.key
        if key.left == 0 and not key.ahead:
            pacing = self.thaw(())
            pacing.collect_next()
            assert (pacing.step, pacing.left) == (BASE + 1, self.graph.batch)
            yield "collect_next", None, self.freezer.freeze(pacing)
        if key.left == 0 or key.ahead:
            pacing = self.thaw(())
            freed = pacing.publish(BASE + 1)
            start = self.num_untaken
            assert sorted(freed) == list(range(start, start + len(key.first))), "freed"
            assert all(pacing.group(group_id) is None for group_id in freed)
            expected = key.left if key.ahead else self.graph.batch
            assert (pacing.step, pacing.left) == (BASE + 1, expected), "the batch after it"
            yield "publish", len(freed), self.freezer.freeze(pacing)

    # -- the data --------------------------------------------------------------------------------

    def end_of_data(self) -> Iterator[Event]:
        pacing = self.thaw(())
        pacing.end_of_data()
        assert pacing.can_admit() is False, "admits after the end of the data"
        after = self.freezer.freeze(pacing)
        assert after == self.key._replace(exhausted=True), "the end of the data changes more"
        if self.setting.exact:
            yield "end_of_data", None, after
            return
        twin = _World(self.graph, after, before_the_end=self)
        for num_groups in self.setting.takes:
            if num_groups <= self.key.left:
                for _, _, successor in twin.take(num_groups):
                    if len(self.key.completed) < num_groups:
                        yield "take_short", num_groups, successor
                    else:
                        expected = successor._replace(exhausted=False)
                        assert expected in self.graph.index, "taken otherwise after the end"

    # -- what must be refused ----------------------------------------------------------------------

    def refuse(self) -> None:
        """Try everything illegal: each must raise InvalidTransition and change nothing."""
        pacing = self.thaw()
        for event, arguments in self.illegal(pacing):
            try:
                getattr(pacing, event)(*arguments)
            except InvalidTransition:
                continue
            raise AssertionError(f"{event}{arguments} is accepted")
        assert self.freezer.freeze(pacing) == self.key, "a refused event changed something"

    def illegal(self, pacing: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        key, nobody = self.key, self.next_id
        closed = key.left == 0
        if not pacing.can_admit():
            yield "admit", (nobody,)
        yield "admit", (nobody, max(self.setting.group_bytes) + 1)
        for event in ("start", "complete"):
            yield event, (nobody, BASE)
        yield "restart", (nobody,)
        yield "drop", (nobody,)
        for place, code in enumerate(key.flight):
            yield "start", (place, BASE + _min_version_of(code) - 1)
            yield "complete", (place, BASE + source_of(code) - 1)
            yield "admit", (place,)
            yield "carry", (place, BASE)
        yield "carry", (nobody, BASE + 1)
        for group_id in range(self.num_flight, nobody):
            yield "start", (group_id, BASE + 2)
            yield "complete", (group_id, BASE + 2)
            yield "restart", (group_id,)
        illegal_takes = set(range(-1, self.graph.batch + 2)) - set(self.setting.takes)
        illegal_takes |= {n for n in self.setting.takes if n > key.left}
        for num_groups in illegal_takes:
            yield "take", (num_groups,)
        if not closed or key.ahead:
            yield "collect_next", ()
        if closed:
            yield "hand_back", ()
        if closed or not (key.second if key.ahead else key.first):
            yield "close_short", ()
        if not closed and not key.ahead:
            yield "publish", (BASE + 1,)
        yield "publish", (BASE,)
        yield "publish", (BASE + 2,)


def explore(setting: Setting, core: ModuleType | Any = shipped, **options: Any) -> Report:
    """Build the graph of one setting, check that every state can get on, and sum up."""
    graph = Graph(setting, core, **options)
    graph.check_progress()
    return graph.report()


def all_bounded(max_batch: int, max_bound: int) -> list[tuple[int, int, int]]:
    """List every (B, D, K) with B <= max_batch and D <= K <= max_bound."""
    return [
        (batch, depth, bound)
        for batch in range(1, max_batch + 1)
        for bound in range(max_bound + 1)
        for depth in range(bound + 1)
    ]
