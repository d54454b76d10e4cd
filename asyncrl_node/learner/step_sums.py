"""What a step's metrics are made of; Trainer.finish_step says what each one means."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl_node.learner.losses.base import TokenLoss


@dataclass
class StepSums:
    """Sums over one step. Each loss token is in one of three populations: sampled by the weights
    in use (`same`), sampled on older keys and values (`older_kv`), or neither (`stale`)."""

    rewards: list[float] = field(default_factory=list)
    constant_groups: int = 0
    loss_tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    ratio_max: float = 0.0
    kl_reference: float | None = None
    kl_same: float = 0.0
    tokens_same: int = 0
    kl_stale: float = 0.0
    kl_older_kv: float = 0.0
    tokens_older_kv: int = 0
    num_updates: int = 0
    grad_norm: float = 0.0
    learning_rate: float = 0.0

    def add_rewards(self, rewards: list[float], constant: bool) -> None:
        """Count a group, and whether nothing tells its rollouts apart."""
        self.rewards += rewards
        self.constant_groups += constant

    def add_update(self, grad_norm: float, learning_rate: float) -> None:
        """Count an optimizer update."""
        self.num_updates += 1
        self.grad_norm += grad_norm
        self.learning_rate = learning_rate

    def add_tokens(
        self,
        loss: TokenLoss,
        log_ratios: Tensor,
        entropies: Tensor,
        same: Tensor,
        older_kv: Tensor,
    ) -> None:
        """Count N loss tokens.

        log_ratios      [N] float64, learner minus sampler log-probability
        same, older_kv  [N] bool, no token in both
        """
        kl = torch.expm1(log_ratios) - log_ratios
        self.loss += float(loss.losses.detach().sum())
        self.entropy += float(entropies.sum())
        self.clipped += float(loss.num_clipped)
        self.kl_same += float(kl[same].sum())
        self.kl_stale += float(kl[~(same | older_kv)].sum())
        self.kl_older_kv += float(kl[older_kv].sum())
        self.tokens_older_kv += int(older_kv.sum())
        self.tokens_same += int(same.sum())
        self.loss_tokens += len(kl)
        self.ratio_max = max(self.ratio_max, float(loss.ratio_max))

    def add_reference_kl(self, total: float) -> None:
        """Count the KL to the reference model, summed over loss tokens that were added."""
        self.kl_reference = (self.kl_reference or 0.0) + total

    def metrics(self) -> dict[str, float]:
        """Turn sums into means; a mean over nothing is 0."""
        tokens_stale = self.loss_tokens - self.tokens_same - self.tokens_older_kv
        reward_mean = _ratio(sum(self.rewards), len(self.rewards))
        squares = sum((reward - reward_mean) ** 2 for reward in self.rewards)
        reference = {}
        if self.kl_reference is not None:
            reference = {"kl/reference_mean": _ratio(self.kl_reference, self.loss_tokens)}
        return {
            **reference,
            "reward/trained_mean": reward_mean,
            "reward/trained_std": _ratio(squares, len(self.rewards)) ** 0.5,
            "reward/num_constant_groups": float(self.constant_groups),
            "loss/mean": _ratio(self.loss, self.loss_tokens),
            "grad_norm": _ratio(self.grad_norm, self.num_updates),
            "learning_rate": self.learning_rate,
            "ratio/max": self.ratio_max,
            "ratio/clip_fraction": _ratio(self.clipped, self.loss_tokens),
            "entropy/mean": _ratio(self.entropy, self.loss_tokens),
            "tokens/trained": float(self.loss_tokens),
            "mismatch/kl_same_version": _ratio(self.kl_same, self.tokens_same),
            "mismatch/num_tokens_same_version": float(self.tokens_same),
            "mismatch/kl_stale": _ratio(self.kl_stale, tokens_stale),
            "mismatch/num_tokens_stale": float(tokens_stale),
            "mismatch/kl_older_kv": _ratio(self.kl_older_kv, self.tokens_older_kv),
            "mismatch/num_tokens_older_kv": float(self.tokens_older_kv),
        }


def _ratio(total: float, count: int) -> float:
    """Return the mean, 0 over nothing."""
    return total / count if count else 0.0
