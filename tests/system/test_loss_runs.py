"""Losses in whole runs: a user's file, faults written aside, the collapse that is announced."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from asyncrl_node.cli import parse_command_line
from asyncrl_node.config import Config
from asyncrl_node.config_file import read_config
from asyncrl_node.loss_rules import loss_notes
from asyncrl_node.plan import WARM_MODEL, check_config, describe, settle
from tests.system.runs import ROOT, launch, logs, rows, train_rows, trained

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
SMALL = ("--groups-per-batch", "8", "--eval-problems", "0")


def readme_file(folder: Path) -> Path:
    """The README's example, saved by the name that it gives itself."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = (text for text in code if "my_loss.py" in text)
    assert example.count("\n") <= 25
    (folder / "my_loss.py").write_text(example)
    return folder / "my_loss.py"


def test_the_loss_of_the_readme_trains_as_it_stands(tmp_path: Path) -> None:
    path = readme_file(tmp_path)
    mine = ("--loss", f"{path}:soft_ppo", "--learner.advantage", f"{path}:to_the_best")
    done = launch(tmp_path / "run", "--steps", "3", *mine, *SMALL, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path / "run")
    assert "trust region" not in done.stdout
    assert all(row["grad_norm"] > 0 for row in train_rows(tmp_path / "run"))


def test_a_run_is_pulled_back_to_the_model_that_it_began_with(tmp_path: Path) -> None:
    """Its name is written down, so that a resumed run is held to the same weights."""
    pull = ("--learner.kl-coefficient", "0.05", "--steps", "4", "--learning-rate", "3e-3")
    done = launch(tmp_path / "run", *pull, *SMALL, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path / "run")
    distances = [row["kl/reference_mean"] for row in train_rows(tmp_path / "run")]
    assert distances[0] == pytest.approx(0, abs=1e-9)
    assert 0 < distances[1] < distances[-1]
    written = read_config(tmp_path / "run" / "config.toml")
    assert written.learner.reference_model == str(WARM_MODEL.absolute())
    check_config(written)


def test_only_a_kl_term_has_a_reference() -> None:
    assert settle(Config()).learner.reference_model == ""
    here = msgspec.structs.replace(Config().learner, reference_model="old", kl_coefficient=0.1)
    assert settle(Config(learner=here)).learner.reference_model == f"{Path.cwd()}/old"


def test_a_reference_is_in_the_memory_forecast() -> None:
    plain, pulled = (
        describe(parsed("--engine", "torch", "--learner.kl-coefficient", coefficient))
        for coefficient in ("0", "0.1")
    )
    assert "learner 3.4 MiB of weights, gradients, optimizer; each sampler" in plain
    assert "learner 4.2 MiB of weights, gradients, optimizer and the reference model" in pulled


def test_a_path_is_made_absolute_and_the_horizon_filled_in() -> None:
    config = settle(Config(learner=msgspec.structs.replace(Config().learner, loss="my/l.py:f")))
    assert config.learner.loss == f"{Path.cwd()}/my/l.py:f"
    assert config.learner.advantage == "mean_std"
    longest = settle(Config()).learner.horizon
    assert longest is not None
    assert longest > 0
    assert settle(parsed("--learner.horizon", "7")).learner.horizon == 7


def parsed(*flags: str) -> Config:
    config = parse_command_line(["--run-dir", "here", *flags]).config
    check_config(config)
    return config


@pytest.mark.parametrize("loss", ["decoupled_ppo", "m2po"])
def test_losses_that_need_a_pass_in_advance_run(tmp_path: Path, loss: str) -> None:
    """Two updates a step, data two steps stale: both passes are over tokens of several versions."""
    flags = ("--steps", "4", "--loss", loss, "--num-substeps", "2", "--pipeline-depth", "2")
    done = launch(tmp_path / "run", *flags, *SMALL, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path / "run")
    assert len(trained(tmp_path / "run")) == 4 * 8
    assert all(row["grad_norm"] > 0 for row in train_rows(tmp_path / "run"))


