"""The torch engine against Hugging Face: every logprob is the teacher-forced one of its version."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from asyncrl_node.core.probe import Answer, Probe, find_stale, make_probe
from asyncrl_node.engines import torch_engine
from asyncrl_node.engines.base import Completion, GenerateRequest
from asyncrl_node.engines.drawing import sample_tokens
from asyncrl_node.engines.torch_engine import TorchEngine
from asyncrl_node.errors import ConfigError, RunFault
from asyncrl_node.messages import WeightEntry
from asyncrl_node.sampler.weights import answer_canary
from asyncrl_node.transport.weights import weights_hash
from tests.engines.contract import stepped

torch.set_num_threads(1)

VOCAB = 23
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "qwen3_tied": lambda: transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3_untied": lambda: transformers.Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(
        **SHAPE | {"head_dim": 6}, tie_word_embeddings=False, rope_theta=5000.0
    ),
    "llama": lambda: transformers.LlamaConfig(**SHAPE, rms_norm_eps=1e-5),
    "llama3_rope": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "one_kv_head": lambda: transformers.Qwen3Config(**SHAPE | {"num_key_value_heads": 1}),
}


def make_model(config, seed: int) -> nn.Module:
    """A model in which every parameter matters: biases and norms are random too."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return model


def flatten(model: nn.Module, order_seed: int | None = None, dtype=torch.float32):
    """The learner's side: entries and buffer; `order_seed` shuffles the layout."""
    named = [(name, p.detach().to(dtype)) for name, p in model.named_parameters()]
    if order_seed is not None:
        random.Random(order_seed).shuffle(named)
    entries, offset = [], 256
    for name, tensor in named:
        word = str(dtype).removeprefix("torch.")
        entries.append(WeightEntry(name, word, tuple(tensor.shape), offset, tensor.nbytes))
        offset += -(-tensor.nbytes // 256) * 256
    buffer = torch.zeros(offset, dtype=torch.uint8)
    for entry, (_, tensor) in zip(entries, named, strict=True):
        place = buffer[entry.offset : entry.offset + entry.num_bytes]
        place.view(dtype).view(entry.shape).copy_(tensor)
    return tuple(entries), memoryview(buffer.numpy()).toreadonly()


class Rig:
    """An engine, the Hugging Face models of every version loaded, and what has come back."""

    def __init__(self, tmp_path, kind="qwen3_tied", rows=4, context=48, order_seed=None) -> None:
        self.config = CONFIGS[kind]()
        self.config.save_pretrained(tmp_path)
        self.engine = TorchEngine(tmp_path, rows, context)
        self.order_seed = order_seed
        self.models: dict[int, nn.Module] = {}
        self.requests: dict[int, GenerateRequest] = {}
        self.completions: dict[int, Completion] = {}

    def load(self, version: int) -> None:
        self.models[version] = make_model(self.config, seed=version)
        self.engine.load_weights(version, *flatten(self.models[version], self.order_seed))

    def submit(self, prompt: list[int], max_new: int, seed=0, temperature=1.0, stops=()) -> int:
        number = len(self.requests)
        request = GenerateRequest(number, prompt, max_new, temperature, seed, tuple(stops))
        self.requests[number] = request

        def done(completion: Completion) -> None:
            assert number not in self.completions
            self.completions[number] = completion

        self.engine.submit(request, done)
        return number

    def submit_ragged(self, count: int, temperature=1.0, seed=0) -> None:
        dice = random.Random(seed)
        for i in range(count):
            prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))]
            self.submit(prompt, dice.randint(1, 25), seed=i, temperature=temperature)

    def run(self, max_steps=1000) -> None:
        for _ in range(max_steps):
            self.engine.validate()
            if not self.engine.step():
                return

    def check(self) -> float:
        """Compare everything that came back with the teacher-forced logprobs; return the error."""
        self.engine.validate()
        assert self.completions.keys() == self.requests.keys()
        errors = [self._error(self.requests[n], c) for n, c in self.completions.items()]
        assert max(errors) <= 1e-5
        return max(errors)

    @torch.no_grad()
    def _error(self, request: GenerateRequest, completion: Completion) -> float:
        num_new = len(completion.tokens)
        assert len(completion.logprobs) == len(completion.policy_versions) == num_new
        error = 0.0
        whole = torch.tensor([request.prompt_tokens + completion.tokens])
        for version in set(completion.policy_versions):
            logits = self.models[version](whole).logits[0].float() / request.temperature
            expected = logits[-num_new - 1 : -1].log_softmax(-1)
            expected = expected.gather(1, whole[0, -num_new:, None])[:, 0]
            by_version = torch.tensor(completion.policy_versions) == version
            difference = (torch.tensor(completion.logprobs) - expected).abs()
            error = max(error, difference[by_version].max().item())
        return error


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", CONFIGS)
def test_case_20_logprobs_are_teacher_forced_over_refills(tmp_path, kind, temperature):
    rig = Rig(tmp_path, kind)
    rig.load(0)
    rig.submit_ragged(14, temperature)
    rig.run()
    rig.check()
    for number, completion in rig.completions.items():
        assert completion.finish_reason == "length"
        assert len(completion.tokens) == rig.requests[number].max_new_tokens
        assert set(completion.policy_versions) == {0}


