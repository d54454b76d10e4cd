"""What people see of a run: the live view, plain lines, the summary, advice, loggers."""

from __future__ import annotations

import errno
import io
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asyncrl_node.config import Config, LoggingConfig, PacingConfig
from asyncrl_node.errors import ConfigError, RunFault
from asyncrl_node.inspect.advice import CAUSES, advise, time_shares
from asyncrl_node.inspect.follow import RowFollower, read_rows
from asyncrl_node.inspect.loggers import TensorBoardLogger, check_loggers, make_loggers
from asyncrl_node.inspect.summary import print_summary
from asyncrl_node.inspect.view import LiveView, PlainView, chart, make_view
from asyncrl_node.messages import RunEnded, SamplerStatus, Status
from asyncrl_node.run_directory import RunDirectory
from asyncrl_node.transport.rows import RowFile

BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def make_config(depth: int = 1, bound: int | None = 8, **settings: Any) -> Config:
    pacing = PacingConfig(pipeline_depth=depth, max_steps_off_policy=bound)
    return Config(engine="fake", steps=20, seed=5, pacing=pacing, **settings)


def train_row(step: int, reward: float = 0.5, staleness: float = 1.0, **seconds: float) -> Any:
    causes = dict.fromkeys(CAUSES, 0.0) | {"train": 1.0} | seconds
    return {
        "kind": "train",
        "step": step,
        "reward/mean": reward,
        "async/staleness_mean": staleness,
        "async/staleness_max": math.ceil(staleness) + 1.0,
        "time/total": sum(causes.values()),
        **{f"time/{cause}": spent for cause, spent in causes.items()},
    }


def eval_row(step: int, reward: float) -> Any:
    return {
        "kind": "eval",
        "step": step,
        "eval/reward_mean": reward,
        "eval/num_problems": 256,
        "eval/num_failed": 0,
        "eval/version_min": step,
        "eval/version_max": step + 1,
    }


def make_status(**changes: Any) -> Status:
    samplers = (
        SamplerStatus(0, True, 7, 24, 3, False),
        SamplerStatus(1, True, 6, 16, 2, True),
        SamplerStatus(2, False, -1, 0, 0, False),
    )
    status = Status(7, 7, 5, 4, 2, "waiting for fill: 4 of 32 groups", samplers, 11)
    return msgspec.structs.replace(status, **changes)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


# -- the chart -----------------------------------------------------------------------------------


def heights(lines: list[str]) -> list[int]:
    """Height of each column, in eighths of a line."""
    return [sum(BLOCKS.index(cell) for cell in column) for column in zip(*lines, strict=True)]


@given(
    values=st.lists(st.floats(-2, 3), max_size=300),
    width=st.integers(10, 120),
    total=st.integers(1, 400),
)
def test_a_chart_has_its_shape(values: list[float], width: int, total: int) -> None:
    lines = chart(values, width, total)
    assert len(lines) == 5
    assert {len(line) for line in lines} == {width}
    assert set("".join(lines)) <= set(BLOCKS)
    for column in zip(*lines, strict=True):
        filled = "".join(reversed(column)).rstrip(" ")
        assert filled[:-1] == BLOCKS[8] * (len(filled) - 1), "a column has a hole"


@given(
    values=st.lists(st.floats(0, 1), min_size=1, max_size=200),
    width=st.integers(10, 120),
    total=st.integers(1, 300),
)
def test_a_chart_of_rising_values_rises(values: list[float], width: int, total: int) -> None:
    rising = sorted(values)
    columns = heights(chart(rising, width, total))
    drawn = columns[: max(1, min(width, round(width * len(rising) / max(total, len(rising)))))]
    assert drawn == sorted(drawn)
    assert not any(columns[len(drawn) :])


def test_a_chart_fills_its_width_as_the_run_goes_on() -> None:
    assert heights(chart([1.0] * 5, 40, 20)) == [40] * 10 + [0] * 30
    assert heights(chart([1.0] * 20, 40, 20)) == [40] * 40
    assert heights(chart([1.0] * 30, 40, 20)) == [40] * 40
    assert heights(chart([], 40, 20)) == [0] * 40


