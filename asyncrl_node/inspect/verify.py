"""Judge a run from its records alone: exactly once, within the bound, everything accounted for.

Reads config.toml, trained.jsonl (the learner's own record, from the data) and the ledger (the
scheduler's). It imports nothing of the core, the scheduler or the learner: a mistake there cannot
hide itself here. It keeps no running state of its own either: every figure is counted anew.

A `rolled_back_to` row in trained.jsonl takes back the earlier rows of that step and later ones.
"""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

_ENDS = ("trained", "filtered", "failed", "leftover")


class Verdict(msgspec.Struct):
    """What was found; `ok` exactly when `breaches` is empty."""

    ok: bool
    problems: int
    """Groups admitted: problems offered, counted once an epoch."""
    trained: int
    trained_twice: int
    lost: int
    filtered: int
    failed: int
    leftover: int
    carried: int
    """Without an end in a run that has none itself: a resume goes on with them."""
    max_staleness: int
    bound: int | None
    tokens_discarded: int
    """Sampled tokens of completed groups that ended untrained, whatever the recorded reason."""
    discarded_by_policy: int
    """Completed groups that ended untrained for no reason that the design allows."""
    breaches: list[str]


class _Trained(NamedTuple):
    step: int
    group: int
    problem: int
    epoch: int
    version_min: int
    version_max: int
    num_tokens: int


class _Event(NamedTuple):
    event: str
    group: int
    attempt: int
    problem: int
    epoch: int
    step: int
    version: int
    version_max: int
    num_tokens: int
    reason: str


class _Life:
    """All events of one group, in order."""

    def __init__(self) -> None:
        self.events: list[_Event] = []

    def all(self, name: str) -> list[_Event]:
        return [event for event in self.events if event.event == name]

    def last(self, name: str) -> _Event | None:
        found = self.all(name)
        return found[-1] if found else None

    @property
    def ends(self) -> list[_Event]:
        return [event for event in self.events if event.event in _ENDS]


def verify(run_dir: Path) -> Verdict:
    """Judge a run directory. Raises: OSError if its records cannot be read."""
    config = tomllib.loads((run_dir / "config.toml").read_text())
    pacing = config["pacing"]
    bound = None if pacing["max_steps_off_policy"] == "none" else pacing["max_steps_off_policy"]
    breaches: list[str] = []
    trained = _read_trained(run_dir / "trained.jsonl", breaches)
    lives, finished = _read_ledger(run_dir / "ledger.sqlite", breaches)
    _check_steps(trained, config["start_version"], pacing["groups_per_batch"], breaches)
    _check_staleness(trained, bound, breaches)
    twice = _check_once(trained, breaches)
    _check_against_ledger(trained, lives, breaches)
    lost, carried = _check_ends(lives, finished, breaches)
    lost += _check_epochs(lives, breaches)
    _check_reasons(lives, pacing.get("filter_constant_rewards", False), breaches)
    ended = Counter(life.ends[0].event for life in lives.values() if life.ends)
    untrained = [life for life in lives.values() if life.ends and not life.all("trained")]
    return Verdict(
        ok=not breaches,
        problems=len(lives),
        trained=len(trained),
        trained_twice=twice,
        lost=lost,
        filtered=ended["filtered"],
        failed=ended["failed"],
        leftover=ended["leftover"],
        carried=carried,
        max_staleness=max((row.step - row.version_min for row in trained), default=0),
        bound=bound,
        tokens_discarded=sum(_completed_tokens(life) for life in untrained),
        discarded_by_policy=sum(_discarded_by_policy(life) for life in untrained),
        breaches=breaches,
    )


# -- reading -----------------------------------------------------------------------------------


def _read_trained(path: Path, breaches: list[str]) -> list[_Trained]:
    rows: list[_Trained] = []
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    if lines.pop() != b"":
        breaches.append("trained.jsonl: the last line is unfinished")
    for number, line in enumerate(lines, 1):
        try:
            entry: dict[str, Any] = json.loads(line)
            if "rolled_back_to" in entry:
                rows = [row for row in rows if row.step < entry["rolled_back_to"]]
            else:
                rows.append(_Trained(*(int(entry[field]) for field in _Trained._fields)))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            breaches.append(f"trained.jsonl line {number}: {type(error).__name__}: {error}")
    return rows


