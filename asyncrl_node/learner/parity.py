"""The parity gate: before the first update, sampler and learner must score tokens alike.

The first batch holds tokens that were sampled by the very weights they are about to be trained by.
For these the two log-probabilities differ by rounding only; a larger difference means that the two
are not the same model (a stale head, another temperature, another dtype), and every importance
ratio of the run would be wrong by it.
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
    """Collects differences until `check`, which opens or refuses, once."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._open = False
        self._sum = 0.0
        self._count = 0
        self._worst: list[WorstToken] = []

    def add(self, tokens: Tensor, sampler: Tensor, learner: Tensor, groups: list[int]) -> None:
        """Count N tokens sampled by the weights in use; log-probabilities [N], group of each."""
        if self._open or not len(tokens):
            return
        learner = learner.detach()
        differences = (learner - sampler).abs().nan_to_num(nan=inf)
        self._sum += float(differences.sum())
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
        """Open the gate for the rest of the run. Raises: RunFault("parity")."""
        if self._open or not self._count:
            return
        self._open = True
        worst = "; ".join(
            f"token {w.token} of group {w.group}: sampler {w.sampler_logprob:.6f}, learner "
            f"{w.learner_logprob:.6f}"
            for w in self._worst
        )
        highest = self._worst[0].difference
        story = (
            f"log-probabilities of {self._count} tokens under the same weights differ by "
            f"{highest:.2e} at most and {self._sum / self._count:.2e} on average; worst: {worst}"
        )
        log.info("parity gate: %s", story)
        if self._limit is not None and highest > self._limit:
            raise RunFault(
                "parity",
                f"{story}; the limit is {self._limit:g}, and learner.parity_limit raises it "
                "(none switches the gate off)",
            )
