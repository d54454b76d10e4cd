"""Real sampler processes with just enough around them to be measured.

    this process: the learner's side of the weights (PublishingCore, Courier, the export), and a
                  stand-in for the scheduler (a ROUTER at its address; it admits what it is told to)
        |  real messages, real slots, real weight buffer
    python -m asyncrl_node.sampler --index 0 .. S-1

Nothing of the samplers is replaced. What is not here: the trainer (weights are random numbers) and
the pacing. Waits: for messages of the samplers, ended by them, by one that exits, or by a deadline.
"""

from __future__ import annotations

import json
import math
import queue
import re
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import zmq
from safetensors.numpy import load_file, save_file

from asyncrl_node.config import Config
from asyncrl_node.config_file import encode_config
from asyncrl_node.core.layout import layout_weights
from asyncrl_node.core.probe import make_probe
from asyncrl_node.core.publishing import (
    AtFault,
    PublishingCore,
    PublishingEvent,
    PublishingInstruction,
)
from asyncrl_node.core.transport import TransportTerms
from asyncrl_node.engines.torch_model import ModelConfig, parameter_shapes
from asyncrl_node.engines.vllm_start import vllm_environment
from asyncrl_node.learner.courier import Courier
from asyncrl_node.learner.process import copies_at_once
from asyncrl_node.learner.weights import LearnerWeights
from asyncrl_node.messages import (
    Admit,
    GroupCompleted,
    GroupFailed,
    GroupKey,
    LearnerMessage,
    LoadStarted,
    Release,
    SamplerFault,
    SamplerHello,
    SamplerMessage,
    SamplerOrder,
    Stop,
    WeightsLoaded,
    WeightsManifest,
)
from asyncrl_node.plan import engine_of, max_rollout_tokens, run_slot_bytes, task_of
from asyncrl_node.run_directory import RunDirectory, new_runtime, slot_folder, sweep, weights_path
from asyncrl_node.supervisor import Child
from asyncrl_node.transport.channel import Peer, Router, endpoint
from asyncrl_node.transport.weights import layout_hash

HUNDRED_MILLION = ModelConfig(
    model_type="qwen3",
    vocab_size=65536,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
)
"""100.7M parameters, half of them in the embedding, as in the small models that people train."""
TINY = ModelConfig(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=96,
    intermediate_size=288,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=32,
    tie_word_embeddings=True,
)
"""The shape of the demo's model."""

RANDOM_PROMPTS = f"{Path(__file__).parent / 'random_prompts.py'}:RandomPrompts"

_START_WITHIN_S = 300.0
_ANSWER_WITHIN_S = 600.0
_STOOD_STILL = re.compile(r"version (\d+): stood still for ([0-9.]+) s")
_CANARY = re.compile(r"version (\d+): ([0-9.]+) s for the canary")


class Update(NamedTuple):
    """One version on one sampler; seconds on this machine's monotonic clock."""

    sampler: int
    announced_s: float
    """The version was complete in the buffer and hashed, and the courier was told."""
    started_s: float
    """The learner read that the sampler begins to copy."""
    released_s: float
    """The learner read that the sampler has its copy."""
    acknowledged_s: float
    """The learner read that the version is in use there, and had compared its hash."""


class Sampled(NamedTuple):
    """Groups that were admitted together."""

    num_tokens: int
    """Sampled, over all rollouts."""
    ended_s: float
    """When the message of the last one was read, on this machine's monotonic clock."""
    rollouts: list[list[int]]
    """Whole tokens, prompt first; groups in the order of admission."""


class TimedCore(PublishingCore):
    """The learner's real decisions; notes when each message of a transaction was dealt with.

    `with_canary` says whether the samplers score it; without a trainer there is nothing to compare
    it with, so every answer passes.
    """

    def __init__(self, manifest: WeightsManifest, config: Config, terms: TransportTerms) -> None:
        most = max_rollout_tokens(config, task_of(config)) - 1
        probe = make_probe(_vocab_size(manifest), most, math.inf)
        assert probe is not None
        super().__init__(
            manifest,
            config.weights_overdue_s,
            terms=terms,
            copies_at_once=copies_at_once(config),
        )
        self._canary = probe
        self.seen: queue.SimpleQueue[tuple[PublishingEvent | AtFault, float]] = queue.SimpleQueue()

    def with_canary(self, wanted: bool) -> tuple[float, ...]:
        """Set whether the next versions are probed; return what the learner would have scored."""
        self.probe = self._canary if wanted else None
        return (0.0,) * (len(self._canary.tokens) - 1)

    def handle(self, event: PublishingEvent, now_s: float) -> list[PublishingInstruction]:
        """Decide, then note."""
        instructions = super().handle(event, now_s)
        if isinstance(event, LoadStarted | Release | WeightsLoaded):
            self.seen.put((event, time.monotonic()))
        for instruction in instructions:
            if isinstance(instruction, AtFault):
                self.seen.put((instruction, time.monotonic()))
        return instructions


