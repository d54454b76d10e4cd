"""The parity gate: sampler and learner must score the same tokens alike, under the same weights.

A batch holds tokens that were sampled by the very weights they are about to be trained by. For
these the two log-probabilities differ by rounding only; a larger difference means that the two are
not the same model (a stale head, another temperature, another dtype, a sampler that generates by
weights that it no longer has), and every importance ratio of the run would be wrong by it.

Differences are per nat: over max(1, |log-probability|), the likelier of the two, since a rare
token's is rounded coarser.

    the first update that holds such tokens    none may differ by more than the limit, nor may they
                                               on average by more than mean_limit
    later ones, as LEAST_TOKENS have come      nor may those on average; none is judged alone: over
    together                                   a whole run some token of a sound sampler is far, and
                                               never all of them

At pipeline_depth 1 and more most batches hold no such token, or a few right after an update; what
goes wrong between is the canary's to find (core/probe.py).
"""

from __future__ import annotations

import heapq
import logging
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl_node.errors import RunFault

log = logging.getLogger(__name__)

LEAST_TOKENS = 256
"""A mean over a few tokens of a sound sampler may be anything, in bfloat16."""

_NUM_WORST = 5


class WorstToken(NamedTuple):
    """One token, by how far sampler and learner are apart."""

    per_nat: float
    group: int
    token: int
    sampler_logprob: float
    learner_logprob: float


class ParityGate:
    """Collects the differences of one update until `check`, which passes or refuses them."""

    def __init__(self, limit: float | None, mean_limit: float | None) -> None:
        """See learner.parity_limit and parity_mean_limit; None: not judged."""
        self._limit = limit
        self._mean_limit = mean_limit
        self.report: str | None = None
        """The figures of the first update that was judged; None before."""
        self._reset()

    def _reset(self) -> None:
        self._sum = self._per_nat_sum = self._largest = 0.0
        self._count = 0
        self._worst: list[WorstToken] = []

    def add(self, tokens: Tensor, sampler: Tensor, learner: Tensor, groups: list[int]) -> None:
        """Count N tokens sampled by the weights in use; log-probabilities [N], group of each."""
        if not len(tokens):
            return
        learner = learner.detach()
        differences = (learner - sampler).abs().nan_to_num(nan=inf)
        nats = torch.minimum(learner.abs(), sampler.abs()).clamp(min=1.0)
        per_nat = (differences / nats).nan_to_num(nan=inf)
        self._sum += float(differences.double().sum())
        self._per_nat_sum += float(per_nat.double().sum())
        self._largest = max(self._largest, float(differences.max()))
        self._count += len(differences)
        for place in per_nat.topk(min(_NUM_WORST, len(per_nat))).indices.tolist():
            worst = WorstToken(
                float(per_nat[place]),
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
        if not self._count or (self.report is not None and self._count < LEAST_TOKENS):
            return
        worst = "; ".join(
            f"token {w.token} of group {w.group}: sampler {w.sampler_logprob:.6f}, learner "
            f"{w.learner_logprob:.6f}"
            for w in self._worst
        )
        highest, mean = self._worst[0].per_nat, self._per_nat_sum / self._count
        story = (
            f"log-probabilities of {self._count} tokens under the same weights differ by "
            f"{self._largest:.2e} at most and {self._sum / self._count:.2e} on average, per nat by "
            f"{highest:.2e} and {mean:.2e}; worst: {worst}"
        )
        rules = [("average", mean, self._mean_limit, "parity_mean_limit")]
        if self.report is None:
            rules.insert(0, ("largest", highest, self._limit, "parity_limit"))
            limits = ["off" if limit is None else f"{limit:g}" for *_, limit, _ in rules]
            self.report = f"parity gate (limits {' and '.join(limits)}): {story}"
            log.info("%s", self.report)
        self._reset()
        for what, judged, limit, key in rules:
            if limit is not None and judged > limit:
                raise RunFault(
                    "parity",
                    f"{story}; the limit of the {what} per nat is {limit:g}, and learner.{key} "
                    "raises it (none switches it off)",
                )
