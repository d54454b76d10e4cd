"""The fine print of the rule, line by line, on the shipped core; cases.md; and flat cost.

Every test takes the module under test as `core`, so that tests/core/mutants.py can run the same
functions on changed copies of it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from asyncrl_node.core import pacing as shipped
from asyncrl_node.errors import InvalidTransition, RunFault


@pytest.fixture
def core() -> ModuleType:
    return shipped


def make(core, batch, depth, bound, start_version=0, **limits) -> Any:
    return core.Pacing(core.PacingRule(batch, depth, bound, **limits), start_version)


def admit(pacing, *group_ids) -> None:
    for group_id in group_ids:
        pacing.admit(group_id)


def finish(pacing, *group_ids) -> None:
    """Start and complete groups on the weights that their orders ask for."""
    for group_id in group_ids:
        version = pacing.group(group_id).min_version
        pacing.start(group_id, version)
        pacing.complete(group_id, pacing.group(group_id).source)


def take(pacing, num_groups) -> tuple[int, ...]:
    """Take, and insist on being given."""
    answer = pacing.take(num_groups)
    assert type(answer).__name__ == "Taken", answer
    return answer.group_ids


def must_wait(pacing, num_groups, reason) -> None:
    answer = pacing.take(num_groups)
    assert type(answer).__name__ == "Wait", answer
    assert answer.reason == reason


def must_end(pacing, num_groups) -> None:
    assert type(pacing.take(num_groups)).__name__ == "EndOfTraining"


def refused(event, *arguments) -> str:
    """Insist that an event is illegal; return the story."""
    with pytest.raises(InvalidTransition) as raised:
        event(*arguments)
    return str(raised.value)


def fault(event, *arguments) -> str:
    """Insist that an event ends the run; return the fault's name."""
    with pytest.raises(RunFault) as raised:
        event(*arguments)
    return raised.value.name


def run_step(pacing) -> tuple[int, ...]:
    """Take a whole batch and publish."""
    taken = take(pacing, pacing.rule.groups_per_batch)
    pacing.publish(pacing.published + 1)
    pacing.validate()
    return taken


def fill(pacing, next_id) -> int:
    """Admit while there is room; return the next free id."""
    for group_id in range(next_id, next_id + 1000):
        if not pacing.can_admit():
            return group_id
        pacing.admit(group_id)
    raise AssertionError("there is no end of room")


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ((0, 0, 0), "groups_per_batch"),
        ((1, -1, 0), "pipeline_depth must be at least 0"),
        ((1, 2, 1), "at most max_steps_off_policy"),
        ((2, 0, 0, 5, 9), "byte limit"),
    ],
)
def test_settings_that_break_a_rule_are_refused_by_name(rule, words):
    assert words in shipped.PacingRule(*rule).problem()
    assert words in refused(shipped.Pacing, shipped.PacingRule(*rule))


def test_settings_at_the_edge_are_allowed(core):
    for numbers in ((1, 0, 0), (1, 1, 1), (3, 5, None), (2, 0, 0, 5, 10)):
        assert core.PacingRule(*numbers).problem() is None
    assert core.PacingRule(3, 2, 4).num_slots == 9


# -- rule 1: admission ----------------------------------------------------------------------------


def test_at_most_b_times_d_plus_one_are_outstanding(core):
    for batch, depth in ((1, 0), (1, 3), (2, 1), (3, 2)):
        pacing = make(core, batch, depth, 3)
        assert fill(pacing, 0) == batch * (depth + 1) == pacing.num_outstanding
        assert "no slot" in refused(pacing.admit, 99)
        pacing.validate()


def test_an_admission_carries_the_newest_published_version(core):
    pacing = make(core, 1, 1, 3, start_version=5)
    assert pacing.admit(0) == 5
    finish(pacing, 0)
    run_step(pacing)
    assert pacing.admit(1) == 6
    assert pacing.group(1).min_version == 6


