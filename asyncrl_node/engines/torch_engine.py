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

Sampling inverts the cumulative distribution at one uniform number per token, a pure function of
(seed, index of the token). It does not depend on the batch; the logits do, by rounding (about 1e-7
in float32, as the matrix kernels choose their order by the number of rows). So two runs in
different company give the same tokens unless a uniform number falls into such a gap.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl_node.engines.base import Completion, Engine, FinishReason, GenerateRequest
from asyncrl_node.engines.torch_model import ModelConfig, Rope, TorchModel, read_model_config
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import WeightEntry

MAX_PREFILL_TOKENS = 8192
"""Padded prompt tokens in one forward pass; a longer single prompt still goes alone."""

_SHORTEST_ATTENTION = 16
"""Decoding attends to this many positions at least: softmax on a CPU is 8 x slower below."""

_ROW = np.dtype(
    [("token", np.int64), ("position", np.int64), ("stream", np.uint64), ("temperature", "f8")]
)
"""A running row: its last token (not in the cache yet), where that stands, its random stream."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)

OnDone = Callable[[Completion], None]
OnFirstToken = Callable[[int], None]


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
        self._by_layer = [layer.flatten(0, 3) for layer in self._kv]
        self._row_stride = self.num_kv * context
        heads = np.arange(self.num_kv) * context
        self._head_starts: npt.NDArray[np.int64] = np.concatenate(
            [heads, heads + max_rows * self._row_stride]
        )
        """[2 KV]: where row 0 of each key head and each value head starts in `_by_layer`."""
        self._columns = torch.arange(context, device=device)
        self._zero, self._minus_infinity = self._kv.new_tensor([0.0, -torch.inf])

    def places(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Where the heads of N tokens belong: [N, 2 KV], for `write`."""
        starts: npt.NDArray[np.int64] = rows * self._row_stride + positions
        return starts[:, None] + self._head_starts

    def write(self, layer: int, places: Tensor, kv: Tensor) -> None:
        """Store kv [N, 2 KV, D], keys first."""
        self._by_layer[layer].index_put_((places,), kv)

    def mask(self, positions: Tensor, length: int) -> Tensor:
        """Let row r see positions 0 .. positions[r]: [n KV, 1, L] to be added to the scores.

        L is `length`, the largest position + 1, or a little more.
        """
        columns = self._columns[: max(length, _SHORTEST_ATTENTION)]
        added = torch.where(columns > positions.unsqueeze(1), self._minus_infinity, self._zero)
        per_head = added.unsqueeze(1).expand(-1, self.num_kv, -1)
        return per_head.reshape(-1, 1, len(columns))

    def decode(self, layer: int, queries: Tensor, mask: Tensor) -> Tensor:
        """Attend with one query token per row, rows 0 .. n-1: [n, H, D] -> [n, H D]."""
        num_rows, num_heads, head = queries.shape
        grouped = queries.reshape(num_rows * self.num_kv, -1, head)
        keys, values = self._kv[layer, :, :num_rows, :, : mask.shape[-1]].flatten(1, 2)
        scores = torch.baddbmm(mask, grouped, keys.transpose(1, 2), alpha=head**-0.5)
        return torch.bmm(scores.softmax(-1), values).view(num_rows, num_heads * head)

    def free(self) -> None:
        """Let go of the memory."""
        self._kv = self._kv.new_empty(0)
        self._by_layer = []

    def copy_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of each source row into its target row."""
        used = self._kv[:, :, :, :, :length]
        index = torch.tensor([sources, targets], device=used.device)
        used.index_copy_(2, index[1], used.index_select(2, index[0]))


class _Packed(NamedTuple):
    """The tokens of one forward pass: d decoding rows, then the distinct prompts; N in all."""

    tokens: npt.NDArray[np.int64]
    """[N]"""
    positions: npt.NDArray[np.int64]
    """[N]"""
    rows: npt.NDArray[np.int64]
    """[N] cache row of each token; a shared prompt goes into the row of its first sequence."""
    prompt_lengths: npt.NDArray[np.int64]
    """[distinct prompts]"""
    last: npt.NDArray[np.int64] | None
    """[n] the token in the pass that each row samples after; None where that is all, in order."""


def _pack(state: npt.NDArray[np.void], wave: _Wave) -> _Packed:
    """Pack the rows in use, `state` [n] of `_ROW`, whose last ones are those of `wave`."""
    num_decoding = len(state) - len(wave.sequences)
    decoding = state[:num_decoding]
    rows = np.arange(num_decoding)
    if not wave.sequences:
        return _Packed(decoding["token"], decoding["position"], rows, np.empty(0, np.int64), None)
    lengths = np.array([len(prompt) for prompt in wave.prompts])
    ends = np.cumsum(lengths)
    prompts = np.fromiter(chain.from_iterable(wave.prompts), np.int64, ends[-1])
    first_rows = num_decoding + np.unique(wave.prompt_of, return_index=True)[1]
    return _Packed(
        tokens=np.concatenate([decoding["token"], prompts]),
        positions=np.concatenate(
            [decoding["position"], np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)]
        ),
        rows=np.concatenate([rows, np.repeat(first_rows, lengths)]),
        prompt_lengths=lengths,
        last=np.concatenate([rows, num_decoding + ends[wave.prompt_of] - 1]),
    )


class _Attention:
    """The attention of one forward pass: writes the cache, decodes from it, prefills beside it."""

    def __init__(self, cache: KVCache, packed: _Packed, device: str) -> None:
        self._cache = cache
        self._places = torch.from_numpy(cache.places(packed.rows, packed.positions)).to(device)
        self._num_decoding = num = len(packed.tokens) - int(packed.prompt_lengths.sum())
        self._prefill: _Prefill | None = None
        if len(packed.prompt_lengths):
            self._prefill = _Prefill(packed.prompt_lengths, cache.num_kv, device)
        if num:
            positions = packed.positions[:num]
            length = int(positions.max()) + 1
            self._mask = cache.mask(torch.from_numpy(positions).to(device), length)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See `torch_model.Attend`."""
        num, num_queries = self._num_decoding, qkv.shape[1] - 2 * self._cache.num_kv
        self._cache.write(layer, self._places, qkv[:, num_queries:])
        if self._prefill is None:
            return self._cache.decode(layer, qkv[:, :num_queries], self._mask)
        prefilled = self._prefill.attend(qkv[num:])
        if not num:
            return prefilled
        return torch.cat(
            [self._cache.decode(layer, qkv[:num, :num_queries], self._mask), prefilled]
        )


