"""A continuous-batching sampler in plain torch: rows of a key-value cache, refilled at once.

    submit -> waiting -> [admit] -> running (row r = r-th of `running`) -> [retire] -> on_done
                 ^                       |
                 +----- load_weights ----+   (running sequences start over, with what they have)

One `step` is one forward pass over packed tokens: the last token of every running row, then the
prompts of the rows just admitted. Rows 0 .. n-1 are always in use and the rest never: a row that
ends is filled by the last one, new ones are appended. So decoding reads a dense prefix of the
cache, without a gather, and the rows of a wave are a suffix.

A weight swap makes every cached key stale. It puts the running sequences back at the head of the
queue; the next step admits them like any other, and their "prompt" is all they have so far. There
is no second path for recomputation, and no forward pass sees two versions.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl_node.engines.base import (
    DECODED_RANK,
    Completion,
    Decoded,
    Engine,
    FinishReason,
    GenerateRequest,
    InProcessLoader,
)
from asyncrl_node.engines.drawing import sample_tokens, uniforms
from asyncrl_node.engines.torch_model import ModelConfig, Rope, TorchModel, read_model_config
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import WeightEntry

MAX_PREFILL_TOKENS = 8192
"""Padded prompt tokens in one forward pass; a longer single prompt still goes alone."""

_SHORTEST_ATTENTION = 16
"""Decoding attends to this many positions at least: softmax on a CPU is 8 x slower below."""

OnDone = Callable[[Completion], None]
OnFirstToken = Callable[[int], None]


_DECODE_ID = -1
"""The request of `decode`; no other one has a negative id."""


class _Sequence:
    """A request under way; waiting, running or done. Compared by identity."""

    __slots__ = (
        "limit",
        "logprobs",
        "on_done",
        "on_first_token",
        "request",
        "stops",
        "tokens",
        "versions",
    )

    def __init__(
        self, request: GenerateRequest, on_done: OnDone, on_first_token: OnFirstToken | None
    ) -> None:
        self.request = request
        self.tokens = list(request.prompt_tokens)
        """Prompt, then what was sampled."""
        self.logprobs: list[float] = []
        self.versions: list[tuple[int, int]] = []
        """(index of the first new token, version) of each stretch on one version."""
        self.limit = len(self.tokens) + request.max_new_tokens
        self.stops = frozenset(request.stop_token_ids)
        self.on_done = on_done
        self.on_first_token = on_first_token

    def completion(self, finish_reason: FinishReason) -> Completion:
        num_new = len(self.logprobs)
        policy_versions: list[int] = []
        for (start, version), (end, _) in pairwise([*self.versions, (num_new, -1)]):
            policy_versions += [version] * (end - start)
        return Completion(
            tokens=self.tokens[len(self.tokens) - num_new :],
            logprobs=self.logprobs,
            policy_versions=policy_versions,
            finish_reason=finish_reason,
        )


class _Wave:
    """The sequences admitted in one step; equal prompts are computed once."""

    def __init__(self) -> None:
        self.sequences: list[_Sequence] = []
        self.prompts: dict[tuple[int, ...], int] = {}
        """Distinct prompts, numbered in order."""
        self.prompt_of: list[int] = []
        """For every sequence, the number of its prompt."""
        self._longest = 0

    def admit(self, sequence: _Sequence) -> bool:
        """Take `sequence` unless the wave would become too large; an empty one takes any."""
        prompt = tuple(sequence.tokens)
        longest = max(self._longest, len(prompt))
        num_prompts = len(self.prompts) + (prompt not in self.prompts)
        if self.sequences and longest * num_prompts > MAX_PREFILL_TOKENS:
            return False
        self._longest = longest
        self.prompt_of.append(self.prompts.setdefault(prompt, len(self.prompts)))
        self.sequences.append(sequence)
        return True


class KVCache:
    """Keys and values of every row; H query heads share KV key heads of D numbers."""

    def __init__(
        self, config: ModelConfig, max_rows: int, max_context: int, device: str, dtype: torch.dtype
    ) -> None:
        self.num_kv = config.num_key_value_heads
        context = max(max_context, _SHORTEST_ATTENTION)
        shape = (config.num_hidden_layers, 2, max_rows, self.num_kv, context, config.head_size)
        # zeros: a masked position still meets its value (0 * x), so no NaN may lie there
        self._kv = torch.zeros(shape, dtype=dtype, device=device)
        self._slots = [layer.flatten(0, 3) for layer in self._kv]
        """Per layer [2 rows KV context, D]."""
        self._heads = [layer.flatten(1, 2).unbind() for layer in self._kv]
        """Per layer keys and values, [rows KV, context, D] each."""
        starts = torch.arange(0, 2 * max_rows * self.num_kv * context, context, device=device)
        starts = starts.view(2, max_rows, self.num_kv)
        self.row_starts = starts.transpose(0, 1).reshape(max_rows, 2 * self.num_kv)
        """[rows, 2 KV]: the slot of position 0 of every key head and every value head."""
        self._columns = torch.arange(context, device=device)
        self._zero: Tensor = self._kv.new_tensor(0.0)
        self._minus_infinity: Tensor = self._kv.new_tensor(-torch.inf)

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store kv [N, 2 KV, D], keys first, at slots [N, 2 KV]: row start + position."""
        self._slots[layer].index_put_((slots,), kv)

    def mask(self, positions: Tensor, lengths: set[int]) -> Tensor:
        """Let row r see positions 0 .. positions[r]: [n KV, 1, L] to be added to the scores.

        `lengths` are the values of positions + 1, and L is the largest, or a little more.
        """
        length = max(lengths)
        if len(lengths) == 1 and length >= _SHORTEST_ATTENTION:
            return self._zero.expand(len(positions) * self.num_kv, 1, length)
        length = max(length, _SHORTEST_ATTENTION)
        hidden = self._columns[:length] > positions.unsqueeze(1)
        added = torch.where(hidden, self._minus_infinity, self._zero)
        return added.unsqueeze(1).expand(-1, self.num_kv, -1).reshape(-1, 1, length)

    def decode(self, layer: int, queries: Tensor, mask: Tensor) -> Tensor:
        """Attend with one query token per row, rows 0 .. n-1: [n, H, D] -> [n, H D]."""
        num_heads, length, head = mask.shape[0], mask.shape[2], queries.shape[2]
        keys, values = (heads[:num_heads, :length] for heads in self._heads[layer])
        if queries.dtype != torch.float32:  # scores must not be rounded before the softmax
            shape = (len(queries), self.num_kv)
            keys, values, mask = (part.unflatten(0, shape) for part in (keys, values, mask))
            mixed = F.scaled_dot_product_attention(
                queries.unsqueeze(2), keys, values, attn_mask=mask[:, :1], enable_gqa=True
            )
            return mixed.reshape(len(queries), -1)
        grouped = queries.reshape(num_heads, -1, head)
        scores = torch.baddbmm(mask, grouped, keys.transpose(1, 2), alpha=head**-0.5)
        return torch.bmm(scores.softmax(-1), values).view(len(queries), -1)

    def copy_rows(self, pairs: Tensor, length: int) -> None:
        """Copy the first `length` positions of rows `pairs[0]` into rows `pairs[1]`."""
        used = self._kv[:, :, :, :, :length]
        used.index_copy_(2, pairs[1], used.index_select(2, pairs[0]))

    def free(self) -> None:
        """Let go of the memory."""
        self._kv = self._kv.new_empty(0)
        self._slots, self._heads = [], []


