"""How fast are the engines, against the plainest thing that does the same?

    python perf/engine.py [--json] [--repeats N] [--engines torch,vllm]

torch: what does continuous batching cost, and win, against a plain static loop? Both sides run the
same network code on the same random weights (0.8M parameters, float32, one thread), 64 rows,
prompts of 16 tokens. The static loop prefills a batch and decodes it until its longest member has
finished: no masks, no scattered writes, no bookkeeping per row, because all of its rows stand at
the same position. Times are CPU seconds of this process; the two sides take turns, and a ratio is
the median of the ratios of neighbours.

ratio_to_static_loop            64 new tokens for everybody: the price of being flexible (here the
                                engine needs no mask either; rows out of step cost it a little more)
ratio_to_static_loop_long_tail  256 requests, exponential lengths (mean 24, at most 100): the gain

vllm: how much of vLLM's speed is left behind a whole sampler process? See bare_vllm.py.

ratio_to_bare_vllm              100M parameters, 32 rollouts of 48 tokens. Bar: 0.95
ratio_to_bare_vllm_tiny         the demo's model and batch, 256 rollouts of 16 tokens: there the hop
                                between vLLM's processes is as dear as the model
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl_node.core.layout import layout_weights  # noqa: E402
from asyncrl_node.engines.base import Completion, GenerateRequest  # noqa: E402
from asyncrl_node.engines.drawing import sample_tokens  # noqa: E402
from asyncrl_node.engines.torch_engine import TorchEngine  # noqa: E402
from asyncrl_node.engines.torch_model import (  # noqa: E402
    ModelConfig,
    Rope,
    TorchModel,
    parameter_shapes,
)
from asyncrl_node.engines.vllm_start import CPU_INSTALL  # noqa: E402
from asyncrl_node.messages import WeightEntry  # noqa: E402
from perf import bare_vllm  # noqa: E402

NUM_ROWS = 64
PROMPT_LENGTH = 16
EQUAL_LENGTH = 64
LONGEST = 100
MEAN_LENGTH = 24

BENCHED = ModelConfig(
    model_type="qwen3",
    vocab_size=46,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
)
DEMO = msgspec.structs.replace(
    BENCHED,
    hidden_size=96,
    intermediate_size=288,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
)

Weights = tuple[tuple[WeightEntry, ...], memoryview]


class Workload(msgspec.Struct, frozen=True):
    """Prompts of one length, and how many tokens each is to be answered with."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_useful(self) -> int:
        """Tokens that somebody asked for."""
        return sum(self.lengths)


class Timing(msgspec.Struct, frozen=True):
    """CPU seconds of the two sides, turn by turn."""

    engine_s: list[float]
    static_s: list[float]

    @property
    def ratio(self) -> float:
        """How many times as fast the engine is."""
        pairs = zip(self.static_s, self.engine_s, strict=True)
        return statistics.median(static / engine for static, engine in pairs)


def make_weights(config: ModelConfig) -> Weights:
    """Draw weights that give neither a uniform nor a frozen distribution."""
    shapes = parameter_shapes(config)
    sizes = {name: 4 * torch.Size(shape).numel() for name, shape in shapes.items()}
    entries, num_bytes = layout_weights(
        [(name, "float32", shape, sizes[name]) for name, shape in shapes.items()]
    )
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    for entry in entries:
        target = flat[entry.offset : entry.offset + entry.num_bytes].view(torch.float32)
        if "norm" in entry.name:
            target.fill_(1.0)
        else:
            target.normal_(0.0, 0.05)
    return entries, flat.numpy().data.toreadonly()


def make_workload(dice: random.Random, lengths: list[int]) -> Workload:
    """Draw a prompt for each length."""
    vocabulary = range(BENCHED.vocab_size)
    return Workload([dice.choices(vocabulary, k=PROMPT_LENGTH) for _ in lengths], lengths)