def test_slots_are_freed_at_publication_only(core):
    pacing = make(core, 2, 0, 0)
    admit(pacing, 0, 1)
    finish(pacing, 0, 1)
    assert take(pacing, 2) == (0, 1)
    assert pacing.gauges() == (0, 0, 2)
    assert not pacing.can_admit(), "freed when taken"
    assert pacing.publish(1) == (0, 1)
    assert pacing.gauges() == (0, 0, 0)
    assert pacing.group(0) is None
    assert fill(pacing, 2) == 4


def test_a_filtered_untaken_group_frees_its_slot_at_once(core):
    pacing = make(core, 2, 0, 0)
    admit(pacing, 0, 1)
    assert pacing.drop(0) is True, "failed in flight"
    assert pacing.can_admit()
    admit(pacing, 2)
    finish(pacing, 1, 2)
    assert pacing.drop(1) is True, "filtered when completed"
    assert pacing.group(1) is None
    assert pacing.gauges() == (0, 1, 0)
    admit(pacing, 3)
    pacing.validate()


def test_a_taken_dropped_group_holds_slot_and_place(core):
    pacing = make(core, 2, 0, 0)
    admit(pacing, 0, 1)
    finish(pacing, 0, 1)
    take(pacing, 1)
    assert pacing.drop(0) is False
    assert pacing.gauges() == (0, 1, 1)
    assert not pacing.can_admit()
    assert pacing.left == 1, "its place is not given away"
    assert pacing.taken_in(0) == (), "nobody trains it"
    take(pacing, 1)
    assert pacing.taken_in(0) == (1,)
    assert pacing.publish(1) == (0, 1)


def test_bytes_are_reserved_at_admission_never_later(core):
    pacing = make(core, 2, 1, 1, slot_bytes=10, max_bytes=25)
    admit(pacing, 0, 1)
    assert pacing.reserved_bytes == 20
    assert not pacing.can_admit(), "only 5 bytes are left, whatever the groups turn out to need"
    assert pacing.can_admit(5)
    pacing.admit(2, 5)
    assert pacing.reserved_bytes == 25
    finish(pacing, 0, 1, 2)
    assert pacing.reserved_bytes == 25, "completion charges nothing"
    take(pacing, 2)
    assert pacing.reserved_bytes == 25, "a take frees nothing"
    pacing.publish(1)
    assert pacing.reserved_bytes == 5
    pacing.drop(2)
    assert pacing.reserved_bytes == 0
    assert "larger than a slot" in refused(pacing.admit, 3, 11)
    pacing.validate()


# -- rule 2: deadlines ----------------------------------------------------------------------------


def test_a_group_is_due_k_steps_after_the_version_of_its_oldest_token(core):
    pacing = make(core, 1, 1, 4, start_version=3)
    admit(pacing, 0)
    assert pacing.due_step(0) == 7
    pacing.start(0, 4)
    assert pacing.due_step(0) == 8, "a sampler may already hold a newer version"
    pacing.complete(0, 5)
    assert pacing.due_step(0) == 9, "the oldest token decides"
    assert make(core, 1, 0, None).due_step(0) is None


def test_due_steps_never_move_down(core):
    pacing = make(core, 1, 2, 2, start_version=5)
    admit(pacing, 0)
    pacing.start(0, 6)
    pacing.start(0, 5)
    assert pacing.group(0).source == 6
    assert "older than its start" in refused(pacing.complete, 0, 5)
    assert "older than min_version" in refused(pacing.start, 0, 4)
    assert pacing.group(0).source == 6
    assert pacing.restart(0) == 6, "the lost attempt had a version that is not announced here yet"
    assert pacing.group(0).source == 6
    assert pacing.group(0).min_version == 6
    pacing.validate()


def test_a_restart_moves_the_due_step_to_the_present(core):
    pacing = make(core, 1, 2, 2)
    admit(pacing, 0, 1, 2)
    finish(pacing, 1, 2)
    assert run_step(pacing) == (1,)
    assert run_step(pacing) == (2,)
    assert pacing.group(0).source == 0
    assert pacing.restart(0) == 2
    assert pacing.group(0).source == 2
    assert pacing.group(0).min_version == 2
    assert "older than min_version" in refused(pacing.start, 0, 1)
    pacing.validate()


