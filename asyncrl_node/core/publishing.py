"""The learner's side of the weight transaction: leases, publication, acknowledgements. Pure.

    RequestWrite -> (no lease is out) -> BufferFree -> the learner writes -> WriteDone
          -> WeightsAvailable to every sampler, and the leases that queued meanwhile are granted
    WeightsHello -> which way the weights take to this sampler (transport.py) -> WeightsAvailable
    Lease -> LeaseGranted -> Release -> WeightsLoaded(hash, canary), compared with the version's
          own -> WeightsAccepted, or the sampler is at fault

What a sampler samples leaves it only after WeightsAccepted (core/sampling.py). So weights that
never arrived are caught here before anything made by them is taken.

Where copies share one memory, they take turns (`copies_at_once`): four at once would each have
their sampler stand still for all four, and be done no sooner. Who waits samples on. A turn
ends with the Release, or after TURN_S: one that is busy with something else, or dead, holds the
others up no longer than that.

There is no barrier: nobody waits for a sampler that holds no lease. The clock of an overdue
acknowledgement starts when the sampler says that it begins to load (LoadStarted); one that is busy
with a slow rollout has not begun and is never at fault. A sampler that does not even read its grant
is silent, and the scheduler's affair (its heartbeat).
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

from asyncrl_node.core.probe import Answer, Probe, decodes_at, find_stale
from asyncrl_node.core.transport import (
    HOST_ONLY,
    LearnerNegotiation,
    LearnerTransportEvent,
    LearnerTransportInstruction,
    PatternDone,
    SelfTestReady,
    SelfTestUnavailable,
    TransportTerms,
)
from asyncrl_node.messages import (
    Lease,
    LeaseGranted,
    LoadStarted,
    Message,
    Release,
    TransportVerdict,
    WeightNotice,
    WeightRequest,
    WeightsAccepted,
    WeightsAvailable,
    WeightsHello,
    WeightsLoaded,
    WeightsManifest,
    WritePattern,
)

TURN_S = 0.25
"""Then the next sampler may copy too, whatever the one before it does."""


class RequestWrite(NamedTuple):
    """The learner wants to overwrite the buffer."""


class WriteDone(NamedTuple):
    """The buffer holds this version, complete."""

    version: int
    weights_hash: int
    canary_logprobs: tuple[float, ...] = ()
    """The learner's own scores of the probe's tokens, under this version."""


class Tick(NamedTuple):
    """Time has passed."""


PublishingEvent = WeightRequest | LearnerTransportEvent | RequestWrite | WriteDone | Tick


class ToSampler(NamedTuple):
    """Send to one sampler."""

    sampler: int
    message: WeightNotice


class BufferFree(NamedTuple):
    """No lease is out and none will be granted: write now."""


class AtFault(NamedTuple):
    """This sampler broke its transaction: it must be restarted."""

    sampler: int
    incarnation: int
    name: str
    story: str


PublishingInstruction = ToSampler | BufferFree | AtFault | LearnerTransportInstruction


class _Reader:
    def __init__(self, incarnation: int, way: LearnerNegotiation) -> None:
        self.incarnation = incarnation
        self.way = way
        """How the weights get there; nothing is announced or granted before it is decided."""
        self.wants_lease = False
        self.holds_lease = False
        self.granted_at_s = 0.0
        self.granted: int | None = None
        """The newest version it was granted; no version is granted twice."""
        self.loading: int | None = None
        self.loading_since_s: float | None = None
        """When it said that it began; None before."""
        self.acknowledged = -1
        self.num_loads = 0
        """Acknowledged and accepted."""
        self.probe: Probe | None = None
        """What it was asked for with the newest grant."""
        self.answered: Answer | None = None
        """The canary under the version it acknowledged last."""


class PublishingCore:
    """Who may read the buffer, and when it may be overwritten."""

    def __init__(
        self,
        manifest: WeightsManifest,
        overdue_s: float,
        probe: Probe | None = None,
        terms: TransportTerms = HOST_ONLY,
        copies_at_once: int | None = None,
    ) -> None:
        """Set the limits; `copies_at_once` None: everybody copies as soon as it asks."""
        self.manifest = manifest
        self.overdue_s = overdue_s
        self.probe = probe
        """None: only the hash is compared."""
        self.terms = terms
        self.copies_at_once = copies_at_once
        self.published = -1
        self._written: dict[int, WriteDone] = {}
        """By version: the published one, and those that are still loading somewhere."""
        self._writing = False
        self._write_wanted = False
        self._readers: dict[int, _Reader] = {}
        self._condemned: dict[int, tuple[int, int]] = {}
        """(incarnation, version) of samplers at fault whose lease is out: they may be copying."""
        self._least_incarnation: dict[int, int] = {}
        """After a fault only a newer process of that sampler is served."""
        self._out: list[PublishingInstruction] = []

    @property
    def acknowledged(self) -> dict[int, int]:
        """The newest version that each sampler has acknowledged."""
        return {sampler: reader.acknowledged for sampler, reader in self._readers.items()}

    @property
    def lease_holders(self) -> list[int]:
        """Samplers that are copying now."""
        holders = {sampler for sampler, reader in self._readers.items() if reader.holds_lease}
        return sorted(holders | self._condemned.keys())

    def handle(self, event: PublishingEvent, now_s: float) -> list[PublishingInstruction]:
        """Digest one event; return what to do, in order."""
        match event:
            case WeightsHello():
                self._on_hello(event)
            case Lease():
                self._on_lease(event)
            case LoadStarted():
                self._on_load_started(event, now_s)
            case Release():
                self._on_release(event)
            case WeightsLoaded():
                self._on_loaded(event)
            case (
                WritePattern() | TransportVerdict() | SelfTestReady() | SelfTestUnavailable()
                | PatternDone()
            ):  # fmt: skip
                self._on_negotiation(event, now_s)
            case RequestWrite():
                self._write_wanted = True
            case WriteDone():
                self._on_write_done(event)
            case Tick():
                pass
            case _:
                assert_never(event)
        self._find_overdue(now_s)
        self._grant(now_s)
        out, self._out = self._out, []
        return out

    def _reader(self, sampler: int, incarnation: int) -> _Reader | None:
        """Return the sampler's record, unless the message is of a process that is gone."""
        reader = self._readers.get(sampler)
        if reader is None or reader.incarnation != incarnation:
            return None
        return reader

    def _on_hello(self, hello: WeightsHello) -> None:
        known = self._readers.get(hello.sampler)
        if known is not None and known.incarnation > hello.incarnation:
            return
        if hello.incarnation < self._least_incarnation.get(hello.sampler, 0):
            return
        self._condemned.pop(hello.sampler, None)
        if known is not None:
            self._out += known.way.close()
        way = LearnerNegotiation(hello.sampler, hello.incarnation, self.terms)
        self._readers[hello.sampler] = _Reader(hello.incarnation, way)
        self._out.append(ToSampler(hello.sampler, self.manifest))
        self._tell(hello.sampler, way, way.begin())

    def _on_negotiation(self, event: LearnerTransportEvent, now_s: float) -> None:
        reader = self._reader(event.sampler, event.incarnation)
        if reader is not None and reader.way.kind is None:
            self._tell(event.sampler, reader.way, reader.way.handle(event, now_s))

    def _tell(
        self,
        sampler: int,
        way: LearnerNegotiation,
        steps: list[WeightNotice | LearnerTransportInstruction],
    ) -> None:
        """Pass on what the negotiation wants; when it has ended, what is public too."""
        for step in steps:
            self._out.append(ToSampler(sampler, step) if isinstance(step, Message) else step)
        if way.kind is not None and self.published >= 0:
            self._out.append(ToSampler(sampler, WeightsAvailable(self.published)))

    def _on_lease(self, lease: Lease) -> None:
        """Note the wish, unless it came twice: of two grants the first release would end both."""
        reader = self._reader(lease.sampler, lease.incarnation)
        if reader is None or reader.way.kind is None:
            return
        if reader.loading is None and reader.granted != self.published:
            reader.wants_lease = True

    def _on_load_started(self, started: LoadStarted, now_s: float) -> None:
        reader = self._reader(started.sampler, started.incarnation)
        if reader is not None and reader.loading == started.version:
            reader.loading_since_s = now_s

    def _on_release(self, release: Release) -> None:
        if self._condemned.get(release.sampler) == (release.incarnation, release.version):
            del self._condemned[release.sampler]
        reader = self._reader(release.sampler, release.incarnation)
        if reader is not None and reader.granted == release.version:
            reader.holds_lease = False

    def _on_loaded(self, loaded: WeightsLoaded) -> None:
        reader = self._reader(loaded.sampler, loaded.incarnation)
        if reader is None or reader.loading != loaded.version:
            return
        written = self._written[loaded.version]
        reader.loading = None
        if written.weights_hash != loaded.weights_hash:
            story = (
                f"sampler {loaded.sampler} holds weights with hash {loaded.weights_hash:016x} as "
                f"version {loaded.version}, published as {written.weights_hash:016x}"
            )
            self._blame(loaded.sampler, "wrong_weights", story)
            return
        answer = Answer(
            loaded.version,
            written.canary_logprobs,
            loaded.canary_logprobs,
            loaded.decoded_logprobs,
        )
        stale = reader.probe and find_stale(reader.probe, answer, reader.answered)
        if stale:
            story = (
                f"sampler {loaded.sampler} has the bytes of version {loaded.version} but does not "
                f"compute with all of them: {stale}. If it is rounding, learner.probe_limit raises "
                "the limit (none switches the probe off)"
            )
            self._blame(loaded.sampler, "stale_weights", story)
            return
        reader.acknowledged = loaded.version
        reader.num_loads += 1
        reader.answered = answer
        self._out.append(ToSampler(loaded.sampler, WeightsAccepted(loaded.version)))

    def _on_write_done(self, done: WriteDone) -> None:
        assert self._writing, "wrote without BufferFree"
        self._writing = self._write_wanted = False
        self.published = done.version
        loading = {reader.loading for reader in self._readers.values()}
        self._written = {v: w for v, w in self._written.items() if v in loading}
        self._written[done.version] = done
        for sampler, reader in self._readers.items():
            if reader.way.kind is not None:
                self._out.append(ToSampler(sampler, WeightsAvailable(done.version)))

    def _grant(self, now_s: float) -> None:
        """Grant what queued, unless somebody wants to write: a writer never starves."""
        if self._write_wanted:
            if not self._writing and not self.lease_holders:
                self._writing = True
                self._out.append(BufferFree())
            return
        if self.published < 0:
            return
        for sampler, reader in self._readers.items():
            if reader.wants_lease and self._has_turn(now_s):
                reader.wants_lease = False
                reader.holds_lease = True
                reader.granted_at_s = now_s
                reader.granted = reader.loading = self.published
                reader.loading_since_s = None
                weights_hash = self._written[self.published].weights_hash
                reader.probe = self.probe and decodes_at(self.probe, reader.num_loads)
                canary, _, num_decoded = reader.probe or Probe((), 0.0)
                grant = LeaseGranted(self.published, weights_hash, canary, num_decoded)
                self._out.append(ToSampler(sampler, grant))

    def _has_turn(self, now_s: float) -> bool:
        """Say whether one more may copy now."""
        if self.copies_at_once is None:
            return True
        copying = sum(
            reader.holds_lease and now_s - reader.granted_at_s < TURN_S
            for reader in self._readers.values()
        )
        return copying < self.copies_at_once

    def _find_overdue(self, now_s: float) -> None:
        for sampler, reader in list(self._readers.items()):
            if (test := reader.way.overdue(now_s, self.overdue_s)) is not None:
                self._blame(sampler, "transport_overdue", test)
                continue
            since_s = reader.loading_since_s
            if reader.loading is None or since_s is None or now_s - since_s <= self.overdue_s:
                continue
            story = (
                f"sampler {sampler} began loading version {reader.loading} "
                f"{now_s - since_s:.0f} s ago and has not acknowledged it"
            )
            self._blame(sampler, "weights_overdue", story)

    def _blame(self, sampler: int, name: str, story: str) -> None:
        """Serve the sampler no more: it will be killed, and says hello again.

        Its lease stays out until then, or until it is handed back: it may still be copying.
        """
        reader = self._readers.pop(sampler)
        self._out += reader.way.close()
        self._least_incarnation[sampler] = reader.incarnation + 1
        if reader.holds_lease:
            assert reader.granted is not None
            self._condemned[sampler] = (reader.incarnation, reader.granted)
        self._out.append(AtFault(sampler, reader.incarnation, name, story))
