"""The canary: a few tokens that a sampler scores after every load, and at times decodes on. Pure.

A hash proves that the bytes arrived; it does not prove that the model computes with them. A tied
head with a stale packed copy or a fused matrix that was not renewed: the copy is right and the
answers are those of old weights (cases.md, case 16). So after each load the sampler scores the
canary, and its answers must be

    near    those of the learner under the same version, within the limit,
    moved   since the version it had before, if the learner's own have, and
    alike   where it decodes and where it scores, within the limit

Its tokens are chosen once, by the first weights: likely ones after which much is possible. Rounding
grows with how unlikely a token is (vLLM in float32 was 1.6e-4 from the learner where one had 2
chances in a million), so one that is rarer than CANARY_NATS, or becomes so, is held to its share of
the limit; and what is certain hardly moves. The second rule needs no limit, so it also holds where
rounding makes a wide one necessary.

Scoring is one forward pass over a prompt; decoding may go by other graphs, caches and packed copies
(a graph captured over old memory answers by old weights for ever, while the prefill is right). So
the sampler decodes some tokens after the canary and scores these too. The learner cannot know which
ones it will draw; it need not, for what it scores is held against the learner by the first rule.
The last of them is not the one drawn but a less likely one, whose log-probability moves with the
weights wherever the model is certain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import exp, fsum, inf, isnan
from typing import NamedTuple

DECODE_EVERY = 8
"""Decoding costs two passes more, so it is tried at the first load, the first update, and then at
every so many loads of a sampler; scoring is tried at each."""

CANARY_LOGPROB = -2.0
"""About this likely is each of its tokens when it is made."""

CANARY_NATS = 4.0
"""A token of log-probability -12 may be off by three times the limit, one above -4 by the limit."""

NUM_CANDIDATES = 4
"""Tokens that are tried at each place; each costs the learner one pass, once."""

CANARY_TOKENS = 8
"""Each one reaches every layer; few, because a sampler acknowledges only after scoring them."""

DECODED_TOKENS = 2
"""The first comes from the prompt's own pass, so one more is the least that shows decoding."""

_NEGLIGIBLE = 40.0
"""A token that is less likely than this many nats adds nothing to an entropy; NaN neither."""

_GOLDEN = 0x9E3779B1
"""2**32 divided by the golden ratio: its multiples spread evenly, however many are taken."""


class Probe(NamedTuple):
    """What is scored, and how near the answers must be."""

    tokens: tuple[int, ...]
    """Each but the first is scored, given those before it."""
    limit: float
    """Largest difference of sampler and learner log-probability."""
    num_decoded: int = 0
    """Tokens decoded after them; 0 where none fits."""


class Answer(NamedTuple):
    """One accepted load: what both sides answered."""

    version: int
    learner: tuple[float, ...]
    sampler: tuple[float, ...]
    """The canary's own tokens, then those decoded after it, scored in one pass."""
    decoded: tuple[float, ...] = ()
    """The latter as they were decoded."""


NextLogprobs = Callable[[Sequence[int]], Sequence[float]]
"""Tokens -> log-probability of every token of the vocabulary as the next one, temperature 1."""


def make_probe(
    vocab_size: int, max_tokens: int, limit: float, next_logprobs: NextLogprobs | None = None
) -> Probe | None:
    """Make the canary of a model, the same in every run that starts from the same weights.

    max_tokens     what a sampler can take as a prompt; fewer than 2 leave nothing to score: None
    next_logprobs  of the first weights; None: ids spread over the vocabulary, however unlikely
    """
    if max_tokens < 2:
        return None
    count = min(CANARY_TOKENS, max(2, max_tokens - DECODED_TOKENS))
    tokens = [(i * _GOLDEN % 2**32) * vocab_size >> 32 for i in range(1, count + 1)]
    if next_logprobs is not None:
        tokens = _most_open(tokens, count, next_logprobs)
    return Probe(tuple(tokens), limit, min(DECODED_TOKENS, max_tokens - count))


