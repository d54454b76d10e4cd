"""Running one rollout: environment, engine, time budget; tokens in, tokens out.

    reset -> prompt -> generate -> step -> observation -> generate -> ... -> Outcome

What the model produced is what is recorded, token by token, with the log-probability and the
version that the engine stamped. Observations are masked out. Nothing is re-tokenised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import isfinite
from typing import NamedTuple, TypeVar

import numpy as np

from asyncrl_node.core.order import mix
from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.core.sampling import RolloutSummary
from asyncrl_node.engines.base import Completion, Engine, GenerateRequest
from asyncrl_node.messages import GroupKey
from asyncrl_node.tasks.base import Environment, Outcome

_GRADE_WITHIN_S = 10.0

Answer = TypeVar("Answer")


class RolloutLimits(NamedTuple):
    """Budgets of one rollout."""

    max_new_tokens: int
    """Per turn."""
    max_turns: int
    max_tokens: int
    """In all, prompt and observations included."""
    temperature: float
    timeout_s: float
    stop_token_ids: tuple[int, ...]


class Rollout:
    """One sampled attempt at one problem; T tokens, prompt first (style.md)."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.loss_mask: list[bool] = []
        self.sampler_logprobs: list[float] = []
        self.policy_versions: list[int] = []
        self.on_older_kv: list[bool] = []
        self.turn_ends: list[int] = []
        self.reward = 0.0
        self.turn_rewards: tuple[float, ...] = ()
        """One per turn, or none."""
        self.timed_out = False

    def add_prompt(self, tokens: list[int]) -> None:
        """Append tokens that the policy did not sample."""
        count = len(tokens)
        self.tokens += tokens
        self.loss_mask += [False] * count
        self.sampler_logprobs += [0.0] * count
        self.policy_versions += [-1] * count
        self.on_older_kv += [False] * count

    def add_completion(self, completion: Completion) -> None:
        """Append what the policy sampled."""
        self.tokens += completion.tokens
        self.loss_mask += [True] * len(completion.tokens)
        self.sampler_logprobs += completion.logprobs
        self.policy_versions += completion.policy_versions
        oldest = completion.kv_version
        self.on_older_kv += [
            oldest is not None and version > oldest for version in completion.policy_versions
        ]
        self.turn_ends.append(len(self.tokens))

    def summary(self) -> RolloutSummary:
        """Summarize for the decisions."""
        versions = [v for v in self.policy_versions if v >= 0]
        return RolloutSummary(
            reward=self.reward,
            num_tokens=len(versions),
            version_min=min(versions, default=-1),
            version_max=max(versions, default=-1),
            timed_out=self.timed_out,
        )


class EngineFailure(Exception):
    """The engine, not the environment, failed a rollout."""


class _OutOfTime(Exception):
    """The environment has used up the rollout's budget."""


async def _within(deadline_s: float, call: Awaitable[Answer]) -> Answer:
    """Wait for the environment until the deadline; its own TimeoutError is its own."""
    try:
        async with asyncio.timeout_at(deadline_s) as budget:
            return await call
    except TimeoutError:
        if budget.expired():
            raise _OutOfTime from None
        raise


