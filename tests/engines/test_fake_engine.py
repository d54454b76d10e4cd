"""The scripted engine, on a loop whose clock jumps: no test here waits."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_node.config import FakeConfig
from asyncrl_node.core.layout import layout_weights
from asyncrl_node.engines import fake_engine
from asyncrl_node.engines.base import Completion, GenerateRequest
from asyncrl_node.engines.fake_engine import (
    WEIGHT_NAME,
    FakeEngine,
    read_latencies,
    scripted_logprobs,
)
from asyncrl_node.errors import ConfigError, RunFault
from asyncrl_node.sampler.weights import answer_canary

NUM_BYTES = 64


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop that jumps to its next timer instead of waiting for it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                assert timeout is not None, "everything waits and nothing will end it"
                loop.now_s += timeout
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    loop = JumpingLoop()

    def sleep(seconds: float) -> None:
        loop.now_s += seconds

    monkeypatch.setattr(fake_engine, "time", SimpleNamespace(monotonic=loop.time, sleep=sleep))
    yield loop
    loop.close()


def make_engine(latencies_s: list[float] | None = None, **config: Any) -> FakeEngine:
    engine = FakeEngine(FakeConfig(weight_bytes=NUM_BYTES, **config), seed=1)
    if latencies_s is not None:
        engine._latencies = latencies_s
    return engine


def load(engine: FakeEngine, version: int, content: bytes | None = None) -> None:
    entries, _ = layout_weights([(WEIGHT_NAME, "uint8", (NUM_BYTES,), NUM_BYTES)])
    made = bytes([version % 256]) * NUM_BYTES if content is None else content
    engine.load_weights(version, entries, memoryview(made))


def request(problem: int = 0, number: int = 1, num_tokens: int = 8, seed: int = 0) -> Any:
    return GenerateRequest(number, [problem], num_tokens, 1.0, seed)


async def at(seconds: float, call: Any, *arguments: Any) -> None:
    await asyncio.sleep(seconds)
    call(*arguments)


def run(loop: JumpingLoop, *work: Coroutine[Any, Any, Any]) -> list[Any]:
    async def together() -> list[Any]:
        return await asyncio.gather(*work)

    return loop.run_until_complete(together())


# -- versions ------------------------------------------------------------------------------------


def test_tokens_are_the_version_that_made_them_across_a_load(loop: JumpingLoop) -> None:
    """Eight tokens over eight seconds, at 0, 1, .. 7; version 9 comes at 3.5."""
    engine = make_engine([8.0])
    load(engine, 4)
    first: list[int] = []
    completion, _ = run(loop, engine.generate(request(), first.append), at(3.5, load, engine, 9))
    assert completion == Completion(
        tokens=[4, 4, 4, 4, 9, 9, 9, 9],
        logprobs=[-1.0] * 8,
        policy_versions=[4, 4, 4, 4, 9, 9, 9, 9],
        finish_reason="length",
    )
    assert first == [4]
    assert loop.now_s == 8.0
    assert engine.policy_version == 9


@settings(max_examples=60)
@given(
    latency_s=st.integers(1, 20),
    num_tokens=st.integers(1, 12),
    loads_s=st.lists(
        st.integers(1, 40).map(lambda half: half / 2 + 0.1234), max_size=5, unique=True
    ),
)
def test_versions_are_those_of_the_moment_of_each_token(
    latency_s: int, num_tokens: int, loads_s: list[float]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        loop = JumpingLoop()
        patch.setattr(fake_engine, "time", SimpleNamespace(monotonic=loop.time))
        engine = make_engine([float(latency_s)])
        load(engine, 0)
        loads = [
            at(when_s, load, engine, version) for version, when_s in enumerate(sorted(loads_s), 1)
        ]
        completion = run(loop, engine.generate(request(num_tokens=num_tokens)), *loads)[0]
        loop.close()
    made_s = [latency_s * token / num_tokens for token in range(num_tokens)]
    assert completion.policy_versions == [
        sum(when_s <= token_s for when_s in loads_s) for token_s in made_s
    ]


def test_nothing_is_generated_before_the_first_load(loop: JumpingLoop) -> None:
    engine = make_engine([1.0])
    assert engine.policy_version == -1
    first: list[tuple[int, float]] = []

    def note(version: int) -> None:
        first.append((version, loop.now_s))

    completion, _ = run(loop, engine.generate(request(), note), at(5.0, load, engine, 2))
    assert first == [(2, 5.0)]
    assert set(completion.policy_versions) == {2}
    assert loop.now_s == 6.0


def test_latencies_are_by_problem_modulo_their_number(loop: JumpingLoop) -> None:
    engine = make_engine([1.0, 2.0, 5.0])
    load(engine, 0)
    ended = {}
    for problem in (0, 1, 2, 3, -1):
        began_s = loop.now_s
        run(loop, engine.generate(request(problem)))
        ended[problem] = loop.now_s - began_s
    assert ended == {0: 1.0, 1: 2.0, 2: 5.0, 3: 1.0, -1: 5.0}


# -- aborts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("after_s", "num_tokens"), [(0.5, 1), (3.5, 4), (7.5, 8)])
def test_an_abort_keeps_the_partial(loop: JumpingLoop, after_s: float, num_tokens: int) -> None:
    engine = make_engine([8.0])
    load(engine, 3)
    completion, _ = run(loop, engine.generate(request()), at(after_s, engine.abort, 1))
    assert completion.finish_reason == "abort"
    assert completion.tokens == [3] * num_tokens == completion.policy_versions
    assert len(completion.logprobs) == num_tokens


def test_an_abort_ends_only_its_own_request(loop: JumpingLoop) -> None:
    engine = make_engine([8.0])
    load(engine, 0)
    one, two, _ = run(
        loop,
        engine.generate(request(number=1)),
        engine.generate(request(number=2)),
        at(1.5, engine.abort, 2),
    )
    assert (one.finish_reason, two.finish_reason) == ("length", "abort")
    engine.abort(1)
    engine.abort(99)
    assert loop.now_s == 8.0


def test_a_hanging_problem_never_ends_until_it_is_aborted(loop: JumpingLoop) -> None:
    engine = make_engine([1.0], hang_problems=(5,))
    load(engine, 0)
    completion, other, _ = run(
        loop,
        engine.generate(request(5, number=1)),
        engine.generate(request(6, number=2)),
        at(1e6, engine.abort, 1),
    )
    assert loop.now_s == 1e6
    assert other.finish_reason == "length"
    assert (completion.finish_reason, completion.tokens) == ("abort", [0])


def test_closing_ends_everything_that_runs(loop: JumpingLoop) -> None:
    engine = make_engine([8.0], hang_problems=(5,))
    load(engine, 0)
    *completions, _ = run(
        loop,
        engine.generate(request(0, number=1)),
        engine.generate(request(5, number=2)),
        at(2.5, engine.close),
    )
    assert [completion.finish_reason for completion in completions] == ["abort", "abort"]
    assert loop.now_s == 2.5


def test_serving_only_ends_when_cancelled(loop: JumpingLoop) -> None:
    async def serve() -> bool:
        task = asyncio.ensure_future(make_engine().serve())
        await asyncio.sleep(1e5)
        running = not task.done()
        task.cancel()
        await asyncio.wait([task])
        return running and task.cancelled()

    assert loop.run_until_complete(serve())


# -- weights -------------------------------------------------------------------------------------


def test_the_copy_is_the_engines_own(loop: JumpingLoop) -> None:
    engine = make_engine()
    source = bytearray(b"\x07" * NUM_BYTES)
    load(engine, 7, bytes(source))
    source[:] = bytes(NUM_BYTES)
    assert bytes(engine.weights_view()) == b"\x07" * NUM_BYTES


@pytest.mark.parametrize("position", [0, 31, 63])
def test_torn_weights_are_caught(loop: JumpingLoop, position: int) -> None:
    engine = make_engine()
    load(engine, 1)
    torn = bytearray(b"\x02" * NUM_BYTES)
    torn[position] = 1
    with pytest.raises(RunFault, match="version 2") as caught:
        load(engine, 2, bytes(torn))
    assert caught.value.name == "torn_weights"
    assert engine.policy_version == 1


def test_a_whole_buffer_of_another_version_is_caught(loop: JumpingLoop) -> None:
    engine = make_engine()
    with pytest.raises(RunFault, match="not all its"):
        load(engine, 2, b"\x01" * NUM_BYTES)
    load(engine, 256 + 5, b"\x05" * NUM_BYTES)
    assert engine.policy_version == 261


def test_other_parameters_are_refused(loop: JumpingLoop) -> None:
    engine = make_engine()
    for names in ([], ["lm_head"], [WEIGHT_NAME, "lm_head"]):
        entries, num_bytes = layout_weights([(name, "uint8", (64,), 64) for name in names])
        with pytest.raises(RunFault) as caught:
            engine.load_weights(0, entries, memoryview(bytes(num_bytes)))
        assert caught.value.name == "weights_mismatch"


def test_scores_are_those_of_the_version(loop: JumpingLoop) -> None:
    engine = make_engine()
    for version in (0, 1, 300):
        load(engine, version)
        (scores,) = run(loop, engine.score([4, 5, 6]))
        assert scores == scripted_logprobs(version, [4, 5, 6])
    assert scripted_logprobs(1, [4, 5, 6]) != scripted_logprobs(2, [4, 5, 6])


def test_weights_that_never_arrive_show_in_the_scores_alone(loop: JumpingLoop) -> None:
    engine = make_engine(stale_after_version=2)
    for version, computes_with in ((1, 1), (2, 2), (3, 2), (4, 2)):
        load(engine, version)
        (scores,) = run(loop, engine.score([4, 5]))
        assert scores == scripted_logprobs(computes_with, [4, 5])
        assert bytes(engine.weights_view()) == bytes([version]) * NUM_BYTES
        assert engine.policy_version == version
    fresh = make_engine(stale_after_version=2)
    load(fresh, 7)
    assert run(loop, fresh.score([4, 5])) == [scripted_logprobs(7, [4, 5])], "its first load"


def test_what_decodes_by_older_weights_scores_by_the_newest(loop: JumpingLoop) -> None:
    engine = make_engine(decode_stale_after_version=2)
    for version, decodes_with in ((1, 1), (2, 2), (3, 2), (4, 2)):
        load(engine, version)
        ((scores, decoded),) = run(loop, answer_canary(engine, [4, 5], 2))
        tokens = [4, 5, 5, 6]
        assert scores == tuple(scripted_logprobs(version, tokens))
        assert decoded == tuple(scripted_logprobs(decodes_with, tokens)[-2:])


def test_a_slow_load_takes_its_time(loop: JumpingLoop) -> None:
    engine = make_engine(load_s=2.5)
    load(engine, 0)
    assert loop.now_s == 2.5


# -- scripts -------------------------------------------------------------------------------------


def test_a_raising_problem_always_raises_and_others_never(loop: JumpingLoop) -> None:
    engine = make_engine([0.1], raise_problems=(3,))
    load(engine, 0)
    for seed in range(5):
        with pytest.raises(RuntimeError, match="scripted failure of problem 3"):
            run(loop, engine.generate(request(3, seed=seed)))
        assert run(loop, engine.generate(request(4, seed=seed)))


def test_the_raise_rate_is_kept_and_drawn_by_seed(loop: JumpingLoop) -> None:
    def raised(engine: FakeEngine) -> list[int]:
        load(engine, 0)
        found = []
        for seed in range(2000):
            try:
                run(loop, engine.generate(request(seed=seed, num_tokens=1)))
            except RuntimeError:
                found.append(seed)
        return found

    first = raised(make_engine([0.0], raise_rate=0.05))
    assert 70 <= len(first) <= 130
    assert raised(make_engine([0.0], raise_rate=0.05)) == first, "a retry draws anew, by its seed"
    assert raised(make_engine([0.0])) == []


# -- latency files -------------------------------------------------------------------------------


def test_latencies_are_read(tmp_path: Path) -> None:
    path = tmp_path / "latencies.json"
    path.write_text("[1, 0.5, 0]")
    assert read_latencies(str(path)) == [1.0, 0.5, 0.0]
    assert read_latencies("") == [0.02]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"3",
        b"null",
        b'["1"]',
        b"[1, null]",
        b"[true]",
        b"[[1]]",
        b"[-0.1]",
        b"[1e6]",
        b"[NaN]",
        b"[Infinity]",
        b"\xff\xfe",
        b"[1] [2]",
        b"[" * 100_000,
    ],
    ids=lambda content: repr(content[:20]),
)
def test_bad_latency_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "latencies.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        FakeEngine(FakeConfig(latencies=str(path)), 0)
    assert caught.value.key == "fake.latencies"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere.json", "."])
def test_an_unreadable_latency_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="must be a readable file"):
        read_latencies(str(tmp_path / name))


@given(values=st.lists(st.floats(0, 1e5), min_size=1, max_size=20))
def test_any_list_of_seconds_is_read(
    tmp_path_factory: pytest.TempPathFactory, values: list[float]
) -> None:
    path = tmp_path_factory.getbasetemp() / "latencies.json"
    path.write_text(json.dumps(values))
    assert read_latencies(str(path)) == values