def _read_ledger(path: Path, breaches: list[str]) -> tuple[dict[int, _Life], bool]:
    """Return each group's life, and whether the run recorded its own end.

    Groups are left over only at the end: nothing is admitted or trained after the first of them.
    """
    lives: defaultdict[int, _Life] = defaultdict(_Life)
    finished = False
    first_leftover: int | None = None
    query = (
        "SELECT event, group_id, attempt, problem, epoch, step, version, version_max, num_tokens, "
        "reason FROM events ORDER BY seq"
    )
    # as_uri quotes what a name may hold: "#" would cut it short, and the read-only mode with it.
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        for values in database.execute(query):
            event = _Event(*values)
            if event.event == "ended":
                finished = True
            elif event.event != "published":
                lives[event.group].events.append(event)
            if event.event == "leftover" and first_leftover is None:
                first_leftover = event.group
            if event.event in ("admitted", "trained") and first_leftover is not None:
                breaches.append(
                    f"group {event.group} was {event.event} after group {first_leftover} was "
                    "given up as left over"
                )
    return dict(lives), finished


# -- checks ------------------------------------------------------------------------------------


def _check_steps(
    trained: list[_Trained], start: int, groups_per_batch: int, breaches: list[str]
) -> None:
    """Steps follow each other without a gap; no batch is too large; only the last is short."""
    sizes = Counter(row.step for row in trained)
    for expected, step in enumerate(sorted(sizes), start):
        if step != expected:
            breaches.append(f"step {expected} trained nothing, step {step} did")
            break
    for step, size in sorted(sizes.items()):
        if size > groups_per_batch:
            breaches.append(f"step {step} trained {size} groups, a batch is {groups_per_batch}")
        if size < groups_per_batch and step != max(sizes):
            breaches.append(f"step {step} trained only {size} groups and was not the last")


def _check_staleness(trained: list[_Trained], bound: int | None, breaches: list[str]) -> None:
    for row in trained:
        staleness = row.step - row.version_min
        if bound is not None and staleness > bound:
            breaches.append(
                f"group {row.group} was trained in step {row.step} with a token of version "
                f"{row.version_min}: staleness {staleness}, bound {bound}"
            )
        if not 0 <= row.version_min <= row.version_max <= row.step:
            breaches.append(
                f"group {row.group} of step {row.step} claims versions "
                f"{row.version_min}..{row.version_max}"
            )


def _check_once(trained: list[_Trained], breaches: list[str]) -> int:
    """Return how often something was trained again: a group, or a problem within its epoch."""
    twice = 0
    groups = Counter(row.group for row in trained)
    for group, count in groups.items():
        if count > 1:
            twice += count - 1
            breaches.append(f"group {group} was trained {count} times")
    first_group: dict[tuple[int, int], int] = {}
    for row in trained:
        other = first_group.setdefault((row.epoch, row.problem), row.group)
        if other != row.group:
            twice += 1
            breaches.append(
                f"problem {row.problem} was trained twice in epoch {row.epoch}: "
                f"groups {other} and {row.group}"
            )
    return twice


def _check_against_ledger(
    trained: list[_Trained], lives: dict[int, _Life], breaches: list[str]
) -> None:
    """What the data says and what the scheduler wrote down must be the same story."""
    for row in trained:
        life = lives.get(row.group)
        if life is None or not life.all("admitted"):
            breaches.append(f"group {row.group} was trained but never admitted")
            continue
        admitted = life.all("admitted")[0]
        if (admitted.problem, admitted.epoch) != (row.problem, row.epoch):
            breaches.append(
                f"group {row.group} was admitted as problem {admitted.problem} of epoch "
                f"{admitted.epoch}, trained as {row.problem} of {row.epoch}"
            )
        _check_versions(row, life, breaches)
    data = Counter((row.group, row.step) for row in trained)
    books = Counter((e.group, e.step) for life in lives.values() for e in life.all("trained"))
    for group, step in data - books:
        breaches.append(f"group {group} was trained in step {step}, the ledger does not say so")
    for group, step in books - data:
        breaches.append(f"the ledger trains group {group} in step {step}, the data does not")


