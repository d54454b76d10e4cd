"""The canary: who is near, who has moved, and what is said of one that is not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, inf, log, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_node.core.probe import (
    CANARY_TOKENS,
    DECODED_TOKENS,
    Answer,
    Probe,
    decodes_at,
    find_stale,
    make_probe,
)

PROBE = Probe((9, 5, 6, 7), 0.01)
BEFORE = Answer(3, (-1.0, -2.0, -3.0), (-1.001, -2.001, -3.001))


def answer(*gaps: float, moved: float = -1.0) -> Answer:
    learner = tuple(score + moved for score in BEFORE.learner)
    return Answer(4, learner, tuple(s + gap for s, gap in zip(learner, gaps, strict=True)))


@given(vocab_size=st.integers(1, 300_000), max_tokens=st.integers(-1, 100))
def test_the_canary_is_of_the_vocabulary_and_fits(vocab_size: int, max_tokens: int) -> None:
    probe = make_probe(vocab_size, max_tokens, 0.5)
    assert (probe is None) == (max_tokens < 2)
    if probe is None:
        return
    assert 2 <= len(probe.tokens) <= CANARY_TOKENS
    assert len(probe.tokens) + probe.num_decoded == min(CANARY_TOKENS + DECODED_TOKENS, max_tokens)
    assert all(0 <= token < vocab_size for token in probe.tokens)
    assert probe == make_probe(vocab_size, max_tokens, 0.5)


@pytest.mark.parametrize("vocab_size", [128, 32_000, 151_936])
def test_the_canary_spreads_over_the_vocabulary(vocab_size: int) -> None:
    probe = make_probe(vocab_size, 100, 0.5)
    assert probe is not None
    tokens = sorted(probe.tokens)
    gaps = [b - a for a, b in zip([0, *tokens], [*tokens, vocab_size], strict=True)]
    assert len(set(tokens)) == CANARY_TOKENS
    assert max(gaps) <= 4 * vocab_size / CANARY_TOKENS


def test_rounding_is_near() -> None:
    assert find_stale(PROBE, answer(0.0099, -0.005, 0.0), BEFORE) is None
    assert find_stale(PROBE, answer(0.0, 0.0, 0.0), None) is None


def test_the_worst_token_is_named() -> None:
    story = find_stale(PROBE, answer(0.001, -0.5, 0.0), BEFORE)
    assert story == (
        "its scores of the canary differ from the learner's by 5.00e-01 at most and 1.67e-01 on "
        "average, where the limit is 0.01; worst: token 6 at place 2: sampler -3.500000, learner "
        "-3.000000"
    )


def test_answers_of_the_version_before_are_recognised() -> None:
    stale = Answer(4, tuple(score - 1.0 for score in BEFORE.learner), BEFORE.sampler)
    story = find_stale(PROBE, stale, BEFORE)
    assert story is not None
    assert story.endswith("; they are those of version 3")
    assert "those of version" not in str(find_stale(PROBE, stale, None))


@pytest.mark.parametrize("broken", [nan, inf, -inf])
def test_what_is_no_number_is_never_near(broken: float) -> None:
    assert find_stale(PROBE._replace(limit=1e9), answer(0.0, broken, 0.0), BEFORE) is not None


@pytest.mark.parametrize("scores", [(), (-1.0,), (-1.0,) * 4])
def test_a_canary_that_was_not_scored_is_not_near(scores: tuple[float, ...]) -> None:
    story = find_stale(PROBE, Answer(4, BEFORE.learner, scores), BEFORE)
    assert story == f"it scored {len(scores)} tokens of the canary instead of 3"


def test_a_canary_must_move_if_most_of_the_learners_has() -> None:
    """Within the limit, so that only this rule can see it."""
    wide = PROBE._replace(limit=10.0)
    stale = Answer(4, (-1.1, -2.1, -3.0), BEFORE.sampler)
    story = find_stale(wide, stale, BEFORE)
    assert story is not None
    assert "bit for bit those it gave under version 3, while 2 of the learner's 3" in story
    assert find_stale(wide, stale, None) is None, "its first load"
    one = Answer(4, (-1.1, -2.0, -3.0), BEFORE.sampler)
    assert find_stale(wide, one, BEFORE) is None, "rounding may hide a move of few tokens"
    moved = Answer(4, stale.learner, (-1.001, -2.001, -3.0010000001))
    assert find_stale(wide, moved, BEFORE) is None


def decoding(*gaps: float) -> Answer:
    """The canary is right; the tokens decoded after it differ from their scores by `gaps`."""
    right = answer(0.0, 0.0, 0.0)
    scored = tuple(-2.0 - i for i in range(len(gaps)))
    decoded = tuple(score + gap for score, gap in zip(scored, gaps, strict=True))
    return right._replace(sampler=right.sampler + scored, decoded=decoded)


def test_what_is_decoded_must_be_what_is_scored() -> None:
    probe = PROBE._replace(num_decoded=2)
    assert find_stale(probe, decoding(0.0099, -0.005), BEFORE) is None
    assert find_stale(probe, decoding(0.0, -0.25), None) == (
        "it decodes otherwise than it scores: 2 tokens that it decoded after the canary differ by "
        "0.00e+00, 2.50e-01 from its own scores of them, where the limit is 0.01"
    )
    assert find_stale(probe, decoding(nan, 0.0), BEFORE) is not None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_canary_that_was_not_decoded_on_is_refused(count: int) -> None:
    story = find_stale(PROBE._replace(num_decoded=2), decoding(*[0.0] * count), BEFORE)
    assert story == f"it decoded {count} tokens after the canary instead of 2"


def test_decoding_is_tried_at_the_first_two_loads_and_then_now_and_again() -> None:
    probe = PROBE._replace(num_decoded=2)
    asked = [decodes_at(probe, loads).num_decoded for loads in range(18)]
    assert [load for load, count in enumerate(asked) if count] == [0, 1, 8, 16]
    assert {decodes_at(probe, loads)._replace(num_decoded=2) for loads in range(18)} == {probe}


def test_what_was_decoded_does_not_hide_a_canary_that_has_not_moved() -> None:
    """The tokens after it are drawn anew, so they alone may move."""
    wide = PROBE._replace(limit=10.0, num_decoded=1)
    before = BEFORE._replace(sampler=(*BEFORE.sampler, -4.0), decoded=(-4.0,))
    stale = Answer(4, (-1.1, -2.1, -3.0), (*BEFORE.sampler, -5.0), (-5.0,))
    assert "bit for bit" in str(find_stale(wide, stale, before))
    near = wide._replace(limit=0.05)
    assert "they are those of version 3" in str(find_stale(near, stale, before))


def test_a_rare_token_may_be_off_in_proportion() -> None:
    """-12 is three times CANARY_NATS; whichever of the two is likelier counts."""
    learner = (-12.0, -4.0, -1.0)
    for far, near in ((-12.029, -12.031), (-11.972, -11.969)):
        assert find_stale(PROBE, Answer(4, learner, (far, -4.0, -1.0)), None) is None
        assert find_stale(PROBE, Answer(4, learner, (near, -4.0, -1.0)), None) is not None
    assert find_stale(PROBE, Answer(4, learner, (-12.0, -4.011, -1.0)), None) is not None
    assert find_stale(PROBE, Answer(4, learner, (-1.0, -4.0, -1.0)), None) is not None


def test_the_canary_goes_where_much_is_possible() -> None:
    """After 7 anything goes, after any other token it is certain what comes: the next number."""
    size = 10

    def next_logprobs(tokens: Sequence[int]) -> list[float]:
        last = tokens[-1]
        if last == 7:
            return [-log(size)] * size
        rare = [-2.0 if token == 7 else -50.0 for token in range(size)]
        rare[(last + 1) % size] = log(1 - exp(-2.0))
        return rare

    probe = make_probe(size, 20, 0.5, next_logprobs)
    assert probe is not None
    assert all(7 in pair for pair in pairwise(probe.tokens))
    assert probe == make_probe(size, 20, 0.5, next_logprobs)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=9))
def test_a_canary_is_made_of_whatever_the_learner_says(logprobs: list[float]) -> None:
    """Broken weights are the learner's to name, when it scores what was made here."""
    probe = make_probe(len(logprobs), 20, 0.5, lambda tokens: logprobs)
    assert probe is not None
    assert all(0 <= token < len(logprobs) for token in probe.tokens)
