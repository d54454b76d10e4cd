"""Drawing tokens from a distribution, so that a request's tokens do not depend on its company.

Sampling inverts the cumulative distribution at one uniform number per token, a pure function of
(seed, position of the token). It does not depend on the batch; the logits do, by rounding (about
1e-7 in float32: the matrix kernels choose their order of summation by the number of rows). So two
runs in different company give the same tokens unless a uniform number falls into such a gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def sample_tokens(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution; return tokens [n, 1] int64 and logprobs [n, 1] float32.

    logits    [n, vocabulary] float32, already divided by the temperature
    uniforms  [n, 1] float64, at most 1 - 2**-52

    The sum runs in float64, and `uniforms` is scaled by its last term, so a product never reaches
    that term: the token picked exists and has a probability above zero.
    """
    logprobs = logits.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    tokens.clamp_(max=logits.shape[1] - 1)  # only NaN gets there; its logprob is refused
    return tokens, logprobs.gather(1, tokens)


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Finalise a Weyl sequence: SplitMix64 (Steele, Lea, Flood 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def uniforms(seeds: Sequence[int], num_positions: int) -> npt.NDArray[np.float64]:
    """Give each position the number that samples the token after it, in [0, 1 - 2**-52].

    [seeds, num_positions]
    """
    starts = np.array([seed % 2**64 for seed in seeds], np.uint64)
    positions = np.arange(num_positions, dtype=np.uint64)
    streams = _mixed(starts + _GAMMA)[:, None] + positions * _GAMMA
    return (_mixed(streams) >> np.uint64(12)).astype(np.float64) * 2.0**-52
