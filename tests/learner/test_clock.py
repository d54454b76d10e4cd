"""The learner's seconds: each has one cause, and the causes sum to the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_node.inspect import advice
from asyncrl_node.learner.clock import CAUSES, Cause, CauseClock


class Hands:
    """A clock that moves when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hands() -> Hands:
    return Hands()


def spend(clock: CauseClock, hands: Hands, cause: Cause, seconds: float) -> None:
    with clock.cause(cause):
        hands.now_s += seconds


def test_each_second_has_one_cause(hands: Hands) -> None:
    clock = CauseClock(hands)
    spend(clock, hands, "waiting_for_fill", 2.0)
    spend(clock, hands, "train", 5.0)
    hands.now_s += 0.5
    spend(clock, hands, "train", 1.0)
    spend(clock, hands, "publish", 0.25)
    assert clock.row() == {
        "time/train": 6.0,
        "time/publish": 0.25,
        "time/waiting_for_fill": 2.0,
        "time/waiting_for_stragglers": 0.0,
        "time/eval": 0.0,
        "time/checkpoint": 0.0,
        "time/other": 0.5,
        "time/total": 8.75,
    }


def test_a_row_starts_anew_where_the_last_one_ended(hands: Hands) -> None:
    clock = CauseClock(hands)
    spend(clock, hands, "train", 3.0)
    clock.row()
    hands.now_s += 1.0
    spend(clock, hands, "eval", 2.0)
    row = clock.row()
    assert (row["time/train"], row["time/eval"], row["time/other"]) == (0.0, 2.0, 1.0)
    assert row["time/total"] == 3.0


def test_time_inside_an_error_is_counted(hands: Hands) -> None:
    clock = CauseClock(hands)

    def save() -> None:
        hands.now_s += 4.0
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), clock.cause("checkpoint"):
        save()
    assert clock.row()["time/checkpoint"] == 4.0


def test_waiting_is_moved_to_stragglers_and_never_more_than_there_was(hands: Hands) -> None:
    clock = CauseClock(hands)
    spend(clock, hands, "waiting_for_fill", 3.0)
    clock.move("waiting_for_fill", "waiting_for_stragglers", 1.0)
    clock.move("waiting_for_fill", "waiting_for_stragglers", 100.0)
    row = clock.row()
    assert row["time/waiting_for_fill"] == 0.0
    assert row["time/waiting_for_stragglers"] == 3.0
    assert row["time/other"] == 0.0


def test_the_causes_are_those_that_advice_reads() -> None:
    assert {*CAUSES, "other"} == set(advice.CAUSES)


causes = st.sampled_from(CAUSES)
seconds = st.floats(0, 1e5)
moments = st.one_of(
    st.tuples(st.just("spend"), causes, causes, seconds),
    st.tuples(st.just("idle"), causes, causes, seconds),
    st.tuples(st.just("move"), causes, causes, seconds),
    st.tuples(st.just("row"), causes, causes, seconds),
)


@settings(max_examples=200)
@given(history=st.lists(moments, max_size=40))
def test_causes_sum_to_the_total_and_rows_to_the_run(
    history: list[tuple[str, Cause, Cause, float]],
) -> None:
    hands = Hands()
    clock = CauseClock(hands)
    rows = []
    for moment, cause, other, length in history:
        if moment == "spend":
            spend(clock, hands, cause, length)
        elif moment == "idle":
            hands.now_s += length
        elif moment == "move":
            clock.move(cause, other, length)
        else:
            rows.append(clock.row())
    rows.append(clock.row())
    for row in rows:
        parts = [value for name, value in row.items() if name != "time/total"]
        assert sum(parts) == pytest.approx(row["time/total"], abs=1e-6)
        assert min(parts) >= -1e-6
    assert sum(row["time/total"] for row in rows) == pytest.approx(hands.now_s - 1000.0, abs=1e-6)
