"""Errors, split by whose fault they are.

ConfigError        the user's mistake, found before any process starts; exit code 2
RunFault           a named fault at run time, with the way out; exit code 3
InvalidTransition  our bug: the core was asked for something its state does not allow
"""

from __future__ import annotations

EXIT_USER_ERROR = 2
EXIT_RUN_FAULT = 3
EXIT_INTERRUPTED = 130


class ConfigError(Exception):
    """A setting that breaks a rule: prints as `error: KEY: rule (got VALUE)`, on one line."""

    def __init__(self, key: str, rule: str, value: object) -> None:
        line = f"{key}: {rule} (got {value})"
        super().__init__(r"\n".join(line.splitlines()))
        self.key = key
        self.rule = rule
        self.value = value


class RunFault(Exception):
    """The run cannot go on. `name` is a short stable word, `story` says what and the way out."""

    def __init__(self, name: str, story: str) -> None:
        super().__init__(f"{name}: {story}")
        self.name = name
        self.story = story


class InvalidTransition(AssertionError):
    """An event that the present state does not allow; nothing was changed."""