@pytest.mark.parametrize("rows", [1, 2, 12, 13])
@pytest.mark.parametrize("same_length", [True, False])
def test_a_wave_that_fills_every_row(tmp_path, rows, same_length):
    rig = Rig(tmp_path, rows=rows)
    rig.load(0)
    for i in range(12):
        rig.submit([i % VOCAB] * (5 if same_length else 1 + i % 7), 3 + i % 5, seed=i)
    rig.run()
    rig.check()


def test_waves_are_split_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_engine, "MAX_PREFILL_TOKENS", 12)
    rig = Rig(tmp_path, rows=8)
    rig.load(0)
    rig.submit_ragged(10)
    rig.engine.step()
    assert 0 < rig.engine.num_running < 8
    rig.load(1)
    rig.run()
    rig.check()


def test_equal_prompts_are_shared(tmp_path):
    rig = Rig(tmp_path, rows=8)
    rig.load(0)
    for group in range(3):
        for seed in range(4):
            rig.submit([group, 2, 3, 4 + group][: 3 + group % 2], 8, seed=seed)
    rig.run()
    rig.check()
    assert len({tuple(rig.completions[n].tokens) for n in range(4)}) == 4


@pytest.mark.parametrize("kind", ["qwen3_untied", "qwen2"])
@pytest.mark.parametrize("order_seed", [None, 5])
def test_case_17_and_18_swaps_in_mid_generation(tmp_path, kind, order_seed):
    rig = Rig(tmp_path, kind, order_seed=order_seed)
    rig.load(0)
    rig.submit_ragged(9)
    for version in (1, 2, 3):
        rig.run(max_steps=4)
        rig.load(version)
    rig.run()
    rig.check()
    seen = {version for c in rig.completions.values() for version in c.policy_versions}
    assert seen == {0, 1, 2, 3}
    assert all(c.policy_versions == sorted(c.policy_versions) for c in rig.completions.values())
    assert any(len(set(c.policy_versions)) >= 2 for c in rig.completions.values())


def test_two_swaps_in_a_row_and_a_swap_before_the_first_step(tmp_path):
    rig = Rig(tmp_path)
    rig.load(0)
    rig.submit_ragged(6)
    rig.load(1)
    rig.run(max_steps=3)
    rig.load(2)
    rig.load(3)
    assert rig.engine.policy_version == 3
    rig.run()
    rig.check()
    seen = {version for c in rig.completions.values() for version in c.policy_versions}
    assert seen == {1, 3}


def test_a_swap_keeps_the_order_of_the_queue(tmp_path):
    rig = Rig(tmp_path, rows=2)
    rig.load(0)
    for i in range(4):
        rig.submit([i + 1], 6, seed=i)
    rig.run(max_steps=2)
    rig.load(1)
    rig.engine.step()
    assert (rig.engine.num_running, rig.engine.num_waiting) == (2, 2)
    rig.run()
    rig.check()
    assert list(rig.completions) == [0, 1, 2, 3]


def test_abort_while_waiting_while_running_and_after_a_swap(tmp_path):
    rig = Rig(tmp_path, rows=3)
    rig.load(0)
    for i in range(6):
        rig.submit([1, 2 + i], 20, seed=i)
    rig.run(max_steps=5)
    rig.engine.abort(5)
    assert rig.completions[5] == Completion([], [], [], "abort")
    rig.engine.abort(0)
    assert (len(rig.completions[0].tokens), rig.completions[0].finish_reason) == (5, "abort")
    rig.load(1)
    rig.engine.abort(1)
    assert rig.completions[1].policy_versions == [0] * 5
    rig.engine.abort(1)
    rig.engine.abort(99)
    rig.run()
    rig.check()
    assert {c.finish_reason for n, c in rig.completions.items() if n in (2, 3, 4)} == {"length"}


