"""A task that any random model can be trained on: say even token ids. For check 17."""

from __future__ import annotations

from asyncrl_node.tasks.base import Environment, Outcome, Split
from perf.random_prompts import RandomPrompt, RandomPrompts


class EvenPrompt(RandomPrompt):
    """One prompt; the reward is the share of even ids in the answer."""

    async def step(self, completion_tokens: list[int]) -> list[int] | Outcome:
        """End."""
        even = sum(token % 2 == 0 for token in completion_tokens)
        return Outcome(reward=even / max(1, len(completion_tokens)))


class EvenTokens(RandomPrompts):
    """Random prompts, rewarded for even ids."""

    name = "even_tokens"

    def environment(self, split: Split, index: int) -> Environment:
        """Make the environment of problem `index`."""
        return EvenPrompt(self.prompt(index))
