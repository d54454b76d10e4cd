"""Case 16 with the real trainer, the embedded engine and the learner's own decisions between them.

A load that leaves something out is caught by the hash where bytes are missing, and by the canary
where the bytes are right and the network computes with others.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging as transformers_logging

from asyncrl_node.config import LearnerConfig
from asyncrl_node.core.probe import make_probe
from asyncrl_node.core.publishing import (
    AtFault,
    PublishingCore,
    PublishingInstruction,
    RequestWrite,
    ToSampler,
    WriteDone,
)
from asyncrl_node.engines.torch_engine import TorchEngine
from asyncrl_node.engines.torch_model import FlatWeights
from asyncrl_node.learner.trainer import Trainer
from asyncrl_node.messages import (
    Lease,
    LeaseGranted,
    Release,
    WeightsAccepted,
    WeightsHello,
    WeightsLoaded,
    WeightsManifest,
)
from asyncrl_node.sampler.weights import answer_canary
from asyncrl_node.transport.weights import layout_hash, weights_hash
from tests.engines.contract import stepped

CONTEXT = 40
MODEL = Qwen3Config(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.2,
    tie_word_embeddings=True,
)


class Pair:
    """One learner and one sampler; `load` goes through a whole weight transaction."""

    def __init__(self, folder: Path) -> None:
        transformers_logging.disable_progress_bar()
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(MODEL).save_pretrained(folder)
        transformers_logging.enable_progress_bar()
        self.trainer = Trainer(LearnerConfig(), folder, 0.7, seed=0)
        self.engine = TorchEngine(folder, max_rows=2, max_context=CONTEXT)
        self.entries, num_bytes = self.trainer.manifest()
        self.buffer = np.zeros(num_bytes, np.uint8)
        manifest = WeightsManifest(num_bytes, self.entries, layout_hash(self.entries))
        probe = make_probe(self.trainer.vocab_size, CONTEXT - 1, 5e-5)
        assert probe is not None
        self.probe = probe
        self.core = PublishingCore(manifest, 60.0, self.probe)
        self.core.handle(WeightsHello(0, 0), 0.0)
        self.version = -1

    def load(self) -> PublishingInstruction:
        """Move every weight a little, publish, load; return the learner's verdict."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        for _, weight in self.trainer.named_weights():
            weight += 0.01 * torch.randn(weight.shape, generator=generator)
        self.core.handle(RequestWrite(), 0.0)
        self.trainer.copy_weights_into(self.buffer.data)
        ours = tuple(self.trainer.score(self.probe.tokens))
        self.core.handle(WriteDone(self.version, weights_hash(self.buffer.data), ours), 0.0)
        (granted,) = self.core.handle(Lease(0, 0), 0.0)
        assert isinstance(granted, ToSampler)
        assert isinstance(granted.message, LeaseGranted)
        self.engine.load_weights(self.version, self.entries, self.buffer.data.toreadonly())
        self.core.handle(Release(0, 0, self.version), 0.0)
        trying = answer_canary(self.engine, granted.message.canary, granted.message.num_decoded)
        theirs = stepped(self.engine, trying)
        digest = weights_hash(self.engine.weights_view())
        loaded = WeightsLoaded(0, 0, self.version, digest, *theirs)
        (verdict,) = self.core.handle(loaded, 0.0)
        return verdict

    def fault(self) -> AtFault:
        """Load what must be refused."""
        verdict = self.load()
        assert isinstance(verdict, AtFault)
        assert self.core.acknowledged == {}
        return verdict


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Both on their first version, accepted."""
    pair = Pair(tmp_path)
    assert pair.load() == ToSampler(0, WeightsAccepted(0))
    return pair


def test_weights_that_arrive_are_accepted_again_and_again(pair: Pair) -> None:
    """The trainer samples at 0.7; the canary is scored at temperature 1 by both."""
    for version in range(1, 6):
        assert pair.load() == ToSampler(0, WeightsAccepted(version))


@pytest.mark.parametrize("skipped", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_load_that_skips_one_tensor_is_caught_by_the_hash(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, skipped: str
) -> None:
    whole = FlatWeights.load

    def load(self: FlatWeights, source: memoryview) -> None:
        (entry,) = [entry for entry in self.entries if entry.name == skipped]
        place = slice(entry.offset, entry.offset + entry.num_bytes)
        before = self.host[place].copy()
        whole(self, source)
        self.host[place] = before

    monkeypatch.setattr(FlatWeights, "load", load)
    assert pair.fault().name == "wrong_weights"


def test_copies_that_are_not_renewed_are_caught_by_the_canary(pair: Pair) -> None:
    """The norms of queries and keys: the bytes are all there, and the hash agrees."""
    weights = pair.engine._model._weights
    assert weights is not None
    assert weights._copies
    weights._copies.clear()
    fault = pair.fault()
    assert fault.name == "stale_weights"
    assert "has the bytes of version 1 but does not compute with all of them" in fault.story


def test_a_tied_head_left_stale_is_caught_by_the_canary(pair: Pair) -> None:
    model = pair.engine._model
    model._head = model._head.clone()
    assert pair.fault().name == "stale_weights"


def test_a_model_that_keeps_its_first_weights_answers_as_the_version_before(pair: Pair) -> None:
    model = pair.engine._model
    first = model._weights
    assert first is not None
    frozen = FlatWeights(first.entries, first.host.copy(), "cpu", torch.float32)
    model._bind(frozen)  # the network computes with a copy that no load reaches
    frozen.load(first.host.data)
    model._weights = first
    fault = pair.fault()
    assert fault.name == "stale_weights"
    assert "they are those of version 0" in fault.story
