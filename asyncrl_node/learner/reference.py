"""The frozen model that a KL term pulls back to, and the forward pass that it shares."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from asyncrl_node.errors import RunFault
from asyncrl_node.learner.batch import Pack
from asyncrl_node.learner.logprobs import head_logprobs

Model = Any
"""A Hugging Face causal language model; transformers has no types."""


def score_pack(
    model: Model,
    pack: Pack,
    temperature: float,
    entropy_gradient: bool = False,
    weights: tuple[dict[str, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [N] of a pack's N targets.

    weights: parameters of the base model by name and the head, in place of the model's own.
    """
    base, head = weights or ({}, model.get_output_embeddings().weight)
    return head_logprobs(
        last_hidden(model, pack, base).index_select(0, pack.predictors),
        head,
        pack.targets,
        temperature,
        entropy_gradient=entropy_gradient,
    )


def last_hidden(model: Model, pack: Pack, weights: dict[str, Tensor]) -> Tensor:
    """What the head is given for each of a pack's tokens: [T, D]; see `score_pack`."""
    inputs = {
        "input_ids": pack.input_ids,
        "position_ids": pack.position_ids,
        "use_cache": False,
        "pack": pack.sequences,
    }
    hidden: Tensor = functional_call(model.base_model, weights, kwargs=inputs).last_hidden_state
    return hidden[0]


class Reference:
    """Scores packs at the sampling temperature, without a gradient."""

    def __init__(self, model: Model, model_dir: Path, vocab_size: int, temperature: float) -> None:
        """Freeze a model, which comes from `model_dir`.

        Raises: RunFault for one with another vocabulary than the policy's `vocab_size`.
        """
        words = model.get_output_embeddings().weight.shape[0]
        if words != vocab_size:
            story = f"{model_dir}: a reference with {words} tokens for a model with {vocab_size}"
            raise RunFault("bad_model", story)
        self.model = model.requires_grad_(False)
        self._model_dir = model_dir
        self._temperature = temperature

    @torch.no_grad()
    def score(self, pack: Pack) -> Tensor:
        """Log-probabilities [N]. Raises: RunFault("non_finite")."""
        logprobs, _ = score_pack(self.model, pack, self._temperature)
        if not isfinite(float(logprobs.sum())):
            story = f"the reference model {self._model_dir} gives log-probabilities that are not"
            raise RunFault("non_finite", f"{story} finite; this update changed nothing")
        return logprobs