def test_a_stop_token_ends_a_completion_and_belongs_to_it(tmp_path):
    rig = Rig(tmp_path)
    rig.load(0)
    rig.submit([1, 2, 3], 30, seed=3)
    rig.run()
    free = rig.completions[0].tokens
    stop = free[4]
    rig.submit([1, 2, 3], 30, seed=3, stops=(stop, VOCAB + 5))
    rig.run()
    rig.check()
    stopped = rig.completions[1]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free[: free.index(stop) + 1]


def test_a_stop_at_the_limit_counts_as_a_stop(tmp_path):
    rig = Rig(tmp_path)
    rig.load(0)
    rig.submit([1], 1, stops=range(VOCAB))
    rig.run()
    assert rig.completions[0].finish_reason == "stop"


def test_a_seed_gives_the_same_tokens_in_any_company(tmp_path):
    rig = Rig(tmp_path, rows=6)
    rig.load(0)
    alone = rig.submit([4, 5, 6], 20, seed=11)
    rig.run()
    for i in range(4):
        rig.submit([i, 2], 3 + 4 * i, seed=i)
    together = rig.submit([4, 5, 6], 20, seed=11)  # the last row: it moves when another ends
    other_seed = rig.submit([4, 5, 6], 20, seed=12)
    rig.run()
    rig.check()
    assert rig.completions[alone].tokens == rig.completions[together].tokens
    assert rig.completions[alone].tokens != rig.completions[other_seed].tokens


def test_a_seed_goes_on_after_a_swap(tmp_path):
    rig = Rig(tmp_path, rows=3)
    rig.load(0)
    rig.submit([4, 5, 6], 20, seed=11)
    rig.run()
    rig.submit([1], 5, seed=1)
    rig.submit([4, 5, 6], 20, seed=11)
    rig.run(max_steps=8)
    rig.models[1] = rig.models[0]
    rig.engine.load_weights(1, *flatten(rig.models[0]))
    rig.run()
    rig.check()
    assert rig.completions[0].tokens == rig.completions[2].tokens
    assert rig.completions[2].policy_versions == [0] * 8 + [1] * 12


def test_seeds_beyond_64_bits_and_below_zero(tmp_path):
    rig = Rig(tmp_path)
    rig.load(0)
    for seed in (-1, 2**64 - 1, 2**70 + 3, 3, 2**63 - 1):
        rig.submit([1], 12, seed=seed)
    rig.run()
    tokens = [rig.completions[n].tokens for n in range(5)]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]
    assert tokens[4] not in tokens[:4]


@pytest.mark.parametrize("seed", range(12))
def test_random_histories(tmp_path, seed):
    """Submit, step, abort and swap in any order; rare events stay rare so that rows fill up."""
    dice = random.Random(seed)
    kind = dice.choice(list(CONFIGS))
    rig = Rig(tmp_path, kind, rows=dice.randint(1, 6), order_seed=dice.choice([None, 1]))
    rig.load(0)
    for _ in range(60):
        event = dice.random()
        if event < 0.3:
            prompt = [dice.randrange(VOCAB) for _ in range(dice.choice([1, 2, 3, 15, 16, 17]))]
            for member in range(dice.choice([1, 1, 3])):
                rig.submit(
                    prompt,
                    dice.randint(1, 18),
                    seed=member,
                    temperature=dice.choice([1.0, 1.0, 0.6, 1.3]),
                    stops=dice.choice([(), (3,)]),
                )
        elif event < 0.36 and rig.requests:
            rig.engine.abort(dice.randrange(len(rig.requests)))
        elif event < 0.42:
            rig.load(rig.engine.policy_version + 1)
        else:
            rig.run(max_steps=1)
        rig.engine.validate()
    rig.run()
    rig.check()


