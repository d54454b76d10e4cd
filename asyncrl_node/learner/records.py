"""What was trained, read from the data at the moment it is trained: trained.jsonl and staleness.

Nothing here comes from the scheduler's books: versions and token counts are those of the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path

import msgspec
import numpy as np

from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.errors import RunFault
from asyncrl_node.learner.credit import turn_rewards_of
from asyncrl_node.tasks.base import Task
from asyncrl_node.transport.rows import RowFile


class TrainedRow(msgspec.Struct, frozen=True):
    """One group as it is trained."""

    step: int
    group: int
    problem: int
    epoch: int
    version_min: int
    version_max: int
    num_rollouts: int
    num_tokens: int
    """Sampled tokens."""
    run_attempt: int


class StalenessSums:
    """Staleness of one step's groups (by oldest token) and of their tokens."""

    def __init__(self) -> None:
        self.by_group: list[int] = []
        self.token_sum = 0
        self.num_tokens = 0

    def add(self, step: int, versions: np.typing.NDArray[np.int32]) -> None:
        """Count one group; `versions` are those of its sampled tokens."""
        self.by_group.append(step - int(versions.min()))
        self.token_sum += step * len(versions) - int(versions.sum(dtype=np.int64))
        self.num_tokens += len(versions)

    def row(self) -> dict[str, float]:
        """Return the staleness metrics of the step."""
        groups = self.by_group or [0]
        return {
            "async/staleness_max": float(max(groups)),
            "async/staleness_min": float(min(groups)),
            "async/staleness_mean": sum(groups) / len(groups),
            "async/token_staleness_mean": self.token_sum / max(1, self.num_tokens),
            "async/trained_groups": float(len(self.by_group)),
        }


class TrainedRecords:
    """Checks the bound once more, at the point of use, and writes trained.jsonl."""

    def __init__(self, path: Path, bound: int | None, run_attempt: int) -> None:
        self._file = RowFile(path)
        self._bound = bound
        self._run_attempt = run_attempt
        self.staleness = StalenessSums()

    def check(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Check the bound in the data, before anything is trained. Raises: RunFault."""
        for group in groups:
            oldest = int(group.policy_versions[group.loss_mask].min())
            if self._bound is not None and step - oldest > self._bound:
                raise RunFault(
                    "bound_broken",
                    f"group {group.group_id} (problem {group.problem}) holds a token of version "
                    f"{oldest} in step {step}: staler than {self._bound} steps",
                )

    def add(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Record groups as trained in `step`."""
        for group in groups:
            versions = group.policy_versions[group.loss_mask]
            row = TrainedRow(
                step=step,
                group=group.group_id,
                problem=group.problem,
                epoch=group.epoch,
                version_min=int(versions.min()),
                version_max=int(versions.max()),
                num_rollouts=len(group.rewards),
                num_tokens=len(versions),
                run_attempt=self._run_attempt,
            )
            self.staleness.add(step, versions)
            self._file.write(row)

    def finish_step(self) -> dict[str, float]:
        """Return the step's staleness metrics; start anew."""
        row = self.staleness.row()
        self.staleness = StalenessSums()
        return row

    def close(self) -> None:
        """Make the records durable."""
        self._file.close()


def write_samples(
    path: Path, step: int, groups: Sequence[TrajectoryGroup], task: Task, count: int
) -> None:
    """Write the first `count` rollouts of a batch as readable text."""
    places = ((group, number) for group in groups for number in range(len(group.rewards)))
    _write_rows(path, [_sample(step, *place, task) for place in islice(places, count)])


def write_fault(path: Path, step: int, group: TrajectoryGroup, task: Task, story: str) -> None:
    """Write all rollouts of a group that stops the run, with the numbers of each loss token.

    What is not finite is text: "nan", "inf", "-inf".
    """
    rows = []
    for number in range(len(group.rewards)):
        place = slice(*group.rollout_starts[number : number + 2])
        mask = group.loss_mask[place]
        numbers = {
            "reward": _in_json(float(group.rewards[number])),
            "fault": story,
            "tokens": group.tokens[place][mask].tolist(),
            "sampler_logprobs": [*map(_in_json, group.sampler_logprobs[place][mask].tolist())],
        }
        rows.append(_sample(step, group, number, task) | numbers)
    _write_rows(path, rows)


def _sample(step: int, group: TrajectoryGroup, number: int, task: Task) -> dict[str, object]:
    """One rollout as readable text."""
    place = slice(*group.rollout_starts[number : number + 2])
    tokens, mask = group.tokens[place], group.loss_mask[place]
    first = int(mask.argmax())
    return {
        "step": step,
        "group": group.group_id,
        "problem": group.problem,
        "rollout": number,
        "reward": float(group.rewards[number]),
        "prompt": task.decode(tokens[:first].tolist()),
        "completion": task.decode(tokens[first:].tolist()),
        "versions": sorted(set(group.policy_versions[place][mask].tolist())),
        **(
            {"turn_rewards": [*map(_in_json, turn_rewards_of(group)[number])]}
            if len(group.turn_rewards)
            else {}
        ),
    }


def _in_json(number: float) -> float | str:
    """JSON has no word for a number that is not finite."""
    return number if isfinite(number) else str(number)


def _write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a file of rows; none for no rows."""
    if rows:
        file = RowFile(path)
        for row in rows:
            file.write(row)
        file.close()