# -- rule 3: take ---------------------------------------------------------------------------------


def test_the_stalest_are_taken_first_and_in_the_order_of_completion_among_equals(core):
    pacing = make(core, 2, 2, 3)
    admit(pacing, 0, 1, 2, 3)
    finish(pacing, 3, 2)
    assert run_step(pacing) == (3, 2)
    admit(pacing, 4, 5)
    finish(pacing, 5, 4, 1, 0)
    assert run_step(pacing) == (1, 0), "sampled by version 0, finished last"
    assert run_step(pacing) == (5, 4)


def test_what_is_due_now_must_be_in_this_batch(core):
    pacing = make(core, 2, 1, 1)
    admit(pacing, 0, 1, 2, 3)
    finish(pacing, 0, 1)
    run_step(pacing)
    admit(pacing, 4, 5)
    finish(pacing, 4, 5)
    assert pacing.due_step(2) == pacing.due_step(3) == pacing.step == 1
    must_wait(pacing, 2, "stragglers")
    finish(pacing, 2)
    must_wait(pacing, 2, "stragglers")
    finish(pacing, 3)
    assert run_step(pacing) == (2, 3)
    assert run_step(pacing) == (4, 5)


def test_stragglers_do_not_pile_up_on_a_later_step(core):
    """B, D, K = 1, 2, 3: waiting only for what is due now would let three be due at once."""
    pacing = make(core, 1, 2, 3)
    admit(pacing, 0, 1, 2)
    finish(pacing, 2)
    assert run_step(pacing) == (2,)
    admit(pacing, 3)
    finish(pacing, 3)
    assert run_step(pacing) == (3,)
    admit(pacing, 4)
    finish(pacing, 4)
    assert pacing.step == 2
    assert pacing.due_step(0) == pacing.due_step(1) == 3
    must_wait(pacing, 1, "stragglers")  # nothing is due now; two are due in step 3, one must go
    finish(pacing, 0)
    assert run_step(pacing) == (0,)
    must_wait(pacing, 1, "stragglers")
    finish(pacing, 1)
    assert run_step(pacing) == (1,)
    assert run_step(pacing) == (4,)


def test_room_for_stragglers_is_kept_inside_a_step(core):
    """Streaming: the last place of a batch is reserved for the group that is due in it."""
    pacing = make(core, 2, 1, 1)
    admit(pacing, 0, 1, 2, 3)
    finish(pacing, 0, 1)
    run_step(pacing)
    admit(pacing, 4, 5)
    finish(pacing, 4, 2, 5)
    assert take(pacing, 1) == (2,)
    must_wait(pacing, 1, "stragglers")
    assert pacing.left == 1
    finish(pacing, 3)
    assert take(pacing, 1) == (3,)
    assert pacing.left == 0


def test_a_take_says_whether_it_closes_the_batch(core):
    pacing = make(core, 4, 0, 0)
    admit(pacing, 0, 1, 2, 3)
    finish(pacing, 0, 1, 2, 3)
    assert pacing.take(1).closes_batch is False
    assert pacing.take(2).closes_batch is False
    assert "cannot take 2 with 1" in refused(pacing.take, 2)
    assert pacing.take(1).closes_batch is True
    assert pacing.taken_in(0) == (0, 1, 2, 3)


def test_only_divisors_of_the_batch_are_taken(core):
    pacing = make(core, 3, 0, 0)
    for num_groups in (-1, 0, 2, 4):
        assert "cannot take" in refused(pacing.take, num_groups)


def test_too_few_completed_groups_are_fill_at_any_bound(core):
    for bound in (0, 1, 8, None):
        pacing = make(core, 2, 0, bound)
        must_wait(pacing, 2, "fill")
        admit(pacing, 0, 1)
        finish(pacing, 0)
        must_wait(pacing, 2, "fill")