class _Prefill:
    """Causal attention within packed prompts; padded to the longest where lengths differ."""

    def __init__(self, lengths: npt.NDArray[np.int64], num_kv: int, device: str) -> None:
        longest = int(lengths.max())
        self._shape = (len(lengths), longest)
        self._num_kv = num_kv
        self._padded: Tensor | None = None
        """[prompts * longest] the packed token of every place; a prompt's last one repeats."""
        self._packed: Tensor | None = None
        """[tokens] the place of every packed token."""
        if int(lengths.min()) < longest:
            column, sizes = np.arange(longest), lengths[:, None]
            starts = np.cumsum(sizes, 0) - sizes
            padded = (starts + np.minimum(column, sizes - 1)).reshape(-1)
            self._padded = torch.from_numpy(padded).to(device)
            self._packed = torch.from_numpy(np.flatnonzero(column < sizes)).to(device)

    def attend(self, qkv: Tensor) -> Tensor:
        """[tokens, H + 2 KV, D] -> [tokens, H D]."""
        num_queries = qkv.shape[1] - 2 * self._num_kv
        if self._padded is not None:
            qkv = qkv.index_select(0, self._padded)
        heads = qkv.view(*self._shape, *qkv.shape[1:]).transpose(1, 2)
        queries, keys, values = torch.split(heads, [num_queries, self._num_kv, self._num_kv], 1)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=num_queries != self._num_kv
        )
        mixed = mixed.transpose(1, 2).flatten(2).flatten(0, 1)
        return mixed if self._packed is None else mixed.index_select(0, self._packed)


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


