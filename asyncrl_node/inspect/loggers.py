"""Metrics to TensorBoard or Weights & Biases, as optional extras behind one small interface."""

from __future__ import annotations

import importlib.util
import time
from typing import Any, Protocol

import msgspec

from asyncrl_node.config import Config
from asyncrl_node.errors import ConfigError
from asyncrl_node.inspect.follow import Row
from asyncrl_node.run_directory import RunDirectory


class MetricLogger(Protocol):
    """Somewhere that metric rows go."""

    def log(self, row: Row) -> None:
        """Add one row of metrics.jsonl."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


def check_loggers(config: Config) -> None:
    """Check that what was asked for is installed. Raises: ConfigError with the install line."""
    for name in ("tensorboard", "wandb"):
        if getattr(config.logging, name) and importlib.util.find_spec(name) is None:
            rule = f"needs the extra: pip install -e '.[{name}]'"
            raise ConfigError(f"logging.{name}", rule, True)


def make_loggers(config: Config, directory: RunDirectory) -> list[MetricLogger]:
    """Make the loggers that the configuration asks for."""
    loggers: list[MetricLogger] = []
    if config.logging.tensorboard:
        loggers.append(TensorBoardLogger(directory))
    if config.logging.wandb:
        loggers.append(WandbLogger(config, directory))
    return loggers


def _numbers(row: Row) -> dict[str, float]:
    return {k: float(v) for k, v in row.items() if k != "step" and isinstance(v, int | float)}


class TensorBoardLogger:
    """Event files in RUN_DIR/tensorboard, written without torch."""

    def __init__(self, directory: RunDirectory) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory.path / "tensorboard"))

    def log(self, row: Row) -> None:
        """Add one event with all numbers of the row."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=k, simple_value=v) for k, v in _numbers(row).items()]
        self._writer.add_event(
            Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values))
        )

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbLogger:
    """One Weights & Biases run; its own settings come from its own environment variables."""

    def __init__(self, config: Config, directory: RunDirectory) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.logging.wandb_project,
            dir=str(directory.path),
            config=msgspec.to_builtins(config),
        )

    def log(self, row: Row) -> None:
        """Log the row at its step."""
        self._run.log({**_numbers(row), "step": row["step"]})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
