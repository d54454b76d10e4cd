"""vLLM as the sampling engine: token ids in; token ids, logprobs and versions out.

    generate --> AsyncLLM --> EngineCore process, with the worker in it (vllm_weights.py)
    copy_weights(v): arl_fetch, under the lease; the old weights go on decoding
    use_weights(v):  pause (keep) -> start -> update -> finish -> resume; then the copy's hash

The scheduler of vLLM is paused around a swap: running requests keep their place, and with
`kv_after_update="recompute"` they lose their key-value cache and start over from the tokens they
have, so no token depends on two versions. vLLM stamps every token with the version in use.

One row more than `max_rows` belongs to `score` and `decode`, ahead of everything that waits: a
sampler whose rows are all taken for an hour still proves its weights at once.

Waits: a request waits for weights, ended by `use_weights`, and for a row, ended by a request that
ends; then for vLLM, ended by its last token; all of it also by `abort` or `close`. What makes the
engine useless ends `serve`, and with it the sampler; until then requests stay open, so that none is
reported as failed by its own fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl_node.engines.base import (
    DECODED_RANK,
    Completion,
    Decoded,
    Engine,
    FinishReason,
    FlatHandle,
    GenerateRequest,
    OwnProcessLoader,
)
from asyncrl_node.engines.vllm_start import VllmSettings, check_installed, start, vocab_size
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import WeightsManifest

if TYPE_CHECKING:
    from vllm import SamplingParams

log = logging.getLogger(__name__)

_ABORTED = Completion([], [], [], "abort")
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_FIRST = -1
"""The priority of what goes before everything else; requests have 0."""
_WATCH_S = 0.5
_ABORT_AGAIN_S = 0.02
_END_WITHIN_S = 1.0
"""Then vLLM's process is killed; it holds nothing that anyone needs."""

OnFirstToken = Callable[[int], None]


class _Flight:
    """A request under way. Compared by identity."""

    __slots__ = ("aborted", "gate", "submitted")

    def __init__(self) -> None:
        self.aborted = False
        self.submitted = False
        self.gate: asyncio.Future[None] | None = None
        """What it waits for before it is submitted."""

    def pass_gate(self) -> None:
        if self.gate is not None and not self.gate.done():
            self.gate.set_result(None)


