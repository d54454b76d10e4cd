"""The scheduler's decisions, in virtual time; see scheduler_world.py.

Every test takes the module under test as `core`, so that tests/core/mutants.py can run the same
functions on changed copies of it. The books are validated after every event.
"""

from __future__ import annotations

import random
from types import ModuleType

import pytest

from asyncrl_node.core import scheduling as shipped
from asyncrl_node.core.pacing import GroupState, PacingRule
from asyncrl_node.errors import InvalidTransition, RunFault
from asyncrl_node.messages import (
    Cancel,
    Drain,
    EndOfData,
    EvaluationCompleted,
    EvaluationDone,
    GroupCompleted,
    GroupFailed,
    GroupKey,
    Heartbeat,
    LauncherHello,
    LearnerFinished,
    LearnerHello,
    RequestEvaluation,
    RestartSampler,
    RunEnded,
    SamplerExited,
    SamplerFault,
    SamplerHello,
    Warned,
)
from tests.core.scheduler_world import World, by_hand, complete, completed, started


@pytest.fixture
def core() -> ModuleType:
    return shipped


# -- exactly once ---------------------------------------------------------------------------------


def test_every_problem_is_trained_exactly_once(core):
    for seed in range(4):
        chance = random.Random(seed)
        seconds = [chance.choice([0.5, 1.0, 9.0]) for _ in range(30)]
        world = World(
            core,
            PacingRule(4, 2, 3),
            30,
            num_samplers=3,
            max_rollouts=3,
            take=chance.choice([1, 2, 4]),
            latency=lambda problem, attempt, seconds=seconds: seconds[problem],
        )
        world.begin().run()
        assert world.ended().trained == 30
        assert sorted(problem for _, problem, _ in world.trained) == list(range(30))
        assert all(0 <= staleness <= 3 for *_, staleness in world.trained)
        assert len(world.batches[-1].groups) <= 2
        assert [r.version for r in world.events("published")] == list(range(world.version + 1))


def test_crashes_lose_nothing_and_train_nothing_twice(core):
    for seed in range(6):
        chance = random.Random(seed)
        world = World(
            core,
            PacingRule(3, 1, 2),
            24,
            num_samplers=2,
            latency=lambda problem, attempt, chance=chance: chance.choice([0.5, 2.0, 5.0]),
        )
        world.begin()
        for moment in range(1, 12):
            world.run(float(moment))
            if not world.finished:
                victim = chance.randrange(2)
                world.die(victim, told=chance.random() < 0.5)
                world.later(0.5, lambda world=world, victim=victim: world.hello(victim))
        world.run()
        assert world.ended().trained == 24
        assert sorted(problem for _, problem, _ in world.trained) == list(range(24))
        assert all(0 <= staleness <= 2 for *_, staleness in world.trained)
        assert world.core.totals.restarted > 0


def test_a_step_limit_ends_with_nothing_begun_in_vain(core):
    world = World(core, PacingRule(2, 2, 4, last_version=3))
    world.begin().run()
    ended = world.ended()
    assert (ended.reason, ended.admitted, ended.trained, ended.leftover) == ("done", 6, 6, 0)


def test_case_6_the_data_ends_with_a_straggler_and_a_short_batch(core):
    world = World(
        core,
        PacingRule(4, 1, 4),
        6,
        latency=lambda problem, attempt: 50.0 if problem == 0 else 1.0,
    )
    world.begin().run()
    assert world.ended().trained == 6
    assert [len(batch.groups) for batch in world.batches] == [4, 2]
    assert world.to_learner[-1] == EndOfData("done")


@pytest.mark.parametrize(("depth", "bound"), [(0, 0), (1, 8), (3, 3), (4, None)])
def test_fixed_staleness_is_the_depth_whatever_the_latencies(core, depth, bound):
    """Samplers of room for less than the pipeline holds; the first steps only fill it."""
    chance = random.Random(depth)
    world = World(
        core,
        PacingRule(2, depth, bound, last_version=12),
        num_samplers=2,
        latency=lambda problem, attempt: chance.choice([0.5, 2.0, 50.0]),
        fixed_staleness=True,
    )
    world.begin().run()
    assert world.ended().trained == 24
    assert [(step, staleness) for step, _, staleness in world.trained] == [
        (step, min(step, depth)) for step in range(12) for _ in range(2)
    ]


def test_fixed_staleness_waits_for_fill_and_says_for_how_much(core):
    world = World(
        core,
        PacingRule(1, 1, 1, last_version=2),
        latency=lambda problem, attempt: 10.0 if problem == 1 else 1.0,
        fixed_staleness=True,
    )
    world.begin().run(5.0)
    assert not world.batches
    assert world.core.status().learner == "waiting for fill: 1 of 2 groups"
    world.run()
    assert world.ended().trained == 2
    assert {batch.waited_for_stragglers_s for batch in world.batches} == {0.0}


def test_what_is_told_of_a_group(core):
    world = by_hand(core, PacingRule(1, 0, 0, last_version=1), seed=5)
    world.begin().run()
    complete(world, 0)
    world.run()
    world.ended()
    life = [record for record in world.ledger if record.key == GroupKey(0, 0)]
    assert [(r.event, r.step, r.version, r.sampler) for r in life] == [
        ("admitted", -1, 0, 0),
        ("started", -1, 0, 0),
        ("completed", -1, 0, 0),
        ("taken", 0, -1, -1),
        ("trained", 0, -1, -1),
    ]
    (order,) = world.admissions()
    assert (order.problem, order.epoch, order.min_version) == (0, 0, 0)
    (batch,) = world.batches
    assert batch.closes
    assert batch.groups[0].checksum == 7


