"""Trajectory groups as forward passes: rollouts back to back, cut into packs, and their guard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.errors import RunFault
from asyncrl_node.learner.attention import PackedSequences, plan_attention
from asyncrl_node.learner.base import GroupFault
from asyncrl_node.learner.losses.aggregation import Aggregation, rollout_weight

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


class Rollouts(NamedTuple):
    """R rollouts of several groups, T tokens in all; NumPy arrays."""

    tokens: Int64s
    """[T]"""
    loss_mask: npt.NDArray[np.bool_]
    """[T]"""
    sampler_logprobs: Float32s
    """[T]"""
    proximal_logprobs: Float32s
    """[T], NaN where nobody asked."""
    policy_versions: npt.NDArray[np.int32]
    """[T]"""
    on_older_kv: npt.NDArray[np.bool_]
    """[T]"""
    starts: Int64s
    """[R], first token of each rollout."""
    num_inputs: Int64s
    """[R], tokens up to the one that predicts the last loss token; at least 1."""
    num_loss_tokens: Int64s
    """[R], at least 1."""
    advantages: Float32s
    """[T], of its rollout or of its turn; only those of loss tokens mean anything."""
    has_advantage: npt.NDArray[np.bool_]
    """[R], whether any loss token has one that is not zero."""
    places: Int64s
    """[R], each rollout's group, by its place among the groups."""


class Pack(NamedTuple):
    """One forward pass: T input tokens of several rollouts, N of them predict a loss token."""

    input_ids: Tensor
    """[1, T] int64"""
    position_ids: Tensor
    """[1, T] int64, from 0 in each rollout."""
    sequences: PackedSequences
    predictors: Tensor
    """[N] int64, inputs whose next token is a loss token."""
    targets: Tensor
    """[N] int64"""
    sampler_logprobs: Tensor
    """[N] float32"""
    proximal_logprobs: Tensor
    """[N] float32, by the weights at the start of the step; NaN where nobody asked."""
    advantages: Tensor
    """[N] float32"""
    policy_versions: Tensor
    """[N] int32"""
    on_older_kv: Tensor
    """[N] bool"""
    rollout_index: Tensor
    """[N] int64, each token's rollout, by its place in the pack."""
    num_rollouts: int
    weights: Tensor
    """[N] float32, of the aggregation, before its divisor."""
    places: Int64s
    """[N] NumPy, each token's group, by its place among the groups."""
    scored: Int64s
    """[N] NumPy, each token's place among all tokens of the groups, back to back."""


def collect(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[Float32s],
    proximal: Mapping[int, Float32s],
) -> Rollouts:
    """Put groups back to back; rollouts without a loss token are left out, they train nothing.

    advantages  of the tokens of each group
    proximal    log-probabilities of the tokens of some groups, by group_id

    Raises: RunFault for a rollout whose first token is a loss token: nothing predicts it.
    """
    loss_mask = np.concatenate([group.loss_mask for group in groups])
    offsets = np.cumsum([0] + [len(group.tokens) for group in groups[:-1]])
    sizes = [len(group.rewards) for group in groups]
    starts = np.concatenate([group.rollout_starts[:-1] for group in groups])
    starts = starts + np.repeat(offsets, sizes)
    places = np.repeat(np.arange(len(groups)), sizes)
    trained = np.flatnonzero(loss_mask)
    owner = np.searchsorted(starts, trained, side="right") - 1
    distance = trained - starts[owner]
    if not distance.all():
        culprit = groups[places[owner[np.argmin(distance)]]]
        raise GroupFault("bad_group", culprit, "a rollout without a prompt token")
    num_inputs = np.zeros(len(starts), np.int64)
    num_inputs[owner] = distance
    kept = np.flatnonzero(num_inputs)
    of_tokens = np.concatenate(advantages)
    has_advantage = np.zeros(len(starts), np.bool_)
    has_advantage[owner[of_tokens[trained] != 0]] = True
    unknown = [np.full(len(group.tokens), np.nan, np.float32) for group in groups]
    return Rollouts(
        tokens=np.concatenate([group.tokens for group in groups]).astype(np.int64),
        loss_mask=loss_mask,
        sampler_logprobs=np.concatenate([group.sampler_logprobs for group in groups]),
        proximal_logprobs=np.concatenate(
            [proximal.get(g.group_id, nan) for g, nan in zip(groups, unknown, strict=True)]
        ),
        policy_versions=np.concatenate([group.policy_versions for group in groups]),
        on_older_kv=np.concatenate([group.on_older_kv for group in groups]),
        starts=starts[kept],
        num_inputs=num_inputs[kept],
        num_loss_tokens=np.bincount(owner, minlength=len(starts))[kept],
        advantages=of_tokens,
        has_advantage=has_advantage[kept],
        places=places[kept],
    )


