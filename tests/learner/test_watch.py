"""The collapse watch on scripted steps and on series recorded from the demo's runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl_node.learner.step_sums import StepSums
from asyncrl_node.learner.watch import CALM_STEPS, MEDIAN_STEPS, CollapseWatch

RECORDED = json.loads(Path(__file__).with_name("watch_series.json").read_text())
HEALTHY = {
    "mismatch/kl_stale": 0.002,
    "mismatch/num_tokens_stale": 500.0,
    "mismatch/kl_older_kv": None,
    "mismatch/num_tokens_older_kv": 0.0,
    "ratio/max": 2.0,
    "entropy/mean": 0.26,
    "reward/trained_mean": 0.2,
}


def observe(rows):
    """(step, name) of each alarm."""
    watch = CollapseWatch()
    return [(step, a.name) for step, row in enumerate(rows) for a in watch.observe(step, row)]


def rows(count, **changed):
    names = {"kl": "mismatch/kl_stale", "ratio": "ratio/max", "entropy": "entropy/mean"}
    names["reward"] = "reward/trained_mean"
    return [HEALTHY | {names[name]: value for name, value in changed.items()}] * count


def recorded(name):
    (run,) = [run for run in RECORDED if run["name"] == name]
    columns = run["metrics"]
    return [
        HEALTHY | dict(zip(columns, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


@pytest.mark.parametrize("name", ["healthy", "ppo3e4d8", "ppo3e4d8_1"])
def test_runs_that_learned_raise_no_alarm(name):
    series = recorded(name)
    assert sum(row["reward/trained_mean"] for row in series[-5:]) / 5 > 0.9
    assert observe(series) == []


@pytest.mark.parametrize("name", ["is3e4d8", "is1e3d8", "is1e3d8_1", "ppo1e3d8_2"])
def test_runs_that_failed_raise_one_within_the_first_fifth(name):
    series = recorded(name)
    assert sum(row["reward/trained_mean"] for row in series[-5:]) / 5 < 0.8
    alarms = observe(series)
    assert {"kl", "ratio"} <= {alarm for _, alarm in alarms}
    assert alarms[0][0] <= 20


def test_an_unclipped_run_warns_before_its_reward_has_fallen():
    series = recorded("is1e3d8")
    first = observe(series)[0][0]
    rewards = [row["reward/trained_mean"] for row in series]
    assert max(rewards[: first + 1]) == pytest.approx(max(rewards), abs=0.35)
    assert max(rewards[first:]) > 0.5
    assert rewards[-1] == 0.0


def test_divergence_must_last():
    spike = rows(10) + rows(2, kl=9.0) + rows(10)
    assert observe(spike) == []
    assert observe(rows(10) + rows(3, kl=0.3)) == [(12, "kl")]


def test_one_wild_token_is_no_tail():
    assert observe(rows(10) + rows(1, ratio=1e6) + rows(20)) == []
    twice = rows(10) + rows(1, ratio=101.0) + rows(5) + rows(1, ratio=150.0)
    assert observe(twice) == [(16, "ratio")]


def test_entropy_may_fall_while_the_reward_rises():
    assert observe(rows(5) + rows(30, entropy=0.01, reward=0.9)) == []
    assert observe(rows(5) + rows(5, entropy=0.01, reward=0.1)) == [(7, "entropy")]


def test_entropy_that_doubles_is_an_alarm_whatever_the_reward():
    assert observe(rows(5) + rows(5, entropy=0.6, reward=0.9)) == [(7, "entropy")]


def test_it_warns_once_until_it_has_been_calm():
    bad = rows(MEDIAN_STEPS, kl=1.0)
    assert observe(rows(5) + bad * 6) == [(7, "kl")]
    calm = rows(CALM_STEPS + MEDIAN_STEPS)
    assert [name for _, name in observe(rows(5) + bad + calm + bad)] == ["kl", "kl"]
    short = rows(CALM_STEPS - 2)
    assert [name for _, name in observe(rows(5) + bad + short + bad)] == ["kl"]


def test_an_alarm_says_what_was_seen_and_the_cure():
    watch = CollapseWatch()
    alarms = [alarm for step in range(9) for alarm in watch.observe(step, rows(1, kl=0.5)[0])]
    (alarm,) = alarms
    assert alarm.story.startswith("step 4: sampler and learner differ by 0.5 nats")
    assert "limit 0.2" in alarm.story
    for setting in ("learner.learning_rate", "max_steps_off_policy", "ppo"):
        assert setting in alarm.story
    assert "\n" not in alarm.story


def test_steps_without_stale_tokens_are_calm():
    nothing = {"mismatch/kl_stale": None, "mismatch/num_tokens_stale": 0.0}
    assert observe([HEALTHY | nothing] * 20) == []


def drifted(stale, older_kv):
    """40 rows; each population is (tokens, KL)."""
    row = {}
    for name, (tokens, kl) in {"stale": stale, "older_kv": older_kv}.items():
        row |= {f"mismatch/num_tokens_{name}": tokens, f"mismatch/kl_{name}": kl}
    return [HEALTHY | row] * 40


@pytest.mark.parametrize(
    ("stale", "older_kv", "alarms"),
    [
        ((0.0, None), (4000.0, 3.0), True),
        ((4000.0, 3.0), (0.0, None), True),
        ((100.0, 0.001), (4000.0, 0.3), True),
        ((4000.0, 0.3), (100.0, 0.001), True),
        ((4000.0, 0.001), (10.0, 9.0), False),  # few tokens: 0.023 in the mean
        ((10.0, 9.0), (4000.0, 0.001), False),
        ((1000.0, 0.3), (1000.0, 0.12), True),  # 0.21
        ((1000.0, 0.12), (1000.0, 0.26), False),  # 0.19
        ((0.0, None), (0.0, None), False),
    ],
)
def test_drift_is_seen_whatever_keys_and_values_it_was_sampled_on(stale, older_kv, alarms):
    """With kv_after_update = keep most drifted tokens count as older_kv."""
    assert observe(drifted(stale, older_kv)) == ([(4, "kl")] if alarms else [])


def test_the_watch_reads_what_the_trainer_writes():
    metrics = StepSums().metrics()
    assert HEALTHY.keys() <= metrics.keys()
