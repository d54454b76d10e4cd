"""What does the pacing rule cost and buy when a few rollouts are very slow?

    python perf/stragglers.py --latencies FILE --train-s 0.1 [--json]

The shipped rule and the synchronous setting run through the real processes (fake engine) and are
judged from trained.jsonl and metrics.jsonl alone. Discard-and-requeue and the older rule run in
virtual time on the same latencies (perf/simulation.py), and so does the shipped core, so that the
two kinds of figure can be compared. `limit_s` is what no scheduler can beat: the training time, or
by Little's law the mean latency over the steps in flight.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl_node.core.order import problem_order  # noqa: E402
from perf.simulation import (  # noqa: E402
    DiscardPolicy,
    OlderPolicy,
    Outcome,
    Policy,
    Settings,
    ShippedPolicy,
    mean_staleness,
    simulate,
    slow_share,
)


class Figures(NamedTuple):
    """One policy's row."""

    policy: str
    clock: str
    """"real" for processes, "virtual" for simulated time."""
    pipeline_depth: int
    max_steps_off_policy: int
    per_step_s: float
    limit_s: float
    mean_staleness: float
    max_staleness: int
    trained_over_sampled: float
    """Groups trained, of the groups that began to be sampled (from the ledger)."""
    slow_share: float
    slow_share_offered: float
    slow_share_windows: tuple[float, float]
    """Least and most over windows of 10 steps."""
    tokens_discarded: int
    """Sampled tokens that were never trained; -1 where nothing is sampled (virtual)."""
    groups_discarded: int


def limit_s(latencies: list[float], train_s: float, depth: int, batch: int) -> float:
    """Least seconds per step of any scheduler with this many groups outstanding.

    Synchronous: the training time and the expected slowest of a batch. Otherwise the training time
    or, by Little's law, the mean latency over the steps in flight; the bound K is left out, so a
    binding K shows as a higher ratio.
    """
    count = len(latencies)
    if depth == 0:
        ranked = enumerate(sorted(latencies), 1)
        slowest_s = sum(v * ((i / count) ** batch - ((i - 1) / count) ** batch) for i, v in ranked)
        return train_s + slowest_s
    return max(train_s, sum(latencies) / count / (depth + 1))