def test_no_bound_takes_the_oldest_first_and_never_waits(core):
    pacing = make(core, 1, 2, None)
    admit(pacing, 0, 1, 2)
    finish(pacing, 1)
    assert run_step(pacing) == (1,)
    for step in range(1, 20):
        admit(pacing, step + 2)
        finish(pacing, step + 2)
        assert run_step(pacing) == (step + 2,), "group 0 is never waited for"
    finish(pacing, 0)
    admit(pacing, 99)
    finish(pacing, 99)
    assert run_step(pacing) == (0,), "oldest first"


def test_depth_0_is_synchronous(core):
    for bound in (0, 3):
        pacing = make(core, 2, 0, bound)
        next_id = 0
        for step in range(5):
            next_id = fill(pacing, next_id)
            finish(pacing, next_id - 1)
            must_wait(pacing, 2, "fill")
            finish(pacing, next_id - 2)
            assert [pacing.group(g).source for g in take(pacing, 2)] == [step, step]
            assert not pacing.can_admit(), "sampling stands still until the weights are out"
            pacing.publish(step + 1)


# -- prefetch, hand back, short batches -----------------------------------------------------------


def test_prefetch_tests_due_steps_against_the_step_collected(core):
    pacing = make(core, 1, 1, 1)
    admit(pacing, 0, 1)
    finish(pacing, 0)
    take(pacing, 1)
    pacing.collect_next()
    assert (pacing.step, pacing.published, pacing.left) == (1, 0, 1)
    assert not pacing.can_admit(), "both batches hold their slots"
    must_wait(pacing, 1, "fill")
    finish(pacing, 1)
    assert take(pacing, 1) == (1,)
    assert pacing.taken_in(0) == (0,)
    assert pacing.taken_in(1) == (1,)
    assert "one batch ahead already" in refused(pacing.collect_next)
    assert pacing.publish(1) == (0,)
    assert pacing.left == 0, "the batch of step 1 stays closed"
    assert pacing.publish(2) == (1,)
    assert (pacing.step, pacing.left) == (2, 1)


def test_prefetch_waits_for_what_is_due_in_the_step_collected(core):
    pacing = make(core, 1, 2, 2)
    admit(pacing, 0, 1, 2)
    finish(pacing, 1)
    run_step(pacing)
    admit(pacing, 3)
    finish(pacing, 2)
    assert take(pacing, 1) == (2,)
    pacing.collect_next()
    finish(pacing, 3)
    assert pacing.due_step(0) == pacing.step == 2
    must_wait(pacing, 1, "stragglers")
    finish(pacing, 0)
    assert take(pacing, 1) == (0,)
    pacing.validate()


def test_prefetch_starts_when_the_batch_is_closed(core):
    pacing = make(core, 2, 1, 1)
    admit(pacing, 0, 1)
    finish(pacing, 0, 1)
    assert "still open" in refused(pacing.collect_next)
    take(pacing, 1)
    assert "still open" in refused(pacing.collect_next)
    take(pacing, 1)
    pacing.collect_next()


def test_hand_back_undoes_the_takes_of_the_open_batch(core):
    pacing = make(core, 3, 1, 1)
    admit(pacing, 0, 1, 2, 3)
    finish(pacing, 0, 1, 2)
    take(pacing, 1)
    take(pacing, 1)
    assert pacing.hand_back() == (0, 1)
    assert pacing.left == 3
    assert pacing.gauges() == (1, 3, 0)
    pacing.validate()
    assert sorted(take(pacing, 3)) == [0, 1, 2]
    assert "closed" in refused(pacing.hand_back)


def test_hand_back_leaves_a_closed_batch_alone(core):
    pacing = make(core, 2, 1, 1)
    admit(pacing, 0, 1, 2, 3)
    finish(pacing, 0, 1, 2)
    take(pacing, 2)
    pacing.collect_next()
    take(pacing, 1)
    assert pacing.hand_back() == (2,)
    assert pacing.taken_in(0) == (0, 1)
    assert pacing.publish(1) == (0, 1)
    pacing.validate()


