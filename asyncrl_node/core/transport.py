"""How one sampler and the learner find the way that weights take, and prove it first. Pure.

    learner: hello -> PrepareTest -> SelfTestReady -> TransportOffer
    sampler: OpenTest -> (WritePattern -> learner writes -> PatternWritten -> ComparePattern) x n
             -> OpenWeights -> TransportVerdict
    learner: EndTest; from now on versions are announced to this sampler

Each pair decides for itself: there is no vote, so a sampler that restarts or joins late delays
nobody. A pair that CUDA IPC does not serve takes host shared memory and says why; where host
memory is not allowed (`transport = cuda_ipc`), the run stops by name instead.

The patterns are written after the mapping, because a peer copy can be wrong in silence: what was
there before may have come another way. Every rank's every pattern must arrive.

Waits: the sampler waits for PatternWritten (ended by the learner's courier thread), the learner for
the verdict (ended by the sampler, its next incarnation, or the overdue rule of publishing.py).
Answers that are not to the step under way are late, and change nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, assert_never

from asyncrl_node.messages import (
    PATTERN_SEEDS,
    CudaIpcHandle,
    PatternWritten,
    TransportKind,
    TransportOffer,
    TransportVerdict,
    WeightNotice,
    WeightsManifest,
    WritePattern,
)


class TransportTerms(NamedTuple):
    """What the learner can offer, the same to every sampler."""

    weights: tuple[CudaIpcHandle, ...] = ()
    """The buffer of each learner rank; none: host memory is all there is."""
    reason: str = ""
    """Why there is none, in words; empty where nobody would expect one."""
    is_required: bool = False
    """True if weights must not go through host memory."""


HOST_ONLY = TransportTerms()


# -- the learner's end -------------------------------------------------------------------------


class SelfTestReady(NamedTuple):
    """The test buffers for this sampler are there, one of each rank."""

    sampler: int
    incarnation: int
    tests: tuple[CudaIpcHandle, ...]


class SelfTestUnavailable(NamedTuple):
    """They could not be made."""

    sampler: int
    incarnation: int
    reason: str


class PatternDone(NamedTuple):
    """The pattern lies in this sampler's test buffer, complete."""

    sampler: int
    incarnation: int
    rank: int
    seed: int


LearnerTransportEvent = (
    SelfTestReady | SelfTestUnavailable | PatternDone | WritePattern | TransportVerdict
)


class PrepareTest(NamedTuple):
    """Make a test buffer for this sampler on each rank; answer with one of the SelfTest events."""

    sampler: int
    incarnation: int


class WriteTestPattern(NamedTuple):
    """Write into this sampler's test buffer on this rank; answer PatternDone."""

    sampler: int
    incarnation: int
    rank: int
    seed: int


class EndTest(NamedTuple):
    """Free this sampler's test buffers."""

    sampler: int


class Decided(NamedTuple):
    """Note the decision; one for host memory is the user's to know."""

    kind: TransportKind
    text: str


class EndRun(NamedTuple):
    """Stop the learner on this fault."""

    name: str
    story: str


LearnerTransportInstruction = PrepareTest | WriteTestPattern | EndTest | Decided | EndRun


