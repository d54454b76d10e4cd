"""A search for a difference between the shipped core and the rule as pacing.md states it.

The reference keeps nothing but a list of groups and recomputes everything at every question.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from types import ModuleType

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl_node.core import pacing as shipped
from tests.core.test_pacing import refused


class Member:
    """One group of the reference."""

    def __init__(self, group_id, source, num_bytes) -> None:
        self.group_id = group_id
        self.source = self.min_version = source
        self.num_bytes = num_bytes
        self.state = "flight"
        self.order = 0
        self.step = -1
        self.dropped = False


class Reference:
    """The rule as pacing.md states it, recomputed from the list of groups at every question."""

    def __init__(self, rule) -> None:
        self.rule = rule
        self.groups: list[Member] = []
        self.published = self.step = 0
        self.closed = False
        self.exhausted = False
        self.clock = 0

    def of(self, *states) -> list[Member]:
        return [g for g in self.groups if g.state in states]

    def get(self, group_id) -> Member:
        (found,) = [g for g in self.groups if g.group_id == group_id]
        return found

    @property
    def left(self) -> int:
        if self.closed:
            return 0
        taken = [g for g in self.of("taken") if g.step == self.step]
        return self.rule.groups_per_batch - len(taken)

    def places(self) -> int | None:
        if self.rule.last_version is None:
            return None
        steps = range(self.step + 1, self.rule.last_version)
        here = self.left if self.step < self.rule.last_version else 0
        return here + sum(self.rule.groups_per_batch for _ in steps)

    def can_admit(self, num_bytes) -> bool:
        rule = self.rule
        places = self.places()
        return (
            not self.exhausted
            and len(self.groups) + 1 <= rule.groups_per_batch * (rule.pipeline_depth + 1)
            and (
                rule.max_bytes is None
                or sum(g.num_bytes for g in self.groups) + num_bytes <= rule.max_bytes
            )
            and (places is None or len(self.of("flight", "done")) + 1 <= places)
        )

    def fits(self, chosen) -> bool:
        """Rule 3, at every j."""
        rule = self.rule
        bound = rule.max_steps_off_policy
        if bound is None:
            return True
        rest = [g for g in self.of("flight", "done") if g not in chosen]
        return all(
            sum(1 for g in rest if g.source + bound <= self.step + j)
            <= rule.groups_per_batch * j + self.left - len(chosen)
            for j in range(bound + 1)
        )

    def take(self, num_groups) -> tuple[str, list[int]]:
        done = sorted(self.of("done"), key=lambda g: (g.source, g.order))
        if self.places() == 0:
            return "EndOfTraining", []
        if len(done) < num_groups:
            if not self.exhausted or self.of("flight"):
                return "fill", []
            open_taken = [g for g in self.of("taken") if g.step == self.step]
            if not done and not open_taken:
                return "EndOfTraining", []
            chosen, closes = done, True
        else:
            chosen, closes = done[:num_groups], num_groups == self.left
            if not self.fits(chosen):
                if len(done) <= 8:
                    assert not any(map(self.fits, combinations(done, num_groups)))
                assert self.of("flight"), "stuck"
                return "stragglers", []
        for group in chosen:
            group.state, group.step = "taken", self.step
        self.closed = closes
        return "Taken", [g.group_id for g in chosen]

    def fill_up(self) -> list[int]:
        """The places that are open go to the stalest that are whole; the batch is closed."""
        done = sorted(self.of("done"), key=lambda g: (g.source, g.order))
        chosen = done[: self.left]
        for group in chosen:
            group.state, group.step = "taken", self.step
        self.closed = True
        return [g.group_id for g in chosen]

    def publish(self) -> list[int]:
        freed = [g for g in self.groups if g.state == "taken" and g.step == self.published]
        self.groups = [g for g in self.groups if g not in freed]
        self.published += 1
        if self.step < self.published:
            self.step, self.closed = self.published, False
        return [g.group_id for g in freed]


RULES = st.builds(
    lambda batch, depth, more, none, last, room: shipped.PacingRule(
        batch,
        depth,
        None if none else depth + more,
        slot_bytes=3,
        max_bytes=None if room is None else 3 * batch + room,
        last_version=last,
    ),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from([False, False, False, True]),
    st.none() | st.integers(1, 8),
    st.none() | st.integers(0, 12),
)
RARELY = st.integers(0, 9).map(lambda number: number == 0)


class PacingAgainstReference(RuleBasedStateMachine):
    """The shipped class and the reference see the same events and must give the same answers."""

    core: ModuleType = shipped

    @initialize(rule=RULES)
    def begin(self, rule) -> None:
        self.rule = rule
        self.pacing = self.core.Pacing(rule)
        self.reference = Reference(rule)
        self.next_id = 0
        self.fate: Counter[str] = Counter()
        self.ending = False

    def pick(self, data, *states) -> Member | None:
        members = self.reference.of(*states)
        return data.draw(st.sampled_from(members)) if members else None

    def newest(self) -> int:
        """The newest version made: one for each batch that is closed and not published."""
        reference = self.reference
        return reference.published + (reference.step > reference.published) + reference.closed

    @rule(num_bytes=st.integers(1, 3), count=st.integers(1, 4))
    def admit(self, num_bytes, count) -> None:
        for _ in range(count):
            expected = self.reference.can_admit(num_bytes) and not self.ending
            if self.ending:
                return
            assert self.pacing.can_admit(num_bytes) == expected
            if not expected:
                refused(self.pacing.admit, self.next_id, num_bytes)
                return
            assert self.pacing.admit(self.next_id, num_bytes) == self.reference.published
            self.reference.groups.append(Member(self.next_id, self.reference.published, num_bytes))
            self.next_id += 1
            self.fate["admitted"] += 1

    @rule(data=st.data())
    def start(self, data) -> None:
        group = self.pick(data, "flight")
        if group is not None:
            version = data.draw(st.integers(group.min_version, self.newest()))
            self.pacing.start(group.group_id, version)
            group.source = max(group.source, version)
            refused(self.pacing.start, group.group_id, group.min_version - 1)

    @rule(data=st.data(), count=st.integers(1, 4))
    def complete(self, data, count) -> None:
        for _ in range(count):
            group = self.pick(data, "flight")
            if group is None:
                return
            version = data.draw(st.integers(group.source, max(group.source, self.newest())))
            self.pacing.complete(group.group_id, version)
            group.source, group.state = version, "done"
            self.reference.clock += 1
            group.order = self.reference.clock

    @rule(data=st.data(), really=RARELY)
    def drop(self, data, really) -> None:
        group = self.pick(data, "flight", "done", "taken") if really else None
        if group is None:
            return
        freed = self.pacing.drop(group.group_id)
        assert freed == (group.state != "taken")
        if freed:
            self.reference.groups.remove(group)
        self.fate["dropped"] += not group.dropped
        group.dropped = True

    @rule(data=st.data(), really=RARELY)
    def crash(self, data, really) -> None:
        """A sampler dies: some of what is in flight starts anew."""
        for group in self.reference.of("flight") if really else ():
            if data.draw(st.booleans()):
                least = self.pacing.restart(group.group_id)
                group.source = group.min_version = max(group.source, self.reference.published)
                assert least == group.min_version

    @precondition(lambda self: not self.ending)
    @rule(data=st.data(), whole=st.booleans())
    def take(self, data, whole) -> None:
        batch, left = self.rule.groups_per_batch, self.reference.left
        divisors = [n for n in range(1, batch + 1) if batch % n == 0]
        legal = [n for n in divisors if n <= left]
        for num_groups in set(range(batch + 2)) - set(legal):
            refused(self.pacing.take, num_groups)
        if not legal:
            return
        num_groups = max(legal) if whole else data.draw(st.sampled_from(legal))
        word, ids = self.reference.take(num_groups)
        answer = self.pacing.take(num_groups)
        if type(answer).__name__ == "Wait":
            assert answer.reason == word
            return
        assert type(answer).__name__ == word
        if word == "Taken":
            assert list(answer.group_ids) == ids
            assert answer.closes_batch == self.reference.closed
            for group_id in ids:
                staleness = self.reference.step - self.reference.get(group_id).source
                assert staleness >= 0
                bound = self.rule.max_steps_off_policy
                assert bound is None or staleness <= (bound if self.rule.pipeline_depth else 0)

    @rule()
    def publish(self) -> None:
        reference = self.reference
        if not reference.closed and reference.step == reference.published:
            refused(self.pacing.publish, reference.published + 1)
            return
        dropped = {g.group_id for g in reference.groups if g.dropped}
        freed = reference.publish()
        assert sorted(self.pacing.publish(reference.published)) == sorted(freed)
        self.fate["trained"] += len(set(freed) - dropped)

    @rule()
    def collect_next(self) -> None:
        reference = self.reference
        if not reference.closed or reference.step > reference.published or self.ending:
            if not self.ending:
                refused(self.pacing.collect_next)
            return
        self.pacing.collect_next()
        reference.step, reference.closed = reference.step + 1, False

    @rule(really=RARELY)
    def hand_back(self, really) -> None:
        reference = self.reference
        if not really:
            return
        if reference.left == 0:
            refused(self.pacing.hand_back)
            return
        back = [g for g in reference.of("taken") if g.step == reference.step]
        returned = self.pacing.hand_back()
        assert sorted(returned) == sorted(g.group_id for g in back if not g.dropped)
        for group_id in returned:
            group = reference.get(group_id)
            reference.clock += 1
            group.state, group.step, group.order = "done", -1, reference.clock
        reference.groups = [g for g in reference.groups if g not in back or not g.dropped]

    @rule(really=RARELY)
    def end_of_data(self, really) -> None:
        if really:
            self.pacing.end_of_data()
            self.reference.exhausted = True

    @rule(really=st.integers(0, 39).map(lambda number: number == 0))
    def close_short(self, really) -> None:
        """Shutdown after the first update: nothing is admitted or taken from here on."""
        reference = self.reference
        if not really:
            return
        if not any(g.step == reference.step for g in reference.of("taken")) or reference.closed:
            refused(self.pacing.close_short)
            return
        answer = self.pacing.close_short()
        assert answer.closes_batch
        assert list(answer.group_ids) == reference.fill_up()
        self.ending = True

    @invariant()
    def the_counts_agree(self) -> None:
        if not hasattr(self, "pacing"):
            return
        pacing, reference = self.pacing, self.reference
        counts = Counter(g.state for g in reference.groups)
        assert pacing.gauges() == (counts["flight"], counts["done"], counts["taken"])
        assert pacing.num_outstanding == len(reference.groups)
        assert pacing.reserved_bytes == sum(g.num_bytes for g in reference.groups)
        assert pacing.left == reference.left
        assert (pacing.step, pacing.published) == (reference.step, reference.published)
        assert pacing.places_left() == reference.places()
        bound = self.rule.max_steps_off_policy
        for group in reference.groups:
            paced = pacing.group(group.group_id)
            assert (paced.source, paced.num_bytes) == (group.source, group.num_bytes)
            assert bound is None or pacing.due_step(group.group_id) == group.source + bound
        dropped = sum(g.dropped for g in reference.groups)
        kept = len(reference.groups) - dropped
        assert self.fate["admitted"] == self.fate["trained"] + self.fate["dropped"] + kept

    def teardown(self) -> None:
        if hasattr(self, "pacing") and not self.ending:
            self.pacing.validate()
            assert self.reference.fits([])


TestPacingAgainstReference = PacingAgainstReference.TestCase
TestPacingAgainstReference.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None
)
