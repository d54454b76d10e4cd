"""Small sums, answered with the number alone: what a small instruct model learns in 20 steps.

    --task perf/number_alone.py:NumberAlone --model FOLDER      (a ChatML model, e.g. SmolLM2)

One solved example in the chat, then `7 + 5 =`. Reward 1.0 for `12<|im_end|>` and nothing else, 0.25
for another number alone, else 0.0. A model of this size knows some of the sums but tends to talk.
Which split a sum belongs to is a fixed function of its two numbers, whatever their order, so no
held-out sum is ever trained.

The sampler imports this file: neither torch nor transformers may be reached from here.
"""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from asyncrl_node.tasks.base import Environment, Outcome, Split, Task

END = "<|im_end|>"
LARGEST = 12
FORM_REWARD = 0.25


def prompt_of(left: int, right: int) -> str:
    """What the model is shown: one example, one question."""
    turns = [("user", "2 + 2 ="), ("assistant", "4"), ("user", f"{left} + {right} =")]
    said = "".join(f"<|im_start|>{role}\n{text}{END}\n" for role, text in turns)
    return f"{said}<|im_start|>assistant\n"


def grade(text: str, answer: int) -> float:
    """Grade a whole completion, its end token included."""
    said, end, _ = text.partition(END)
    if not end or not (said.isascii() and said.isdigit()):
        return 0.0
    return 1.0 if said == str(answer) else FORM_REWARD


def split_of(left: int, right: int) -> Split:
    """One unordered pair in five is for evaluation only."""
    small, large = sorted((left, right))
    return "eval" if (7 * small + large) % 5 == 0 else "train"


class Sum(Environment):
    """One attempt at one sum."""

    def __init__(self, task: NumberAlone, left: int, right: int) -> None:
        self._task, self._left, self._right = task, left, right

    async def reset(self) -> list[int]:
        """Return the prompt."""
        return self._task.encode(prompt_of(self._left, self._right))

    async def step(self, completion_tokens: list[int]) -> list[int] | Outcome:
        """Grade the answer; there is no second turn."""
        return Outcome(reward=grade(self._task.decode(completion_tokens), self._left + self._right))

    async def grade_partial(self, completion_tokens: list[int]) -> Outcome:
        """Grade what there is as any answer: without its end it earns nothing."""
        return await self.step(completion_tokens)  # type: ignore[return-value]


class NumberAlone(Task):
    """Sums of two numbers of 1 .. LARGEST; the order of the problems depends on the seed."""

    name = "number_alone"
    num_train_problems = 10_000
    max_prompt_tokens = 48
    max_new_tokens = 8
    max_turns = 1

    def __init__(self, seed: int, model_dir: Path) -> None:
        self._seed = seed
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        end = self._tokenizer.token_to_id(END)
        if end is None:
            raise ValueError(f"the tokenizer in {model_dir} knows no {END}")
        self.stop_token_ids = (end,)
        numbers = range(1, LARGEST + 1)
        pairs = [(left, right) for left in numbers for right in numbers]
        self._pairs = {
            split: [pair for pair in pairs if split_of(*pair) == split]
            for split in ("train", "eval")
        }
        self.num_eval_problems = len(self._pairs["eval"])

    def encode(self, text: str) -> list[int]:
        """Token ids; `<|im_start|>` and the like are one each."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Text, special tokens shown."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def environment(self, split: Split, index: int) -> Environment:
        """Make the environment: train problems are drawn, eval problems are each sum once."""
        pairs = self._pairs[split]
        place = random.Random(f"{self._seed}/{index}").randrange(len(pairs))
        left, right = pairs[index if split == "eval" else place]
        return Sum(self, left, right)
