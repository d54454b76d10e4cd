"""Running one rollout: turns, masks, budgets, failures. Driven in-process, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from asyncrl_node.engines.base import Completion, GenerateRequest
from asyncrl_node.messages import GroupKey
from asyncrl_node.sampler.rollouts import (
    EngineFailure,
    Rollout,
    RolloutLimits,
    RolloutRunner,
    build_group,
)
from asyncrl_node.tasks.base import Outcome

LIMITS = RolloutLimits(
    max_new_tokens=3, max_turns=4, max_tokens=40, temperature=1.0, timeout_s=60, stop_token_ids=()
)


class ScriptedEngine:
    """Answers each request with its own number of tokens; hangs where told to."""

    policy_version = 0

    def __init__(self, hang_on: int = -1, fail_on: int = -1) -> None:
        self.requests: list[GenerateRequest] = []
        self.hang_on = hang_on
        self.fail_on = fail_on
        self.aborts: dict[int, asyncio.Event] = {}

    async def generate(
        self, request: GenerateRequest, on_first_token: Callable[[int], None] | None = None
    ) -> Completion:
        turn = len(self.requests)
        self.requests.append(request)
        if turn == self.fail_on:
            raise RuntimeError("out of memory")
        if on_first_token is not None:
            on_first_token(turn)
        if turn == self.hang_on:
            event = self.aborts[request.request_id] = asyncio.Event()
            await event.wait()
            return Completion([9], [-0.5], [turn], "abort")
        count = request.max_new_tokens
        return Completion([7] * count, [-0.25] * count, [turn] * count, "length")

    def abort(self, request_id: int) -> None:
        if request_id in self.aborts:
            self.aborts[request_id].set()


class TurnEnvironment:
    """Gives one observation token per turn, for some turns; then a reward."""

    def __init__(self, turns: int, reward: float = 1.0) -> None:
        self.turns = turns
        self.reward = reward
        self.heard: list[list[int]] = []

    async def reset(self) -> list[int]:
        return [1, 2]

    async def step(self, completion_tokens: list[int]) -> list[int] | Outcome:
        self.heard.append(completion_tokens)
        return Outcome(self.reward) if len(self.heard) == self.turns else [5]

    async def grade_partial(self, completion_tokens: list[int]) -> Outcome:
        self.heard.append(completion_tokens)
        return Outcome(self.reward)


def run(
    engine: ScriptedEngine, environment: TurnEnvironment, limits: RolloutLimits = LIMITS
) -> Rollout:
    runner = RolloutRunner(engine, limits)  # type: ignore[arg-type]
    return asyncio.run(runner.run(environment, 0, lambda version: None))


def test_turns_are_laid_back_to_back_with_observations_masked_out() -> None:
    engine = ScriptedEngine()
    rollout = run(engine, TurnEnvironment(turns=2))
    assert rollout.tokens == [1, 2, 7, 7, 7, 5, 7, 7, 7]
    assert rollout.loss_mask == [False, False, True, True, True, False, True, True, True]
    assert rollout.policy_versions == [-1, -1, 0, 0, 0, -1, 1, 1, 1]
    assert rollout.sampler_logprobs[2] == -0.25
    assert engine.requests[1].prompt_tokens == [1, 2, 7, 7, 7, 5]
    assert engine.requests[0].seed != engine.requests[1].seed
    assert rollout.summary().version_min == 0
    assert rollout.summary().version_max == 1


class SpacedEngine(ScriptedEngine):
    """Answers "12" in two tokens, where an encoder would take one."""

    async def generate(
        self, request: GenerateRequest, on_first_token: Callable[[int], None] | None = None
    ) -> Completion:
        self.requests.append(request)
        return Completion([VOCABULARY["1"], VOCABULARY["2"]], [-0.5, -0.5], [0, 0], "stop")


VOCABULARY = {"1": 0, "2": 1, "12": 2, "?": 3}


class ChattyEnvironment:
    """Reads the answer as text, and keeps the conversation as text too."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(BPE(VOCABULARY, [("1", "2")]))
        self.tokenizer.decoder = Fuse()
        self.text = "12?"

    async def reset(self) -> list[int]:
        return list(self.tokenizer.encode(self.text).ids)

    async def step(self, completion_tokens: list[int]) -> list[int] | Outcome:
        self.text += self.tokenizer.decode(completion_tokens)
        return Outcome(1.0) if self.text.count("12") == 3 else [VOCABULARY["?"]]

    async def grade_partial(self, completion_tokens: list[int]) -> Outcome:
        raise AssertionError("nothing is cut off here")


