"""The parity gate: sampler and learner must score the same tokens alike, under the same weights.

A batch holds tokens that were sampled by the very weights they are about to be trained by. For
these the two log-probabilities differ by rounding only; a larger difference means that the two are
not the same model (a stale head, another temperature, another dtype, a sampler that generates by
weights that it no longer has), and every importance ratio of the run would be wrong by it.

    the first update that holds such tokens     no token may differ by more than the limit
    each later one                              they may not on average: over a whole run some token
                                                of a sound sampler is far, and never all of them
"""

from __future__ import annotations

import heapq
import logging
from math import inf
from typing import NamedTuple

from torch import Tensor

from asyncrl_node.errors import RunFault

log = logging.getLogger(__name__)

_NUM_WORST = 5


class WorstToken(NamedTuple):
    """One token, by how far sampler and learner are apart."""

    difference: float
    group: int
    token: int
    sampler_logprob: float
    learner_logprob: float


class ParityGate:
    """Collects the differences of one update until `check`, which passes or refuses them."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self.report: str | None = None
        """The figures of the first update that was judged; None before."""
        self._reset()

    def _reset(self) -> None:
        self._sum = 0.0
        self._count = 0
        self._worst: list[WorstToken] = []

    def add(self, tokens: Tensor, sampler: Tensor, learner: Tensor, groups: list[int]) -> None:
        """Count N tokens sampled by the weights in use; log-probabilities [N], group of each."""
        if not len(tokens):
            return
        learner = learner.detach()
        differences = (learner - sampler).abs().nan_to_num(nan=inf)
        self._sum += float(differences.double().sum())
        self._count += len(differences)
        for place in differences.topk(min(_NUM_WORST, len(differences))).indices.tolist():
            worst = WorstToken(
                float(differences[place]),
                groups[place],
                int(tokens[place]),
                float(sampler[place]),
                float(learner[place]),
            )
            heapq.heappush(self._worst, worst)
        self._worst = heapq.nlargest(_NUM_WORST, self._worst)

    def check(self) -> None:
        """Judge what was added since the last check; without any token nothing is judged.

        Raises: RunFault("parity"), before the update that these tokens would train.
        """
        if not self._count:
            return
        worst = "; ".join(
            f"token {w.token} of group {w.group}: sampler {w.sampler_logprob:.6f}, learner "
            f"{w.learner_logprob:.6f}"
            for w in self._worst
        )
        is_first = self.report is None
        highest, mean = self._worst[0].difference, self._sum / self._count
        story = (
            f"log-probabilities of {self._count} tokens under the same weights differ by "
            f"{highest:.2e} at most and {mean:.2e} on average; worst: {worst}"
        )
        judged, what = (highest, "largest") if is_first else (mean, "average")
        if is_first:
            limit = "it is off" if self._limit is None else f"limit {self._limit:g}"
            self.report = f"parity gate ({limit}): {story}"
            log.info("%s", self.report)
        self._reset()
        if self._limit is not None and judged > self._limit:
            raise RunFault(
                "parity",
                f"{story}; the limit of the {what} is {self._limit:g}, and learner.parity_limit "
                "raises it (none switches the gate off)",
            )