# -- samplers -------------------------------------------------------------------------------------


def test_the_least_loaded_sampler_gets_the_next_group(core):
    world = by_hand(core, PacingRule(2, 1, 1), num_samplers=2)
    world.begin()
    assert [sampler for sampler, _ in world.orders] == [0, 0, 0, 0], "the first one ready"
    for group_id in (0, 1, 2):
        world.handle(GroupFailed(GroupKey(group_id, 0), "engine", "x"))
    # Before each, 0 and 1 hold 3 and 0, 2 and 1, 1 and 2.
    assert [sampler for sampler, _ in world.orders[4:]] == [1, 1, 0]


def test_a_full_sampler_gets_no_more(core):
    world = by_hand(core, PacingRule(4, 1, 1), num_samplers=2, max_rollouts=(2, 3))
    world.begin()
    assert [sampler for sampler, _ in world.orders] == [0, 0, 1, 1, 1]
    world.handle(GroupFailed(GroupKey(0, 0), "engine", "x"))
    assert world.orders[-1][0] == 0
    assert len(world.orders) == 6


def test_a_sampler_of_fewer_rollouts_than_a_group_takes_one(core):
    world = by_hand(core, PacingRule(2, 1, 1), max_rollouts=1)
    world.begin()
    assert len(world.admissions()) == 1


def test_without_a_sampler_nothing_is_admitted(core):
    world = by_hand(core, PacingRule(2, 1, 1), num_samplers=0)
    world.begin()
    assert world.ledger == [r for r in world.ledger if r.event == "published"]
    assert world.core.status().learner == "waiting for a sampler to be ready"


def test_messages_of_an_attempt_before_the_restart_are_late(core):
    world = by_hand(core, PacingRule(2, 0, 0), num_samplers=2, max_rollouts=(1, 9))
    world.begin().run()
    assert world.core.pacing.num_in_flight == 2
    old = {key.group_id: key for key in world.running}
    world.die(0)
    (again,) = world.events("restarted")
    assert again.key == GroupKey(0, 1)
    new = world.admissions()[-1]
    assert new.key == GroupKey(0, 1)
    assert new.seed != world.admissions()[0].seed
    assert world.orders[-1][0] == 1, "the other sampler has it now"
    assert world.slots == {old[1], new.key}, "each attempt has its own file"
    before = len(world.ledger)
    world.handle(started(old[0], 0))
    world.handle(completed(old[0], 0))
    world.handle(GroupFailed(old[0], "engine", "gone"))
    assert world.core.totals.late_messages == 3
    assert len(world.ledger) == before
    complete(world, 0, 1)
    world.handle(completed(new.key, 0))
    assert world.core.totals.late_messages == 4, "whole already"
    assert [group.key for group in world.batches[0].groups] == [new.key, old[1]]


def test_messages_of_a_group_that_waits_for_a_sampler_are_late(core):
    world = by_hand(core, PacingRule(1, 0, 0))
    world.begin().run()
    world.die(0)
    assert world.core.pacing.num_in_flight == 1
    world.handle(started(GroupKey(0, 0), 0))
    world.handle(completed(GroupKey(0, 1), 0))
    world.handle(completed(GroupKey(9, 0), 0))
    assert world.core.totals.late_messages == 3
    world.hello(0)
    assert world.admissions()[-1].key == GroupKey(0, 1)
    complete(world, 0)
    assert len(world.batches) == 1


def test_a_restarted_group_is_sampled_by_the_present_weights(core):
    world = by_hand(core, PacingRule(1, 1, 1))
    world.begin().run()
    complete(world, 1)
    world.run()
    assert world.version == 1
    world.die(0)
    world.hello(0)
    again = [order for order in world.admissions() if order.key.attempt == 1]
    assert [order.min_version for order in again] == [1, 1]
    with pytest.raises(InvalidTransition, match="older than min_version"):
        world.core.handle(started(again[0].key, 0), world.now_s)


def test_a_lost_group_is_placed_before_anything_new_is_admitted(core):
    world = by_hand(core, PacingRule(2, 1, 1), num_samplers=2, max_rollouts=(1, 2))
    world.begin().run()
    assert len(world.running) == 3, "one slot is free, and no sampler has room"
    world.die(0)
    complete(world, 1)
    assert world.admissions()[-1].key == GroupKey(0, 1)


def test_a_second_hello_changes_nothing(core):
    world = by_hand(core, PacingRule(2, 0, 0))
    world.begin().run()
    before = len(world.orders)
    world.hello(0)
    world.handle(SamplerHello(0, -1, 1, 1000))
    assert len(world.orders) == before
    assert world.core.totals.restarted == 0


def test_a_new_incarnation_replaces_the_old_one_whoever_tells_first(core):
    world = by_hand(core, PacingRule(2, 0, 0))
    world.begin().run()
    gone = world.die(0, told=False)
    world.hello(0)
    assert world.core.totals.restarted == 2
    world.handle(SamplerExited(0, gone))
    world.handle(SamplerExited(7, 0))
    assert world.core.totals.restarted == 2, "the new one was not the one that exited"
    complete(world, 0, 1)
    assert len(world.batches) == 1


