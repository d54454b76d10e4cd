"""A task without a purpose: random prompts, answers that no token ends. For perf/ only.

--task perf/random_prompts.py:RandomPrompts --model FOLDER --sampling.max-new-tokens N
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from asyncrl_node.tasks.base import Environment, Outcome, Split, Task

LEAST_PROMPT, MOST_PROMPT = 24, 40


class RandomPrompt(Environment):
    """One prompt; whatever comes back earns nothing."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    async def reset(self) -> list[int]:
        """Return the prompt."""
        return self._tokens

    async def step(self, completion_tokens: list[int]) -> list[int] | Outcome:
        """End."""
        return Outcome(reward=0.0)

    async def grade_partial(self, completion_tokens: list[int]) -> Outcome:
        """End."""
        return Outcome(reward=0.0)


class RandomPrompts(Task):
    """Problem i of seed s is always the same prompt, drawn from the model's whole vocabulary."""

    name = "random_prompts"
    num_train_problems = 1_000_000
    num_eval_problems = 1
    max_prompt_tokens = MOST_PROMPT
    max_new_tokens = 64
    max_turns = 1
    stop_token_ids = ()

    def __init__(self, seed: int, model_dir: Path) -> None:
        self._seed = seed
        self._vocabulary = range(json.loads((model_dir / "config.json").read_bytes())["vocab_size"])

    def prompt(self, index: int) -> list[int]:
        """Token ids of one prompt."""
        dice = random.Random(f"{self._seed}/{index}")
        return dice.choices(self._vocabulary, k=dice.randint(LEAST_PROMPT, MOST_PROMPT))

    def environment(self, split: Split, index: int) -> Environment:
        """Make the environment of problem `index`."""
        return RandomPrompt(self.prompt(index))

    def decode(self, tokens: list[int]) -> str:
        """Show the ids: they stand for no text."""
        return " ".join(map(str, tokens))
