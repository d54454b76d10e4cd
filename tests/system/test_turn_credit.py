"""Turns that are rewarded, from a task in a user's file to the gradient, through real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_node.plan import WARM_MODEL
from asyncrl_node.tasks.sort_digits import encode
from tests.system.runs import launch, logs, rows, train_rows, trained

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TASK = '''
"""Two prompts to sort, one after the other: the first turn earns 1 if its answer is of even length,
else the second does. Every rollout earns 1 in all; only its turns say anything."""
from asyncrl_node.tasks.base import Outcome
from asyncrl_node.tasks.sort_digits import SortDigits, encode


class Twice(SortDigits):
    max_turns = 2
    max_prompt_tokens = 18

    def __init__(self, seed, model_dir):
        super().__init__(seed)

    def environment(self, split, index):
        return Turns(self.digits(split, index))


class Turns:
    def __init__(self, digits):
        self.digits, self.heard = digits, []

    async def reset(self):
        return encode(self.digits + ">")

    async def step(self, completion_tokens):
        self.heard.append(completion_tokens)
        if len(self.heard) == 1:
            return encode("31>")
        first = float(len(self.heard[0]) % 2 == 0)
        return Outcome(1.0, (first, 1.0 - first))

    async def grade_partial(self, completion_tokens):
        raise AssertionError("nothing is cut off here")
'''
FLAGS = ("--groups-per-batch", "8", "--eval-problems", "8", "--pacing.filter-constant-rewards")


def test_groups_that_only_their_turns_tell_apart_are_trained(tmp_path: Path) -> None:
    """The filter looks at turns too: by their rewards alone, all groups would be dropped."""
    (tmp_path / "twice.py").write_text(TASK)
    run_dir = tmp_path / "run"
    task = ("--task", f"{tmp_path}/twice.py:Twice", "--model", str(WARM_MODEL))
    shown = ("--logging.num-logged-rollouts", "64")
    done = launch(run_dir, "--steps", "3", *task, *shown, *FLAGS, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr + logs(run_dir)
    assert len(trained(run_dir)) == 3 * 8
    for row in train_rows(run_dir):
        assert row["reward/mean"] == 1.0
        assert row["reward/num_constant_groups"] == 0
        assert row["grad_norm"] > 1e-3
    samples = [row for path in (run_dir / "rollouts").glob("step-*") for row in rows(path)]
    assert len(samples) == 3 * 64
    for sample in samples:
        answer, asked, _ = sample["completion"].partition("31>")
        first = float(len(encode(answer)) % 2 == 0)
        assert asked
        assert sample["turn_rewards"] == [first, 1.0 - first], sample
