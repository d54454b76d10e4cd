"""How stale may data be before anything is lost? The demo task, on data exactly s steps old.

    python perf/staleness.py [--jobs 2] [--results perf/staleness.jsonl]   the grid; resumes
    python perf/staleness.py --table                                       what there is, as tables

Each run is `launch.py` with `--pacing.fixed-staleness` and a pipeline s steps deep: real processes,
and every group exactly s steps stale from step s on, whatever the machine is busy with. A run whose
records say otherwise, or that a fault stopped, is shown apart and averaged into nothing. Reward is
held-out, at temperature 1, after the last step.

With one optimizer update per step, fresh data has an importance ratio of 1, where all losses with
one weight per token have the same gradient; so staleness 0 is run for ppo and gspo alone. A setting
survives a staleness if it ends, on average, within 0.1 of the better of these two.

It is long (about 15 s per run and core): every finished run is one line of the results file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("staleness.jsonl")

SETTINGS: dict[str, tuple[str, ...]] = {
    name: ("--loss", name)
    for name in (*("ppo", "gspo", "importance_sampling", "decoupled_ppo", "a3po", "m2po", "cispo"),)
} | {
    "ppo, clip 0.1": ("--loss", "ppo", "--learner.clip-low", "0.1", "--learner.clip-high", "0.1"),
    "ppo, clip 0.05": (
        "--loss",
        "ppo",
        "--learner.clip-low",
        "0.05",
        "--learner.clip-high",
        "0.05",
    ),
    "ppo, dual clip 1.3": ("--loss", "ppo", "--learner.dual-clip", "1.3"),
    "ppo, clip 0.1, dual clip 1.2": (
        *("--loss", "ppo", "--learner.clip-low", "0.1", "--learner.clip-high", "0.1"),
        *("--learner.dual-clip", "1.2"),
    ),
    "gspo, clip 0.1": ("--loss", "gspo", "--learner.clip-low", "0.1", "--learner.clip-high", "0.1"),
    "gspo, clip 0.03, 0.04": (
        *("--loss", "gspo", "--learner.clip-low", "0.03", "--learner.clip-high", "0.04"),
    ),
    "gspo, clip 3e-4, 4e-4": (
        *("--loss", "gspo", "--learner.clip-low", "3e-4", "--learner.clip-high", "4e-4"),
    ),
    "a3po, clip 0.02": (
        *("--loss", "a3po", "--learner.clip-low", "0.02", "--learner.clip-high", "0.02"),
    ),
    "m2po, budget 0.01": ("--loss", "m2po", "--learner.m2-budget", "0.01"),
    "ppo, entropy 0.01": ("--loss", "ppo", "--learner.entropy-coefficient", "0.01"),
    "ppo, 2 updates": ("--loss", "ppo", "--learner.num-substeps", "2"),
    "decoupled_ppo, 2 updates": ("--loss", "decoupled_ppo", "--learner.num-substeps", "2"),
}
"""By name: what is handed to launch.py. The first seven are the losses with their defaults."""

LOSSES = tuple(SETTINGS)[:7]
ON_POLICY = ("ppo", "gspo")
LEARNING_RATES = (3e-4, 1e-3)
SEEDS = (0, 1, 2)
SURVIVES_WITHIN = 0.1
MIN_SEEDS = 3


class Cell(NamedTuple):
    """One run."""

    setting: str
    staleness: int
    learning_rate: float
    seed: int

    def command(self, run_dir: str, steps: int, problems: int) -> list[str]:
        """Give the command line, as a user would type it."""
        stale = str(self.staleness)
        return [
            *("python", "launch.py", "--run-dir", run_dir, "--steps", str(steps)),
            *("--seed", str(self.seed), "--eval-problems", str(problems)),
            *("--pipeline-depth", stale, "--max-steps-off-policy", stale),
            *("--pacing.fixed-staleness", "true"),
            *("--learner.learning-rate", f"{self.learning_rate:g}"),
            *SETTINGS[self.setting],
        ]


class Outcome(NamedTuple):
    """A cell and what came of it; one line of the results file."""

    cell: Cell
    reward_before: float | None
    reward: float | None
    """Held-out, of the newest evaluation; None where there is none."""
    reward_trained: float
    """Mean over the last tenth of the steps."""
    staleness_min: int
    """Of the tokens trained once the pipeline was full: the freshest, and below the stalest."""
    staleness_max: int
    num_groups: int
    ratio_max: float
    entropy_last: float
    ended: str
    """"done", or the fault that stopped it."""
    seconds: float
    command: str
    commit: str

    @property
    def size(self) -> tuple[int, int]:
        """Steps and held-out problems, as the command has them."""
        words = self.command.split()
        steps, problems = (words[words.index(key) + 1] for key in ("--steps", "--eval-problems"))
        return int(steps), int(problems)

    @property
    def is_exact(self) -> bool:
        """Say whether every token was as stale as it should be."""
        return self.staleness_min == self.staleness_max == self.cell.staleness


def main() -> int:
    """Run what is missing, then print the tables."""
    options = parse(sys.argv[1:])
    console = Console()
    known = read_results(options.results)
    others = sum(outcome.size != (options.steps, options.problems) for outcome in known)
    if others:
        story = f"holds {others} runs of other --steps or --problems than {options.steps} and "
        print(f"error: --results: {story}{options.problems}", file=sys.stderr)
        return 2
    if not options.table:
        run_all(options.cells, options, known, console)
        wide = survivors(known, options) if options.stale is None else []
        run_all(wide, options, known, console)
    print(tables(known))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; the grid's cells are in `cells`, the most telling ones first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one core each")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--problems", type=int, default=512, help="held-out, per evaluation")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(LOSSES))
    parser.add_argument("--stale", type=int, nargs="+", help="instead of 0, 1, 3, 8 and then more")
    parser.add_argument("--rates", type=float, nargs="+", default=list(LEARNING_RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--table", action="store_true", help="print what the results file holds")
    options = parser.parse_args(arguments)
    if min(options.jobs, options.steps, options.problems) < 1:
        parser.error("--jobs, --steps and --problems must be at least 1")
    if min(options.stale or [0]) < 0 or max(options.stale or [0]) >= options.steps:
        parser.error("--stale must be at least 0 and below --steps")
    options.cells = list(grid(options))
    return options


def grid(options: argparse.Namespace) -> Iterable[Cell]:
    """Give the cells asked for."""
    for rate in options.rates:
        for seed in options.seeds:
            for stale in options.stale or (8, 0, 1, 3):
                for setting in options.settings:
                    if stale or setting in ON_POLICY or setting not in LOSSES:
                        yield Cell(setting, stale, rate, seed)


def survivors(known: list[Outcome], options: argparse.Namespace) -> list[Cell]:
    """Give the cells at staleness 16, and at 32, of what has survived 8."""
    found = []
    for rate in options.rates:
        means = {key: mean for key, (mean, _, _) in averages(known, rate).items()}
        on_policy = [means[name, 0] for name in ON_POLICY if (name, 0) in means]
        for name in options.settings:
            if on_policy and means.get((name, 8), -1.0) >= max(on_policy) - SURVIVES_WITHIN:
                found += [Cell(name, stale, rate, s) for stale in (16, 32) for s in options.seeds]
    return found


# -- running --------------------------------------------------------------------------------------


def run_all(
    cells: list[Cell], options: argparse.Namespace, known: list[Outcome], console: Console
) -> None:
    """Run the cells that have not been run, side by side; append each outcome as it comes."""
    there = {outcome.cell for outcome in known}
    cells = [cell for cell in cells if cell not in there]
    if not cells:
        return
    with (
        Progress(console=console) as progress,
        ThreadPoolExecutor(options.jobs) as pool,
        options.results.open("a") as results,
    ):
        bar = progress.add_task("runs", total=len(cells))
        running = [pool.submit(run, cell, options.steps, options.problems) for cell in cells]
        try:
            for done in as_completed(running):
                outcome = done.result()
                known.append(outcome)
                results.write(json.dumps(outcome._replace(cell=outcome.cell._asdict())._asdict()))  # type: ignore[arg-type]
                results.write("\n")
                results.flush()
                progress.console.print(words(outcome), markup=False, highlight=False)
                progress.advance(bar)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def run(cell: Cell, steps: int, problems: int) -> Outcome:
    """Launch one run and read its records. Raises: RuntimeError where it left none."""
    folder = Path(tempfile.mkdtemp(prefix="staleness-"))
    run_dir = folder / "run"
    command = cell.command(str(run_dir), steps, problems)
    try:
        done = subprocess.run(
            [sys.executable, *command[1:]],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 3):
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
        ended = "done" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
        said = " ".join(cell.command("RUN", steps, problems))
        return read_run(cell, run_dir, ended, said, steps)
    finally:
        shutil.rmtree(folder)


def read_run(cell: Cell, run_dir: Path, ended: str, command: str, steps: int) -> Outcome:
    """Judge a run by what it trained, not by what it was asked to do."""
    rows = read_lines(run_dir / "metrics.jsonl")
    trained = read_lines(run_dir / "trained.jsonl")
    train = [row for row in rows if row["kind"] == "train"]
    evals = [row["eval/reward_mean"] for row in rows if row["kind"] == "eval"]
    full = [row for row in trained if row["step"] >= cell.staleness]
    stale = [row["step"] - row[key] for row in full for key in ("version_min", "version_max")]
    last = [row["reward/trained_mean"] for row in train if row["step"] >= 0.9 * steps]
    return Outcome(
        cell=cell,
        reward_before=evals[0] if evals else None,
        reward=evals[-1] if evals else None,
        reward_trained=statistics.fmean(last) if last else math.nan,
        staleness_min=min(stale, default=-1),
        staleness_max=max(stale, default=-1),
        num_groups=len(trained),
        ratio_max=max((row["ratio/max"] for row in train), default=math.nan),
        entropy_last=train[-1]["entropy/mean"] if train else math.nan,
        ended=ended,
        seconds=sum(row["time/total"] for row in train),
        command=command,
        commit=commit(),
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_results(path: Path) -> list[Outcome]:
    """Read the results file. A cell that was run twice counts twice: no run is chosen."""
    rows = read_lines(path) if path.exists() else []
    return [Outcome(**row | {"cell": Cell(**row["cell"])}) for row in rows]


def commit() -> str:
    """Name the commit that is checked out here, and whether something in it was changed."""
    asked = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(
        asked, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


# -- showing --------------------------------------------------------------------------------------


def words(outcome: Outcome) -> str:
    """Say in one line what came of a run."""
    cell = outcome.cell
    reward = "none" if outcome.reward is None else f"{outcome.reward:.3f}"
    exact = "" if outcome.is_exact else " (NOT AS ASKED)"
    return (
        f"{cell.setting}, lr {cell.learning_rate:g}, seed {cell.seed}: held-out {reward} at "
        f"staleness {outcome.staleness_min}..{outcome.staleness_max}{exact}, largest ratio "
        f"{outcome.ratio_max:.3g}, {outcome.seconds:.0f} s, {outcome.ended}"
    )


def averages(
    outcomes: Iterable[Outcome], rate: float
) -> dict[tuple[str, int], tuple[float, float, int]]:
    """Give mean, standard deviation and number of seeds by (setting, staleness)."""
    return {
        key: (
            statistics.fmean(found),
            statistics.stdev(found) if len(found) > 1 else 0.0,
            len(found),
        )
        for key, found in rewards_by(outcomes, rate).items()
    }


def rewards_by(outcomes: Iterable[Outcome], rate: float) -> dict[tuple[str, int], list[float]]:
    """Give the held-out rewards of all seeds by (setting, staleness).

    Runs of another staleness than asked, or that a fault stopped, are left out.
    """
    rewards: dict[tuple[str, int], list[float]] = defaultdict(list)
    for outcome in outcomes:
        cell = outcome.cell
        if not outcome.is_exact or outcome.ended != "done" or cell.learning_rate != rate:
            continue
        assert outcome.reward is not None
        rewards[cell.setting, cell.staleness].append(outcome.reward)
    return rewards


def orderings(outcomes: Iterable[Outcome], rate: float, stale: int) -> list[str]:
    """Name, for each setting, those below which the seeds support it: by each of 3 or more.

    All seeds of one lie below all seeds of the other, which chance alone does to 3 against 3 once
    in 20 times; of many pairs a few will be chance.
    """
    found = {
        name: rewards
        for (name, age), rewards in rewards_by(outcomes, rate).items()
        if age == stale and len(rewards) >= MIN_SEEDS
    }
    lines = []
    for name, rewards in sorted(found.items(), key=lambda item: -statistics.fmean(item[1])):
        below = [other for other, others in found.items() if max(others) < min(rewards)]
        if below:
            lines.append(f"- {stale} steps stale, every seed of {name} is above {', '.join(below)}")
    return lines


def tables(outcomes: Iterable[Outcome]) -> str:
    """Draw one Markdown table per learning rate: mean ± standard deviation over (n) seeds."""
    outcomes = list(outcomes)
    text = []
    for rate in sorted({outcome.cell.learning_rate for outcome in outcomes}):
        found = averages(outcomes, rate)
        ages = sorted({stale for _, stale in found})
        text.append(f"\nLearning rate {rate:g}, by staleness:\n")
        text.append("| setting | " + " | ".join(map(str, ages)) + " |")
        text.append("|---" * (len(ages) + 1) + "|")
        for name in sorted({name for name, _ in found}, key=list(SETTINGS).index):
            figures = [shown(found.get((name, stale))) for stale in ages]
            text.append(f"| {name} | " + " | ".join(figures) + " |")
        ordered = [line for stale in ages for line in orderings(outcomes, rate, stale)]
        text += ["\nOrderings that the seeds support:\n", *ordered] if ordered else []
    apart = [words(o) for o in outcomes if not o.is_exact or o.ended != "done"]
    if apart:
        text += ["\nStopped by a fault, or not as stale as asked; in no mean:\n"]
        text += [f"- {line}" for line in apart]
    return "\n".join(text)


def shown(figures: tuple[float, float, int] | None) -> str:
    """Write one cell of a table."""
    if figures is None:
        return ""
    mean, spread, count = figures
    return f"{mean:.3f} ± {spread:.3f} ({count})" if count > 1 else f"{mean:.3f} (1)"


if __name__ == "__main__":
    sys.exit(main())