def run_real(
    options: argparse.Namespace, latencies: list[float], depth: int, bound: int
) -> Figures:
    """Run launch.py; judge it from its records."""
    steps = options.steps if depth else max(20, options.steps // 8)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            *(sys.executable, str(ROOT / "launch.py"), "--run-dir", str(run_dir)),
            *("--engine", "fake", "--fake.latencies", options.latencies),
            *("--fake.train-s", str(options.train_s), "--steps", str(steps)),
            *("--groups-per-batch", str(options.groups_per_batch), "--eval-problems", "0"),
            *("--group-size", "2", "--pipeline-depth", str(depth)),
            *("--max-steps-off-policy", str(bound), "--samplers", str(options.samplers)),
            *("--sampling.max-concurrent-rollouts", "100000"),
            *("--fake.num-problems", "1000000", "--logging.num-logged-rollouts", "0"),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = _rows(run_dir / "metrics.jsonl")
        trained = _rows(run_dir / "trained.jsonl")
        num_sampled, num_tokens = _sampled(run_dir / "ledger.sqlite")
    slow = _slow(latencies)
    # Steady state: the pipeline is full, and the end of the run does not thin it out yet.
    skip = min(4 * (depth + 1) + 4, len(rows) // 3)
    steady = rows[skip : len(rows) - bound - 2] if len(rows) > skip + bound + 4 else rows[skip:]
    staleness = [row["step"] - row["version_min"] for row in trained]
    by_step = [(row["step"], row["problem"] % len(latencies)) for row in trained]
    return Figures(
        policy="shipped" if depth else "synchronous",
        clock="real",
        pipeline_depth=depth,
        max_steps_off_policy=bound,
        per_step_s=sum(row["time/total"] for row in steady) / len(steady),
        limit_s=limit_s(latencies, options.train_s, depth, options.groups_per_batch),
        mean_staleness=sum(staleness) / len(staleness),
        max_staleness=max(staleness),
        trained_over_sampled=len(trained) / num_sampled,
        slow_share=slow_share([problem for _, problem in by_step], slow),
        slow_share_offered=len(slow) / len(latencies),
        slow_share_windows=_windows(by_step, slow),
        tokens_discarded=num_tokens - sum(row["num_tokens"] for row in trained),
        groups_discarded=num_sampled - len(trained),
    )


def run_virtual(
    name: str, policy: Policy, settings: Settings, latencies: list[float]
) -> tuple[Figures, Outcome]:
    """Run a policy in virtual time."""
    problems = (problem for _, problem in problem_order(len(latencies), 0, None))
    outcome = simulate(policy, settings, latencies, problems)
    skip = min(4 * (settings.pipeline_depth + 1) + 4, settings.num_steps // 3)
    ends = outcome.step_ends_s
    slow = _slow(latencies)
    figures = Figures(
        policy=name,
        clock="virtual",
        pipeline_depth=settings.pipeline_depth,
        max_steps_off_policy=settings.max_steps_off_policy,
        per_step_s=(ends[-1] - ends[skip]) / (len(ends) - 1 - skip),
        limit_s=limit_s(
            latencies, settings.train_s, settings.pipeline_depth, settings.groups_per_batch
        ),
        mean_staleness=mean_staleness(outcome.trained),
        max_staleness=max(g.step - g.version for g in outcome.trained),
        trained_over_sampled=len(outcome.trained) / (len(outcome.trained) + len(outcome.discarded)),
        slow_share=slow_share([g.problem for g in outcome.trained], slow),
        slow_share_offered=len(slow) / len(latencies),
        slow_share_windows=_windows([(g.step, g.problem) for g in outcome.trained], slow),
        tokens_discarded=-1,
        groups_discarded=len(outcome.discarded),
    )
    return figures, outcome


def _slow(latencies: list[float]) -> set[int]:
    """Problems slower than ten times the median."""
    median = sorted(latencies)[len(latencies) // 2]
    return {index for index, value in enumerate(latencies) if value > 10 * median}


def _windows(trained: list[tuple[int, int]], slow: set[int]) -> tuple[float, float]:
    """Least and most slow share over windows of 10 steps."""
    first, last = min(step for step, _ in trained), max(step for step, _ in trained)
    shares = []
    for start in range(first, max(first + 1, last - 8), 10):
        window = [problem for step, problem in trained if start <= step < start + 10]
        shares.append(slow_share(window, slow))
    return min(shares), max(shares)


def _sampled(ledger: Path) -> tuple[int, int]:
    """Groups that began to be sampled, and tokens of those that were completed."""
    with sqlite3.connect(ledger) as database:
        query = "SELECT count(DISTINCT group_id) FROM events WHERE event = 'started'"
        (groups,) = database.execute(query).fetchone()
        query = "SELECT sum(num_tokens) FROM events WHERE event = 'completed'"
        (tokens,) = database.execute(query).fetchone()
    return groups, tokens


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(options: argparse.Namespace) -> list[Figures]:
    """Make all rows."""
    latencies: list[float] = json.loads(Path(options.latencies).read_text())
    depth, bound = options.pipeline_depth, options.max_steps_off_policy
    figures = [run_real(options, latencies, depth, bound)]
    if options.tight_bound is not None:
        figures.append(run_real(options, latencies, depth, options.tight_bound))
    if options.synchronous:
        figures.append(run_real(options, latencies, 0, 0))
    for each in range(7) if options.curve else ():
        figures.append(run_real(options, latencies, each, max(bound, each)))
    for each_bound in filter(None, (bound, options.tight_bound)):
        settings = Settings(
            options.groups_per_batch, depth, each_bound, options.train_s, options.steps
        )
        for name, policy in (
            ("shipped core", ShippedPolicy(settings)),
            ("older rule", OlderPolicy(settings)),
            ("discard", DiscardPolicy(settings)),
        ):
            figures.append(run_virtual(name, policy, settings, latencies)[0])
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latencies", required=True, help="JSON list of seconds per problem")
    parser.add_argument("--train-s", type=float, default=0.1)
    parser.add_argument("--groups-per-batch", type=int, default=32)
    parser.add_argument("--pipeline-depth", type=int, default=4)
    parser.add_argument("--max-steps-off-policy", type=int, default=16)
    parser.add_argument("--tight-bound", type=int, help="also run with this smaller bound")
    parser.add_argument(
        "--synchronous", action=argparse.BooleanOptionalAction, default=True, help="run D = K = 0"
    )
    parser.add_argument("--curve", action="store_true", help="also every depth of 0 .. 6")
    parser.add_argument("--samplers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        print(json.dumps({"policies": [f._asdict() for f in figures]}))
        return
    print_table(figures)


def print_table(figures: list[Figures]) -> None:
    """Print one row per policy."""
    table = Table("policy", "clock", "D, K", "s/step", "of limit")
    for column in ("staleness", "trained/sampled", "slow share (offered)", "in 10 steps"):
        table.add_column(column)
    table.add_column("discarded: groups, tokens")
    for f in figures:
        tokens = "" if f.tokens_discarded < 0 else f", {f.tokens_discarded}"
        table.add_row(
            f.policy,
            f.clock,
            f"{f.pipeline_depth}, {f.max_steps_off_policy}",
            f"{f.per_step_s:.3f}",
            f"{f.per_step_s / f.limit_s:.2f}x",
            f"{f.mean_staleness:.2f} / {f.max_staleness}",
            f"{f.trained_over_sampled:.3f}",
            f"{f.slow_share:.3f} ({f.slow_share_offered:.3f})",
            f"{f.slow_share_windows[0]:.2f}..{f.slow_share_windows[1]:.2f}",
            f"{f.groups_discarded}{tokens}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
