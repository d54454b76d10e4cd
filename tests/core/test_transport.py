"""Which way weights take: both cores against each other, whatever is late, foreign or refused."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_node.core.publishing import (
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
from asyncrl_node.core.sampling import SamplerCore, SamplerEvent, SamplerSettings, ToLearner
from asyncrl_node.core.transport import (
    CloseTest,
    ComparePattern,
    Decided,
    EndRun,
    EndTest,
    OpenTest,
    OpenWeights,
    PatternCompared,
    PatternDone,
    PrepareTest,
    SelfTestOpened,
    SelfTestReady,
    SelfTestUnavailable,
    TransportRefused,
    TransportTerms,
    WeightsOpened,
    WriteTestPattern,
)
from asyncrl_node.messages import (
    PATTERN_SEEDS,
    CudaIpcHandle,
    Lease,
    LeaseGranted,
    PatternWritten,
    TransportOffer,
    TransportVerdict,
    WeightsAvailable,
    WeightsHello,
    WeightsManifest,
    WritePattern,
)

MANIFEST = WeightsManifest(0, (), 0)
OVERDUE_S = 10.0


def handle_of(number: int) -> CudaIpcHandle:
    return CudaIpcHandle(bytes([number]) * 64, 1000, f"GPU-{number}", number)


WEIGHTS = handle_of(1), handle_of(2)
TESTS = handle_of(3), handle_of(4)
TERMS = TransportTerms(WEIGHTS)
REQUIRED = TransportTerms(WEIGHTS, is_required=True)
OFFER = TransportOffer(("host", "cuda_ipc"), "", WEIGHTS, TESTS)
NARROW = TransportOffer(("cuda_ipc",), "", WEIGHTS, TESTS)


class Learner:
    """The learner's core, with a clock."""

    def __init__(self, terms: TransportTerms = TERMS) -> None:
        self.core = PublishingCore(MANIFEST, OVERDUE_S, terms=terms)
        self.now_s = 0.0

    def do(self, event: PublishingEvent) -> list[PublishingInstruction]:
        return self.core.handle(event, self.now_s)

    def meet(self, sampler: int = 0, incarnation: int = 0) -> None:
        """Bring a sampler as far as the offer."""
        self.do(WeightsHello(sampler, incarnation))
        self.do(SelfTestReady(sampler, incarnation, TESTS))

    def publish(self, version: int) -> list[PublishingInstruction]:
        assert BufferFree() in self.do(RequestWrite())
        return self.do(WriteDone(version, 7))


@pytest.fixture
def learner() -> Learner:
    """Version 3 is public; sampler 0 was offered a test."""
    learner = Learner()
    learner.publish(3)
    learner.meet()
    return learner


# -- the learner's end ---------------------------------------------------------------------------


def test_a_test_is_prepared_then_offered_and_nothing_is_public_before_the_verdict() -> None:
    learner = Learner()
    learner.publish(3)
    hello = learner.do(WeightsHello(0, 0))
    assert hello == [ToSampler(0, MANIFEST), PrepareTest(0, 0)]
    assert learner.do(SelfTestReady(0, 0, TESTS)) == [ToSampler(0, OFFER)]
    assert learner.do(Lease(0, 0)) == [], "no lease before the verdict"
    assert learner.publish(4) == [], "and no announcement"
    *_, decided, available = learner.do(TransportVerdict(0, 0, "cuda_ipc", "it works"))
    assert decided == Decided("cuda_ipc", "sampler 0 takes its weights by CUDA IPC: it works")
    assert available == ToSampler(0, WeightsAvailable(4))
    assert learner.do(Lease(0, 0)) == [ToSampler(0, LeaseGranted(4, 7))]


def test_without_buffers_the_reason_goes_with_the_offer_and_nothing_is_tested() -> None:
    learner = Learner(TransportTerms(reason="no driver"))
    offer = TransportOffer(("host",), "no driver")
    assert learner.do(WeightsHello(0, 0)) == [ToSampler(0, MANIFEST), ToSampler(0, offer)]
    for event in (
        SelfTestReady(0, 0, TESTS),
        TransportVerdict(0, 0, "cuda_ipc", ""),
        WritePattern(0, 0, 0, 1),
    ):
        assert learner.do(event) == []


def test_every_pattern_of_every_rank_is_written_and_told(learner: Learner) -> None:
    for rank in (0, 1):
        for seed in PATTERN_SEEDS:
            order = WriteTestPattern(0, 0, rank, seed)
            assert learner.do(WritePattern(0, 0, rank, seed)) == [order]
            told = [ToSampler(0, PatternWritten(rank, seed))]
            assert learner.do(PatternDone(0, 0, rank, seed)) == told


