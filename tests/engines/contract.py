"""What every engine promises the sampler, as checks that run on the fake and on the real ones.

A check gets an engine that serves and has weights, and a way to load the next version. It leaves
the engine as it found it.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from math import isfinite
from pathlib import Path
from typing import TypeVar, cast

from asyncrl_node.engines.base import (
    Completion,
    Engine,
    GenerateRequest,
    InProcessLoader,
    OwnProcessLoader,
)
from asyncrl_node.engines.torch_engine import TorchEngine
from asyncrl_node.messages import GroupKey
from asyncrl_node.sampler.rollouts import RolloutLimits, RolloutRunner, build_group
from asyncrl_node.tasks.base import Outcome
from asyncrl_node.transport.slots import SlotFolder, slot_bytes

Load = Callable[[], Awaitable[int]]
Check = Callable[[Engine, Load], Awaitable[None]]

CANARY = (3, 1, 7, 2, 9)
_numbers = itertools.count(1 << 20)


def request(max_new: int = 8, prompt: tuple[int, ...] = (1, 2, 3)) -> GenerateRequest:
    number = next(_numbers)
    return GenerateRequest(number, list(prompt), max_new, 1.0, number)


async def start(engine: Engine, wanted: GenerateRequest) -> asyncio.Task[Completion]:
    """Return once its first token exists."""
    started = asyncio.Event()
    task = asyncio.ensure_future(engine.generate(wanted, lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 30)
    return task


async def it_loads_in_exactly_one_way(engine: Engine, load: Load) -> None:
    assert isinstance(engine, InProcessLoader) != isinstance(engine, OwnProcessLoader)
    version = await load()
    assert engine.policy_version == version


async def a_completion_has_a_logprob_and_a_version_for_every_token(
    engine: Engine, load: Load
) -> None:
    first: list[int] = []
    done = await engine.generate(request(5), first.append)
    assert len(done.tokens) == len(done.logprobs) == len(done.policy_versions) == 5
    assert done.finish_reason == "length"
    assert all(logprob <= 0 and isfinite(logprob) for logprob in done.logprobs)
    assert set(done.policy_versions) == {engine.policy_version}
    assert first == [engine.policy_version]


async def an_update_comes_into_running_generations(engine: Engine, load: Load) -> None:
    old = engine.policy_version
    running = [await start(engine, request(100)) for _ in range(3)]
    new = await load()
    for done in await asyncio.gather(*running):
        assert done.finish_reason == "length"
        assert done.policy_versions == sorted(done.policy_versions)
        assert set(done.policy_versions) == {old, new}
        assert done.policy_versions[-1] == new


async def an_abort_keeps_what_there_is(engine: Engine, load: Load) -> None:
    wanted = request(100)
    task = await start(engine, wanted)
    engine.abort(wanted.request_id)
    engine.abort(wanted.request_id)
    done = await task
    assert done.finish_reason == "abort"
    assert 0 < len(done.tokens) < 100
    engine.abort(next(_numbers))


async def scores_repeat_and_move_with_the_weights(engine: Engine, load: Load) -> None:
    before = await engine.score(CANARY)
    assert len(before) == len(CANARY) - 1
    assert all(score < 0 and isfinite(score) for score in before)
    again = await engine.score(CANARY)
    assert all(abs(a - b) < 1e-5 for a, b in zip(before, again, strict=True))
    await load()
    after = await engine.score(CANARY)
    assert all(a != b for a, b in zip(before, after, strict=True))


async def a_score_is_given_while_generations_run_and_disturbs_none(
    engine: Engine, load: Load
) -> None:
    alone = await engine.score(CANARY)
    running = await start(engine, request(100, CANARY))
    version = engine.policy_version
    beside = await engine.score(CANARY)
    assert not running.done(), "it waited for a generation to end"
    assert all(abs(a - b) < 1e-5 for a, b in zip(alone, beside, strict=True))
    done = await running
    assert done.policy_versions == [version] * 100


async def what_is_decoded_is_what_is_scored(engine: Engine, load: Load) -> None:
    for _ in range(2):
        decoded = await engine.decode(CANARY, 3)
        assert len(decoded.tokens) == len(decoded.logprobs) == 3
        scored = (await engine.score([*CANARY, *decoded.tokens]))[-3:]
        assert all(abs(a - b) < 5e-5 for a, b in zip(decoded.logprobs, scored, strict=True))
        await load()
        moved = (await engine.score([*CANARY, *decoded.tokens]))[-3:]
        assert all(abs(a - b) > 1e-4 for a, b in zip(decoded.logprobs, moved, strict=True))


async def it_decodes_though_every_row_is_taken_and_disturbs_none(
    engine: Engine, load: Load
) -> None:
    running = [await start(engine, request(100)) for _ in range(4)]
    waiting = [asyncio.ensure_future(engine.generate(request(100))) for _ in range(3)]
    version = engine.policy_version
    decoded = await engine.decode(CANARY, 2)
    assert len(decoded.tokens) == 2
    assert not any(task.done() for task in running), "it waited for a generation to end"
    for done in await asyncio.gather(*running, *waiting):
        assert done.policy_versions == [version] * 100


_Result = TypeVar("_Result")


def stepped(engine: TorchEngine, work: Coroutine[None, None, _Result]) -> _Result:
    """Do `work`, stepping the engine meanwhile, in a loop of its own."""

    async def run() -> _Result:
        task = asyncio.ensure_future(work)
        while not task.done():
            engine.step()
            await asyncio.sleep(0)
        return task.result()

    return asyncio.run(run())


class Ear:
    """An engine that remembers what it was asked and what it answered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.turns: list[tuple[list[int], Completion]] = []

    async def generate(
        self, request: GenerateRequest, on_first_token: Callable[[int], None] | None = None
    ) -> Completion:
        done = await self._engine.generate(request, on_first_token)
        self.turns.append((request.prompt_tokens, done))
        return done

    def abort(self, request_id: int) -> None:
        self._engine.abort(request_id)


