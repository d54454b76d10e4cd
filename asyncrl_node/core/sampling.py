"""The sampler's decisions: orders, versions, retries and the weight transaction. Pure.

    Admit -> queue -> (weights new enough, room) -> StartRollout x group_size -> RolloutDone
          -> all in -> WriteGroup -> GroupCompleted
    WeightsManifest, TransportOffer -> (self-test, transport.py) -> OpenWeights
    WeightsAvailable -> Lease -> LeaseGranted -> LoadWeights -> CopyDone (Release)
          -> LoadDone (WeightsLoaded with hash and canary) -> WeightsAccepted

Until the learner has accepted a version, nothing that it sampled leaves this process: finished
groups are held back, and no work is asked for before the first acceptance. A sampler whose weights
did not arrive is killed instead, and what it held is sampled anew.

Waits: a queued group waits for weights (ended by the learner's next LeaseGranted) or for room
(ended by a rollout that ends). A load waits for its lease (ended by the learner when nobody
writes), and in `between_groups` mode also for the running rollouts to end. A finished group waits
for its version's acceptance, ended by the learner's next message or, at the latest, by this
process's end (the learner's overdue rule).
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from typing import Literal, NamedTuple, assert_never

from asyncrl_node.core.order import rollout_seed
from asyncrl_node.core.transport import (
    PatternCompared,
    SamplerNegotiation,
    SamplerTransportEvent,
    SamplerTransportInstruction,
    SelfTestOpened,
    TransportRefused,
    WeightsOpened,
)
from asyncrl_node.messages import (
    Admit,
    Cancel,
    Evaluate,
    EvaluationCompleted,
    FailureKind,
    GroupFailed,
    GroupKey,
    GroupStarted,
    Heartbeat,
    Lease,
    LeaseGranted,
    LoadStarted,
    Message,
    PatternWritten,
    Release,
    SamplerMessage,
    SamplerOrder,
    Stop,
    TransportOffer,
    WeightNotice,
    WeightRequest,
    WeightsAccepted,
    WeightsAvailable,
    WeightsHello,
    WeightsLoaded,
    WeightsManifest,
)

Split = Literal["train", "eval"]


class RolloutKey(NamedTuple):
    """One try at one rollout: of a training group, or of an evaluation."""

    split: Split
    owner: int
    """Group id, or evaluation number."""
    attempt: int
    rollout: int
    """Place in the group, or held-out problem."""
    retry: int


class RolloutSummary(NamedTuple):
    """What the decisions need of a finished rollout; its arrays stay with the shell."""

    reward: float
    num_tokens: int
    """Sampled tokens; a rollout with none cannot be trained and counts as failed."""
    version_min: int
    version_max: int
    timed_out: bool


# -- events of the shell -----------------------------------------------------------------------


class FirstToken(NamedTuple):
    """The first token of a rollout exists."""

    key: RolloutKey
    version: int


class RolloutDone(NamedTuple):
    """A rollout has ended."""

    key: RolloutKey
    summary: RolloutSummary


class RolloutRaised(NamedTuple):
    """A rollout raised; it may be retried."""

    key: RolloutKey
    kind: FailureKind
    reason: str


class CopyDone(NamedTuple):
    """The buffer is copied: the lease may go back, and rollouts run on the new weights."""

    version: int


class LoadDone(NamedTuple):
    """The weights are in use, their copy is hashed, the canary decoded on and scored."""

    version: int
    weights_hash: int
    canary_logprobs: tuple[float, ...] = ()
    decoded_logprobs: tuple[float, ...] = ()


SamplerEvent = (
    SamplerOrder
    | WeightNotice
    | SamplerTransportEvent
    | FirstToken
    | RolloutDone
    | RolloutRaised
    | CopyDone
    | LoadDone
)

# -- instructions to the shell -----------------------------------------------------------------


class ToScheduler(NamedTuple):
    """Send to the scheduler."""

    message: SamplerMessage


class ToLearner(NamedTuple):
    """Send to the learner."""

    message: WeightRequest


class LoadWeights(NamedTuple):
    """Copy the buffer, answer CopyDone; then hash the copy, try the canary, answer LoadDone."""

    version: int
    canary: tuple[int, ...] = ()
    num_decoded: int = 0


class AskForWork(NamedTuple):
    """Say hello to the scheduler: the first weights are accepted."""


class StartRollout(NamedTuple):
    """Run one rollout."""

    key: RolloutKey
    problem: int
    seed: int


class AbandonGroup(NamedTuple):
    """Abort the running rollouts of this attempt and forget what it produced."""

    key: GroupKey


class WriteGroup(NamedTuple):
    """Write these rollouts into the slot of this attempt, then send GroupCompleted."""

    key: GroupKey
    problem: int
    epoch: int
    rollouts: tuple[RolloutKey, ...]
    num_dropped_samples: int


class EndProcess(NamedTuple):
    """Abort everything and end."""


SamplerInstruction = (
    ToScheduler
    | ToLearner
    | SamplerTransportInstruction
    | LoadWeights
    | AskForWork
    | StartRollout
    | AbandonGroup
    | WriteGroup
    | EndProcess
)


class SamplerSettings(NamedTuple):
    """What the core needs to know of the configuration."""

    sampler: int
    incarnation: int
    group_size: int
    max_rollouts: int
    max_retries: int = 2
    drain_before_update: bool = False


class _RunningGroup:
    def __init__(self, admit: Admit, group_size: int) -> None:
        self.admit = admit
        self.open = group_size
        self.done: list[RolloutKey] = []
        self.dropped = 0
        self.version_max = -1
        """The newest weights that sampled a token of it."""
        self.started = False
        self.last_error: tuple[FailureKind, str] = ("environment", "")


class SamplerCore:
    """All decisions of one sampler process."""

    def __init__(self, settings: SamplerSettings) -> None:
        self.settings = settings
        self.policy_version = -1
        """The version in use; -1 before the first load."""
        self.num_tokens = 0
        self._way = SamplerNegotiation(settings.sampler, settings.incarnation)
        self._available = -1
        """The newest version known to be public."""
        self._accepted = -1
        """The newest version that the learner has accepted here."""
        self._held: list[tuple[int, WriteGroup | ToScheduler]] = []
        """(version, result) of what waits for that version's acceptance."""
        self._asked = False
        """True from asking for a lease until the load is done."""
        self._loading = -1
        self._queue: deque[Admit] = deque()
        self._evaluations: deque[Evaluate] = deque()
        self._groups: dict[int, _RunningGroup] = {}
        self._running: dict[RolloutKey, Admit | Evaluate] = {}
        self._ended = False
        self._out: list[SamplerInstruction] = []

    def hello(self) -> WeightsHello:
        """Make the message that opens the weight transaction."""
        return WeightsHello(self.settings.sampler, self.settings.incarnation)

    def heartbeat(self) -> Heartbeat:
        """Describe the present moment."""
        return Heartbeat(
            sampler=self.settings.sampler,
            incarnation=self.settings.incarnation,
            policy_version=self.policy_version,
            num_rollouts=len(self._running),
            num_queued_groups=len(self._queue),
            loading=self._loading >= 0,
            num_tokens=self.num_tokens,
        )

    def handle(self, event: SamplerEvent) -> list[SamplerInstruction]:
        """Digest one event; return what to do, in order."""
        match event:
            case Admit():
                self._on_admit(event)
            case Evaluate():
                self._evaluations.append(event)
            case Cancel():
                self._on_cancel(event.key)
            case Stop():
                self._ended = True
                self._out.append(EndProcess())
            case (
                WeightsManifest() | TransportOffer() | PatternWritten() | SelfTestOpened()
                | PatternCompared() | WeightsOpened() | TransportRefused()
            ):  # fmt: skip
                for step in self._way.handle(event):
                    self._out.append(ToLearner(step) if isinstance(step, Message) else step)
            case WeightsAvailable():
                self._available = max(self._available, event.version)
            case LeaseGranted():
                self._on_lease_granted(event)
            case WeightsAccepted():
                self._on_accepted(event)
            case CopyDone():
                self._on_copy_done(event)
            case LoadDone():
                self._on_load_done(event)
            case FirstToken():
                self._on_first_token(event)
            case RolloutDone():
                self._on_rollout_done(event)
            case RolloutRaised():
                self._on_rollout_raised(event)
            case _:
                assert_never(event)
        if not self._ended:
            self._ask_for_weights()
            self._start_rollouts()
        out, self._out = self._out, []
        return out

    # -- weights -----------------------------------------------------------------------------

    def _ask_for_weights(self) -> None:
        if self._asked or self._available <= self.policy_version:
            return
        if self.settings.drain_before_update and self._running:
            return
        self._asked = True
        self._out.append(ToLearner(Lease(self.settings.sampler, self.settings.incarnation)))

    def _on_lease_granted(self, granted: LeaseGranted) -> None:
        """Load, if that was asked for: a grant that comes twice was released once already."""
        if self._asked and self._loading < 0 and granted.version > self.policy_version:
            self._loading = granted.version
            settings = self.settings
            started = LoadStarted(settings.sampler, settings.incarnation, granted.version)
            self._out.append(ToLearner(started))
            self._out.append(LoadWeights(granted.version, granted.canary, granted.num_decoded))

    def _on_copy_done(self, copied: CopyDone) -> None:
        settings = self.settings
        self.policy_version = copied.version
        self._available = max(self._available, copied.version)
        release = Release(settings.sampler, settings.incarnation, copied.version)
        self._out.append(ToLearner(release))

    def _on_load_done(self, loaded: LoadDone) -> None:
        settings = self.settings
        self._loading = -1
        self._asked = False
        acknowledge = WeightsLoaded(
            settings.sampler,
            settings.incarnation,
            loaded.version,
            loaded.weights_hash,
            loaded.canary_logprobs,
            loaded.decoded_logprobs,
        )
        self._out.append(ToLearner(acknowledge))

    def _on_accepted(self, accepted: WeightsAccepted) -> None:
        """Let go of what waited; after the first acceptance, ask for work."""
        if self._accepted < 0:
            self._out.append(AskForWork())
        self._accepted = max(self._accepted, accepted.version)
        held, self._held = self._held, []
        for version, result in held:
            self._hand_over(version, result)

    def _hand_over(self, version: int, result: WriteGroup | ToScheduler) -> None:
        """Let a result go, once the newest weights in it are accepted."""
        if version <= self._accepted:
            self._out.append(result)
        else:
            self._held.append((version, result))

    # -- starting ----------------------------------------------------------------------------

    def _on_admit(self, admit: Admit) -> None:
        """Queue a group; a newer attempt replaces an older one, queued or running."""
        known = [a.key for a in self._queue if a.key.group_id == admit.key.group_id]
        known += [key for key in self._held_groups() if key.group_id == admit.key.group_id]
        running = self._groups.get(admit.key.group_id)
        if running is not None:
            known.append(running.admit.key)
        if any(key.attempt >= admit.key.attempt for key in known):
            return
        for key in known:
            self._on_cancel(key)
        self._queue.append(admit)

    def _start_rollouts(self) -> None:
        """Start what may run: training groups first, in order of admission, then evaluations."""
        if self.settings.drain_before_update and self._asked:
            return
        if self.settings.drain_before_update and self._available > self.policy_version:
            return
        while self._queue and self._may_start(self._queue[0].min_version, self.settings.group_size):
            self._start_group(self._queue.popleft())
        # Room that queued training groups will need, now or once their weights are here, is not
        # for evaluations: they would hold it for as long as they last.
        if self._queue and self._room() <= len(self._queue) * self.settings.group_size:
            return
        while self._evaluations and self._may_start(self._evaluations[0].min_version, 1):
            order = self._evaluations.popleft()
            key = RolloutKey("eval", order.evaluation, order.attempt, order.problem, 0)
            self._start(key, order)
            if self._queue and self._room() <= len(self._queue) * self.settings.group_size:
                return

    def _may_start(self, min_version: int, num_rollouts: int) -> bool:
        """Weights new enough, and room; a group larger than all the room runs alone."""
        has_room = self._room() >= num_rollouts or not self._running
        return self.policy_version >= min_version and has_room

    def _room(self) -> int:
        return self.settings.max_rollouts - len(self._running)

    def _start_group(self, admit: Admit) -> None:
        self._groups[admit.key.group_id] = _RunningGroup(admit, self.settings.group_size)
        for rollout in range(self.settings.group_size):
            key = RolloutKey("train", admit.key.group_id, admit.key.attempt, rollout, 0)
            self._start(key, admit)

    def _start(self, key: RolloutKey, order: Admit | Evaluate) -> None:
        self._running[key] = order
        seed = rollout_seed(order.seed, key.rollout, key.retry)
        self._out.append(StartRollout(key, order.problem, seed))

    def _on_cancel(self, key: GroupKey) -> None:
        self._queue = deque(a for a in self._queue if a.key != key)
        is_known = self._forget_held(key)
        group = self._groups.get(key.group_id)
        if group is not None and group.admit.key == key:
            is_known = True
            del self._groups[key.group_id]
            self._running = {k: o for k, o in self._running.items() if not _belongs(k, key)}
        if is_known:
            self._out.append(AbandonGroup(key))

    def _forget_held(self, key: GroupKey) -> bool:
        """Drop what waits for acceptance of this group; say whether anything did."""
        kept = [held for held in self._held if _held_key(held[1]) != key]
        dropped = len(kept) < len(self._held)
        self._held = kept
        return dropped

    def _held_groups(self) -> list[GroupKey]:
        keys = (_held_key(result) for _, result in self._held)
        return [key for key in keys if key is not None]

    # -- ending ------------------------------------------------------------------------------

    def _group_of(self, key: RolloutKey) -> _RunningGroup | None:
        group = self._groups.get(key.owner) if key.split == "train" else None
        if group is None or group.admit.key.attempt != key.attempt:
            return None
        return group

    def _on_first_token(self, first: FirstToken) -> None:
        """Report the first token of a group; later rollouts can only be newer.

        Like all else it waits for the acceptance: no due step moves by a version that may yet turn
        out never to have been in use.
        """
        group = self._group_of(first.key)
        if group is None or group.started:
            return
        group.started = True
        self._hand_over(first.version, ToScheduler(GroupStarted(group.admit.key, first.version)))

    def _on_rollout_done(self, done: RolloutDone) -> None:
        order = self._running.pop(done.key, None)
        if order is None:
            return
        self.num_tokens += done.summary.num_tokens
        if isinstance(order, Evaluate):
            self._report_evaluation(order, done.summary)
            return
        group = self._group_of(done.key)
        assert group is not None
        group.done.append(done.key)
        group.version_max = max(group.version_max, done.summary.version_max)
        self._close_sample(group)

    def _on_rollout_raised(self, raised: RolloutRaised) -> None:
        """Redo the one sample, not the group, until its retries are used up."""
        order = self._running.pop(raised.key, None)
        if order is None:
            return
        if raised.key.retry < self.settings.max_retries:
            self._start(raised.key._replace(retry=raised.key.retry + 1), order)
            return
        if isinstance(order, Evaluate):
            self._report_evaluation(order, None)
            return
        group = self._group_of(raised.key)
        assert group is not None
        group.dropped += 1
        group.last_error = (raised.kind, raised.reason)
        self._close_sample(group)

    def _report_evaluation(self, order: Evaluate, summary: RolloutSummary | None) -> None:
        """Report a held-out rollout; one whose reward is not finite has failed.

        It is not redone: what is redone until it is finite is a mean over successes.
        """
        if summary is not None and not isfinite(summary.reward):
            summary = None
        completed = EvaluationCompleted(
            evaluation=order.evaluation,
            problem=order.problem,
            attempt=order.attempt,
            reward=0.0 if summary is None else summary.reward,
            version_min=-1 if summary is None else summary.version_min,
            version_max=-1 if summary is None else summary.version_max,
            failed=summary is None,
        )
        self._hand_over(completed.version_max, ToScheduler(completed))

    def _close_sample(self, group: _RunningGroup) -> None:
        """Note that one sample is decided; when all are, hand the group over or give it up."""
        group.open -= 1
        if group.open > 0:
            return
        admit = group.admit
        del self._groups[admit.key.group_id]
        if len(group.done) >= 2:
            rollouts = tuple(sorted(group.done))
            write = WriteGroup(admit.key, admit.problem, admit.epoch, rollouts, group.dropped)
            self._hand_over(group.version_max, write)
            return
        kind, reason = group.last_error
        self._forget_held(admit.key)
        self._out.append(AbandonGroup(admit.key))
        self._out.append(ToScheduler(GroupFailed(admit.key, kind, reason)))


def _held_key(result: WriteGroup | ToScheduler) -> GroupKey | None:
    if isinstance(result, WriteGroup):
        return result.key
    return result.message.key if isinstance(result.message, GroupStarted) else None


def _belongs(rollout: RolloutKey, group: GroupKey) -> bool:
    ids = (rollout.owner, rollout.attempt)
    return rollout.split == "train" and ids == (group.group_id, group.attempt)
