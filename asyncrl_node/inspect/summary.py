"""What is printed at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl_node.config import Config
from asyncrl_node.errors import RunFault
from asyncrl_node.inspect.advice import advise, time_shares
from asyncrl_node.inspect.follow import Row, read_rows
from asyncrl_node.messages import RunEnded
from asyncrl_node.run_directory import RunDirectory


def print_summary(
    config: Config,
    directory: RunDirectory,
    ended: RunEnded | None,
    fault: RunFault | None,
    wall_s: float,
) -> None:
    """Print outcome, held-out reward before and after, time, advice and where everything is."""
    rows = read_rows(directory.metrics)
    train = [row for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=15)
    table.add_column()
    table.add_row("run", _outcome(ended, fault, len(train)))
    if evals:
        table.add_row("held-out reward", _evaluations(evals))
    if ended is not None:
        table.add_row("groups", _counts(ended))
    if train:
        table.add_row("staleness", _staleness(config, train))
    table.add_row("wall time", f"{wall_s:.1f} s, start-up included")
    if train:
        table.add_row("learner's time", _shares(train))
        table.add_row("advice", advise(config, train))
    console = Console()
    console.print()
    console.print(table)
    # Outside the table, unwrapped and uncut: these two are there to be copied.
    # Text, not markup: a path may hold brackets.
    command = f"python -m asyncrl_node verify {directory.path}"
    for name, words in (("run directory", str(directory.path)), ("verify it", command)):
        console.print(Text.assemble((name.ljust(17), "bold"), words), soft_wrap=True)


def _outcome(ended: RunEnded | None, fault: RunFault | None, num_steps: int) -> Text:
    if fault is not None:
        return Text(f"stopped after {num_steps} steps by {fault.name}", style="red")
    if ended is None:
        return Text(f"killed after {num_steps} steps", style="yellow")
    if ended.reason == "interrupted":
        return Text(f"interrupted after {num_steps} steps", style="yellow")
    return Text(f"done, {num_steps} steps", style="green")


def _evaluations(evals: Sequence[Row]) -> str:
    first, last = evals[0], evals[-1]
    words = f"{first['eval/reward_mean']:.3f} before (step {first['step']})"
    if last is not first:
        words += f" -> {last['eval/reward_mean']:.3f} after (step {last['step']})"
    failed = sum(row["eval/num_failed"] for row in evals)
    lost = f"; {failed} rollouts failed and count as 0" if failed else ""
    return f"{words}, {first['eval/num_problems']} problems{lost}"


def _counts(ended: RunEnded) -> str:
    return (
        f"{ended.admitted} admitted = {ended.trained} trained + {ended.filtered} filtered + "
        f"{ended.failed} failed + {ended.leftover} leftover"
    )


def _staleness(config: Config, train: Sequence[Row]) -> str:
    bound = config.pacing.max_steps_off_policy
    mean = sum(row["async/staleness_mean"] for row in train) / len(train)
    worst = max(row["async/staleness_max"] for row in train)
    limit = "no bound" if bound is None else f"bound {bound}"
    return f"{mean:.2f} on average, {worst:.0f} at most ({limit})"


def _shares(train: Sequence[Row]) -> str:
    total_s = sum(row["time/total"] for row in train)
    parts = [
        f"{cause.replace('_', ' ')} {share:.0%}"
        for cause, share in sorted(time_shares(train).items(), key=lambda item: -item[1])
        if share >= 0.005
    ]
    return f"{', '.join(parts)} of {total_s:.1f} s"
