"""All checks, in the order in which they run; the numbers are gpu.md's."""

from __future__ import annotations

from perf.gpu_checks import fsdp, host, ipc, kernels, learner, several, vllm, whole_run
from perf.gpu_checks.outcome import Check

CHECKS = (
    Check(
        "1",
        "ceilings: copy of 4 GiB, bf16 matmul",
        "4.3 TB/s, 770-800 TFLOP/s",
        ">= 3.5 TB/s, >= 650 TFLOP/s",
        kernels.check_ceilings,
    ),
    Check(
        "2",
        "raw IPC, two processes, patterns after open",
        "exact, open < 50 ms",
        "every byte, open <= 1 s",
        ipc.check_ipc_bytes,
    ),
    Check("3", "IPC copy rate / local copy rate", "1.0", ">= 0.95", ipc.check_ipc_rate),
    Check(
        "4",
        "virtual shards, assembled in module order",
        "bit-equal, 0.9 of a flat copy",
        "every byte, 8B >= 0.7, 0.6B >= 0.4",
        ipc.check_virtual_shards,
    ),
    Check(
        "5",
        "200 publications beside matmuls",
        "0 torn, nothing grows",
        "0 torn; GPU 2 MiB, RSS 10 MiB, files 0",
        ipc.check_publishing,
    ),
    Check("6", "negative controls", "both seen", "both seen", ipc.check_negative_controls),
    Check(
        "7",
        "SIGKILL of importers and of an exporter",
        "serves on, noticed, memory back",
        "3 of 3, <= 5 s, <= 64 MiB",
        ipc.check_kills,
    ),
    Check(
        "8",
        "expandable segments in the exporter",
        "raw works, torch memory refused",
        "both",
        ipc.check_expandable_segments,
    ),
    Check(
        "9",
        "pinned host memory, 2 GiB",
        "0.1 s/GB, 45-55 GB/s each way",
        "exact, >= 20 GB/s",
        host.check_pinned_host,
    ),
    Check(
        "11",
        "packed attention: 33 documents, 32k tokens",
        "fp32 numbers, no leak, fast",
        "2e-2, 2e-2, 0 leaks, >= 300 / 200 TFLOP/s",
        kernels.check_attention,
    ),
    Check(
        "12",
        "log-probability head, 16k x 152k",
        "<= 0.15 of naive, fp32 numbers",
        "<= 0.15, <= 5e-3",
        kernels.check_head,
    ),
    Check(
        "10",
        "fp32 -> bf16 publish cast, 1.7B",
        "3 ms, >= 0.6 of the copy rate",
        "exact, >= 0.40, matmul <= +15 %",
        kernels.check_cast,
    ),
    Check(
        "13",
        "learner step, 32,768 tokens",
        "60k / 28k tok/s, MFU 25-30 / 33-40 %",
        ">= 18 % / >= 28 %",
        learner.check_learner_step,
    ),
    Check(
        "14",
        "fully_shard, one rank: published bits, gradients",
        "equal",
        "every byte, 1e-6",
        fsdp.check_one_rank,
    ),
    Check(
        "15",
        "planner forecast against memory used",
        "within -5..+15 %",
        "-5..+15 %",
        learner.check_forecast,
    ),
    Check(
        "16",
        "parity: torch engine against learner",
        "5e-5 in fp32, 0.15 in bf16",
        "5e-5, 0.15",
        learner.check_parity,
    ),
    Check(
        "17",
        "20 RL steps on one GPU, verify",
        "ok, update <= 0.1 s",
        "ok, <= 0.1 s",
        whole_run.check_whole_run,
    ),
)

EXTRA_CHECKS = (
    Check(
        "A1", "peer mapping under masks", "all pairs exact", "every byte",
        several.check_masked_pairs, 2,
    ),
    Check("A2", "peer copy rate", "350 GB/s", ">= 250 GB/s", several.check_peer_rate, 2),
    Check(
        "A3", "fan-out to half of the GPUs", "as fast as one alone",
        "same hash, <= 1.5 x samplers / learners", several.check_fan_out, 2,
    ),
    Check(
        "A4", "FSDP2 with several NCCL ranks", "equal", "every byte, 1e-6", several.check_ranks, 2
    ),
    Check(
        "A5", "vLLM: graphs after an update", "5e-5 in fp32, 0.15 in bf16", "5e-5, 0.15",
        vllm.check_graphs, 1, True,
    ),
    Check("A6", "vLLM: tied head", "5e-5", "5e-5", vllm.check_tied_head, 1, True),
    Check("A7", "vLLM: two GPUs", "5e-5", "5e-5", vllm.check_tensor_parallel, 2, True),
    Check(
        "A8", "vLLM: price of recomputing the cache", "the forecast", "<= 3 x forecast",
        vllm.check_recompute_price, 1, True,
    ),
)  # fmt: skip
