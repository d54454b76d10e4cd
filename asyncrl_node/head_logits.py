"""The head's product, as sampler and learner both make it: float32 logits in every `dtype`.

Sampler and learner are two programs, and a logit that each rounds to 8 bits is the largest part of
what they differ by (perf/README.md). vLLM is told the same by its `head_dtype`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits [n, V] in float32 of hidden [n, D] and weight [V, D], of one type.

    In bfloat16 the product is not rounded to it: between 16 and 32 that would be to multiples of
    1/8. A GPU's kernel adds up in float32 anyway; that this one does has not been seen to run.
    """
    if hidden.dtype == torch.float32:
        return hidden @ weight.T
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return hidden.float() @ weight.float().T