class StaticLoop:
    """A batch at a time: prefill, then decode all rows until the longest has finished."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._model = TorchModel(config, "cpu", torch.float32)
        self._model.load(*weights)
        self._num_kv, self._num_queries = config.num_key_value_heads, config.num_attention_heads
        num_positions = PROMPT_LENGTH + LONGEST
        self._rope = Rope.of_positions(config, num_positions, "cpu", torch.float32)
        heads = NUM_ROWS * self._num_kv
        shape = (config.num_hidden_layers, 2, heads, num_positions, config.head_size)
        self._kv = torch.zeros(shape)
        self._unused = torch.zeros(1, 1, 1)

    @torch.inference_mode()
    def run(self, prompts: Sequence[list[int]], num_new: int) -> tuple[Tensor, Tensor]:
        """Answer at most NUM_ROWS prompts; return tokens and logprobs [rows, num_new]."""
        num_rows = len(prompts)
        uniforms = torch.rand(num_new, num_rows, 1, dtype=torch.float64)
        drawn = sample_tokens(self._prefill(torch.tensor(prompts)), uniforms[0])
        steps = [drawn]
        for position, uniform in enumerate(uniforms[1:], PROMPT_LENGTH):
            drawn = sample_tokens(self._decode(drawn[0].view(-1), position), uniform)
            steps.append(drawn)
        tokens, logprobs = zip(*steps, strict=True)
        return torch.cat(tokens, 1), torch.cat(logprobs, 1)

    @torch.inference_mode()
    def teacher_forced(self, sequences: Tensor) -> Tensor:
        """Logprobs [rows, length - 1] of every token but the first; sequences [rows, length]."""
        logits = self._prefill(sequences, every=True)
        logprobs = logits.log_softmax(-1).view(*sequences.shape, -1)[:, :-1]
        return logprobs.gather(2, sequences[:, 1:].unsqueeze(2)).squeeze(2)

    def _prefill(self, prompts: Tensor, every: bool = False) -> Tensor:
        num_rows, length = prompts.shape

        def attend(layer: int, qkv: Tensor) -> Tensor:
            heads = qkv.view(num_rows, length, *qkv.shape[1:]).transpose(1, 2)
            queries, keys, values = self._split(heads)
            cached = self._kv[layer, :, : num_rows * self._num_kv, :length]
            cached[0].view_as(keys).copy_(keys)
            cached[1].view_as(values).copy_(values)
            mixed = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )
            return mixed.transpose(1, 2).reshape(num_rows * length, -1)

        rope = self._rope.at(torch.arange(length).repeat(num_rows))
        last = None if every else torch.arange(length - 1, num_rows * length, length)
        return self._model.forward(prompts.flatten(), rope, attend, last)

    def _decode(self, tokens: Tensor, position: int) -> Tensor:
        num_rows = len(tokens)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            queries, keys, values = self._split(qkv)
            cached = self._kv[layer, :, : num_rows * self._num_kv, : position + 1]
            cached[0, :, -1].view_as(keys).copy_(keys)
            cached[1, :, -1].view_as(values).copy_(values)
            grouped = queries.reshape(num_rows * self._num_kv, -1, qkv.shape[-1])
            keys_t, scale = cached[0].transpose(1, 2), qkv.shape[-1] ** -0.5
            scores = torch.baddbmm(self._unused, grouped, keys_t, beta=0, alpha=scale)
            return torch.bmm(scores.softmax(-1), cached[1]).view(num_rows, -1)

        rope = Rope(self._rope.table[position : position + 1])
        return self._model.forward(tokens, rope, attend, None)

    def _split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take queries, keys and values apart; heads [rows, H + 2 KV, ...]."""
        end_of_keys = self._num_queries + self._num_kv
        queries = heads[:, : self._num_queries]
        return queries, heads[:, self._num_queries : end_of_keys], heads[:, end_of_keys:]


def run_static(loop: StaticLoop, workload: Workload) -> list[tuple[list[int], list[float]]]:
    """Answer a workload batch by batch, in order; cut each answer to its length."""
    answers: list[tuple[list[int], list[float]]] = []
    for start in range(0, len(workload.prompts), NUM_ROWS):
        lengths = workload.lengths[start : start + NUM_ROWS]
        prompts = workload.prompts[start : start + NUM_ROWS]
        tokens, logprobs = (drawn.tolist() for drawn in loop.run(prompts, max(lengths)))
        rows = zip(tokens, logprobs, lengths, strict=True)
        answers += [(row[:length], values[:length]) for row, values, length in rows]
    return answers


def run_engine(engine: TorchEngine, workload: Workload) -> list[Completion]:
    """Answer a workload, all of it submitted at once; completions come in order of finishing."""
    completions: list[Completion] = []
    asked = zip(workload.prompts, workload.lengths, strict=True)
    for number, (prompt, length) in enumerate(asked):
        request = GenerateRequest(number, prompt, length, temperature=1.0, seed=number)
        engine.submit(request, completions.append)
    while engine.step():
        pass
    return completions


