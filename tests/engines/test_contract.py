"""The contract of contract.py on the engines that live in the sampler's process.

tests/engines/test_vllm_engine.py runs it on vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from asyncrl_node.config import FakeConfig
from asyncrl_node.core.layout import layout_weights
from asyncrl_node.engines.base import Engine, InProcessLoader
from asyncrl_node.engines.fake_engine import WEIGHT_NAME, FakeEngine
from asyncrl_node.engines.torch_engine import TorchEngine
from tests.engines.contract import CHECKS, Check
from tests.engines.test_torch_engine import CONFIGS, flatten, make_model

LoadVersion = Callable[[int], None]


def fake(folder: Path) -> tuple[Engine, LoadVersion]:
    (folder / "latencies.json").write_text("[0.3]")
    config = FakeConfig(weight_bytes=64, latencies=str(folder / "latencies.json"))
    engine = FakeEngine(config, seed=0)
    entries, _ = layout_weights([(WEIGHT_NAME, "uint8", (64,), 64)])

    def load(version: int) -> None:
        engine.load_weights(version, entries, memoryview(bytes([version]) * 64))

    return engine, load


def torch(folder: Path) -> tuple[Engine, LoadVersion]:
    config = CONFIGS["qwen3_tied"]()
    config.save_pretrained(folder)
    engine = TorchEngine(folder, max_rows=4, max_context=120)

    def load(version: int) -> None:
        engine.load_weights(version, *flatten(make_model(config, version)))

    return engine, load


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", [fake, torch])
def test_contract(
    make: Callable[[Path], tuple[Engine, LoadVersion]], check: Check, tmp_path: Path
) -> None:
    async def run() -> None:
        engine, load_version = make(tmp_path)
        assert isinstance(engine, InProcessLoader)
        assert engine.policy_version == -1

        async def load() -> int:
            version = engine.policy_version + 1
            load_version(version)
            return version

        await load()
        serving = asyncio.create_task(engine.serve())
        await asyncio.wait_for(check(cast(Engine, engine), load), 30)
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()
        engine.close()

    asyncio.run(run())
