"""The live view on a terminal, or one plain line per step without one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl_node.config import Config
from asyncrl_node.inspect.advice import time_shares
from asyncrl_node.inspect.follow import Row
from asyncrl_node.messages import SamplerStatus, Status
from asyncrl_node.plan import engine_of, start_notes, task_of
from asyncrl_node.run_directory import RunDirectory

_BLOCKS = " ▁▂▃▄▅▆▇█"
_CHART_ROWS = 5
_MAX_WARNINGS = 2
_WARNING_LINES = 2


class View(Protocol):
    """Where the launcher shows what happens."""

    def show_status(self, status: Status) -> None:
        """Show the present moment."""
        ...

    def show_row(self, row: Row) -> None:
        """Show a new row of metrics.jsonl."""
        ...

    def warn(self, text: str) -> None:
        """Show a warning."""
        ...

    def note(self, text: str) -> None:
        """Show a line that stays."""
        ...

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop showing."""
        ...


def make_view(config: Config, directory: RunDirectory) -> View:
    """Make the view that suits standard output."""
    if sys.stdout.isatty():
        return LiveView(config, directory, Console())
    return PlainView(config, directory)


class PlainView:
    """One line per step, for logs and pipes."""

    def __init__(self, config: Config, directory: RunDirectory) -> None:
        self._config = config
        self._directory = directory

    def __enter__(self) -> Self:
        """Say where the run goes, and what its settings cost."""
        self._say(f"run directory {self._directory.path}")
        for note in start_notes(self._config):
            self._say(note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to undo."""

    def show_status(self, status: Status) -> None:
        """Show nothing: rows say it."""

    def show_row(self, row: Row) -> None:
        """Print the row's main figures."""
        if row["kind"] == "eval":
            self._say(
                f"eval step {row['step']}: held-out reward {row['eval/reward_mean']:.3f} "
                f"({row['eval/num_problems']} problems, versions {row['eval/version_min']}.."
                f"{row['eval/version_max']})"
            )
            return
        last = self._config.start_version + self._config.steps
        self._say(
            f"step {row['step'] + 1}/{last}: reward {row['reward/mean']:.3f}, staleness "
            f"{row['async/staleness_mean']:.2f} mean {row['async/staleness_max']:.0f} max, "
            f"{row['time/total']:.2f} s (train {row['time/train']:.2f}, fill "
            f"{row['time/waiting_for_fill']:.2f}, stragglers "
            f"{row['time/waiting_for_stragglers']:.2f})"
        )

    def warn(self, text: str) -> None:
        """Print the warning."""
        self._say(f"warning: {text}")

    def note(self, text: str) -> None:
        """Print it."""
        self._say(text)

    def _say(self, text: str) -> None:
        try:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except OSError:
            # The reader left (`| head`) or the disk is full: that must not cost the run, whose
            # records are in its own directory. From here on all words go nowhere, quietly.
            _silence_stdout()


def _silence_stdout() -> None:
    """Point the descriptor elsewhere: what is still buffered then goes there too, at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, sys.stdout.fileno(), inheritable=False)
    os.close(nowhere)


class LiveView:
    """A panel that redraws itself: progress, reward curve, who waits for whom, samplers."""

    def __init__(self, config: Config, directory: RunDirectory, console: Console) -> None:
        self._config = config
        self._directory = directory
        self._title = f"{task_of(config).name} · {engine_of(config)} engine · seed {config.seed}"
        self._console = console
        self._status: Status | None = None
        self._train: list[Row] = []
        self._evals: list[Row] = []
        self._warnings: list[str] = []
        self._began_s = time.monotonic()
        self._first_row_s = 0.0
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self.render)

    def __enter__(self) -> Self:
        """Say what the settings cost and begin to draw."""
        for note in start_notes(self._config):
            self._console.print(note, highlight=False)
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Draw once more and leave the last picture on the screen."""
        if self._status is not None:
            ended = {"in_flight": 0, "completed": 0, "taken": 0, "evaluating": 0, "samplers": ()}
            self._status = msgspec.structs.replace(self._status, learner="ended", **ended)
        self._live.stop()

    def show_status(self, status: Status) -> None:
        """Remember the present moment."""
        self._status = status

    def show_row(self, row: Row) -> None:
        """Remember a row."""
        if row["kind"] == "eval":
            self._evals.append(row)
            return
        self._train.append(row)
        if len(self._train) == 1:
            self._first_row_s = time.monotonic()

    def warn(self, text: str) -> None:
        """Remember a warning; the newest few are shown."""
        self._warnings = [*self._warnings, text][-_MAX_WARNINGS:]

    def note(self, text: str) -> None:
        """Print it above the panel."""
        self._live.console.print(text, markup=False, highlight=False)

    def render(self) -> RenderableType:
        """Draw everything."""
        parts: list[RenderableType] = [self._progress(), Text(), self._curve(), Text()]
        parts.append(self._figures())
        if self._status is not None and self._status.samplers:
            parts += [Text(), _samplers(self._status.samplers)]
        parts += self._warning_lines(Group(*parts))
        return Panel(
            Group(*parts),
            title=f"[bold]asyncrl_node[/bold] · {self._title}",
            subtitle="Ctrl-C: finish the step, save, stop",
            title_align="left",
            subtitle_align="right",
        )

    # -- pieces ------------------------------------------------------------------------------

    def _warning_lines(self, above: RenderableType) -> list[Text]:
        """Fit the newest warnings below the rest: a panel that is too tall loses its lower edge."""
        width = self._console.width - 4  # the panel's frame and padding
        options = self._console.options.update(width=width, height=None)
        room = self._console.height - 2 - len(self._console.render_lines(above, options))
        lines: list[Text] = []
        for text in reversed(self._warnings):
            most = min(_WARNING_LINES, room - len(lines))
            if most > 0:
                lines = [*self._cut(f"! {text}", width, most), *lines]
        return lines

    def _cut(self, text: str, width: int, most: int) -> list[Text]:
        lines = Text(text, style="yellow").wrap(self._console, width)
        if len(lines) > most:
            lines[most - 1].rstrip()
            lines[most - 1].truncate(width - 3)
            lines[most - 1].append("...")
        return list(lines[:most])

    def _progress(self) -> RenderableType:
        done, total = len(self._train), self._config.steps
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        bar = ProgressBar(total=total, completed=done, complete_style="cyan")
        grid.add_row(f"step {done}/{total}", bar, self._eta())
        return grid

    def _eta(self) -> str:
        elapsed_s = time.monotonic() - self._began_s
        done = len(self._train)
        if done < 2:
            return f"{_clock(elapsed_s)} · ETA --:--"
        per_step_s = (time.monotonic() - self._first_row_s) / (done - 1)
        return f"{_clock(elapsed_s)} · ETA {_clock(per_step_s * (self._config.steps - done))}"

    def _curve(self) -> RenderableType:
        width = max(10, min(self._console.width - 16, 120))
        rewards = [row["reward/mean"] for row in self._train]
        lines = chart(rewards, width, self._config.steps)
        labels = ["1.0", *[""] * (_CHART_ROWS - 2), "0.0"] if lines else []
        grid = Table.grid(padding=(0, 1))
        grid.add_column(justify="right", style="dim", min_width=6, no_wrap=True)
        grid.add_column()
        for label, line in zip(labels, lines, strict=True):
            grid.add_row(label, Text(line, style="green", no_wrap=True))
        grid.add_row("reward", Text(self._reward_words(), style="dim"))
        return grid

    def _reward_words(self) -> str:
        words = "of everything sampled, per step"
        if self._train:
            words = f"{self._train[-1]['reward/mean']:.3f} now, {words}"
        if self._evals:
            last = self._evals[-1]
            words += f" · held-out {last['eval/reward_mean']:.3f} at step {last['step']}"
        return words

    def _figures(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column()
        status = self._status
        if status is None:
            grid.add_row("starting", "scheduler, learner and samplers are loading")
            return grid
        grid.add_row("learner", Text(status.learner))
        waiting = f"{status.evaluating} held-out rollouts out" if status.evaluating else ""
        slots = (
            f"{status.in_flight} in flight · {status.completed} completed · {status.taken} taken"
        )
        grid.add_row("groups", " · ".join(filter(None, (slots, waiting))))
        if self._train:
            last = self._train[-1]
            bound = self._config.pacing.max_steps_off_policy
            grid.add_row(
                "staleness",
                f"{last['async/staleness_mean']:.2f} mean · {last['async/staleness_max']:.0f} max"
                f" · bound {'none' if bound is None else bound}",
            )
            shares = time_shares(self._train[-20:])
            parts = [f"{c.replace('_', ' ')} {s:.0%}" for c, s in shares.items() if s > 0.01]
            grid.add_row("time", " · ".join(parts))
        return grid


def chart(values: Sequence[float], width: int, total: int) -> list[str]:
    """Draw values in [0, 1] as a block chart, `_CHART_ROWS` lines high; `total` fills the width.

    Values outside are drawn at the edge.
    """
    if not values:
        return [" " * width for _ in range(_CHART_ROWS)]
    columns = max(1, min(width, round(width * len(values) / max(total, len(values)))))
    heights = []
    for column in range(columns):
        start = column * len(values) // columns
        end = max(start + 1, (column + 1) * len(values) // columns)
        mean = sum(values[start:end]) / (end - start)
        heights.append(round(min(1.0, max(0.0, mean)) * _CHART_ROWS * 8))
    lines = []
    for row in reversed(range(_CHART_ROWS)):
        cells = (_BLOCKS[min(8, max(0, height - row * 8))] for height in heights)
        lines.append("".join(cells).ljust(width))
    return lines


def _samplers(samplers: Sequence[SamplerStatus]) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("sampler", "version", "groups", "rollouts", ""):
        table.add_column(name, justify="right" if name else "left")
    for sampler in samplers[:16]:
        state = "loading weights" if sampler.loading else "" if sampler.ready else "starting"
        table.add_row(
            str(sampler.sampler),
            str(sampler.policy_version),
            str(sampler.num_groups),
            str(sampler.num_rollouts),
            state,
        )
    return table


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes:d}:{rest:02d}"