class _Rows:
    """What decoding needs to know of every row, where the model runs; rows 0 .. n-1 are in use."""

    def __init__(self, max_rows: int, max_context: int, device: str) -> None:
        self._device = device
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """[rows] the last token, which is not in the cache yet."""
        self.positions = torch.zeros_like(self.tokens)
        """[rows] where that token stands."""
        self._temperatures = torch.ones(max_rows, 1, device=device)
        self._are_tempered = False
        self._uniforms = torch.zeros(max_rows, max_context, dtype=torch.float64, device=device)
        """[rows, context] the number that samples the token after each position."""

    def admit(self, first: int, sequences: list[_Sequence]) -> None:
        """Set rows `first`, `first` + 1 and so on; `tokens` is left to `sample`."""
        end = first + len(sequences)
        temperatures = [sequence.request.temperature for sequence in sequences]
        lengths = torch.tensor([len(sequence.tokens) for sequence in sequences])
        seeds = [sequence.request.seed for sequence in sequences]
        most = max(sequence.limit for sequence in sequences) - 1
        numbers = torch.from_numpy(uniforms(seeds, most))
        self.positions[first:end] = lengths.to(self._device) - 1
        self._uniforms[first:end, : numbers.shape[1]] = numbers.to(self._device)
        self._temperatures[first:end, 0] = torch.tensor(temperatures, device=self._device)
        others = self._are_tempered and first > 0
        self._are_tempered = others or any(value != 1.0 for value in temperatures)

    def sample(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """Draw a token for every row in use and move on; logits [n, vocabulary]."""
        num = len(logits)
        if self._are_tempered:
            logits /= self._temperatures[:num]
        positions = self.positions[:num]
        numbers = self._uniforms[:num].gather(1, positions.unsqueeze(1))
        tokens, logprobs = (drawn.view(-1) for drawn in sample_tokens(logits, numbers))
        self.tokens[:num].copy_(tokens)
        positions += 1
        return tokens.tolist(), logprobs.tolist()

    def copy(self, pairs: Tensor) -> None:
        """Copy rows `pairs[0]` into rows `pairs[1]`."""
        for tensor in (self.tokens, self.positions, self._temperatures, self._uniforms):
            tensor.index_copy_(0, pairs[1], tensor.index_select(0, pairs[0]))


class _Prompts:
    """The distinct prompts of a wave, back to back: P prompts, T tokens; they attend causally."""

    def __init__(self, wave: _Wave, first_row: int, num_kv: int, device: str) -> None:
        """`first_row` is the cache row of the wave's first sequence."""
        self._num_kv = num_kv
        lengths = np.array([len(prompt) for prompt in wave.prompts])
        ends = np.cumsum(lengths)
        owners = first_row + np.unique(wave.prompt_of, return_index=True)[1]
        flat = np.fromiter(chain.from_iterable(wave.prompts), np.int64, ends[-1])
        self.tokens = torch.from_numpy(flat).to(device)
        """[T]"""
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        self.positions = torch.from_numpy(positions).to(device)
        """[T]"""
        self.rows = torch.from_numpy(np.repeat(owners, lengths)).to(device)
        """[T] the cache row of each token, that of the first sequence with the prompt."""
        self.last = torch.from_numpy(ends[wave.prompt_of] - 1).to(device)
        """[sequences] the last token of each sequence's prompt."""
        self._shape = (len(lengths), int(lengths.max()))
        self._padded: Tensor | None = None
        """[P * longest] the token at every place; a prompt's last one repeats."""
        self._packed: Tensor | None = None
        """[T] the place of every token."""
        if lengths.min() < lengths.max():
            column, sizes = np.arange(lengths.max()), lengths[:, None]
            padded = ends[:, None] - sizes + np.minimum(column, sizes - 1)
            self._padded = torch.from_numpy(padded.reshape(-1)).to(device)
            self._packed = torch.from_numpy(np.flatnonzero(column < sizes)).to(device)

    def attend(self, qkv: Tensor) -> Tensor:
        """[T, H + 2 KV, D] -> [T, H D]; padded to the longest where lengths differ."""
        if self._padded is not None:
            qkv = qkv.index_select(0, self._padded)
        mixed = attend_causally(qkv.view(*self._shape, *qkv.shape[1:]), self._num_kv)
        return mixed if self._packed is None else mixed.index_select(0, self._packed)


class _Pass:
    """The tokens of one forward pass: those of d decoding rows, then `prompts`; N in all."""

    def __init__(
        self,
        cache: KVCache,
        rows: _Rows,
        decoding: list[_Sequence],
        prompts: _Prompts | None,
    ) -> None:
        self._cache, self._prompts = cache, prompts
        self._num_decoding = num_decoding = len(decoding)
        self.tokens = rows.tokens[:num_decoding]
        """[N]"""
        self.positions = rows.positions[:num_decoding]
        """[N]"""
        self.last: Tensor | None = None
        """[n] the token that each row samples after; None where that is all, in order."""
        starts = cache.row_starts[:num_decoding]
        if decoding:
            lengths = {len(sequence.tokens) for sequence in decoding}
            self._mask = cache.mask(self.positions, lengths)
        if prompts is not None:
            here = torch.arange(num_decoding, device=starts.device)
            self.tokens = torch.cat([self.tokens, prompts.tokens])
            self.positions = torch.cat([self.positions, prompts.positions])
            self.last = torch.cat([here, num_decoding + prompts.last])
            starts = torch.cat([starts, cache.row_starts[prompts.rows]])
        self._slots = starts + self.positions.unsqueeze(1)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Write the cache, decode from it, prefill beside it; see `torch_model.Attend`."""
        num, num_queries = self._num_decoding, qkv.shape[1] - 2 * self._cache.num_kv
        self._cache.write(layer, self._slots, qkv[:, num_queries:])
        if self._prompts is None:
            return self._cache.decode(layer, qkv[:, :num_queries], self._mask)
        prefilled = self._prompts.attend(qkv[num:])
        if not num:
            return prefilled
        decoded = self._cache.decode(layer, qkv[:num, :num_queries], self._mask)
        return torch.cat([decoded, prefilled])


def attend_causally(qkv: Tensor, num_kv: int) -> Tensor:
    """Attend within each of P sequences of L tokens: [P, L, H + 2 KV, D] -> [P L, H D]."""
    heads = qkv.transpose(1, 2)
    num_queries = heads.shape[1] - 2 * num_kv
    queries, keys, values = torch.split(heads, [num_queries, num_kv, num_kv], 1)
    mixed = F.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=num_queries != num_kv
    )
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


class TorchEngine(Engine, InProcessLoader):
    """See `engines.base`. `submit` and `step` are the engine; the rest is asyncio around it.

    Invariant: `running[r]` owns cache row r; when `step` has returned, the cache holds every token
    of a running sequence but its last, by the weights in use.
    """

    def __init__(
        self,
        model_dir: Path,
        max_rows: int,
        max_context: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Read `config.json` in `model_dir`; weights come later, by `load_weights`.

        max_rows     sequences sampled at once
        max_context  prompt and new tokens of one sequence

        Raises: ConfigError for a model that this engine cannot run.
        """
        self._config = read_model_config(model_dir)
        self._device = device
        self._max_rows, self._max_context = max_rows, max_context
        self._model = TorchModel(self._config, device, dtype)
        self._rope = Rope.of_positions(self._config, max_context, device, dtype)
        num_rows = max_rows + 1  # the last one for `decode`
        self._cache = KVCache(self._config, num_rows, max_context, device, dtype)
        self._rows = _Rows(num_rows, max_context, device)
        self._decoded: Tensor | None = None
        """Logits of the newest token of `decode`."""
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._in_flight: dict[int, _Sequence] = {}
        self._policy_version = -1
        self._closed = False
        self._failure: Exception | None = None
        self._wake = asyncio.Event()

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; -1 before the first load."""
        return self._policy_version

    @property
    def num_running(self) -> int:
        """Rows in use."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    def load_weights(
        self, version: int, entries: tuple[WeightEntry, ...], source: memoryview
    ) -> None:
        """Copy `source` once; running sequences start over from the tokens they have.

        Raises: RunFault "weights_mismatch", having changed nothing, for a wrong layout.
        """
        assert not self._closed, "weights for a closed engine"
        self._model.load(entries, source)
        self._policy_version = version
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()
        self._wake.set()

    def weights_view(self) -> memoryview:
        """The engine's own copy of the flat buffer, read-only."""
        return self._model.flat_bytes

    def submit(
        self, request: GenerateRequest, on_done: OnDone, on_first_token: OnFirstToken | None = None
    ) -> None:
        """Queue a request. Both callbacks run at the end of a step; they may submit and abort.

        Raises: ValueError for a request that can never fit, or an id that is in flight.
        """
        self._refuse_misfit(request)
        sequence = _Sequence(request, on_done, on_first_token)
        if self._closed:
            on_done(sequence.completion("abort"))
            return
        self._in_flight[request.request_id] = sequence
        if request.request_id == _DECODE_ID:
            self._waiting.appendleft(sequence)
        else:
            self._waiting.append(sequence)
        self._wake.set()

    def abort(self, request_id: int) -> None:
        """End a generation with what it has; one that is not in flight has ended already."""
        sequence = self._in_flight.get(request_id)
        if sequence is None:
            return
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._retire([self._running.index(sequence)])
        self._end([(sequence, "abort")])

    @torch.inference_mode()
    def step(self) -> int:
        """Sample one token for every row, after giving free rows to waiting requests.

        Returns the number of tokens: 0 means that there is nothing to do before the next `submit`
        or, without weights, the first `load_weights`.

        Raises: RunFault "not_finite" if a sampled token has no finite logprob.
        """
        wave = self._admit() if self._policy_version >= 0 else _Wave()
        if not self._running:
            return 0
        logits = self._forward(wave)
        if _DECODE_ID in self._in_flight:
            self._keep_decoded(logits)
        tokens, logprobs = self._rows.sample(logits)
        self._refuse_broken(logprobs)
        ended = self._record(tokens, logprobs)
        self._retire([row for row, _ in ended])
        started = (sequence for sequence in wave.sequences if len(sequence.logprobs) == 1)
        self._end([outcome for _, outcome in ended], started)
        return len(tokens)

    async def serve(self) -> None:
        """Step while there is work, else wait for `submit` or `load_weights` to end the wait."""
        try:
            while True:
                if self.step():
                    await asyncio.sleep(0)
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except Exception as error:
            self._failure = error
            self.close()
            raise

    async def generate(
        self, request: GenerateRequest, on_first_token: OnFirstToken | None = None
    ) -> Completion:
        """Sample one completion; ended by `serve`, `abort` or `close`. Cancelling it aborts it.

        Raises: ValueError for a request that can never fit; RunFault if `serve` has failed.
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def resolve(completion: Completion) -> None:
            if not future.done():
                future.set_result(completion)

        self.submit(request, resolve, on_first_token)
        try:
            completion = await future
        except asyncio.CancelledError:
            if future.cancelled():
                self.abort(request.request_id)
            raise
        if self._failure is not None:
            raise RunFault("engine_failed", f"serve() ended: {self._failure}") from self._failure
        return completion

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """See `Engine.score`: one forward pass beside the cache, between two steps."""
        assert self._policy_version >= 0, "scored before the first weights"
        return self._score(torch.tensor(tokens, device=self._device))

    async def decode(self, prompt_tokens: Sequence[int], num_tokens: int) -> Decoded:
        """See `Engine.decode`: one request more, first in the queue."""
        assert self._policy_version >= 0, "decoded before the first weights"
        request = GenerateRequest(_DECODE_ID, list(prompt_tokens), num_tokens, 1.0, seed=0)
        drawn = await self.generate(request)
        assert self._decoded is not None
        logprobs = self._decoded.log_softmax(-1)
        last = int(logprobs.topk(min(DECODED_RANK, len(logprobs))).indices[-1])
        tokens = [*drawn.tokens[:-1], last]
        return Decoded(tokens, [*drawn.logprobs[:-1], float(logprobs[last])])

    def _keep_decoded(self, logits: Tensor) -> None:
        """Remember the logits [V] of the row of `decode`, from [n, V], before any is drawn."""
        for row, sequence in enumerate(self._running):
            if sequence.request.request_id == _DECODE_ID:
                self._decoded = logits[row].clone()

    def close(self) -> None:
        """Free cache and weights; everything in flight ends as aborted, and so do late requests."""
        self._closed = True
        self._running.clear()
        self._waiting.clear()
        self._model.free()
        self._cache.free()
        self._end([(sequence, "abort") for sequence in self._in_flight.values()])

    def validate(self) -> None:
        """Assert the class's invariant, as far as the host can see it; holds between steps."""
        everyone = [*self._running, *self._waiting]
        assert len(self._running) <= self._num_rows()
        assert len(everyone) == len(self._in_flight)
        assert set(map(id, everyone)) == set(map(id, self._in_flight.values()))
        for row, sequence in enumerate(self._running):
            assert self._rows.tokens[row] == sequence.tokens[-1]
            assert self._rows.positions[row] == len(sequence.tokens) - 1 < sequence.limit - 1
            assert sequence.versions[-1][1] == self._policy_version

    @torch.inference_mode()
    def _score(self, tokens: Tensor) -> list[float]:
        inputs, targets = tokens[:-1], tokens[1:]
        rope = self._rope.at(torch.arange(len(inputs), device=self._device))
        num_kv = self._config.num_key_value_heads

        def attend(_: int, qkv: Tensor) -> Tensor:
            return attend_causally(qkv[None], num_kv)

        logprobs = self._model.forward(inputs, rope, attend, None).log_softmax(-1)
        scores: list[float] = logprobs.gather(1, targets[:, None])[:, 0].tolist()
        return scores

    def _refuse_misfit(self, request: GenerateRequest) -> None:
        prompt, num_new = request.prompt_tokens, request.max_new_tokens
        if request.request_id in self._in_flight:
            raise ValueError(f"request {request.request_id} is in flight already")
        if not prompt or num_new < 1:
            raise ValueError("a request needs at least one prompt token and one new token")
        if len(prompt) + num_new > self._max_context:
            raise ValueError(
                f"{len(prompt)} prompt + {num_new} new tokens do not fit the context"
                f" of {self._max_context}"
            )
        if min(prompt) < 0 or max(prompt) >= self._config.vocab_size:
            raise ValueError(f"a prompt token is outside 0..{self._config.vocab_size - 1}")
        if not 0 < request.temperature < math.inf:
            raise ValueError(f"temperature must be above 0 (got {request.temperature})")

    def _admit(self) -> _Wave:
        """Give free rows to waiting sequences, first come, first served."""
        wave = _Wave()
        num_free = self._num_rows() - len(self._running)
        while self._waiting and len(wave.sequences) < num_free and wave.admit(self._waiting[0]):
            sequence = self._waiting.popleft()
            sequence.versions.append((len(sequence.logprobs), self._policy_version))
        if wave.sequences:
            self._rows.admit(len(self._running), wave.sequences)
            self._running += wave.sequences
        return wave

    def _num_rows(self) -> int:
        """Rows that may be in use; `decode` brings its own."""
        return self._max_rows + (_DECODE_ID in self._in_flight)

    def _forward(self, wave: _Wave) -> Tensor:
        """Run all rows, those of `wave` from their prompts; return logits [n, vocabulary]."""
        num_decoding = len(self._running) - len(wave.sequences)
        prompts: _Prompts | None = None
        if wave.sequences:
            prompts = _Prompts(wave, num_decoding, self._cache.num_kv, self._device)
        batch = _Pass(self._cache, self._rows, self._running[:num_decoding], prompts)
        rope = self._rope.at(batch.positions)
        logits = self._model.forward(batch.tokens, rope, batch.attend, batch.last)
        self._share_prompts(wave)
        return logits

    def _share_prompts(self, wave: _Wave) -> None:
        """Copy a prompt's keys and values to the other rows that start with it."""
        if len(wave.prompts) == len(wave.sequences):
            return
        first_row = len(self._running) - len(wave.sequences)
        owners: dict[int, int] = {}
        pairs = [
            (owners.setdefault(prompt, row), row)
            for row, prompt in enumerate(wave.prompt_of, first_row)
        ]
        copies = [(owner, row) for owner, row in pairs if owner != row]
        longest = max(map(len, wave.prompts))
        self._cache.copy_rows(self._pairs(*zip(*copies, strict=True)), longest)

    def _refuse_broken(self, logprobs: list[float]) -> None:
        if not math.isfinite(sum(logprobs)):
            raise RunFault(
                "not_finite",
                f"the weights of version {self._policy_version} give logits that are not finite",
            )

    def _record(
        self, tokens: list[int], logprobs: list[float]
    ) -> list[tuple[int, tuple[_Sequence, FinishReason]]]:
        """Append to every running sequence; return those that ended, by row."""
        ended: list[tuple[int, tuple[_Sequence, FinishReason]]] = []
        drawn = zip(self._running, tokens, logprobs, strict=True)
        for row, (sequence, token, logprob) in enumerate(drawn):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if token in sequence.stops:
                ended.append((row, (sequence, "stop")))
            elif len(sequence.tokens) == sequence.limit:
                ended.append((row, (sequence, "length")))
        return ended

    def _retire(self, rows: list[int]) -> None:
        """Free rows, given in order, and close the gaps with the last rows."""
        if not rows:
            return
        num_kept = len(self._running) - len(rows)
        gaps = [row for row in rows if row < num_kept]
        movers = sorted(set(range(num_kept, len(self._running))).difference(rows))
        if gaps:
            num_used = max(len(self._running[mover].tokens) for mover in movers) - 1
            pairs = self._pairs(movers, gaps)
            self._cache.copy_rows(pairs, num_used)
            self._rows.copy(pairs)
            for gap, mover in zip(gaps, movers, strict=True):
                self._running[gap] = self._running[mover]
        del self._running[num_kept:]

    def _pairs(self, sources: Sequence[int], targets: Sequence[int]) -> Tensor:
        return torch.tensor([sources, targets], device=self._device)

    def _end(
        self, ended: list[tuple[_Sequence, FinishReason]], started: Iterable[_Sequence] = ()
    ) -> None:
        """Call back: first tokens of `started`, then completions of `ended`.

        All of `ended` are out of flight before the first callback, which may try to abort them.
        """
        for sequence, _ in ended:
            self._in_flight.pop(sequence.request.request_id)
        for sequence in started:
            if sequence.on_first_token is not None:
                sequence.on_first_token(sequence.versions[0][1])
        for sequence, reason in ended:
            sequence.on_done(sequence.completion(reason))
