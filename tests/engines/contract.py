"""What every engine promises the sampler, as checks that run on the fake and on the real ones.

A check gets an engine that serves and has weights, and a way to load the next version. It leaves
the engine as it found it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from math import isfinite

from asyncrl_node.engines.base import (
    Completion,
    Engine,
    GenerateRequest,
    InProcessLoader,
    OwnProcessLoader,
)

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


CHECKS: list[Check] = [
    it_loads_in_exactly_one_way,
    a_completion_has_a_logprob_and_a_version_for_every_token,
    an_update_comes_into_running_generations,
    an_abort_keeps_what_there_is,
    scores_repeat_and_move_with_the_weights,
    a_score_is_given_while_generations_run_and_disturbs_none,
]
