"""Tasks by name, and tasks from anybody's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_node.errors import ConfigError
from asyncrl_node.tasks.registry import load_task

TASK = """
class Guess:
    name = "guess"
    num_train_problems = num_eval_problems = 1
    max_prompt_tokens = max_new_tokens = max_turns = 1
    stop_token_ids = ()
    environment = decode = None

    def __init__(self, seed, model_dir):
        if seed < 0:
            raise ValueError(f"seed {seed}\\nis below 0")
        self.given = (seed, model_dir)

class Empty:
    def __init__(self, seed, model_dir):
        pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "guess.py"
    path.write_text(TASK)
    return path


def test_a_task_from_a_file_is_given_the_seed_and_the_model_folder(file: Path) -> None:
    task = load_task(f"{file}:Guess", 3, Path("model"))
    assert task.name == "guess"
    assert task.given == (3, Path("model"))


def test_a_path_is_found_from_the_working_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert load_task("guess.py:Guess", 0).name == "guess"


@pytest.mark.parametrize(
    ("name", "seed", "rule"),
    [
        ("nowhere.py:Guess", 0, "must be path/to/file.py:Name: there is no such file"),
        ("{file}:Nothing", 0, "must name what .*guess.py defines, after the colon"),
        ("{file}:", 0, "must name what .*guess.py defines, after the colon"),
        ("{file}:TASKS", 0, "must name what"),
        ("{file}:Guess", -1, r"called as Name\(seed, model_dir\): ValueError: seed -1 is below 0"),
        ("{file}:Empty", 0, "must have name, num_train_problems, .*, environment, decode"),
    ],
)
def test_a_file_that_gives_no_task_is_refused_in_one_line(
    file: Path, name: str, seed: int, rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        load_task(name.format(file=file), seed)
    assert caught.value.key == "task"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", ["def broken(:", "import a_package_that_is_not_there", "1 / 0"])
def test_a_file_that_cannot_be_run_is_refused_in_one_line(tmp_path: Path, code: str) -> None:
    (tmp_path / "bad.py").write_text(code)
    kinds = "SyntaxError|ModuleNotFoundError|ZeroDivisionError"
    with pytest.raises(ConfigError, match=kinds) as caught:
        load_task(f"{tmp_path}/bad.py:Guess", 0)
    assert "\n" not in str(caught.value)
