"""Copies of the weights take turns where they share one memory; nobody waits for long."""

from __future__ import annotations

import pytest

from asyncrl_node.core.publishing import (
    TURN_S,
    AtFault,
    BufferFree,
    PublishingCore,
    PublishingEvent,
    RequestWrite,
    Tick,
    ToSampler,
    WriteDone,
)
from asyncrl_node.messages import (
    Lease,
    LeaseGranted,
    Release,
    WeightsHello,
    WeightsLoaded,
    WeightsManifest,
)


class Learner:
    """Version 3 is public, four samplers have said hello; `do` returns who is granted a lease."""

    def __init__(self, copies_at_once: int | None) -> None:
        self.core = PublishingCore(WeightsManifest(0, (), 0), 10.0, copies_at_once=copies_at_once)
        self.now_s = 100.0
        self.do(RequestWrite())
        self.do(WriteDone(3, 1003))
        for sampler in range(4):
            self.do(WeightsHello(sampler, 0))

    def do(self, event: PublishingEvent) -> list[int]:
        out = self.core.handle(event, self.now_s)
        to_samplers = [each for each in out if isinstance(each, ToSampler)]
        return [each.sampler for each in to_samplers if isinstance(each.message, LeaseGranted)]

    def wait(self, seconds: float) -> list[int]:
        self.now_s += seconds
        return self.do(Tick())


def test_the_next_one_copies_when_the_one_before_has_its_copy() -> None:
    learner = Learner(1)
    assert [learner.do(Lease(sampler, 0)) for sampler in range(4)] == [[0], [], [], []]
    assert [learner.do(Release(sampler, 0, 3)) for sampler in range(4)] == [[1], [2], [3], []]


def test_as_many_copy_at_once_as_may() -> None:
    learner = Learner(2)
    assert [learner.do(Lease(sampler, 0)) for sampler in range(4)] == [[0], [1], [], []]
    assert learner.do(Release(1, 0, 3)) == [2]
    assert learner.do(Release(0, 0, 3)) == [3]


def test_without_a_limit_nobody_waits() -> None:
    learner = Learner(None)
    assert [learner.do(Lease(sampler, 0)) for sampler in range(4)] == [[0], [1], [2], [3]]


def test_a_turn_is_not_kept_by_one_that_does_something_else() -> None:
    learner = Learner(1)
    assert learner.do(Lease(0, 0)) == [0]
    assert learner.do(Lease(1, 0)) == []
    assert learner.do(Lease(2, 0)) == []
    assert learner.wait(0.9 * TURN_S) == []
    assert learner.wait(0.1 * TURN_S) == [1], "one more, not everybody"
    assert learner.core.lease_holders == [0, 1], "its lease is still out: nobody may write"
    assert learner.wait(TURN_S) == [2]


@pytest.mark.parametrize("at_fault", [False, True])
def test_a_turn_is_not_kept_by_the_dead(at_fault: bool) -> None:
    learner = Learner(1)
    assert learner.do(Lease(0, 0)) == [0]
    assert learner.do(Lease(1, 0)) == []
    if at_fault:
        wrong = learner.core.handle(WeightsLoaded(0, 0, 3, 1), learner.now_s)
        assert [type(each) for each in wrong] == [AtFault, ToSampler]
        assert learner.core.lease_holders == [0, 1]
    else:
        assert learner.do(WeightsHello(0, 1)) == [1]


def test_a_writer_does_not_wait_for_those_whose_turn_has_not_come() -> None:
    learner = Learner(1)
    for sampler in range(4):
        learner.do(Lease(sampler, 0))
    assert learner.core.handle(RequestWrite(), learner.now_s) == []
    assert learner.core.handle(Release(0, 0, 3), learner.now_s) == [BufferFree()]
    assert learner.do(WriteDone(4, 1004)) == [1], "and then the newest version is granted"
