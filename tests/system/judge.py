"""Judging a run from its data: imports nothing of the project.

`judge` recomputes every metric from trained.jsonl and the ledger's raw rows and compares it with
what was logged. The multiset of trained problems must equal the multiset admitted, less those whose
filtering, failure or leftover is on record: no bias is an identity, not a statistic.

A row is written when its step is finished, which the ledger does not say; it says the publication
before that moment and the first take after it. What ends between the two (a filtered or restarted
group) belongs to one row or to the next: the logged counts must fit some moment in between, and
the tokens and rewards must be those of exactly the groups that this moment gives to the row.
"""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CAUSES = {
    "time/" + cause
    for cause in (
        *("train", "publish", "waiting_for_fill", "waiting_for_stragglers"),
        *("eval", "checkpoint", "other"),
    )
}
CLOCKS_S = 0.4
"""How far the learner's clock and the scheduler's may be apart on a busy machine."""

STARTUP_S = 30.0


class Event(NamedTuple):
    """One row of the ledger."""

    event: str
    group: int
    problem: int
    epoch: int
    step: int
    version: int
    num_tokens: int
    time_s: float


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
    events = _events(run_dir / "ledger.sqlite")
    judged = Judged(
        trained,
        rows,
        evals,
        Counter(event.event for event in events),
        [row["step"] - row["version_min"] for row in trained],
    )
    _check_bound(judged, config["pacing"]["max_steps_off_policy"])
    _check_no_bias(trained, events)
    _check_batches(judged, config)
    for row in rows:
        _check_row(row, [r for r in trained if r["step"] == row["step"]])
        _check_time(row, config)
    _check_sampled(judged, events, config)
    _check_waits(rows, events, config)
    _check_gauges(rows, events, config)
    _check_evals(judged, config)
    return judged


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _events(path: Path) -> list[Event]:
    with sqlite3.connect(path) as ledger:
        found = ledger.execute(
            "SELECT event, group_id, problem, epoch, step, version, num_tokens, time_s "
            "FROM events ORDER BY seq"
        )
        return [Event(*row) for row in found]


def _check_bound(judged: Judged, bound: int | str) -> None:
    assert all(staleness >= 0 for staleness in judged.staleness)
    if bound != "none":
        assert isinstance(bound, int)
        assert max(judged.staleness) <= bound
    assert all(r["version_min"] <= r["version_max"] <= r["step"] for r in judged.trained)


def _check_no_bias(trained: list[dict[str, Any]], events: list[Event]) -> None:
    admitted = Counter((e.epoch, e.problem) for e in events if e.event == "admitted")
    excuses = ("filtered", "failed", "leftover")
    excused = Counter((e.epoch, e.problem) for e in events if e.event in excuses)
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


def _check_time(row: dict[str, Any], config: dict[str, Any]) -> None:
    """Every second belongs to exactly one cause, and no cause has seconds without its reason."""
    causes = {k: v for k, v in row.items() if k.startswith("time/") and k != "time/total"}
    assert set(causes) == CAUSES
    assert all(seconds >= -1e-9 for seconds in causes.values())
    assert sum(causes.values()) == pytest.approx(row["time/total"], rel=1e-6, abs=1e-6)
    assert row["time/waiting_for_stragglers"] <= row["time/total"]
    done = row["step"] + 1 - config["start_version"]
    saves = config["save_every"] > 0 and done % config["save_every"] == 0
    assert (row["time/checkpoint"] > 0) == saves
    awaited = config["eval_problems"] > 0 and done in (1, config["steps"])
    assert (row["time/eval"] > 0) == awaited, "only the first and the last are waited for"
    if config["engine"] == "fake":
        assert (
            row["time/train"]
            >= config["fake"]["train_s"] / config["learner"]["num_substeps"] - 1e-3
        )


# -- what was sampled for a batch, before any filter ----------------------------------------------


def _check_sampled(judged: Judged, events: list[Event], config: dict[str, Any]) -> None:
    """Give each taken and each filtered group to one row; compare tokens, rewards and counts."""
    num_tokens = {e.group: e.num_tokens for e in events if e.event == "completed"}
    taken: dict[int, list[int]] = {}
    for event in events:
        if event.event == "taken":
            taken.setdefault(event.step, []).append(event.group)
    filtered = [e.group for e in events if e.event == "filtered"]
    num_filtered = list(accumulate((e.event == "filtered" for e in events), initial=0))
    num_restarted = list(accumulate((e.event == "restarted" for e in events), initial=0))
    begin = 0
    for row in judged.rows:
        end = begin + row["async/filtered_groups"]
        assert any(
            num_filtered[cut] == end and num_restarted[cut] == row["async/restarted_groups"]
            for cut in _moments(row["step"], events)
        )
        mine = taken[row["step"]]
        discarded = sum(num_tokens[group] for group in filtered[begin:end])
        assert row["tokens/discarded"] == discarded
        assert row["tokens/sampled"] == discarded + sum(num_tokens[group] for group in mine)
        assert row["tokens/sampled"] == row["tokens/trained"] + discarded
        if "async/trained_groups" in row:
            assert row["async/trained_groups"] == len(mine)
        sizes = [r["num_rollouts"] for r in judged.trained if r["step"] == row["step"]]
        _check_samples(row, sizes, end - begin, config)
        begin = end


def _moments(step: int, events: list[Event]) -> range:
    """Places in the ledger at which the step may have been finished."""
    published = [i for i, e in enumerate(events) if e.event == "published" and e.version > step]
    taken = [i for i, e in enumerate(events) if e.event == "taken" and e.step > step]
    return range(published[0] + 1, (taken[0] if taken else len(events)) + 1)