def test_case_19_history_is_never_tokenised_again() -> None:
    """The tokenizer makes one token of "12", the policy made two: the two are what is trained."""
    engine, environment = SpacedEngine(), ChattyEnvironment()
    rollout = run(engine, environment)
    sampled = [VOCABULARY["1"], VOCABULARY["2"]]
    encoded = environment.tokenizer.encode(environment.tokenizer.decode(sampled)).ids
    assert encoded == [VOCABULARY["12"]] != sampled  # or this test shows nothing
    prompt = [VOCABULARY["12"], VOCABULARY["?"]]
    assert [request.prompt_tokens for request in engine.requests] == [
        prompt,
        [*prompt, *sampled, VOCABULARY["?"]],
    ]
    group = build_group(GroupKey(4, 0), problem=8, epoch=1, rollouts=[rollout, rollout])
    half = [*prompt, *sampled, VOCABULARY["?"], *sampled]
    assert group.tokens.tolist() == half * 2
    assert group.tokens[group.loss_mask].tolist() == sampled * 4


def test_a_rollout_ends_at_its_turns_and_at_its_tokens() -> None:
    by_turns = run(ScriptedEngine(), TurnEnvironment(turns=99))
    assert sum(by_turns.loss_mask) == 4 * 3
    by_tokens = run(ScriptedEngine(), TurnEnvironment(turns=99), LIMITS._replace(max_tokens=6))
    assert len(by_tokens.tokens) == 5  # the second observation left no room to answer it
    assert not by_tokens.timed_out


def test_past_its_budget_the_partial_is_kept_graded_and_clamped() -> None:
    environment = TurnEnvironment(turns=3, reward=1.0)
    rollout = run(ScriptedEngine(hang_on=1), environment, LIMITS._replace(timeout_s=0.05))
    assert rollout.timed_out
    assert rollout.reward == 0.0
    assert rollout.tokens == [1, 2, 7, 7, 7, 5, 9]
    assert environment.heard[-1] == [9]