def cpu_seconds(job: Callable[[], object]) -> float:
    """CPU time of this process that `job` takes."""
    start = time.process_time()
    job()
    return time.process_time() - start


def check(engine: TorchEngine, loop: StaticLoop, workload: Workload) -> None:
    """Hold both sides to teacher forcing: a fast loop that is wrong proves nothing."""
    prompt, length = workload.prompts[0], workload.lengths[0]
    completion = run_engine(engine, Workload([prompt], [length]))[0]
    tokens, logprobs = loop.run([prompt], length)
    answers = [(completion.tokens, completion.logprobs), (tokens[0].tolist(), logprobs[0].tolist())]
    for answer, claimed in answers:
        expected = loop.teacher_forced(torch.tensor([prompt + answer]))[0, -length:]
        assert (torch.tensor(claimed) - expected).abs().max() <= 1e-5


def compare(engine: TorchEngine, loop: StaticLoop, workload: Workload, repeats: int) -> Timing:
    """Time both sides in turns, after one round that does not count; who begins alternates."""
    engine_s: list[float] = []
    static_s: list[float] = []
    for turn in range(repeats + 1):
        sides: list[tuple[list[float], Callable[[], object]]] = [
            (engine_s, lambda: run_engine(engine, workload)),
            (static_s, lambda: run_static(loop, workload)),
        ]
        for times, job in sides if turn % 2 else reversed(sides):
            times.append(cpu_seconds(job))
    return Timing(engine_s[1:], static_s[1:])


def demo_rate(folder: Path, repeats: int) -> float:
    """Tokens per CPU second of the demo's batch: 32 prompts x 8 samples, short answers."""
    engine = make_engine(folder, DEMO, num_rows=256, context=32)
    engine.load_weights(0, *make_weights(DEMO))
    dice = random.Random(2)
    prompts = [dice.choices(range(46), k=dice.randint(4, 9)) for _ in range(32)]
    workload = Workload(
        [prompt for prompt in prompts for _ in range(8)],
        [len(prompt) for prompt in prompts for _ in range(8)],
    )
    times = [cpu_seconds(lambda: run_engine(engine, workload)) for _ in range(repeats + 1)]
    return workload.num_useful / statistics.median(times[1:])


def make_engine(folder: Path, config: ModelConfig, num_rows: int, context: int) -> TorchEngine:
    """Make an engine by way of a config.json in `folder`."""
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return TorchEngine(folder, num_rows, context)


def measure(folder: Path, repeats: int) -> dict[str, float]:
    """Run every comparison once; see the module's docstring for the keys."""
    dice = random.Random(1)
    tail = [min(LONGEST, 1 + int(dice.expovariate(1 / MEAN_LENGTH))) for _ in range(256)]
    equal_load = make_workload(dice, [EQUAL_LENGTH] * NUM_ROWS)
    tail_load = make_workload(dice, tail)
    weights = make_weights(BENCHED)
    loop = StaticLoop(BENCHED, weights)
    engine = make_engine(folder, BENCHED, NUM_ROWS, PROMPT_LENGTH + LONGEST)
    engine.load_weights(0, *weights)
    check(engine, loop, equal_load)
    figures: dict[str, float] = {}
    for name, workload, turns in (
        ("", equal_load, repeats),
        ("_long_tail", tail_load, max(3, repeats // 3)),
    ):
        timing = compare(engine, loop, workload, turns)
        figures[f"ratio_to_static_loop{name}"] = timing.ratio
        for side, times in (("engine", timing.engine_s), ("static", timing.static_s)):
            rate = workload.num_useful / statistics.median(times)
            figures[f"{side}_tokens_per_cpu_s{name}"] = rate
    figures["demo_tokens_per_cpu_s"] = demo_rate(folder, repeats)
    return figures


def main() -> None:
    """Measure and print; the last line is JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--engines", default="torch,vllm")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    engines = options.engines.split(",")
    figures: dict[str, float] = {}
    if "torch" in engines:
        with tempfile.TemporaryDirectory() as folder:
            figures |= measure(Path(folder), options.repeats)
    if "vllm" in engines:
        if importlib.util.find_spec("vllm") is None:
            print(f"SKIP vllm: it is not installed: {CPU_INSTALL}")
        else:
            figures |= bare_vllm.measure(max(2, options.repeats // 2))
    for key, value in figures.items():
        print(f"{key:36} {value:12.2f}")
    if options.json:
        print(msgspec.json.encode(figures).decode())


if __name__ == "__main__":
    main()
