"""How far are sampler and learner apart under the same weights? Tokens are sampled by an engine and
scored again by the learner.

    python perf/parity.py --model FOLDER --engine torch|vllm --dtype float32|bfloat16 [--task TASK]

The prompts are those of the task; without one they are random tokens, and what follows them is as
unlikely as text gets.
Prints the difference of their log-probabilities over all sampled tokens (largest, 99.9th
percentile, mean; relative: divided by the log-probability where that is beyond 1), and over the
canary. The limits of asyncrl_node/dtype_rules.py come from here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl_node.config import LearnerConfig  # noqa: E402
from asyncrl_node.core.probe import make_probe  # noqa: E402
from asyncrl_node.dtype_rules import DType  # noqa: E402
from asyncrl_node.engines.base import (  # noqa: E402
    Engine,
    GenerateRequest,
    InProcessLoader,
    OwnProcessLoader,
)
from asyncrl_node.learner.trainer import Trainer  # noqa: E402
from asyncrl_node.messages import WeightsManifest  # noqa: E402
from asyncrl_node.tasks.base import Task  # noqa: E402
from asyncrl_node.tasks.registry import load_task  # noqa: E402
from asyncrl_node.transport.weights import SharedMemoryExport, layout_hash  # noqa: E402

CONTEXT = 120
NEW_TOKENS = 64
PROMPT_TOKENS = 16
ROWS = 16


def make_engine(name: str, folder: Path, dtype: DType) -> Engine:
    """Make an engine for `ROWS` sequences of `CONTEXT` tokens."""
    if name == "torch":
        from asyncrl_node.engines.torch_engine import TorchEngine

        return TorchEngine(folder, ROWS, CONTEXT, dtype=getattr(torch, dtype))
    from asyncrl_node.engines.vllm_engine import VllmEngine
    from asyncrl_node.engines.vllm_start import VllmSettings, vllm_environment

    os.environ.update(vllm_environment(cpu=True, core=-1))
    settings = VllmSettings(max_rows=ROWS, max_context=CONTEXT, cpu=True, dtype=dtype)
    return VllmEngine(folder, settings)


async def load(engine: Engine, trainer: Trainer, version: int) -> None:
    """Publish the trainer's weights as `version`, and load them."""
    entries, num_bytes = trainer.manifest()
    manifest = WeightsManifest(num_bytes, entries, layout_hash(entries))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "weights"
        export = SharedMemoryExport(path, manifest)
        with export.begin_write() as area:
            trainer.copy_weights_into(area)
            if isinstance(engine, InProcessLoader):
                engine.load_weights(version, entries, area)
        export.end_write(version)
        if isinstance(engine, OwnProcessLoader):
            engine.open_weights(manifest, path)
            await engine.copy_weights(version)
            await engine.use_weights(version)
        export.close()


def random_prompts(vocab_size: int, count: int) -> list[list[int]]:
    """Random tokens."""
    dice = random.Random(1)
    return [[dice.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def task_prompts(task: Task, count: int) -> list[list[int]]:
    """First prompts of a task."""
    return [await task.environment("train", index).reset() for index in range(count)]


async def compare(
    engine: Engine, trainer: Trainer, task: Task | None, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differences and |log-probabilities| [2, N] of what `count` requests sample; the canary's."""
    if task is None:
        prompts, new_tokens = random_prompts(trainer.vocab_size, count), NEW_TOKENS
        stops: tuple[int, ...] = ()
    else:
        new_tokens, stops = task.max_new_tokens, task.stop_token_ids
        prompts = await task_prompts(task, count)
    serving = asyncio.get_running_loop().create_task(engine.serve())
    await load(engine, trainer, 0)
    requests = [
        GenerateRequest(number, prompt, new_tokens, 1.0, number, stops)
        for number, prompt in enumerate(prompts)
    ]
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    differences = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ours = trainer.score(prompt + answer.tokens)[len(prompt) - 1 :]
        theirs = torch.tensor(answer.logprobs)
        differences.append(torch.stack([theirs - torch.tensor(ours), theirs]))
    probe = make_probe(trainer.vocab_size, CONTEXT - 1, 0.0, trainer.next_logprobs)
    assert probe is not None
    expected = torch.tensor(trainer.score(probe.tokens))
    canary = torch.tensor(await engine.score(probe.tokens)) - expected
    serving.cancel()
    return torch.cat(differences, 1).abs(), torch.stack([canary, expected]).abs()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--task", default="")
    options = parser.parse_args()
    trainer = Trainer(LearnerConfig(), options.model, 1.0, 0, dtype=options.dtype)
    engine = make_engine(options.engine, options.model, options.dtype)
    task = load_task(options.task, 0, options.model) if options.task else None
    tokens, canary = asyncio.run(compare(engine, trainer, task, options.rollouts))
    apart, per_nat = tokens[0], tokens[0] / tokens[1].clamp(min=1)
    what = [options.model.name, options.task or "random tokens", options.engine, options.dtype]
    print(
        f"{', '.join(what)}: {len(apart)} tokens, largest {apart.max():.2e}, 99.9 % "
        f"{apart.quantile(0.999):.2e}, mean {apart.mean():.2e}; per nat {per_nat.max():.2e}, mean "
        f"{per_nat.mean():.2e}; canary {canary[0].max():.2e}, least likely {-canary[1].max():.1f}"
    )
    engine.close()


if __name__ == "__main__":
    main()
