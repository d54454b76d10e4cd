"""The weight transaction: who may read the buffer, and when it may be overwritten."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl_node.core.probe import Probe
from asyncrl_node.core.publishing import (
    TURN_S,
    AtFault,
    BufferFree,
    PublishingCore,
    PublishingEvent,
    PublishingInstruction,
    RequestWrite,
    Tick,
    ToSampler,
    WriteDone,
)
from asyncrl_node.core.sampling import (
    CopyDone,
    LoadDone,
    LoadWeights,
    SamplerCore,
    SamplerSettings,
    ToLearner,
)
from asyncrl_node.messages import (
    Lease,
    LeaseGranted,
    LoadStarted,
    Release,
    TransportOffer,
    WeightNotice,
    WeightRequest,
    WeightsAccepted,
    WeightsAvailable,
    WeightsHello,
    WeightsLoaded,
    WeightsManifest,
)

MANIFEST = WeightsManifest(0, (), 0)
HOST = TransportOffer(("host",))
OVERDUE_S = 10.0
AT_ONCE = [None, 1, 2]


PROBE = Probe((5, 6, 7), 0.01)


def hash_of(version: int) -> int:
    return 1000 + version


def canary_of(version: int) -> tuple[float, ...]:
    return (-1.0 - version, -2.0 - version)


def accepted(sampler: int, version: int) -> ToSampler:
    return ToSampler(sampler, WeightsAccepted(version))


class Learner:
    """A PublishingCore with a clock; `do` returns the instructions of one event."""

    def __init__(self, probe: Probe | None = None) -> None:
        self.core = PublishingCore(MANIFEST, OVERDUE_S, probe)
        self.now_s = 0.0

    def do(self, event: PublishingEvent) -> list[PublishingInstruction]:
        return self.core.handle(event, self.now_s)

    def publish(self, version: int) -> None:
        assert self.do(RequestWrite()) == [BufferFree()]
        self.do(WriteDone(version, hash_of(version), canary_of(version)))

    def lease(self, sampler: int, incarnation: int = 0) -> None:
        """Have a lease granted."""
        version = self.core.published
        canary = self.core.probe.tokens if self.core.probe else ()
        granted = [ToSampler(sampler, LeaseGranted(version, hash_of(version), canary))]
        assert self.do(Lease(sampler, incarnation)) == granted

    def load(self, version: int, answer: tuple[float, ...]) -> list[PublishingInstruction]:
        """Have sampler 0 load a version and answer the canary so."""
        self.publish(version)
        self.lease(0)
        self.do(Release(0, 0, version))
        return self.do(WeightsLoaded(0, 0, version, hash_of(version), answer))

    def wait(self, seconds: float) -> list[PublishingInstruction]:
        self.now_s += seconds
        return self.do(Tick())


@pytest.fixture
def learner() -> Learner:
    """Version 3 is public; samplers 0 and 1 have said hello."""
    learner = Learner()
    learner.publish(3)
    learner.do(WeightsHello(0, 0))
    learner.do(WeightsHello(1, 0))
    return learner


# -- hello and announcement ----------------------------------------------------------------------


def test_a_hello_is_answered_with_the_manifest_and_what_is_public() -> None:
    learner = Learner()
    assert learner.do(WeightsHello(0, 0)) == [ToSampler(0, MANIFEST), ToSampler(0, HOST)]
    learner.publish(3)
    available = ToSampler(1, WeightsAvailable(3))
    answers = [ToSampler(1, MANIFEST), ToSampler(1, HOST), available]
    assert learner.do(WeightsHello(1, 0)) == answers


def test_a_publication_is_announced_to_everybody(learner: Learner) -> None:
    learner.do(RequestWrite())
    assert learner.do(WriteDone(4, hash_of(4))) == [
        ToSampler(0, WeightsAvailable(4)),
        ToSampler(1, WeightsAvailable(4)),
    ]
    assert learner.core.published == 4


def test_nothing_is_granted_before_the_first_publication() -> None:
    learner = Learner()
    learner.do(WeightsHello(0, 0))
    assert learner.do(Lease(0, 0)) == []
    learner.do(RequestWrite())
    assert learner.do(WriteDone(0, hash_of(0))) == [
        ToSampler(0, WeightsAvailable(0)),
        ToSampler(0, LeaseGranted(0, hash_of(0))),
    ]


# -- leases and writes ---------------------------------------------------------------------------


def test_several_samplers_read_at_once(learner: Learner) -> None:
    learner.lease(0)
    learner.lease(1)
    assert learner.core.lease_holders == [0, 1]


def test_the_buffer_is_free_when_the_last_lease_is_back(learner: Learner) -> None:
    learner.lease(0)
    learner.lease(1)
    assert learner.do(RequestWrite()) == []
    assert learner.do(Release(0, 0, 3)) == []
    assert learner.do(WeightsLoaded(0, 0, 3, hash_of(3))) == [accepted(0, 3)]
    assert learner.do(Release(1, 0, 3)) == [BufferFree()]


def test_a_writer_never_starves_and_what_queued_gets_the_newest(learner: Learner) -> None:
    learner.lease(0)
    learner.do(RequestWrite())
    assert learner.do(Lease(1, 0)) == [], "no grant while a write is wanted"
    assert learner.do(Release(0, 0, 3)) == [BufferFree()]
    learner.do(WeightsHello(2, 0))
    assert learner.do(Lease(2, 0)) == [], "no grant while writing"
    assert learner.do(WriteDone(4, hash_of(4)))[3:] == [
        ToSampler(1, LeaseGranted(4, hash_of(4))),
        ToSampler(2, LeaseGranted(4, hash_of(4))),
    ]


def test_writing_without_the_buffer_is_our_own_bug(learner: Learner) -> None:
    with pytest.raises(AssertionError, match="BufferFree"):
        learner.do(WriteDone(4, hash_of(4)))


# -- acknowledgements ----------------------------------------------------------------------------


def test_an_acknowledgement_is_noted(learner: Learner) -> None:
    learner.lease(0)
    learner.do(Release(0, 0, 3))
    assert learner.do(WeightsLoaded(0, 0, 3, hash_of(3))) == [accepted(0, 3)]
    assert learner.core.acknowledged == {0: 3, 1: -1}
    assert learner.do(WeightsLoaded(0, 0, 3, hash_of(3))) == [], "one answer to a load"


def test_an_acknowledgement_may_come_after_the_next_publication(learner: Learner) -> None:
    learner.lease(0)
    learner.do(Release(0, 0, 3))
    for version in (4, 5, 6):
        learner.publish(version)
    assert learner.do(WeightsLoaded(0, 0, 3, hash_of(3))) == [accepted(0, 3)]
    assert learner.core.acknowledged[0] == 3


def test_case_16_bytes_of_another_hash_are_a_named_fault(learner: Learner) -> None:
    learner.lease(0)
    learner.do(Release(0, 0, 3))
    (fault,) = learner.do(WeightsLoaded(0, 0, 3, 1))
    assert isinstance(fault, AtFault)
    assert fault[:3] == (0, 0, "wrong_weights")
    assert "version 3" in fault.story
    assert learner.core.acknowledged == {1: -1}


def test_an_acknowledgement_of_something_else_is_ignored(learner: Learner) -> None:
    assert learner.do(WeightsLoaded(0, 0, 3, 1)) == []
    learner.lease(0)
    assert learner.do(WeightsLoaded(0, 0, 2, 1)) == []
    assert learner.core.acknowledged[0] == -1


def stale_story(instructions: list[PublishingInstruction]) -> str:
    (fault,) = instructions
    assert isinstance(fault, AtFault)
    assert fault[:3] == (0, 0, "stale_weights")
    assert "learner.probe_limit" in fault.story
    return fault.story


@pytest.fixture
def probing() -> Learner:
    """Version 3 is public and sampler 0 has loaded it, with a canary."""
    learner = Learner(PROBE)
    learner.do(WeightsHello(0, 0))
    assert learner.load(3, canary_of(3)) == [accepted(0, 3)]
    return learner


def test_case_16_weights_that_never_arrived_are_a_named_fault(probing: Learner) -> None:
    """The bytes are right, the hash agrees, the answers are those of old weights."""
    story = stale_story(probing.load(4, canary_of(3)))
    assert "sampler 0 has the bytes of version 4" in story
    assert "by 1.00e+00 at most" in story
    assert "they are those of version 3" in story
    assert probing.core.acknowledged == {}, "never acknowledged: nothing of it is taken"
    assert probing.do(WeightsLoaded(0, 0, 4, hash_of(4), canary_of(4))) == []


def test_what_a_sampler_is_asked_to_decode_it_must_have_decoded() -> None:
    """At its first two loads, and not at its third; a process that starts anew begins anew."""
    learner = Learner(PROBE._replace(num_decoded=1))
    learner.do(WeightsHello(0, 0))

    def load(version: int, incarnation: int = 0) -> int:
        learner.publish(version)
        (grant,) = learner.do(Lease(0, incarnation))
        assert isinstance(grant, ToSampler)
        assert isinstance(grant.message, LeaseGranted)
        learner.do(Release(0, incarnation, version))
        scored = canary_of(version) + (-3.0,) * grant.message.num_decoded
        decoded = (-3.0,) * grant.message.num_decoded
        done = WeightsLoaded(0, incarnation, version, hash_of(version), scored, decoded)
        assert learner.do(done) == [accepted(0, version)]
        return grant.message.num_decoded

    assert [load(version) for version in range(3)] == [1, 1, 0]
    learner.do(WeightsHello(0, 1))
    assert load(3, incarnation=1) == 1
    learner.publish(4)
    learner.do(Lease(0, 1))
    learner.do(Release(0, 1, 4))
    (fault,) = learner.do(WeightsLoaded(0, 1, 4, hash_of(4), canary_of(4)))
    assert isinstance(fault, AtFault)
    assert "it decoded 0 tokens after the canary instead of 1" in fault.story


def test_case_16_a_canary_that_does_not_move_is_a_named_fault_however_wide_the_limit() -> None:
    learner = Learner(PROBE._replace(limit=100.0))
    learner.do(WeightsHello(0, 0))
    learner.load(3, (-1.0, -2.0))
    assert "bit for bit" in stale_story(learner.load(4, (-1.0, -2.0)))


def test_a_new_process_is_compared_with_itself_only(probing: Learner) -> None:
    probing.do(WeightsHello(0, 1))
    probing.lease(0, 1)
    probing.do(Release(0, 1, 3))
    loaded = WeightsLoaded(0, 1, 3, hash_of(3), canary_of(3))
    assert probing.do(loaded) == [accepted(0, 3)], "the same version, by another process"


def test_a_wrong_hash_is_named_before_the_canary(probing: Learner) -> None:
    probing.publish(4)
    probing.lease(0)
    (fault,) = probing.do(WeightsLoaded(0, 0, 4, 1, canary_of(3)))
    assert isinstance(fault, AtFault)
    assert fault.name == "wrong_weights"


# -- overdue -------------------------------------------------------------------------------------


def test_a_load_that_takes_too_long_is_a_fault(learner: Learner) -> None:
    """The buffer stays closed: the sampler may still be copying until its process is replaced."""
    learner.now_s = 1000.0
    learner.lease(0)
    learner.do(LoadStarted(0, 0, 3))
    assert learner.do(RequestWrite()) == []
    assert learner.wait(OVERDUE_S) == []
    (fault,) = learner.wait(0.1)
    assert isinstance(fault, AtFault)
    assert fault[:3] == (0, 0, "weights_overdue")
    assert learner.core.lease_holders == [0]
    assert learner.do(Release(0, 1, 3)) == [], "another incarnation's"
    *_, free = learner.do(WeightsHello(0, 1))
    assert free == BufferFree()


def test_a_late_hello_of_the_process_at_fault_changes_nothing(learner: Learner) -> None:
    """It holds the lease yet: its own old hello must not open the buffer."""
    learner.lease(0)
    learner.do(LoadStarted(0, 0, 3))
    learner.wait(OVERDUE_S + 1)
    assert learner.do(RequestWrite()) == []
    assert learner.do(WeightsHello(0, 0)) == []
    assert learner.core.lease_holders == [0]


def test_a_sampler_at_fault_that_hands_its_lease_back_frees_the_buffer(learner: Learner) -> None:
    learner.lease(0)
    learner.do(LoadStarted(0, 0, 3))
    learner.wait(OVERDUE_S + 1)
    assert learner.do(RequestWrite()) == []
    assert learner.do(Release(0, 0, 3)) == [BufferFree()]


def test_the_clock_runs_from_the_start_of_loading_to_the_acknowledgement(learner: Learner) -> None:
    learner.lease(0)
    assert learner.wait(OVERDUE_S * 10) == [], "a granted lease that it has not read yet"
    learner.do(LoadStarted(0, 0, 2))
    assert learner.wait(OVERDUE_S * 10) == [], "of another version"
    learner.do(LoadStarted(0, 0, 3))
    learner.do(Release(0, 0, 3))
    (fault,) = learner.wait(OVERDUE_S + 1)
    assert isinstance(fault, AtFault)
    assert fault.name == "weights_overdue"


def test_a_sampler_that_does_not_load_is_never_at_fault(learner: Learner) -> None:
    for version in range(4, 50):
        learner.publish(version)
        assert learner.wait(1e6) == []
    learner.do(RequestWrite())
    assert learner.do(Lease(0, 0)) == []
    assert learner.wait(1e6) == [], "waiting for a lease is not loading"
    learner.do(WriteDone(50, hash_of(50)))
    assert learner.wait(1e6) == [], "nor is a grant that it has not read"


# -- restarts and what comes twice ---------------------------------------------------------------


def test_a_restarted_sampler_drops_its_lease_with_its_hello(learner: Learner) -> None:
    learner.lease(0)
    assert learner.do(RequestWrite()) == []
    assert learner.do(WeightsHello(0, 1)) == [
        ToSampler(0, MANIFEST),
        ToSampler(0, HOST),
        ToSampler(0, WeightsAvailable(3)),
        BufferFree(),
    ]
    assert learner.wait(1e6) == [], "the load of the dead one is not overdue"


def test_an_older_incarnation_is_ignored(learner: Learner) -> None:
    learner.do(WeightsHello(0, 1))
    learner.lease(0, 1)
    learner.do(RequestWrite())
    for message in (
        WeightsHello(0, 0),
        Lease(0, 0),
        Release(0, 0, 3),
        WeightsLoaded(0, 0, 3, 1),
        Release(0, 2, 3),
        Release(7, 0, 3),
        Lease(7, 0),
    ):
        assert learner.do(message) == []
    assert learner.core.lease_holders == [0]
    assert learner.do(Release(0, 1, 3)) == [BufferFree()]


def test_a_lease_asked_for_twice_is_granted_once(learner: Learner) -> None:
    """The second grant would be out when the first is released, and the buffer overwritten."""
    learner.lease(0)
    assert learner.do(Lease(0, 0)) == []
    learner.do(Release(0, 0, 3))
    assert learner.do(Lease(0, 0)) == []
    learner.do(WeightsLoaded(0, 0, 3, hash_of(3)))
    assert learner.do(Lease(0, 0)) == [], "version 3 was granted and acknowledged"
    assert learner.do(RequestWrite()) == [BufferFree()]


def test_a_release_that_comes_late_does_not_end_the_next_lease(learner: Learner) -> None:
    learner.lease(0)
    learner.do(Release(0, 0, 3))
    learner.do(WeightsLoaded(0, 0, 3, hash_of(3)))
    learner.publish(4)
    learner.lease(0)
    learner.do(Release(0, 0, 3))
    assert learner.do(RequestWrite()) == [], "the lease of version 4 is out"
    assert learner.do(Release(0, 0, 4)) == [BufferFree()]


# -- every history: one learner, three samplers, slow lines, repeated messages, crashes ----------


class Sampler:
    """One process: the real core, and a copy that takes a while."""

    def __init__(self, number: int, incarnation: int, drain: bool) -> None:
        self.number = number
        self.incarnation = incarnation
        self.core = SamplerCore(
            SamplerSettings(number, incarnation, 2, 4, drain_before_update=drain)
        )
        self.copying: int | None = None
        self.hashing: int | None = None
        self.from_learner: deque[WeightNotice] = deque()
        self.spoils = False
        """True if its next acknowledgement carries a wrong hash."""


class WeightHistories(RuleBasedStateMachine):
    """Lines are first in, first out; a message may come twice in a row; a process may die."""

    @initialize(drain=st.booleans(), version=st.integers(0, 3), at_once=st.sampled_from(AT_ONCE))
    def begin(self, drain: bool, version: int, at_once: int | None) -> None:
        self.drain = drain
        self.learner = PublishingCore(MANIFEST, OVERDUE_S, PROBE, copies_at_once=at_once)
        self.now_s = 0.0
        self.next_version = version
        self.buffer: int | None = None
        """The version that lies in the buffer; None while it is being written."""
        self.writing = self.wanted = False
        self.leases: dict[int, tuple[int, int, float]] = {}
        """By sampler, as seen from outside: incarnation, version, when it was granted."""
        self.loading: dict[int, tuple[int, float]] = {}
        self.from_samplers: defaultdict[tuple[int, int], deque[WeightRequest]] = defaultdict(deque)
        self.samplers: dict[int, Sampler] = {}
        self.faults = 0
        self.blamed: dict[int, int] = {}
        for number in range(3):
            self._boot(number, 0)

    def _boot(self, number: int, incarnation: int) -> None:
        sampler = Sampler(number, incarnation, self.drain)
        self.samplers[number] = sampler
        self.from_samplers[number, incarnation].append(sampler.core.hello())

    # -- the learner obeys

    def _learn(self, event: PublishingEvent) -> None:
        for instruction in self.learner.handle(event, self.now_s):
            match instruction:
                case BufferFree():
                    assert self.wanted
                    assert not self.writing
                    assert not self.leases, f"written under {self.leases}"
                    self.writing, self.buffer = True, None
                case ToSampler():
                    self._notify(instruction.sampler, instruction.message)
                case AtFault():
                    self._fault(instruction)
        assert not self.wanted or self.leases or self.writing, "a writer starves"

    def _notify(self, number: int, message: WeightNotice) -> None:
        sampler = self.samplers[number]
        if isinstance(message, WeightsAccepted):
            assert not self.spoiled
            assert self.learner.acknowledged[number] == message.version
        if isinstance(message, LeaseGranted):
            assert not self.wanted, "granted although a write is wanted"
            assert message.version == self.buffer == self.learner.published
            assert number not in self.leases, "granted twice"
            others = [n for n, held in self.leases.items() if self.now_s - held[2] < TURN_S]
            others = [n for n in others if n in self.heard]
            assert len(others) < (self.learner.copies_at_once or 3), "out of turn"
            self.leases[number] = (self.heard[number], message.version, self.now_s)
            self.loading[number] = (message.version, self.now_s)
        if sampler.incarnation == self.heard[number]:
            sampler.from_learner.extend([message] * self.copies)

    def _fault(self, fault: AtFault) -> None:
        """The launcher kills it at once and starts the next incarnation.

        Its lease stays out until that one says hello, or its last Release arrives.
        """
        self.faults += 1
        self.blamed[fault.sampler] = fault.incarnation
        _, since_s = self.loading.pop(fault.sampler)
        if fault.name == "weights_overdue":
            assert self.now_s - since_s > OVERDUE_S
        else:
            assert fault.name in ("wrong_weights", "stale_weights")
            assert self.spoiled
        if self.samplers[fault.sampler].incarnation == fault.incarnation:
            self._boot(fault.sampler, fault.incarnation + 1)

    @property
    def heard(self) -> dict[int, int]:
        """The incarnation that the learner last took a hello from."""
        return {n: reader.incarnation for n, reader in self.learner._readers.items()}

    copies = 1
    spoiled = False

    # -- lines

    @precondition(lambda self: any(self.from_samplers.values()))
    @rule(data=st.data(), copies=st.sampled_from([1, 1, 1, 2]))
    def deliver_to_learner(self, data: st.DataObject, copies: int) -> None:
        lines = sorted(key for key, line in self.from_samplers.items() if line)
        self._deliver_up(data.draw(st.sampled_from(lines)), copies)

    def _deliver_up(self, line: tuple[int, int], copies: int = 1) -> None:
        message = self.from_samplers[line].popleft()
        self.spoiled = isinstance(message, WeightsLoaded) and (
            message.weights_hash != hash_of(message.version)
            or message.canary_logprobs != canary_of(message.version)
        )
        for _ in range(copies):
            self._note(message)
            self._learn(message)
        self.spoiled = False

    def _note(self, message: WeightRequest) -> None:
        """Keep the outside account of who reads."""
        number = message.sampler
        lease = self.leases.get(number)
        if isinstance(message, WeightsHello):
            last = max(self.heard.get(number, -1), self.blamed.get(number, -1))
            if last < message.incarnation:
                self.leases.pop(number, None)
                self.loading.pop(number, None)
        elif isinstance(message, Release) and lease and number not in self.heard:
            if lease[:2] == (message.incarnation, message.version):
                del self.leases[number]
        elif self.heard.get(number) == message.incarnation:
            if isinstance(message, Release) and lease and lease[1] == message.version:
                del self.leases[number]
            loaded = isinstance(message, WeightsLoaded) and not self.spoiled
            if loaded and self.loading.get(number, (-1,))[0] == message.version:
                del self.loading[number]

    @precondition(lambda self: any(s.from_learner for s in self.samplers.values()))
    @rule(data=st.data(), copies=st.sampled_from([1, 1, 1, 2]))
    def deliver_to_sampler(self, data: st.DataObject, copies: int) -> None:
        ready = sorted(n for n, s in self.samplers.items() if s.from_learner)
        self._deliver_down(data.draw(st.sampled_from(ready)), copies)

    def _deliver_down(self, number: int, copies: int = 1) -> None:
        sampler = self.samplers[number]
        message = sampler.from_learner.popleft()
        for _ in range(copies):
            self._sample(sampler, message)

    # -- a sampler obeys

    def _sample(self, sampler: Sampler, event: Any) -> None:
        for instruction in sampler.core.handle(event):
            match instruction:
                case ToLearner():
                    line = self.from_samplers[sampler.number, sampler.incarnation]
                    line.append(instruction.message)
                case LoadWeights():
                    assert sampler.copying is None
                    assert sampler.hashing is None
                    assert self.buffer == instruction.version, "copies what it has no lease for"
                    sampler.copying = instruction.version

    @precondition(lambda self: any(s.copying is not None for s in self.samplers.values()))
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        ready = sorted(n for n, s in self.samplers.items() if s.copying is not None)
        self._copy(self.samplers[data.draw(st.sampled_from(ready))])

    def _copy(self, sampler: Sampler) -> None:
        assert self.buffer == sampler.copying, "the buffer changed under a reader"
        sampler.hashing, sampler.copying = sampler.copying, None
        self._sample(sampler, CopyDone(sampler.hashing))

    @precondition(lambda self: any(s.hashing is not None for s in self.samplers.values()))
    @rule(data=st.data(), spoil=st.integers(0, 9))
    def acknowledge(self, data: st.DataObject, spoil: int) -> None:
        ready = sorted(n for n, s in self.samplers.items() if s.hashing is not None)
        self._acknowledge(self.samplers[data.draw(st.sampled_from(ready))], spoil)

    def _acknowledge(self, sampler: Sampler, spoil: int = 9) -> None:
        """Answer; 0: with a wrong hash, 1: as older weights would."""
        version, sampler.hashing = sampler.hashing, None
        assert version is not None
        digest = -1 if spoil == 0 else hash_of(version)
        canary = canary_of(version - 1 if spoil == 1 else version)
        self._sample(sampler, LoadDone(version, digest, canary))

    # -- the writer, the clock, crashes

    @precondition(lambda self: not self.wanted)
    @rule()
    def want_to_write(self) -> None:
        self.wanted = True
        self._learn(RequestWrite())

    @precondition(lambda self: self.writing)
    @rule()
    def write(self) -> None:
        self.buffer, self.wanted, self.writing = self.next_version, False, False
        self.next_version += 1
        self._learn(WriteDone(self.buffer, hash_of(self.buffer), canary_of(self.buffer)))

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._learn(Tick())

    @rule(number=st.integers(0, 2), rare=st.integers(0, 4))
    def crash(self, number: int, rare: int) -> None:
        if rare == 0:
            self._boot(number, self.samplers[number].incarnation + 1)

    # -- what must hold

    @invariant()
    def accounts_agree(self) -> None:
        assert sorted(self.leases) == sorted(self.learner.lease_holders)
        for number, version in self.learner.acknowledged.items():
            assert version <= self.learner.published
            sampler = self.samplers[number]
            if sampler.incarnation == self.heard[number]:
                assert version <= sampler.core.policy_version

    def teardown(self) -> None:
        """Let everything arrive: every sampler ends on the newest version, acknowledged."""
        if not hasattr(self, "learner"):
            return
        if not self.wanted:
            self.want_to_write()
        while self._progress():
            pass
        assert not self.wanted
        published = self.learner.published
        assert self.learner.acknowledged == dict.fromkeys(range(3), published)
        assert all(s.core._accepted == published for s in self.samplers.values())
        assert all(s.core.policy_version == published for s in self.samplers.values())

    def _progress(self) -> bool:
        for line, messages in list(self.from_samplers.items()):
            if messages:
                self._deliver_up(line)
                return True
        for sampler in self.samplers.values():
            if sampler.from_learner:
                self._deliver_down(sampler.number)
            elif sampler.copying is not None:
                self._copy(sampler)
            elif sampler.hashing is not None:
                self._acknowledge(sampler)
            else:
                continue
            return True
        if self.writing:
            self.write()
            return True
        return False


WeightHistories.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestWeightHistories = WeightHistories.TestCase