def _check_versions(row: _Trained, life: _Life, breaches: list[str]) -> None:
    completed = life.last("completed")
    if completed is None:
        breaches.append(f"group {row.group} was trained but never completed")
        return
    reported = (completed.version, completed.version_max, completed.num_tokens)
    if reported != (row.version_min, row.version_max, row.num_tokens):
        breaches.append(
            f"group {row.group}: the sampler reported versions {completed.version}.."
            f"{completed.version_max} and {completed.num_tokens} tokens, the data holds "
            f"{row.version_min}..{row.version_max} and {row.num_tokens}"
        )
    started_anew = life.last("restarted") or life.all("admitted")[0]
    if row.version_min < started_anew.version:
        breaches.append(
            f"group {row.group} holds a token of version {row.version_min}, older than its "
            f"min_version {started_anew.version}"
        )


def _check_ends(lives: dict[int, _Life], finished: bool, breaches: list[str]) -> tuple[int, int]:
    """Every admitted group has exactly one end, or the run has none. Returns (lost, carried)."""
    lost = carried = 0
    for group, life in lives.items():
        if len(life.all("admitted")) != 1:
            breaches.append(f"group {group} was admitted {len(life.all('admitted'))} times")
        if len(life.ends) > 1:
            names = " and ".join(event.event for event in life.ends)
            breaches.append(f"group {group} ended more than once: {names}")
        if life.ends:
            reason_missing = life.ends[0].event != "trained" and not life.ends[0].reason
            if reason_missing:
                breaches.append(f"group {group} was {life.ends[0].event} without a reason")
        elif finished:
            lost += 1
            breaches.append(f"group {group} (problem {life.events[0].problem}) was lost")
        else:
            carried += 1
    return lost, carried


def _check_epochs(lives: dict[int, _Life], breaches: list[str]) -> int:
    """An epoch that was left behind offered the same problems as the others, each once."""
    offered: defaultdict[int, list[int]] = defaultdict(list)
    for life in lives.values():
        first = life.events[0]
        offered[first.epoch].append(first.problem)
    if not offered:
        return 0
    left_behind = {epoch: set(p) for epoch, p in offered.items() if epoch < max(offered)}
    everything = set().union(*left_behind.values()) if left_behind else set()
    lost = 0
    for epoch, problems in sorted(offered.items()):
        for problem, count in Counter(problems).items():
            if count > 1:
                breaches.append(f"problem {problem} was offered {count} times in epoch {epoch}")
        missing = everything - left_behind.get(epoch, everything)
        lost += len(missing)
        breaches.extend(f"problem {p} was never offered in epoch {epoch}" for p in sorted(missing))
    return lost


def _check_reasons(lives: dict[int, _Life], filters: bool, breaches: list[str]) -> None:
    """Only what the design allows ends a group untrained; a group that was whole hardly ever."""
    for group, life in lives.items():
        end = life.ends[0] if life.ends else None
        if end is None or end.event == "trained":
            continue
        if end.event == "filtered" and not (filters and end.reason == "constant reward"):
            breaches.append(f"group {group} was filtered for {end.reason!r}; no setting does that")
        if end.event == "failed" and not end.reason.startswith(("environment: ", "engine: ")):
            breaches.append(f"group {group} failed for {end.reason!r}; no rollout fails so")
        if end.event == "failed" and life.last("completed") is not None:
            breaches.append(f"group {group} was whole and was given up as failed")
        if end.event == "leftover" and end.reason not in ("interrupted", "the run ended"):
            breaches.append(f"group {group} was left over for {end.reason!r}; no end does that")
    missing = set(range(len(lives))) - lives.keys()
    breaches.extend(f"group {group} was never admitted: a gap" for group in sorted(missing)[:5])


def _completed_tokens(life: _Life) -> int:
    completed = life.last("completed")
    return 0 if completed is None else completed.num_tokens


def _discarded_by_policy(life: _Life) -> bool:
    """True for a group that was whole and neither filtered by setting nor left over at the end."""
    return life.last("completed") is not None and life.ends[0].event == "failed"