@pytest.mark.parametrize("method", ["reset", "step", "grade_partial"])
def test_an_environment_that_hangs_ends_with_the_budget(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl_node.sampler.rollouts._GRADE_WITHIN_S", 0.05)
    environment = TurnEnvironment(turns=2)

    async def hang(*_: object) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError

    hanging: Callable[..., Awaitable[Outcome]] = hang
    setattr(environment, method, hanging)
    engine = ScriptedEngine(hang_on=1 if method == "grade_partial" else -1)
    limits = LIMITS._replace(timeout_s=0.05)
    if method == "reset":
        with pytest.raises(ValueError, match="before its first sampled token"):
            run(engine, environment, limits)
    else:
        rollout = run(engine, environment, limits)
        assert rollout.timed_out
        assert rollout.reward <= 0.0


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_the_learners_to_name(reward: float) -> None:
    """Refused here it would be one sample's failure, and be redone until it is finite."""
    rollout = run(ScriptedEngine(), TurnEnvironment(turns=1, reward=reward))
    assert str(rollout.reward) == str(reward)
    cut_off = run(
        ScriptedEngine(hang_on=0),
        TurnEnvironment(turns=1, reward=reward),
        LIMITS._replace(timeout_s=0.05),
    )
    assert cut_off.timed_out
    assert str(cut_off.reward) in (str(reward), "0.0")


def test_the_engine_is_blamed_for_its_own_errors() -> None:
    with pytest.raises(EngineFailure, match="out of memory"):
        run(ScriptedEngine(fail_on=0), TurnEnvironment(turns=1))


def test_cancelling_a_rollout_aborts_its_generation() -> None:
    engine = ScriptedEngine(hang_on=0)
    runner = RolloutRunner(engine, LIMITS)  # type: ignore[arg-type]

    async def cancel() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(
            runner.run(TurnEnvironment(turns=1), 0, lambda version: started.set())
        )
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert all(event.is_set() for event in engine.aborts.values())
    assert len(engine.aborts) == 1


def test_tokens_on_older_keys_and_values_are_marked_generation_by_generation() -> None:
    """Under `keep`, as three turns: an update inside, one between, one before the first token.

    A new generation finds no older cache: its salt is the version it was submitted under.
    """
    rollout = Rollout()
    rollout.add_prompt([1, 2])
    rollout.add_completion(Completion([7] * 4, [-1.0] * 4, [3, 3, 4, 5], "length", kv_version=3))
    rollout.add_prompt([1])
    rollout.add_completion(Completion([7] * 2, [-1.0] * 2, [6, 6], "length", kv_version=6))
    rollout.add_prompt([1])
    rollout.add_completion(Completion([7] * 3, [-1.0] * 3, [7, 7, 8], "length", kv_version=6))
    marks = [[0, 0], [0, 0, 1, 1], [0], [0, 0], [0], [1, 1, 1]]
    assert rollout.on_older_kv == [bool(mark) for part in marks for mark in part]
    group = build_group(GroupKey(4, 0), problem=8, epoch=1, rollouts=[rollout, rollout])
    assert group.on_older_kv.tolist() == rollout.on_older_kv * 2
    assert not group.on_older_kv[~group.loss_mask].any()


def test_without_kept_caches_no_token_is_marked() -> None:
    rollout = Rollout()
    rollout.add_prompt([1])
    rollout.add_completion(Completion([7] * 3, [-1.0] * 3, [3, 4, 5], "length"))
    assert rollout.on_older_kv == [False] * 4


def test_a_group_is_laid_out_back_to_back() -> None:
    rollouts = [run(ScriptedEngine(), TurnEnvironment(turns=t, reward=t)) for t in (1, 2)]
    group = build_group(GroupKey(4, 0), problem=8, epoch=1, rollouts=rollouts)
    assert group.rollout_starts.tolist() == [0, 5, 14]
    assert group.rewards.tolist() == [1.0, 2.0]
    assert group.tokens.dtype == np.int32
    assert (group.policy_versions[~group.loss_mask] == -1).all()
    assert (group.sampler_logprobs[~group.loss_mask] == 0).all()


# -- turns that are rewarded ---------------------------------------------------------------------


class PaidEnvironment(TurnEnvironment):
    """Turn k earns k + 1; `spoil` changes what it says at the end."""

    def __init__(
        self, turns: int, spoil: Callable[[tuple[float, ...]], tuple[float, ...]] = lambda t: t
    ) -> None:
        super().__init__(turns, reward=9.0)
        self.spoil = spoil

    def paid(self) -> Outcome:
        turns = tuple(float(turn + 1) for turn, tokens in enumerate(self.heard) if tokens)
        return Outcome(self.reward, self.spoil(turns))

    async def step(self, completion_tokens: list[int]) -> list[int] | Outcome:
        answer = await super().step(completion_tokens)
        return self.paid() if isinstance(answer, Outcome) else answer

    async def grade_partial(self, completion_tokens: list[int]) -> Outcome:
        await super().grade_partial(completion_tokens)
        return self.paid()


def test_each_turn_ends_where_its_last_token_lies_and_has_its_reward() -> None:
    rollouts = [run(ScriptedEngine(), PaidEnvironment(turns)) for turns in (1, 3)]
    group = build_group(GroupKey(4, 0), problem=8, epoch=1, rollouts=rollouts)
    assert group.rewards.tolist() == [9.0, 9.0]
    assert group.rollout_starts.tolist() == [0, 5, 18]
    assert group.turn_ends.tolist() == [5, 10, 14, 18]
    assert group.turn_rewards.tolist() == [1.0, 1.0, 2.0, 3.0]
    assert group.loss_mask[group.turn_ends - 1].all()


def test_a_rollout_that_says_nothing_of_its_turns_earns_its_reward_by_the_last() -> None:
    rollouts = [
        run(ScriptedEngine(), PaidEnvironment(1)),
        run(ScriptedEngine(), TurnEnvironment(3)),
    ]
    group = build_group(GroupKey(4, 0), problem=8, epoch=1, rollouts=rollouts)
    assert group.turn_rewards.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_where_nobody_rewards_turns_there_are_none() -> None:
    rollouts = [run(ScriptedEngine(), TurnEnvironment(turns)) for turns in (1, 3)]
    group = build_group(GroupKey(4, 0), problem=8, epoch=1, rollouts=rollouts)
    assert len(group.turn_ends) == len(group.turn_rewards) == 0


@pytest.mark.parametrize("limits", [LIMITS, LIMITS._replace(max_tokens=6)])
def test_turns_are_counted_where_a_rollout_ends_at_its_turns_or_tokens(
    limits: RolloutLimits,
) -> None:
    rollout = run(ScriptedEngine(), PaidEnvironment(99), limits)
    assert rollout.turn_rewards == tuple(range(1, len(rollout.turn_ends) + 1))
    assert len(rollout.turn_ends) == (4 if limits is LIMITS else 1)


class CuttingEngine(ScriptedEngine):
    """At the deadline it has nothing of the turn yet."""

    async def generate(
        self, request: GenerateRequest, on_first_token: Callable[[int], None] | None = None
    ) -> Completion:
        answer = await super().generate(request, on_first_token)
        return Completion([], [], [], "abort") if answer.finish_reason == "abort" else answer


@pytest.mark.parametrize(("kind", "turns"), [(ScriptedEngine, 2), (CuttingEngine, 1)])
def test_a_cut_off_rollout_has_every_turn_clamped(kind: type[ScriptedEngine], turns: int) -> None:
    environment = PaidEnvironment(3, lambda paid: (*paid[:-1], paid[-1] - 7.0))
    rollout = run(kind(hang_on=1), environment, LIMITS._replace(timeout_s=0.05))
    assert rollout.timed_out
    assert rollout.reward == 0.0
    assert len(rollout.turn_ends) == turns
    assert rollout.turn_rewards == ((0.0, -5.0) if turns == 2 else (-6.0,))


@pytest.mark.parametrize(
    ("spoil", "story"),
    [
        (lambda turns: turns[1:], "the environment rewarded 1 turns of 2"),
        (lambda turns: (*turns, 0.0), "the environment rewarded 3 turns of 2"),
    ],
)
def test_turn_rewards_that_cannot_be_used_are_refused(
    spoil: Callable[[tuple[float, ...]], tuple[float, ...]], story: str
) -> None:
    with pytest.raises(ValueError, match=story):
        run(ScriptedEngine(), PaidEnvironment(2, spoil))