def _most_open(firsts: list[int], count: int, next_logprobs: NextLogprobs) -> list[int]:
    """Begin with one of `firsts` and go on with likely tokens, each of NUM_CANDIDATES the one after
    which the next is least certain."""
    tokens: list[int] = []
    candidates = firsts
    while True:
        nexts = [next_logprobs([*tokens, token]) for token in candidates]
        chosen = max(range(len(candidates)), key=lambda place: _entropy(nexts[place]))
        tokens.append(candidates[chosen])
        if len(tokens) == count:
            return tokens
        likely = nexts[chosen]
        candidates = heapq.nsmallest(
            NUM_CANDIDATES,
            range(len(likely)),
            key=lambda token: abs(likely[token] - CANARY_LOGPROB),
        )


def _entropy(logprobs: Sequence[float]) -> float:
    return -fsum(x * exp(x) for x in logprobs if -_NEGLIGIBLE < x <= 0.0)


def decodes_at(probe: Probe, num_loads: int) -> Probe:
    """Say what of the probe a sampler is asked for that has had `num_loads` loads accepted."""
    is_due = num_loads < 2 or num_loads % DECODE_EVERY == 0
    return probe if is_due else probe._replace(num_decoded=0)


def find_stale(probe: Probe, answer: Answer, before: Answer | None) -> str | None:
    """Say what is wrong with a sampler's answer; None if nothing is.

    before  the load before this one, of the same sampler process
    """
    wanted, num_decoded = len(answer.learner), len(answer.decoded)
    if num_decoded != probe.num_decoded:
        return f"it decoded {num_decoded} tokens after the canary instead of {probe.num_decoded}"
    if len(answer.sampler) != wanted + num_decoded:
        return (
            f"it scored {len(answer.sampler)} tokens of the canary instead of "
            f"{wanted + num_decoded}"
        )
    far = _find_far(probe, answer, before) or _find_unlike(probe, answer)
    if far is not None or before is None:
        return far
    moved = sum(a != b for a, b in zip(answer.learner, before.learner, strict=True))
    if 2 * moved > wanted and answer.sampler[:wanted] == before.sampler[:wanted]:
        return (
            f"its scores of the canary are bit for bit those it gave under version "
            f"{before.version}, while {moved} of the learner's {wanted} have moved"
        )
    return None


def _find_far(probe: Probe, answer: Answer, before: Answer | None) -> str | None:
    gaps = _gaps(answer.sampler[: len(answer.learner)], answer.learner)
    highest = max(gaps)
    if highest <= probe.limit:
        return None
    place = gaps.index(highest)
    story = (
        f"its scores of the canary differ from the learner's by {highest:.2e} at most and "
        f"{fsum(gaps) / len(gaps):.2e} on average, where the limit is {probe.limit:g}; worst: "
        f"token {probe.tokens[place + 1]} at place {place + 1}: sampler "
        f"{answer.sampler[place]:.6f}, learner {answer.learner[place]:.6f}"
    )
    if before is None:
        return story
    if max(_gaps(answer.sampler[: len(before.learner)], before.learner)) <= probe.limit:
        story += f"; they are those of version {before.version}"
    return story


def _find_unlike(probe: Probe, answer: Answer) -> str | None:
    gaps = _gaps(answer.decoded, answer.sampler[len(answer.learner) :])
    if max(gaps, default=0.0) <= probe.limit:
        return None
    return (
        f"it decodes otherwise than it scores: {len(gaps)} tokens that it decoded after the canary "
        f"differ by {', '.join(f'{gap:.2e}' for gap in gaps)} from its own scores of them, where "
        f"the limit is {probe.limit:g}"
    )


def _gaps(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Differences, each over what CANARY_NATS allows it; one that is no number is infinite."""
    pairs = list(zip(ours, theirs, strict=True))
    gaps = [abs(a - b) / max(1.0, min(abs(a), abs(b)) / CANARY_NATS) for a, b in pairs]
    return [inf if isnan(gap) else gap for gap in gaps]
