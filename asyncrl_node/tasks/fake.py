"""The task of the fake engine: a prompt is its problem's number, a reward is scripted."""

from __future__ import annotations

from collections import Counter

from asyncrl_node.config import FakeConfig
from asyncrl_node.core.order import mix
from asyncrl_node.tasks.base import Outcome, Split

_DRAWS = 1 << 32


def drawn(share: float, *numbers: int) -> bool:
    """Decide by hash whether these numbers fall into a share in [0, 1]."""
    return mix(*numbers) % _DRAWS < share * _DRAWS


class FakeEnvironment:
    """One turn; rewards alternate between the rollouts of a problem unless it is a constant one."""

    def __init__(self, split: Split, index: int, reward: float) -> None:
        self._prompt = [index if split == "train" else -1 - index]
        self._reward = reward

    async def reset(self) -> list[int]:
        """Return the problem's number; held-out problems are negative."""
        return self._prompt

    async def step(self, completion_tokens: list[int]) -> list[int] | Outcome:
        """End at once with the scripted reward."""
        return Outcome(self._reward)

    async def grade_partial(self, completion_tokens: list[int]) -> Outcome:
        """Grade a cut-off rollout like a whole one; the caller clamps it."""
        return Outcome(self._reward)


class FakeTask:
    """Numbered problems without content."""

    name = "fake"
    num_eval_problems = 1_000_000
    max_prompt_tokens = 1
    max_turns = 1
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, config: FakeConfig, seed: int) -> None:
        self.num_train_problems = config.num_problems
        self.max_new_tokens = config.tokens_per_rollout
        self._constant_share = config.constant_share
        self._seed = seed
        self._count: Counter[tuple[Split, int]] = Counter()

    def environment(self, split: Split, index: int) -> FakeEnvironment:
        """Make the environment of a problem."""
        if split == "eval":
            return FakeEnvironment(split, index, float(index % 2))
        if drawn(self._constant_share, self._seed, 1, index):
            return FakeEnvironment(split, index, 1.0)
        self._count[split, index] += 1
        return FakeEnvironment(split, index, float(self._count[split, index] % 2))

    def decode(self, tokens: list[int]) -> str:
        """Print the numbers."""
        return " ".join(map(str, tokens))
