"""Which tasks there are. A task's module is imported only when that task is asked for.

    sort_digits             one of ours
    path/to/file.py:Name    anybody's: `Name(seed, model_dir)`, found from the working directory

That file is code, and is run in every process of the run: use only what you would run yourself.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl_node.errors import ConfigError
from asyncrl_node.tasks.base import Task

_TASKS = {
    "sort_digits": "asyncrl_node.tasks.sort_digits:SortDigits",
}
"""name: "module:Class", where `Class(seed)` makes the task."""

_NEEDED = (
    *("name", "num_train_problems", "num_eval_problems", "max_prompt_tokens", "max_new_tokens"),
    *("max_turns", "stop_token_ids", "environment", "decode"),
)
"""What a task has (tasks/base.py)."""


def list_tasks() -> tuple[str, ...]:
    """Names that `load_task` knows, in alphabetical order."""
    return tuple(sorted(_TASKS))


def load_task(name: str, seed: int, model_dir: Path | None = None) -> Task:
    """Make the task called `name`; the same seed gives the same problems.

    A task from a file is also given `model_dir`, the model's folder: its tokenizer lies there.

    Raises: ConfigError for an unknown name, or a file that does not give a task.
    """
    if ".py:" in name:
        return _from_file(name, seed, model_dir)
    if name not in _TASKS:
        known = ", ".join(list_tasks())
        raise ConfigError("task", f"must be one of {known}, or path/to/file.py:Name", name)
    module, _, class_name = _TASKS[name].partition(":")
    make_task: Callable[[int], Task] = getattr(importlib.import_module(module), class_name)
    return make_task(seed)


def _from_file(name: str, seed: int, model_dir: Path | None) -> Task:
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError("task", "must be path/to/file.py:Name: there is no such file", name)
    spec = importlib.util.spec_from_file_location(f"asyncrl_task_{path.stem}", path.absolute())
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        make_task: Any = getattr(module, attribute, None)
        task: Task | None = None if make_task is None else make_task(seed, model_dir)
    except Exception as error:  # the user's code: whatever it raises is the user's to mend
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        rule = f"must be path/to/file.py:Name, called as Name(seed, model_dir): {reason}"
        raise ConfigError("task", rule, name) from error
    if task is None:
        raise ConfigError("task", f"must name what {file} defines, after the colon", name)
    if missing := [each for each in _NEEDED if not hasattr(task, each)]:
        raise ConfigError("task", f"must have {', '.join(missing)} (tasks/base.py)", name)
    return task
