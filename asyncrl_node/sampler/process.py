"""The sampler process: one engine, one asyncio loop; receive -> core -> obey.

    scheduler --Admit--> SamplerCore --StartRollout--> RolloutRunner --> Engine
    learner   --LeaseGranted--> LoadWeights (between two decode steps) --> Release, WeightsLoaded
              --WeightsAccepted--> the first one: SamplerHello
    all rollouts of a group in, their versions accepted --> slot written --> GroupCompleted

One thread: a decode step, a weight load and a message never overlap. Waits: each task here waits
for its socket, for the engine or for the clock; `run` ends with the Stop order or the first task
that raises.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from itertools import chain
from math import isfinite, nan
from pathlib import Path
from typing import Any, assert_never

import zmq.asyncio

from asyncrl_node.core.advantages import compared_range
from asyncrl_node.core.sampling import (
    AbandonGroup,
    AskForWork,
    CopyDone,
    EndProcess,
    FirstToken,
    LoadDone,
    LoadWeights,
    RolloutDone,
    RolloutKey,
    RolloutRaised,
    SamplerCore,
    SamplerEvent,
    SamplerInstruction,
    SamplerSettings,
    StartRollout,
    ToLearner,
    ToScheduler,
    WriteGroup,
)
from asyncrl_node.core.transport import (
    CloseTest,
    ComparePattern,
    OpenTest,
    OpenWeights,
    WeightsOpened,
)
from asyncrl_node.engines.base import Engine, InProcessLoader, OwnProcessLoader
from asyncrl_node.engines.cuda_flat import gpu_handle
from asyncrl_node.engines.factory import make_engine
from asyncrl_node.messages import (
    FailureKind,
    GroupCompleted,
    SamplerHello,
    SamplerMessage,
    SamplerOrder,
    WeightNotice,
    WeightRequest,
    WeightsManifest,
)
from asyncrl_node.plan import max_new_tokens, max_rollout_tokens, task_of
from asyncrl_node.process import ProcessContext
from asyncrl_node.run_directory import slot_folder, weights_path
from asyncrl_node.sampler.rollouts import (
    EngineFailure,
    Rollout,
    RolloutLimits,
    RolloutRunner,
    build_group,
    turn_rewards_of,
)
from asyncrl_node.sampler.weights import SamplerWeights, answer_canary
from asyncrl_node.transport.channel import AsyncDealer, Peer, endpoint
from asyncrl_node.transport.weights import weights_hash

log = logging.getLogger(__name__)

_HEARTBEAT_S = 0.25


class SamplerProcess:
    """The shell around the core."""

    def __init__(self, context: ProcessContext) -> None:
        config = context.config
        self._context = context
        self._task = task_of(config)
        self._engine: Engine = make_engine(config, self._task)
        self._runner = RolloutRunner(
            self._engine,
            RolloutLimits(
                max_new_tokens=max_new_tokens(config, self._task),
                max_turns=self._task.max_turns,
                max_tokens=max_rollout_tokens(config, self._task),
                temperature=config.sampling.temperature,
                timeout_s=config.sampling.rollout_timeout_s,
                stop_token_ids=self._task.stop_token_ids,
            ),
        )
        self._core = SamplerCore(
            SamplerSettings(
                sampler=context.index,
                incarnation=context.incarnation,
                group_size=config.pacing.group_size,
                max_rollouts=config.sampling.max_concurrent_rollouts,
                max_retries=config.sampling.max_retries,
                drain_before_update=config.sampling.weight_updates == "between_groups",
            )
        )
        self._slots = slot_folder(context.runtime)
        me = Peer("sampler", context.index, context.incarnation)
        sockets = Path(context.runtime.sockets_dir)
        self._zmq = zmq.asyncio.Context()
        self._scheduler: AsyncDealer[SamplerOrder, SamplerMessage] = AsyncDealer(
            self._zmq, endpoint(sockets, "scheduler"), me, SamplerOrder
        )
        self._learner: AsyncDealer[WeightNotice, WeightRequest] = AsyncDealer(
            self._zmq, endpoint(sockets, "weights"), me, WeightNotice
        )
        path, has_gpu = weights_path(context.runtime), bool(config.gpus)
        self._weights = SamplerWeights(context.index, path, has_gpu=has_gpu)
        self._manifest: WeightsManifest | None = None
        self._running: dict[RolloutKey, asyncio.Task[None]] = {}
        self._finished: dict[RolloutKey, Rollout] = {}
        self._started_s: dict[tuple[int, int], float] = {}
        self._end = asyncio.Event()
        self._load_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until the Stop order."""
        self._learner.send(self._core.hello())
        async with asyncio.TaskGroup() as tasks:
            serving = [
                tasks.create_task(self._engine.serve()),
                tasks.create_task(self._listen(self._scheduler)),
                tasks.create_task(self._listen(self._learner)),
                tasks.create_task(self._beat()),
            ]
            await self._end.wait()
            for task in (*serving, *self._running.values()):
                task.cancel()
        self._engine.close()
        self._weights.close()
        self._scheduler.close()
        self._learner.close()
        self._zmq.term()

    async def _listen(self, socket: AsyncDealer[Any, Any]) -> None:
        while True:
            self._handle(await socket.receive())

    async def _beat(self) -> None:
        while True:
            self._scheduler.send(self._core.heartbeat())
            await asyncio.sleep(_HEARTBEAT_S)

    def _handle(self, event: SamplerEvent) -> None:
        for instruction in self._core.handle(event):
            self._obey(instruction)

    def _obey(self, instruction: SamplerInstruction) -> None:
        match instruction:
            case ToScheduler():
                self._scheduler.send(instruction.message)
            case ToLearner():
                self._learner.send(instruction.message)
            case OpenTest():
                self._handle(self._weights.open_test(instruction))
            case ComparePattern():
                self._handle(self._weights.compare(instruction))
            case CloseTest():
                self._weights.close_test()
            case OpenWeights():
                self._open(instruction)
            case LoadWeights():
                self._load(instruction)
            case AskForWork():
                self._ask_for_work()
            case StartRollout():
                self._start(instruction)
            case AbandonGroup():
                self._abandon(instruction)
            case WriteGroup():
                self._write(instruction)
            case EndProcess():
                self._end.set()
            case _:
                assert_never(instruction)

    # -- weights -----------------------------------------------------------------------------

    def _open(self, order: OpenWeights) -> None:
        """Open the weights here, or tell the engine how to open them in a process of its own."""
        self._manifest = order.manifest
        if order.reason:
            log.info("weights come through host shared memory: %s", order.reason)
        if not isinstance(self._engine, OwnProcessLoader):
            if (answer := self._weights.open(order)) is not None:
                self._handle(answer)
            return
        self._weights.leave_gpu()
        path = weights_path(self._context.runtime)
        if order.kind == "cuda_ipc":
            index = self._context.index
            self._engine.open_weights(order.manifest, path, gpu_handle(order.weights, index))
            self._handle(WeightsOpened())  # its worker opens them at the first load
        else:
            self._engine.open_weights(order.manifest, path)

    def _load(self, load: LoadWeights) -> None:
        """Copy under the lease, hand it back, then prove the copy while rollouts go on.

        An engine with a process of its own copies there; until its swap is done it holds back
        every request made after the copy.
        """
        if isinstance(self._engine, OwnProcessLoader):
            work = self._load_elsewhere(self._engine, load)
        else:
            assert isinstance(self._engine, InProcessLoader)
            self._copy(self._engine, load.version)
            work = self._prove(load, self._hash(self._engine))
        self._load_task = asyncio.get_running_loop().create_task(work)
        self._load_task.add_done_callback(_raise_error)

    def _copy(self, engine: InProcessLoader, version: int) -> None:
        assert self._manifest is not None
        began_s = time.monotonic()
        view = self._weights.source.view(version)
        engine.load_weights(version, self._manifest.entries, view)
        self._weights.source.check(version)  # the version stands before and after: not torn
        log.info("version %d: stood still for %.6f s", version, time.monotonic() - began_s)
        self._handle(CopyDone(version))

    async def _hash(self, engine: InProcessLoader) -> int:
        return await asyncio.to_thread(weights_hash, engine.weights_view())

    async def _load_elsewhere(self, engine: OwnProcessLoader, load: LoadWeights) -> None:
        await engine.copy_weights(load.version)
        self._handle(CopyDone(load.version))
        await self._prove(load, engine.use_weights(load.version))

    async def _prove(self, load: LoadWeights, use: Awaitable[int]) -> None:
        """Acknowledge: the hash of what is in use, and what it makes of the canary."""
        digest = await use
        began_s = time.monotonic()
        scores, decoded = await answer_canary(self._engine, load.canary, load.num_decoded)
        spent_s = time.monotonic() - began_s
        log.info("version %d: %.6f s for the canary", load.version, spent_s)
        self._handle(LoadDone(load.version, digest, scores, decoded))

    def _ask_for_work(self) -> None:
        hello = SamplerHello(
            self._context.index,
            self._context.incarnation,
            os.getpid(),
            self._context.config.sampling.max_concurrent_rollouts,
        )
        self._scheduler.send(hello)

    # -- rollouts ----------------------------------------------------------------------------

    def _start(self, start: StartRollout) -> None:
        key = start.key
        if key.split == "train":
            self._started_s.setdefault((key.owner, key.attempt), time.monotonic())
        task = asyncio.get_running_loop().create_task(self._rollout(start))
        self._running[key] = task
        task.add_done_callback(lambda done: self._forget(key, done))

    def _forget(self, key: RolloutKey, task: asyncio.Task[None]) -> None:
        self._running.pop(key, None)
        _raise_error(task)

    async def _rollout(self, start: StartRollout) -> None:
        key = start.key
        try:
            environment = self._task.environment(key.split, start.problem)
            rollout = await self._runner.run(environment, start.seed, self._on_first_token(key))
        except EngineFailure as error:
            self._raised(key, "engine", error)
            return
        except Exception as error:  # noqa: BLE001 - user code: any error is one sample's failure
            self._raised(key, "environment", error)
            return
        if key.split == "eval" and not isfinite(rollout.reward):
            log.warning("%s failed: its reward is not finite: %s", key, rollout.reward)
        self._finished[key] = rollout
        self._handle(RolloutDone(key, rollout.summary()))
        if key.split == "eval":
            self._finished.pop(key, None)

    def _on_first_token(self, key: RolloutKey) -> Callable[[int], None]:
        def note(version: int) -> None:
            self._handle(FirstToken(key, version))

        return note

    def _raised(self, key: RolloutKey, kind: FailureKind, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"[:500]
        log.warning("%s failed: %s", key, reason)
        self._handle(RolloutRaised(key, kind, reason))

    def _abandon(self, abandon: AbandonGroup) -> None:
        ids = (abandon.key.group_id, abandon.key.attempt)
        self._started_s.pop(ids, None)
        for key, task in list(self._running.items()):
            if key.split == "train" and (key.owner, key.attempt) == ids:
                task.cancel()
        for key in list(self._finished):
            if key.split == "train" and (key.owner, key.attempt) == ids:
                del self._finished[key]

    def _write(self, write: WriteGroup) -> None:
        rollouts = [self._finished.pop(key) for key in write.rollouts]
        group = build_group(write.key, write.problem, write.epoch, rollouts)
        try:
            num_bytes, checksum = self._slots.write_group(write.key, group)
        except FileNotFoundError:
            log.info("%s is late: its slot is gone", write.key)
            return
        summaries = [rollout.summary() for rollout in rollouts]
        rewards = [s.reward for s in summaries]
        turns = turn_rewards_of(rollouts) or [[]]
        learner = self._context.config.learner
        low = high = nan  # which no filter takes: the learner names it
        if all(map(isfinite, chain(rewards, *turns))):
            low, high = compared_range(rewards, turns, learner.turn_credit, learner.turn_discount)
        started_s = self._started_s.pop((write.key.group_id, write.key.attempt))
        done = GroupCompleted(
            key=write.key,
            num_bytes=num_bytes,
            checksum=checksum,
            version_min=min(s.version_min for s in summaries),
            version_max=max(s.version_max for s in summaries),
            num_rollouts=len(rollouts),
            num_tokens=sum(s.num_tokens for s in summaries),
            reward_sum=sum(rewards),
            reward_min=low,
            reward_max=high,
            num_timeouts=sum(s.timed_out for s in summaries),
            num_dropped_samples=write.num_dropped_samples,
            seconds=time.monotonic() - started_s,
        )
        self._scheduler.send(done)


def _raise_error(task: asyncio.Task[None]) -> None:
    """Hand the error of a background task to the loop's handler, which ends the process."""
    if not task.cancelled() and task.exception() is not None:
        loop = task.get_loop()
        loop.call_exception_handler({"message": "background task", "exception": task.exception()})


def main(context: ProcessContext) -> None:
    """Run the sampler; an error of any task is the process's own."""
    asyncio.run(_main(context))


async def _main(context: ProcessContext) -> None:
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()

    def on_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        log.error("%s: %s", context.get("message"), error)
        if not failed.done():
            failed.set_exception(error or RuntimeError(str(context)))

    loop.set_exception_handler(on_error)
    process = SamplerProcess(context)
    running = loop.create_task(process.run())
    await asyncio.wait([running, failed], return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        failed.result()
    try:
        running.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # the first task that failed names the fault