def test_a_group_that_stops_the_run_is_written_aside(tmp_path: Path) -> None:
    """The first stale tokens meet a loss that is NaN: nothing of their step is trained."""
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from asyncrl_node.learner.losses.policy import ppo\n"
        "def spoils(tokens, settings):\n"
        "    loss = ppo(tokens, settings)\n"
        "    if int(tokens.staleness.max()) > 0:\n"
        "        loss.losses.data[-1] = float('nan')\n"
        "    return loss\n"
    )
    run_dir = tmp_path / "run"
    done = launch(run_dir, "--steps", "5", "--loss", f"{bad}:spoils", *SMALL, timeout_s=120)
    assert done.returncode == 3, done.stdout + done.stderr
    story = r"non_finite: learner: group (\d+) \(problem (\d+)\): the loss of a token is nan"
    match = re.search(story, done.stderr)
    assert match is not None, done.stderr
    (path,) = (run_dir / "rollouts").glob("fault-step-*.jsonl")
    aside = rows(path)
    assert len(aside) == 8
    assert {(row["group"], row["problem"]) for row in aside} == {(int(match[1]), int(match[2]))}
    assert all("the loss of a token is nan" in row["fault"] for row in aside)
    assert all(len(row["tokens"]) == len(row["sampler_logprobs"]) > 0 for row in aside)
    assert int(match[1]) not in {row["group"] for row in trained(run_dir)}


SPOILED_TASK = """
from asyncrl_node.tasks.base import Outcome
from asyncrl_node.tasks.sort_digits import SortDigits, SortDigitsEnvironment


class Spoiled(SortDigitsEnvironment):
    async def step(self, completion_tokens):
        outcome = await super().step(completion_tokens)
        lost = self.on_train and len(self._digits) > 6 and not outcome.reward
        return REWARD if lost else outcome


class Task(SortDigits):
    def __init__(self, seed, model_dir):
        super().__init__(seed)

    def environment(self, split, index):
        environment = Spoiled(self.digits(split, index))
        environment.on_train = split == "train"
        return environment
"""


@pytest.mark.parametrize(
    "reward", ["Outcome(float('nan'))", "Outcome(0.0, (float('inf'),))"], ids=["nan", "turn_inf"]
)
def test_a_reward_that_is_not_finite_ends_the_run_with_its_group(
    tmp_path: Path, reward: str
) -> None:
    """Only failures are spoiled: samples redone until finite would train on successes alone."""
    task = tmp_path / "task.py"
    task.write_text(SPOILED_TASK.replace("REWARD", reward))
    run_dir = tmp_path / "run"
    mine = ("--task", f"{task}:Task", "--model", str(WARM_MODEL))
    done = launch(run_dir, "--steps", "5", *mine, *SMALL, timeout_s=120)
    assert done.returncode == 3, done.stdout + done.stderr
    match = re.search(r"non_finite: learner: .*group (\d+) \(problem (\d+)\)", done.stderr)
    assert match is not None, done.stderr
    (path,) = (run_dir / "rollouts").glob("fault-step-*.jsonl")
    assert {(row["group"], row["problem"]) for row in rows(path)} == {
        (int(match[1]), int(match[2]))
    }
    assert int(match[1]) not in {row["group"] for row in trained(run_dir)}


def test_a_loss_that_raises_ends_the_run_with_its_line(tmp_path: Path) -> None:
    """Case: a mistake that only stale tokens meet, in a helper of the user's file."""
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from asyncrl_node.learner.losses.policy import ppo\n"
        "def look_up(table, staleness):\n"
        "    return table[staleness]\n"
        "def fragile(tokens, settings):\n"
        "    look_up({0: 1.0}, int(tokens.staleness.max()))\n"
        "    return ppo(tokens, settings)\n"
    )
    run_dir = tmp_path / "run"
    done = launch(run_dir, "--steps", "5", "--loss", f"{bad}:fragile", *SMALL, timeout_s=120)
    assert done.returncode == 3, done.stdout + done.stderr
    story = (
        rf"user_code: learner: step (\d): {bad}:fragile raised KeyError: 1 "
        rf"\(line 3 of {bad}, in look_up\); its traceback is in the learner's log"
    )
    match = re.search(story, done.stderr)
    assert match is not None, done.stderr
    assert "Traceback" not in done.stderr
    log = (run_dir / "logs" / "learner.log").read_text()
    assert "Traceback" in log
    assert "return table[staleness]" in log
    assert int(match[1]) not in {row["step"] for row in trained(run_dir)}


