"""Checks A1 to A4: between GPUs, each process seeing its own alone. Has not run on a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from asyncrl_node.core.layout import layout_weights
from asyncrl_node.messages import WeightsManifest
from asyncrl_node.transport.cuda_ipc import shard_manifest
from perf.gpu_checks.fsdp import compare_ranks
from perf.gpu_checks.ipc import plain_buffer, require_ipc
from perf.gpu_checks.measure import rate
from perf.gpu_checks.models import manifest_of
from perf.gpu_checks.outcome import Outcome, Session, judge, judge_bytes
from perf.gpu_checks.peer import Peer, PeerFault, peer

NUM_PARAMETERS = 64
"""Of the made-up model that check A3 pulls."""


def each_gpu() -> list[dict[str, str]]:
    """Make, for every GPU that this process sees, the environment of one that sees it alone."""
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = hidden.split(",") if hidden else [str(number) for number in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": name.strip()} for name in names[:count]]


# -- A1: does every pair see each other's memory? ------------------------------------------------


def try_pair(exporter: Peer, importer: Peer, num_bytes: int) -> str:
    """Run the program's self-test from one process to another; what is wrong, or ""."""
    try:
        handle = exporter.call("offer_test", num_bytes)
        passed, words = importer.call(
            "self_test", handle, answer=lambda seed: exporter.call("write_test", seed)
        )
        exporter.call("end_test")
    except PeerFault as fault:
        return str(fault)
    return "" if passed else str(words)


def try_all_pairs(environments: Sequence[Mapping[str, str]], num_bytes: int) -> list[str]:
    """Test every ordered pair; in each round every process exports once, and another one imports
    once, so that links are used both ways at the same time. Returns what failed."""
    count, failed = len(environments), []
    with ExitStack() as stack, ThreadPoolExecutor(count) as threads:
        exporters = [stack.enter_context(peer(each)) for each in environments]
        importers = [stack.enter_context(peer(each)) for each in environments]
        for step in range(1, count):
            pairs = [(source, (source + step) % count) for source in range(count)]
            found = threads.map(
                lambda pair: try_pair(exporters[pair[0]], importers[pair[1]], num_bytes), pairs
            )
            failed += [
                f"{a} -> {b}: {why}" for (a, b), why in zip(pairs, found, strict=True) if why
            ]
    return failed


def check_masked_pairs(session: Session) -> Outcome:
    """Self-test every pair of GPUs, both ways."""
    require_ipc(session)
    environments = each_gpu()
    failed = try_all_pairs(environments, session.scale.self_test_bytes)
    num_pairs = len(environments) * (len(environments) - 1)
    return judge_bytes(
        not failed, True, f"{len(failed)} of {num_pairs} pairs failed", "; ".join(failed[:3])
    )


# -- A2, A3: how fast ----------------------------------------------------------------------------


def check_peer_rate(session: Session) -> Outcome:
    """Pull a large buffer from the first GPU into every other one, one at a time."""
    device, rates = require_ipc(session), []
    for environment in each_gpu()[1:]:
        with (
            peer(environment) as other,
            plain_buffer(device, session.scale.buffer_bytes) as (_, handle),
        ):
            other.call("map", handle)
            rates.append(session.scale.buffer_bytes / other.call("pull_s", 5))
            other.call("unmap", handle)
    slowest = min(rates)
    value = f"{rate(slowest)} to {rate(max(rates))}"
    return judge(slowest >= 250e9, value, "the limit is of NVLink 4 pairs")


def fan_out_model(num_bytes: int) -> WeightsManifest:
    """Lay out a made-up model whose parameters every rank holds rows of."""
    rows = max(8, num_bytes // NUM_PARAMETERS // 2048)
    specs = [
        (f"layer.{number}", "bfloat16", (rows, 1024), rows * 2048)
        for number in range(NUM_PARAMETERS)
    ]
    return manifest_of(layout_weights(specs)[0])


def fan_out(
    learners: Sequence[Mapping[str, str]], samplers: Sequence[Mapping[str, str]], num_bytes: int
) -> tuple[int, float, float]:
    """Have samplers pull a model from all learners, alone and at once, as vLLM's workers do.

    Returns how many hashes differ, the seconds of one sampler alone, and of the slowest at once.
    """
    manifest = fan_out_model(num_bytes)
    with ExitStack() as stack:
        exporters = [stack.enter_context(peer(each)) for each in learners]
        importers = [stack.enter_context(peer(each)) for each in samplers]
        handles = tuple(
            exporter.call(
                "export_weights", shard_manifest(manifest.entries, len(learners), rank), 1 + rank
            )
            for rank, exporter in enumerate(exporters)
        )
        digest, alone_s = importers[0].call("fetch", handles, manifest, 0, 0, 3)
        for number, importer in enumerate(importers):
            importer.start("fetch", handles, manifest, number, 0, 3)
        found = [importer.finish() for importer in importers]
    wrong = sum(other != digest for other, _ in found)
    return wrong, alone_s, max(seconds for _, seconds in found)


def check_fan_out(session: Session) -> Outcome:
    """Pull from the first half of the GPUs into the others, all at once, the ranks rotated.

    With as many learners as samplers nobody need wait for anybody; with S samplers and L learners a
    learner's way out is shared by S / L.
    """
    require_ipc(session)
    environments = each_gpu()
    half = max(1, len(environments) // 2)
    learners, samplers = environments[:half], environments[half:]
    wrong, alone_s, together_s = fan_out(learners, samplers, session.scale.buffer_bytes)
    share = max(1.0, len(samplers) / len(learners))
    value = (
        f"{len(learners)} to {len(samplers)}: {1e3 * alone_s:.0f} ms alone, {1e3 * together_s:.0f} "
        f"ms for the slowest at once, {wrong} hashes differ"
    )
    return judge_bytes(not wrong, together_s <= 1.5 * share * alone_s, value)


def check_ranks(session: Session) -> Outcome:
    """One NCCL rank on every GPU; 3 where there are that many: rows are cut unevenly then."""
    environments = each_gpu()
    return compare_ranks(session, environments[:3])
