"""The protocol that every sampling engine speaks: token ids in; token ids, logprobs, versions out.

Threading: one asyncio loop, one thread. The sampler runs `serve()` as a task; `generate` calls
wait for it. `load_weights` is called between two awaits of the same loop, so an engine swaps its
weights only between decode steps and no forward pass ever sees two versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from asyncrl_node.messages import WeightEntry

FinishReason = Literal["stop", "length", "abort"]


class GenerateRequest(msgspec.Struct, frozen=True):
    """One generation: sample from `prompt_tokens` until a stop token or `max_new_tokens`."""

    request_id: int
    """Unique among the requests in flight on this engine."""
    prompt_tokens: list[int]
    """At least one token."""
    max_new_tokens: int
    """At least 1; prompt and new tokens together must fit the engine's context."""
    temperature: float
    """> 0. Logprobs are of the distribution sampled from: log_softmax(logits / temperature)."""
    seed: int
    """The same seed, prompt and weights give the same tokens, whatever else is in the batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after one of these; the stop token is part of the completion."""


class Completion(msgspec.Struct, frozen=True):
    """What was sampled; the three lists have one entry per new token."""

    tokens: list[int]
    logprobs: list[float]
    """Natural log, at the sampling temperature, by the weights that sampled the token."""
    policy_versions: list[int]
    """The weights that sampled each token."""
    finish_reason: FinishReason


class Engine(Protocol):
    """A sampling engine. Not ready (policy_version -1) before the first `load_weights`."""

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; -1 before the first load."""
        ...

    async def serve(self) -> None:
        """Run decode steps while there is work; returns only when cancelled."""
        ...

    async def generate(
        self, request: GenerateRequest, on_first_token: Callable[[int], None] | None = None
    ) -> Completion:
        """Sample one completion. `on_first_token(version)` is called when its first token exists.

        Raises: ValueError for a request that can never fit.
        """
        ...

    def abort(self, request_id: int) -> None:
        """End a generation early: its `generate` returns the partial with reason "abort"."""
        ...

    def load_weights(
        self, version: int, entries: tuple[WeightEntry, ...], source: memoryview
    ) -> None:
        """Copy every parameter out of `source` (read-only, valid only during the call).

        The key-value cache of running sequences is recomputed with the new weights before the
        next decode step. Raises: RunFault if a parameter is missing or left over.
        """
        ...

    def weights_view(self) -> memoryview:
        """The engine's own copy of the flat buffer, for hashing outside the lease."""
        ...

    def close(self) -> None:
        """Free what the engine holds; running generations end as aborted."""
        ...