class LearnerNegotiation:
    """The way to one incarnation of one sampler, seen from the learner.

    `kind` is None until it is decided. A test buffer exists from PrepareTest until EndTest, which
    comes with the verdict, or by `close` when this sampler is given up before.
    """

    def __init__(self, sampler: int, incarnation: int, terms: TransportTerms) -> None:
        self.kind: TransportKind | None = None
        self._sampler = sampler
        self._incarnation = incarnation
        self._terms = terms
        self._state: Literal["preparing", "testing", "decided"] = "preparing"
        self._num_tests = 0
        self._testing_since_s = 0.0

    def begin(self) -> list[WeightNotice | LearnerTransportInstruction]:
        """Answer the hello."""
        if self._terms.weights:
            return [PrepareTest(self._sampler, self._incarnation)]
        self._decide("host")
        return [TransportOffer(("host",), self._terms.reason)]

    def handle(
        self, event: LearnerTransportEvent, now_s: float
    ) -> list[WeightNotice | LearnerTransportInstruction]:
        """Digest one event of this sampler's incarnation; return what to do, in order."""
        match event:
            case SelfTestReady():
                return self._on_ready(event, now_s)
            case SelfTestUnavailable():
                return self._on_unavailable(event.reason)
            case WritePattern():
                exists = 0 <= event.rank < self._num_tests and event.seed in PATTERN_SEEDS
                if self._state != "testing" or not exists:
                    return []
                return [WriteTestPattern(self._sampler, self._incarnation, event.rank, event.seed)]
            case PatternDone():
                if self._state != "testing":
                    return []
                return [PatternWritten(event.rank, event.seed)]
            case TransportVerdict():
                return self._on_verdict(event)
            case _:
                assert_never(event)

    def close(self) -> list[LearnerTransportInstruction]:
        """Give up: free what the test holds."""
        is_testing = self._state == "testing"
        self._state = "decided"
        return [EndTest(self._sampler)] if is_testing else []

    def overdue(self, now_s: float, overdue_s: float) -> str | None:
        """Tell the story of a test that has lasted too long; None if none has."""
        if self._state != "testing" or now_s - self._testing_since_s <= overdue_s:
            return None
        return (
            f"sampler {self._sampler} was offered CUDA IPC {now_s - self._testing_since_s:.0f} s "
            "ago and has not finished the self-test; with `transport` set to host there is none"
        )

    def _on_ready(
        self, ready: SelfTestReady, now_s: float
    ) -> list[WeightNotice | LearnerTransportInstruction]:
        if self._state != "preparing":
            return []
        self._state = "testing"
        self._num_tests = len(ready.tests)
        self._testing_since_s = now_s
        kinds: tuple[TransportKind, ...] = ("host", "cuda_ipc")
        if self._terms.is_required:
            kinds = ("cuda_ipc",)
        return [TransportOffer(kinds, "", self._terms.weights, ready.tests)]

    def _on_unavailable(self, reason: str) -> list[WeightNotice | LearnerTransportInstruction]:
        if self._state != "preparing":
            return []
        fallen = self._fall_back(reason)
        return fallen if self._terms.is_required else [TransportOffer(("host",), reason), *fallen]

    def _on_verdict(
        self, verdict: TransportVerdict
    ) -> list[WeightNotice | LearnerTransportInstruction]:
        if self._state != "testing":
            return []
        end = EndTest(self._sampler)
        if verdict.kind == "host":
            return [end, *self._fall_back(verdict.reason)]
        self._decide("cuda_ipc")
        text = f"sampler {self._sampler} takes its weights by CUDA IPC: {verdict.reason}"
        return [end, Decided("cuda_ipc", text)]

    def _fall_back(self, reason: str) -> list[WeightNotice | LearnerTransportInstruction]:
        if self._terms.is_required:
            self._state = "decided"
            story = (
                f"sampler {self._sampler} cannot take its weights by CUDA IPC: {reason}. "
                "`transport` is cuda_ipc; set it to auto and it takes host memory instead"
            )
            return [EndRun("no_cuda_ipc", story)]
        self._decide("host")
        text = (
            f"sampler {self._sampler} takes its weights through host shared memory, not by CUDA "
            f"IPC: {reason}"
        )
        return [Decided("host", text)]

    def _decide(self, kind: TransportKind) -> None:
        self.kind = kind
        self._state = "decided"


# -- the sampler's end -------------------------------------------------------------------------


class SelfTestOpened(NamedTuple):
    """The test buffer of every rank is mapped."""


class PatternCompared(NamedTuple):
    """The pattern was pulled and compared."""

    rank: int
    seed: int
    fault: str
    """What arrived wrong, in words; empty if all of it is right."""


class WeightsOpened(NamedTuple):
    """The weights are open, by CUDA IPC."""


class TransportRefused(NamedTuple):
    """CUDA has refused what was asked last."""

    reason: str


SamplerTransportEvent = (
    WeightsManifest
    | TransportOffer
    | PatternWritten
    | SelfTestOpened
    | PatternCompared
    | WeightsOpened
    | TransportRefused
)


class OpenTest(NamedTuple):
    """Map the test buffers; answer SelfTestOpened or TransportRefused."""

    tests: tuple[CudaIpcHandle, ...]


class ComparePattern(NamedTuple):
    """Pull the test buffer of this rank; answer PatternCompared or TransportRefused."""

    rank: int
    seed: int


class CloseTest(NamedTuple):
    """Unmap the test buffers, those that are mapped."""