@pytest.mark.parametrize(("rank", "seed"), [(2, 1), (-1, 1), (0, 0), (0, 99)])
def test_no_message_can_write_what_was_not_offered(learner: Learner, rank: int, seed: int) -> None:
    assert learner.do(WritePattern(0, 0, rank, seed)) == []


def test_the_verdict_for_host_memory_names_sampler_and_reason(learner: Learner) -> None:
    learner.meet(5, 2)
    end, decided, _ = learner.do(TransportVerdict(5, 2, "host", "wrong bytes"))
    assert end == EndTest(5)
    assert isinstance(decided, Decided)
    assert decided.kind == "host"
    assert decided.text.startswith("sampler 5 takes its weights through host shared memory")
    assert decided.text.endswith("not by CUDA IPC: wrong bytes")


def test_a_test_that_cannot_be_made_is_a_reason_too() -> None:
    learner = Learner()
    learner.do(WeightsHello(0, 0))
    offer, decided = learner.do(SelfTestUnavailable(0, 0, "the GPU is full"))
    assert offer == ToSampler(0, TransportOffer(("host",), "the GPU is full"))
    assert isinstance(decided, Decided)
    assert "the GPU is full" in decided.text
    assert learner.do(SelfTestUnavailable(0, 0, "again")) == []


def test_where_cuda_ipc_is_required_a_pair_without_it_stops_the_run() -> None:
    learner = Learner(REQUIRED)
    learner.do(WeightsHello(0, 0))
    assert learner.do(SelfTestReady(0, 0, TESTS)) == [ToSampler(0, NARROW)]
    end, stop = learner.do(TransportVerdict(0, 0, "host", "no peer access"))
    assert end == EndTest(0)
    assert isinstance(stop, EndRun)
    assert stop.name == "no_cuda_ipc"
    assert "sampler 0 cannot take its weights by CUDA IPC: no peer access" in stop.story
    assert "set it to auto" in stop.story
    learner.do(WeightsHello(1, 0))
    (stop,) = learner.do(SelfTestUnavailable(1, 0, "full"))
    assert isinstance(stop, EndRun)
    assert learner.do(SelfTestUnavailable(1, 0, "again")) == []
    assert learner.do(Lease(1, 0)) == []


def test_what_is_of_another_incarnation_or_comes_late_changes_nothing(learner: Learner) -> None:
    foreign: list[PublishingEvent] = [
        SelfTestReady(0, 1, TESTS),
        SelfTestUnavailable(7, 0, ""),
        PatternDone(0, 1, 0, 1),
        WritePattern(0, 1, 0, 1),
        TransportVerdict(0, 1, "host", ""),
        TransportVerdict(7, 0, "host", ""),
    ]
    for event in foreign:
        assert learner.do(event) == []
    early = Learner()
    early.do(WeightsHello(0, 0))
    of_a_later_step: list[PublishingEvent] = [
        PatternDone(0, 0, 0, 1),
        WritePattern(0, 0, 0, 1),
        TransportVerdict(0, 0, "cuda_ipc", ""),
    ]
    for event in of_a_later_step:
        assert early.do(event) == []
    assert learner.do(SelfTestReady(0, 0, TESTS)) == [], "twice"
    learner.do(TransportVerdict(0, 0, "host", ""))
    assert learner.do(TransportVerdict(0, 0, "cuda_ipc", "")) == [], "decided already"


def test_a_restart_in_the_middle_frees_the_test_and_begins_another(learner: Learner) -> None:
    again = [EndTest(0), ToSampler(0, MANIFEST), PrepareTest(0, 1)]
    assert learner.do(WeightsHello(0, 1)) == again
    assert learner.do(PatternDone(0, 0, 0, 1)) == []
    assert learner.do(SelfTestReady(0, 1, TESTS)) == [ToSampler(0, OFFER)]
    learner.do(TransportVerdict(0, 1, "cuda_ipc", ""))
    after = [ToSampler(0, MANIFEST), PrepareTest(0, 2)]
    assert learner.do(WeightsHello(0, 2)) == after, "nothing is left to be freed"


def test_a_test_that_never_ends_is_a_named_fault(learner: Learner) -> None:
    learner.now_s += OVERDUE_S
    assert learner.do(Tick()) == []
    learner.now_s += 0.1
    end, fault = learner.do(Tick())
    assert end == EndTest(0)
    assert isinstance(fault, AtFault)
    assert fault[:3] == (0, 0, "transport_overdue")
    assert "10 s ago" in fault.story
    assert learner.do(TransportVerdict(0, 0, "cuda_ipc", "")) == []
    assert learner.do(WeightsHello(0, 0)) == [], "only a newer process is served"


