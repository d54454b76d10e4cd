"""What the configuration's GPU keys become in an engine; no engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl_node.config import Config, SamplingConfig
from asyncrl_node.engines import torch_engine, vllm_engine, vllm_start
from asyncrl_node.engines.factory import make_engine
from asyncrl_node.engines.vllm_start import VllmSettings
from asyncrl_node.learner.process import make_trainer
from asyncrl_node.plan import WARM_MODEL, task_of
from tests.vllm_gate import need_vllm


class Recorder:
    """Stands where an engine would be made."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}

    def __call__(self, *arguments: Any, **keywords: Any) -> Recorder:
        self.arguments, self.keywords = arguments, keywords
        return self


def made(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, config: Config) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(module, name, recorder)
    made_engine: Any = make_engine(config, task_of(config))
    assert made_engine is recorder
    return recorder


def test_a_vllm_sampler_on_gpus_gets_its_width_and_its_cache(monkeypatch) -> None:
    sampling = SamplingConfig(kv_cache_bytes=123 << 20)
    config = Config(engine="vllm", gpus="5", tensor_parallel=2, sampling=sampling)
    settings = made(monkeypatch, vllm_engine, "VllmEngine", config).arguments[1]
    assert (settings.cpu, settings.tensor_parallel) == (False, 2)
    assert settings.kv_cache_memory_bytes == 123 << 20


def test_a_vllm_sampler_on_a_cpu_sizes_its_cache_itself(monkeypatch) -> None:
    config = Config(engine="vllm", sampling=SamplingConfig(kv_cache_bytes=123 << 20))
    settings = made(monkeypatch, vllm_engine, "VllmEngine", config).arguments[1]
    assert (settings.cpu, settings.tensor_parallel) == (True, 1)
    assert settings.kv_cache_memory_bytes is None


@pytest.mark.parametrize(
    ("gpus", "asked", "device", "dtype"),
    [
        ("", None, "cpu", "float32"),
        ("", "bfloat16", "cpu", "bfloat16"),
        ("2", None, "cuda", "bfloat16"),
        ("2", "float32", "cuda", "float32"),
    ],
)
def test_engines_and_the_trainer_follow_the_gpus_and_the_dtype(
    monkeypatch, gpus, asked, device, dtype
) -> None:
    vllm = Config(engine="vllm", gpus=gpus, dtype=asked)
    assert made(monkeypatch, vllm_engine, "VllmEngine", vllm).arguments[1].dtype == dtype
    config = Config(engine="torch", gpus=gpus, dtype=asked)
    given = made(monkeypatch, torch_engine, "TorchEngine", config).keywords
    assert (given["device"], given["dtype"]) == (device, getattr(torch, dtype))
    from asyncrl_node.learner import trainer

    recorder = Recorder()
    monkeypatch.setattr(trainer, "Trainer", recorder)
    assert make_trainer(config) is recorder
    assert recorder.arguments[-2:] == (device, dtype)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn of what they use themselves
def test_vllm_is_started_with_them(monkeypatch) -> None:
    need_vllm()
    from vllm.v1.engine.async_llm import AsyncLLM

    recorder = Recorder()
    monkeypatch.setattr(AsyncLLM, "from_engine_args", recorder)
    settings = VllmSettings(
        max_rows=4, max_context=64, cpu=False, tensor_parallel=2, kv_cache_memory_bytes=5 << 30
    )
    vllm_start.start(Path(WARM_MODEL), settings)
    (arguments,) = recorder.arguments
    assert arguments.tensor_parallel_size == 2
    assert arguments.kv_cache_memory_bytes == 5 << 30
    assert arguments.distributed_executor_backend is None, "vLLM's own choice on GPUs"
    assert arguments.hf_overrides == {"head_dtype": "float32"}
    assert not arguments.enforce_eager
