"""Slow float64 versions of every loss, one token at a time, written from the papers' formulas.

They share nothing with asyncrl_node.learner.losses. Where a formula says "without gradient", the
value is taken at `frozen` instead of `new`: differences of an oracle in `new`, at fixed `frozen`,
are the gradient that the loss should have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from asyncrl_node.learner.losses.base import LossInput
from asyncrl_node.learner.losses.settings import LossSettings


@dataclass
class Case:
    """Tokens as plain float64 arrays."""

    lengths: list[int]
    new: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    staleness: np.ndarray
    proximal: np.ndarray
    limit: float = 0.35
    settings: LossSettings = field(default_factory=LossSettings)

    def rollout_of(self) -> list[int]:
        return [place for place, length in enumerate(self.lengths) for _ in range(length)]

    def tensors(self, dtype=torch.float64) -> LossInput:
        def tensor(values):
            return torch.tensor(values, dtype=dtype)

        return LossInput(
            logprobs=tensor(self.new).requires_grad_(),
            sampler_logprobs=tensor(self.old),
            advantages=tensor(self.advantages),
            rollout_index=torch.tensor(self.rollout_of(), dtype=torch.int64),
            num_rollouts=len(self.lengths),
            staleness=torch.tensor(self.staleness),
            entropies=torch.ones(len(self.new), dtype=dtype),
            proximal_logprobs=tensor(self.proximal),
            reference_logprobs=tensor(self.proximal),
            log_ratio_limit=self.limit,
        )


def random_case(lengths, seed, spread=0.4, per_token=False, settings=None) -> Case:
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    old = -rng.exponential(1.5, count)
    signs = rng.normal(0, 1, count if per_token else len(lengths))
    signs = signs * (rng.random(len(signs)) < 0.85)
    return Case(
        lengths=list(lengths),
        new=old + rng.normal(0, spread, count),
        old=old,
        advantages=signs if per_token else np.repeat(signs, lengths),
        staleness=rng.integers(0, 9, count),
        proximal=old + rng.normal(0, spread / 2, count),
        settings=settings or LossSettings(),
    )


def clip_term(ratio, advantage, low, high, dual=None):
    """min(r A, clip(r) A), never below dual * A for a negative A; by cases, not by min and max."""
    if advantage > 0:
        return (high if ratio > high else ratio) * advantage
    ratio = low if ratio < low else ratio
    if dual is not None and ratio > dual:
        ratio = dual
    return ratio * advantage


def importance_sampling(case, new, frozen):
    return [-math.exp(n - o) * a for n, o, a in zip(new, case.old, case.advantages, strict=True)]


def ppo(case, new, frozen):
    s = case.settings
    return [
        -clip_term(math.exp(n - o), a, 1 - s.clip_low, 1 + s.clip_high, s.dual_clip)
        for n, o, a in zip(new, case.old, case.advantages, strict=True)
    ]


def cispo(case, new, frozen):
    losses = []
    for n, f, o, a in zip(new, frozen, case.old, case.advantages, strict=True):
        weight = math.exp(f - o)
        weight = case.settings.ratio_cap if weight > case.settings.ratio_cap else weight
        weight = case.settings.ratio_floor if weight < case.settings.ratio_floor else weight
        losses.append(-weight * a * n)
    return losses


def gspo(case, new, frozen):
    s, owners = case.settings, case.rollout_of()
    losses = []
    for token, owner in enumerate(owners):
        members = [place for place, other in enumerate(owners) if other == owner]
        mean = sum(frozen[m] - case.old[m] for m in members) / len(members)
        ratio = math.exp(mean) * math.exp(new[token]) / math.exp(frozen[token])
        a = case.advantages[token]
        losses.append(-clip_term(ratio, a, 1 - s.clip_low, 1 + s.clip_high, s.dual_clip))
    return losses


def gspo_sequence(case, new, frozen):
    """The paper's own form: one loss per rollout with tokens; A is the rollout's first."""
    s, owners = case.settings, case.rollout_of()
    losses = []
    for owner in sorted(set(owners)):
        members = [place for place, other in enumerate(owners) if other == owner]
        ratio = math.exp(sum(new[m] - case.old[m] for m in members) / len(members))
        a = case.advantages[members[0]]
        losses.append(-clip_term(ratio, a, 1 - s.clip_low, 1 + s.clip_high, s.dual_clip))
    return losses


def behaviour_weight(weight, s):
    if s.weight_correction == "off":
        return weight
    if s.weight_low <= weight <= s.weight_high:
        return weight
    if s.weight_correction == "mask":
        return 0.0
    return s.weight_low if weight < s.weight_low else s.weight_high


def decoupled(case, new, proximal):
    s = case.settings
    losses = []
    for n, o, p, a in zip(new, case.old, proximal, case.advantages, strict=True):
        surrogate = clip_term(math.exp(n - p), a, 1 - s.clip_low, 1 + s.clip_high, s.dual_clip)
        losses.append(-behaviour_weight(math.exp(p - o), s) * surrogate)
    return losses


def decoupled_ppo(case, new, frozen):
    return decoupled(case, new, case.proximal)


def a3po(case, new, frozen):
    """alpha log b + (1 - alpha) log l with alpha = 1 at d = 0 and 1 / d otherwise."""
    proximal = []
    for f, o, d in zip(frozen, case.old, case.staleness, strict=True):
        alpha = 1.0 if d == 0 else 1.0 / d
        proximal.append(alpha * o + (1.0 - alpha) * f)
    return decoupled(case, new, proximal)


def m2po(case, new, frozen):
    s = case.settings
    low = min(1 - s.clip_low, math.exp(-case.limit))
    high = max(1 + s.clip_high, math.exp(case.limit))
    return [
        -clip_term(math.exp(n - o), a, low, high, s.dual_clip)
        for n, o, a in zip(new, case.old, case.advantages, strict=True)
    ]


def m2po_limit(case, budget):
    """Bisect for the largest t with mean(min(x^2, t^2)) <= budget over tokens pushing outwards."""
    squares = []
    for n, o, a in zip(case.new, case.old, case.advantages, strict=True):
        if (a > 0 and n > o) or (a < 0 and n < o):
            squares.append((n - o) ** 2)
    if not squares or sum(squares) <= budget * len(squares):
        return math.inf
    low, high = 0.0, max(squares)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(min(square, middle) for square in squares) <= budget * len(squares):
            low = middle
        else:
            high = middle
    return math.sqrt(low)


ORACLES = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "decoupled_ppo": decoupled_ppo,
    "a3po": a3po,
    "m2po": m2po,
}


def gradient(case, oracle, step=1e-6) -> np.ndarray:
    """d (sum of losses) / d new, by differences at fixed `frozen`; NaN within a step of a kink."""
    grads = np.zeros(len(case.new))
    here = sum(oracle(case, case.new, case.new))
    for token in range(len(case.new)):
        slopes = []
        for sign in (1, -1):
            moved = case.new.copy()
            moved[token] += sign * step
            slopes.append((sum(oracle(case, moved, case.new)) - here) / (sign * step))
        smooth = abs(slopes[0] - slopes[1]) < 1e-3
        grads[token] = sum(slopes) / 2 if smooth else math.nan
    return grads


def assert_gradient(grad, case, oracle) -> None:
    """The gradient equals differences of the oracle, but for at most one token on a kink."""
    expected = gradient(case, oracle)
    kinks = np.isnan(expected)
    assert kinks.sum() <= 1
    np.testing.assert_allclose(grad[~kinks], expected[~kinks], atol=1e-6)
