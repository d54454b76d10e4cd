"""vLLM with weights of a real trainer, in a process of its own; prints one JSON line.

    python -m perf.gpu_checks.vllm_probe '{"folder": ..., "size": ..., ...}'

    exact   versions 0 and 1: what vLLM says of the tokens it samples, decoded one by one (on a GPU
            by captured graphs) and prefilled, against the learner's forward pass
    price   what an update adds to a fixed amount of sampling, by recomputing or keeping the cache

Weights come the way they would in a run: on a GPU by CUDA IPC out of this process, with the reason
where that cannot be, else by host shared memory. Has not run on a GPU; on a CPU it has.
"""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from asyncrl_node.config import Config, LearnerConfig
from asyncrl_node.dtype_rules import DType
from asyncrl_node.engines.base import GenerateRequest
from asyncrl_node.engines.cuda_flat import gpu_handle
from asyncrl_node.engines.vllm_engine import VllmEngine
from asyncrl_node.engines.vllm_start import VllmSettings
from asyncrl_node.learner.weights import LearnerWeights
from asyncrl_node.messages import WeightsManifest
from asyncrl_node.run_directory import SHM_FOLDER
from asyncrl_node.transport.weights import layout_hash

if TYPE_CHECKING:
    from asyncrl_node.learner.trainer import Trainer


class Order(msgspec.Struct):
    """What to do."""

    kind: Literal["exact", "price"]
    model_dir: str
    on: Literal["cpu", "cuda"]
    dtype: DType = "float32"
    tensor_parallel: int = 1
    kv_after_update: Literal["recompute", "keep"] = "recompute"
    num_requests: int = 8
    prompt_tokens: int = 24
    new_tokens: int = 32
    kv_cache_bytes: int | None = None


class Found(msgspec.Struct):
    """What was found; the fields that do not belong to the kind stay as they are."""

    way: str = ""
    """How the weights came: "cuda_ipc", or "host" and why."""
    same_hash: bool = False
    differences: list[float] = []
    """Largest difference of a sampled token's log-probability, of versions 0 and 1."""
    scored: list[float] = []
    """The same of scored prompts."""
    moved: float = 0.0
    """Largest difference between the two versions' scores: the update has an effect."""
    plain_s: float = 0.0
    """Of the sampling without an update."""
    updated_s: float = 0.0
    """With one in the middle."""
    stall_s: float = 0.0
    """Of the update itself."""
    resident_tokens: int = 0
    """In the cache when the update came, about."""


class Learner:
    """A trainer without training: weights that move by noise, and their publication."""

    def __init__(self, order: Order) -> None:
        from asyncrl_node.learner.trainer import Trainer

        # vLLM wants most of a card; where nothing is compared the trainer stays off it
        on = "cpu" if order.kind == "price" else order.on
        self.trainer: Trainer = Trainer(
            LearnerConfig(), Path(order.model_dir), 1.0, 0, on, order.dtype
        )
        entries, num_bytes = self.trainer.manifest()
        self.manifest = WeightsManifest(num_bytes, entries, layout_hash(entries))
        self.path = SHM_FOLDER / f"arl-check-{secrets.token_hex(4)}"
        gpus = None if order.on == "cpu" else "0,"
        self._weights = LearnerWeights(Config(gpus=gpus), self.manifest, self.path)
        self.digest = -1

    def publish(self, version: int) -> None:
        """Write the present weights."""
        self.digest = self._weights.publish(version, self.trainer)

    def move(self) -> None:
        """Add noise to every parameter, as large as an update that is to be seen."""
        import torch

        torch.manual_seed(1)
        for _, tensor in self.trainer.named_weights():
            tensor.add_(0.1 * torch.randn_like(tensor))

    def way(self) -> str:
        """Say how an engine gets them."""
        terms = self._weights.terms
        return "cuda_ipc" if terms.weights else f"host {terms.reason}".strip()

    def open(self, engine: VllmEngine) -> None:
        """Tell an engine where they are."""
        handles = self._weights.terms.weights
        engine.open_weights(self.manifest, self.path, gpu_handle(handles, 0) if handles else None)

    def close(self) -> None:
        """Free everything."""
        self._weights.close()


