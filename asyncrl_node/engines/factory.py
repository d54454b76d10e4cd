"""Making the engine that a configuration asks for; heavy imports happen here, when needed."""

from __future__ import annotations

from asyncrl_node.config import Config
from asyncrl_node.dtype_rules import dtype_of
from asyncrl_node.engines.base import Engine
from asyncrl_node.plan import engine_of, max_rollout_tokens, model_folder
from asyncrl_node.sampling_rules import kv_after_update
from asyncrl_node.tasks.base import Task


def make_engine(config: Config, task: Task) -> Engine:
    """Make the engine. Raises: ConfigError for a model that it does not serve."""
    name = engine_of(config)
    if name == "fake":
        from asyncrl_node.engines.fake_engine import FakeEngine

        return FakeEngine(config.fake, config.seed)
    if name == "torch":
        import torch

        from asyncrl_node.engines.torch_engine import TorchEngine

        return TorchEngine(
            model_folder(config),
            max_rows=config.sampling.max_concurrent_rollouts,
            max_context=max_rollout_tokens(config, task),
            device="cuda" if config.gpus else "cpu",
            dtype=getattr(torch, dtype_of(config)),
        )
    from asyncrl_node.engines.vllm_engine import VllmEngine
    from asyncrl_node.engines.vllm_start import VllmSettings

    return VllmEngine(
        model_folder(config),
        VllmSettings(
            max_rows=config.sampling.max_concurrent_rollouts,
            max_context=max_rollout_tokens(config, task),
            cpu=not config.gpus,
            dtype=dtype_of(config),
            tensor_parallel=config.tensor_parallel or 1,
            kv_cache_memory_bytes=config.sampling.kv_cache_bytes if config.gpus else None,
            kv_after_update=kv_after_update(config.sampling, name, bool(config.gpus)),
        ),
    )
