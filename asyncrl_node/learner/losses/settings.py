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
    """A loss with the settings that are its own where a run sets none."""

    loss: str
    """Name of the function."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token_mean"
    advantage: AdvantageKind = "mean_std"


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("ppo", aggregation="sequence_mean"),
    "dapo": Recipe("ppo", clip_high=0.28),
    "dr_grpo": Recipe("ppo", aggregation="constant", advantage="mean"),
}
"""Methods of the literature that are ppo with settings, by the name of --loss.

grpo     Shao et al. 2024, arXiv:2402.03300: each rollout counts the same
dapo     Yu et al. 2025, arXiv:2503.14476: clip-higher, each token counts the same; it also filters
         constant groups, which is pacing.filter_constant_rewards
dr_grpo  Liu et al. 2025, arXiv:2503.20783: neither lengths nor the spread of rewards weigh
"""
