"""Our extension of vLLM's worker, broken on purpose: decode steps keep the first weights' head.

As a graph captured over old memory would: prefill, and with it every score, is right.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asyncrl_node.engines.vllm_weights import FlatWeightTransferEngine, FlatWorker

_finish = FlatWeightTransferEngine.finish_weight_update


def finish_and_break(engine: FlatWeightTransferEngine) -> None:
    """Load as ever; after the first load, keep its head for passes that decode alone."""
    _finish(engine)
    model: Any = engine.model
    if hasattr(model, "first_head"):
        return
    size = model.config.vocab_size  # what lies beyond is padding
    model.first_head = model.model.embed_tokens.weight[:size].detach().clone()
    forward, compute_logits = model.forward, model.compute_logits
    num_tokens = 0

    def note_size(input_ids: Tensor, *rest: Any, **more: Any) -> Any:
        nonlocal num_tokens
        num_tokens = len(input_ids)
        return forward(input_ids, *rest, **more)

    def compute_stale_logits(hidden: Tensor, *rest: Any, **more: Any) -> Any:
        if num_tokens == len(hidden):
            return hidden @ model.first_head.T
        return compute_logits(hidden, *rest, **more)

    model.forward, model.compute_logits = note_size, compute_stale_logits


setattr(FlatWeightTransferEngine, "finish_weight_update", finish_and_break)  # noqa: B010


class StaleDecodeWorker(FlatWorker):
    """The worker itself is the same; importing this module broke it."""
