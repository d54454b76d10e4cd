"""The verifier accepts an honest run and names every breach of a bent one.

The records are written here by hand: no code is shared with the verifier or with the scheduler,
and one test checks that the hand has not slipped.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl_node.__main__ import main
from asyncrl_node.learner.records import TrainedRow
from asyncrl_node.scheduler.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]

SCHEMA = """
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, time_s REAL NOT NULL, run_attempt INTEGER NOT NULL,
    event TEXT NOT NULL, group_id INTEGER NOT NULL, attempt INTEGER NOT NULL,
    problem INTEGER NOT NULL, epoch INTEGER NOT NULL, step INTEGER NOT NULL,
    version INTEGER NOT NULL, version_max INTEGER NOT NULL, sampler INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, reason TEXT NOT NULL
)
"""
COLUMNS = (
    "event", "group_id", "attempt", "problem", "epoch", "step", "version", "version_max",
    "sampler", "num_tokens", "reason",
)  # fmt: skip

Event = dict[str, Any]


class Run:
    """The records of a small run, still in memory; a test bends them before they are written.

    Two epochs of six problems, two groups a step, staleness at most 2. Groups 0..4 and 6..8 are
    trained in steps 0..3; group 5 is filtered, 9 fails, 10 and 11 are left over. Group 3 was
    restarted at version 1.
    """

    def __init__(self) -> None:
        self.bound: object = 2
        self.start_version = 0
        self.filters = True
        self.groups_per_batch = 2
        self.trained: list[Any] = []
        self.events: list[Event] = []
        self.ended = True
        self.last = "leftover"
        """The event that is written after all others: groups are left over at the end."""
        self.tail = b""
        for version in range(5):
            self.event("published", -1, problem=-1, epoch=-1, step=version - 1, version=version)
        steps = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 6: 2, 7: 3, 8: 3}
        for group in range(12):
            self._live(group, steps.get(group))

    def _live(self, group: int, step: int | None) -> None:
        admitted = 0 if step is None else max(0, step - 1)
        self.event("admitted", group, version=admitted)
        if group == 3:
            self.event("restarted", group, version=1)
            admitted = 1
        if group == 9:
            self.event("failed", group, reason="environment: KeyError")
            return
        if group == 11:
            self.event("leftover", group, reason="the run ended")
            return
        self.event("started", group, version=admitted)
        self.event("completed", group, version=admitted, version_max=3, num_tokens=100 + group)
        if group == 5:
            self.event("filtered", group, reason="constant reward")
        elif step is None:
            self.event("leftover", group, reason="the run ended")
        else:
            newest = max(admitted, step)
            self.edit("completed", group, version_max=newest)
            self.event("taken", group, step=step)
            self.event("trained", group, step=step)
            self.train(group, step, admitted, newest)

    def event(self, event: str, group: int, **fields: Any) -> None:
        blank: Event = {
            "event": event, "group_id": group, "attempt": 0, "problem": group % 6,
            "epoch": group // 6, "step": -1, "version": -1, "version_max": -1, "sampler": 0,
            "num_tokens": -1, "reason": "",
        }  # fmt: skip
        self.events.append(blank | fields)

    def train(self, group: int, step: int, version_min: int, version_max: int) -> None:
        self.trained.append(
            {
                "step": step, "group": group, "problem": group % 6, "epoch": group // 6,
                "version_min": version_min, "version_max": version_max, "num_rollouts": 4,
                "num_tokens": 100 + group, "run_attempt": 0,
            }
        )  # fmt: skip

    # -- bending

    def edit(self, event: str, group: int, **fields: Any) -> None:
        (found,) = [e for e in self.events if (e["event"], e["group_id"]) == (event, group)]
        found.update(fields)

    def drop(self, event: str, group: int) -> None:
        self.events = [e for e in self.events if (e["event"], e["group_id"]) != (event, group)]

    def forget(self, group: int) -> None:
        """Take a group out of the ledger altogether."""
        self.events = [e for e in self.events if e["group_id"] != group]

    def row(self, group: int) -> dict[str, Any]:
        (found,) = [row for row in self.trained if row["group"] == group]
        return found

    def move(self, group: int, step: int) -> None:
        """Train a group in another step, in both books."""
        self.row(group)["step"] = step
        self.edit("trained", group, step=step)

    # -- writing

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        bound = self.bound if isinstance(self.bound, int) else f'"{self.bound}"'
        (folder / "config.toml").write_text(
            f"start_version = {self.start_version}\n[pacing]\n"
            f"max_steps_off_policy = {bound}\ngroups_per_batch = {self.groups_per_batch}\n"
            f"filter_constant_rewards = {str(self.filters).lower()}\n"
        )
        lines = [row if isinstance(row, str) else json.dumps(row) for row in self.trained]
        content = "".join(line + "\n" for line in lines).encode() + self.tail
        (folder / "trained.jsonl").write_bytes(content)
        with closing(sqlite3.connect(folder / "ledger.sqlite")) as database, database:
            database.execute(SCHEMA)
            names = ", ".join(COLUMNS)
            marks = ", ".join("?" * len(COLUMNS))
            insert = f"INSERT INTO events (time_s, run_attempt, {names}) VALUES (0.0, 0, {marks})"
            in_order = sorted(self.events, key=lambda event: event["event"] == self.last)
            rows = [[event[name] for name in COLUMNS] for event in in_order]
            if self.ended:
                rows.append(["ended", *[-1] * 9, "done"])
            database.executemany(insert, rows)
        return folder


Judge = Callable[[Run], tuple[int, dict[str, Any]]]


@pytest.fixture
def judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Judge:
    def judge(run: Run) -> tuple[int, dict[str, Any]]:
        code = main(["verify", str(run.write(tmp_path / "run")), "--json"])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return judge


def test_the_records_here_have_the_shape_of_the_real_ones(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.sqlite", 0).close()
    shapes = []
    for path in (tmp_path / "ledger.sqlite", Run().write(tmp_path / "run") / "ledger.sqlite"):
        with closing(sqlite3.connect(path)) as database:
            shapes.append(database.execute("PRAGMA table_info(events)").fetchall())
    assert shapes[0] == shapes[1]
    assert set(Run().row(0)) == set(TrainedRow.__struct_fields__)


# -- honest runs ---------------------------------------------------------------------------------


def test_an_honest_run_is_accepted_and_counted(judge: Judge) -> None:
    assert judge(Run()) == (
        0,
        {
            "ok": True,
            "problems": 12,
            "trained": 8,
            "trained_twice": 0,
            "lost": 0,
            "filtered": 1,
            "failed": 1,
            "leftover": 2,
            "carried": 0,
            "max_staleness": 1,
            "bound": 2,
            "tokens_discarded": 105 + 110,
            "discarded_by_policy": 0,
            "breaches": [],
        },
    )


def test_an_unfinished_run_carries_what_has_no_end(judge: Judge) -> None:
    run = Run()
    run.ended = False
    run.drop("leftover", 10)
    run.drop("leftover", 11)
    code, verdict = judge(run)
    assert code == 0
    assert (verdict["carried"], verdict["lost"], verdict["leftover"]) == (2, 0, 0)


def test_a_run_that_trained_nothing_is_accepted(judge: Judge) -> None:
    run = Run()
    run.trained = []
    run.events = [event for event in run.events if event["event"] == "published"]
    code, verdict = judge(run)
    assert (code, verdict["problems"], verdict["max_staleness"]) == (0, 0, 0)


def test_without_a_bound_any_staleness_is_accepted(judge: Judge) -> None:
    run = Run()
    run.bound = "none"
    stale(run)
    code, verdict = judge(run)
    assert (code, verdict["bound"], verdict["max_staleness"]) == (0, None, 3)


def test_a_last_step_may_be_short(judge: Judge) -> None:
    run = Run()
    run.trained.remove(run.row(8))
    run.drop("taken", 8)
    run.drop("trained", 8)
    run.event("leftover", 8, reason="the run ended")
    assert judge(run)[0] == 0


def test_rolled_back_rows_do_not_count_and_later_ones_do(judge: Judge) -> None:
    """A crash in step 3, a resume from the checkpoint after step 1, then steps 2 and 3 again."""
    run = Run()
    honest = list(run.trained)
    lost = [dict(row, version_min=0, num_tokens=1) for row in honest[4:]]
    back = {"rolled_back_to": 2, "run_attempt": 1}
    run.trained = [*honest[:4], *lost, back, *honest[4:]]
    code, verdict = judge(run)
    assert (code, verdict["trained"], verdict["trained_twice"]) == (0, 8, 0)


def test_a_group_trained_again_after_a_roll_back_that_kept_it_is_twice(judge: Judge) -> None:
    run = Run()
    again = dict(run.row(0), step=2)
    run.trained[4:4] = [{"rolled_back_to": 2, "run_attempt": 1}, again]
    code, verdict = judge(run)
    assert code == 1
    assert verdict["trained_twice"] == 1


# -- bent runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ("filtered", "too stale, thrown away"),
        ("leftover", "too stale, thrown away"),
        ("failed", "too stale, thrown away"),
        ("failed", "environment: TimeoutError"),
    ],
)
def test_a_whole_group_that_is_thrown_away_is_a_breach(
    judge: Judge, event: str, reason: str
) -> None:
    """Group 10 was completed; whatever the scheduler calls it, it was never trained."""
    run = Run()
    run.drop("leftover", 10)
    run.event(event, 10, reason=reason)
    code, verdict = judge(run)
    assert code == 1
    assert "group 10" in verdict["breaches"][0]


def test_filtering_without_the_setting_is_a_breach(judge: Judge) -> None:
    run = Run()
    run.filters = False
    code, verdict = judge(run)
    assert code == 1
    assert "no setting does that" in verdict["breaches"][0]


def test_giving_groups_up_before_the_end_is_a_breach(judge: Judge) -> None:
    run = Run()
    run.last = "trained"
    code, verdict = judge(run)
    assert code == 1
    assert any("after group 10 was given up as left over" in b for b in verdict["breaches"])


def test_a_gap_among_the_groups_is_a_breach(judge: Judge) -> None:
    run = Run()
    run.forget(9)
    code, verdict = judge(run)
    assert code == 1
    assert any("group 9 was never admitted: a gap" in b for b in verdict["breaches"])


def stale(run: Run) -> None:
    run.row(7)["version_min"] = 0
    run.edit("admitted", 7, version=0)
    run.edit("completed", 7, version=0)


def trained_twice(run: Run) -> None:
    run.trained.append(dict(run.row(0), step=3))
    run.trained.remove(run.row(8))


def problem_twice(run: Run) -> None:
    run.row(1)["problem"] = 0
    for event in run.events:
        if event["group_id"] == 1:
            event["problem"] = 0


def offered_twice(run: Run) -> None:
    for event in run.events:
        if event["group_id"] == 11:
            event["problem"] = 4


def never_offered(run: Run) -> None:
    """Epoch 2 has begun, so epoch 1 should have been whole; problem 5 is missing there."""
    run.forget(11)
    run.event("admitted", 12, problem=0, epoch=2)
    run.event("leftover", 12, problem=0, epoch=2, reason="the run ended")


def step_gap(run: Run) -> None:
    for group in (7, 8):
        run.move(group, 4)


def too_large(run: Run) -> None:
    run.move(7, 2)


def short_step(run: Run) -> None:
    run.trained.remove(run.row(4))
    run.drop("trained", 4)
    run.event("leftover", 4, reason="the run ended")


def first_step_missing(run: Run) -> None:
    run.start_version = 1


def version_of_the_future(run: Run) -> None:
    run.row(0)["version_max"] = 7
    run.edit("completed", 0, version_max=7)


def negative_version(run: Run) -> None:
    run.row(0)["version_min"] = -1
    run.edit("completed", 0, version=-1)
    run.edit("admitted", 0, version=-1)


def versions_in_disorder(run: Run) -> None:
    run.row(7).update(version_min=3, version_max=2)
    run.edit("completed", 7, version=3, version_max=2)


def wrong_version(run: Run) -> None:
    run.row(7)["version_min"] = 3


def wrong_tokens(run: Run) -> None:
    run.row(7)["num_tokens"] += 1


def too_old_after_restart(run: Run) -> None:
    run.row(3)["version_min"] = 0
    run.edit("completed", 3, version=0)


def too_old_for_its_admission(run: Run) -> None:
    run.row(7)["version_min"] = 1
    run.edit("completed", 7, version=1)


def wrong_problem(run: Run) -> None:
    run.row(7)["problem"] = 5


def wrong_epoch(run: Run) -> None:
    run.row(7)["epoch"] = 0


def trained_only_in_the_books(run: Run) -> None:
    run.trained.remove(run.row(8))


def trained_only_in_the_data(run: Run) -> None:
    run.drop("trained", 8)
    run.event("leftover", 8, reason="the run ended")


def trained_in_another_step(run: Run) -> None:
    run.edit("trained", 8, step=2)


def never_admitted(run: Run) -> None:
    run.forget(8)


def admission_missing(run: Run) -> None:
    run.drop("admitted", 8)


def never_completed(run: Run) -> None:
    run.drop("completed", 8)


def admitted_twice(run: Run) -> None:
    run.event("admitted", 8)


def ended_twice(run: Run) -> None:
    run.event("leftover", 8, reason="the run ended")


def trained_and_trained(run: Run) -> None:
    run.event("trained", 8, step=3)


def failed_without_a_reason(run: Run) -> None:
    run.edit("failed", 9, reason="")


def lost(run: Run) -> None:
    run.drop("leftover", 11)


def unfinished_line(run: Run) -> None:
    run.tail = b'{"step": 4, "group'


def garbage_line(run: Run) -> None:
    run.trained.insert(3, "%PDF-1.7 \x00")


def nested_line(run: Run) -> None:
    run.trained.append("[" * 100_000)


def missing_field(run: Run) -> None:
    del run.row(8)["version_max"]


def not_a_row(run: Run) -> None:
    run.trained.append("[1, 2]")


def not_a_number(run: Run) -> None:
    run.trained.append(json.dumps(dict(run.row(8), step=float("inf"))))


BENT: dict[Callable[[Run], None], str] = {
    stale: "staleness 3, bound 2",
    trained_twice: "group 0 was trained 2 times",
    problem_twice: "problem 0 was trained twice in epoch 0: groups 0 and 1",
    offered_twice: "problem 4 was offered 2 times in epoch 1",
    never_offered: "problem 5 was never offered in epoch 1",
    step_gap: "step 3 trained nothing, step 4 did",
    too_large: "step 2 trained 3 groups, a batch is 2",
    short_step: "step 2 trained only 1 groups and was not the last",
    first_step_missing: "step 1 trained nothing, step 0 did",
    version_of_the_future: "group 0 of step 0 claims versions 0..7",
    negative_version: "claims versions -1..0",
    versions_in_disorder: "claims versions 3..2",
    wrong_version: "group 7: the sampler reported versions 2..3 and 107 tokens",
    wrong_tokens: "the data holds 2..3 and 108",
    too_old_after_restart: "token of version 0, older than its min_version 1",
    too_old_for_its_admission: "token of version 1, older than its min_version 2",
    wrong_problem: "admitted as problem 1 of epoch 1, trained as 5 of 1",
    wrong_epoch: "admitted as problem 1 of epoch 1, trained as 1 of 0",
    trained_only_in_the_books: "the ledger trains group 8 in step 3, the data does not",
    trained_only_in_the_data: "group 8 was trained in step 3, the ledger does not say so",
    trained_in_another_step: "the ledger trains group 8 in step 2, the data does not",
    never_admitted: "group 8 was trained but never admitted",
    admission_missing: "group 8 was trained but never admitted",
    never_completed: "group 8 was trained but never completed",
    admitted_twice: "group 8 was admitted 2 times",
    ended_twice: "group 8 ended more than once: trained and leftover",
    trained_and_trained: "group 8 ended more than once: trained and trained",
    failed_without_a_reason: "group 9 was failed without a reason",
    lost: "group 11 (problem 5) was lost",
    unfinished_line: "the last line is unfinished",
    garbage_line: "trained.jsonl line 4",
    nested_line: "trained.jsonl line 9: RecursionError",
    missing_field: "trained.jsonl line 8: KeyError: 'version_max'",
    not_a_row: "trained.jsonl line 9",
    not_a_number: "trained.jsonl line 9",
}


@pytest.mark.parametrize(("bend", "breach"), BENT.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_every_breach_is_named(judge: Judge, bend: Callable[[Run], None], breach: str) -> None:
    run = Run()
    bend(run)
    code, verdict = judge(run)
    assert code == 1
    assert verdict["ok"] is False
    assert any(breach in found for found in verdict["breaches"]), verdict["breaches"]


@pytest.mark.parametrize(
    ("bend", "count"),
    [
        (trained_twice, ("trained_twice", 1)),
        (problem_twice, ("trained_twice", 1)),
        (lost, ("lost", 1)),
        (never_offered, ("lost", 1)),
        (stale, ("max_staleness", 3)),
    ],
)
def test_what_is_found_is_counted(
    judge: Judge, bend: Callable[[Run], None], count: tuple[str, int]
) -> None:
    run = Run()
    bend(run)
    assert judge(run)[1][count[0]] == count[1]


def test_a_whole_group_that_failed_is_discarded_by_policy(judge: Judge) -> None:
    run = Run()
    run.event("completed", 9, version=0, version_max=0, num_tokens=50)
    _, verdict = judge(run)
    assert verdict["discarded_by_policy"] == 1
    assert verdict["tokens_discarded"] == 105 + 110 + 50


# -- the command ---------------------------------------------------------------------------------


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncrl_node", "verify", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def test_the_command_ends_with_one_json_object(tmp_path: Path) -> None:
    run = Run()
    trained_twice(run)
    done = verify(str(run.write(tmp_path / "run")), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["trained_twice"] == 1
    assert not done.stderr


def test_words_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Run().write(tmp_path / "run")
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == (
        "admitted 12 = trained 8 + filtered 1 + failed 1 + leftover 2 + carried 0\n"
        "trained twice 0, lost 0, staleness at most 1 (bound 2)\n"
        "ok\n"
    )
    bent = Run()
    lost(bent)
    bent.bound = "none"
    assert main(["verify", str(bent.write(tmp_path / "bent"))]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[1].endswith("(no bound)")
    assert out[2:] == ["breach: group 11 (problem 5) was lost", "1 breaches"]


@pytest.mark.parametrize("name", ["run#1", "100%25", "what?", "a b", "\u00fcn\u00ef"])
def test_a_run_directory_may_have_any_name(tmp_path: Path, name: str) -> None:
    assert main(["verify", str(Run().write(tmp_path / name)), "--json"]) == 0


def damage(folder: Path, name: str, content: bytes | None) -> None:
    path = folder / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", None),
        ("ledger.sqlite", None),
        ("config.toml", b"[pacing"),
        ("config.toml", b"start_version = 0\n"),
        ("config.toml", b"start_version = 0\npacing = 3\n"),
        ("config.toml", b"\xff\xfe"),
        ("ledger.sqlite", b"not a database at all, but long enough to look at" * 10),
        ("ledger.sqlite", b""),
    ],
)
def test_records_that_cannot_be_read_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None
) -> None:
    folder = Run().write(tmp_path / "run")
    damage(folder, name, content)
    assert main(["verify", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: run_dir: must ")
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_a_missing_directory_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        f"error: run_dir: must be a run directory, with a config.toml (got {tmp_path / 'nowhere'})"
    ]


def test_missing_training_records_are_a_breach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Run().write(tmp_path / "run")
    (folder / "trained.jsonl").unlink()
    assert main(["verify", str(folder), "--json"]) == 1
    assert "the data does not" in capsys.readouterr().out


def test_verify_changes_nothing(tmp_path: Path) -> None:
    folder = Run().write(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["verify", str(folder)]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
