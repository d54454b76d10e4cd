"""A world around the scheduler's core, in virtual time: samplers and a learner are functions.

Messages of a dead process are lost; everything else arrives at once, in order. The shell checks
what must never happen: a slot used twice, data without its slot, an attempt on two samplers.
"""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import count
from typing import Any

from asyncrl_node.core.instructions import (
    Finish,
    Record,
    ReleaseSlot,
    ReserveSlot,
    ToLauncher,
    ToLearner,
    ToSampler,
    WriteRow,
)
from asyncrl_node.messages import (
    Admit,
    Batch,
    Cancel,
    EndOfData,
    Evaluate,
    GroupCompleted,
    GroupFailed,
    GroupKey,
    GroupStarted,
    Heartbeat,
    LearnerFinished,
    LearnerHello,
    Published,
    RunEnded,
    SamplerExited,
    SamplerHello,
    StepFinished,
    Stop,
    Take,
    Trained,
    Warned,
)


class World:
    """Everything around the core. `latency(problem, attempt)` is in seconds; None: never ends.

    `max_rollouts` is of every sampler, or one for each.
    """

    def __init__(
        self,
        core,
        rule,
        num_problems=None,
        *,
        num_samplers=1,
        max_rollouts=1000,
        take=None,
        latency=lambda problem, attempt: 1.0,
        outcome=lambda problem: "good",
        train_s=1.0,
        **settings,
    ) -> None:
        problems = count() if num_problems is None else range(num_problems)
        self.module = core
        self.validates = True
        self.settings = core.SchedulerSettings(rule=rule, group_size=1, **settings)
        self.core = core.SchedulerCore(self.settings, ((0, p) for p in problems))
        self.rule = rule
        self.latency, self.outcome, self.train_s = latency, outcome, train_s
        self.num_groups = take or rule.groups_per_batch
        self.max_rollouts = max_rollouts
        self.now_s = 0.0
        self.incarnation = dict.fromkeys(range(num_samplers), 0)
        self.silent: set[int] = set()
        self.slots: set[GroupKey] = set()
        self.orders: list[tuple[int, Any]] = []
        """(sampler, order), as sent."""
        self.running: dict[GroupKey, tuple[int, int]] = {}
        """(sampler, incarnation) of each attempt that is being sampled."""
        self.data: dict[GroupKey, int] = {}
        """The oldest version in the data of each whole attempt."""
        self.batches: list[Batch] = []
        self.reports: list[Any] = []
        self.rows: list[dict] = []
        self.ledger: list[Record] = []
        self.trained: list[tuple[int, int, int]] = []
        """(step, problem, staleness), from the data."""
        self.to_learner: list[Any] = []
        self.version = self.settings.start_version
        self.num_orders = 0
        self.open_batch: list[Any] = []
        self.training = False
        self.interrupted = False
        self.finished = False
        self._queue: list[tuple[float, int, Any]] = []
        self._numbers = count()

    # -- time ------------------------------------------------------------------------------------

    def later(self, delay_s, action) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._numbers), action))

    def run(self, until_s=None, limit=20_000) -> World:
        """Let things happen, until nothing is left or until a moment."""
        for _ in range(limit):
            if not self._queue or (until_s is not None and self._queue[0][0] > until_s):
                break
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
        else:
            raise AssertionError("the run does not end")
        if until_s is not None:
            self.now_s = max(self.now_s, until_s)
        return self

    def begin(self) -> World:
        """Samplers say hello; the learner publishes the first weights and wants a batch."""
        for sampler in self.incarnation:
            self.hello(sampler)
        self.handle(LearnerHello(1, self.version))
        self.handle(Published(self.version))
        self.want()
        return self

    def handle(self, event) -> list[Any]:
        out = self.core.handle(event, self.now_s)
        for instruction in out:
            self.obey(instruction)
        if self.validates:
            self.core.validate()
        return out

    def tick(self, at_s) -> list[str]:
        """Let the clock run to a moment; return the warnings that this brings.

        Samplers send their heartbeats, but those that are `silent`.
        """
        self.run(at_s)
        before = len(self.reports)
        for sampler in self.incarnation.keys() - self.silent:
            self.handle(self.heartbeat(sampler))
        self.handle(self.module.Tick())
        return [r.text for r in self.reports[before:] if isinstance(r, Warned)]

    # -- the shell -------------------------------------------------------------------------------

    def obey(self, instruction) -> None:
        match instruction:
            case ReserveSlot(key):
                assert key not in self.slots, "one file, two attempts"
                self.slots.add(key)
                assert len(self.slots) <= self.rule.num_slots, "more memory than there are slots"
            case ReleaseSlot(key):
                self.slots.discard(key)  # a restarted attempt without a sampler has none yet
            case Record():
                self.ledger.append(instruction)
            case WriteRow(row):
                self.rows.append(row)
            case ToLauncher(report):
                self.reports.append(report)
            case ToSampler(sampler, order):
                self.orders.append((sampler, order))
                self.sample(sampler, order)
            case ToLearner(order):
                self.to_learner.append(order)
                self.learn(order)
            case Finish():
                self.finished = True
            case _:
                raise AssertionError(instruction)

    # -- samplers --------------------------------------------------------------------------------

    def hello(self, sampler) -> None:
        most = self.max_rollouts
        rollouts = most[sampler] if isinstance(most, tuple) else most
        self.handle(SamplerHello(sampler, self.incarnation[sampler], 1, rollouts))

    def heartbeat(self, sampler, *, version=0, num_rollouts=0, loading=False) -> Heartbeat:
        incarnation = self.incarnation[sampler]
        return Heartbeat(sampler, incarnation, version, num_rollouts, 0, loading, 0)

    def die(self, sampler, told=True) -> int:
        """The process is gone; its messages under way may still come. Return its incarnation."""
        gone = self.incarnation[sampler]
        self.incarnation[sampler] += 1
        if told:
            self.handle(SamplerExited(sampler, gone))
        return gone

    def sample(self, sampler, order) -> None:
        if isinstance(order, Admit):
            assert order.key in self.slots, "no slot was reserved"
            self.running[order.key] = (sampler, self.incarnation[sampler])
            version = max(order.min_version, self.version)
            seconds = self.latency(order.problem, order.key.attempt)
            self.later(0.0, lambda: self.tell(order, started(order.key, version)))
            if seconds is not None:
                self.later(seconds, lambda: self.finish(order, version))
        elif isinstance(order, Cancel):
            assert self.running.pop(order.key)[0] == sampler, "another sampler has it"

    def tell(self, order, message) -> None:
        """Send a message of an attempt, unless its process is dead."""
        holder = self.running.get(order.key)
        if holder is not None and holder[1] == self.incarnation[holder[0]]:
            self.handle(message)

    def finish(self, order, version) -> None:
        outcome = self.outcome(order.problem)
        if outcome == "fails":
            self.tell(order, GroupFailed(order.key, "environment", "always raises"))
            return
        self.data[order.key] = version
        spread = 0.0 if outcome == "constant" else 1.0
        self.tell(order, completed(order.key, version, spread=spread))

    # -- the learner -----------------------------------------------------------------------------

    def want(self) -> None:
        """Ask for the next groups, if there is a step to train."""
        if self.rule.last_version == self.version:
            self.handle(LearnerFinished())
            return
        self.num_orders += 1
        self.handle(Take(self.num_orders, self.version, self.num_groups))

    def learn(self, order) -> None:
        if isinstance(order, Batch):
            assert (order.order, order.step) == (self.num_orders, self.version)
            self.batches.append(order)
            for group in order.groups:
                assert group.key in self.slots, "taken without its slot"
                staleness = self.version - self.data[group.key]
                self.trained.append((order.step, group.problem, staleness))
                self.open_batch.append(group.key)
            self.training = order.closes
            self.later(self.train_s if order.closes else 0.0, self.go_on)
        elif isinstance(order, EndOfData):
            self.interrupted = True
            if not self.training:
                if order.reason == "interrupted" and self.open_batch:  # handed back
                    self.trained = self.trained[: -len(self.open_batch)]
                self.later(0.0, lambda: self.handle(LearnerFinished()))

    def go_on(self) -> None:
        """A piece is trained; at the end of the batch: publish."""
        if not self.training:
            self.want()
            return
        self.training = False
        self.open_batch.clear()
        self.handle(Trained(self.version))
        self.version += 1
        self.handle(Published(self.version))
        self.handle(StepFinished(self.version - 1, {"loss": 0.0, "reward/mean": 9.0}))
        if self.interrupted:
            self.handle(LearnerFinished())
        else:
            self.want()

    # -- what came of it -------------------------------------------------------------------------

    def ended(self) -> RunEnded:
        """Insist that the run is over and nothing is left behind."""
        assert self.finished
        assert self.core.ended
        assert not self.slots, "slots are left behind"
        stopped = {s for s, order in self.orders if isinstance(order, Stop)}
        assert stopped == set(self.incarnation)
        (ended,) = [r for r in self.reports if isinstance(r, RunEnded)]
        counts = Counter(record.event for record in self.ledger)
        assert ended.admitted == counts["admitted"]
        assert ended.trained == counts["trained"] == len(self.trained)
        assert ended.filtered == counts["filtered"]
        assert ended.failed == counts["failed"]
        assert ended.leftover == counts["leftover"]
        gone = ended.trained + ended.filtered + ended.failed + ended.leftover
        assert ended.admitted == gone
        return ended

    def events(self, event) -> list[Record]:
        return [record for record in self.ledger if record.event == event]

    def admissions(self) -> list[Admit]:
        return [order for _, order in self.orders if isinstance(order, Admit)]

    def evaluations(self) -> list[tuple[int, Evaluate]]:
        return [(s, order) for s, order in self.orders if isinstance(order, Evaluate)]


def started(key, version) -> GroupStarted:
    return GroupStarted(key, version)


def completed(key, version, *, spread=1.0, version_max=None, num_tokens=10) -> GroupCompleted:
    newest = version if version_max is None else version_max
    rewards = (spread / 2, 0.0, spread)
    return GroupCompleted(key, 64, 7, version, newest, 1, num_tokens, *rewards, 0, 0, 1.0)


def by_hand(core, rule, num_problems=None, **settings) -> World:
    """A world in which rollouts end only when the test says so."""
    return World(core, rule, num_problems, latency=lambda problem, attempt: None, **settings)


def complete(world, *group_ids) -> None:
    """Let the present attempts of these groups end now."""
    for group_id in group_ids:
        order = [o for o in world.admissions() if o.key.group_id == group_id][-1]
        world.finish(order, max(order.min_version, world.core.pacing.group(group_id).source))
