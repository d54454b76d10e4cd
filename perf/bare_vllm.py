"""What of vLLM's speed is left behind a sampler process? Part of engine.py.

    sampler  admit -> messages -> rollouts -> AsyncLLM -> slots -> messages, all of it real
    bare     LLM.generate in a process of its own: nothing around it, and the engine inside it

Both have the same weights, prompts, seeds, settings, one compute thread, and take turns: while one
works the other waits. The clock is the wall's, from the first admission to the last completed
message, and around `generate`. The bare engine skips even vLLM's hop from process to process, which
the sampler needs (requests come and go while it decodes); so the ratio holds all that is ours and
that hop as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl_node.config import Config, PacingConfig, SamplingConfig  # noqa: E402
from asyncrl_node.core.order import mix, rollout_seed  # noqa: E402
from asyncrl_node.engines.torch_model import ModelConfig  # noqa: E402
from asyncrl_node.engines.vllm_start import vllm_environment  # noqa: E402
from perf.random_prompts import MOST_PROMPT, RandomPrompts  # noqa: E402
from perf.sampler_rig import (  # noqa: E402
    HUNDRED_MILLION,
    RANDOM_PROMPTS,
    TINY,
    SamplerRig,
    make_model,
    read_flat,
)


class Load(NamedTuple):
    """What is sampled in one turn, all of it at once."""

    num_groups: int
    group_size: int
    num_new: int
    """Tokens of every answer."""

    @property
    def num_rows(self) -> int:
        """Rollouts."""
        return self.num_groups * self.group_size


LOADS = {"": (HUNDRED_MILLION, Load(8, 4, 48)), "_tiny": (TINY, Load(32, 8, 16))}
"""By the end of the key: the model of the bar, and one of the demo's shape and batch."""


class Request(msgspec.Struct):
    """One prompt for the bare side."""

    tokens: list[int]
    seed: int


class Answer(msgspec.Struct):
    """What the bare side says after a turn."""

    seconds: float
    tokens: list[list[int]]


class Bare:
    """`LLM.generate` in a child process; a line of requests in, a line of answers out."""

    def __init__(self, folder: Path, load: Load) -> None:
        command = [sys.executable, str(Path(__file__)), "--bare", str(folder)]
        command += [str(load.num_rows), str(load.num_new)]
        environment = {**os.environ, **vllm_environment(True, -1)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._decoder = msgspec.json.Decoder(Answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def generate(self, requests: list[Request]) -> Answer:
        """Answer them all."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(requests) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"bare vLLM ended with exit code {self._process.wait()}")
        return self._decoder.decode(line)


def run_bare(folder: Path, num_rows: int, num_new: int) -> None:
    """Be the child of `Bare`. The settings are those of vllm_start.py, word for word."""
    out = sys.stdout
    sys.stdout = sys.stderr  # vLLM prints
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    context = MOST_PROMPT + num_new
    config = json.loads((folder / "config.json").read_bytes())
    per_token = 8 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    blocks = num_rows * (-(-context // 128) + 1) + 2
    llm = LLM(
        model=str(folder),
        runner="generate",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="float32",
        max_model_len=context,
        max_num_seqs=num_rows,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=max(16 << 20, per_token * blocks * 128),
        enforce_eager=True,
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(2048, context),
    )
    decoder = msgspec.json.Decoder(list[Request])
    for line in sys.stdin:
        requests = decoder.decode(line)
        prompts: Any = [{"prompt_token_ids": request.tokens} for request in requests]
        sampling = [
            SamplingParams(
                temperature=1.0,
                top_k=0,
                seed=request.seed,
                max_tokens=num_new,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for request in requests
        ]
        began_s = time.monotonic()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.monotonic() - began_s
        answer = Answer(seconds, [list(output.outputs[0].token_ids) for output in outputs])
        out.write(msgspec.json.encode(answer).decode() + "\n")
        out.flush()


def requests_of(task: RandomPrompts, problems: range, load: Load, seed: int) -> list[Request]:
    """Make the requests that the sampler's rollouts make, with their seeds."""
    return [
        Request(task.prompt(problem), mix(rollout_seed(seed + problem, rollout, 0), 0) >> 1)
        for problem in problems
        for rollout in range(load.group_size)
    ]


def compare(folder: Path, model: ModelConfig, load: Load, repeats: int) -> dict[str, float]:
    """Sample the same in turns, after one round that does not count; who begins alternates."""
    make_model(folder / "model", model)
    config = Config(
        run_dir=str(folder / "run"),
        task=RANDOM_PROMPTS,
        model=str(folder / "model"),
        engine="vllm",
        samplers=1,
        eval_problems=0,
        pacing=PacingConfig(groups_per_batch=load.num_groups, group_size=load.group_size),
        sampling=SamplingConfig(max_new_tokens=load.num_new, max_concurrent_rollouts=load.num_rows),
    )
    task = RandomPrompts(config.seed, folder / "model")
    sampler_s: list[float] = []
    bare_s: list[float] = []
    same: list[bool] = []
    manifest, flat = read_flat(folder / "model", model)
    with SamplerRig(config, manifest, flat) as rig, Bare(folder / "model", load) as bare:
        rig.start()
        for turn in range(repeats + 1):
            problems = range(turn * load.num_groups, (turn + 1) * load.num_groups)
            requests = requests_of(task, problems, load, config.seed)
            answer = bare.generate(requests) if turn % 2 else None
            began_s = time.monotonic()
            sampled = rig.collect(rig.admit(problems))
            answer = answer or bare.generate(requests)
            assert sampled.num_tokens == load.num_rows * load.num_new
            sampler_s.append(sampled.ended_s - began_s)
            bare_s.append(answer.seconds)
            whole = zip(requests, answer.tokens, sampled.rollouts, strict=True)
            same += [request.tokens + said == rollout for request, said, rollout in whole]
    num_tokens = load.num_rows * load.num_new
    pairs = list(zip(bare_s[1:], sampler_s[1:], strict=True))
    return {
        "ratio_to_bare_vllm": statistics.median(bare / sampler for bare, sampler in pairs),
        "sampler_tokens_per_s": num_tokens / statistics.median(sampler_s[1:]),
        "bare_vllm_tokens_per_s": num_tokens / statistics.median(bare_s[1:]),
        "same_answers_as_bare_vllm": sum(same) / len(same),
    }


def measure(repeats: int) -> dict[str, float]:
    """Compare on both models; see LOADS."""
    figures: dict[str, float] = {}
    for name, (model, load) in LOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = compare(Path(folder), model, load, repeats)
        figures |= {f"{key}{name}": value for key, value in found.items()}
    return figures


def main() -> None:
    """Be the child of `Bare`."""
    parser = argparse.ArgumentParser(description="the bare side of engine.py")
    parser.add_argument("--bare", nargs=3, required=True, metavar=("FOLDER", "ROWS", "NEW"))
    folder, num_rows, num_new = parser.parse_args().bare
    run_bare(Path(folder), int(num_rows), int(num_new))


if __name__ == "__main__":
    main()
