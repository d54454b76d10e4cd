"""What was trained, read from the data itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_node.config import FakeConfig
from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.errors import RunFault
from asyncrl_node.learner.records import StalenessSums, TrainedRecords, write_fault, write_samples
from asyncrl_node.tasks.fake import FakeTask


def make_group(group: int, rollouts: list[list[int]]) -> TrajectoryGroup:
    """One group; each rollout is the versions of its tokens, -1 for those not sampled."""
    versions = np.concatenate([np.asarray(rollout, np.int32) for rollout in rollouts])
    lengths = [len(rollout) for rollout in rollouts]
    return TrajectoryGroup(
        group_id=group,
        problem=group * 10,
        epoch=2,
        tokens=np.arange(len(versions), dtype=np.int32),
        loss_mask=versions >= 0,
        sampler_logprobs=np.zeros(len(versions), np.float32),
        policy_versions=versions,
        on_older_kv=np.zeros(len(versions), bool),
        rollout_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rewards=np.arange(len(rollouts), dtype=np.float32) / 2,
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- trained.jsonl -------------------------------------------------------------------------------


def test_a_row_says_what_the_arrays_hold(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    records = TrainedRecords(path, bound=4, run_attempt=3)
    records.add(7, [make_group(1, [[-1, 5, 6], [-1, -1, 7]]), make_group(2, [[-1, 3], [-1, 3]])])
    records.close()
    assert rows_of(path) == [
        {
            "step": 7,
            "group": 1,
            "problem": 10,
            "epoch": 2,
            "version_min": 5,
            "version_max": 7,
            "num_rollouts": 2,
            "num_tokens": 3,
            "run_attempt": 3,
        },
        {
            "step": 7,
            "group": 2,
            "problem": 20,
            "epoch": 2,
            "version_min": 3,
            "version_max": 3,
            "num_rollouts": 2,
            "num_tokens": 2,
            "run_attempt": 3,
        },
    ]
    assert path.stat().st_mode & 0o777 == 0o600


def test_rows_are_there_at_once_and_a_second_attempt_appends(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    first = TrainedRecords(path, None, 0)
    first.add(0, [make_group(1, [[-1, 0]])])
    assert len(rows_of(path)) == 1, "before any close: a crash must not lose it"
    second = TrainedRecords(path, None, 1)
    second.add(1, [make_group(2, [[-1, 1]])])
    first.close()
    second.close()
    assert [row["run_attempt"] for row in rows_of(path)] == [0, 1]


@pytest.mark.parametrize(("bound", "step", "broken"), [(2, 5, False), (2, 6, True), (0, 4, True)])
def test_the_bound_is_checked_at_the_point_of_use(
    tmp_path: Path, bound: int, step: int, broken: bool
) -> None:
    """One old token in one rollout is enough."""
    records = TrainedRecords(tmp_path / "trained.jsonl", bound, 0)
    group = make_group(1, [[-1, 9, 9], [-1, 9, 3, 9]])
    if broken:
        with pytest.raises(RunFault, match="group 1 ") as caught:
            records.check(step, [group])
        assert caught.value.name == "bound_broken"
    else:
        records.check(step, [group])
    records.close()
    assert rows_of(tmp_path / "trained.jsonl") == []


def test_without_a_bound_nothing_is_too_old(tmp_path: Path) -> None:
    records = TrainedRecords(tmp_path / "trained.jsonl", None, 0)
    records.add(1_000_000, [make_group(1, [[-1, 0]])])
    records.close()
    assert rows_of(tmp_path / "trained.jsonl")[0]["version_min"] == 0


def test_a_full_disk_is_an_error_and_not_half_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = TrainedRecords(tmp_path / "trained.jsonl", None, 0)
    monkeypatch.setattr(os, "write", lambda descriptor, content: len(content) - 1)
    with pytest.raises(OSError, match="disk full"):
        records.add(0, [make_group(1, [[-1, 0]])])


# -- staleness -----------------------------------------------------------------------------------

rollouts = st.lists(st.lists(st.integers(-1, 30), min_size=1, max_size=12), min_size=1, max_size=4)
sampled = rollouts.filter(lambda group: any(version >= 0 for r in group for version in r))


@given(step=st.integers(30, 40), groups=st.lists(sampled, min_size=1, max_size=5))
def test_staleness_against_brute_force(
    tmp_path_factory: pytest.TempPathFactory, step: int, groups: list[list[list[int]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "brute.jsonl"
    records = TrainedRecords(path, None, 0)
    records.add(step, [make_group(i, group) for i, group in enumerate(groups)])
    by_token = [[step - v for rollout in g for v in rollout if v >= 0] for g in groups]
    by_group = [max(tokens) for tokens in by_token]
    flat = [staleness for tokens in by_token for staleness in tokens]
    assert records.finish_step() == pytest.approx(
        {
            "async/staleness_max": max(by_group),
            "async/staleness_min": min(by_group),
            "async/staleness_mean": sum(by_group) / len(by_group),
            "async/token_staleness_mean": sum(flat) / len(flat),
            "async/trained_groups": len(groups),
        }
    )
    assert records.finish_step()["async/trained_groups"] == 0, "the next step starts anew"
    records.close()


def test_large_versions_do_not_overflow() -> None:
    sums = StalenessSums()
    sums.add((1 << 31) - 1, np.full(100_000, (1 << 31) - 3, np.int32))
    assert sums.row()["async/token_staleness_mean"] == 2.0


# -- readable samples ----------------------------------------------------------------------------


def test_samples_are_readable_and_no_more_than_asked_for(tmp_path: Path) -> None:
    task = FakeTask(FakeConfig(), 0)
    groups = [make_group(1, [[-1, 4, 5], [-1, -1, 6]]), make_group(2, [[-1, 7], [-1, 8]])]
    path = tmp_path / "step.jsonl"
    write_samples(path, 9, groups, task, 3)
    assert rows_of(path) == [
        {
            "step": 9,
            "group": 1,
            "problem": 10,
            "rollout": 0,
            "reward": 0.0,
            "prompt": "0",
            "completion": "1 2",
            "versions": [4, 5],
        },
        {
            "step": 9,
            "group": 1,
            "problem": 10,
            "rollout": 1,
            "reward": 0.5,
            "prompt": "3 4",
            "completion": "5",
            "versions": [6],
        },
        {
            "step": 9,
            "group": 2,
            "problem": 20,
            "rollout": 0,
            "reward": 0.0,
            "prompt": "0",
            "completion": "1",
            "versions": [7],
        },
    ]
    write_samples(tmp_path / "none.jsonl", 9, groups, task, 0)
    assert not (tmp_path / "none.jsonl").exists()


def test_a_fault_is_written_with_the_numbers_that_json_has_no_words_for(tmp_path: Path) -> None:
    group = make_group(3, [[-1, 4, 5], [-1, -1], [-1, 6]])
    group.rewards[1] = np.nan
    group.sampler_logprobs[2] = -np.inf
    path = tmp_path / "fault.jsonl"
    write_fault(path, 7, group, FakeTask(FakeConfig(), seed=0), "reward 1 of 3 is nan")
    found = rows_of(path)
    assert [row["reward"] for row in found] == [0.0, "nan", 1.0]
    assert [row["sampler_logprobs"] for row in found] == [[0.0, "-inf"], [], [0.0]]
    assert [row["tokens"] for row in found] == [[1, 2], [], [6]]
    assert {(row["step"], row["group"], row["fault"]) for row in found} == {
        (7, 3, "reward 1 of 3 is nan")
    }