def test_a_sampler_at_fault_is_replaced(core):
    world = by_hand(core, PacingRule(1, 0, 0))
    world.begin().run()
    world.handle(SamplerFault(1, 0, "overdue", "its first load: it has not said hello"))
    assert world.reports == [
        RestartSampler(1, 0, "overdue", "its first load: it has not said hello")
    ]
    assert world.events("restarted") == []
    world.handle(SamplerFault(0, 0, "wrong_hash", "the copy differs"))
    assert world.reports[1:] == [RestartSampler(0, 0, "wrong_hash", "the copy differs")]
    assert [r.key for r in world.events("restarted")] == [GroupKey(0, 1)]
    world.incarnation[0] = 1
    world.hello(0)
    complete(world, 0)
    assert len(world.batches) == 1


def test_tokens_older_than_the_order_allows_stop_the_run(core):
    world = by_hand(core, PacingRule(1, 1, 1))
    world.begin().run()
    complete(world, 0)
    world.run()
    key = world.admissions()[-1].key
    assert world.core.pacing.group(key.group_id).source == 1
    for oldest, newest in ((0, 1), (2, 1)):
        with pytest.raises(RunFault, match="version_breach"):
            world.core.handle(completed(key, oldest, version_max=newest), world.now_s)


def test_heartbeats_are_shown(core):
    world = by_hand(core, PacingRule(1, 0, 0))
    world.begin().run()
    (line,) = world.core.status().samplers
    assert (line.ready, line.policy_version, line.num_groups) == (False, -1, 1)
    world.handle(Heartbeat(0, 0, 3, 2, 1, True, 99))
    world.handle(Heartbeat(0, 4, 9, 9, 9, False, 99))
    world.handle(Heartbeat(5, 0, 9, 9, 9, False, 99))
    (line,) = world.core.status().samplers
    assert (line.ready, line.policy_version, line.num_rollouts, line.loading) == (True, 3, 2, True)


def test_a_sampler_that_falls_silent_is_replaced_and_its_groups_restart(core):
    world = by_hand(core, PacingRule(1, 0, 0), num_samplers=2, silent_s=30.0)
    world.begin()
    world.tick(25.0)
    world.silent.add(0)
    world.tick(55.0)
    assert world.reports == [], "heard 30 s ago, not longer"
    world.tick(56.0)
    assert [(r.sampler, r.incarnation, r.name) for r in world.reports] == [(0, 0, "sampler_silent")]
    assert "no heartbeat for 31 s" in world.reports[0].story
    assert world.orders[-1][0] == 1
    world.tick(57.0)
    assert len(world.reports) == 1, "once"
    complete(world, 0)
    assert len(world.batches) == 1


def test_only_ticks_find_a_sampler_silent(core):
    """Messages that piled up while the scheduler stood still are read before it judges."""
    world = by_hand(core, PacingRule(1, 0, 0), silent_s=30.0)
    world.begin().run(500.0)
    world.handle(world.heartbeat(0))
    world.handle(core.Tick())
    assert not any(isinstance(report, RestartSampler) for report in world.reports)


def test_nothing_that_the_core_keeps_grows_with_the_run(core):
    world = World(core, PacingRule(2, 3, 3, last_version=300), num_samplers=2, max_rollouts=4)
    world.begin().run()
    assert world.ended().trained == 600
    sizes = {name: len(kept) for name, kept in vars(world.core).items() if hasattr(kept, "__len__")}
    assert max(sizes.values()) < 50, sizes


def test_an_idle_sampler_is_not_forgotten_however_long_another_works(core):
    world = by_hand(
        core,
        PacingRule(1, 0, 0),
        num_samplers=2,
        outcome=lambda problem: "constant",
        filter_constant_rewards=True,
    )
    world.begin()
    for group_id in range(100):
        complete(world, group_id)
    assert {sampler for sampler, _ in world.orders} == {0}
    world.die(0)
    assert world.orders[-1][0] == 1


def test_lost_groups_are_placed_again_in_the_order_of_their_admission(core):
    world = by_hand(core, PacingRule(4, 1, 1), num_samplers=2, max_rollouts=(5, 3))
    world.begin().run()
    assert [sampler for sampler, _ in world.orders] == [0, 0, 0, 0, 0, 1, 1, 1]
    world.die(0)
    assert len(world.orders) == 8, "nobody has room"
    complete(world, 5, 6, 7)
    placed = [(sampler, order.key) for sampler, order in world.orders[8:]]
    assert placed == [(1, GroupKey(group_id, 1)) for group_id in (0, 1, 2)]
    world.hello(0)
    assert [order.key for order in world.admissions()[11:]] == [GroupKey(3, 1), GroupKey(4, 1)]


