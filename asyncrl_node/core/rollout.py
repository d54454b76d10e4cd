"""One trajectory group as it lies in memory: what a sampler writes and a learner trains on."""

from __future__ import annotations

from typing import Any, NamedTuple


class TrajectoryGroup(NamedTuple):
    """The rollouts of one problem, back to back; R rollouts, T tokens in all, prompt first in each.

    The arrays are NumPy arrays, read-only views into a slot on the learner's side.
    """

    group_id: int
    problem: int
    """Index in the task's train split."""
    epoch: int
    tokens: Any
    """[T] int32"""
    loss_mask: Any
    """[T] bool, True where the policy sampled the token."""
    sampler_logprobs: Any
    """[T] float32, natural log at the sampling temperature; 0.0 where loss_mask is False."""
    policy_versions: Any
    """[T] int32, the weights that sampled each token; -1 where loss_mask is False."""
    on_older_kv: Any
    """[T] bool, True where the token may depend on keys and values that weights older than its own
    have left (sampling.kv_after_update = keep); False where loss_mask is False."""
    rollout_starts: Any
    """[R + 1] int64: rollout r is tokens[rollout_starts[r]:rollout_starts[r + 1]]."""
    rewards: Any
    """[R] float32"""
    turn_ends: Any = ()
    """[K] int64, where each turn of all rollouts ends, as an index of tokens; [0] where no
    environment rewarded turns. A turn is what was sampled between two observations; its loss tokens
    are those before its end and not before the end of the turn before it."""
    turn_rewards: Any = ()
    """[K] float32"""