def test_a_dropped_group_is_not_handed_back(core):
    """Once it is untaken it frees its slot at once, like any other; it is never taken again."""
    pacing = make(core, 2, 0, 0)
    admit(pacing, 0, 1)
    finish(pacing, 0, 1)
    take(pacing, 1)
    pacing.drop(0)
    assert pacing.hand_back() == ()
    assert pacing.gauges() == (0, 1, 0)
    assert pacing.can_admit()
    pacing.validate()


def test_a_short_batch_is_closed_with_what_is_there(core):
    pacing = make(core, 2, 1, 1)
    assert "nothing is taken" in refused(pacing.close_short)
    admit(pacing, 0)
    finish(pacing, 0)
    take(pacing, 1)
    assert pacing.close_short() == ((), True)
    assert pacing.left == 0
    assert "closed" in refused(pacing.close_short)
    assert pacing.publish(1) == (0,)
    assert pacing.left == 2


def test_a_short_batch_is_filled_with_what_is_whole_and_waits_for_nobody(core):
    """Left behind, groups that are due in this step could never be trained after a resume."""
    pacing = make(core, 3, 1, 1)
    admit(pacing, 0, 1, 2, 3, 4, 5)
    finish(pacing, 0, 1, 2)
    run_step(pacing)
    admit(pacing, 6, 7, 8)
    finish(pacing, 6, 3, 7, 4)
    assert take(pacing, 1) == (3,)
    assert pacing.close_short() == ((4, 6), True), "group 5 is due too, and in flight"
    assert pacing.publish(2) == (3, 4, 6)
    assert pacing.gauges() == (2, 1, 0)
    resumed = make(core, 3, 1, 1, start_version=2)
    resumed.carry(7, pacing.group(7).source)
    resumed.check_possible()


def test_publishing_is_in_order_and_after_the_batch(core):
    pacing = make(core, 1, 0, 0)
    assert "still open" in refused(pacing.publish, 1)
    admit(pacing, 0)
    finish(pacing, 0)
    take(pacing, 1)
    for version in (0, 2):
        assert "out of order" in refused(pacing.publish, version)
    pacing.publish(1)
    assert (pacing.published, pacing.step, pacing.left) == (1, 1, 1)


# -- ends -----------------------------------------------------------------------------------------


def test_the_rest_of_the_data_is_one_short_step(core):
    pacing = make(core, 3, 0, 0)
    admit(pacing, 0, 1)
    pacing.end_of_data()
    assert not pacing.can_admit()
    must_wait(pacing, 3, "fill")
    finish(pacing, 0)
    must_wait(pacing, 3, "fill")  # one is still in flight
    finish(pacing, 1)
    answer = pacing.take(3)
    assert answer.group_ids == (0, 1)
    assert answer.closes_batch
    assert pacing.left == 0
    assert pacing.publish(1) == (0, 1)
    must_end(pacing, 3)


def test_a_streamed_batch_that_the_data_cannot_fill_is_closed(core):
    pacing = make(core, 2, 0, 0)
    admit(pacing, 0)
    finish(pacing, 0)
    pacing.end_of_data()
    assert pacing.take(1) == ((0,), False)
    assert pacing.take(1) == ((), True), "nothing more, and the step must end"
    pacing.publish(1)
    must_end(pacing, 1)


def test_a_failure_at_the_end_of_the_data_ends_the_wait(core):
    pacing = make(core, 2, 0, 0)
    admit(pacing, 0, 1)
    pacing.end_of_data()
    finish(pacing, 0)
    must_wait(pacing, 2, "fill")
    pacing.drop(1)
    assert pacing.num_completed == 1
    assert pacing.take(2) == ((0,), True)
    assert pacing.num_completed == 0
    assert pacing.gauges().outstanding == pacing.num_outstanding == 1


def test_no_data_at_all_is_the_end(core):
    pacing = make(core, 2, 1, 1)
    pacing.end_of_data()
    must_end(pacing, 2)
    must_end(pacing, 1)


