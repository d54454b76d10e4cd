"""What a task is: problems, an environment for each, and text for people to read.

An environment is token-in/token-out: it hands the model token ids and is handed back exactly the
ids that were sampled. Nothing is ever re-tokenised.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

Split = Literal["train", "eval"]


class Outcome(msgspec.Struct, frozen=True):
    """The end of a rollout.

    An environment that knows which turn earned what may say so: then each turn is trained by its
    own credit (core/advantages.py), and `reward` is what is reported. In a group where some
    rollouts say nothing (one that was cut off, say), those earn their reward by their last turn.
    """

    reward: float
    turn_rewards: tuple[float, ...] = ()
    """[K], what each turn of this rollout earned: one for each `step`, and one more for a turn that
    was cut off, if `grade_partial` is given tokens of it. Empty: there is the reward alone."""


class Environment(Protocol):
    """One attempt at one problem. A new one is made for every rollout."""

    async def reset(self) -> list[int]:
        """Start; return the prompt's token ids."""
        ...

    async def step(self, completion_tokens: list[int]) -> list[int] | Outcome:
        """Answer the sampled tokens with the next observation's token ids, or the end."""
        ...

    async def grade_partial(self, completion_tokens: list[int]) -> Outcome:
        """Grade a turn that was cut off (time or length); the caller clamps what is rewarded."""
        ...


class Task(Protocol):
    """A set of problems. Problem `index` of a split is always the same problem."""

    name: str
    num_train_problems: int
    num_eval_problems: int
    max_prompt_tokens: int
    """The longest first prompt, so that slots can be sized before anything starts."""
    max_new_tokens: int
    """The default budget of sampled tokens per turn."""
    max_turns: int
    stop_token_ids: tuple[int, ...]

    def environment(self, split: Split, index: int) -> Environment:
        """Make the environment of problem `index`, `0 <= index < num_{split}_problems`."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids, for people."""
        ...
