"""Which losses go with which settings, and what is known of them on stale data.

Imports no torch (a user's own file may) and starts nothing; plan.py calls it.
"""

from __future__ import annotations

import msgspec

from asyncrl_node.config import Config, LearnerConfig
from asyncrl_node.errors import ConfigError
from asyncrl_node.learner.losses.registry import absolute, load_advantage, loss_facts


def check_losses(config: Config) -> None:
    """Check loss, advantage and their settings. Raises: ConfigError."""
    learner = config.learner
    facts = loss_facts(learner.loss)
    load_advantage(learner.advantage)
    if "log_ratio_limit" in facts.needs and learner.num_minibatches > 1:
        rule = (
            f"must be 1 with {learner.loss}: its clip range comes from the log-ratios of a whole "
            "update, which must be there before the first gradient; micro_batch_tokens bounds "
            "memory just as well"
        )
        raise ConfigError("learner.num_minibatches", rule, learner.num_minibatches)
    if "proximal_logprobs" in facts.needs and learner.num_substeps > 1 and config.pacing.streaming:
        rule = (
            f"must be off with {learner.loss} and num_substeps > 1: the whole batch is scored by "
            "the weights at the start of the step, and streaming takes most of it later"
        )
        raise ConfigError("pacing.streaming", rule, "true")
    _check_bounds(learner)


def _check_bounds(learner: LearnerConfig) -> None:
    """Check the numbers that depend on one another; plan.py has looked at each alone."""
    if learner.dual_clip is not None and not learner.dual_clip > 1 + learner.clip_high:
        rule = f"must be above 1 + clip_high, which is {1 + learner.clip_high:g}, or none"
        raise ConfigError("learner.dual_clip", rule, learner.dual_clip)
    for low, high in (("ratio_floor", "ratio_cap"), ("weight_low", "weight_high")):
        least, most = getattr(learner, low), getattr(learner, high)
        if least > most:
            raise ConfigError(f"learner.{low}", f"must be at most {high}, which is {most:g}", least)


def settled(config: Config, most_loss_tokens: int) -> Config:
    """Fill in the horizon and make paths absolute, for processes that start elsewhere."""
    learner = msgspec.structs.replace(
        config.learner,
        loss=absolute(config.learner.loss),
        advantage=absolute(config.learner.advantage),
        horizon=config.learner.horizon or most_loss_tokens,
    )
    return msgspec.structs.replace(config, learner=learner)


def loss_notes(config: Config) -> list[str]:
    """Say what is known of the loss under these settings; printed at start, and by --dry-run."""
    learner, depth = config.learner, config.pacing.depth
    facts, notes = loss_facts(learner.loss), []
    if "proximal_logprobs" in facts.needs and learner.num_substeps == 1:
        notes.append(
            f"loss {learner.loss} with num_substeps 1: the ratio to the policy at the start of the "
            "step is 1, and nothing that looks at it alone ever clips"
        )
    if depth and facts.two_sided is None:
        notes.append(
            f"loss {learner.loss} does not say whether it has a two-sided trust region, and "
            f"pipeline_depth is {depth}: without one, collapse on stale data is known"
        )
    elif depth and not facts.two_sided:
        notes.append(
            f"loss {learner.loss} has no two-sided trust region around the sampler and "
            f"pipeline_depth is {depth}: known to collapse on stale data; prefer --loss ppo"
        )
    return notes
