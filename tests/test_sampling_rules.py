"""What is refused because the learner could not match it, and what becomes of cached keys."""

from __future__ import annotations

import msgspec
import pytest

from asyncrl_node.config import Config, SamplingConfig
from asyncrl_node.core.placement import RecomputePrice
from asyncrl_node.errors import ConfigError
from asyncrl_node.plan import check_config, describe
from asyncrl_node.sampling_rules import check_sampling, kv_after_update, kv_words

SMALL, LARGE = RecomputePrice(0.4, 0.05), RecomputePrice(12.0, 0.051)


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("top_p", 0.95, "1"),
        ("top_p", float("nan"), "1"),
        ("top_k", 20, "0"),
        ("min_p", 0.05, "0"),
        ("presence_penalty", 0.1, "0"),
        ("frequency_penalty", -0.1, "0"),
        ("repetition_penalty", 1.05, "1"),
    ],
)
def test_what_the_learner_cannot_match_is_refused(key: str, value: float, neutral: str) -> None:
    config = Config(sampling=msgspec.structs.replace(SamplingConfig(), **{key: value}))
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    assert caught.value.key == f"sampling.{key}"
    assert f"must stay {neutral}: " in str(caught.value)
    assert "the learner" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_neutral_values_pass() -> None:
    sampling = SamplingConfig(top_p=1, top_k=0, repetition_penalty=1.0)
    check_config(Config(sampling=sampling))


@pytest.mark.parametrize("engine", ["torch", "fake"])
def test_only_vllm_can_keep(engine: str) -> None:
    sampling = SamplingConfig(kv_after_update="keep")
    with pytest.raises(ConfigError, match=f"must be recompute with the {engine} engine"):
        check_sampling(sampling, engine)
    check_sampling(sampling, "vllm")
    check_sampling(SamplingConfig(kv_after_update="recompute"), engine)


def test_unset_is_exact_where_that_is_cheap() -> None:
    unset = SamplingConfig()
    assert kv_after_update(unset, "torch", on_gpus=True) == "recompute"
    assert kv_after_update(unset, "vllm", on_gpus=False, price=LARGE) == "recompute"
    assert kv_after_update(unset, "vllm", on_gpus=True) == "keep"
    assert kv_after_update(unset, "vllm", on_gpus=True, price=LARGE) == "keep"
    assert kv_after_update(unset, "vllm", on_gpus=True, price=SMALL) == "recompute"


def test_what_is_set_is_what_is_done() -> None:
    for kind in ("recompute", "keep"):
        chosen = SamplingConfig(kv_after_update=kind)
        for price in (None, SMALL, LARGE):
            assert kv_after_update(chosen, "vllm", on_gpus=True, price=price) == kind


def test_the_price_is_in_the_words() -> None:
    assert kv_words("recompute") == (
        "recompute: exact; re-prefills the live contexts at each update"
    )
    assert kv_words("recompute", LARGE) == "recompute: about 12 s per update, 5 % of a step; exact"
    assert "mismatch/kl_older_kv" in kv_words("keep")
    assert kv_words("keep", LARGE).endswith("; recompute: about 12 s per update, 5 % of a step")


def test_the_plan_says_it() -> None:
    lines = describe(Config(run_dir="runs/none")).splitlines()
    assert "kv cache    recompute: exact; re-prefills the live contexts at each update" in lines
    keeping = Config(
        run_dir="runs/none", engine="vllm", sampling=SamplingConfig(kv_after_update="keep")
    )
    assert any(line.startswith("kv cache    keep: ") for line in describe(keeping).splitlines())
