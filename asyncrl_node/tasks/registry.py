"""Which tasks there are. A task's module is imported only when that task is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from asyncrl_node.errors import ConfigError
from asyncrl_node.tasks.base import Task

_TASKS = {
    "sort_digits": "asyncrl_node.tasks.sort_digits:SortDigits",
}
"""name: "module:Class", where `Class(seed)` makes the task."""


def list_tasks() -> tuple[str, ...]:
    """Names that `load_task` knows, in alphabetical order."""
    return tuple(sorted(_TASKS))


def load_task(name: str, seed: int) -> Task:
    """Make the task called `name`; the same seed gives the same problems.

    Raises: ConfigError for an unknown name.
    """
    if name not in _TASKS:
        raise ConfigError("task", f"must be one of {', '.join(list_tasks())}", name)
    module, _, class_name = _TASKS[name].partition(":")
    make_task: Callable[[int], Task] = getattr(importlib.import_module(module), class_name)
    return make_task(seed)
