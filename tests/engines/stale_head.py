"""Our extension of vLLM's worker, broken on purpose: a tied head is not renewed after a load."""

from __future__ import annotations

from torch import nn

from asyncrl_node.engines import vllm_weights
from asyncrl_node.engines.vllm_weights import FlatWorker


def leave_tied_heads(model: nn.Module) -> None:
    """Do nothing."""


setattr(vllm_weights, "_renew_tied_heads", leave_tied_heads)  # noqa: B010


class StaleHeadWorker(FlatWorker):
    """The worker itself is the same; importing this module broke it."""
