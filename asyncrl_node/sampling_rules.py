"""What the learner can match of a sampler's choices: rules, and what becomes of cached keys.

Imports no torch and starts nothing; plan.py calls it.
"""

from __future__ import annotations

from typing import Literal

from asyncrl_node.config import SamplingConfig
from asyncrl_node.core.placement import RecomputePrice
from asyncrl_node.errors import ConfigError

KVAfterUpdate = Literal["recompute", "keep"]

_RENORMALISED = (
    "it leaves a part of the vocabulary out and renormalises the rest, and the learner, which "
    "cannot know that part, would train on other probabilities than those that were sampled"
)
_PENALISED = (
    "it changes logits by what was sampled before, and the learner, which scores all tokens at "
    "once, would train on other probabilities than those that were sampled"
)
_NEUTRAL: dict[str, tuple[tuple[float, ...], str]] = {
    "top_p": ((1.0,), _RENORMALISED),
    "top_k": ((0,), _RENORMALISED),
    "min_p": ((0.0,), _RENORMALISED),
    "presence_penalty": ((0.0,), _PENALISED),
    "frequency_penalty": ((0.0,), _PENALISED),
    "repetition_penalty": ((1.0,), _PENALISED),
}
"""By key: the values that change nothing, and why there is no other."""


def check_sampling(sampling: SamplingConfig, engine: str) -> None:
    """Refuse what would make importance ratios wrong. Raises: ConfigError."""
    for key, (neutral, reason) in _NEUTRAL.items():
        value = getattr(sampling, key)
        if value not in neutral:
            raise ConfigError(f"sampling.{key}", f"must stay {neutral[0]:g}: {reason}", value)
    if sampling.kv_after_update == "keep" and engine != "vllm":
        rule = f"must be recompute with the {engine} engine, which knows no other way"
        raise ConfigError("sampling.kv_after_update", rule, "keep")


def kv_after_update(
    sampling: SamplingConfig, engine: str, on_gpus: bool, price: RecomputePrice | None = None
) -> KVAfterUpdate:
    """What becomes of the keys and values of running rollouts when new weights come.

    As configured; else exact where that is the only way, cheap, or on a CPU. On GPUs, where
    samplers are nearly always full of long contexts, kept unless the forecast `price` is small.
    """
    if sampling.kv_after_update is not None:
        return sampling.kv_after_update
    if engine != "vllm" or not on_gpus:
        return "recompute"
    return "recompute" if price is not None and price.worth_it else "keep"


def kv_words(kind: KVAfterUpdate, price: RecomputePrice | None = None) -> str:
    """Say what it means and costs, in one line."""
    if kind == "recompute":
        if price is not None:
            return f"{price.words}; exact"
        return "recompute: exact; re-prefills the live contexts at each update"
    words = (
        "keep: rollouts under way go on with keys and values of older weights, and their tokens "
        "are counted apart (mismatch/kl_older_kv)"
    )
    return words if price is None else f"{words}; {price.words}"
