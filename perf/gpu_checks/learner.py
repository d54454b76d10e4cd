"""Checks 13, 15 and 16: the learner's step, its memory, and parity. Has not run on a GPU."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncrl_node.config import LearnerConfig
from asyncrl_node.core.memory import learner_parts
from asyncrl_node.dtype_rules import DType
from asyncrl_node.messages import GroupKey
from perf.gpu_checks.measure import PEAK_FLOPS, peak_bytes
from perf.gpu_checks.models import make_groups, memory_shape, write_random_model
from perf.gpu_checks.outcome import GIB, Outcome, Session, judge

if TYPE_CHECKING:
    from asyncrl_node.core.rollout import TrajectoryGroup

DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
LARGEST: dict[DType, float] = {"float32": 5e-5, "bfloat16": 0.15}
"""How far one token of these small models may be; the trainer's own gate is wider in bfloat16."""


class Step(NamedTuple):
    """What one model's learner did."""

    tokens_per_s: float
    mfu: float
    """Causal attention, without recomputation, of the bf16 peak."""


def step_seconds(
    config: LearnerConfig,
    model_dir: Path,
    device: str,
    groups: list[TrajectoryGroup],
    num_steps: int = 2,
) -> float:
    """Seconds of one optimizer step of the program's learner in bf16, without the publication."""
    from asyncrl_node.learner.trainer import Trainer

    trainer = Trainer(config, model_dir, 1.0, 0, device, "bfloat16")
    times = []
    for step in range(1 + num_steps):
        start = time.perf_counter()
        trainer.accumulate(groups, 1 + step)  # the log-probabilities are of no version
        trainer.update()
        trainer.finish_step()  # reads numbers back, so the GPU is done
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure_step(session: Session, size: str) -> Step:
    """Time the learner on one model, and note its memory beside the forecast of it."""
    scale = session.scale
    model_dir = write_random_model(size, session.folder, session.on)
    shape = memory_shape(model_dir)
    length = scale.rollout_tokens
    num_groups = max(1, scale.packed_tokens // (8 * length))
    groups = make_groups(num_groups, length, shape.vocab, -math.log(shape.vocab))
    config = LearnerConfig(micro_batch_tokens=scale.micro_batch_tokens)
    took_s: list[float] = []
    most = peak_bytes(
        session, lambda: took_s.append(step_seconds(config, model_dir, session.on, groups))
    )
    parts = learner_parts(shape, 1, scale.micro_batch_tokens, build="present")
    forecast = parts.total - parts.fixed - parts.published  # neither is torch's, or there
    session.learner_bytes[size] = (most, forecast)
    tokens_per_s = num_groups * 8 * length / took_s[0]
    heads = shape.layers * shape.heads * shape.head_dim
    mfu = (6 * shape.parameters + 6 * heads * length) * tokens_per_s / PEAK_FLOPS
    return Step(tokens_per_s, mfu)


def check_learner_step(session: Session) -> Outcome:
    """Time a whole optimizer step on 32,768 tokens, in bf16 from float32 masters."""
    values, passed = [], True
    for size, limit in session.scale.learner_models:
        step = measure_step(session, size)
        session.figures["mfu"] = step.mfu
        passed &= step.mfu >= limit
        values.append(f"{size} {step.tokens_per_s:,.0f} tok/s, MFU {step.mfu:.1%}")
    tokens = session.scale.micro_batch_tokens
    reason = f"passes of {tokens} tokens, nothing recomputed; publication not included"
    return judge(passed, "; ".join(values), reason, mfu=session.figures["mfu"])


def forecast_error(most: float, forecast: float) -> float:
    """By what share the forecast is above (+) or below (-) what was allocated at most."""
    return forecast / most - 1


def check_forecast(session: Session) -> Outcome:
    """Hold the planner's forecast of the learner's memory against what check 13 allocated."""
    for size, _ in session.scale.learner_models:
        if size not in session.learner_bytes:
            measure_step(session, size)
    values, passed = [], True
    for size, (most, forecast) in session.learner_bytes.items():
        error = forecast_error(most, forecast)
        passed &= -0.05 <= error <= 0.15
        sizes = f"{forecast / GIB:.1f} of {most / GIB:.1f} GiB"
        values.append(f"{size} {error:+.1%} ({sizes})")
    reason = "of torch's own memory: context and published copy are left out on both sides"
    return judge(passed, "; ".join(values), reason)


# -- 16: parity ----------------------------------------------------------------------------------


class Parity(NamedTuple):
    """Learner against sampler, over the sampled tokens."""

    num_tokens: int
    max_difference: float
    """Natural log of the largest learner / sampler probability ratio."""
    rms_difference: float
    """From the k3 estimate: r - 1 - log r is half the squared difference of log-probabilities."""


def parity(model_dir: Path, device: str, dtype: DType, num_requests: int, num_new: int) -> Parity:
    """Sample with the torch engine at T = 0.7, score with the learner, on the same weights.

    Raises: RunFault("parity") by the learner's own gate, which judges every difference.
    """
    import torch

    from asyncrl_node.engines.base import Completion, GenerateRequest
    from asyncrl_node.engines.torch_engine import TorchEngine
    from asyncrl_node.learner.trainer import Trainer
    from asyncrl_node.sampler.rollouts import Rollout, build_group

    trainer = Trainer(LearnerConfig(), model_dir, 0.7, 0, device, dtype)
    entries, num_bytes = trainer.manifest()
    weights = memoryview(bytearray(num_bytes))
    trainer.copy_weights_into(weights)
    engine = TorchEngine(model_dir, num_requests, 8 + num_new, device, getattr(torch, dtype))
    engine.load_weights(0, entries, weights.toreadonly())
    rollouts: list[Rollout] = []

    def submit(number: int) -> None:
        rollout = Rollout()
        rollout.add_prompt([(number + place) % 40 for place in range(8)])
        rollout.reward = float(number % 2)
        rollouts.append(rollout)

        def done(completion: Completion) -> None:
            rollout.add_completion(completion)

        engine.submit(GenerateRequest(number, rollout.tokens[:], num_new, 0.7, number), done)

    for number in range(num_requests):
        submit(number)
    while engine.step():
        pass
    trainer.accumulate([build_group(GroupKey(0, 0), 0, 0, rollouts)], 0)
    trainer.update()
    metrics = trainer.finish_step()
    engine.close()
    return Parity(
        int(metrics["tokens/trained"]),
        math.log(metrics["ratio/max"]),
        math.sqrt(2 * max(0.0, metrics["mismatch/kl_same_version"])),
    )


def check_parity(session: Session) -> Outcome:
    """Score what the torch engine sampled, in float32 (TF32 off) and in bf16."""
    import torch

    assert torch.get_float32_matmul_precision() == "highest"
    size, num_requests, num_new = session.scale.parity
    model_dir = write_random_model(size, session.folder, session.on)
    values, passed = [], True
    for dtype in DTYPES:
        found = parity(model_dir, session.on, dtype, num_requests, num_new)
        passed &= abs(found.max_difference) <= LARGEST[dtype]
        values.append(
            f"{dtype}, {found.num_tokens} tokens: ratio up to exp({found.max_difference:.1e}), "
            f"rms {found.rms_difference:.1e}"
        )
    return judge(passed, "; ".join(values), "the mean is judged by the learner's own gate")