class RolloutRunner:
    """Runs rollouts on one engine."""

    def __init__(self, engine: Engine, limits: RolloutLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._next_request = 0

    async def run(
        self, environment: Environment, seed: int, on_first_token: Callable[[int], None]
    ) -> Rollout:
        """Run one rollout to its end or to its time budget.

        A rollout past the budget is cut off, graded as it stands and its rewards clamped to at most
        0, those of its turns one by one. Raises: whatever the environment raises; EngineFailure;
        ValueError for a rollout that sampled nothing, or that has another number of turns than of
        turn rewards. Rewards that are not finite are left as they are: the learner stops the run by
        the name of their group; a sample that were redone until it is finite would be a bias.
        """
        deadline_s = asyncio.get_running_loop().time() + self._limits.timeout_s
        rollout = Rollout()
        try:
            outcome = await self._turns(environment, rollout, seed, on_first_token, deadline_s)
        except _OutOfTime:
            outcome = await self._grade_cut_off(environment, rollout, [])
        if rollout.timed_out:
            clamped = tuple(map(_at_most_zero, outcome.turn_rewards))
            outcome = Outcome(_at_most_zero(outcome.reward), clamped)
        _check(rollout, outcome)
        rollout.reward = float(outcome.reward)
        rollout.turn_rewards = tuple(map(float, outcome.turn_rewards))
        return rollout

    async def _turns(
        self,
        environment: Environment,
        rollout: Rollout,
        seed: int,
        on_first_token: Callable[[int], None],
        deadline_s: float,
    ) -> Outcome:
        limits = self._limits
        observation = await _within(deadline_s, environment.reset())
        for turn in range(limits.max_turns):
            room = limits.max_tokens - len(rollout.tokens) - len(observation)
            if room < 1:  # nothing could be sampled after it: a slot holds max_tokens, no more
                return await environment.grade_partial([])
            rollout.add_prompt(observation)
            room = min(limits.max_new_tokens, room)
            completion = await self._generate(
                rollout.tokens, room, mix(seed, turn) >> 1, on_first_token, deadline_s
            )
            rollout.add_completion(completion)
            if completion.finish_reason == "abort":
                if not completion.tokens:
                    rollout.turn_ends.pop()  # a turn that the environment never hears of
                return await self._grade_cut_off(environment, rollout, completion.tokens)
            answer = await _within(deadline_s, environment.step(completion.tokens))
            if isinstance(answer, Outcome):
                return answer
            observation = answer
        return await environment.grade_partial([])

    async def _generate(
        self,
        tokens: list[int],
        room: int,
        seed: int,
        on_first_token: Callable[[int], None],
        deadline_s: float,
    ) -> Completion:
        """Generate one turn; at the deadline the engine is asked for what it has."""
        self._next_request += 1
        request = GenerateRequest(
            request_id=self._next_request,
            prompt_tokens=list(tokens),
            max_new_tokens=room,
            temperature=self._limits.temperature,
            seed=seed,
            stop_token_ids=self._limits.stop_token_ids,
        )
        loop = asyncio.get_running_loop()
        # Aborted, not cancelled: the engine gives back what there is.
        timer = loop.call_at(deadline_s, self._engine.abort, request.request_id)
        generation = asyncio.ensure_future(self._engine.generate(request, on_first_token))
        try:
            return await asyncio.shield(generation)
        except asyncio.CancelledError:
            self._engine.abort(request.request_id)
            if not generation.done():
                await asyncio.wait([generation])
            raise
        except Exception as error:
            raise EngineFailure(f"{type(error).__name__}: {error}") from error
        finally:
            timer.cancel()

    async def _grade_cut_off(
        self, environment: Environment, rollout: Rollout, tokens: list[int]
    ) -> Outcome:
        """Grade what there is; an environment that does not even answer that earns nothing."""
        rollout.timed_out = True
        try:
            return await asyncio.wait_for(environment.grade_partial(tokens), _GRADE_WITHIN_S)
        except TimeoutError:
            return Outcome(0.0)


def _check(rollout: Rollout, outcome: Outcome) -> None:
    if not any(rollout.loss_mask):
        raise ValueError("the rollout ended before its first sampled token")
    given, turns = len(outcome.turn_rewards), len(rollout.turn_ends)
    if given not in (0, turns):
        raise ValueError(f"the environment rewarded {given} turns of {turns}")


def _at_most_zero(reward: float) -> float:
    return min(0.0, reward) if isfinite(reward) else reward


def turn_rewards_of(rollouts: list[Rollout]) -> list[list[float]]:
    """Turn rewards of each rollout of a group; nothing at all where no rollout has any.

    One that has none, beside others that do, earns its reward by its last turn.
    """
    if not any(rollout.turn_rewards for rollout in rollouts):
        return []
    return [
        list(rollout.turn_rewards or [*[0.0] * (len(rollout.turn_ends) - 1), rollout.reward])
        for rollout in rollouts
    ]


def build_group(
    key: GroupKey, problem: int, epoch: int, rollouts: list[Rollout]
) -> TrajectoryGroup:
    """Lay rollouts back to back."""
    lengths = [len(rollout.tokens) for rollout in rollouts]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    turn_rewards = [reward for turns in turn_rewards_of(rollouts) for reward in turns]
    turn_ends = [
        start + end
        for rollout, start in zip(rollouts, starts[:-1].tolist(), strict=True)
        for end in rollout.turn_ends
    ]
    return TrajectoryGroup(
        group_id=key.group_id,
        problem=problem,
        epoch=epoch,
        tokens=np.concatenate([np.asarray(r.tokens, np.int32) for r in rollouts]),
        loss_mask=np.concatenate([np.asarray(r.loss_mask, bool) for r in rollouts]),
        sampler_logprobs=np.concatenate(
            [np.asarray(r.sampler_logprobs, np.float32) for r in rollouts]
        ),
        policy_versions=np.concatenate([np.asarray(r.policy_versions, np.int32) for r in rollouts]),
        on_older_kv=np.concatenate([np.asarray(r.on_older_kv, bool) for r in rollouts]),
        rollout_starts=starts,
        rewards=np.asarray([r.reward for r in rollouts], np.float32),
        turn_ends=np.asarray(turn_ends if turn_rewards else [], np.int64),
        turn_rewards=np.asarray(turn_rewards, np.float32),
    )
