"""The scripted engine: latencies from a file, tokens that are the version that made them.

It imports no torch. Its weights are real bytes in the real buffer: every byte of a version is that
version modulo 256, so a copy that mixes two versions is caught at once. What it samples and scores
follows the weights that it computes with; `fake.stale_after_version` lets these stay behind, and
`fake.decode_stale_after_version` those that it decodes with.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl_node.config import FakeConfig
from asyncrl_node.engines.base import (
    Completion,
    Decoded,
    Engine,
    FinishReason,
    GenerateRequest,
    InProcessLoader,
)
from asyncrl_node.errors import ConfigError, RunFault
from asyncrl_node.messages import WeightEntry
from asyncrl_node.tasks.fake import drawn

WEIGHT_NAME = "fake.weight"
_DEFAULT_LATENCY_S = 0.02
_MIN_LATENCIES = 1


def read_latencies(path: str) -> list[float]:
    """Read seconds per problem. Raises: ConfigError."""
    if not path:
        return [_DEFAULT_LATENCY_S]
    try:
        values = json.loads(Path(path).read_text())
    except OSError as error:
        rule = f"must be a readable file: {error.strerror}"
        raise ConfigError("fake.latencies", rule, path) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("fake.latencies", f"must be JSON: {error}", path) from error
    numbers = isinstance(values, list) and len(values) >= _MIN_LATENCIES
    if not numbers or not all(type(v) in (int, float) and 0 <= v < 1e6 for v in values):
        raise ConfigError("fake.latencies", "must be a list of seconds, at least one", path)
    return [float(v) for v in values]


def scripted_logprobs(version: int, tokens: Sequence[int]) -> list[float]:
    """What the scripted model of `version` makes of tokens[1:]; every version another."""
    return [-1.0 - (31 * (version % 256) + token) % 257 / 257 for token in tokens[1:]]


class FakeEngine(Engine, InProcessLoader):
    """Sleeps where a model would compute."""

    def __init__(self, config: FakeConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._latencies: Sequence[float] = read_latencies(config.latencies)
        self._load_times_s: list[float] = []
        self._versions: list[int] = []
        self._weights = bytearray(config.weight_bytes)
        self._computes_with = -1
        """The version that answers come from; another one than it says, if scripted so."""
        self._decodes_with = -1
        """The version that decoded answers come from, likewise."""
        self._loaded = asyncio.Event()
        self._aborts: dict[int, asyncio.Event] = {}

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; -1 before the first load."""
        return self._versions[-1] if self._versions else -1

    async def serve(self) -> None:
        """Nothing to step: generations are timers."""
        await asyncio.Event().wait()

    async def generate(
        self, request: GenerateRequest, on_first_token: Callable[[int], None] | None = None
    ) -> Completion:
        """Sleep for the problem's latency; stamp each token with the version of its moment."""
        await self._loaded.wait()
        problem = request.prompt_tokens[0]
        started_s = time.monotonic()
        if on_first_token is not None:
            on_first_token(self.policy_version)
        self._maybe_raise(problem, request.seed)
        latency_s = self._latencies[problem % len(self._latencies)]
        if problem in self._config.hang_problems:
            latency_s = float("inf")
        aborted = await self._sleep(request.request_id, latency_s)
        elapsed_s = time.monotonic() - started_s
        return self._completion(request, started_s, latency_s, elapsed_s if aborted else None)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Score as the weights do that it computes with."""
        assert self._versions, "scored before the first weights"
        return scripted_logprobs(self._computes_with, tokens)

    async def decode(self, prompt_tokens: Sequence[int], num_tokens: int) -> Decoded:
        """Decode as the weights do that it decodes with: other ones, if scripted so."""
        assert self._versions, "decoded before the first weights"
        tokens = [(prompt_tokens[-1] + i) % 256 for i in range(num_tokens)]
        scored = scripted_logprobs(self._decodes_with, [*prompt_tokens, *tokens])
        return Decoded(tokens, scored[-num_tokens:])

    def abort(self, request_id: int) -> None:
        """End a generation early."""
        event = self._aborts.get(request_id)
        if event is not None:
            event.set()

    def load_weights(
        self, version: int, entries: tuple[WeightEntry, ...], source: memoryview
    ) -> None:
        """Copy the buffer and check every byte of it."""
        if [entry.name for entry in entries] != [WEIGHT_NAME]:
            raise RunFault("weights_mismatch", f"expected {WEIGHT_NAME}, found {entries}")
        if self._config.load_s > 0:
            time.sleep(self._config.load_s)  # the scripted stall of a slow load
        self._weights[:] = source
        if self._weights.count(version % 256) != len(self._weights):
            raise RunFault("torn_weights", f"the bytes leased as version {version} are not all its")
        newest = self._config.stale_after_version
        if not self._versions or newest is None or version <= newest:
            self._computes_with = version
        newest = self._config.decode_stale_after_version
        if not self._versions or newest is None or version <= newest:
            self._decodes_with = self._computes_with
        self._load_times_s.append(time.monotonic())
        self._versions.append(version)
        self._loaded.set()

    def weights_view(self) -> memoryview:
        """The engine's own copy."""
        return memoryview(self._weights)

    def close(self) -> None:
        """End what is running."""
        for event in self._aborts.values():
            event.set()

    def _maybe_raise(self, problem: int, seed: int) -> None:
        raises = problem in self._config.raise_problems
        if raises or drawn(self._config.raise_rate, self._seed, 2, seed):
            raise RuntimeError(f"scripted failure of problem {problem}")

    async def _sleep(self, request_id: int, latency_s: float) -> bool:
        """Sleep; return True if aborted."""
        event = self._aborts[request_id] = asyncio.Event()
        try:
            timeout_s = None if latency_s == float("inf") else latency_s
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return False
        finally:
            del self._aborts[request_id]
        return True

    def _completion(
        self,
        request: GenerateRequest,
        started_s: float,
        latency_s: float,
        aborted_after_s: float | None,
    ) -> Completion:
        """Token i of n is made at latency * i / n after the start: the first one at once."""
        total = request.max_new_tokens
        interval_s = latency_s / total
        times_s = [started_s + interval_s * i if i else started_s for i in range(total)]
        if aborted_after_s is not None:
            times_s = [t for t in times_s if t - started_s <= aborted_after_s]
        versions = [self._version_at(t) for t in times_s]
        reason: FinishReason = "abort" if aborted_after_s is not None else "length"
        return Completion(versions, [-1.0] * len(versions), versions, reason)

    def _version_at(self, time_s: float) -> int:
        return self._versions[max(0, bisect_right(self._load_times_s, time_s) - 1)]
