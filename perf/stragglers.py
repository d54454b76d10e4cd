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
    slow_share: float
    slow_share_offered: float
    groups_discarded: int


def limit_s(latencies: list[float], train_s: float, depth: int) -> float:
    """Least seconds per step of any scheduler with this many groups outstanding."""
    mean_s = sum(latencies) / len(latencies)
    if depth == 0:
        return train_s + mean_s
    return max(train_s, mean_s / (depth + 1))


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
    slow = _slow(latencies)
    # Steady state: the pipeline is full, and the end of the run does not thin it out yet.
    skip = min(4 * (depth + 1) + 4, len(rows) // 3)
    steady = rows[skip : len(rows) - bound - 2] if len(rows) > skip + bound + 4 else rows[skip:]
    staleness = [row["step"] - row["version_min"] for row in trained]
    sampled = sum(row["tokens/sampled"] for row in rows)
    return Figures(
        policy="shipped" if depth else "synchronous",
        clock="real",
        pipeline_depth=depth,
        max_steps_off_policy=bound,
        per_step_s=sum(row["time/total"] for row in steady) / len(steady),
        limit_s=limit_s(latencies, options.train_s, depth),
        mean_staleness=sum(staleness) / len(staleness),
        max_staleness=max(staleness),
        trained_over_sampled=sum(row["tokens/trained"] for row in rows) / sampled,
        slow_share=slow_share([r["problem"] % len(latencies) for r in trained], slow),
        slow_share_offered=len(slow) / len(latencies),
        groups_discarded=0,
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
        limit_s=limit_s(latencies, settings.train_s, settings.pipeline_depth),
        mean_staleness=mean_staleness(outcome.trained),
        max_staleness=max(g.step - g.version for g in outcome.trained),
        trained_over_sampled=len(outcome.trained) / (len(outcome.trained) + len(outcome.discarded)),
        slow_share=slow_share([g.problem for g in outcome.trained], slow),
        slow_share_offered=len(slow) / len(latencies),
        groups_discarded=len(outcome.discarded),
    )
    return figures, outcome


def _slow(latencies: list[float]) -> set[int]:
    """Problems slower than ten times the median."""
    median = sorted(latencies)[len(latencies) // 2]
    return {index for index, value in enumerate(latencies) if value > 10 * median}


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
    for each in options.curve:
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
    parser.add_argument("--synchronous", action="store_true", help="also run D = K = 0")
    parser.add_argument("--curve", type=int, nargs="*", default=[], help="also these depths")
    parser.add_argument("--samplers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        print(json.dumps({"policies": [f._asdict() for f in figures]}))
        return
    table = Table("policy", "clock", "D, K", "s/step", "of limit", "staleness mean / max",
                  "trained/sampled", "slow share (offered)", "discarded")  # fmt: skip
    for f in figures:
        table.add_row(
            f.policy,
            f.clock,
            f"{f.pipeline_depth}, {f.max_steps_off_policy}",
            f"{f.per_step_s:.3f}",
            f"{f.per_step_s / f.limit_s:.2f}x",
            f"{f.mean_staleness:.2f} / {f.max_staleness}",
            f"{f.trained_over_sampled:.3f}",
            f"{f.slow_share:.3f} ({f.slow_share_offered:.3f})",
            str(f.groups_discarded),
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