def test_an_advantage_that_raises_is_set_aside_with_its_group(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def halves(rewards):\n    return [r / 0 for r in rewards]\n")
    run_dir = tmp_path / "run"
    mine = ("--learner.advantage", f"{bad}:halves")
    done = launch(run_dir, "--steps", "5", *mine, *SMALL, timeout_s=120)
    assert done.returncode == 3, done.stdout + done.stderr
    story = (
        r"user_code: learner: step 0: group (\d+) .*bad.py:halves raised ZeroDivisionError: .*"
        r"\(line 2 of .*bad.py, in"
    )
    match = re.search(story, done.stderr)
    assert match is not None, done.stderr
    aside = rows(run_dir / "rollouts" / "fault-step-000000.jsonl")
    assert {row["group"] for row in aside} == {int(match[1])}
    assert trained(run_dir) == []


def test_the_beginning_of_a_collapse_is_a_warning_with_the_cure(tmp_path: Path) -> None:
    """An unclipped loss at thirty times the learning rate, without a warm-up, two steps stale."""
    reckless = ("--loss", "importance_sampling", "--learning-rate", "0.01", "--steps", "8")
    more = ("--learner.warmup-steps", "0", "--pipeline-depth", "2")
    done = launch(tmp_path / "run", *reckless, *more, *SMALL, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = re.findall("warning: step .*nats per stale token.*", done.stdout)
    assert "clip on both sides" in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--loss", "importance_sampling"), "no two-sided trust region"),
        (("--loss", "cispo"), "no two-sided trust region"),
        (("--loss", "decoupled_ppo"), "with num_substeps 1: the ratio to the policy at the start"),
        (("--loss", "my_loss.py:shy"), "does not say whether it has a two-sided trust region"),
    ],
)
def test_what_is_known_of_a_loss_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loss.py").write_text("def shy(tokens, settings):\n    return tokens\n")
    assert any(said in note for note in loss_notes(parsed(*flags)))
    for silent in ("ppo", "a3po", "m2po", "grpo", "dr_grpo"):
        assert loss_notes(parsed("--loss", silent)) == []
    synchronous = parsed(*flags, "--pipeline-depth", "0", "--num-substeps", "2")
    assert loss_notes(synchronous) == []


def test_an_estimator_that_only_adds_noise_is_said() -> None:
    flags = ("--learner.kl-coefficient", "0.1", "--learner.kl-estimator", "k1")
    assert loss_notes(parsed(*flags, "--pipeline-depth", "0")) == []
    (note,) = loss_notes(parsed(*flags, "--learner.kl-weighted", "false"))
    assert "its gradient is zero in the mean" in note
    assert loss_notes(parsed(*flags[2:], "--learner.kl-weighted", "false")) == []


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ((), True),
        (("--pipeline-depth", "4"), True),
        (("--pipeline-depth", "0"), False),
        (("--learner.kl-weighted", "false"), False),
        (("--learner.kl-coefficient", "0"), False),
    ],
)
def test_that_nothing_clips_the_ratio_of_a_weighted_kl_is_said(
    estimator: str, changed: tuple[str, ...], said: bool
) -> None:
    flags = {"--learner.kl-coefficient": "0.1", "--learner.kl-estimator": estimator}
    flags |= dict([changed] if changed else [])
    notes = loss_notes(parsed(*(word for flag in flags.items() for word in flag)))
    assert any("the ratio that weighs the KL is not clipped" in note for note in notes) == said


def test_where_a_loss_is_not_quite_its_papers_a_note_says_so() -> None:
    (note,) = loss_notes(parsed("--loss", "gspo"))
    assert "clips the ratio of a rollout at 0.2 and 0.2, its paper at 3e-4 and 4e-4" in note
    tight = ("--learner.clip-low", "3e-4", "--learner.clip-high", "4e-4")
    assert loss_notes(parsed("--loss", "gspo", *tight)) == []
    (note,) = loss_notes(parsed("--loss", "dapo"))
    assert "also filters groups of constant reward" in note
    assert loss_notes(parsed("--loss", "dapo", "--pacing.filter-constant-rewards")) == []


@pytest.mark.parametrize("loss", ["dapo", "dr_grpo"])
def test_a_recipe_trains_and_is_written_down_with_its_settings(tmp_path: Path, loss: str) -> None:
    run_dir = tmp_path / "run"
    done = launch(run_dir, "--loss", loss, "--steps", "2", *SMALL, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr + logs(run_dir)
    assert all(row["grad_norm"] > 0 for row in train_rows(run_dir))
    learner = read_config(run_dir / "config.toml").learner
    settings = (learner.loss, learner.clip_high, learner.aggregation, learner.advantage)
    assert (
        settings
        == {
            "dapo": ("dapo", 0.28, "token_mean", "mean_std"),
            "dr_grpo": ("dr_grpo", 0.2, "constant", "mean"),
        }[loss]
    )
    assert learner.horizon == 10
