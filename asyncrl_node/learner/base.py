"""What the learner process needs of a trainer: the torch one and the scripted one are alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import WeightEntry


class GroupFault(RunFault):
    """A fault that one group is to blame for; the update that it belongs to changed no weight.

    Earlier updates of the same step (`num_substeps` above 1) stand.
    """

    def __init__(self, name: str, group: TrajectoryGroup, problem: str) -> None:
        super().__init__(name, f"group {group.group_id} (problem {group.problem}): {problem}")
        self.group = group


class Trainer(Protocol):
    """Policy and optimizer: groups in, weights out."""

    def keep_proximal(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Before a step's first update: score the groups of its later ones, if the loss asks."""
        ...

    def accumulate(self, groups: Sequence[TrajectoryGroup], policy_version: int) -> None:
        """Run forward and backward over these groups; add to the gradient."""
        ...

    def update(self) -> None:
        """Apply the gradient. Raises: RunFault("non_finite") before anything has changed."""
        ...

    def finish_step(self) -> dict[str, float]:
        """End the step; return its metrics."""
        ...

    @property
    def parity_report(self) -> str | None:
        """What the parity gate found at the first update that it judged; None before."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 .. vocab_size - 1."""
        ...

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens[1:] under the present weights, at temperature 1."""
        ...

    def next_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities [vocab_size] of the token after these, at temperature 1."""
        ...

    def manifest(self) -> tuple[tuple[WeightEntry, ...], int]:
        """Lay the weights out; return entries and bytes."""
        ...

    def copy_weights_into(self, buffer: memoryview) -> None:
        """Write every parameter at its place."""
        ...

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder and the optimizer state."""
        ...
