"""perf/weights.py on a tiny model: real processes, every figure there and in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl_node.run_directory import left_behind
from perf.random_prompts import RandomPrompts
from perf.sampler_rig import TINY, SamplerRig, make_model, read_flat
from perf.weights import (
    GROUP_SIZE,
    Busy,
    Options,
    Run,
    config_of,
    measure,
    recompute_cpu_s,
    summary,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("weights")
    make_model(folder / "model", TINY)
    options = Options(repeats=3, sampling=True, num_new=300)
    return measure(folder, TINY, "torch", 2, options)


def test_an_update_is_announced_begun_copied_and_acknowledged(run: Run) -> None:
    assert run.num_bytes > 4 * 100_000
    parts = zip(run.lease_s, run.copy_s, run.stall_s, strict=True)
    for ack_s, each in zip(run.publish_to_ack_s, parts, strict=True):
        assert all(0 < part_s < ack_s for part_s in each)
    probed = zip(run.with_canary_s, run.canary_s, strict=True)
    assert all(0 < canary_s < ack_s for ack_s, canary_s in probed)


def test_the_summary_has_the_keys_of_the_contract(run: Run) -> None:
    keys = json.loads(json.dumps(summary([run])))
    assert keys["stall_over_memcpy"] == pytest.approx(run.ratios()["stall_over_memcpy"])
    assert keys["publish_to_ack_over_memcpy"] > keys["stall_over_memcpy"] > 0
    assert keys["runs"][0]["num_samplers"] == 2


def test_updates_come_while_requests_are_running(run: Run) -> None:
    assert run.busy is not None
    assert 0 < run.busy.stall_s < run.busy.publish_to_ack_s
    row = json.loads(json.dumps(summary([run])))["runs"][0]
    assert row["busy"]["stall_s"] == run.busy.stall_s


def test_recomputing_is_told_apart_where_both_kinds_were_measured(run: Run) -> None:
    recomputed = run._replace(engine="vllm", busy=Busy(0.9, 0.1, 0.2))
    kept = recomputed._replace(kv="keep", busy=Busy(0.4, 0.1, 0.2))
    assert recompute_cpu_s([run, recomputed]) == {}
    assert recompute_cpu_s([run, recomputed, kept]) == {"2": pytest.approx(0.5)}


def test_the_bars_are_of_the_worst_run_and_of_the_embedded_engine(run: Run) -> None:
    memcpy_s = run.memcpy_s
    slow = run._replace(
        stall_s=[1.6 * s for s in memcpy_s], publish_to_ack_s=[2 * s for s in memcpy_s]
    )
    quick = slow._replace(stall_s=memcpy_s)
    other = slow._replace(engine="vllm", publish_to_ack_s=[100 * s for s in memcpy_s])
    assert quick.meets_bars()
    assert not slow.meets_bars()
    worst = summary([quick, slow, other])
    assert worst["stall_over_memcpy"] == pytest.approx(1.6)
    assert worst["publish_to_ack_over_memcpy"] == pytest.approx(2.0)


def test_the_rig_samples_what_it_is_told_to_and_leaves_nothing(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TINY)
    config = config_of(tmp_path, "torch", 1, Options(1, False, num_new=5))
    with SamplerRig(config, *read_flat(tmp_path / "model", TINY)) as rig:
        rig.start()
        num_tokens, _, rollouts = rig.collect(rig.admit([3, 8]))
        assert rig.cpu_s() > 0
    assert num_tokens == 2 * GROUP_SIZE * 5
    task = RandomPrompts(config.seed, tmp_path / "model")
    prompts = [task.prompt(problem) for problem in (3, 8) for _ in range(GROUP_SIZE)]
    assert [rollout[:-5] for rollout in rollouts] == prompts
    assert list(left_behind(rig.runtime)) == []