def make_pack(
    rollouts: Rollouts, members: Int64s, device: torch.device, aggregation: Aggregation
) -> Pack:
    """Gather the rollouts `members` [R] int64, longest first, into one forward pass."""
    num_inputs = rollouts.num_inputs[members]
    positions = np.arange(num_inputs.sum()) - np.repeat(
        num_inputs.cumsum() - num_inputs, num_inputs
    )
    sources = np.repeat(rollouts.starts[members], num_inputs) + positions
    predictors = np.flatnonzero(rollouts.loss_mask[sources + 1])
    scored = sources[predictors] + 1
    index = np.repeat(np.arange(len(members)), num_inputs)[predictors]
    owner = members[index]
    weights = [rollout_weight(aggregation, n) for n in rollouts.num_loss_tokens[members].tolist()]

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Pack(
        input_ids=tensor(rollouts.tokens[sources])[None],
        position_ids=tensor(positions)[None],
        sequences=plan_attention(num_inputs.tolist(), device),
        predictors=tensor(predictors),
        targets=tensor(rollouts.tokens[scored]),
        sampler_logprobs=tensor(rollouts.sampler_logprobs[scored]),
        proximal_logprobs=tensor(rollouts.proximal_logprobs[scored]),
        advantages=tensor(rollouts.advantages[scored]),
        policy_versions=tensor(rollouts.policy_versions[scored]),
        on_older_kv=tensor(rollouts.on_older_kv[scored]),
        rollout_index=tensor(index),
        num_rollouts=len(members),
        weights=tensor(np.array(weights, np.float32)[index]),
        places=rollouts.places[owner],
        scored=scored,
    )


def bare_pack(tokens: Tensor, targets: Tensor, lengths: list[int]) -> Pack:
    """Pack whole sequences, back to back in `tokens` [T], to score `targets` [T] after each."""
    members = torch.arange(len(tokens), device=tokens.device)
    nothing = torch.zeros_like(members)
    return Pack(
        input_ids=tokens[None],
        position_ids=torch.cat([members[:length] for length in lengths])[None],
        sequences=plan_attention(lengths, tokens.device),
        predictors=members,
        targets=targets,
        sampler_logprobs=nothing,
        proximal_logprobs=nothing,
        advantages=nothing,
        policy_versions=nothing,
        on_older_kv=nothing.bool(),
        rollout_index=nothing,
        num_rollouts=1,
        weights=nothing,
        places=np.zeros(0, np.int64),
        scored=np.zeros(0, np.int64),
    )


def guard(
    pack: Pack,
    groups: Sequence[TrajectoryGroup],
    logprobs: Tensor,
    losses: Tensor | None = None,
) -> None:
    """Let only finite numbers through to the backward pass, or to statistics of a whole update.

    logprobs, losses  [N], without gradient; no losses where none was computed yet

    Raises: GroupFault for the group of the first token that is not, or RunFault for a bare sum.
    """
    if losses is None:
        losses = torch.zeros_like(logprobs)
    if isfinite(float(losses.sum() + logprobs.sum() + pack.sampler_logprobs.sum())):
        return
    for problem, values in (
        ("sampler log-probability", pack.sampler_logprobs),
        ("learner log-probability", logprobs),
        ("loss", losses),
    ):
        broken = torch.nonzero(~torch.isfinite(values))
        if len(broken):
            token = int(broken[0])
            story = (
                f"the {problem} of a token is {float(values[token])}; this update changed nothing"
            )
            raise GroupFault("non_finite", groups[pack.places[token]], story)
    raise RunFault("non_finite", f"the losses of {len(groups)} groups overflow in sum")
