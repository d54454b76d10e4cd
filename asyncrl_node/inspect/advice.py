"""One line of advice, from the run's own figures."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl_node.config import Config
from asyncrl_node.inspect.follow import Row

CAUSES = (
    "train",
    "publish",
    "waiting_for_fill",
    "waiting_for_stragglers",
    "eval",
    "checkpoint",
    "other",
)
_ASKED_FOR = ("eval", "checkpoint")
_FIRST_STEPS = 2
_OF_THE_LARGEST = {
    "train": "no wait stands out; leave D and K as they are",
    "publish": "a larger groups_per_batch publishes less often; neither samplers nor D would help",
    "waiting_for_fill": "more samplers would shorten it, and D would for its price in staleness",
    "waiting_for_stragglers": "a shorter rollout_timeout_s would cut them off; D would not help",
    "other": "neither samplers nor D would help; see logs/learner.log for what it did",
}
"""What to do about the largest cause when no other rule speaks."""


def time_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Share of the learner's time by cause, over train rows; sums to 1, empty without rows."""
    total_s = sum(row["time/total"] for row in rows)
    if total_s <= 0:
        return {}
    return {cause: sum(row[f"time/{cause}"] for row in rows) / total_s for cause in CAUSES}


def advise(config: Config, train_rows: Sequence[Row]) -> str:
    """Say what one change would help most; depth is never advised without its price.

    Percentages are of the learner's time that is neither evaluation nor checkpoint: those two are
    asked for and cost the same whatever is advised. The first steps, which fill the pipeline, are
    left out of every figure.
    """
    steady = train_rows[_FIRST_STEPS:]
    shares = _working_shares(steady)
    if not shares:
        return "too few steps to advise on"
    return f"{_change(config, shares)} ({_figures(config, steady)})"


def _working_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Share by cause of the time that is neither evaluation nor checkpoint; sums to 1, or empty."""
    shares = {c: share for c, share in time_shares(rows).items() if c not in _ASKED_FOR}
    total = sum(shares.values())
    return {cause: share / total for cause, share in shares.items()} if total > 0 else {}


def _figures(config: Config, steady: Sequence[Row]) -> str:
    bound = config.pacing.max_steps_off_policy
    mean = sum(row["async/staleness_mean"] for row in steady) / len(steady)
    worst = max(row["async/staleness_max"] for row in steady)
    return (
        f"at pipeline_depth D = {config.pacing.depth} and max_steps_off_policy K = "
        f"{'none' if bound is None else bound}, staleness was {mean:.1f} on average and "
        f"{worst:.0f} at most; the first {_FIRST_STEPS} steps left out"
    )


def _change(config: Config, shares: dict[str, float]) -> str:
    depth, bound = config.pacing.depth, config.pacing.max_steps_off_policy
    if config.pacing.fixed_staleness:
        return "fixed_staleness waits for every group, on purpose; without it training overlaps"
    if shares["waiting_for_stragglers"] > 0.1 and bound is not None:
        return (
            f"the learner waited {shares['waiting_for_stragglers']:.0%} of its time for stragglers "
            f"that max_steps_off_policy {bound} made due; a higher bound would let them finish"
        )
    if shares["waiting_for_fill"] > 0.25:
        limited = bound is not None and depth + 1 > bound
        also = " (and max_steps_off_policy with it)" if limited else ""
        return (
            f"the learner waited {shares['waiting_for_fill']:.0%} of its time for groups: add "
            f"samplers, or pay with staleness: pipeline_depth {depth + 1}{also}"
        )
    if shares["train"] > 0.5:
        return (
            f"the learner was busy {shares['train']:.0%} of its time, so it sets the pace: more "
            "samplers or depth would only add staleness"
        )
    largest = max(shares, key=lambda cause: shares[cause])
    return (
        f"the largest part of the learner's time, {shares[largest]:.0%}, was "
        f"{largest.replace('_', ' ')}: {_OF_THE_LARGEST[largest]}"
    )