@pytest.mark.parametrize("kind", CONFIGS)
def test_scores_are_hugging_faces_and_disturb_nothing(tmp_path, kind):
    rig = Rig(tmp_path, kind)
    rig.load(0)
    rig.submit_ragged(9, temperature=0.7)
    rig.run(max_steps=4)
    for version in (1, 2):
        rig.load(version)
        for length in (2, 17, 48):
            tokens = [(5 * i + length) % VOCAB for i in range(length)]
            scores = asyncio.run(rig.engine.score(tokens))
            with torch.no_grad():
                logits = rig.models[version](torch.tensor([tokens])).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]
            assert (torch.tensor(scores) - expected).abs().max() <= 1e-5
            rig.engine.validate()
        rig.run(max_steps=3)
    rig.run()
    rig.check()


@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen3_untied"])
@pytest.mark.parametrize("part", [None, "_head", "_embedding", "_norm", "_layers", "copies"])
def test_case_16_a_part_left_stale_is_caught_by_the_canary(tmp_path, kind, part):
    """One part is a private copy that no load renews, as vLLM's packed head once was.

    The update is as small as an optimizer's; the bytes and their hash are right.
    """
    rig = Rig(tmp_path, kind)
    probe = make_probe(VOCAB, 48, 5e-5)
    assert probe is not None
    rig.load(0)
    model = rig.engine._model
    if part == "copies":
        model._weights._copies.clear()
    elif part is not None:
        setattr(model, part, copy.deepcopy(getattr(model, part)))
    before = answer(rig, probe)
    assert find_stale(probe, before, None) is None
    rig.models[1] = copy.deepcopy(rig.models[0])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in rig.models[1].parameters():
            parameter.add_(1e-4 * torch.randn(parameter.shape, generator=generator))
    entries, source = flatten(rig.models[1])
    rig.engine.load_weights(1, entries, source)
    assert weights_hash(rig.engine.weights_view()) == weights_hash(source)
    found = find_stale(probe, answer(rig, probe), before)
    assert (found is None) == (part is None)


def answer(rig: Rig, probe: Probe) -> Answer:
    """What learner and engine make of the canary under the newest version."""
    version = rig.engine.policy_version
    trying = answer_canary(rig.engine, probe.tokens, probe.num_decoded)
    theirs, decoded = stepped(rig.engine, trying)
    with torch.no_grad():
        logits = rig.models[version](torch.tensor([probe.tokens])).logits[0, :-1]
    ours = logits.log_softmax(-1).gather(1, torch.tensor(probe.tokens)[1:, None])[:, 0]
    return Answer(version, tuple(ours.tolist()), theirs, decoded)