def test_no_rollout_starts_that_could_never_be_trained(core):
    pacing = make(core, 2, 2, 2, last_version=2)
    assert pacing.places_left() == 4
    assert fill(pacing, 0) == 4, "6 slots, but two steps of two"
    finish(pacing, 0, 1)
    take(pacing, 1)
    assert pacing.places_left() == 3
    assert not pacing.can_admit()
    pacing.drop(3)
    assert pacing.can_admit(), "its place can be filled again"
    admit(pacing, 4)
    take(pacing, 1)
    pacing.publish(1)
    assert pacing.places_left() == 2
    assert not pacing.can_admit()
    finish(pacing, 2, 4)
    run_step(pacing)
    assert pacing.places_left() == 0
    must_end(pacing, 2)
    assert not pacing.can_admit()
    assert pacing.num_outstanding == 0


def test_prefetch_ends_at_the_step_limit(core):
    pacing = make(core, 1, 1, 1, last_version=1)
    assert fill(pacing, 0) == 1
    finish(pacing, 0)
    take(pacing, 1)
    pacing.collect_next()
    assert pacing.places_left() == 0
    assert not pacing.can_admit()
    must_end(pacing, 1)
    pacing.publish(1)
    must_end(pacing, 1)


def test_a_step_limit_leaves_what_was_carried_beyond_it(core):
    pacing = make(core, 1, 2, 2, last_version=1)
    for group_id in range(3):
        pacing.carry(group_id, 0)
    pacing.check_possible()
    assert not pacing.can_admit()
    assert run_step(pacing) == (0,)
    must_end(pacing, 1)
    assert pacing.outstanding_ids(core.GroupState.COMPLETED) == [1, 2]


# -- resume, and what must never wait -------------------------------------------------------------


def test_a_possible_resume_goes_on(core):
    pacing = make(core, 2, 1, 2, start_version=7)
    for group_id, source in enumerate((5, 5, 6, 7)):
        pacing.carry(group_id, source)
    pacing.check_possible()
    pacing.validate()
    assert run_step(pacing) == (0, 1)
    assert run_step(pacing) == (2, 3)


def test_an_impossible_resume_is_refused_by_name(core):
    for numbers, sources in (
        ((2, 1, 2), (5, 5, 5)),  # three are due now, two places
        ((1, 2, 2), (6, 6, 6)),  # three are due by the next step, two places
        ((1, 1, 2), (4,)),  # past due
        ((1, 1, 8), (7, 7, 7)),  # more than the slots
    ):
        pacing = make(core, *numbers, start_version=7)
        for group_id, source in enumerate(sources):
            pacing.carry(group_id, source)
        assert fault(pacing.check_possible) == "impossible_resume"


def test_a_resume_that_does_not_fit_in_memory_is_refused_by_name(core):
    """A group of more bytes than a slot could leave none for the rest of its batch, for ever."""
    for sizes in ((3,), (2, 2, 1)):
        pacing = make(core, 2, 1, 2, slot_bytes=2, max_bytes=4)
        for group_id, num_bytes in enumerate(sizes):
            pacing.carry(group_id, 0, num_bytes)
        assert fault(pacing.check_possible) == "impossible_resume"
    pacing = make(core, 2, 1, 2, slot_bytes=2, max_bytes=4)
    pacing.carry(0, 0, 2)
    pacing.carry(1, 0, 2)
    pacing.check_possible()
    pacing.validate()


def test_a_carried_group_is_older_than_the_run_and_new_to_it(core):
    pacing = make(core, 2, 1, 2, start_version=7)
    assert "later version" in refused(pacing.carry, 0, 8)
    pacing.carry(0, 7)
    assert "already outstanding" in refused(pacing.carry, 0, 7)
    assert "already outstanding" in refused(pacing.admit, 0)


