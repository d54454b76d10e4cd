"""The canary: a few fixed tokens that learner and sampler score after every load. Pure.

A hash proves that the bytes arrived; it does not prove that the model computes with them. A tied
head with a stale packed copy or a fused matrix that was not renewed: the copy is right and the
answers are those of old weights (cases.md, case 16). So after each load the sampler scores the
canary, and its answers must be

    near    those of the learner under the same version, within the limit, and
    moved   since the version it had before, if the learner's own have

The second rule needs no limit, so it also holds where rounding makes a wide one necessary.

Scoring is one forward pass over a prompt. What is wrong with decoding alone (a graph captured over
other memory) it does not see; the parity gate does, at the next update that trains tokens of the
weights in use (learner/parity.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, inf, isnan
from typing import NamedTuple

CANARY_TOKENS = 8
"""Each one reaches every layer; few, because a sampler acknowledges only after scoring them."""

_GOLDEN = 0x9E3779B1
"""2**32 divided by the golden ratio: its multiples spread evenly, however many are taken."""


class Probe(NamedTuple):
    """What is scored, and how near the answers must be."""

    tokens: tuple[int, ...]
    """Each but the first is scored, given those before it."""
    limit: float
    """Largest difference of sampler and learner log-probability."""


class Answer(NamedTuple):
    """One accepted load: what both sides answered."""

    version: int
    learner: tuple[float, ...]
    sampler: tuple[float, ...]


def canary_tokens(vocab_size: int, max_tokens: int) -> tuple[int, ...]:
    """Make the canary of a model: ids spread over its vocabulary, the same in every run.

    max_tokens  what a sampler can take as a prompt; fewer than 2 leave nothing to score: ()
    """
    count = min(CANARY_TOKENS, max_tokens)
    if count < 2:
        return ()
    return tuple((i * _GOLDEN % 2**32) * vocab_size >> 32 for i in range(1, count + 1))


def find_stale(probe: Probe, answer: Answer, before: Answer | None) -> str | None:
    """Say what is wrong with a sampler's answer; None if nothing is.

    before  the load before this one, of the same sampler process
    """
    wanted = len(answer.learner)
    if len(answer.sampler) != wanted:
        return f"it scored {len(answer.sampler)} tokens of the canary instead of {wanted}"
    far = _find_far(probe, answer, before)
    if far is not None or before is None:
        return far
    moved = sum(a != b for a, b in zip(answer.learner, before.learner, strict=True))
    if 2 * moved > wanted and answer.sampler == before.sampler:
        return (
            f"its scores of the canary are bit for bit those it gave under version "
            f"{before.version}, while {moved} of the learner's {wanted} have moved"
        )
    return None


def _find_far(probe: Probe, answer: Answer, before: Answer | None) -> str | None:
    gaps = _gaps(answer.sampler, answer.learner)
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
    if before is not None and max(_gaps(answer.sampler, before.learner)) <= probe.limit:
        story += f"; they are those of version {before.version}"
    return story


def _gaps(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Absolute differences; one that is no number is infinite."""
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return [inf if isnan(gap) else gap for gap in gaps]
