"""The sampler's decisions, obeyed by a shell that checks what must never happen."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl_node.core.order import rollout_seed
from asyncrl_node.core.sampling import (
    AbandonGroup,
    AskForWork,
    CopyDone,
    EndProcess,
    FirstToken,
    LoadDone,
    LoadWeights,
    RolloutDone,
    RolloutKey,
    RolloutRaised,
    RolloutSummary,
    SamplerCore,
    SamplerEvent,
    SamplerInstruction,
    SamplerSettings,
    StartRollout,
    ToLearner,
    ToScheduler,
    WriteGroup,
)
from asyncrl_node.core.transport import OpenWeights
from asyncrl_node.messages import (
    Admit,
    Cancel,
    Evaluate,
    EvaluationCompleted,
    GroupFailed,
    GroupKey,
    GroupStarted,
    Lease,
    LeaseGranted,
    LoadStarted,
    Release,
    Stop,
    TransportOffer,
    WeightsAccepted,
    WeightsAvailable,
    WeightsHello,
    WeightsLoaded,
    WeightsManifest,
)

HASH = 0xABC


class Shell:
    """Obeys a SamplerCore as the process does; rollouts and loads end when the test says so."""

    def __init__(self, **settings: Any) -> None:
        chosen = {"sampler": 3, "incarnation": 1, "group_size": 2, "max_rollouts": 4} | settings
        self.settings = SamplerSettings(**chosen)
        self.core = SamplerCore(self.settings)
        self.running: dict[RolloutKey, StartRollout] = {}
        self.started: list[StartRollout] = []
        self.ends: Counter[GroupKey] = Counter()
        """How often each attempt was written or failed."""
        self.written: list[WriteGroup] = []
        self.abandoned: list[GroupKey] = []
        self.to_scheduler: list[Any] = []
        self.to_learner: list[Any] = []
        self.loads: list[int] = []
        self.min_version: dict[tuple[str, int, int], int] = {}
        self.leasing = False
        """True from the Lease to the LoadDone."""
        self._version = -1
        self.accepted = -1
        self.sampled: dict[RolloutKey, int] = {}
        """The newest weights in each rollout that is done."""
        self.hellos = 0

    # -- the test speaks -------------------------------------------------------------------------

    def handle(self, event: SamplerEvent) -> list[SamplerInstruction]:
        """Feed one event, obey the answer, check the rules."""
        match event:
            case Admit():
                owner = ("train", event.key.group_id, event.key.attempt)
                self.min_version.setdefault(owner, event.min_version)
            case Evaluate():
                owner = ("eval", event.evaluation, event.attempt)
                self.min_version.setdefault(owner, event.min_version)
            case RolloutDone() | RolloutRaised():
                self.running.pop(event.key, None)
                if isinstance(event, RolloutDone):
                    self.sampled[event.key] = event.summary.version_max
            case WeightsAccepted():
                self.accepted = max(self.accepted, event.version)
            case LoadDone():
                self.leasing = False
        instructions = self.core.handle(event)
        for instruction in instructions:
            self._obey(instruction)
        self.validate()
        self._check_room(instructions)
        return instructions

    def admit(self, group: int, attempt: int = 0, min_version: int = 0) -> None:
        self.handle(Admit(GroupKey(group, attempt), group * 10, 1, min_version, 77 + group))

    def evaluate(self, problem: int, evaluation: int = 1, min_version: int = 0) -> None:
        self.handle(Evaluate(evaluation, problem, 0, min_version, 5))

    def load(self, version: int) -> None:
        """Go through one whole weight transaction."""
        self.handle(WeightsAvailable(version))
        self.grant(version)

    def grant(self, version: int) -> None:
        self.use(version)
        self.handle(WeightsAccepted(version))

    def use(self, version: int) -> None:
        """Load and acknowledge what was asked for; the learner has not answered."""
        self.handle(LeaseGranted(version, HASH))
        self.handle(CopyDone(version))
        self.handle(LoadDone(version, HASH))

    def finish(self, key: RolloutKey, num_tokens: int = 4) -> None:
        version = self.core.policy_version
        self.handle(RolloutDone(key, RolloutSummary(1.0, num_tokens, version, version, False)))

    def fail(self, key: RolloutKey, reason: str = "KeyError: 'x'") -> None:
        self.handle(RolloutRaised(key, "environment", reason))

    def finish_all(self) -> None:
        while self.running:
            self.finish(next(iter(self.running)))

    def keys_of(self, group: int) -> list[RolloutKey]:
        return [k for k in self.running if k.split == "train" and k.owner == group]

    # -- the shell obeys, and checks -------------------------------------------------------------

    def _obey(self, instruction: SamplerInstruction) -> None:
        match instruction:
            case StartRollout():
                self._start(instruction)
            case WriteGroup():
                self.written.append(instruction)
                self.ends[instruction.key] += 1
                assert not self._of(instruction.key), "written while a rollout of it runs"
                newest = max(self.sampled[key] for key in instruction.rollouts)
                assert newest <= self.accepted, "written before its weights were accepted"
            case AbandonGroup():
                self.abandoned.append(instruction.key)
                for key in self._of(instruction.key):
                    del self.running[key]
            case ToScheduler():
                self.to_scheduler.append(instruction.message)
                if isinstance(instruction.message, GroupFailed):
                    self.ends[instruction.message.key] += 1
                if isinstance(instruction.message, EvaluationCompleted):
                    assert instruction.message.version_max <= self.accepted
            case AskForWork():
                self.hellos += 1
                assert self.accepted >= 0, "asked for work with weights that nobody accepted"
            case ToLearner():
                self.to_learner.append(instruction.message)
                if isinstance(instruction.message, Lease):
                    assert not self.leasing, "asked for two leases at once"
                    self.leasing = True
            case LoadWeights():
                assert self.leasing, "loads without a lease"
                assert not (self.settings.drain_before_update and self.running)
                self.loads.append(instruction.version)

    def _start(self, start: StartRollout) -> None:
        key = start.key
        assert key not in self.running, "started twice"
        assert self.core.policy_version >= self.min_version[key.split, key.owner, key.attempt]
        if self.settings.drain_before_update:
            assert not self.leasing, "started while the weights are being replaced"
        self.running[key] = start
        self.started.append(start)

    def _check_room(self, instructions: list[SamplerInstruction]) -> None:
        """An evaluation has not begun in room that queued training groups need, now or later."""
        begun = [i.key for i in instructions if isinstance(i, StartRollout) and i.key.retry == 0]
        if any(key.split == "eval" for key in begun):
            room = self.settings.max_rollouts - len(self.running)
            queued = self.core.heartbeat().num_queued_groups
            assert room >= queued * self.settings.group_size

    def _of(self, group: GroupKey) -> list[RolloutKey]:
        wanted = ("train", group.group_id, group.attempt)
        return [key for key in self.running if (key.split, key.owner, key.attempt) == wanted]

    def validate(self) -> None:
        assert self.core.policy_version >= self._version, "the policy version went back"
        self._version = self.core.policy_version
        assert self.core.heartbeat().num_rollouts == len(self.running)
        owners = {(key.split, key.owner) for key in self.running}
        alone = len(owners) == 1 and len(self.running) <= self.settings.group_size
        assert len(self.running) <= self.settings.max_rollouts or alone
        assert all(count == 1 for count in self.ends.values()), self.ends


@pytest.fixture
def shell() -> Shell:
    """A sampler with weights of version 0, room for two groups of two."""
    shell = Shell()
    shell.load(0)
    return shell


# -- starting ------------------------------------------------------------------------------------


def test_a_group_waits_for_its_weights() -> None:
    shell = Shell()
    shell.admit(1, min_version=0)
    assert not shell.started
    shell.load(0)
    assert len(shell.started) == 2
    shell.admit(2, min_version=3)
    shell.load(2)
    assert len(shell.started) == 2
    shell.load(3)
    assert [key.rollout for key in shell.keys_of(2)] == [0, 1]


def test_a_group_starts_on_the_copy_not_on_the_announcement(shell: Shell) -> None:
    shell.admit(1, min_version=1)
    for event in (WeightsAvailable(1), LeaseGranted(1, HASH)):
        shell.handle(event)
        assert not shell.running
    shell.handle(CopyDone(1))
    assert len(shell.running) == 2


def test_a_group_waits_for_room_and_keeps_its_turn(shell: Shell) -> None:
    for group in (1, 2, 3, 4):
        shell.admit(group)
    assert {key.owner for key in shell.running} == {1, 2}
    assert shell.core.heartbeat().num_queued_groups == 2
    first, second = shell.keys_of(1)
    shell.finish(first)
    assert len(shell.running) == 3, "half a group is not started"
    shell.finish(second)
    assert {key.owner for key in shell.running} == {2, 3}
    shell.finish_all()
    assert [write.key.group_id for write in shell.written] == [1, 2, 3, 4]


def test_a_group_larger_than_all_the_room_runs_alone() -> None:
    shell = Shell(group_size=8, max_rollouts=3)
    shell.load(0)
    shell.admit(1)
    shell.admit(2)
    shell.evaluate(0)
    assert len(shell.keys_of(1)) == 8 == len(shell.running)
    for key in shell.keys_of(1)[:7]:
        shell.finish(key)
    assert len(shell.running) == 1
    shell.finish_all()
    assert [write.key.group_id for write in shell.written] == [1, 2]


def test_each_rollout_has_its_problem_and_a_seed_of_its_own(shell: Shell) -> None:
    shell.admit(1)
    shell.admit(2)
    shell.fail(shell.keys_of(1)[0])
    assert [start.problem for start in shell.started] == [10, 10, 20, 20, 10]
    assert len({start.seed for start in shell.started}) == 5
    retried = shell.started[-1]
    assert retried.key == RolloutKey("train", 1, 0, 0, 1)
    assert retried.seed == rollout_seed(78, 0, 1)


def test_nothing_starts_after_the_order_to_stop(shell: Shell) -> None:
    shell.admit(1)
    instructions = shell.handle(Stop())
    assert instructions == [EndProcess()]
    shell.admit(2)
    assert {key.owner for key in shell.running} == {1}


# -- ending --------------------------------------------------------------------------------------


def test_the_first_token_is_reported_once_with_its_version(shell: Shell) -> None:
    shell.admit(1)
    one, two = shell.keys_of(1)
    shell.handle(FirstToken(two, 0))
    shell.load(1)
    shell.handle(FirstToken(one, 1))
    assert shell.to_scheduler == [GroupStarted(GroupKey(1, 0), 0)]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_held_out_reward_that_is_not_finite_has_failed_and_is_not_redone(
    shell: Shell, reward: float
) -> None:
    shell.evaluate(7)
    (key,) = shell.running
    shell.handle(RolloutDone(key, RolloutSummary(reward, 4, 0, 0, False)))
    (report,) = shell.to_scheduler
    assert isinstance(report, EvaluationCompleted)
    assert (report.failed, report.reward, report.version_max) == (True, 0.0, -1)
    assert not shell.running


def test_a_first_token_by_weights_not_accepted_is_reported_once_they_are(shell: Shell) -> None:
    shell.handle(WeightsAvailable(1))
    shell.use(1)
    shell.admit(1)
    one, two = shell.keys_of(1)
    shell.handle(FirstToken(one, 1))
    shell.finish(one)
    shell.finish(two)
    assert not shell.to_scheduler
    assert not shell.written
    shell.handle(WeightsAccepted(1))
    assert shell.to_scheduler == [GroupStarted(GroupKey(1, 0), 1)]
    assert [write.key for write in shell.written] == [GroupKey(1, 0)]


def test_what_is_cancelled_before_acceptance_was_never_started(shell: Shell) -> None:
    shell.handle(WeightsAvailable(1))
    shell.use(1)
    shell.admit(1)
    shell.handle(FirstToken(shell.keys_of(1)[0], 1))
    instructions = shell.handle(Cancel(GroupKey(1, 0)))
    assert instructions == [AbandonGroup(GroupKey(1, 0))]
    shell.handle(WeightsAccepted(1))
    assert not shell.to_scheduler


def test_what_failed_before_acceptance_was_never_started(shell: Shell) -> None:
    shell.handle(WeightsAvailable(1))
    shell.use(1)
    shell.admit(1)
    shell.handle(FirstToken(shell.keys_of(1)[0], 1))
    while keys := shell.keys_of(1):
        shell.fail(keys[0])
    shell.handle(WeightsAccepted(1))
    (failed,) = shell.to_scheduler
    assert isinstance(failed, GroupFailed)


def test_a_whole_group_is_written_in_the_order_of_its_rollouts(shell: Shell) -> None:
    shell.admit(1)
    one, two = shell.keys_of(1)
    shell.finish(two, num_tokens=7)
    assert not shell.written
    shell.finish(one, num_tokens=5)
    assert shell.written == [WriteGroup(GroupKey(1, 0), 10, 1, (one, two), 0)]
    assert shell.core.num_tokens == 12


def test_one_failed_sample_is_redone_and_not_its_group(shell: Shell) -> None:
    shell.admit(1)
    one, two = shell.keys_of(1)
    shell.fail(one)
    assert sorted(shell.keys_of(1)) == [one._replace(retry=1), two]
    shell.finish_all()
    assert shell.written[0].rollouts == (one._replace(retry=1), two)
    assert shell.written[0].num_dropped_samples == 0


def test_a_sample_that_always_fails_is_dropped_and_the_rest_is_trained() -> None:
    shell = Shell(group_size=3, max_retries=2)
    shell.load(0)
    shell.admit(1)
    for retry in range(3):
        shell.fail(RolloutKey("train", 1, 0, 1, retry))
    assert len(shell.running) == 2
    shell.finish_all()
    assert [key.rollout for key in shell.written[0].rollouts] == [0, 2]
    assert shell.written[0].num_dropped_samples == 1
    assert not shell.to_scheduler


def test_a_group_with_one_survivor_is_failed_with_the_last_reason() -> None:
    shell = Shell(group_size=3, max_retries=0)
    shell.load(0)
    shell.admit(1)
    one, two, three = shell.keys_of(1)
    shell.fail(one, "first")
    shell.finish(two)
    shell.fail(three, "second")
    assert shell.to_scheduler == [GroupFailed(GroupKey(1, 0), "environment", "second")]
    assert shell.abandoned == [GroupKey(1, 0)], "what it produced is forgotten"
    assert not shell.written
    assert not shell.running


def test_redoing_samples_wastes_a_twentieth_redoing_groups_would_waste_a_third() -> None:
    """Case 8: each rollout fails with probability 5 %, group size 8."""
    dice, num_groups, group_size = random.Random(8), 1500, 8
    shell = Shell(group_size=group_size, max_rollouts=64)
    shell.load(0)
    for group in range(num_groups):
        shell.admit(group)
        while shell.core.heartbeat().num_queued_groups:
            key = next(iter(shell.running))
            if dice.random() < 0.05:
                shell.fail(key)
            else:
                shell.finish(key)
    while shell.running:
        key = next(iter(shell.running))
        if dice.random() < 0.05:
            shell.fail(key)
        else:
            shell.finish(key)
    assert len(shell.written) == num_groups
    needed = num_groups * group_size
    assert len(shell.started) / needed <= 1.06
    assert sum(write.num_dropped_samples for write in shell.written) <= 0.001 * needed

    redone = 0
    for _ in range(num_groups):
        redone += group_size
        while min(dice.random() for _ in range(group_size)) < 0.05:
            redone += group_size
    assert redone / needed > 1.4


# -- late, repeated and withdrawn orders ---------------------------------------------------------


def test_a_cancelled_group_is_forgotten_wherever_it_is(shell: Shell) -> None:
    for group in (1, 2, 3):
        shell.admit(group)
    shell.handle(Cancel(GroupKey(3, 0)))
    assert not shell.abandoned, "it was only queued"
    late = shell.keys_of(1)
    shell.handle(Cancel(GroupKey(1, 0)))
    assert shell.abandoned == [GroupKey(1, 0)]
    assert {key.owner for key in shell.running} == {2}
    for key in late:
        shell.handle(FirstToken(key, 0))
        shell.finish(key)
        shell.fail(key)
    shell.handle(Cancel(GroupKey(1, 0)))
    shell.handle(Cancel(GroupKey(9, 0)))
    shell.finish_all()
    assert [write.key.group_id for write in shell.written] == [2]
    assert not shell.to_scheduler


def test_a_cancelled_group_makes_room(shell: Shell) -> None:
    for group in (1, 2, 3):
        shell.admit(group)
    shell.handle(Cancel(GroupKey(2, 0)))
    assert {key.owner for key in shell.running} == {1, 3}


def test_an_order_that_comes_twice_is_obeyed_once(shell: Shell) -> None:
    for group in (1, 2, 3, 3, 1, 2):
        shell.admit(group)
    assert len(shell.running) == 4
    assert shell.core.heartbeat().num_queued_groups == 1
    shell.finish_all()
    assert Counter(write.key for write in shell.written) == {
        GroupKey(1, 0): 1,
        GroupKey(2, 0): 1,
        GroupKey(3, 0): 1,
    }


def test_a_newer_attempt_replaces_a_running_one(shell: Shell) -> None:
    shell.admit(1)
    late = shell.keys_of(1)
    shell.admit(1, attempt=1)
    assert shell.abandoned == [GroupKey(1, 0)]
    assert {key.attempt for key in shell.running} == {1}
    for key in late:
        shell.handle(FirstToken(key, 0))
        shell.finish(key)
    shell.admit(1, attempt=0)
    shell.finish_all()
    assert [write.key for write in shell.written] == [GroupKey(1, 1)]
    assert not shell.to_scheduler


def test_a_newer_attempt_replaces_a_queued_one(shell: Shell) -> None:
    for group in (1, 2, 3):
        shell.admit(group)
    shell.admit(3, attempt=1)
    shell.admit(3, attempt=0)
    assert shell.core.heartbeat().num_queued_groups == 1
    shell.finish_all()
    assert [write.key for write in shell.written[2:]] == [GroupKey(3, 1)]


def test_a_newer_attempt_waits_for_its_own_weights(shell: Shell) -> None:
    shell.admit(1, min_version=0)
    shell.admit(1, attempt=1, min_version=2)
    assert not shell.running
    shell.load(2)
    assert [key.attempt for key in shell.running] == [1, 1]


# -- evaluation ----------------------------------------------------------------------------------


def test_an_evaluation_reports_its_reward_or_its_failure(shell: Shell) -> None:
    shell.evaluate(4)
    shell.evaluate(5)
    good, bad = shell.running
    shell.finish(good)
    for retry in range(3):
        shell.fail(bad._replace(retry=retry))
    assert shell.to_scheduler == [
        EvaluationCompleted(1, 4, 0, 1.0, 0, 0, False),
        EvaluationCompleted(1, 5, 0, 0.0, -1, -1, True),
    ]


def test_an_evaluation_waits_for_its_weights(shell: Shell) -> None:
    shell.evaluate(4, min_version=1)
    assert not shell.running
    shell.load(1)
    assert len(shell.running) == 1


def test_evaluation_never_takes_the_room_a_training_group_waits_for(shell: Shell) -> None:
    shell.admit(1)
    shell.evaluate(0)
    shell.admit(2)
    for problem in range(1, 9):
        shell.evaluate(problem)
    assert len(shell.running) == 3, "one place is free, and kept free for group 2"
    shell.finish(shell.keys_of(1)[0])
    assert {key.owner for key in shell.running if key.split == "train"} == {1, 2}
    assert len(shell.running) == 4
    shell.finish_all()
    assert len(shell.to_scheduler) == 9


def test_evaluation_leaves_room_for_a_training_group_that_waits_for_weights(shell: Shell) -> None:
    """An evaluation may last: room it holds when the weights come is room the group waits for."""
    shell.admit(1, min_version=1)
    for problem in range(6):
        shell.evaluate(problem)
    assert len(shell.running) == 2, "two of four places, the others are for group 1"
    shell.finish(next(iter(shell.running)))
    assert len(shell.running) == 2, "the next evaluation takes the place of the last"
    shell.load(1)
    assert len(shell.keys_of(1)) == 2, "it starts with its weights"
    assert len(shell.running) == 4
    shell.finish_all()
    assert len(shell.to_scheduler) == 6


def test_evaluation_leaves_room_for_every_queued_group_not_only_for_the_head(shell: Shell) -> None:
    shell.admit(1, min_version=1)
    shell.admit(2, min_version=0)
    for problem in range(4):
        shell.evaluate(problem)
    assert not shell.running, "group 1 is the head and keeps its turn; both need the room"
    shell.load(1)
    assert {key.owner for key in shell.running if key.split == "train"} == {1, 2}
    assert len(shell.running) == 4
    for key in shell.keys_of(1):
        shell.finish(key)
    assert sum(key.split == "eval" for key in shell.running) == 2, "now nothing is queued"


def test_evaluation_leaves_room_for_a_newer_attempt_that_waits_for_weights(shell: Shell) -> None:
    shell.admit(1)
    shell.admit(1, attempt=1, min_version=1)
    assert not shell.running
    for problem in range(4):
        shell.evaluate(problem)
    assert [key.split for key in shell.running] == ["eval", "eval"]
    shell.load(1)
    assert [key.attempt for key in shell.keys_of(1)] == [1, 1]


# -- weights -------------------------------------------------------------------------------------


def test_the_weight_transaction_in_its_order() -> None:
    shell = Shell()
    assert shell.core.hello() == WeightsHello(3, 1)
    manifest = WeightsManifest(0, (), 0)
    assert shell.handle(manifest) == []
    assert shell.handle(TransportOffer(("host",))) == [OpenWeights(manifest)]
    assert shell.handle(WeightsAvailable(5)) == [ToLearner(Lease(3, 1))]
    assert shell.core.heartbeat().loading is False
    started = ToLearner(LoadStarted(3, 1, 5))
    grant = LeaseGranted(5, HASH, (7, 8, 9))
    assert shell.handle(grant) == [started, LoadWeights(5, (7, 8, 9))]
    assert shell.core.heartbeat().loading is True
    assert shell.core.policy_version == -1
    assert shell.handle(CopyDone(5)) == [ToLearner(Release(3, 1, 5))]
    assert shell.core.policy_version == 5
    loaded = WeightsLoaded(3, 1, 5, 99, (-1.5, -2.0))
    assert shell.handle(LoadDone(5, 99, (-1.5, -2.0))) == [ToLearner(loaded)]
    assert shell.core.heartbeat().loading is False
    assert shell.handle(WeightsAccepted(5)) == [AskForWork()]
    assert shell.handle(WeightsAccepted(5)) == [], "work is asked for once"


def test_nothing_leaves_before_its_weights_are_accepted(shell: Shell) -> None:
    """A sampler whose weights never arrived is killed with all that they sampled."""
    shell.admit(1)
    shell.admit(2)
    shell.evaluate(0)
    first, second = (shell.keys_of(group) for group in (1, 2))
    for key in first:
        shell.finish(key)
    assert [write.key for write in shell.written] == [GroupKey(1, 0)], "sampled by version 0"
    shell.handle(WeightsAvailable(1))
    shell.handle(LeaseGranted(1, HASH))
    shell.handle(CopyDone(1))
    shell.finish_all()
    shell.handle(LoadDone(1, HASH))
    assert len(shell.written) == 1
    assert not [m for m in shell.to_scheduler if isinstance(m, EvaluationCompleted)]
    assert shell.handle(WeightsAccepted(0)) == [], "of the version before"
    write, evaluated = shell.handle(WeightsAccepted(1))
    assert isinstance(write, WriteGroup)
    assert write.rollouts == tuple(second)
    assert isinstance(evaluated, ToScheduler)
    assert evaluated.message.version_max == 1
    assert shell.handle(WeightsAccepted(1)) == []


def test_a_held_group_can_be_cancelled_or_replaced(shell: Shell) -> None:
    shell.handle(WeightsAvailable(1))
    shell.handle(LeaseGranted(1, HASH))
    shell.handle(CopyDone(1))
    for group in (1, 2, 3):
        shell.admit(group)
        shell.finish_all()
    shell.admit(3)
    assert not shell.running, "this attempt is held already"
    cancelled, replaced = GroupKey(1, 0), GroupKey(2, 0)
    assert shell.handle(Cancel(cancelled)) == [AbandonGroup(cancelled)]
    shell.admit(2, attempt=1)
    assert shell.abandoned == [cancelled, replaced]
    shell.finish_all()
    shell.handle(LoadDone(1, HASH))
    shell.handle(WeightsAccepted(1))
    assert [write.key for write in shell.written] == [GroupKey(3, 0), GroupKey(2, 1)]


def test_versions_may_be_skipped(shell: Shell) -> None:
    shell.handle(WeightsAvailable(1))
    for version in (2, 3, 4):
        assert shell.handle(WeightsAvailable(version)) == [], "one lease at a time"
    shell.grant(4)
    assert shell.loads == [0, 4]
    assert not shell.leasing, "nothing newer is known"


def test_a_version_published_while_loading_is_fetched_next(shell: Shell) -> None:
    shell.handle(WeightsAvailable(1))
    shell.handle(LeaseGranted(1, HASH))
    shell.handle(CopyDone(1))
    assert shell.handle(WeightsAvailable(2)) == []
    assert shell.handle(WeightsAvailable(1)) == [], "an old announcement hides no newer one"
    assert shell.handle(LoadDone(1, HASH))[-1] == ToLearner(Lease(3, 1))
    shell.grant(2)
    assert shell.core.policy_version == 2


def test_an_announcement_that_is_not_new_asks_for_nothing(shell: Shell) -> None:
    shell.load(3)
    for version in (0, 2, 3):
        assert shell.handle(WeightsAvailable(version)) == []


def test_a_grant_nobody_asked_for_is_ignored(shell: Shell) -> None:
    """The buffer may be overwritten: a lease that came twice was handed back once already."""
    shell.handle(WeightsAvailable(1))
    shell.handle(LeaseGranted(1, HASH))
    assert shell.handle(LeaseGranted(1, HASH)) == []
    shell.handle(CopyDone(1))
    assert shell.handle(LeaseGranted(1, HASH)) == []
    shell.handle(LoadDone(1, HASH))
    assert shell.handle(LeaseGranted(1, HASH)) == []
    assert shell.loads == [0, 1]


def test_weights_change_under_running_rollouts_by_default(shell: Shell) -> None:
    shell.admit(1)
    shell.load(1)
    assert shell.core.policy_version == 1
    assert len(shell.running) == 2


def test_between_groups_a_sampler_drains_before_it_loads() -> None:
    shell = Shell(drain_before_update=True)
    shell.load(0)
    shell.admit(1)
    shell.evaluate(0)
    shell.handle(WeightsAvailable(1))
    assert not shell.leasing
    shell.admit(2)
    assert {key.owner for key in shell.keys_of(1)} == {1}
    assert not shell.keys_of(2), "nothing new starts while it drains"
    shell.fail(shell.keys_of(1)[0])
    assert len(shell.keys_of(1)) == 2, "a sample of a started group is still redone"
    shell.finish_all()
    assert shell.leasing
    shell.handle(LeaseGranted(1, HASH))
    shell.handle(CopyDone(1))
    assert not shell.running, "nothing runs until the load is acknowledged"
    shell.handle(LoadDone(1, HASH))
    assert len(shell.keys_of(2)) == 2


# -- every history -------------------------------------------------------------------------------


class SamplerHistories(RuleBasedStateMachine):
    """Random orders, weights and rollout ends; the shell checks its rules after each."""

    @initialize(
        group_size=st.integers(2, 3),
        max_rollouts=st.integers(1, 7),
        max_retries=st.integers(0, 2),
        drain=st.booleans(),
    )
    def begin(self, group_size: int, max_rollouts: int, max_retries: int, drain: bool) -> None:
        self.shell = Shell(
            group_size=group_size,
            max_rollouts=max_rollouts,
            max_retries=max_retries,
            drain_before_update=drain,
        )
        self.published = 0
        self.lease: str = "idle"
        self.unanswered: list[int] = []
        """Loads that the learner has not accepted yet."""
        self.open: dict[int, int] = {}
        """Present attempt of each admitted group that has no end yet."""
        self.withdrawn: set[GroupKey] = set()
        self.num_groups = 0
        self.num_evaluations = 0
        self.past: list[RolloutKey] = []
        self.shell.handle(WeightsAvailable(0))

    # -- orders

    @rule(ahead=st.integers(0, 1))
    def admit(self, ahead: int) -> None:
        self.num_groups += 1
        self.open[self.num_groups] = 0
        self.shell.admit(self.num_groups, 0, self.published + ahead)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def admit_again(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.open)))
        self.shell.admit(group, data.draw(st.integers(0, self.open[group])), 0)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), rare=st.integers(0, 4))
    def replace(self, data: st.DataObject, rare: int) -> None:
        if rare == 0:
            group = data.draw(st.sampled_from(sorted(self.open)))
            self.withdrawn.add(GroupKey(group, self.open[group]))
            self.open[group] += 1
            self.shell.admit(group, self.open[group], self.published)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), rare=st.integers(0, 4))
    def cancel(self, data: st.DataObject, rare: int) -> None:
        if rare == 0:
            group = data.draw(st.sampled_from(sorted(self.open)))
            key = GroupKey(group, self.open.pop(group))
            self.withdrawn.add(key)
            self.shell.handle(Cancel(key))

    @rule()
    def evaluate(self) -> None:
        self.num_evaluations += 1
        self.shell.evaluate(self.num_evaluations, self.num_evaluations, self.published)

    # -- weights

    @rule()
    def publish(self) -> None:
        self.published += 1
        self.shell.handle(WeightsAvailable(self.published))

    @precondition(lambda self: self.shell.leasing)
    @rule()
    def load(self) -> None:
        """Take the next step of the transaction."""
        if self.lease == "idle":
            self.lease = "granted"
            self.loading = self.published
            self.shell.handle(LeaseGranted(self.loading, HASH))
        elif self.lease == "granted":
            self.lease = "copied"
            self.shell.handle(CopyDone(self.loading))
        else:
            self.lease = "idle"
            self.unanswered.append(self.loading)
            self.shell.handle(LoadDone(self.loading, HASH))

    @precondition(lambda self: self.unanswered)
    @rule()
    def accept(self) -> None:
        self.shell.handle(WeightsAccepted(self.unanswered.pop(0)))
        self.note_ends()

    # -- rollouts

    @precondition(lambda self: self.shell.running)
    @rule(data=st.data(), end=st.sampled_from(["token", "done", "done", "raised"]))
    def go_on(self, data: st.DataObject, end: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.shell.running)))
        if end == "token":
            self.shell.handle(FirstToken(key, self.shell.core.policy_version))
        elif end == "done":
            self.past.append(key)
            self.shell.finish(key)
        else:
            self.past.append(key)
            self.shell.fail(key)
        self.note_ends()

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def late_event(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.past))
        if key in self.shell.running:
            return
        ends = self.shell.ends.total()
        self.shell.handle(FirstToken(key, 0))
        self.shell.finish(key)
        self.shell.fail(key)
        assert self.shell.ends.total() == ends

    def note_ends(self) -> None:
        for key in self.shell.ends:
            if self.open.get(key.group_id) == key.attempt:
                del self.open[key.group_id]

    # -- what must hold

    @invariant()
    def withdrawn_groups_are_silent(self) -> None:
        assert not self.withdrawn & set(self.shell.ends)
        for key in self.withdrawn:
            assert not self.shell._of(key)

    def teardown(self) -> None:
        """Let everything end: each group in exactly one way, and nothing is left."""
        if not hasattr(self, "shell"):
            return
        shell = self.shell
        self.publish()
        while shell.running or shell.leasing or self.unanswered:
            if shell.running:
                shell.finish(next(iter(shell.running)))
            if shell.leasing:
                self.load()
            if self.unanswered:
                self.accept()
        self.note_ends()
        assert shell.hellos == 1
        assert not self.open, "a group has no end"
        beat = shell.core.heartbeat()
        assert (beat.num_rollouts, beat.num_queued_groups, beat.loading) == (0, 0, False)
        assert beat.policy_version == self.published
        reports = [m for m in shell.to_scheduler if isinstance(m, EvaluationCompleted)]
        assert sorted(m.evaluation for m in reports) == list(range(1, self.num_evaluations + 1))
        started = [m.key for m in shell.to_scheduler if isinstance(m, GroupStarted)]
        assert len(started) == len(set(started))


SamplerHistories.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSamplerHistories = SamplerHistories.TestCase