def test_weights_of_another_dtype_are_converted(tmp_path):
    rig = Rig(tmp_path)
    for version in (0, 1):
        model = make_model(rig.config, version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        rig.engine.load_weights(version, *flatten(model, dtype=torch.bfloat16))
        rig.models[version] = model
        rig.submit([1, 2, 3], 6)
        rig.run()
    rig.check()


def test_the_flat_buffer_is_a_private_copy(tmp_path):
    rig = Rig(tmp_path)
    assert bytes(rig.engine.weights_view()) == b""
    for seed in (0, 1):
        model = make_model(rig.config, seed)
        entries, buffer = flatten(model)
        source = bytearray(buffer)
        rig.engine.load_weights(seed, entries, memoryview(source).toreadonly())
        source[:] = bytes(len(source))
        view = rig.engine.weights_view()
        assert view.readonly
        assert bytes(view) == bytes(buffer)
        rig.models[seed] = model
        rig.submit([1, 2], 5)
        rig.run()
    rig.check()


def test_a_new_layout_is_followed(tmp_path):
    rig = Rig(tmp_path)
    for version, order_seed in enumerate([None, 1, 2]):
        rig.order_seed = order_seed
        rig.load(version)
        rig.submit([3, 2, 1], 9)
        rig.run(max_steps=4)
    rig.run()
    rig.check()


def refused(engine: TorchEngine, entries, buffer) -> str:
    with pytest.raises(RunFault) as caught:
        engine.load_weights(1, tuple(entries), buffer)
    assert caught.value.name == "weights_mismatch"
    return caught.value.story


def test_load_refuses_what_is_not_exactly_the_model(tmp_path):
    rig = Rig(tmp_path)
    rig.load(0)
    entries, buffer = flatten(rig.models[0])
    first, rest = entries[0], entries[1:]
    replace = lambda **kw: WeightEntry(  # noqa: E731
        **{name: getattr(first, name) for name in first.__struct_fields__} | kw
    )
    assert "missing: model.embed_tokens.weight" in refused(rig.engine, rest, buffer)
    extra = replace(name="lm_head.weight")
    assert "left over: lm_head.weight" in refused(rig.engine, [*entries, extra], buffer)
    assert "twice: model.embed_tokens.weight" in refused(rig.engine, [first, *entries], buffer)
    turned = replace(shape=first.shape[::-1])
    assert "wrong shape: model.embed_tokens.weight" in refused(rig.engine, [turned, *rest], buffer)
    for change in ({"offset": 128}, {"offset": -256}, {"num_bytes": 4}, {"dtype": "float16"}):
        story = refused(rig.engine, [replace(**change), *rest], buffer)
        assert "wrong layout: model.embed_tokens.weight" in story
    for dtype in ("int32", "no_such_dtype", "nn"):
        assert "wrong layout" in refused(rig.engine, [replace(dtype=dtype), *rest], buffer)
    assert "wrong layout" in refused(rig.engine, entries, buffer[:-256])
    assert "and 4 more" in refused(rig.engine, [], buffer)
    rig.submit([1, 2, 3], 5)
    rig.run()
    rig.check()
    assert rig.engine.policy_version == 0


def test_requests_that_can_never_fit(tmp_path):
    rig = Rig(tmp_path, context=16)
    rig.load(0)
    rig.submit([1] * 10, 6)
    good = GenerateRequest(7, [1, 2], 3, 1.0, 0)
    for change in (
        {"prompt_tokens": [1] * 14},
        {"prompt_tokens": []},
        {"prompt_tokens": [VOCAB]},
        {"prompt_tokens": [-1]},
        {"max_new_tokens": 0},
        {"max_new_tokens": 15},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"request_id": 0},
    ):
        fields = {name: getattr(good, name) for name in good.__struct_fields__}
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            rig.engine.submit(GenerateRequest(**fields | change), lambda _: None)
    rig.run()
    rig.check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mamba"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("hidden_size", "wide"),
    ],
)
def test_models_that_cannot_run_are_refused(tmp_path, key, value):
    CONFIGS["qwen3_tied"]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match="model"):
        TorchEngine(tmp_path, 1, 8)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        TorchEngine(tmp_path, 1, 8)


def test_older_files_keep_rope_at_the_top(tmp_path):
    CONFIGS["llama3_rope"]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = {"type": rope.pop("rope_type")} | rope
    path.write_text(json.dumps(fields))
    engine = TorchEngine(tmp_path, 1, 32)
    model = make_model(CONFIGS["llama3_rope"](), 0)
    engine.load_weights(0, *flatten(model))
    found: list[Completion] = []
    engine.submit(GenerateRequest(0, [1, 2, 3] * 8, 1, 1.0, 0), found.append)
    engine.step()
    with torch.no_grad():
        logprobs = model(torch.tensor([[1, 2, 3] * 8])).logits[0, -1].log_softmax(-1)
    assert found[0].logprobs[0] == pytest.approx(logprobs[found[0].tokens[0]].item(), abs=1e-5)


def test_sampling_follows_the_distribution():
    logits = torch.tensor([-torch.inf, 1.0, 0.0, -torch.inf, 2.0, -30.0, -torch.inf])
    count = 1 << 14
    uniforms = (torch.arange(count, dtype=torch.float64) / count).unsqueeze(1)
    uniforms[-1] = 1 - 2.0**-52
    tokens, logprobs = sample_tokens(logits.expand(count, -1), uniforms)
    shares = torch.bincount(tokens[:, 0], minlength=7) / count
    assert (shares - logits.softmax(0)).abs().max() <= 2 / count
    assert logprobs.isfinite().all()


def test_completions_follow_the_distribution(tmp_path):
    rig = Rig(tmp_path, rows=64)
    rig.load(0)
    count = 4096
    for seed in range(count):
        rig.submit([1, 2], 1, seed=seed)
    rig.run()
    shares = torch.bincount(
        torch.tensor([c.tokens[0] for c in rig.completions.values()]), minlength=VOCAB
    )
    with torch.no_grad():
        expected = rig.models[0](torch.tensor([[1, 2]])).logits[0, -1].softmax(0)
    sigma = (expected * (1 - expected) / count).sqrt()
    assert ((shares / count - expected).abs() <= 4.5 * sigma + 1e-3).all()