class VllmEngine(Engine, OwnProcessLoader):
    """See `engines.base`.

    Make it on the main thread, inside the loop that will use it: vLLM's processes die with the
    thread that made them (vllm_plugin.py). It takes 12 s or more, during which the loop stands.
    """

    def __init__(self, model_dir: Path, settings: VllmSettings) -> None:
        """Read `config.json` in `model_dir`, start vLLM; weights come by `copy_weights`.

        Raises: ConfigError for a missing installation, or a model that vLLM does not run.
        """
        check_installed()
        self._settings = settings
        self._vocab_size = vocab_size(model_dir)
        self._llm = start(model_dir, settings)
        self._buffer: tuple[WeightsManifest, FlatHandle] | None = None
        self._is_open = False
        self._policy_version = -1
        self._swapping = False
        self._closed = False
        self._failure: RunFault | None = None
        self._failed = asyncio.Event()
        self._in_flight: dict[int, _Flight] = {}
        self._num_submitted = 0
        self._num_probes = 0
        self._generations: set[asyncio.Future[Completion]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; -1 before the first load."""
        return self._policy_version

    async def serve(self) -> None:
        """Watch vLLM's process; it steps by itself.

        Raises: RunFault "engine_failed" if it dies; "not_finite" for a logprob that is not.
        """
        while self._failure is None:
            if not self._closed and self._llm.errored:
                self._fail("engine_failed", "vLLM's engine process ended; see the sampler's log")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), _WATCH_S)
        raise self._failure

    # -- requests ----------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, on_first_token: OnFirstToken | None = None
    ) -> Completion:
        """Sample one completion. Cancelling it aborts it.

        Raises: ValueError for a request that can never fit.
        """
        self._refuse_misfit(request)
        if self._closed:
            return _ABORTED
        flight = self._in_flight[request.request_id] = _Flight()
        generation = asyncio.ensure_future(self._generate(request, flight, on_first_token))
        self._generations.add(generation)
        try:
            return await generation
        except (asyncio.CancelledError, Exception):
            if self._closed and not _is_cancelled():
                return _ABORTED
            raise
        finally:
            self._generations.discard(generation)
            del self._in_flight[request.request_id]

    def abort(self, request_id: int) -> None:
        """End a generation with what it has; one that is not in flight has ended already."""
        flight = self._in_flight.get(request_id)
        if flight is None or flight.aborted:
            return
        flight.aborted = True
        flight.pass_gate()
        if flight.submitted:
            self._spawn(self._abort(request_id, flight))

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """See `Engine.score`: a prompt's own log-probabilities, which vLLM gives at temperature 1.

        A prompt that is scored is computed anew, whatever is cached, and goes before what waits.
        """
        scored = (await self._probe(tokens, 1, prompt_logprobs=0)).prompt_logprobs
        return [entry[token].logprob for entry, token in zip(scored[1:], tokens[1:], strict=True)]

    async def decode(self, prompt_tokens: Sequence[int], num_tokens: int) -> Decoded:
        """See `Engine.decode`: through vLLM's own scheduler, on the row that `score` has too."""
        sampled = (await self._probe(prompt_tokens, num_tokens)).outputs[0]
        *drawn, last = sampled.logprobs
        ranked = {entry.rank: token for token, entry in last.items()}
        tokens = [*sampled.token_ids[:-1], ranked[min(DECODED_RANK, self._vocab_size)]]
        entries = zip([*drawn, last], tokens, strict=True)
        return Decoded(tokens, [entry[token].logprob for entry, token in entries])

    async def _probe(
        self, tokens: Sequence[int], num_new: int, prompt_logprobs: int | None = None
    ) -> Any:  # noqa: ANN401 - what vLLM returns
        """Run one request at temperature 1, computed anew and ahead of what waits."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        assert self._policy_version >= 0, "probed before the first weights"
        assert not self._swapping, "probed while weights are on their way"
        sampling = SamplingParams(
            temperature=1.0,
            seed=0,
            max_tokens=num_new,
            ignore_eos=True,
            logprobs=DECODED_RANK,
            prompt_logprobs=prompt_logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._num_probes += 1
        request_id = f"probe-{self._num_probes}"
        prompt = tokens_input(list(tokens), cache_salt=request_id)

        async def last_output() -> Any:  # noqa: ANN401 - what vLLM returns
            outputs = self._llm.generate(prompt, sampling, request_id, priority=_FIRST)
            return [output async for output in outputs][-1]

        return await _named(last_output())

    def close(self) -> None:
        """End vLLM's processes; everything in flight ends as aborted, without its tokens."""
        if self._closed:
            return
        self._closed = True
        for generation in self._generations:
            generation.cancel()
        for task in self._tasks:
            task.cancel()
        self._llm.shutdown(timeout=_END_WITHIN_S)
        del self._llm  # its __del__ would fail at the interpreter's end

    async def _generate(
        self, request: GenerateRequest, flight: _Flight, on_first_token: OnFirstToken | None
    ) -> Completion:
        while not flight.aborted and not self._may_submit():
            flight.gate = asyncio.get_running_loop().create_future()
            await flight.gate
        if flight.aborted:
            return _ABORTED
        flight.submitted = True
        self._num_submitted += 1
        try:
            return await self._sample(request, on_first_token)
        finally:
            self._num_submitted -= 1
            self._pass_gates()

    def _may_submit(self) -> bool:
        """New weights are neither missing nor on their way, and a row is free."""
        ready = self._policy_version >= 0 and not self._swapping
        return ready and self._num_submitted < self._settings.max_rows

    def _pass_gates(self) -> None:
        """Have what waits look again, first come, first served."""
        for flight in self._in_flight.values():
            flight.pass_gate()

    async def _sample(
        self, request: GenerateRequest, on_first_token: OnFirstToken | None
    ) -> Completion:
        """Collect vLLM's two outputs: the first token, then all the rest with the versions."""
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        # By the time vLLM runs it, an update may have come: what it finds cached, or has half
        # computed, is of this version then, whatever the first token is stamped with.
        keeps = self._settings.kv_after_update == "keep"
        kv_version = self._policy_version if keeps else None
        salt = f"v{kv_version}" if keeps else None
        prompt = tokens_input(request.prompt_tokens, cache_salt=salt)
        parts: list[Any] = []
        outputs = self._llm.generate(prompt, self._sampling(request), str(request.request_id))
        try:
            async for output in outputs:
                part = output.outputs[0]
                if on_first_token is not None and not parts and part.token_ids:
                    on_first_token(self._policy_version)
                parts.append(part)
        except EngineDeadError:
            self._fail("engine_failed", "vLLM's engine process ended; see the sampler's log")
        else:
            completion = self._completion(parts, kv_version)
            if completion is not None:
                return completion
        never: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        return await never  # `close` ends it: see the top of this file

    def _sampling(self, request: GenerateRequest) -> SamplingParams:
        """Sample from the whole distribution; one output for the first token, one for the rest."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stops = [token for token in request.stop_token_ids if 0 <= token < self._vocab_size]
        return SamplingParams(
            n=1,
            temperature=request.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=request.seed % 2**63,
            max_tokens=request.max_new_tokens,
            ignore_eos=True,  # only what the request names ends it
            stop_token_ids=stops,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=request.max_new_tokens + 1,
        )

    def _completion(self, parts: list[Any], kv_version: int | None) -> Completion | None:
        """Join vLLM's outputs; None, and the engine has failed, if they are not sound."""
        tokens = [token for part in parts for token in part.token_ids]
        drawn = [entry for part in parts for entry in part.logprobs or ()]
        logprobs = [entry[token].logprob for entry, token in zip(drawn, tokens, strict=True)]
        spans = parts[-1].weight_versions or ()
        versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
        reason = _FINISH_REASONS.get(parts[-1].finish_reason)
        if not math.isfinite(sum(logprobs)):
            story = (
                f"the weights of versions {sorted(set(versions))} give logprobs that are not finite"
            )
            self._fail("not_finite", story)
            return None
        if reason is None or len(versions) != len(tokens):
            story = f"vLLM ended a request by {parts[-1].finish_reason!r}, with versions {spans}"
            self._fail("engine_failed", story)
            return None
        return Completion(tokens, logprobs, versions, reason, kv_version)

    async def _abort(self, request_id: int, flight: _Flight) -> None:
        """Ask until it has ended: vLLM forgets an abort that comes before its request does."""
        while self._in_flight.get(request_id) is flight:
            await self._llm.abort(str(request_id))
            await asyncio.sleep(_ABORT_AGAIN_S)

    def _fail(self, name: str, story: str) -> None:
        """Have `serve` raise this fault; the first one counts."""
        if self._failure is None and not self._closed:
            self._failure = RunFault(name, story)
            self._failed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse_misfit(self, request: GenerateRequest) -> None:
        prompt, num_new = request.prompt_tokens, request.max_new_tokens
        if request.request_id in self._in_flight:
            raise ValueError(f"request {request.request_id} is in flight already")
        if not prompt or num_new < 1:
            raise ValueError("a request needs at least one prompt token and one new token")
        if len(prompt) + num_new > self._settings.max_context:
            raise ValueError(
                f"{len(prompt)} prompt + {num_new} new tokens do not fit the context"
                f" of {self._settings.max_context}"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise ValueError(f"a prompt token is outside 0..{self._vocab_size - 1}")
        if not 0 < request.temperature < math.inf:
            raise ValueError(f"temperature must be above 0 (got {request.temperature})")

    # -- weights -----------------------------------------------------------------------------

    def open_weights(
        self, manifest: WeightsManifest, path: Path, handle: FlatHandle | None = None
    ) -> None:
        """Note where the learner's buffer is; the first `copy_weights` maps it."""
        self._buffer = (manifest, handle or {"kind": "host", "path": str(path)})
        self._is_open = False

    async def copy_weights(self, version: int) -> None:
        """See `OwnProcessLoader.copy_weights`."""
        assert not self._closed, "weights for a closed engine"
        assert not self._swapping, "the last version copied is not in use yet"
        await self._open()
        await _named(self._llm.collective_rpc("arl_fetch", args=(version,)))
        self._swapping = True

    async def use_weights(self, version: int) -> int:
        """See `OwnProcessLoader.use_weights`."""
        assert self._swapping, "nothing was copied"
        await _named(self._swap(version))
        digests = set(await _named(self._llm.collective_rpc("arl_digest")))
        assert len(digests) == 1, f"the workers copied different bytes: {digests}"
        return int(digests.pop())

    async def _open(self) -> None:
        if self._is_open:
            return
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        assert self._buffer is not None, "copy_weights before open_weights"
        manifest, handle = self._buffer
        init_info = {"manifest": msgspec.msgpack.encode(manifest), "handle": handle}
        request = WeightTransferInitRequest(init_info=init_info)
        await _named(self._llm.init_weight_transfer_engine(request))
        self._is_open = True

    async def _swap(self, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        recompute = self._settings.kv_after_update == "recompute"
        began_s = time.monotonic()
        await self._llm.pause_generation(mode="keep", clear_cache=recompute)
        await self._llm.start_weight_update()
        update = WeightTransferUpdateRequest(update_info={"version": version})
        await self._llm.update_weights(update)
        await self._llm.finish_weight_update(weight_version=str(version))
        self._policy_version = version  # before the first token that it samples
        await self._llm.resume_generation()
        log.info("version %d: stood still for %.6f s", version, time.monotonic() - began_s)
        self._swapping = False
        self._pass_gates()


def _is_cancelled() -> bool:
    """Return True if somebody asks the running task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _named(call: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - what vLLM returns
    """Await a call into vLLM's processes; an error from there is text, which names the fault."""
    try:
        return await call
    except RunFault:
        raise
    except Exception as error:
        found = re.search(r"\b(weights_mismatch|torn_weights): (.*)", str(error), re.DOTALL)
        if found is not None:
            raise RunFault(found[1], found[2]) from error
        story = f"{type(error).__name__}: {error}; see the sampler's log"
        raise RunFault("engine_failed", story) from error
