"""perf/staleness.py: a grid of two small runs, and what its tables say and leave out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perf.staleness import (
    Cell,
    Outcome,
    averages,
    main,
    orderings,
    parse,
    read_results,
    survivors,
    tables,
)
from tests.system.runs import ROOT


def outcome(cell: Cell, reward: float | None, found: int | None = None) -> Outcome:
    """One run whose groups were `found` steps stale, or as stale as asked."""
    stale = cell.staleness if found is None else found
    return Outcome(
        cell=cell,
        reward_before=0.25,
        reward=reward,
        reward_trained=0.5,
        staleness_min=stale,
        staleness_max=cell.staleness,
        num_groups=9,
        ratio_max=3.0,
        entropy_last=0.1,
        ended="done",
        seconds=2.0,
        command="python launch.py --steps 100 --eval-problems 512",
        commit="0123abc",
    )


def cells_of(setting: str, stale: int, *rewards: float) -> list[Outcome]:
    return [outcome(Cell(setting, stale, 1e-3, s), reward) for s, reward in enumerate(rewards)]


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_small_grid_is_as_stale_as_asked_and_is_not_run_twice(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [
        *(sys.executable, "perf/staleness.py", "--results", str(results), "--steps", "5"),
        *("--problems", "8", "--stale", "0", "2", "--settings", "ppo", "m2po"),
        *("--rates", "1e-3", "--seeds", "0", "--jobs", "1"),
    ]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    known = read_results(results)
    cells = [found.cell for found in known]
    assert sorted((c.setting, c.staleness) for c in cells) == [("m2po", 2), ("ppo", 0), ("ppo", 2)]
    for cell, found in zip(cells, known, strict=True):
        assert found.is_exact
        assert found.staleness_min == cell.staleness
        assert found.num_groups == 5 * 32
        assert found.ended == "done"
        assert found.reward is not None
        assert f"--max-steps-off-policy {cell.staleness} " in found.command
    fresh = known[cells.index(Cell("ppo", 0, 1e-3, 0))]
    assert fresh.ratio_max == pytest.approx(1.0, abs=1e-3)
    written = results.read_text()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert results.read_text() == written
    assert again.stdout == tables(known) + "\n"
    assert again.stdout.count("(1)") == 3


def test_a_table_has_mean_and_spread_over_the_seeds() -> None:
    text = tables([*cells_of("ppo", 8, 0.8, 0.9, 1.0), *cells_of("m2po", 8, 0.5)])
    assert "| ppo | 0.900 ± 0.100 (3) |" in text
    assert "| m2po | 0.500 (1) |" in text
    assert "not as stale" not in text


def test_a_run_that_is_not_as_stale_as_asked_is_in_no_mean() -> None:
    loose = outcome(Cell("ppo", 8, 1e-3, 2), 0.1, found=7)
    found = [*cells_of("ppo", 8, 0.8, 0.9), loose]
    assert averages(found, 1e-3)["ppo", 8] == pytest.approx((0.85, 0.0707, 2), abs=1e-4)
    assert "seed 2: held-out 0.100 at staleness 7..8 (NOT AS ASKED)" in tables(found)


def test_an_order_is_claimed_of_three_seeds_without_overlap() -> None:
    """gspo overlaps ppo at one seed, a3po has two seeds only."""
    found = [
        *cells_of("ppo", 8, 0.9, 0.8, 0.95),
        *cells_of("gspo", 8, 0.7, 0.7, 0.81),
        *cells_of("m2po", 8, 0.1, 0.2, 0.69),
        *cells_of("a3po", 8, 0.0, 0.0),
        *cells_of("m2po", 3, 0.99, 0.99, 0.99),
    ]
    claims = [
        "- 8 steps stale, every seed of ppo is above m2po",
        "- 8 steps stale, every seed of gspo is above m2po",
    ]
    assert orderings(found, 1e-3, 8) == claims
    assert "\n".join(claims) in tables(found)
    assert orderings(found, 1e-3, 3) == orderings(found, 3e-4, 8) == []


def test_what_ends_near_on_policy_at_8_is_taken_on_to_16_and_32() -> None:
    options = parse(["--rates", "1e-3", "--seeds", "0", "1"])
    found = [
        *cells_of("ppo", 0, 0.8, 0.9),
        *cells_of("gspo", 0, 0.9, 1.0),
        *cells_of("m2po", 8, 0.84, 0.88),
        *cells_of("a3po", 8, 0.82, 0.86),
    ]
    assert survivors(found, options) == [
        Cell("m2po", stale, 1e-3, seed) for stale in (16, 32) for seed in (0, 1)
    ]


def test_a_run_that_a_fault_stopped_is_in_no_mean_and_is_named() -> None:
    """Its only evaluation is the one before training."""
    (stopped,) = cells_of("ppo", 8, 0.25)
    stopped = stopped._replace(ended="stopped: non_finite: learner: group 3")
    found = [*cells_of("ppo", 8, 0.0, 0.0), stopped]
    assert averages(found, 1e-3)["ppo", 8] == (0.0, 0.0, 2)
    assert "stopped: non_finite" in tables(found)


def test_runs_of_another_length_are_not_averaged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = cells_of("ppo", 8, 0.8)
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(one._asdict() | {"cell": one.cell._asdict()}) + "\n")
    asked = ["staleness.py", "--table", "--results", str(path)]
    monkeypatch.setattr(sys, "argv", asked)
    assert main() == 0
    monkeypatch.setattr(sys, "argv", [*asked, "--steps", "50"])
    assert main() == 2
    assert "holds 1 runs of other --steps" in capsys.readouterr().err


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    (one,) = cells_of("ppo", 8, 0.8)
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(one._asdict() | {"cell": one.cell._asdict()}) + "\n")
    assert read_results(path) == [one]
    path.write_text(path.read_text() * 2)
    assert read_results(path) == [one, one]
    assert "0.800 ± 0.000 (2)" in tables(read_results(path))
    assert read_results(tmp_path / "none") == []


@pytest.mark.parametrize("flags", [("--stale", "5", "--steps", "5"), ("--jobs", "0")])
def test_what_cannot_be_run_is_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(list(flags))
    assert refused.value.code == 2