def _streams(sequences: list[_Sequence]) -> npt.NDArray[np.uint64]:
    """Place every sequence's random stream before its next token."""
    seeds = [sequence.request.seed % 2**64 for sequence in sequences]
    num_drawn = np.array([len(sequence.logprobs) for sequence in sequences], np.uint64)
    return _mixed(np.array(seeds, np.uint64) + _GAMMA) + num_drawn * _GAMMA


def _uniforms(streams: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Turn streams [n] into numbers in [0, 1 - 2**-52]."""
    return (_mixed(streams) >> np.uint64(12)).astype(np.float64) * 2.0**-52


class TorchEngine(Engine):
    """See `engines.base.Engine`. `submit` and `step` are the engine; the rest is asyncio around it.

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
        self._cache = KVCache(self._config, max_rows, max_context, device, dtype)
        self._state = np.zeros(max_rows, _ROW)
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
        tokens, logprobs = self._sample(self._forward(wave))
        ended = self._record(tokens.tolist(), logprobs.tolist())
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
        assert len(self._running) <= self._max_rows
        assert len(everyone) == len(self._in_flight)
        assert set(map(id, everyone)) == set(map(id, self._in_flight.values()))
        for row, sequence in enumerate(self._running):
            assert self._state["token"][row] == sequence.tokens[-1]
            assert self._state["position"][row] == len(sequence.tokens) - 1 < sequence.limit - 1
            assert sequence.versions[-1][1] == self._policy_version

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
        num_free = self._max_rows - len(self._running)
        while self._waiting and len(wave.sequences) < num_free and wave.admit(self._waiting[0]):
            sequence = self._waiting.popleft()
            sequence.versions.append((len(sequence.logprobs), self._policy_version))
        if wave.sequences:
            first = len(self._running)
            self._running += wave.sequences
            rows = self._state[first : len(self._running)]
            rows["position"] = [len(sequence.tokens) - 1 for sequence in wave.sequences]
            rows["stream"] = _streams(wave.sequences)
            rows["temperature"] = [s.request.temperature for s in wave.sequences]
        return wave

    def _forward(self, wave: _Wave) -> Tensor:
        """Run all rows, those of `wave` from their prompts; return logits [n, vocabulary]."""
        packed = _pack(self._state[: len(self._running)], wave)
        attention = _Attention(self._cache, packed, self._device)
        logits = self._model.forward(
            self._tensor(packed.tokens),
            self._rope.at(self._tensor(packed.positions)),
            attention.attend,
            None if packed.last is None else self._tensor(packed.last),
        )
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
        self._cache.copy_rows([owner for owner, _ in copies], [row for _, row in copies], longest)

    def _sample(self, logits: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Draw a token for each row and move the rows on; return tokens [n] and logprobs [n]."""
        rows = self._state[: len(logits)]
        if (rows["temperature"] != 1.0).any():
            logits /= self._tensor(rows["temperature"].astype(np.float32)).unsqueeze(1)
        rows["stream"] += _GAMMA
        uniforms = self._tensor(_uniforms(rows["stream"])).unsqueeze(1)
        drawn = [column.squeeze(1).cpu().numpy() for column in sample_tokens(logits, uniforms)]
        tokens, logprobs = drawn
        if not np.isfinite(logprobs).all():
            raise RunFault(
                "not_finite",
                f"the weights of version {self._policy_version} give logits that are not finite",
            )
        rows["token"] = tokens
        rows["position"] += 1
        return tokens, logprobs

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
        num_kept = len(self._running) - len(rows)
        gaps = [row for row in rows if row < num_kept]
        movers = sorted(set(range(num_kept, len(self._running))).difference(rows))
        if gaps:
            used = int(self._state["position"][movers].max())
            self._cache.copy_rows(movers, gaps, used)
            self._state[gaps] = self._state[movers]
            for gap, mover in zip(gaps, movers, strict=True):
                self._running[gap] = self._running[mover]
        del self._running[num_kept:]

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
                sequence.on_first_token(self._policy_version)
        for sequence, reason in ended:
            sequence.on_done(sequence.completion(reason))

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