def test_import_is_light():
    code = "import asyncrl_node.engines.torch_engine, sys; print('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr


async def pass_turns(count=50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_generate_waits_for_the_first_weights(tmp_path):
    rig = Rig(tmp_path)
    request = GenerateRequest(0, [1, 2], 4, 1.0, 0)
    first_versions: list[int] = []

    async def main() -> Completion:
        serving = asyncio.create_task(rig.engine.serve())
        generating = asyncio.create_task(rig.engine.generate(request, first_versions.append))
        await pass_turns()
        assert rig.engine.policy_version == -1
        assert not generating.done()
        rig.load(5)
        completion = await generating
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        return completion

    rig.requests[0], rig.completions[0] = request, asyncio.run(main())
    rig.check()
    assert first_versions == [5]


def test_serve_swaps_aborts_and_refuses(tmp_path):
    rig = Rig(tmp_path, rows=2, context=64)
    rig.load(0)
    started = []

    async def generate(number: int, max_new: int) -> None:
        request = GenerateRequest(number, [1, 2 + number], max_new, 1.0, number)
        rig.requests[number] = request
        rig.completions[number] = await rig.engine.generate(
            request, lambda version: started.append((number, version))
        )

    async def main() -> None:
        serving = asyncio.create_task(rig.engine.serve())
        with pytest.raises(ValueError, match="fit"):
            await generate(9, 64)
        del rig.requests[9]
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(generate(number, 30))
            while len(started) < 2:
                await asyncio.sleep(0)
            rig.load(1)
            rig.engine.abort(0)
        rig.engine.close()
        await generate(4, 5)
        serving.cancel()

    asyncio.run(main())
    assert rig.completions.pop(4) == Completion([], [], [], "abort")
    del rig.requests[4]
    rig.check()
    assert rig.completions[0].finish_reason == "abort"
    assert len(rig.completions[0].tokens) in (1, 2)
    assert set(rig.completions[1].policy_versions) == {0, 1}
    assert started == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_cancelling_a_generate_frees_its_row(tmp_path):
    rig = Rig(tmp_path, rows=1)
    rig.load(0)

    async def main() -> Completion:
        serving = asyncio.create_task(rig.engine.serve())
        first_token = asyncio.Event()
        request = GenerateRequest(0, [1], 40, 1.0, 0)
        doomed = asyncio.create_task(rig.engine.generate(request, lambda _: first_token.set()))
        await first_token.wait()
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert rig.engine.num_running == 0
        completion = await rig.engine.generate(GenerateRequest(0, [1], 3, 1.0, 0))
        serving.cancel()
        return completion

    assert asyncio.run(main()).finish_reason == "length"


def test_close_ends_running_and_waiting_as_aborted(tmp_path):
    rig = Rig(tmp_path, rows=2)
    rig.load(0)
    for i in range(4):
        rig.submit([i], 20, seed=i)
    rig.run(max_steps=3)
    rig.engine.close()
    assert [len(rig.completions[n].tokens) for n in range(4)] == [3, 3, 0, 0]
    rig.check()
    assert rig.engine.step() == 0
    rig.engine.close()


def test_callbacks_may_submit_and_abort(tmp_path):
    rig = Rig(tmp_path, rows=3)
    rig.load(0)
    seen: list[int] = []
    engine = rig.engine

    def start(number: int, max_new: int, on_first_token=None) -> None:
        request = GenerateRequest(number, [number], max_new, 1.0, 0)
        engine.submit(request, lambda _: seen.append(number), on_first_token)

    start(0, 1, lambda _: engine.abort(0))
    start(1, 9, lambda _: engine.abort(1))
    start(2, 9, lambda _: start(3, 2))
    rig.run()
    assert sorted(seen) == [0, 1, 2, 3]


def test_broken_weights_end_serve_and_every_generate(tmp_path):
    rig = Rig(tmp_path)
    model = make_model(rig.config, 0)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    rig.engine.load_weights(3, *flatten(model))

    async def main() -> None:
        serving = asyncio.create_task(rig.engine.serve())
        request = GenerateRequest(0, [1], 4, 1.0, 0)
        with pytest.raises(RunFault, match="engine_failed"):
            await rig.engine.generate(request)
        with pytest.raises(RunFault, match="not_finite: the weights of version 3"):
            await serving

    asyncio.run(main())