def _check_samples(
    row: dict[str, Any], sizes: list[int], num_filtered: int, config: dict[str, Any]
) -> None:
    """Constant groups have reward 1; in the others 1 and 0 alternate."""
    size = config["pacing"]["group_size"]
    fake = config["fake"]
    dropped, timeouts = row["async/dropped_samples"], row["async/timed_out_rollouts"]
    missing = sum(size - n for n in sizes)
    assert missing <= dropped <= missing + (size - 2) * num_filtered
    hasty = fake["hang_problems"] or config["sampling"]["rollout_timeout_s"] < 60
    most_timeouts = sum(sizes) + size * num_filtered if hasty else 0
    assert 0 <= timeouts <= most_timeouts
    assert 0.0 <= row["reward/mean"] <= 1.0
    if config["engine"] != "fake" or fake["raise_rate"] or fake["raise_problems"]:
        return  # a sample that is redone shifts the alternation
    constants = fake["constant_share"] > 0 and not config["pacing"]["filter_constant_rewards"]
    least = size * num_filtered + sum(n // 2 for n in sizes) - timeouts
    most = size * num_filtered + sum(n if constants else (n + 1) // 2 for n in sizes)
    total = size * num_filtered + sum(sizes)
    assert least / total - 1e-9 <= row["reward/mean"] <= most / total + 1e-9


# -- waiting --------------------------------------------------------------------------------------


def _check_waits(rows: list[dict[str, Any]], events: list[Event], config: dict[str, Any]) -> None:
    """Compare the learner's clock with the moments at which the scheduler handled its messages."""
    published_s = {e.version: e.time_s for e in events if e.event == "published"}
    taken_s = {e.step: e.time_s for e in events if e.event == "taken"}
    pacing = config["pacing"]
    is_whole = not pacing["streaming"] and not pacing["fixed_staleness"]  # it fills the pipeline
    filled_s = _filled(events, config) if is_whole else {}
    late_s = 0.0  # evaluating and saving, after the publication before and before this take
    for row in rows:
        step, after_s = row["step"], row["time/eval"] + row["time/checkpoint"]
        is_first = step == config["start_version"]
        late_s = row["time/eval"] if is_first else late_s
        # The learner may have waited for the scheduler's own start before the first publication.
        slack_s = STARTUP_S if is_first else CLOCKS_S
        step_s = published_s[step + 1] - published_s[step]
        assert row["time/total"] <= step_s + after_s + slack_s
        assert row["time/total"] >= step_s - (0.0 if is_first else late_s) - CLOCKS_S
        if not config["pacing"]["streaming"]:
            taken_after_s = taken_s[step] - published_s[step]
            waited_s = row["time/waiting_for_fill"] + row["time/waiting_for_stragglers"]
            assert taken_after_s - late_s - CLOCKS_S <= waited_s <= taken_after_s + slack_s
        if step in filled_s:
            held_s = taken_s[step] - max(filled_s[step], published_s[step])
            waited_s = row["time/waiting_for_stragglers"]
            assert held_s - late_s - CLOCKS_S <= waited_s <= held_s + CLOCKS_S
        late_s = after_s


def _filled(events: list[Event], config: dict[str, Any]) -> dict[int, float]:
    """Since when enough completed groups were there, for each step that took a whole batch."""
    batch = config["pacing"]["groups_per_batch"]
    completed, since_s = 0, 0.0
    taken: Counter[int] = Counter()
    filled: dict[int, float] = {}
    for event in events:
        if event.event == "completed":
            completed += 1
            since_s = event.time_s if completed == batch else since_s
        elif event.event == "filtered":
            completed -= 1
        elif event.event == "taken":
            completed -= 1
            taken[event.step] += 1
            if taken[event.step] == batch:
                filled[event.step] = since_s
                since_s = event.time_s
    return filled


def _check_gauges(rows: list[dict[str, Any]], events: list[Event], config: dict[str, Any]) -> None:
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
    for event in events:
        if event.event == "published" and event.version > config["start_version"]:
            for freed in trained:
                assert live.pop(freed) == "taken"
            trained = set()
            counts = Counter(live.values())
            row = logged.pop(event.step)
            assert row["async/in_flight_groups"] == counts["in_flight"]
            assert row["async/completed_buffer_size"] == counts["completed"]
            assert row["async/taken_groups"] == counts["taken"]
            assert row["async/outstanding_groups"] == len(live)
        elif event.event == "trained":
            trained.add(event.group)
        elif event.event in states:
            live[event.group] = states[event.event]
        elif event.event in ("filtered", "failed", "leftover"):
            del live[event.group]
        assert len(live) <= slots
    assert not logged
    assert not live


def _check_evals(judged: Judged, config: dict[str, Any]) -> None:
    """The held-out reward of the fake task is known: a problem earns its index modulo 2."""
    count, every, first = config["eval_problems"], config["eval_every"], config["start_version"]
    last = judged.rows[-1]["step"] + 1
    wanted = {first, last} | set(range(first + every, last, every) if every else ())
    assert {row["step"] for row in judged.evals} == (wanted if count else set())
    for row in judged.evals:
        assert row["eval/num_problems"] == count
        assert row["step"] <= row["eval/version_min"] <= row["eval/version_max"] <= last
        if config["engine"] != "fake":
            continue
        if not config["fake"]["raise_rate"] and not config["fake"]["raise_problems"]:
            assert row["eval/num_failed"] == 0
        if row["eval/num_failed"] == 0:
            mean = sum(index % 2 for index in range(count)) / count
            assert row["eval/reward_mean"] == pytest.approx(mean)
