"""The numbers that losses read, and the methods of the literature that are a loss with settings.

No torch here: a command line can list and check them without importing it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl_node.core.advantages import AdvantageKind
from asyncrl_node.learner.losses.aggregation import Aggregation


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Numbers that losses read; each loss names its own in its docstring."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """Trust region of the ratio: [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None = None
    """Largest ratio that counts where the advantage is negative; above 1 + clip_high."""
    ratio_cap: float = 2.0
    """cispo: no token weighs more than this."""
    ratio_floor: float = 0.0
    """cispo: no token weighs less than this."""
    weight_correction: Literal["off", "truncate", "mask"] = "truncate"
    """decoupled_ppo, a3po: what happens to behaviour weights outside the two bounds below."""
    weight_low: float = 0.0
    weight_high: float = 5.0
    m2_budget: float = 0.04
    """m2po: largest mean squared log-ratio of the tokens that push against the trust region."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method of the literature that is a loss with settings."""

    loss: str
    settings: LossSettings
    aggregation: Aggregation
    advantage: AdvantageKind


_GSPO = LossSettings(clip_low=3e-4, clip_high=4e-4)
_ICEPOP = LossSettings(weight_correction="mask", weight_low=0.5, weight_high=5.0)
RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("ppo", LossSettings(), "sequence_mean", "mean_std"),
    "dapo": Recipe("ppo", LossSettings(clip_high=0.28), "token_mean", "mean_std"),
    "dr_grpo": Recipe("ppo", LossSettings(), "constant", "mean"),
    "gspo": Recipe("gspo", _GSPO, "sequence_mean", "mean_std"),
    "m2po": Recipe("m2po", LossSettings(clip_low=0.3, clip_high=0.5), "token_mean", "mean_std"),
    "tis": Recipe("decoupled_ppo", LossSettings(weight_high=2.0), "token_mean", "mean_std"),
    "icepop": Recipe("decoupled_ppo", _ICEPOP, "token_mean", "mean_std"),
}
"""Each paper's loss, bounds, aggregation and advantage; dapo also filters constant groups."""