def test_a_rule_that_fails_with_nothing_in_flight_stops_by_name(core):
    pacing = make(core, 1, 2, 2, start_version=7)
    for group_id in range(3):
        pacing.carry(group_id, 6)  # not asked whether it is possible
    assert fault(pacing.take, 1) == "stuck"
    pacing = make(core, 1, 2, 2, start_version=7)
    for group_id in range(2):
        pacing.carry(group_id, 6)
    admit(pacing, 2)
    pacing.take(1)


def test_a_group_past_its_due_step_stops_by_name(core):
    pacing = make(core, 1, 1, 1, start_version=7)
    pacing.carry(0, 5)
    admit(pacing, 1)
    assert fault(pacing.take, 1) == "past_due"
    assert fault(pacing.validate) == "past_due"


def test_illegal_events_say_what_happened_before(core):
    pacing = make(core, 1, 1, 1)
    admit(pacing, 0)
    finish(pacing, 0)
    for event, arguments in (
        ("start", (0, 0)),
        ("complete", (0, 0)),
        ("restart", (0,)),
    ):
        story = refused(getattr(pacing, event), *arguments)
        assert "it is completed" in story
        assert "recent events: admit(0) start(0) complete(0)" in story
        assert "not outstanding" in refused(getattr(pacing, event), 7, *arguments[1:])
    assert "not outstanding" in refused(pacing.drop, 7)
    take(pacing, 1)
    assert "it is taken" in refused(pacing.restart, 0)
    pacing.validate()


def test_validate_finds_books_that_disagree(core):
    for spoil in (
        lambda p: setattr(p, "_num_completed", 2),
        lambda p: setattr(p, "_num_taken", 1),
        lambda p: setattr(p, "_reserved_bytes", 0),
        lambda p: setattr(p, "left", 3),
        lambda p: setattr(p, "step", 2),
        lambda p: p._untaken.update([0]),
        lambda p: p._completed.clear(),
        lambda p: setattr(p.group(1), "source", -1),
    ):
        pacing = make(core, 2, 0, 0)
        admit(pacing, 0, 1)
        finish(pacing, 0)
        pacing.validate()
        spoil(pacing)
        with pytest.raises((AssertionError, RunFault)):
            pacing.validate()


# -- cases.md -------------------------------------------------------------------------------------


def test_case_1_what_is_trained_and_published_is_not_counted_again(core):
    pacing = make(core, 64, 1, 4)
    admit(pacing, *range(70))
    finish(pacing, *range(70))
    assert len(run_step(pacing)) == 64
    assert pacing.num_outstanding == 6
    assert fill(pacing, 70) - 70 == 128 - 6
    pacing = make(core, 10, 6, 8)
    assert fill(pacing, 0) == 70
    finish(pacing, *range(70))
    for _ in range(6):
        run_step(pacing)
    assert pacing.num_outstanding == 10
    assert fill(pacing, 70) - 70 == 60


def test_case_2_the_bound_is_not_off_by_one(core):
    """All slots in flight, the straggler as late as the rule allows: K is reached, never passed."""
    for batch, depth, bound in ((1, 1, 1), (1, 3, 3), (2, 1, 2), (3, 2, 2), (4, 2, 5)):
        pacing = make(core, batch, depth, bound)
        worst = 0
        next_id = fill(pacing, 0)
        for step in range(4 * bound + 4):
            next_id = fill(pacing, next_id)
            # Newest first, as unfairly as can be: the oldest finish only when they are waited for.
            late = sorted(pacing.outstanding_ids(core.GroupState.IN_FLIGHT), reverse=True)
            while True:
                answer = pacing.take(batch)
                if type(answer).__name__ == "Taken":
                    break
                finish(pacing, late.pop(0))
                pacing.validate()
            staleness = [step - pacing.group(g).source for g in answer.group_ids]
            worst = max(worst, *staleness)
            pacing.publish(step + 1)
        assert worst == bound


