"""Checks A5 to A8: vLLM with weights that move. Has not run on a GPU; the probe has on a CPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from asyncrl_node.core.memory import kv_bytes_per_token
from asyncrl_node.core.placement import Split, Workload, recompute_price, speed_of
from asyncrl_node.dtype_rules import DType
from asyncrl_node.engines.vllm_start import vllm_environment
from asyncrl_node.errors import RunFault
from perf.gpu_checks.learner import DTYPES, LARGEST
from perf.gpu_checks.models import memory_shape, write_random_model
from perf.gpu_checks.outcome import Outcome, Session, judge, judge_bytes
from perf.gpu_checks.vllm_probe import Found, Order

ROOT = Path(__file__).resolve().parents[2]
_WITHIN_S = 240.0


def probe(order: Order) -> Found:
    """Run vllm_probe.py. Raises: RunFault."""
    with tempfile.TemporaryDirectory() as sockets:
        environment = os.environ | vllm_environment(order.on == "cpu", -1, sockets)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        )
        done = subprocess.run(
            [sys.executable, "-m", "perf.gpu_checks.vllm_probe", msgspec.json.encode(order)],
            capture_output=True,
            env=environment,
            timeout=_WITHIN_S,
            check=False,
        )
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise RunFault("vllm_probe", f"exit code {done.returncode}: {' | '.join(words)}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Found)


def probe_model(
    session: Session, size: str, dtype: DType = "float32", tensor_parallel: int = 1
) -> Found:
    """Compare vLLM with the learner on one model."""
    model_dir = write_random_model(size, session.folder, session.on)
    order = Order("exact", str(model_dir), session.on, dtype, tensor_parallel)  # type: ignore[arg-type]
    if session.on == "cuda":
        order.kv_cache_bytes = 1 << 30
    return probe(order)


def judge_exact(found: dict[str, Found], dtype: DType = "float32") -> Outcome:
    """Both versions are the learner's, token by token, and the second is another than the first."""
    values, passed = [], True
    limit = LARGEST[dtype]
    for name, each in found.items():
        largest = max([*each.differences, *each.scored])
        passed &= each.same_hash and largest <= limit and each.moved > 4 * limit
        values.append(
            f"{name} {largest:.1e} off at most, by {each.way}"
            f"{'' if each.same_hash else ', HASH DIFFERS'}; the update moved {each.moved:.1e}"
        )
    exact = all(each.same_hash for each in found.values())
    return judge(passed, "; ".join(values))._replace(exact=exact)


def check_graphs(session: Session) -> Outcome:
    """Decode by captured graphs after an update: stale graphs would read the old weights."""
    outcomes = [
        judge_exact({f"untied, {dtype}": probe_model(session, "toy_untied", dtype)}, dtype)
        for dtype in DTYPES
    ]
    exact = all(outcome.exact for outcome in outcomes)
    passed = all(outcome.status == "PASS" for outcome in outcomes)
    return judge_bytes(exact, passed, "; ".join(outcome.value for outcome in outcomes))


def check_tied_head(session: Session) -> Outcome:
    """The head that is the embedding: nothing is loaded for it."""
    return judge_exact({"tied": probe_model(session, "toy")})


def check_tensor_parallel(session: Session) -> Outcome:
    """Every rank of two takes its slice of full tensors."""
    return judge_exact({"2 GPUs, tied": probe_model(session, "toy", "float32", 2)})


def forecast_s(model_dir: Path, order: Order, gpu_name: str) -> float:
    """The planner's forecast of one recomputation, for what the probe samples."""
    shape = memory_shape(model_dir)
    context = order.prompt_tokens + order.new_tokens
    work = Workload(
        context_tokens=context,
        prompt_tokens=order.prompt_tokens,
        max_concurrent_rollouts=order.num_requests,
        build="present",
    )
    cache = order.kv_cache_bytes or math.inf
    tokens = int(min(1e9, cache / kv_bytes_per_token(shape, "present")))
    split = Split(1, 1, 1, 0, 0.0, tokens, 1.0, 1.0, ())
    return recompute_price(shape, split, work, order.num_requests, speed_of(gpu_name)).seconds


def check_recompute_price(session: Session) -> Outcome:
    """Time one update in the middle of 64 requests of 2,048 tokens: what recomputing adds, what
    keeping adds, and the forecast, which is of bf16 at half the peak."""
    import torch

    model_dir = write_random_model("0.6B", session.folder, session.on)
    order = Order(
        "price", str(model_dir), "cuda", "bfloat16", 1, "recompute", 64, 2048, 256, 40 << 30
    )
    recomputed = probe(order)
    kept = probe(msgspec.structs.replace(order, kv_after_update="keep"))
    forecast = forecast_s(model_dir, order, torch.cuda.get_device_name())
    added = [each.updated_s - each.plain_s for each in (recomputed, kept)]
    value = (
        f"recompute +{added[0]:.2f} s for {recomputed.resident_tokens} tokens (forecast "
        f"{forecast:.2f} s), keep +{added[1]:.2f} s; stood still {recomputed.stall_s:.2f} and "
        f"{kept.stall_s:.2f} s"
    )
    passed = added[0] <= 3 * max(forecast, 0.1) + kept.stall_s
    return judge(passed, value, f"weights came by {recomputed.way}")
