"""A search for a difference between the shipped core and the rule as pacing.md states it.

The reference keeps nothing but a list of groups and recomputes everything at every question.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl_node.core import pacing as shipped
from asyncrl_node.errors import RunFault
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

    def is_possible(self) -> bool:
        """Say whether a resume with these groups can go on."""
        rule = self.rule
        return (
            len(self.groups) <= rule.groups_per_batch * (rule.pipeline_depth + 1)
            and all(g.num_bytes <= rule.slot_bytes for g in self.groups)
            and (rule.max_bytes is None or sum(g.num_bytes for g in self.groups) <= rule.max_bytes)
            and all(self.due(g) >= self.step for g in self.groups)
            and self.fits([])
        )

    def due(self, group) -> float:
        bound = self.rule.max_steps_off_policy
        return float("inf") if bound is None else group.source + bound

    def fits(self, chosen) -> bool:
        """Rule 3, at every j."""
        rule = self.rule
        bound = rule.max_steps_off_policy
        if bound is None:
            return True
        rest = [g for g in self.of("flight", "done") if g not in chosen]
        return all(
            sum(1 for g in rest if self.due(g) <= self.step + j)
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


def one_in(count):
    """True once in `count`: destructive events are rare, or histories stay short."""
    return st.integers(1, count).map(lambda number: number == count)


RULES = st.builds(
    lambda batch, depth, more, none, last, room: shipped.PacingRule(
        batch,
        depth,
        None if none else depth + more,
        slot_bytes=3,
        max_bytes=3 * batch + room if room < 13 else None,
        last_version=last if last < 9 else None,
    ),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 2),
    one_in(6),
    st.integers(1, 24),
    st.integers(0, 36),
)


class PacingAgainstReference(RuleBasedStateMachine):
    """The shipped class and the reference see the same events and must give the same answers."""

    core: ModuleType = shipped

    @initialize(rule=RULES, data=st.data(), resumes=one_in(3))
    def begin(self, rule, data, resumes) -> None:
        self.rule = rule
        self.next_id = 0
        self.fate: Counter[str] = Counter()
        self.ending = False
        self.reference = Reference(rule)
        self.pacing = self.core.Pacing(rule)
        if resumes:
            self.carry(data)

    def carry(self, data) -> None:
        """Resume with some completed groups, possible or not; refused, the run starts afresh."""
        bound = self.rule.max_steps_off_policy
        oldest = -2 if bound is None else -bound - 1
        groups = st.tuples(st.integers(oldest, 0), st.integers(1, 4))
        carried = data.draw(st.lists(groups, max_size=self.rule.num_slots + 1))
        for source, num_bytes in carried:
            self.pacing.carry(self.next_id, source, num_bytes)
            group = Member(self.next_id, source, num_bytes)
            self.note_done(group)
            self.reference.groups.append(group)
            self.next_id += 1
        refused(self.pacing.carry, self.next_id, 1)
        if self.reference.is_possible():
            self.pacing.check_possible()
            self.fate["admitted"] = len(carried)
            return
        with pytest.raises(RunFault, match="impossible_resume"):
            self.pacing.check_possible()
        self.reference = Reference(self.rule)
        self.pacing = self.core.Pacing(self.rule)

    # -- one event, on both ----------------------------------------------------------------------

    def pick(self, data, *states) -> Member | None:
        members = self.reference.of(*states)
        return data.draw(st.sampled_from(members)) if members else None

    def newest(self) -> int:
        """The newest version made: one for each batch that is closed and not published."""
        reference = self.reference
        return reference.published + (reference.step > reference.published) + reference.closed

    def note_done(self, group) -> None:
        self.reference.clock += 1
        group.state, group.step, group.order = "done", -1, self.reference.clock

    def admit_one(self, num_bytes) -> bool:
        expected = self.reference.can_admit(num_bytes)
        assert self.pacing.can_admit(num_bytes) == expected
        if not expected:
            refused(self.pacing.admit, self.next_id, num_bytes)
            return False
        assert self.pacing.admit(self.next_id, num_bytes) == self.reference.published
        self.reference.groups.append(Member(self.next_id, self.reference.published, num_bytes))
        self.next_id += 1
        self.fate["admitted"] += 1
        return True

    def complete_one(self, group, version) -> None:
        refused(self.pacing.complete, group.group_id, group.source - 1)
        self.pacing.complete(group.group_id, version)
        group.source = version
        self.note_done(group)

    def take_some(self, num_groups) -> str:
        word, ids = self.reference.take(num_groups)
        answer = self.pacing.take(num_groups)
        if type(answer).__name__ == "Wait":
            assert answer.reason == word
        else:
            assert type(answer).__name__ == word
        if word == "Taken":
            self.check_taken(answer, ids)
            assert answer.closes_batch == self.reference.closed
        return word

    def check_taken(self, answer, ids) -> None:
        assert list(answer.group_ids) == ids
        bound = self.rule.max_steps_off_policy
        for group_id in ids:
            staleness = self.reference.step - self.reference.get(group_id).source
            assert staleness >= 0
            assert bound is None or staleness <= bound

    def publish_one(self) -> None:
        reference = self.reference
        dropped = {g.group_id for g in reference.groups if g.dropped}
        refused(self.pacing.publish, reference.published + 2)
        freed = reference.publish()
        assert sorted(self.pacing.publish(reference.published)) == sorted(freed)
        self.fate["trained"] += len(set(freed) - dropped)

    def prefetch_one(self) -> None:
        self.pacing.collect_next()
        self.reference.step, self.reference.closed = self.reference.step + 1, False

    # -- rules -----------------------------------------------------------------------------------

    @precondition(lambda self: not self.ending)
    @rule(data=st.data(), num_steps=st.integers(1, 4), last_takes=st.integers(0, 6))
    def advance(self, data, num_steps, last_takes) -> None:
        """Whole steps: all slots full, the newest finish first, stragglers only when they must.

        The last one may stop after some takes, or leave its batch closed and not published.
        """
        for step in range(num_steps):
            while self.admit_one(3):
                pass
            flight = sorted(self.reference.of("flight"), key=lambda g: (g.source, g.group_id))
            for _ in range(data.draw(st.integers(0, len(flight)))):
                group = flight.pop()
                self.complete_one(group, group.source)
            if not self.take_a_batch(data, flight, last_takes if step + 1 == num_steps else 99):
                return
            if self.reference.step > self.reference.published:
                self.publish_one()
            if data.draw(st.booleans()):
                self.publish_one()
            elif step + 1 < num_steps:
                self.prefetch_one()

    def take_a_batch(self, data, flight, most) -> bool:
        """Take, in pieces of one size, letting in-flight groups finish that are waited for."""
        legal = self.legal_takes()
        piece = data.draw(st.sampled_from(legal)) if legal else 0
        for _ in range(most):
            legal = self.legal_takes()
            if not legal:
                return True
            word = self.take_some(min(piece, legal[-1]))
            if word == "EndOfTraining" or (word == "fill" and not flight):
                return False
            if word in ("fill", "stragglers"):
                group = flight.pop(0 if word == "stragglers" else -1)
                self.complete_one(group, group.source)
        return not self.legal_takes()

    def legal_takes(self) -> list[int]:
        batch = self.rule.groups_per_batch
        return [n for n in range(1, self.reference.left + 1) if batch % n == 0]

    @precondition(lambda self: not self.ending)
    @rule(num_bytes=st.integers(1, 3), count=st.integers(1, 4))
    def admit(self, num_bytes, count) -> None:
        for _ in range(count):
            if not self.admit_one(num_bytes):
                return

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
            if group is not None:
                version = data.draw(st.integers(group.source, max(group.source, self.newest())))
                self.complete_one(group, version)

    @rule(data=st.data(), really=one_in(2))
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

    @rule(data=st.data(), really=one_in(4))
    def crash(self, data, really) -> None:
        """A sampler dies: some of what is in flight starts anew."""
        for group in self.reference.of("flight") if really else ():
            if data.draw(st.booleans()):
                least = self.pacing.restart(group.group_id)
                group.source = group.min_version = max(group.source, self.reference.published)
                assert least == group.min_version

    @precondition(lambda self: not self.ending)
    @rule(data=st.data())
    def take(self, data) -> None:
        legal = self.legal_takes()
        for num_groups in set(range(-1, self.rule.groups_per_batch + 2)) - set(legal):
            refused(self.pacing.take, num_groups)
        if legal:
            self.take_some(data.draw(st.sampled_from(legal)))

    @rule()
    def publish(self) -> None:
        reference = self.reference
        if reference.closed or reference.step > reference.published:
            self.publish_one()
        else:
            refused(self.pacing.publish, reference.published + 1)

    @precondition(lambda self: not self.ending)
    @rule()
    def collect_next(self) -> None:
        reference = self.reference
        if not reference.closed or reference.step > reference.published:
            refused(self.pacing.collect_next)
            return
        self.prefetch_one()

    @rule(really=one_in(2))
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
            self.note_done(reference.get(group_id))
        reference.groups = [g for g in reference.groups if g not in back or not g.dropped]

    @rule(really=one_in(8))
    def end_of_data(self, really) -> None:
        if really:
            self.pacing.end_of_data()
            self.reference.exhausted = True

    @rule(really=one_in(20))
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
        self.check_taken(answer, reference.fill_up())
        self.ending = True

    # -- after every rule ------------------------------------------------------------------------

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
        for step in (reference.published, reference.published + 1):
            taken = {g.group_id for g in reference.of("taken") if g.step == step and not g.dropped}
            assert set(pacing.taken_in(step)) == taken
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
    max_examples=200, stateful_step_count=40, deadline=None
)