def test_case_3_bound_0_with_slow_weights_is_exactly_synchronous(core):
    pacing = make(core, 2, 0, 0)
    next_id = 0
    for step in range(10):
        next_id = fill(pacing, next_id)
        late = list(range(next_id - 2, next_id))
        finish(pacing, *late)
        assert sorted(take(pacing, 2)) == late
        # The new weights are made but not announced: nothing starts, nothing is given up.
        assert not pacing.can_admit()
        assert pacing.gauges() == (0, 0, 2)
        assert len(pacing.publish(step + 1)) == 2


def test_case_4_four_updates_in_a_step_are_one_version(core):
    pacing = make(core, 4, 1, 1)
    next_id = 0
    for step in range(6):
        next_id = fill(pacing, next_id)
        finish(pacing, *pacing.outstanding_ids(core.GroupState.IN_FLIGHT))
        for update in range(4):
            (group_id,) = take(pacing, 1)
            assert 0 <= step - pacing.group(group_id).source <= 1
            assert pacing.published == step, f"update {update} publishes nothing"
        pacing.publish(step + 1)


def test_case_6_the_data_ends_with_a_straggler_and_a_batch_that_cannot_fill(core):
    pacing = make(core, 4, 1, 4)
    admit(pacing, *range(6))
    pacing.end_of_data()
    finish(pacing, 1, 2, 3, 4)
    assert run_step(pacing) == (1, 2, 3, 4)
    finish(pacing, 5)
    must_wait(pacing, 4, "fill")  # group 0 is in flight
    finish(pacing, 0)
    assert pacing.take(4) == ((5, 0), True)
    assert pacing.taken_in(1) == (5, 0)
    pacing.publish(2)
    must_end(pacing, 4)
    assert pacing.num_outstanding == 0


# -- flat cost ------------------------------------------------------------------------------------


class Counted:
    """Counts the bytecodes that a call executes; C code that loops is bounded separately."""

    def __init__(self) -> None:
        self.num = 0

    def _trace(self, frame, event, _):
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self.num += event == "opcode"
        return self._trace

    def __call__(self, event, *arguments) -> Any:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return event(*arguments)
        finally:
            sys.settrace(before)


def cost_of_a_life(core, outstanding) -> dict[str, float]:
    """Bytecodes of each event for one group, with `outstanding` groups there."""
    batch = outstanding // 2
    pacing = make(core, batch, 1, 8, max_bytes=outstanding)
    steps = 3
    next_id = 0
    cost: dict[str, float] = {}

    def count(name, event, *arguments, per=1) -> Any:
        counted = Counted()
        answer = counted(event, *arguments)
        cost[name] = max(cost.get(name, 0), counted.num / per)
        return answer

    for _ in range(steps):
        while pacing.num_outstanding < outstanding - 1:
            pacing.admit(next_id)
            next_id += 1
        count("can_admit", pacing.can_admit)
        count("admit", pacing.admit, next_id)
        count("start", pacing.start, next_id, pacing.published)
        count("restart", pacing.restart, next_id)
        count("drop", pacing.drop, next_id)
        flying = pacing.outstanding_ids(core.GroupState.IN_FLIGHT)
        count("complete", pacing.complete, flying[0], pacing.group(flying[0]).source)
        finish(pacing, *flying[1 : len(flying) // 2 + 1])
        next_id += 1
        count("take one", pacing.take, 1)
        while pacing.left > 1:
            take(pacing, 1)
        count("take the last", pacing.take, 1)
        count("gauges", pacing.gauges)
        count("group", pacing.group, flying[-1])
        count("collect_next", pacing.collect_next)
        assert len(pacing._untaken) <= 8 + 2, "sorted() and min() see at most K + 2 sources"
        count("publish, a group", pacing.publish, pacing.published + 1, per=batch)
    return cost


def test_cost_is_flat_in_the_number_outstanding(core):
    """No event looks at more than its own group and the distinct sources."""
    few = cost_of_a_life(core, 10)
    some = cost_of_a_life(core, 1_000)
    many = cost_of_a_life(core, 100_000)
    for event, number in few.items():
        assert some[event] <= number * 1.05 + 2, (event, number, some[event])
        assert many[event] <= number * 1.05 + 2, (event, number, many[event])