def make_engine(order: Order) -> VllmEngine:
    """Start vLLM as a sampler does."""
    return VllmEngine(
        Path(order.model_dir),
        VllmSettings(
            max_rows=order.num_requests,
            max_context=order.prompt_tokens + order.new_tokens + 1,
            cpu=order.on == "cpu",
            dtype=order.dtype,
            tensor_parallel=order.tensor_parallel,
            kv_cache_memory_bytes=order.kv_cache_bytes,
            kv_after_update=order.kv_after_update,
        ),
    )


def requests_of(order: Order, first: int) -> list[GenerateRequest]:
    """Make requests whose prompts and numbers nobody has had before."""
    return [
        GenerateRequest(
            number,
            [
                (7 * number + 3 * place + place * place) % 199
                for place in range(order.prompt_tokens)
            ],
            order.new_tokens,
            1.0,
            number,
        )
        for number in range(first, first + order.num_requests)
    ]


def worst(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest difference."""
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


async def load(engine: VllmEngine, version: int) -> int:
    """Bring a version in; returns its hash."""
    await engine.copy_weights(version)
    return await engine.use_weights(version)


async def exact(order: Order, learner: Learner, engine: VllmEngine) -> Found:
    """Compare vLLM with the learner at two versions."""
    found, scores = Found(way=learner.way(), same_hash=True), []
    for version in (0, 1):
        if version:
            learner.move()
        learner.publish(version)
        found.same_hash &= await load(engine, version) == learner.digest
        requests = requests_of(order, 1000 * version)
        completions = await asyncio.gather(*map(engine.generate, requests))
        pairs = list(zip(requests, completions, strict=True))
        assert {v for _, each in pairs for v in each.policy_versions} == {version}
        sampled = [
            worst(
                each.logprobs,
                learner.trainer.score(request.prompt_tokens + each.tokens)[-len(each.tokens) :],
            )
            for request, each in pairs
        ]
        found.differences.append(max(sampled))
        probe = requests_of(order, 0)[0].prompt_tokens
        scores.append(await engine.score(probe))
        found.scored.append(worst(scores[-1], learner.trainer.score(probe)))
    found.moved = worst(*scores)
    return found


async def price(order: Order, learner: Learner, engine: VllmEngine) -> Found:
    """Time the same amount of sampling without an update, and with one in its middle."""
    found = Found(way=learner.way())
    learner.publish(0)
    await load(engine, 0)
    for turn in (0, 1, 2):  # the first warms up
        begun: asyncio.Queue[int] = asyncio.Queue()
        began_s = time.monotonic()
        running = [
            asyncio.ensure_future(engine.generate(request, begun.put_nowait))
            for request in requests_of(order, 10_000 * (turn + 1))
        ]
        if turn == 2:
            for _ in running:
                await begun.get()
            stood_s = time.monotonic()
            learner.publish(1)
            published_s = time.monotonic() - stood_s
            await load(engine, 1)
            found.stall_s = time.monotonic() - stood_s - published_s
            began_s += published_s
        await asyncio.gather(*running)
        took_s = time.monotonic() - began_s
        if turn == 1:
            found.plain_s = took_s
        found.updated_s = took_s
    found.resident_tokens = order.num_requests * order.prompt_tokens
    return found


async def run(order: Order) -> Found:
    """Make both ends, compare, end them. vLLM must be made on the main thread, in its loop."""
    learner = Learner(order)
    engine = make_engine(order)
    serving = asyncio.ensure_future(engine.serve())
    try:
        learner.open(engine)
        work = exact if order.kind == "exact" else price
        return await work(order, learner, engine)
    finally:
        serving.cancel()
        engine.close()
        learner.close()


def main() -> None:
    """Do what the argument says."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    out, sys.stdout = sys.stdout, sys.stderr  # vLLM prints
    with asyncio.Runner() as runner:
        found = runner.run(run(order))
    gc.collect()
    out.write(json.dumps(msgspec.to_builtins(found)) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
