"""The scripted trainer: a step takes `fake.train_s`, its weights are the version in every byte."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asyncrl_node.config import Config
from asyncrl_node.core.layout import layout_weights
from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.engines.fake_engine import WEIGHT_NAME, scripted_logprobs
from asyncrl_node.messages import WeightEntry


class FakeTrainer:
    """Imports no torch; see learner/base.py."""

    vocab_size = 1000
    parity_report = None  # what is scripted has no log-probabilities to compare

    def __init__(self, config: Config) -> None:
        self._update_s = config.fake.train_s / config.learner.num_substeps
        self._num_bytes = config.fake.weight_bytes
        self._version = config.start_version
        self._num_tokens = 0

    def keep_proximal(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Do nothing: there is no loss."""

    def accumulate(self, groups: Sequence[TrajectoryGroup], policy_version: int) -> None:
        """Count the loss tokens."""
        self._num_tokens += sum(int(np.count_nonzero(g.loss_mask)) for g in groups)

    def update(self) -> None:
        """Take the scripted time."""
        time.sleep(self._update_s)

    def finish_step(self) -> dict[str, float]:
        """End the step: the version moves on."""
        self._version += 1
        trained, self._num_tokens = self._num_tokens, 0
        return {"tokens/trained": float(trained)}

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Score as the engine's script does."""
        return scripted_logprobs(self._version, tokens)

    def manifest(self) -> tuple[tuple[WeightEntry, ...], int]:
        """Lay out one parameter, without padding."""
        spec = (WEIGHT_NAME, "uint8", (self._num_bytes,), self._num_bytes)
        entries, _ = layout_weights([spec])
        return entries, self._num_bytes

    def copy_weights_into(self, buffer: memoryview) -> None:
        """Fill every byte with the version."""
        buffer[:] = bytes([self._version % 256]) * self._num_bytes

    def save(self, folder: Path) -> None:
        """Write the version."""
        (folder / "version").write_text(str(self._version))