# -- the sampler's end ---------------------------------------------------------------------------


def sampler_core() -> SamplerCore:
    return SamplerCore(SamplerSettings(3, 1, 2, 4))


def bring(core: SamplerCore, *events: SamplerEvent) -> list[object]:
    """Feed events; return what the last one led to."""
    out: list[object] = []
    for event in events:
        out = list(core.handle(event))
    return out


def pass_patterns(core: SamplerCore, num_ranks: int = 2) -> list[object]:
    out: list[object] = []
    for rank in range(num_ranks):
        for seed in PATTERN_SEEDS:
            compare = bring(core, PatternWritten(rank, seed))
            assert compare == [ComparePattern(rank, seed)]
            out = bring(core, PatternCompared(rank, seed, ""))
    return out


def verdict(kind: str, reason: str) -> ToLearner:
    return ToLearner(TransportVerdict(3, 1, kind, reason))  # type: ignore[arg-type]


def test_every_pattern_is_asked_for_after_the_mapping_and_then_the_weights_are_opened() -> None:
    core = sampler_core()
    assert bring(core, MANIFEST, OFFER) == [OpenTest(TESTS)]
    assert bring(core, PatternWritten(0, 1)) == [], "before the mapping it proves nothing"
    assert bring(core, SelfTestOpened()) == [ToLearner(WritePattern(3, 1, 0, 1))]
    assert pass_patterns(core) == [CloseTest(), OpenWeights(MANIFEST, "cuda_ipc", WEIGHTS)]
    right = "3 test patterns from each of 2 learner ranks arrived right"
    assert bring(core, WeightsOpened()) == [verdict("cuda_ipc", right)]


def test_one_rank_is_one_test() -> None:
    core = sampler_core()
    single = TransportOffer(("host", "cuda_ipc"), "", WEIGHTS[:1], TESTS[:1])
    bring(core, MANIFEST, single, SelfTestOpened())
    assert pass_patterns(core, 1) == [CloseTest(), OpenWeights(MANIFEST, "cuda_ipc", WEIGHTS[:1])]
    right = "3 test patterns from the learner arrived right"
    assert bring(core, WeightsOpened()) == [verdict("cuda_ipc", right)]


def test_an_offer_of_host_memory_is_taken_without_a_word() -> None:
    core = sampler_core()
    assert bring(core, TransportOffer(("host",))) == [], "of what?"
    opened = [OpenWeights(MANIFEST, reason="no driver")]
    assert bring(core, MANIFEST, TransportOffer(("host",), "no driver")) == opened
    assert bring(core, TransportOffer(("host",))) == []
    assert bring(core, OFFER) == [], "twice"


def fall_back(reason: str) -> list[object]:
    return [CloseTest(), OpenWeights(MANIFEST, reason=reason), verdict("host", reason)]


def test_wrong_bytes_lead_to_host_memory_whichever_pattern() -> None:
    for place in range(6):
        core = sampler_core()
        bring(core, MANIFEST, OFFER, SelfTestOpened())
        steps = [(rank, seed) for rank in (0, 1) for seed in PATTERN_SEEDS]
        for rank, seed in steps[:place]:
            bring(core, PatternWritten(rank, seed), PatternCompared(rank, seed, ""))
        bring(core, PatternWritten(*steps[place]))
        assert bring(core, PatternCompared(*steps[place], "one byte")) == fall_back("one byte")
        for late in (PatternWritten(0, 1), PatternCompared(0, 1, ""), WeightsOpened()):
            assert bring(core, late) == []
        assert bring(core, TransportRefused("late")) == []


def test_whatever_cuda_refuses_leads_to_host_memory() -> None:
    before_mapping, testing, opening = sampler_core(), sampler_core(), sampler_core()
    bring(before_mapping, MANIFEST, OFFER)
    bring(testing, MANIFEST, OFFER, SelfTestOpened(), PatternWritten(0, 1))
    bring(opening, MANIFEST, OFFER, SelfTestOpened())
    pass_patterns(opening)
    for core in (before_mapping, testing, opening):
        assert bring(core, TransportRefused("no")) == fall_back("no")
    assert bring(sampler_core(), TransportRefused("no")) == []


def test_an_offer_that_names_no_test_for_each_buffer_is_not_trusted() -> None:
    for tests in ((), TESTS[:1]):
        core = sampler_core()
        (_, opened, _) = bring(
            core, MANIFEST, TransportOffer(("host", "cuda_ipc"), "", WEIGHTS, tests)
        )
        assert isinstance(opened, OpenWeights)
        assert opened.kind == "host"
        assert opened.reason == f"the learner offers 2 weight buffers and {len(tests)} test buffers"


