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


def time_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Share of the learner's time by cause, over train rows; sums to 1, empty without rows."""
    total_s = sum(row["time/total"] for row in rows)
    if total_s <= 0:
        return {}
    return {cause: sum(row[f"time/{cause}"] for row in rows) / total_s for cause in CAUSES}


def advise(config: Config, train_rows: Sequence[Row]) -> str:
    """Say what one change would help most; depth is never advised without its price."""
    steady = train_rows[2:]
    shares = time_shares(steady)
    if not shares:
        return "too few steps to advise on"
    depth, bound = config.pacing.depth, config.pacing.max_steps_off_policy
    staleness = sum(row["async/staleness_mean"] for row in steady) / len(steady)
    worst = max(row["async/staleness_max"] for row in steady)
    now = f"staleness was {staleness:.1f} on average and {worst:.0f} at most"
    if shares["waiting_for_stragglers"] > 0.1 and bound is not None:
        return (
            f"the learner waited {shares['waiting_for_stragglers']:.0%} of its time for stragglers "
            f"that max_steps_off_policy {bound} made due; a higher bound would let them finish "
            f"({now})"
        )
    if shares["waiting_for_fill"] > 0.25:
        deeper = depth + 1
        limited = bound is not None and deeper > bound
        also = " (and max_steps_off_policy with it)" if limited else ""
        return (
            f"the learner waited {shares['waiting_for_fill']:.0%} of its time for groups: add "
            f"samplers, or pay with staleness: pipeline_depth {deeper}{also} ({now})"
        )
    return (
        f"the learner was busy {shares['train']:.0%} of its time, so it sets the pace: more "
        f"samplers or depth would only add staleness ({now})"
    )