def test_a_chart_clips_what_lies_outside_and_averages_what_is_too_narrow() -> None:
    assert heights(chart([-1.0, 0.0, 0.5, 1.0, 9.0], 5, 5)) == [0, 0, 20, 40, 40]
    assert heights(chart([0.0, 1.0] * 10, 10, 20)) == [20] * 10


# -- the live view -------------------------------------------------------------------------------


def shown(view: LiveView, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    console.print(view.render())
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def live_view(directory: RunDirectory, width: int, **settings: Any) -> LiveView:
    console = Console(width=width, height=40, file=io.StringIO(), force_terminal=True)
    return LiveView(make_config(**settings), directory, console)


def flat(text: str) -> str:
    """The words, without the frame and the line breaks."""
    return " ".join(text.replace("\u2502", " ").split())


@pytest.mark.parametrize("width", [60, 120])
def test_the_live_view_at_the_start(directory: RunDirectory, width: int) -> None:
    text = shown(live_view(directory, width), width)
    assert max(map(len, text.splitlines())) <= width
    assert "fake engine" in text
    assert "seed 5" in text
    assert "step 0/20" in text
    assert "ETA --:--" in text
    assert "scheduler, learner and samplers are loading" in flat(text)
    assert "Ctrl-C" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_live_view_in_the_middle(directory: RunDirectory, width: int) -> None:
    view = live_view(directory, width)
    view.show_row(eval_row(0, 0.125))
    for step in range(7):
        view.show_row(train_row(step, reward=0.1 * step, waiting_for_fill=1.0))
    view.show_status(make_status())
    text = shown(view, width)
    assert max(map(len, text.splitlines())) <= width
    words = flat(text)
    for fact in (
        "step 7/20",
        "0.600 now",
        "held-out 0.125 at step 0",
        "1.0 ",
        " 0.0 ",
        "reward 0.600",
        "waiting for fill: 4 of 32 groups",
        "5 in flight",
        "4 completed",
        "2 taken",
        "11 held-out rollouts out",
        "1.00 mean",
        "2 max",
        "bound 8",
        "train 50%",
        "waiting for fill 50%",
        "loading weights",
        "starting",
    ):
        assert fact in words, fact
    assert "ETA --" not in words


@pytest.mark.parametrize("width", [60, 120])
def test_the_live_view_shows_the_newest_warnings(directory: RunDirectory, width: int) -> None:
    view = live_view(directory, width, bound=None)
    view.show_status(make_status(samplers=(), evaluating=0))
    view.show_row(train_row(0))
    for number in range(5):
        view.warn(f"warning {number} of [group 3] on [/sampler] 0: set rollout_timeout_s")
    text = flat(shown(view, width))
    assert "warning 2" not in text
    assert all(f"! warning {number} of [group 3] on [/sampler] 0" in text for number in (3, 4))
    assert text.index("warning 3") < text.index("warning 4")
    assert "bound none" in text
    assert "held-out rollouts out" not in text


def test_a_note_stands_above_the_panel_as_it_is_written(directory: RunDirectory) -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    with LiveView(make_config(), directory, console) as view:
        view.note("parity gate (limit 5e-05): token [3] of group 4")
    assert isinstance(console.file, io.StringIO)
    assert "parity gate (limit 5e-05): token [3] of group 4" in console.file.getvalue()


def drawn(directory: RunDirectory, height: int, learner: str) -> list[str]:
    """Lines inside the frame at 80 columns, two samplers, every cause of time, long warnings."""
    console = Console(width=80, height=height, file=io.StringIO(), force_terminal=True)
    view = LiveView(make_config(), directory, console)
    for step in range(3):
        view.show_row(train_row(step, **dict.fromkeys(CAUSES, 1.0)))
    view.show_status(make_status(samplers=make_status().samplers[:2], learner=learner))
    for number in range(4):
        view.warn(f"warning {number}: " + "a group is late, and nobody can say why; " * 20)
    rendered = console.render_lines(view.render(), console.options.update(height=None))
    lines = ["".join(segment.text for segment in line) for line in rendered]
    assert len(lines) <= height
    assert "Ctrl-C: finish the step, save, stop" in lines[-1]
    return [line[2:-2].rstrip() for line in lines[1:-1]]


STRAGGLERS = "; ".join(f"group {g} (problem {g}) on sampler 1, due in step 9" for g in (4, 5, 6))


def test_long_warnings_leave_the_hint_on_a_small_terminal(directory: RunDirectory) -> None:
    *_, first, second, third, fourth = drawn(directory, 24, "waiting for fill: 4 of 32 groups")
    assert first.startswith("! warning 2: ")
    assert second.endswith("...")
    assert third.startswith("! warning 3: ")
    assert fourth.endswith("...")


@pytest.mark.parametrize(("height", "num_lines"), [(26, 4), (25, 3), (24, 2), (23, 1), (22, 0)])
def test_the_newest_warning_is_the_last_to_go(
    directory: RunDirectory, height: int, num_lines: int
) -> None:
    lines = drawn(directory, height, f"waiting for stragglers: {STRAGGLERS} and 9 more")
    above = next((n for n, line in enumerate(lines) if line.startswith("! ")), len(lines))
    assert len(lines) - above == num_lines
    assert [line.startswith("! warning 3: ") for line in lines].count(True) == (num_lines > 0)


@pytest.mark.parametrize("text", ["short", "two\nlines", "late " * 28])
def test_a_warning_that_fits_is_not_cut(directory: RunDirectory, text: str) -> None:
    view = live_view(directory, 80)
    view.warn(text)
    words = flat(shown(view, 80)).replace(" ", "")
    assert "!" + "".join(text.split()) in words
    assert "..." not in words


def test_the_live_view_leaves_its_last_picture(directory: RunDirectory) -> None:
    view = live_view(directory, 100)
    with view:
        view.show_status(make_status())
        view.show_row(train_row(0))
    text = flat(shown(view, 100))
    assert "learner ended" in text
    assert "0 in flight" in text
    assert "loading weights" not in text


def test_the_live_view_ends_even_before_anything_was_shown(directory: RunDirectory) -> None:
    view = live_view(directory, 100)
    with view:
        pass
    assert "are loading" in flat(shown(view, 100))


def test_words_of_the_learner_are_shown_as_they_are(directory: RunDirectory) -> None:
    """A name in brackets is not a style."""
    view = live_view(directory, 120)
    view.show_status(make_status(learner="waiting for stragglers: [red]x[/red] [/y]"))
    assert "[red]x[/red] [/y]" in flat(shown(view, 120))


def test_without_a_terminal_lines_are_plain(directory: RunDirectory) -> None:
    assert isinstance(make_view(make_config(), directory), PlainView)


# -- plain lines ---------------------------------------------------------------------------------


def test_plain_lines(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with PlainView(make_config(start_version=40), directory) as view:
        view.show_status(make_status())
        view.show_row(eval_row(40, 0.25))
        view.show_row(train_row(40, waiting_for_fill=0.5, waiting_for_stragglers=0.25))
        view.warn("the learner has waited 120 s")
        view.note("parity gate: alike")
    assert capsys.readouterr().out.splitlines() == [
        f"run directory {directory.path}",
        "eval step 40: held-out reward 0.250 (256 problems, versions 40..41)",
        "step 41/60: reward 0.500, staleness 1.00 mean 2 max, 1.75 s (train 1.00, fill 0.50, "
        "stragglers 0.25)",
        "warning: the learner has waited 120 s",
        "parity gate: alike",
    ]


class FullFile(io.StringIO):
    """Standard output whose disk is full, over a descriptor of its own."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.failures = 0

    def fileno(self) -> int:
        return self._descriptor

    def flush(self) -> None:
        if Path(f"/proc/self/fd/{self._descriptor}").readlink() != Path("/dev/null"):
            self.failures += 1
            raise OSError(errno.ENOSPC, "no space left on device")


def test_plain_lines_go_silent_once_when_nobody_can_read_them(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "out").open("wb") as file:
        out = FullFile(file.fileno())
        monkeypatch.setattr("sys.stdout", out)
        with PlainView(make_config(), directory) as view:
            view.show_row(train_row(0))
            view.warn("late")
        assert out.failures == 1


# -- the summary ---------------------------------------------------------------------------------


def summary(
    directory: RunDirectory,
    capsys: pytest.CaptureFixture[str],
    rows: list[Any],
    ended: RunEnded | None = None,
    fault: RunFault | None = None,
) -> str:
    file = RowFile(directory.metrics)
    for row in rows:
        file.write(row)
    file.close()
    print_summary(make_config(), directory, ended, fault, 12.34)
    return capsys.readouterr().out


def test_the_summary_of_a_run_that_is_done(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [eval_row(0, 0.1), *[train_row(s, eval=1.0) for s in range(4)], eval_row(4, 0.9)]
    text = summary(directory, capsys, rows, RunEnded("done", 20, 12, 3, 1, 4))
    words = flat(text)
    for fact in (
        "done, 4 steps",
        "0.100 before (step 0) -> 0.900 after (step 4), 256 problems",
        "20 admitted = 12 trained + 3 filtered + 1 failed + 4 leftover",
        "1.00 on average, 2 at most (bound 8)",
        "12.3 s, start-up included",
        "train 50%, eval 50% of 8.0 s",
        "busy 100% of its time",
    ):
        assert fact in words, fact
    assert f"verify {directory.path}" in text


@pytest.mark.parametrize(
    ("ended", "fault", "outcome"),
    [
        (None, None, "killed after 1 steps"),
        (None, RunFault("shm_full", "story"), "stopped after 1 steps by shm_full"),
        (RunEnded("interrupted", 9, 4, 0, 0, 5), None, "interrupted after 1 steps"),
    ],
)
def test_the_summary_of_other_ends(
    directory: RunDirectory,
    capsys: pytest.CaptureFixture[str],
    ended: RunEnded | None,
    fault: RunFault | None,
    outcome: str,
) -> None:
    words = flat(summary(directory, capsys, [eval_row(0, 0.1), train_row(0)], ended, fault))
    assert outcome in words
    assert "0.100 before (step 0), 256 problems" in words
    assert "too few steps" in words


def test_the_summary_without_a_single_row(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flat(summary(directory, capsys, []))
    assert "killed after 0 steps" in words
    assert "held-out" not in words
    assert "advice" not in words


def test_paths_are_there_to_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither cut at the width of the terminal nor read as styles."""
    directory = RunDirectory(tmp_path / ("long" * 30) / "[bold]run[1][/x]")
    directory.create()
    lines = summary(directory, capsys, [train_row(0)]).splitlines()
    assert lines[-2].endswith(f" {directory.path}")
    assert lines[-1].endswith(f"python -m asyncrl_node verify {directory.path}")


# -- advice --------------------------------------------------------------------------------------


def test_time_shares_sum_to_one() -> None:
    rows = [train_row(s, waiting_for_fill=s, eval=0.5) for s in range(4)]
    shares = time_shares(rows)
    assert set(shares) == set(CAUSES)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["train"] == pytest.approx(4 / 12)
    assert time_shares([]) == {}
    assert time_shares([train_row(0, train=0.0)]) == {}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_no_advice_from_the_first_steps(count: int) -> None:
    assert advise(make_config(), [train_row(s) for s in range(count)]) == (
        "too few steps to advise on"
    )


def advice(config: Config, **seconds: float) -> str:
    """Advice after ten steady steps; the first two, slow ones, do not count."""
    slow = [train_row(s, staleness=9.0, waiting_for_fill=100.0) for s in range(2)]
    return advise(config, slow + [train_row(s, **seconds) for s in range(2, 12)])


FIGURES = (
    "(at pipeline_depth D = 1 and max_steps_off_policy K = 8, staleness was 1.0 on average and 2 "
    "at most; the first 2 steps left out)"
)


def test_advice_for_stragglers_names_the_bound() -> None:
    text = advice(make_config(), waiting_for_stragglers=0.5, waiting_for_fill=2.0)
    assert "14% of its time for stragglers" in text
    assert "max_steps_off_policy 8" in text
    assert "a higher bound" in text
    assert text.endswith(FIGURES)


def test_advice_for_fill_names_its_price() -> None:
    text = advice(make_config(), waiting_for_fill=1.0)
    assert "50% of its time for groups" in text
    assert "add samplers" in text
    assert f"pipeline_depth 2 {FIGURES}" in text
    deep = advice(make_config(depth=3, bound=3), waiting_for_fill=1.0)
    assert "pipeline_depth 4 (and max_steps_off_policy with it)" in deep
    assert "D = 3 and max_steps_off_policy K = 3" in deep
    unbounded = advice(make_config(bound=None), waiting_for_fill=1.0)
    assert "pipeline_depth 2 (at" in unbounded
    assert "K = none" in unbounded


def test_advice_for_a_busy_learner_is_to_leave_it() -> None:
    text = advice(make_config(), waiting_for_fill=0.1, waiting_for_stragglers=0.05)
    assert "busy 87% of its time, so it sets the pace" in text
    assert text.endswith(f"would only add staleness {FIGURES}")


def test_advice_counts_neither_evaluation_nor_checkpoint() -> None:
    asked_for = {"eval": 7.0, "checkpoint": 5.0}
    assert "busy 80% of" in advice(make_config(), waiting_for_fill=0.25, **asked_for)
    text = advice(make_config(), waiting_for_fill=1.0, **asked_for)
    assert "waited 50% of its time for groups" in text
    assert advice(make_config(), train=0.0, **asked_for) == "too few steps to advise on"


@pytest.mark.parametrize(
    ("bound", "seconds", "largest", "change"),
    [
        (8, {"publish": 2.0}, "67%, was publish", "a larger groups_per_batch"),
        (8, {"other": 3.0}, "75%, was other", "logs/learner.log"),
        (8, {"publish": 0.75, "other": 0.75}, "40%, was train", "leave D and K as they are"),
        (
            8,
            {"train": 0.22, "waiting_for_fill": 0.24, "publish": 0.23, "other": 0.22}
            | {"waiting_for_stragglers": 0.09, "eval": 5.0, "checkpoint": 2.0},
            "24%, was waiting for fill",
            "for its price in staleness",
        ),
        (None, {"waiting_for_stragglers": 3.0}, "75%, was waiting for stragglers", "rollout_timeo"),
    ],
)
def test_advice_names_the_largest_cause_when_the_learner_is_not_busy(
    bound: int | None, seconds: dict[str, float], largest: str, change: str
) -> None:
    text = advice(make_config(bound=bound), **seconds)
    assert f"largest part of the learner's time, {largest}" in text
    assert change in text
    assert f"D = 1 and max_steps_off_policy K = {'none' if bound is None else 8}" in text


# -- loggers -------------------------------------------------------------------------------------


def test_tensorboard_gets_every_number_at_its_step(directory: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(directory)
    rows = [train_row(step, reward=step / 4) for step in range(3)]
    for row in rows:
        logger.log(row)
    logger.log({"kind": "eval", "step": 3, "eval/reward_mean": None, "eval/num_problems": 7})
    logger.close()
    events = EventAccumulator(str(directory.path / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags == {*rows[0].keys(), "eval/num_problems"} - {"kind", "step"}
    rewards = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert rewards == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_loggers_are_those_asked_for(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_loggers(make_config(), directory) == []
    config = make_config(logging=LoggingConfig(tensorboard=True))
    check_loggers(config)
    (logger,) = make_loggers(config, directory)
    logger.close()
    assert isinstance(logger, TensorBoardLogger)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[tensorboard\]'") as caught:
        check_loggers(config)
    assert caught.value.key == "logging.tensorboard"


# -- following a file that grows -----------------------------------------------------------------


def test_a_follower_leaves_an_unfinished_line_for_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = RowFollower(path)
    assert follower.new_rows() == []
    with path.open("ab") as file:

        def write(content: bytes) -> list[Any]:
            file.write(content)
            file.flush()
            return follower.new_rows()

        assert write(b'{"step": 0}\n{"st') == [{"step": 0}]
        assert write(b'ep": ') == []
        assert write(b"1}") == []
        assert write(b'\n{"step": 2}\n') == [{"step": 1}, {"step": 2}]
        assert write(b"") == []
        assert write(b'{"step": 3') == []
    assert read_rows(path) == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert read_rows(tmp_path / "nowhere") == []


@given(steps=st.lists(st.integers(), max_size=8), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_a_follower_returns_each_row_once_wherever_the_file_was_cut(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    content = b"".join(msgspec.json.encode({"step": step}) + b"\n" for step in steps)
    follower = RowFollower(path)
    rows: list[Any] = []
    for end in [*sorted(min(cut, len(content)) for cut in cuts), len(content)]:
        path.write_bytes(content[:end])
        rows += follower.new_rows()
    assert rows == [{"step": step} for step in steps]