class OpenWeights(NamedTuple):
    """Open the weights. By CUDA IPC: answer WeightsOpened or TransportRefused."""

    manifest: WeightsManifest
    kind: TransportKind = "host"
    weights: tuple[CudaIpcHandle, ...] = ()
    """The buffer of each learner rank, for cuda_ipc."""
    reason: str = ""
    """Why host memory, in words; empty where nothing else was to be expected."""


SamplerTransportInstruction = OpenTest | ComparePattern | CloseTest | OpenWeights


class SamplerNegotiation:
    """The way to the learner, seen from one incarnation of a sampler."""

    def __init__(self, sampler: int, incarnation: int) -> None:
        self._sampler = sampler
        self._incarnation = incarnation
        self._state: Literal["new", "mapping", "testing", "opening", "decided"] = "new"
        self._manifest: WeightsManifest | None = None
        self._offer = TransportOffer(())
        self._steps: list[tuple[int, int]] = []
        """(rank, seed) of the patterns that have not arrived yet; the first is under way."""
        self._comparing = False

    def handle(
        self, event: SamplerTransportEvent
    ) -> list[WritePattern | TransportVerdict | SamplerTransportInstruction]:
        """Digest one event; return what to do, in order; messages are for the learner."""
        match event:
            case WeightsManifest():
                if self._manifest is None:
                    self._manifest = event
            case TransportOffer():
                return self._on_offer(event)
            case SelfTestOpened():
                if self._state == "mapping":
                    self._state = "testing"
                    return [self._order_pattern()]
            case PatternWritten():
                step = (event.rank, event.seed)
                if self._state == "testing" and self._steps[0] == step and not self._comparing:
                    self._comparing = True
                    return [ComparePattern(event.rank, event.seed)]
            case PatternCompared():
                return self._on_compared(event)
            case WeightsOpened():
                if self._state == "opening":
                    num_ranks = len(self._offer.weights)
                    return [self._verdict("cuda_ipc", _arrived_right(num_ranks))]
            case TransportRefused():
                if self._state in ("mapping", "testing", "opening"):
                    return self._refuse(event.reason)
            case _:
                assert_never(event)
        return []

    def _on_offer(
        self, offer: TransportOffer
    ) -> list[WritePattern | TransportVerdict | SamplerTransportInstruction]:
        if self._state != "new" or self._manifest is None:
            return []
        if "cuda_ipc" not in offer.kinds:
            self._state = "decided"
            return [OpenWeights(self._manifest, reason=offer.reason)]
        self._offer = offer
        if not offer.tests or len(offer.tests) != len(offer.weights):
            counts = f"{len(offer.weights)} weight buffers and {len(offer.tests)} test buffers"
            return self._refuse(f"the learner offers {counts}")
        self._state = "mapping"
        ranks = range(len(offer.tests))
        self._steps = [(rank, seed) for rank in ranks for seed in PATTERN_SEEDS]
        return [OpenTest(offer.tests)]

    def _on_compared(
        self, compared: PatternCompared
    ) -> list[WritePattern | TransportVerdict | SamplerTransportInstruction]:
        if not self._comparing or self._steps[0] != (compared.rank, compared.seed):
            return []
        self._comparing = False
        if compared.fault:
            return self._refuse(compared.fault)
        del self._steps[0]
        if self._steps:
            return [self._order_pattern()]
        assert self._manifest is not None
        self._state = "opening"
        return [CloseTest(), OpenWeights(self._manifest, "cuda_ipc", self._offer.weights)]

    def _order_pattern(self) -> WritePattern:
        rank, seed = self._steps[0]
        return WritePattern(self._sampler, self._incarnation, rank, seed)

    def _refuse(
        self, reason: str
    ) -> list[WritePattern | TransportVerdict | SamplerTransportInstruction]:
        """Take host memory, where it is offered; else only say why not."""
        self._comparing = False
        verdict = self._verdict("host", reason)
        if "host" not in self._offer.kinds:
            return [CloseTest(), verdict]
        assert self._manifest is not None
        return [CloseTest(), OpenWeights(self._manifest, reason=reason), verdict]

    def _verdict(self, kind: TransportKind, reason: str) -> TransportVerdict:
        self._state = "decided"
        return TransportVerdict(self._sampler, self._incarnation, kind, reason)


def _arrived_right(num_ranks: int) -> str:
    ranks = "the learner" if num_ranks == 1 else f"each of {num_ranks} learner ranks"
    return f"{len(PATTERN_SEEDS)} test patterns from {ranks} arrived right"
