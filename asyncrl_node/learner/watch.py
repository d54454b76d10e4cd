"""A watch over the steps' metrics that says when a known collapse begins, and the known cure.

Off-policy training of language models fails in a known way: importance ratios grow a tail, the
sampler-learner divergence follows within a few steps, entropy leaves its band, and the reward that
had risen falls to nothing. The limits lie between what was measured on healthy runs and on runs
that failed: the demo's task, 100 steps, 3 seeds each (tests/learner/watch_series.json has some of
the series and their commands).

    run                                    reward at the end   KL        ratio/max, largest
    ppo, lr 3e-4, staleness 1              .96 - .98           .004      4
    ppo, lr 3e-4, depth 8                  .92 - .94           .07-.12   90
    importance_sampling, lr 3e-4, depth 8  .70 - .85           .43-.58   163 - 785
    ppo, lr 1e-3, depth 8 (2 seeds)        .54 - .71           .9-1.1    1069 - 1882
    importance_sampling, lr 1e-3, depth 8  .00                 2.1-3.1   2660 - 10100

    (KL: the largest median of 5 steps of mismatch/kl_stale, in nats per token. In these runs the
    tokens of older_kv were none: samplers recomputed keys and values.)

    kl       median of the last 5 steps at 0.2 or more, over all tokens that the weights in use have
             not sampled: mismatch/kl_stale and mismatch/kl_older_kv, weighted by their tokens
    ratio    above 100 in 2 of the last 10 steps
    entropy  median of the last 5 steps below half of where it began, and the reward no better than
             where it began; or above twice where it began

An alarm is a likelihood, not a verdict. On 22 further runs that the limits were not chosen on
(a3po, cispo, decoupled_ppo, gspo, m2po, ppo at depth 8; others at depth 1), the 13 that raised one
ended at a held-out reward of .25 to .95, median .83; the 9 that did not at .85 to .96, median .94.
What it cannot see: ppo at lr 1e-3 and staleness 1 ended at .81 without one.

A falling entropy alone is no alarm: a policy that gets better becomes sure of itself. The largest
ratio grows with the number of tokens in a step, so on much larger batches "ratio" speaks earlier.

Pure: no clock, no files. It warns once per name, and again after it has been calm for 10 steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

KL_LIMIT = 0.2
"""Nats per token."""
RATIO_LIMIT = 100.0
RATIO_STEPS = 2
ENTROPY_LOW, ENTROPY_HIGH = 0.5, 2.0
"""Of the first steps' median."""
MEDIAN_STEPS = 5
CALM_STEPS = 10

_CURE = (
    "clip on both sides (loss ppo or gspo), halve learner.learning_rate, or bound staleness "
    "tighter (pacing.max_steps_off_policy, pacing.pipeline_depth)"
)


class Alarm(NamedTuple):
    """One beginning of a known collapse."""

    name: str
    """kl, ratio or entropy."""
    story: str
    """What was seen, against which limit, and the way out; one line."""


class CollapseWatch:
    """Observes the metrics of one run's training steps in order."""

    def __init__(self) -> None:
        self._kl: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._ratios: deque[float] = deque(maxlen=CALM_STEPS)
        self._entropies: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._rewards: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._start: tuple[float, float] | None = None
        self._calm: dict[str, int] = {}

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """Take a step's metrics row; returns what begins to go wrong with it.

        Reads mismatch/kl_* and num_tokens_* of stale and older_kv (a KL may be None where there
        was no such token), ratio/max, entropy/mean and reward/trained_mean.
        """
        self._kl.append(_drift(metrics))
        self._ratios.append(metrics["ratio/max"] or 0.0)
        self._entropies.append(metrics["entropy/mean"] or 0.0)
        self._rewards.append(metrics["reward/trained_mean"] or 0.0)
        if len(self._entropies) < MEDIAN_STEPS:
            return []
        if self._start is None:
            self._start = (median(self._entropies), median(self._rewards))
        stories = {"kl": self._see_kl(), "ratio": self._see_ratio(), "entropy": self._see_entropy()}
        return [
            Alarm(name, f"step {step}: {story}; {_CURE}")
            for name, story in stories.items()
            if self._is_news(name, story)
        ]

    def _see_kl(self) -> str:
        middle = median(self._kl)
        if middle < KL_LIMIT:
            return ""
        return (
            f"sampler and learner differ by {middle:.2g} nats per stale token (median of "
            f"{MEDIAN_STEPS} steps, limit {KL_LIMIT}): the policy moves faster than its data"
        )

    def _see_ratio(self) -> str:
        beyond = sum(ratio > RATIO_LIMIT for ratio in self._ratios)
        if beyond < RATIO_STEPS:
            return ""
        return (
            f"importance ratios up to {max(self._ratios):.3g} in {beyond} of the last "
            f"{len(self._ratios)} steps (limit {RATIO_LIMIT:.0f}): single tokens carry the gradient"
        )

    def _see_entropy(self) -> str:
        assert self._start is not None
        first, first_reward = self._start
        now, reward = median(self._entropies), median(self._rewards)
        if now > ENTROPY_HIGH * first:
            return f"entropy rose from {first:.2g} to {now:.2g}: the policy dissolves"
        if now < ENTROPY_LOW * first and reward <= first_reward:
            return (
                f"entropy fell from {first:.2g} to {now:.2g} and the reward did not rise "
                f"({first_reward:.2g} to {reward:.2g}): the policy settles on something useless"
            )
        return ""

    def _is_news(self, name: str, story: str) -> bool:
        """Remember how long a name has been calm; true where it speaks after a calm."""
        calm = self._calm.get(name, CALM_STEPS)
        self._calm[name] = 0 if story else calm + 1
        return bool(story) and calm >= CALM_STEPS


def _drift(metrics: Mapping[str, float | None]) -> float:
    """KL per token of all that the weights in use have not sampled; 0 without any."""
    total = tokens = 0.0
    for population in ("stale", "older_kv"):
        count = metrics[f"mismatch/num_tokens_{population}"] or 0.0
        total += count * (metrics[f"mismatch/kl_{population}"] or 0.0)
        tokens += count
    return total / tokens if tokens else 0.0
