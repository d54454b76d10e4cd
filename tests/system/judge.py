"""Judging a run from its data: imports nothing of the project.

`judge` recomputes every metric from trained.jsonl and the ledger's raw rows and compares it with
what was logged. The multiset of trained problems must equal the multiset admitted, less those whose
filtering, failure or leftover is on record: no bias is an identity, not a statistic.
"""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Judged(NamedTuple):
    """What a test may still want to say about a run."""

    trained: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    events: Counter[str]
    staleness: list[int]

    @property
    def mean_staleness(self) -> float:
        return sum(self.staleness) / len(self.staleness)


def judge(run_dir: Path) -> Judged:
    """Check a finished run against its own records; returns them for more."""
    config = tomllib.loads((run_dir / "config.toml").read_text())
    trained = _lines(run_dir / "trained.jsonl")
    metrics = _lines(run_dir / "metrics.jsonl")
    rows = [row for row in metrics if row["kind"] == "train"]
    evals = [row for row in metrics if row["kind"] == "eval"]
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        events = list(
            ledger.execute(
                "SELECT event, group_id, problem, epoch, step, version, num_tokens "
                "FROM events ORDER BY seq"
            )
        )
    judged = Judged(
        trained,
        rows,
        evals,
        Counter(event[0] for event in events),
        [row["step"] - row["version_min"] for row in trained],
    )
    _check_bound(judged, config["pacing"]["max_steps_off_policy"])
    _check_no_bias(trained, events)
    _check_batches(judged, config)
    for row in rows:
        _check_row(row, [r for r in trained if r["step"] == row["step"]])
    _check_gauges(rows, events, config)
    return judged


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _check_bound(judged: Judged, bound: int | str) -> None:
    assert all(staleness >= 0 for staleness in judged.staleness)
    if bound != "none":
        assert isinstance(bound, int)
        assert max(judged.staleness) <= bound
    assert all(r["version_min"] <= r["version_max"] <= r["step"] for r in judged.trained)


def _check_no_bias(trained: list[dict[str, Any]], events: list[tuple[Any, ...]]) -> None:
    admitted = Counter((e[3], e[2]) for e in events if e[0] == "admitted")
    excused = Counter((e[3], e[2]) for e in events if e[0] in ("filtered", "failed", "leftover"))
    data = Counter((row["epoch"], row["problem"]) for row in trained)
    assert data == admitted - excused
    assert excused <= admitted
    assert max(admitted.values()) == 1
    assert len({row["group"] for row in trained}) == len(trained)


def _check_batches(judged: Judged, config: dict[str, Any]) -> None:
    sizes = Counter(row["step"] for row in judged.trained)
    first = config["start_version"]
    assert sorted(sizes) == list(range(first, first + len(sizes)))
    assert [row["step"] for row in judged.rows] == sorted(sizes)
    batch = config["pacing"]["groups_per_batch"]
    assert all(size == batch for step, size in sizes.items() if step != max(sizes))
    assert sizes[max(sizes)] <= batch


def _check_row(row: dict[str, Any], mine: list[dict[str, Any]]) -> None:
    staleness = [r["step"] - r["version_min"] for r in mine]
    assert row["async/staleness_max"] == max(staleness)
    assert row["async/staleness_min"] == min(staleness)
    assert row["async/staleness_mean"] == pytest.approx(sum(staleness) / len(staleness))
    # Tokens are at most as stale as the group's oldest, and at least as its newest.
    freshest = sum(r["num_tokens"] * (r["step"] - r["version_max"]) for r in mine)
    oldest = sum(r["num_tokens"] * (r["step"] - r["version_min"]) for r in mine)
    tokens = sum(r["num_tokens"] for r in mine)
    assert freshest / tokens - 1e-9 <= row["async/token_staleness_mean"]
    assert row["async/token_staleness_mean"] <= oldest / tokens + 1e-9
    assert row["tokens/trained"] == tokens
    assert row["tokens/sampled"] == row["tokens/trained"] + row["tokens/discarded"]
    causes = {k: v for k, v in row.items() if k.startswith("time/") and k != "time/total"}
    assert sum(causes.values()) == pytest.approx(row["time/total"], rel=0.01)
    assert all(seconds >= -1e-9 for seconds in causes.values())
    assert 0.0 <= row["reward/mean"] <= 1.0


def _check_gauges(
    rows: list[dict[str, Any]], events: list[tuple[Any, ...]], config: dict[str, Any]
) -> None:
    """Replay the ledger: at each publication the gauges must be what is outstanding just then."""
    pacing = config["pacing"]
    depth, bound = pacing["pipeline_depth"], pacing["max_steps_off_policy"]
    if depth == "none":
        depth = 1 if bound == "none" else min(1, bound)
    slots = pacing["groups_per_batch"] * (depth + 1)
    states = {"admitted": "in_flight", "restarted": "in_flight", "started": "in_flight"}
    states |= {"completed": "completed", "handed_back": "completed", "taken": "taken"}
    live: dict[int, str] = {}
    logged = {row["step"]: row for row in rows}
    trained: set[int] = set()
    for event, group, _, _, step, version, _ in events:
        if event == "published" and version > config["start_version"]:
            for freed in trained:
                assert live.pop(freed) == "taken"
            trained = set()
            counts = Counter(live.values())
            row = logged.pop(step)
            assert row["async/in_flight_groups"] == counts["in_flight"]
            assert row["async/completed_buffer_size"] == counts["completed"]
            assert row["async/taken_groups"] == counts["taken"]
            assert row["async/outstanding_groups"] == len(live)
        elif event == "trained":
            trained.add(group)
        elif event in states:
            live[group] = states[event]
        elif event in ("filtered", "failed", "leftover"):
            del live[group]
        assert len(live) <= slots
    assert not logged
    assert not live