class Transcript:
    """Keeps a conversation as text, whose encoder takes one token per digit: never the policy's.

    New weights come after the first turn.
    """

    def __init__(self, load: Load) -> None:
        self._load = load
        self.text = self.decode([1, 2])
        self.num_turns = 0

    @staticmethod
    def decode(tokens: list[int]) -> str:
        return "".join(f"{token:03d}" for token in tokens)

    @staticmethod
    def encode(text: str) -> list[int]:
        return [int(digit) for digit in text]

    async def reset(self) -> list[int]:
        return [1, 2]

    async def step(self, completion_tokens: list[int]) -> list[int] | Outcome:
        self.text += self.decode(completion_tokens)
        self.num_turns += 1
        if self.num_turns == 1:
            await self._load()
        if self.num_turns == 3:
            return Outcome(1.0)
        self.text += self.decode([5])
        return [5]

    async def grade_partial(self, completion_tokens: list[int]) -> Outcome:
        raise AssertionError("nothing is cut off here")


async def case_19_what_was_sampled_is_what_lands_in_the_slot(engine: Engine, load: Load) -> None:
    ear, talk, old = Ear(engine), Transcript(load), engine.policy_version
    limits = RolloutLimits(
        max_new_tokens=4, max_turns=3, max_tokens=40, temperature=1.0, timeout_s=30,
        stop_token_ids=(),
    )  # fmt: skip
    runner = RolloutRunner(cast(Engine, ear), limits)
    rollout = await runner.run(talk, 7, lambda _: None)
    key = GroupKey(4, 0)
    with tempfile.TemporaryDirectory() as folder:
        slots = SlotFolder(Path(folder), "t", slot_bytes(2, limits.max_tokens))
        slots.reserve(key)
        group = build_group(key, 8, 1, [rollout, rollout])
        num_bytes, checksum = slots.write_group(key, group)
        read = slots.read_group(key, num_bytes, checksum)
        tokens, mask = read.tokens.tolist(), read.loss_mask.tolist()
        versions = read.policy_versions[read.loss_mask].tolist()
        del read
    said: list[int] = []
    for number, (prompt, done) in enumerate(ear.turns):
        said += [5] if number else [1, 2]
        assert prompt == said
        said += done.tokens
    assert len(ear.turns) == 3
    assert Transcript.encode(talk.text) != said, "or this check shows nothing"
    assert tokens == said * 2
    sampled = [token for _, done in ear.turns for token in done.tokens]
    assert [t for t, is_sampled in zip(tokens, mask, strict=True) if is_sampled] == sampled * 2
    assert versions == ([old] * 4 + [engine.policy_version] * 8) * 2


CHECKS: list[Check] = [
    it_loads_in_exactly_one_way,
    a_completion_has_a_logprob_and_a_version_for_every_token,
    an_update_comes_into_running_generations,
    an_abort_keeps_what_there_is,
    scores_repeat_and_move_with_the_weights,
    a_score_is_given_while_generations_run_and_disturbs_none,
    what_is_decoded_is_what_is_scored,
    it_decodes_though_every_row_is_taken_and_disturbs_none,
    case_19_what_was_sampled_is_what_lands_in_the_slot,
]