def _vocab_size(manifest: WeightsManifest) -> int:
    """Rows of the embedding."""
    (rows,) = (e.shape[0] for e in manifest.entries if e.name == "model.embed_tokens.weight")
    return rows


def make_model(folder: Path, config: ModelConfig, seed: int = 0) -> None:
    """Write a model in Hugging Face form: float32, random, norms of one."""
    dice = np.random.default_rng(seed)
    weights = {
        name: np.ones(shape, np.float32)
        if "norm" in name
        else dice.standard_normal(shape, np.float32) * np.float32(0.05)
        for name, shape in parameter_shapes(config).items()
    }
    more = {
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    fields = {k: v for k, v in msgspec.to_builtins(config).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(fields | more))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def read_flat(folder: Path, config: ModelConfig) -> tuple[WeightsManifest, npt.NDArray[np.uint8]]:
    """Lay a model's weights out as the learner does: manifest, and the whole area as bytes."""
    shapes = parameter_shapes(config)
    specs = [(name, "float32", shape, 4 * int(np.prod(shape))) for name, shape in shapes.items()]
    entries, num_bytes = layout_weights(specs)
    flat = np.zeros(num_bytes, np.uint8)
    weights = load_file(folder / "model.safetensors")
    for entry in entries:
        area = flat[entry.offset : entry.offset + entry.num_bytes]
        area[:] = weights[entry.name].reshape(-1).view(np.uint8)
    return WeightsManifest(num_bytes, entries, layout_hash(entries)), flat


class SamplerRig:
    """Samplers of one configuration; a context manager: nothing of it outlives it."""

    def __init__(
        self, config: Config, manifest: WeightsManifest, flat: npt.NDArray[np.uint8]
    ) -> None:
        """Start the samplers of `config`, whose run_dir is new; `flat` are the first weights."""
        self._config = config
        self._flat = flat
        self._directory = RunDirectory(Path(config.run_dir))
        self._directory.create()
        self._directory.config.write_bytes(encode_config(config))
        self.runtime = new_runtime(run_slot_bytes(config, task_of(config)))
        self._directory.write_runtime(self.runtime)
        self._slots = slot_folder(self.runtime)
        self.buffer_path = weights_path(self.runtime)
        self._zmq = zmq.Context()
        sockets = Path(self.runtime.sockets_dir)
        self._router: Router[SamplerMessage | LearnerMessage, SamplerOrder] = Router(
            self._zmq,
            endpoint(sockets, "scheduler"),
            {"sampler": SamplerMessage, "learner": LearnerMessage},
        )
        self._weights = LearnerWeights(config, manifest, self.buffer_path)
        self._core = TimedCore(manifest, config, self._weights.terms)
        self._courier = Courier(self._core, sockets, self._weights)
        self._version = -1
        self._num_groups = 0
        self._samplers = range(config.samplers or 1)
        self._children: list[Child] = []
        self._early: list[GroupCompleted | GroupFailed] = []

    def __enter__(self) -> Self:
        try:
            for index in self._samplers:
                self._children.append(self._spawn(index))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the samplers and remove what lies in shared memory."""
        for index, child in enumerate(self._children):
            if child.exit_code() is None:
                self._router.send(Peer("sampler", index), Stop())
        deadline_s = time.monotonic() + 10.0
        for child in self._children:
            while child.exit_code() is None and time.monotonic() < deadline_s:
                time.sleep(0.05)
            child.kill()
        self._courier.close()
        self._weights.close()
        self._router.close()
        self._zmq.term()
        sweep(self.runtime)

    def _spawn(self, index: int) -> Child:
        environment: dict[str, str] = {}
        if engine_of(self._config) == "vllm":
            cpu = not self._config.gpus
            environment = vllm_environment(cpu, -1, self.runtime.sockets_dir)
        if self._config.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(index)
        command = [sys.executable, "-m", "asyncrl_node.sampler"]
        command += ["--run-dir", self._config.run_dir, "--index", str(index)]
        return Child(f"sampler-{index}", command, self._directory, environment)

    # -- weights -----------------------------------------------------------------------------

    def start(self) -> None:
        """Publish the first version; wait until every sampler has loaded it and asks for work."""
        self.publish(_START_WITHIN_S)
        missing = set(self._samplers)
        while missing:
            message = self._receive(_START_WITHIN_S)
            if isinstance(message, SamplerHello):
                missing.discard(message.sampler)

    def publish(self, within_s: float = _ANSWER_WITHIN_S, canary: bool = True) -> list[Update]:
        """Publish one more version, whose bytes differ; wait until every sampler acknowledged."""
        announced_s = self.announce(canary)
        return self.updates(announced_s, within_s)

    def announce(self, canary: bool) -> float:
        """Publish one more version; return when it was announced. Waits for leases only."""
        self._version += 1
        self._flat[:4] = np.frombuffer(np.float32(0.01 * self._version).tobytes(), np.uint8)
        self._courier.wait_until_free()
        digest = self._weights.publish(self._version, self)
        scores = self._core.with_canary(canary)
        announced_s = time.monotonic()
        self._courier.announce(self._version, digest, scores)
        return announced_s

    def copy_weights_into(self, area: memoryview) -> None:
        """Write the version, as a trainer does."""
        np.copyto(np.frombuffer(area, np.uint8), self._flat)

    def updates(self, announced_s: float, within_s: float = _ANSWER_WITHIN_S) -> list[Update]:
        """Wait until every sampler has acknowledged the version announced last."""
        seen: dict[tuple[int, type[PublishingEvent]], float] = {}
        open_samplers = set(self._samplers)
        deadline_s = time.monotonic() + within_s
        while open_samplers:
            try:
                event, at_s = self._core.seen.get(timeout=0.2)
            except queue.Empty:
                self._check(deadline_s)
                continue
            if isinstance(event, AtFault):
                raise RuntimeError(f"{event.name}: {event.story}")
            assert isinstance(event, LoadStarted | Release | WeightsLoaded)
            if event.version == self._version:
                seen[event.sampler, type(event)] = at_s
                if isinstance(event, WeightsLoaded):
                    open_samplers.discard(event.sampler)
        assert set(self._core.acknowledged.values()) == {self._version}, "hashes that differ"
        kinds = (LoadStarted, Release, WeightsLoaded)
        return [
            Update(index, announced_s, *(seen[index, kind] for kind in kinds))
            for index in self._samplers
        ]

    def stalls_s(self) -> dict[int, list[float]]:
        """By version, how long each sampler says that it could not decode, from their logs."""
        return self._logged(_STOOD_STILL)

    def canaries_s(self) -> dict[int, list[float]]:
        """By version, how long each sampler says that it scored the canary."""
        return self._logged(_CANARY)

    def _logged(self, pattern: re.Pattern[str]) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for index in self._samplers:
            text = (self._directory.logs / f"sampler-{index}.log").read_text()
            for version, seconds in pattern.findall(text):
                found.setdefault(int(version), []).append(float(seconds))
        return found

    def cpu_s(self) -> float:
        """CPU seconds that the samplers have used so far, with vLLM's processes."""
        roots = [psutil.Process(child.process.pid) for child in self._children]
        tree = [*roots, *(below for root in roots for below in root.children(recursive=True))]
        times = [process.cpu_times() for process in tree]
        return float(sum(each.user + each.system for each in times))

    @property
    def version(self) -> int:
        """The version published last."""
        return self._version

    # -- sampling ----------------------------------------------------------------------------

    def admit(self, problems: Sequence[int]) -> dict[GroupKey, int]:
        """Have groups sampled, dealt out to the samplers in turn; return their keys."""
        keys = {}
        for problem in problems:
            key = GroupKey(self._num_groups, 0)
            self._num_groups += 1
            self._slots.reserve(key)
            keys[key] = problem
        for number, (key, problem) in enumerate(keys.items()):
            peer = Peer("sampler", self._samplers[number % len(self._samplers)])
            self._router.send(peer, Admit(key, problem, 0, 0, self._config.seed + problem))
        return keys

    def collect(self, keys: dict[GroupKey, int]) -> Sampled:
        """Wait for groups. Raises: RuntimeError for one that failed."""
        done: dict[GroupKey, GroupCompleted] = {}
        while len(done) < len(keys):
            message = self._early.pop() if self._early else self._receive(_ANSWER_WITHIN_S)
            if isinstance(message, GroupFailed):
                raise RuntimeError(f"{message.key} failed: {message.reason}")
            if isinstance(message, GroupCompleted):
                done[message.key] = message
        ended_s = time.monotonic()
        rollouts: list[list[int]] = []
        for key in keys:
            group = self._slots.read_group(key, done[key].num_bytes, done[key].checksum)
            starts = group.rollout_starts
            for start, end in pairwise(starts):
                rollouts.append(group.tokens[start:end].tolist())
            self._slots.release(key)
        return Sampled(sum(message.num_tokens for message in done.values()), ended_s, rollouts)

    def is_answered(self) -> bool:
        """Say whether a group is completed already; drops what came before that is not one."""
        while (received := self._router.receive()) is not None:
            if isinstance(received[1], GroupCompleted | GroupFailed):
                self._early.append(received[1])
        return bool(self._early)

    def _receive(self, within_s: float) -> SamplerMessage | LearnerMessage:
        deadline_s = time.monotonic() + within_s
        while (received := self._router.receive()) is None:
            self._router.socket.poll(200)
            self._check(deadline_s)
        _, message = received
        if isinstance(message, SamplerFault):
            raise RuntimeError(f"{message.name}: {message.story}")
        return message

    def _check(self, deadline_s: float) -> None:
        """Raise if a sampler is gone, or nothing has come for too long."""
        for child in self._children:
            if child.exit_code() is not None:
                log = self._directory.logs / f"{child.name}.log"
                words = "\n".join(log.read_text().splitlines()[-15:])
                raise RuntimeError(f"{child.name} ended:\n{words}")
        if time.monotonic() > deadline_s:
            raise TimeoutError("the samplers have not answered in time")