def test_a_group_lost_before_publication_and_placed_after_it_keeps_its_due_step(core):
    """Its order asks for the version it restarted at, so that the order is what the rule counts."""
    world = by_hand(core, PacingRule(1, 1, 1), num_samplers=2, max_rollouts=(1, 1))
    world.begin().run()
    assert [sampler for sampler, _ in world.orders] == [0, 1]
    world.die(1)
    complete(world, 0)
    world.run(0.5)
    assert world.core.status().published == 0
    assert world.core.pacing.group(1).min_version == 0
    assert [(order.key, order.min_version) for order in world.admissions()[2:]] == [
        (GroupKey(1, 1), 0)
    ]
    world.die(0)
    world.run()
    assert world.version == 1
    assert world.core.status().published == 1
    world.hello(0)
    again = {order.key: order.min_version for order in world.admissions()}
    assert again[GroupKey(1, 2)] == 0, "lost again at version 0, placed at version 1"
    assert world.core.pacing.due_step(1) == 1


def test_seeds_are_the_users(core):
    seeds = {}
    for seed in (5, 6, 5):
        world = by_hand(core, PacingRule(2, 1, 1), seed=seed)
        world.begin()
        chosen = [order.seed for order in world.admissions()]
        assert len(set(chosen)) == 4, "each group its own"
        assert seeds.setdefault(seed, chosen) == chosen, "the same again"
    assert not set(seeds[5]) & set(seeds[6])


def test_a_report_names_the_incarnation_that_failed(core):
    world = by_hand(core, PacingRule(1, 0, 0), silent_s=30.0)
    world.begin().run()
    for incarnation in range(3):
        if incarnation:
            world.die(0)
            world.hello(0)
        world.handle(SamplerFault(0, incarnation, "wrong_hash", "the copy differs"))
        assert world.reports[-1] == RestartSampler(0, incarnation, "wrong_hash", "the copy differs")
    world.die(0)
    world.hello(0)
    world.silent.add(0)
    world.tick(31.0)
    (last,) = (r for r in world.reports if isinstance(r, RestartSampler) and r.incarnation == 3)
    assert (last.sampler, last.name) == (0, "sampler_silent")


def test_restarted_groups_are_counted_over_the_whole_run(core):
    world = by_hand(core, PacingRule(2, 1, 2, last_version=3))
    world.begin().run()
    world.die(0)
    world.hello(0)
    complete(world, 0, 1)
    world.run()
    world.die(0)
    world.hello(0)
    complete(world, 2, 3)
    world.run()
    complete(world, 4, 5)
    world.run()
    assert [row["async/restarted_groups"] for row in world.rows] == [4, 8, 8]


# -- filtered and failed --------------------------------------------------------------------------


def test_case_5_a_stretch_without_signal_goes_on_and_says_so(core):
    world = World(
        core,
        PacingRule(2, 1, 1, last_version=2),
        outcome=lambda problem: "constant" if problem < 45 else "good",
        filter_constant_rewards=True,
    )
    world.begin().run()
    ended = world.ended()
    assert (ended.filtered, ended.trained) == (45, 4)
    warnings = [r.text for r in world.reports if isinstance(r, Warned)]
    assert len(warnings) == 2, "every 20 in a row"
    assert "the last 20 groups all had constant rewards (now 0)" in warnings[0]
    assert {r.reason for r in world.events("filtered")} == {"constant reward"}
    (first, _) = world.rows
    assert first["async/filtered_groups"] == 45
    assert first["tokens/discarded"] == 450
    assert first["tokens/sampled"] == 470
    assert first["reward/mean"] == pytest.approx(2 * 0.5 / 47), "before the filter"


def test_constant_rewards_are_trained_unless_they_are_filtered(core):
    world = World(core, PacingRule(1, 0, 0, last_version=2), outcome=lambda problem: "constant")
    world.begin().run()
    assert world.ended().trained == 2


def test_case_7_a_failed_group_is_recorded_and_its_slot_filled_again(core):
    world = World(
        core,
        PacingRule(2, 0, 0),
        5,
        outcome=lambda problem: "fails" if problem in (0, 4) else "good",
    )
    world.begin().run()
    ended = world.ended()
    assert (ended.failed, ended.trained) == (2, 3)
    assert {r.reason for r in world.events("failed")} == {"environment: always raises"}
    assert sorted(problem for _, problem, _ in world.trained) == [1, 2, 3]


def test_a_run_in_which_every_group_fails_stops_by_name(core):
    world = World(core, PacingRule(2, 1, 1), outcome=lambda problem: "fails")
    with pytest.raises(RunFault, match=r"every_rollout_fails.*last 16 groups.*always raises"):
        world.begin().run()
    assert world.core.totals.failed == 16


def test_failures_between_which_something_succeeds_do_not_stop_the_run(core):
    for good in ("good", "constant"):
        world = World(
            core,
            PacingRule(1, 1, 1),
            100,
            outcome=lambda problem, good=good: "fails" if problem % 7 else good,
            filter_constant_rewards=True,
        )
        world.begin().run()
        assert world.ended().failed == 85


def test_one_good_group_ends_a_stretch_without_signal(core):
    """Every tenth group has signal, so the last twenty in a row never had none."""
    world = World(
        core,
        PacingRule(2, 1, 1, last_version=4),
        outcome=lambda problem: "good" if problem % 10 == 0 else "constant",
        filter_constant_rewards=True,
    )
    world.begin().run()
    assert world.ended().filtered > 60
    assert [r for r in world.reports if isinstance(r, Warned)] == []
    assert world.core.totals.filtered_in_a_row < 10


