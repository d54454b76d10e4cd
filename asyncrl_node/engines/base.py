"""The protocols that every sampling engine speaks: token ids in; ids, logprobs, versions out.

    Engine                      generate, abort, score, decode; every engine
    and one of
    InProcessLoader             the sampler hands over the learner's buffer: torch, fake
    OwnProcessLoader            the engine's own process maps and copies it: vllm

Threading: one asyncio loop, one thread. The sampler runs `serve()` as a task; `generate` calls
wait for it. Weights are swapped between decode steps: no forward pass ever sees two versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import msgspec

from asyncrl_node.messages import WeightEntry, WeightsManifest

FlatHandle = dict[str, str | bytes]
"""How vLLM's worker opens the learner's buffer: see `vllm_weights.import_flat`."""
FinishReason = Literal["stop", "length", "abort"]


class GenerateRequest(msgspec.Struct, frozen=True):
    """One generation: sample from `prompt_tokens` until a stop token or `max_new_tokens`."""

    request_id: int
    """At least 0, and unique among the requests in flight on this engine."""
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
    kv_version: int | None = None
    """The oldest weights whose keys and values a token here may depend on, beside those that
    sampled it. None: those alone, because the cache is recomputed at every update."""


class Decoded(msgspec.Struct, frozen=True):
    """Sampled by `Engine.decode`: tokens, and the log-probability of each at temperature 1."""

    tokens: list[int]
    logprobs: list[float]


DECODED_RANK = 4
"""How likely the last token of `Engine.decode` is: so many, with itself, are at least as likely."""


class Engine(Protocol):
    """A sampling engine. Not ready (policy_version -1) before the first weights."""

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

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens[1:], each given those before it, at temperature 1.

        By the weights in use, through the network that samples, while generations run: they are
        not disturbed, and nothing that is cached is read. At least 2 tokens, and one fewer than
        the context; no weights may be loaded meanwhile.
        """
        ...

    async def decode(self, prompt_tokens: Sequence[int], num_tokens: int) -> Decoded:
        """Sample `num_tokens` after a prompt, at temperature 1, as `generate` does.

        In place of the last one drawn it gives the DECODED_RANK-th likely at that place: what is
        certain has the same log-probability under almost any weights. On a row of its own, ahead of
        everything that waits, and nothing that is cached is read.
        All but the first token come from decode steps, by whatever graphs, caches and packed
        copies these use. One call at a time; no weights may be loaded meanwhile.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds; running generations end as aborted."""
        ...


@runtime_checkable
class InProcessLoader(Protocol):
    """An engine in this very process: it copies the weights when it is called."""

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


@runtime_checkable
class OwnProcessLoader(Protocol):
    """An engine whose own process copies the weights; the sampler says when.

        open_weights -> (lease granted) copy_weights -> (release the lease) use_weights -> ...

    One load at a time: `use_weights` has returned before the next `copy_weights`.
    """

    def open_weights(
        self, manifest: WeightsManifest, path: Path, handle: FlatHandle | None = None
    ) -> None:
        """Note where the learner's buffer is; the first `copy_weights` maps it.

        handle  where it is not host memory at `path`: see engines/cuda_flat.py
        """
        ...

    async def copy_weights(self, version: int) -> None:
        """Copy the buffer, under a lease for `version`; it may be overwritten afterwards.

        Requests made from now on wait for `use_weights`: none is sampled by older weights.

        Raises: RunFault "weights_mismatch" or "torn_weights"; "engine_failed".
        """
        ...

    async def use_weights(self, version: int) -> int:
        """Load the copy, between two decode steps; return its hash.

        Raises: RunFault; the engine is lost then, and so is its process.
        """
        ...
