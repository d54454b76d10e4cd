"""The scheduler's decisions: messages in, instructions out. Pure; pacing.py does the bounding.

    problem -> admit (slot reserved) -> sampler -> started -> completed -> taken -> published
                     ^                     |                     ^                   (freed)
                     |   sampler gone: restart on its slot       |  Take(n) waits here until
                     +-- filtered, failed: slot free at once     |  the rule lets n groups go

Who waits for whom: a `Take` is answered by whatever event makes the rule pass (a completion, a
drop, the end of the data); a group without a sampler is placed by the next hello or completion.
Nothing here waits by itself. A wait longer than `warn_every_s` is named in a warning.

An attempt is named by its GroupKey. A message that names an attempt which is not the present one
is late: it is counted and ignored.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, assert_never

from asyncrl_node.core.evaluation import Evaluations
from asyncrl_node.core.instructions import (
    NO_GROUP,
    Finish,
    Instruction,
    LedgerEvent,
    Record,
    ReleaseSlot,
    ReserveSlot,
    ToLauncher,
    ToLearner,
    ToSampler,
    WriteRow,
)
from asyncrl_node.core.order import mix
from asyncrl_node.core.pacing import (
    EndOfTraining,
    Gauges,
    GroupState,
    Pacing,
    Taken,
    Wait,
)
from asyncrl_node.core.scheduler_state import (
    GroupRecord,
    SamplerLink,
    SchedulerSettings,
    Totals,
)
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import (
    Admit,
    Batch,
    BatchGroup,
    Cancel,
    Drain,
    EndOfData,
    EvaluationCompleted,
    GroupCompleted,
    GroupFailed,
    GroupKey,
    GroupStarted,
    Heartbeat,
    LauncherHello,
    LauncherMessage,
    LearnerFinished,
    LearnerHello,
    LearnerMessage,
    Published,
    RequestEvaluation,
    RestartSampler,
    RunEnded,
    SamplerExited,
    SamplerFault,
    SamplerHello,
    SamplerMessage,
    Status,
    StepFinished,
    Stop,
    Take,
    Trained,
    Warned,
)


class Tick(NamedTuple):
    """Time has passed; nothing else happened."""


Event = SamplerMessage | LearnerMessage | LauncherMessage | Tick


class PendingTake:
    """A take that is not answered yet, and for how long the rule alone has held it back."""

    __slots__ = ("held_s", "held_since_s", "since_s", "take", "warned_s")

    def __init__(self, take: Take, now_s: float) -> None:
        self.take = take
        self.since_s = now_s
        self.warned_s = now_s
        self.held_since_s: float | None = None
        self.held_s = 0.0

    def account(self, held: bool, now_s: float) -> None:
        """Note whether the rule alone holds the take back from now on."""
        if self.held_since_s is not None:
            self.held_s += now_s - self.held_since_s
        self.held_since_s = now_s if held else None


class SchedulerCore:
    """All decisions of the scheduler process.

    Raises: RunFault where the run cannot go on; InvalidTransition on a bug of ours.
    """

    def __init__(self, settings: SchedulerSettings, problems: Iterator[tuple[int, int]]) -> None:
        """Take `problems` as (epoch, problem), in the order of admission."""
        self.settings = settings
        self.pacing = Pacing(settings.rule, settings.start_version)
        self.totals = Totals()
        self.evaluations = Evaluations(settings.eval_problems, settings.seed)
        self.phase = "starting"
        self.ended = False
        self._problems = problems
        self._next_group = 0
        self._groups: dict[int, GroupRecord] = {}
        self._links: dict[int, SamplerLink] = {}
        self._idle: list[tuple[int, int, int]] = []
        """Heap of (groups held, sampler, incarnation); entries of other counts are outdated."""
        self._unplaced: deque[int] = deque()
        """Groups that lost their sampler; placed before anything new is admitted."""
        self._pending: PendingTake | None = None
        self._reserved_bytes = 0
        self._gauges: Gauges | None = None
        """Read right after the newest publication, for the row of its step."""
        self._draining = False
        self._phase_watch: tuple[str, float, float] = ("", 0.0, 0.0)
        """Phase, since when, when it was last warned of."""
        self._out: list[Instruction] = []

    # -- events ------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Digest one event; return what to do, in order. `now_s` never goes back."""
        match event:
            case GroupStarted():
                self._on_started(event)
            case GroupCompleted():
                self._on_completed(event)
            case GroupFailed():
                self._on_failed(event)
            case Take():
                self._pending = PendingTake(event, now_s)
                self.phase = "collecting"
            case Trained():
                self._on_trained(event)
            case Published():
                self._on_published(event)
            case StepFinished():
                self._on_step_finished(event)
            case Heartbeat():
                self._on_heartbeat(event, now_s)
            case SamplerHello():
                self._on_sampler_hello(event, now_s)
            case SamplerExited():
                self._on_sampler_gone(event.sampler, event.incarnation)
            case SamplerFault():
                self._on_sampler_fault(event)
            case EvaluationCompleted():
                self._on_evaluation_completed(event)
            case RequestEvaluation():
                self.evaluations.begin(event.evaluation, event.step, event.min_version)
                self.phase = "evaluating" if self._pending is None else self.phase
            case Drain():
                self._on_drain()
            case LearnerFinished():
                self._on_learner_finished()
            case Tick():
                self._find_silent(now_s)
            case LearnerHello() | LauncherHello():
                pass
            case _:
                assert_never(event)
        if not self.ended:
            self._fill(now_s)
            self._answer_take(now_s)
            self._warn(now_s)
            self._warn_phase(now_s)
        out, self._out = self._out, []
        return out

    def status(self) -> Status:
        """Describe the present moment, for the live view."""
        gauges = self.pacing.gauges()
        return Status(
            step=self.pacing.step,
            published=self.pacing.published,
            in_flight=gauges.in_flight,
            completed=gauges.completed,
            taken=gauges.taken,
            learner=self._learner_words(),
            samplers=tuple(link.status() for link in self._links.values()),
            evaluating=self.evaluations.num_open,
        )

    def validate(self) -> None:
        """Check that the books agree (a scan: for tests)."""
        self.pacing.validate()
        assert len(self._groups) == self.pacing.num_outstanding
        for link in self._links.values():
            assert all(self._groups[g].sampler == link.sampler for g in link.groups)
        in_flight = set(self.pacing.outstanding_ids(GroupState.IN_FLIGHT))
        held = set().union(*(link.groups for link in self._links.values()))
        assert in_flight == held | set(self._unplaced)
        totals = self.totals
        ended = totals.trained + totals.filtered + totals.failed + totals.leftover
        if self.ended:
            assert totals.admitted == ended

    # -- samplers ----------------------------------------------------------------------------

    def _on_sampler_hello(self, hello: SamplerHello, now_s: float) -> None:
        known = self._links.get(hello.sampler)
        if known is not None and known.incarnation >= hello.incarnation:
            return
        if known is not None:
            self._on_sampler_gone(hello.sampler, known.incarnation)
        max_groups = max(1, hello.max_rollouts // self.settings.group_size)
        link = SamplerLink(hello.sampler, hello.incarnation, max_groups, now_s)
        self._links[hello.sampler] = link
        self._note_load(link)

    def _on_sampler_gone(self, sampler: int, incarnation: int) -> None:
        """Restart its groups on their slots, at the current version; nothing of it is trained."""
        link = self._links.get(sampler)
        if link is None or link.incarnation != incarnation:
            return
        del self._links[sampler]
        for group_id in sorted(link.groups):
            group = self._groups[group_id]
            version = self.pacing.restart(group_id)
            self._out.append(ReleaseSlot(group.key))
            group.key = GroupKey(group_id, group.key.attempt + 1)
            group.sampler = -1
            self._unplaced.append(group_id)
            self.totals.restarted += 1
            self._record("restarted", group, version=version, sampler=sampler)
        self.evaluations.lose_sampler(sampler)

    def _on_sampler_fault(self, fault: SamplerFault) -> None:
        """Have it replaced, also when it has not greeted yet: its first load may be the fault."""
        self._on_sampler_gone(fault.sampler, fault.incarnation)
        report = RestartSampler(fault.sampler, fault.incarnation, fault.name, fault.story)
        self._out.append(ToLauncher(report))

    def _on_heartbeat(self, beat: Heartbeat, now_s: float) -> None:
        link = self._links.get(beat.sampler)
        if link is not None and link.incarnation == beat.incarnation:
            link.heartbeat = beat
            link.heard_s = now_s

    def _find_silent(self, now_s: float) -> None:
        """Replace samplers whose loop stands still: frozen, stuck in a call, out of the machine."""
        for link in list(self._links.values()):
            silent_s = now_s - link.heard_s
            if silent_s > self.settings.silent_s:
                story = f"it has sent no heartbeat for {silent_s:.0f} s"
                self._on_sampler_fault(
                    SamplerFault(link.sampler, link.incarnation, "sampler_silent", story)
                )

    # -- groups ------------------------------------------------------------------------------

    def _current(self, key: GroupKey) -> GroupRecord | None:
        """Return the group if `key` names its present, in-flight attempt; else count it late."""
        group = self._groups.get(key.group_id)
        if group is None or group.key != key or group.sampler < 0 or group.completed is not None:
            self.totals.late_messages += 1
            return None
        return group

    def _on_started(self, started: GroupStarted) -> None:
        group = self._current(started.key)
        if group is None:
            return
        self.pacing.start(started.key.group_id, started.version)
        self._record("started", group, version=started.version, sampler=group.sampler)

    def _on_completed(self, done: GroupCompleted) -> None:
        group = self._current(done.key)
        if group is None:
            return
        self._check_versions(group, done)
        self._record(
            "completed",
            group,
            version=done.version_min,
            version_max=done.version_max,
            sampler=group.sampler,
            num_tokens=done.num_tokens,
        )
        self._unassign(group)
        self.totals.failed_in_a_row = 0
        if self.settings.filter_constant_rewards and done.reward_min == done.reward_max:
            self._filter(group, done)
            return
        group.completed = done
        self.pacing.complete(done.key.group_id, done.version_min)
        self.totals.filtered_in_a_row = 0

    def _check_versions(self, group: GroupRecord, done: GroupCompleted) -> None:
        paced = self.pacing.group(done.key.group_id)
        assert paced is not None
        if not paced.source <= done.version_min <= done.version_max:
            raise RunFault(
                "version_breach",
                f"group {done.key.group_id} on sampler {group.sampler} holds tokens of versions "
                f"{done.version_min}..{done.version_max}, none may be older than {paced.source}",
            )

    def _filter(self, group: GroupRecord, done: GroupCompleted) -> None:
        totals = self.totals
        totals.count_sampled(done)
        totals.num_filtered_tokens += done.num_tokens
        totals.num_filtered += 1
        totals.filtered += 1
        totals.filtered_in_a_row += 1
        self._end_group(group, "filtered", "constant reward")
        if totals.filtered_in_a_row % (10 * self.settings.rule.groups_per_batch) == 0:
            text = (
                f"nothing is being learned: the last {totals.filtered_in_a_row} groups all had "
                f"constant rewards (now {done.reward_min:g}) and were filtered; the task is too "
                "easy or too hard for this policy, or its reward is broken"
            )
            self._out.append(ToLauncher(Warned(text)))

    def _on_failed(self, failed: GroupFailed) -> None:
        group = self._current(failed.key)
        if group is None:
            return
        self._unassign(group)
        self.totals.failed += 1
        self.totals.failed_in_a_row += 1
        self._end_group(group, "failed", f"{failed.kind}: {failed.reason}")
        limit = 4 * self.settings.rule.num_slots
        if self.totals.failed_in_a_row >= limit:
            raise RunFault(
                "every_rollout_fails",
                f"the last {limit} groups all failed, the last one by {failed.kind}: "
                f"{failed.reason}; the environment or the engine is broken",
            )

    def _end_group(self, group: GroupRecord, event: LedgerEvent, reason: str) -> None:
        """Record why an untaken group is never trained; free its slot."""
        self.pacing.drop(group.key.group_id)
        self._record(event, group, reason=reason)
        self._out.append(ReleaseSlot(group.key))
        del self._groups[group.key.group_id]

    # -- admission ---------------------------------------------------------------------------

    def _fill(self, now_s: float) -> None:
        """Place what lost its sampler, then admit, as late and as freshly as there is room."""
        while self._unplaced and (link := self._least_loaded()) is not None:
            self._place(self._groups[self._unplaced.popleft()], link)
        while not self._draining and self.pacing.can_admit():
            link = self._least_loaded()
            if link is None:
                break
            self._admit(link, now_s)
        if self._links:
            for order in self.evaluations.assign(list(self._links)):
                self._out.append(ToSampler(order.sampler, order.message))

    def _admit(self, link: SamplerLink, now_s: float) -> None:
        offered = next(self._problems, None)
        if offered is None:
            self.pacing.end_of_data()
            return
        epoch, problem = offered
        group = GroupRecord(GroupKey(self._next_group, 0), problem, epoch, now_s)
        self._next_group += 1
        version = self.pacing.admit(group.key.group_id)
        self._groups[group.key.group_id] = group
        self.totals.admitted += 1
        self._record("admitted", group, version=version, sampler=link.sampler)
        self._place(group, link)

    def _place(self, group: GroupRecord, link: SamplerLink) -> None:
        paced = self.pacing.group(group.key.group_id)
        assert paced is not None
        group.sampler = link.sampler
        link.groups.add(group.key.group_id)
        self._note_load(link)
        seed = mix(self.settings.seed, group.key.group_id, group.key.attempt) >> 1
        order = Admit(group.key, group.problem, group.epoch, paced.min_version, seed)
        self._out.append(ReserveSlot(group.key))
        self._out.append(ToSampler(link.sampler, order))

    def _unassign(self, group: GroupRecord) -> None:
        link = self._links[group.sampler]
        link.groups.discard(group.key.group_id)
        self._note_load(link)

    def _note_load(self, link: SamplerLink) -> None:
        if len(link.groups) < link.max_groups:
            heapq.heappush(self._idle, (len(link.groups), link.sampler, link.incarnation))
        if len(self._idle) > 4 * len(self._links) + 16:  # mostly outdated: keep one of each
            links = (k for k in self._links.values() if len(k.groups) < k.max_groups)
            self._idle = [(len(k.groups), k.sampler, k.incarnation) for k in links]
            heapq.heapify(self._idle)

    def _least_loaded(self) -> SamplerLink | None:
        """Return the sampler that holds the fewest groups and has room for one more."""
        while self._idle:
            load, sampler, incarnation = self._idle[0]
            link = self._links.get(sampler)
            if link and link.incarnation == incarnation and len(link.groups) == load:
                return link
            heapq.heappop(self._idle)
        return None

    # -- the learner -------------------------------------------------------------------------

    def _answer_take(self, now_s: float) -> None:
        pending = self._pending
        if pending is None:
            return
        if self._draining:
            self._answer_draining(pending)
            return
        if self._must_fill():
            return
        answer = self.pacing.take(pending.take.num_groups)
        match answer:
            case Wait():
                pending.account(answer.reason == "stragglers", now_s)
            case Taken():
                pending.account(False, now_s)
                self._pending = None
                self.phase = "training"
                self._hand_over(pending, answer)
            case EndOfTraining():
                self._pending = None
                self.phase = "ending"
                self._out.append(ToLearner(EndOfData("done")))
            case _:
                assert_never(answer)

    def _must_fill(self) -> bool:
        """With fixed staleness: whether a group of the newest version is still to come.

        So each version samples B groups before the next is published, and step t, which takes the
        stalest, trains those of version t - D. The wait is batch-fill waiting: no rule holds it.
        """
        return self.settings.fixed_staleness and (
            self.pacing.num_in_flight > 0 or self.pacing.can_admit()
        )

    def _hand_over(self, pending: PendingTake, taken: Taken) -> None:
        entries = []
        for group_id in taken.group_ids:
            group = self._groups[group_id]
            done = group.completed
            assert done is not None
            self.totals.count_sampled(done)
            self._record("taken", group, step=self.pacing.step)
            entries.append(
                BatchGroup(group.key, group.problem, group.epoch, done.num_bytes, done.checksum)
            )
        batch = Batch(
            order=pending.take.order,
            step=self.pacing.step,
            groups=tuple(entries),
            closes=taken.closes_batch,
            waited_for_stragglers_s=pending.held_s,
        )
        self._out.append(ToLearner(batch))

    def _on_trained(self, trained: Trained) -> None:
        for group_id in self.pacing.taken_in(trained.step):
            self.totals.trained += 1
            self._record("trained", self._groups[group_id], step=trained.step)
        self.phase = "publishing"

    def _on_published(self, published: Published) -> None:
        version = published.version
        self._out.append(Record("published", NO_GROUP, -1, -1, step=version - 1, version=version))
        if published.version == self.settings.start_version:
            return  # the first weights: no step precedes them, no slot is held
        for group_id in self.pacing.publish(published.version):
            self._out.append(ReleaseSlot(self._groups.pop(group_id).key))
        self._gauges = self.pacing.gauges()
        self._reserved_bytes = self.pacing.reserved_bytes

    def _on_step_finished(self, finished: StepFinished) -> None:
        assert self._gauges is not None
        totals, gauges = self.totals, self._gauges
        row: dict[str, object] = {"kind": "train", "step": finished.step}
        row.update(finished.metrics)
        row["reward/mean"] = totals.reward_sum / max(1, totals.num_rollouts)
        row["async/in_flight_groups"] = gauges.in_flight
        row["async/completed_buffer_size"] = gauges.completed
        row["async/taken_groups"] = gauges.taken
        row["async/outstanding_groups"] = gauges.outstanding
        row["async/reserved_bytes"] = self._reserved_bytes
        row["async/filtered_groups"] = totals.num_filtered
        row["async/timed_out_rollouts"] = totals.num_timeouts
        row["async/dropped_samples"] = totals.num_dropped_samples
        row["async/restarted_groups"] = totals.restarted
        row["tokens/sampled"] = totals.num_tokens
        row["tokens/discarded"] = totals.num_filtered_tokens
        totals.start_batch()
        self._out.append(WriteRow(row))

    # -- evaluation --------------------------------------------------------------------------

    def _on_evaluation_completed(self, done: EvaluationCompleted) -> None:
        result = self.evaluations.complete(done)
        if result is not None:
            self._out.append(WriteRow(result.row))
            self._out.append(ToLearner(result.message))

    # -- the end -----------------------------------------------------------------------------

    def _on_drain(self) -> None:
        """Stop admitting. A closed batch is trained; an open one ends at its next take."""
        self._draining = True
        self.phase = "ending"
        if not self.pacing.taken_in(self.pacing.step) or self.pacing.left == 0:
            self._pending = None
            self._out.append(ToLearner(EndOfData("interrupted")))

    def _answer_draining(self, pending: PendingTake) -> None:
        """End an open batch without waiting for anybody.

        Before its first optimizer update its groups go back, to be trained after a resume. After
        it the weights have moved, so what was taken is trained as a short step.
        """
        self._pending = None
        rule = self.settings.rule
        taken = rule.groups_per_batch - self.pacing.left
        if taken >= rule.groups_per_batch // self.settings.num_substeps:
            self._hand_over(pending, self.pacing.close_short())
        else:
            for group_id in self.pacing.hand_back():
                self._record("handed_back", self._groups[group_id], step=self.pacing.step)
        self._out.append(ToLearner(EndOfData("interrupted")))

    def _on_learner_finished(self) -> None:
        """Name what is left over, stop the samplers, report the counts."""
        totals = self.totals
        for group in list(self._groups.values()):
            if group.sampler >= 0 and group.completed is None:
                self._out.append(ToSampler(group.sampler, Cancel(group.key)))
                self._links[group.sampler].groups.discard(group.key.group_id)
            totals.leftover += 1
            self._end_group(group, "leftover", "interrupted" if self._draining else "the run ended")
        self._unplaced.clear()
        self._out.extend(ToSampler(sampler, Stop()) for sampler in self._links)
        ended = RunEnded(
            reason="interrupted" if self._draining else "done",
            admitted=totals.admitted,
            trained=totals.trained,
            filtered=totals.filtered,
            failed=totals.failed,
            leftover=totals.leftover,
        )
        self._out.extend([ToLauncher(ended), Finish(ended.reason)])
        self.ended = True

    # -- words -------------------------------------------------------------------------------

    def _record(
        self,
        event: LedgerEvent,
        group: GroupRecord,
        *,
        step: int = -1,
        version: int = -1,
        version_max: int = -1,
        sampler: int = -1,
        num_tokens: int = -1,
        reason: str = "",
    ) -> None:
        self._out.append(
            Record(
                event,
                group.key,
                group.problem,
                group.epoch,
                step,
                version,
                version_max,
                sampler,
                num_tokens,
                reason,
            )
        )

    def _learner_words(self) -> str:
        pending = self._pending
        if pending is None:
            return self.phase
        if not self._links:
            return "waiting for a sampler to be ready"
        wanted = pending.take.num_groups
        if pending.held_since_s is not None:
            return f"waiting for stragglers: {self._stragglers(3)}"
        if self.settings.fixed_staleness:
            wanted = self.pacing.num_outstanding
        return f"waiting for fill: {self.pacing.num_completed} of {wanted} groups"

    def _stragglers(self, count: int) -> str:
        """Name the in-flight groups that are due soonest, and who holds them."""
        ids = self.pacing.outstanding_ids(GroupState.IN_FLIGHT)
        ids.sort(key=lambda g: (self.pacing.due_step(g) or 0, g))
        words = [self._group_words(self._groups[group_id]) for group_id in ids[:count]]
        more = f" and {len(ids) - count} more" if len(ids) > count else ""
        return "; ".join(words) + more

    def _group_words(self, group: GroupRecord) -> str:
        holder = f"sampler {group.sampler}" if group.sampler >= 0 else "no sampler"
        due = self.pacing.due_step(group.key.group_id)
        last = "" if due is None else f", due in step {due}"
        return f"group {group.key.group_id} (problem {group.problem}) on {holder}{last}"

    def _warn(self, now_s: float) -> None:
        """Name a wait that has lasted `warn_every_s`, and again each time that passes."""
        pending = self._pending
        if pending is None or now_s - pending.warned_s < self.settings.warn_every_s:
            return
        pending.warned_s = now_s
        waited = (
            f"the learner has waited {now_s - pending.since_s:.0f} s in step {self.pacing.step}"
        )
        if not self._links:
            text = f"{waited}: no sampler is ready; see logs/sampler-*.log"
        else:
            reason = "stragglers" if pending.held_since_s is not None else "fill"
            text = (
                f"{waited} for {reason}: {self._stragglers(5)}; if these never end, set "
                f"rollout_timeout_s (now {self.settings.rollout_timeout_s:g} s)"
            )
        self._out.append(ToLauncher(Warned(text)))

    def _warn_phase(self, now_s: float) -> None:
        """Name a start or an evaluation that lasts; training takes what it takes."""
        phase, since_s, warned_s = self._phase_watch
        if phase != self.phase:
            self._phase_watch = (self.phase, now_s, now_s)
            return
        if now_s - warned_s < self.settings.warn_every_s:
            return
        self._phase_watch = (phase, since_s, now_s)
        if phase == "starting":
            text = "the learner has not reported yet; see logs/learner.log"
        elif phase == "evaluating" and self.evaluations.num_open:
            text = (
                f"the learner waits for {self.evaluations.num_open} held-out rollouts on "
                f"{self.evaluations.holders() or 'no sampler'}; if these never end, set "
                f"rollout_timeout_s (now {self.settings.rollout_timeout_s:g} s)"
            )
        else:
            return
        self._out.append(ToLauncher(Warned(f"for {now_s - since_s:.0f} s {text}")))