def test_the_limit_of_failures_in_a_row_is_four_times_the_slots(core):
    slots = 6
    world = by_hand(core, PacingRule(2, 2, 2))
    world.begin().run()
    for group_id in range(4 * slots - 1):
        world.handle(GroupFailed(GroupKey(group_id, 0), "engine", "x"))
    complete(world, 4 * slots - 1)
    assert world.core.totals.failed_in_a_row == 0, "one success resets the count"
    for group_id in range(4 * slots, 8 * slots - 1):
        world.handle(GroupFailed(GroupKey(group_id, 0), "engine", "x"))
    with pytest.raises(RunFault, match="every_rollout_fails"):
        world.core.handle(GroupFailed(GroupKey(8 * slots - 1, 0), "engine", "x"), world.now_s)
    assert world.core.totals.failed_in_a_row == 4 * slots


def test_a_filtered_group_frees_slot_and_place_at_once(core):
    world = by_hand(
        core, PacingRule(1, 0, 0), outcome=lambda p: "constant", filter_constant_rewards=True
    )
    world.begin().run()
    complete(world, 0)
    assert world.slots == {GroupKey(1, 0)}
    assert world.core.pacing.gauges() == (1, 0, 0)


# -- take and wait --------------------------------------------------------------------------------


def test_waiting_for_stragglers_is_only_what_the_rule_alone_holds_back(core):
    world = by_hand(core, PacingRule(2, 1, 1), 6)
    world.begin().run()
    world.run(10.0)
    complete(world, 0)
    world.run(30.0)
    complete(world, 1)
    assert world.batches[-1].waited_for_stragglers_s == 0.0, "30 s, all of it for fill"
    world.run(100.0)  # step 1, since 31 s: groups 2 and 3 are due in it
    complete(world, 4)
    assert world.core.status().learner == "waiting for fill: 1 of 2 groups"
    world.run(110.0)
    complete(world, 5)
    assert world.core.status().learner.startswith("waiting for stragglers: group 2 (problem 2)")
    world.tick(117.0)
    complete(world, 2)
    world.run(120.0)
    complete(world, 3)
    (_, second) = world.batches
    assert [group.problem for group in second.groups] == [2, 3]
    assert second.waited_for_stragglers_s == pytest.approx(10.0), "from 110 s to 120 s"


