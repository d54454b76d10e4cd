"""What `dtype` means: in which type weights are published, sampled and trained, and how near
sampler and learner must then be.

    masters, gradients, Adam     float32, always
    published, sampled           dtype: the masters rounded to nearest even, one copy
    forward and backward pass    dtype: the masters rounded by the same rule, so the same bits
    logits, log-probabilities    float32, on both sides (vLLM's head_dtype), of dtype inputs

Imports no torch and starts nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from asyncrl_node.config import Config, LearnerConfig

DType = Literal["float32", "bfloat16"]

ITEM_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}


class Limits(NamedTuple):
    """Largest allowed differences of sampler and learner log-probability; None: not checked.

    Those of the gate are per nat (learner/parity.py), the canary's as core/probe.py has it.
    """

    parity: float | None
    """Of one token, before the first update."""
    parity_mean: float | None
    """Of the mean over an update's tokens."""
    probe: float | None
    """Of one token of the canary, after every load."""


DEFAULT_LIMITS: dict[DType, Limits] = {
    "float32": Limits(5e-5, 5e-5, 5e-5),
    "bfloat16": Limits(1.0, 0.03, 0.15),
}
"""What `auto` stands for. In float32 both differ by the order of summation alone. bfloat16 keeps 8
bits of every activation: among thousands of tokens of a sound sampler the furthest is 0.2 to 0.3
per nat away (perf/README.md), a matter of luck, and the mean tells a sound one."""


def dtype_of(config: Config) -> DType:
    """Resolve an unset `dtype`: bfloat16 with GPUs, float32 on a CPU."""
    if config.dtype is not None:
        return config.dtype
    return "bfloat16" if config.gpus else "float32"


def limits_of(learner: LearnerConfig, dtype: DType) -> Limits:
    """Resolve the limits that are `auto`."""
    asked = (learner.parity_limit, learner.parity_mean_limit, learner.probe_limit)
    pairs = zip(asked, DEFAULT_LIMITS[dtype], strict=True)
    return Limits(*(default if value == "auto" else value for value, default in pairs))


def settled_dtype(config: Config) -> Config:
    """Write dtype and limits into the configuration, for every process and for the record."""
    dtype = dtype_of(config)
    limits = limits_of(config.learner, dtype)
    learner = msgspec.structs.replace(
        config.learner,
        parity_limit=limits.parity,
        parity_mean_limit=limits.parity_mean,
        probe_limit=limits.probe,
    )
    return msgspec.structs.replace(config, dtype=dtype, learner=learner)