def test_where_host_memory_is_not_offered_the_sampler_only_says_why_not() -> None:
    core = sampler_core()
    bring(core, MANIFEST, NARROW)
    assert bring(core, TransportRefused("no")) == [CloseTest(), verdict("host", "no")]


def test_answers_to_another_step_are_late() -> None:
    core = sampler_core()
    assert bring(core, SelfTestOpened()) == []
    bring(core, MANIFEST, OFFER, SelfTestOpened())
    assert bring(core, SelfTestOpened()) == []
    assert bring(core, PatternWritten(0, 2)) == []
    assert bring(core, PatternWritten(1, 1)) == []
    assert bring(core, PatternCompared(0, 1, "")) == [], "nothing was compared"
    assert bring(core, PatternWritten(0, 1)) == [ComparePattern(0, 1)]
    assert bring(core, PatternWritten(0, 1)) == [], "a second copy of the same"
    assert bring(core, PatternCompared(1, 1, "wrong")) == [], "of another step"
    assert bring(core, WeightsManifest(1, (), 1)) == []
    asked = [ToLearner(WritePattern(3, 1, 0, 2))]
    assert bring(core, PatternCompared(0, 1, "")) == asked


# -- both ends, with messages that come twice, restarts, and refusals anywhere -------------------


@given(
    required=st.booleans(),
    refuse=st.integers(-1, 12),
    wrong=st.integers(-1, 8),
    restart=st.integers(-1, 30),
    doubled=st.sets(st.integers(0, 30), max_size=6),
)
def test_every_negotiation_ends_with_one_decision_on_both_ends_and_no_test_left(
    required: bool, refuse: int, wrong: int, restart: int, doubled: set[int]
) -> None:
    """`refuse`, `wrong`: which step of the sampler's CUDA fails; `restart`: at which message."""
    learner = Learner(REQUIRED if required else TERMS)
    learner.publish(3)
    up: deque[PublishingEvent] = deque()
    down: deque[SamplerEvent] = deque()
    tests: set[int] = set()
    num_messages, num_calls, num_compared = 0, 0, 0
    core = SamplerCore(SamplerSettings(0, 0, 2, 4))
    kinds: list[str] = []
    opened: list[OpenWeights] = []
    up.append(core.hello())

    def learn(event: PublishingEvent) -> None:
        for step in learner.do(event):
            match step:
                case ToSampler():
                    if learner.core._readers[0].incarnation == core.settings.incarnation:
                        down.append(step.message)
                case PrepareTest():
                    assert not tests
                    kinds.clear()  # of the incarnation before
                    tests.add(step.incarnation)
                    learn(SelfTestReady(step.sampler, step.incarnation, TESTS))
                case WriteTestPattern():
                    assert tests == {step.incarnation}
                    learn(PatternDone(*step))
                case EndTest():
                    tests.clear()
                case Decided():
                    kinds.append(step.kind)
                case EndRun():
                    assert required
                    kinds.append("stopped")
                    up.clear()
                    down.clear()

    def cuda(answer: SamplerEvent) -> SamplerEvent:
        nonlocal num_calls
        num_calls += 1
        return TransportRefused("refused") if num_calls - 1 == refuse else answer

    def sample(event: SamplerEvent) -> None:
        nonlocal num_compared
        for step in core.handle(event):
            match step:
                case ToLearner():
                    up.append(step.message)
                case OpenTest():
                    sample(cuda(SelfTestOpened()))
                case ComparePattern():
                    num_compared += 1
                    fault = "wrong" if num_compared - 1 == wrong else ""
                    sample(cuda(PatternCompared(step.rank, step.seed, fault)))
                case OpenWeights():
                    opened.append(step)
                    if step.kind == "cuda_ipc":
                        sample(cuda(WeightsOpened()))

    while up or down:
        copies = 2 if num_messages in doubled else 1
        if num_messages == restart:
            opened = []
            core = SamplerCore(SamplerSettings(0, 1, 2, 4))
            down.clear()
            up.append(core.hello())
        num_messages += 1
        if up:
            message = up.popleft()
            for _ in range(copies):
                learn(message)
        else:
            notice = down.popleft()
            for _ in range(copies):
                sample(notice)
    assert not tests
    (kind,) = kinds
    if kind == "stopped":
        assert not [o for o in opened if o.kind == "host"]
    else:
        assert opened[-1].kind == kind
        assert learner.core.lease_holders == [0], "and the newest version is being loaded"
        assert len([o for o in opened if o.kind == kind]) == 1
    fails = refuse >= 0 or wrong >= 0
    assert kind == "cuda_ipc" or fails