def test_case_25_with_bound_0_nothing_waits_for_stragglers(core):
    for take in (1, 2, 4):
        world = World(
            core,
            PacingRule(4, 0, 0),
            16,
            take=take,
            latency=lambda problem, attempt: 100.0 if problem % 4 == 3 else 1.0,
        )
        world.begin().run()
        assert world.ended().trained == 16
        assert [batch.waited_for_stragglers_s for batch in world.batches] == [0.0] * (16 // take)
        assert all(staleness == 0 for *_, staleness in world.trained)


def test_gauges_are_read_right_after_publication(core):
    world = by_hand(core, PacingRule(2, 1, 1), take=1)
    world.begin().run()
    complete(world, 0, 1, 2)
    world.run(0.5)
    assert len(world.batches) == 2
    world.run()
    (row,) = world.rows
    figures = {key.removeprefix("async/"): row[key] for key in row if key.startswith("async/")}
    assert figures["in_flight_groups"] == 1, "before anything new is admitted"
    assert figures["completed_buffer_size"] == 1
    assert figures["taken_groups"] == 0
    assert figures["outstanding_groups"] == 2
    assert (row["kind"], row["step"], row["loss"]) == ("train", 0, 0.0)
    assert (row["tokens/sampled"], row["tokens/discarded"]) == (20, 0)
    assert row["reward/mean"] == 0.5
    assert world.core.pacing.num_outstanding == 4


def test_taken_groups_of_a_batch_collected_ahead_are_in_the_row(core):
    """Prefetch: the next batch is partly taken when the weights of this one are published."""
    world = by_hand(core, PacingRule(2, 2, 3), take=1)
    world.begin().run()
    complete(world, 0, 1)
    world.run(0.5)
    world.core.pacing.collect_next()
    complete(world, 2)
    assert len(world.core.pacing.take(1).group_ids) == 1
    world.run(1.0)
    (row,) = world.rows
    assert row["async/taken_groups"] == 1
    parts = ("in_flight_groups", "completed_buffer_size", "taken_groups")
    assert row["async/outstanding_groups"] == sum(row["async/" + part] for part in parts) == 4


def test_every_row_adds_up(core):
    world = World(
        core,
        PacingRule(3, 2, 3, last_version=12),
        take=1,
        latency=lambda problem, attempt: 7.0 if problem % 5 == 0 else 0.7,
    )
    world.begin().run()
    world.ended()
    assert len(world.rows) == 12
    for row in world.rows:
        parts = ("in_flight_groups", "completed_buffer_size", "taken_groups")
        assert row["async/outstanding_groups"] == sum(row["async/" + part] for part in parts)
        assert row["async/taken_groups"] == 0


def test_timeouts_and_dropped_samples_are_counted_in_their_step(core):
    world = by_hand(core, PacingRule(1, 0, 0, last_version=2))
    world.begin().run()
    key = world.admissions()[0].key
    world.data[key] = 0
    world.handle(GroupCompleted(key, 1, 1, 0, 0, 8, 10, 4.0, 0.0, 1.0, 3, 2, 1.0))
    world.run()
    complete(world, 1)
    world.run()
    assert [row["async/timed_out_rollouts"] for row in world.rows] == [3, 0]
    assert [row["async/dropped_samples"] for row in world.rows] == [2, 0]


# -- warnings -------------------------------------------------------------------------------------


def test_case_9_a_rollout_that_never_returns_is_named_with_the_way_out(core):
    world = World(
        core,
        PacingRule(4, 1, 2),
        48,
        num_samplers=2,
        latency=lambda problem, attempt: None if problem == 0 else 1.0,
        warn_every_s=120.0,
        rollout_timeout_s=900.0,
    )
    world.begin()
    assert world.tick(100.0) == []
    (text,) = world.tick(140.0)
    assert "for stragglers" in text
    assert "group 0 (problem 0) on sampler 0, due in step 2" in text
    assert "set rollout_timeout_s (now 900 s)" in text
    assert "group 1" not in text.replace("group 1 ", "")
    assert world.tick(200.0) == []
    assert len(world.tick(260.0)) == 1
    assert world.tick(379.0) == []
    assert len(world.tick(380.0)) == 1, "again every warn_every_s"
    complete(world, 0)
    world.run()
    assert world.ended().trained == 48


def test_a_wait_for_fill_names_who_holds_the_groups(core):
    world = by_hand(core, PacingRule(8, 0, 3), num_samplers=2, warn_every_s=10.0)
    world.begin().run()
    (text,) = world.tick(10.0)
    assert "waited 10 s in step 0 for fill" in text
    assert "group 4 (problem 4) on sampler 0, due in step 3 and 3 more" in text
    world = by_hand(core, PacingRule(1, 0, None), warn_every_s=10.0)
    world.begin().run()
    (text,) = world.tick(12.0)
    assert "group 0 (problem 0) on sampler 0; if" in text, "no bound, no due step"


def test_case_10_samplers_that_are_gone_are_named(core):
    world = by_hand(core, PacingRule(1, 0, 0), warn_every_s=10.0)
    world.begin().run()
    world.die(0)
    (text,) = world.tick(10.0)
    assert "no sampler is ready; see logs/sampler-*.log" in text
    assert world.core._stragglers(1) == "group 0 (problem 0) on no sampler, due in step 0"


def test_nobody_is_warned_while_the_learner_trains(core):
    world = World(core, PacingRule(1, 0, 0, last_version=1), train_s=1000.0, warn_every_s=10.0)
    world.begin()
    assert world.tick(500.0) == []
    assert world.core.status().learner == "training"


def test_an_evaluation_that_lasts_is_named_with_its_samplers(core):
    world = by_hand(core, PacingRule(1, 0, 0), warn_every_s=10.0, eval_problems=3)
    world.begin().run()
    world.core._pending = None
    world.handle(RequestEvaluation(7, 0, 0))
    (text,) = world.tick(10.0)
    assert text.startswith("for 10 s the learner waits for 3 held-out rollouts on sampler 0;")
    assert "set rollout_timeout_s (now 3600 s)" in text
    assert world.tick(15.0) == []
    world.die(0)
    (text,) = world.tick(20.0)
    assert "3 held-out rollouts on no sampler" in text


def test_a_learner_that_never_reports_is_named(core):
    world = World(core, PacingRule(1, 0, 0), warn_every_s=10.0)
    assert world.tick(0.0) == []
    (text,) = world.tick(10.0)
    assert text == "for 10 s the learner has not reported yet; see logs/learner.log"


# -- the end --------------------------------------------------------------------------------------


def test_drain_while_a_batch_is_empty_ends_at_once(core):
    world = by_hand(core, PacingRule(2, 1, 1))
    world.begin().run()
    complete(world, 0)
    world.handle(Drain())
    assert world.to_learner == [EndOfData("interrupted")]
    world.run()
    ended = world.ended()
    assert (ended.reason, ended.trained, ended.leftover) == ("interrupted", 0, 4)
    cancelled = {order.key.group_id for _, order in world.orders if isinstance(order, Cancel)}
    assert cancelled == {1, 2, 3}, "what is whole needs no cancelling"
    assert {r.reason for r in world.events("leftover")} == {"interrupted"}


def test_drain_admits_nothing_more(core):
    world = by_hand(core, PacingRule(2, 1, 1))
    world.begin().run()
    before = len(world.admissions())
    world.core.handle(Drain(), 1.0)
    key = world.admissions()[0].key
    world.core.handle(GroupFailed(key, "engine", "x"), 1.0)
    assert world.core.pacing.can_admit()
    assert len(world.admissions()) == before


def test_drain_while_a_step_is_training_finishes_it(core):
    world = World(core, PacingRule(2, 1, 1), train_s=5.0)
    world.begin().run(3.0)
    assert world.training
    world.handle(Drain())
    assert world.to_learner[-1] == EndOfData("interrupted")
    world.run()
    ended = world.ended()
    assert (ended.reason, ended.trained, ended.leftover) == ("interrupted", 2, 2)
    assert world.version == 1
    assert world.events("handed_back") == []


def test_drain_before_the_first_update_hands_the_open_batch_back(core):
    world = by_hand(core, PacingRule(4, 1, 1), take=1, num_substeps=1)
    world.begin().run()
    complete(world, 0, 1)
    world.run()
    assert len(world.batches) == 2
    assert world.core.pacing.left == 2
    world.handle(Drain())
    assert [r.key.group_id for r in world.events("handed_back")] == [0, 1]
    assert world.core.pacing.gauges() == (6, 2, 0)
    assert world.to_learner[-1] == EndOfData("interrupted")
    world.run()
    ended = world.ended()
    assert (ended.trained, ended.leftover) == (0, 8)
    assert world.version == 0


def test_drain_after_the_first_update_trains_what_was_taken(core):
    world = by_hand(core, PacingRule(4, 1, 3), take=1, num_substeps=2)
    world.begin().run()
    complete(world, 0, 1)
    world.run()
    assert world.core.pacing.left == 2, "two of four: the first update is done"
    world.handle(Drain())
    assert world.to_learner[-2].groups == ()
    assert world.to_learner[-2].closes
    assert world.to_learner[-1] == EndOfData("interrupted")
    assert world.events("handed_back") == []
    world.run()
    ended = world.ended()
    assert (ended.trained, ended.leftover) == (2, 6)
    assert world.version == 1


def test_drain_after_the_first_update_fills_the_batch_with_what_is_whole(core):
    """Group 2 is due in this step. Left behind, it would be past due in the next: no resume."""
    world = by_hand(core, PacingRule(4, 1, 1), take=2, num_substeps=2)
    world.begin().run()
    complete(world, 0, 1)
    complete(world, 2)
    world.validates = False  # what is in flight is past due, and is sampled anew after a resume
    world.run(0.5)
    world.handle(Drain())
    world.run()
    assert sorted(problem for _, problem, _ in world.trained) == [0, 1, 2]


def test_drain_between_takes_is_answered_at_the_next(core):
    world = by_hand(core, PacingRule(2, 1, 3), take=1, num_substeps=2)
    world.begin().run()
    complete(world, 0)
    assert len(world.batches) == 1
    assert world.core._pending is None
    world.handle(Drain())
    assert not any(isinstance(order, EndOfData) for order in world.to_learner)
    world.run()
    assert [(len(batch.groups), batch.closes) for batch in world.batches] == [(1, False), (0, True)]
    assert world.ended().trained == 1


def test_leftovers_of_a_learner_that_ends_first_are_named(core):
    world = by_hand(core, PacingRule(1, 2, 2))
    world.begin().run()
    world.die(0)
    world.handle(LearnerFinished())
    (ended,) = [r for r in world.reports if isinstance(r, RunEnded)]
    assert (ended.reason, ended.leftover) == ("done", 3)
    assert {r.reason for r in world.events("leftover")} == {"the run ended"}
    assert not world.slots
    assert world.handle(core.Tick()) == []


def test_a_run_can_start_at_any_version(core):
    world = World(core, PacingRule(2, 1, 1, last_version=9), start_version=7)
    world.begin().run()
    assert world.ended().trained == 4
    assert [step for step, *_ in world.trained] == [7, 7, 8, 8]


def test_hellos_are_only_hellos(core):
    world = by_hand(core, PacingRule(1, 0, 0), num_samplers=0)
    assert world.handle(LauncherHello()) == []
    assert world.handle(LearnerHello(1, 0)) == []
    assert world.core.status().learner == "starting"


# -- evaluation -----------------------------------------------------------------------------------


def evaluated(order, reward=1.0, version=0, failed=False) -> EvaluationCompleted:
    return EvaluationCompleted(
        order.evaluation, order.problem, order.attempt, reward, version, version + 1, failed
    )


def test_evaluation_takes_no_slot_and_names_its_versions(core):
    world = by_hand(core, PacingRule(1, 0, 0), num_samplers=2, eval_problems=3)
    for sampler in (0, 1):
        world.hello(sampler)
    world.handle(RequestEvaluation(1, 0, 0))
    assert world.core.status().learner == "evaluating"
    assert world.core.status().evaluating == 3
    orders = world.evaluations()
    assert sorted(order.problem for _, order in orders) == [0, 1, 2]
    assert {sampler for sampler, _ in orders} == {0, 1}
    assert world.core.pacing.num_outstanding == 1, "training goes on beside it"
    world.handle(evaluated(orders[0][1], reward=1.0, version=2))
    world.handle(evaluated(orders[0][1], reward=1.0, version=2))  # twice counts once
    world.handle(evaluated(orders[1][1], failed=True, version=9))
    assert world.rows == []
    world.handle(evaluated(orders[2][1], reward=0.0, version=1))
    (row,) = world.rows
    assert (row["kind"], row["step"]) == ("eval", 0)
    assert row["eval/reward_mean"] == pytest.approx(1 / 3), (
        "what could not be sampled earned nothing"
    )
    assert (row["eval/num_problems"], row["eval/num_failed"]) == (3, 1)
    assert (row["eval/version_min"], row["eval/version_max"]) == (1, 3)
    assert world.to_learner[-1] == EvaluationDone(1, pytest.approx(1 / 3))
    assert world.core.status().evaluating == 0


def test_evaluation_of_a_lost_sampler_is_queued_again(core):
    world = by_hand(core, PacingRule(1, 0, 0), num_samplers=2, eval_problems=2)
    for sampler in (0, 1):
        world.hello(sampler)
    world.handle(RequestEvaluation(1, 0, 0))
    ((first, lost), (_, kept)) = world.evaluations()
    world.die(first)
    (again,) = world.evaluations()[2:]
    assert again[0] != first
    assert (again[1].problem, again[1].attempt) == (lost.problem, 1)
    assert again[1].seed != lost.seed
    world.handle(evaluated(lost))  # late
    assert world.core.status().evaluating == 2
    world.handle(evaluated(again[1]))
    world.handle(evaluated(kept))
    assert world.to_learner == [EvaluationDone(1, 1.0)]
    world.handle(evaluated(kept))  # after the end
    assert len(world.rows) == 1


def test_an_evaluation_is_ordered_at_its_own_version(core):
    """Also when it is ordered again, after newer weights are public."""
    world = by_hand(core, PacingRule(1, 0, 0), num_samplers=2, eval_problems=2)
    world.begin().run()
    world.handle(RequestEvaluation(1, 3, 3))
    orders = world.evaluations()
    assert [order.min_version for _, order in orders] == [3, 3]
    world.die(orders[0][0])
    assert world.evaluations()[-1][1].min_version == 3


def test_evaluation_waits_for_a_sampler(core):
    world = by_hand(core, PacingRule(1, 0, 0), eval_problems=1)
    world.handle(RequestEvaluation(1, 0, 0))
    assert world.evaluations() == []
    world.hello(0)
    assert len(world.evaluations()) == 1


def test_a_take_during_an_evaluation_is_what_the_learner_waits_for(core):
    world = by_hand(core, PacingRule(1, 0, 0), eval_problems=1)
    world.begin().run()
    world.handle(RequestEvaluation(1, 0, 0))
    assert world.core.status().learner == "waiting for fill: 0 of 1 groups"
    assert world.core.pacing.outstanding_ids(GroupState.IN_FLIGHT) == [0]


# -- fixed staleness ------------------------------------------------------------------------------


def exactly(depth: int, trained: list[tuple[int, int, int]]) -> bool:
    """Whether each group is as stale as its step lets it be: 0, 1, ... D, D, D."""
    return all(staleness == min(step, depth) for step, _, staleness in trained)


@pytest.mark.parametrize("bound", [0, 9, None])
def test_fixed_staleness_is_exact_whatever_the_latencies(core, bound):
    for depth in (0, 1, 3) if bound != 0 else (0,):
        for seed in range(3):
            chance = random.Random(seed)
            world = World(
                core,
                PacingRule(3, depth, bound, last_version=11),
                num_samplers=2,
                max_rollouts=5,
                latency=lambda problem, attempt, chance=chance: chance.choice([0.1, 1.0, 30.0]),
                outcome=lambda problem: ["good", "good", "constant", "fails"][problem % 4],
                fixed_staleness=True,
                filter_constant_rewards=True,
            )
            ended = world.begin().run().ended()
            assert (ended.trained, ended.leftover) == (33, 0)
            assert ended.filtered > 0
            assert ended.failed > 0
            assert exactly(depth, world.trained)
            assert all(batch.waited_for_stragglers_s == 0 for batch in world.batches)


def test_fixed_staleness_survives_crashes(core):
    chance = random.Random(7)
    world = World(
        core,
        PacingRule(2, 2, 8, last_version=8),
        num_samplers=2,
        latency=lambda problem, attempt: chance.choice([0.5, 2.0, 5.0]),
        fixed_staleness=True,
    )
    world.begin()
    for moment in range(1, 12):
        world.run(float(moment))
        if not world.finished:
            victim = chance.randrange(2)
            world.die(victim)
            world.later(0.5, lambda victim=victim: world.hello(victim))
    world.run()
    assert world.ended().trained == 16
    assert world.core.totals.restarted > 0
    assert exactly(2, world.trained)


def test_fixed_staleness_waits_for_a_sampler_too(core):
    """No sampler lives when version 1 is out: its groups are still sampled before 2 is."""
    world = World(core, PacingRule(2, 2, 8, last_version=6), fixed_staleness=True)
    world.begin().run(1.5)
    assert world.training
    world.die(0)
    world.run(5.0)
    assert world.version == 1
    assert world.core.status().learner == "waiting for a sampler to be ready"
    world.hello(0)
    assert world.run().ended().trained == 12
    assert exactly(2, world.trained)


def test_fixed_staleness_ends_with_the_data(core):
    """Seven groups, two a step: the last step is short, and no less stale than the others."""
    world = World(core, PacingRule(2, 1, 4), 7, fixed_staleness=True)
    assert world.begin().run().ended().trained == 7
    assert [len(batch.groups) for batch in world.batches] == [2, 2, 2, 1]
    assert exactly(1, world.trained)


def test_the_wait_for_fixed_staleness_names_whom_it_waits_for(core):
    world = by_hand(core, PacingRule(1, 2, 8, last_version=5), fixed_staleness=True, warn_every_s=9)
    world.begin()
    complete(world, 0, 2)
    assert world.batches == []
    words = world.core.status().learner
    assert words.startswith("waiting for fill: 2 of 3 groups")
    (warning,) = world.tick(10.0)
    assert "for fill: group 1 (problem 1) on sampler 0" in warning
    complete(world, 1)
    assert len(world.batches) == 1
    assert world.batches[0].waited_for_stragglers_s == 0


def test_a_stopped_run_does_not_wait_for_fixed_staleness(core):
    world = by_hand(core, PacingRule(1, 2, 8), fixed_staleness=True)
    world.begin()
    complete(world, 0)
    world.handle(Drain())
    world.run()
    assert world.ended().reason == "interrupted"
