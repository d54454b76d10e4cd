"""The bound and the absence of deadlock, proved on the shipped class for every small setting.

    pytest tests/core/test_pacing_enumeration.py -s             # states and transitions of each
    pytest tests/core/test_pacing_enumeration.py -s -m slow     # larger settings, nothing left out

What is true of the worst staleness, measured at every take of every reachable state:
    D >= 1   exactly K: never more, and it is reached
    D = 0    exactly 0 in a run that starts from nothing, whatever K; up to K for groups that a
             resume carried in.
Every state right after a publication, a hand back or a short batch is also carried into a new run:
each checkpoint must be possible to resume under the same settings.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import combinations_with_replacement

import pytest

from asyncrl_node.core import pacing as shipped
from asyncrl_node.core.pacing import Pacing, PacingRule
from asyncrl_node.errors import RunFault
from tests.core.enumeration import (
    BASE,
    FIELDS,
    Breach,
    Freezer,
    Graph,
    Report,
    Setting,
    all_bounded,
    can_all_be_trained,
    explore,
    source_of,
)
from tests.core.mutants import Mutant, load

BOUNDED = all_bounded(3, 3)
SMALL = [(b, d, k) for b, d, k in BOUNDED if b * (d + 1) <= 4 and d <= 2]


def show(report: Report) -> Report:
    sys.stdout.write(f"\n{report}")
    return report


# -- the tool itself ------------------------------------------------------------------------------


def test_the_key_knows_every_field():
    """A field that is added to Pacing or Group must become part of the key, or be derived."""
    assert set(vars(Pacing(PacingRule(1, 0, 0)))) == FIELDS
    fields = {"dropped", "group_id", "min_version", "num_bytes", "source", "state", "step"}
    assert set(shipped.Group.__slots__) == fields


def test_freeze_undoes_thaw():
    for setting in (
        Setting(2, 1, 2, exact=True),
        Setting(2, 1, 2),
        Setting(2, 1, 1, num_steps=2),
        Setting(1, 2, None),
        Setting(2, 1, 1, group_bytes=(1, 2), max_bytes=4),
    ):
        graph = Graph(setting)
        for key in graph.keys:
            assert graph.freezer.freeze(graph.freezer.thaw(key)) == key


def test_a_breach_tells_the_way_there():
    broken = load(Mutant("", "core/pacing.py", "version > group.source", "False"))
    with pytest.raises(Breach, match=r"(?s)source on start.*after begin > admit") as raised:
        Graph(Setting(1, 1, 1, carry=False), broken)
    assert "B=1 D=1 K=1 fresh" in str(raised.value)


@pytest.mark.parametrize(("batch", "depth", "bound"), SMALL)
def test_the_reduced_key_leaves_out_no_behaviour(batch, depth, bound):
    """The exact graph, seen through the reduced key, lies within the reduced graph.

    The reduced graph may have more: it hands back whatever a take could have let through.
    """
    exact = Graph(Setting(batch, depth, bound, exact=True), refusals=True)
    exact.check_progress()
    show(exact.report())
    reduced = Graph(Setting(batch, depth, bound))
    seen = {reduced_key(key) for key in exact.keys}
    ended = {key for key in seen if key.exhausted}
    twins = {key._replace(exhausted=True) for key in reduced.keys}
    assert seen - ended <= reduced.index.keys()
    assert ended <= twins
    assert {key for key in reduced.keys if key.exhausted} <= ended
    assert exact.worst_staleness == reduced.worst_staleness


def reduced_key(key):
    def coarse(code):
        return (code >> 16) << 16 | (code >> 16) << 8 | code & 127

    return key._replace(
        first=tuple(code & 127 for code in key.first),
        second=tuple(code & 127 for code in key.second),
        flight=tuple(sorted(map(coarse, key.flight))),
    )


@pytest.mark.parametrize(("batch", "depth", "bound"), [(1, 3, 3), (2, 1, 3), (2, 2, 2), (3, 1, 2)])
def test_thin_events_reach_every_state(batch, depth, bound):
    full = Graph(Setting(batch, depth, bound))
    thin = Graph(Setting(batch, depth, bound, thin=True))
    assert thin.index.keys() == full.index.keys()
    assert thin.transitions < full.transitions


# -- the proof ------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("batch", "depth", "bound"), BOUNDED)
def test_the_bound_holds_and_every_state_gets_on(batch, depth, bound):
    """Every n that divides B, from nothing and from every resume state.

    The largest is explored by thin events, for time; `slow` does it in full.
    """
    thin = (batch, depth, bound) == BOUNDED[-1]
    report = show(explore(Setting(batch, depth, bound, thin=thin)))
    assert report.worst_staleness == bound, report
    needs_waiting = depth >= 1
    assert (report.waits_for_stragglers > 0) == needs_waiting, report


@pytest.mark.parametrize("bound", range(4))
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_depth_0_is_synchronous_whatever_the_bound(batch, bound):
    report = show(explore(Setting(batch, 0, bound, carry=False, exact=True)))
    assert report.worst_staleness == 0, report
    assert report.waits_for_stragglers == 0, report


@pytest.mark.parametrize(
    ("batch", "depth"), [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)]
)
def test_no_bound_never_waits_and_every_state_gets_on(batch, depth):
    report = show(explore(Setting(batch, depth, None)))
    assert report.waits_for_stragglers == 0, report


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize(
    ("batch", "depth", "bound"), [(b, d, k) for b, d, k in BOUNDED if b * (d + 1) <= 6]
)
def test_a_step_limit_leaves_nothing_that_was_admitted(batch, depth, bound, num_steps):
    """Fresh runs end with nothing outstanding; a resume may leave what it carried."""
    for carry in (False, True):
        setting = Setting(batch, depth, bound, num_steps=num_steps, carry=carry)
        graph = Graph(setting)
        graph.check_progress()
        show(graph.report())
        for key in graph.keys:
            if key.remaining == 0 and not carry:
                assert (key.flight, key.completed) == ((), ()), key


@pytest.mark.parametrize("room", [0, 1, 3])
@pytest.mark.parametrize(("batch", "depth", "bound"), [(1, 1, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2)])
def test_a_byte_limit_blocks_nobody_for_ever(batch, depth, bound, room):
    """Groups of 1 and of 2 bytes, and as little memory as the settings allow, or a little more."""
    setting = Setting(
        batch, depth, bound, group_bytes=(1, 2), max_bytes=2 * batch + room, exact=batch == 1
    )
    report = show(explore(setting))
    assert report.worst_staleness == bound, report


# -- resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "depth", "bound"), BOUNDED)
def test_resume_refuses_exactly_what_is_impossible(batch, depth, bound):
    """Every multiset of carried groups: accepted if and only if they have slots and some schedule
    trains all of them in time. (That each accepted state goes on: the graphs start from them.)"""
    slots = batch * (depth + 1)
    freezer = Freezer(shipped, Setting(batch, depth, bound))
    num_refused = num_accepted = 0
    for count in range(slots + 2):
        for sources in combinations_with_replacement(range(-bound - 1, 1), count):
            due = Counter(s + bound for s in sources)
            in_time = due[-1] == 0 and can_all_be_trained(
                tuple(due[j] for j in range(bound + 1)), batch
            )
            accepted = freezer.resume(tuple((s + 32) << 16 | 1 for s in sources)) is not None
            assert accepted == (in_time and count <= slots), sources
            num_accepted += accepted
            num_refused += not accepted
    assert num_refused > 0, (num_accepted, num_refused)


# -- what earlier systems do, as a control that the checker sees it --------------------------------


@pytest.mark.parametrize(
    ("batch", "depth", "bound", "reached"), [(1, 2, 3, 4), (1, 3, 3, 5), (2, 2, 3, 4)]
)
def test_waiting_only_for_what_is_due_now_breaks_the_bound(batch, depth, bound, reached):
    """The older rule with all slots in flight, as pacing.md says."""
    older = load(
        Mutant(
            "the older rule",
            "core/pacing.py",
            "            if due > self.rule.groups_per_batch * horizon + places:\n",
            "            if horizon <= 0 and due > places:\n",
        )
    )
    setting = Setting(batch, depth, bound, carry=False)
    with pytest.raises(Breach):
        Graph(setting, older)
    assert worst_staleness_of(older, setting) == reached


def worst_staleness_of(core, setting) -> int:
    """Explore a rule that breaks the bound, with every check off: how bad does it get?

    Admissions, completions, takes of whole batches and publications are enough to see it.
    """
    core.Pacing._check_past_due = lambda pacing: None
    freezer = Freezer(core, setting)
    seen = set(freezer.start_keys())
    queue, worst = list(seen), 0
    while queue:
        key = queue.pop()
        successors = []
        for event, arguments in plain_events(freezer.thaw(key), key):
            pacing = freezer.thaw(key)
            try:
                answer = getattr(pacing, event)(*arguments)
            except RunFault:  # older systems would not notice
                answer = pacing._take(pacing._stalest(*arguments), closes=True)
            if type(answer).__name__ == "Taken":
                ages = [-source_of(code) for code in key.completed[: arguments[0]]]
                worst = max(worst, *ages)
            successors.append(freezer.freeze(pacing))
        queue += {successor for successor in successors if successor not in seen}
        seen.update(successors)
    return worst


def plain_events(pacing, key):
    if pacing.can_admit():
        yield "admit", (pacing.num_outstanding,)
    for place, code in enumerate(key.flight):
        yield "complete", (place, BASE + source_of(code))
    if key.left and len(key.completed) >= key.left:
        yield "take", (key.left,)
    if key.left == 0:
        yield "publish", (BASE + 1,)


# -- larger sets ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("batch", "depth", "bound"),
    [(b, d, k) for b, d, k in BOUNDED if (b, d, k) not in SMALL and b * (d + 1) <= 6],
)
def test_slow_exact_keys(batch, depth, bound):
    report = show(explore(Setting(batch, depth, bound, exact=True), refusals=True))
    assert report.worst_staleness == bound, report


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("batch", "depth", "bound"),
    [
        BOUNDED[-1],
        (1, 1, 6),
        (1, 4, 4),
        (1, 5, 5),
        (2, 3, 4),
        (4, 1, 1),
        (4, 1, 3),
        (4, 2, 2),
        (6, 1, 2),
    ],
)
def test_slow_larger_settings(batch, depth, bound):
    report = show(explore(Setting(batch, depth, bound)))
    assert report.worst_staleness == bound, report


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("batch", "depth", "bound"), [(1, 3, 3), (2, 2, 3), (2, 3, 3), (3, 2, 2)])
def test_slow_step_limits(batch, depth, bound):
    show(explore(Setting(batch, depth, bound, num_steps=depth + 2)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("batch", "depth"), [(1, 4), (2, 2), (2, 3), (3, 2), (4, 1)])
def test_slow_no_bound(batch, depth):
    assert show(explore(Setting(batch, depth, None))).waits_for_stragglers == 0
