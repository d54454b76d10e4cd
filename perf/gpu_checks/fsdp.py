"""Checks 14 and A4: FSDP2's shards against what the program publishes. Has not run on a GPU.

The learner has no ranks yet. What can be checked without it is what it will rely on: that torch
cuts parameters as core/shards.py says, that our cast to bf16 gives the bits that FSDP2 gathers, and
that its gradients are those of one process.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from asyncrl_node.core.shards import shard_layout, shard_rows
from perf.gpu_checks.models import entries_of, qwen3
from perf.gpu_checks.outcome import Outcome, Session, judge
from perf.gpu_checks.peer import Peer, peer

if TYPE_CHECKING:
    from torch import Tensor

_MODEL = "toy_untied"
_NOT_BUILT = "torch's own FSDP2: the learner has one rank"


def compare_rank(rank: int, world: int, meet: str, device: str) -> tuple[int, float]:
    """Be one rank: count the bytes that differ from the gathered ones, and compare gradients.

    Returns the wrong bytes of this rank's rows, and the largest relative error of a gradient.
    `meet` is the path of a file by which the ranks find each other.
    """
    import torch.distributed as dist

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{meet}", rank=rank, world_size=world)
    try:
        return _wrong_bytes(rank, world, device), _gradient_error(rank, world, device)
    finally:
        dist.destroy_process_group()


def _model(device: str) -> Any:  # noqa: ANN401 - transformers has no types
    """The same random model in every process, in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = qwen3(_MODEL)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).to(device)


def _wrong_bytes(rank: int, world: int, device: str) -> int:
    """Publish this rank's rows as the learner does, gather them as FSDP2 does, compare."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from asyncrl_node.learner.weights import fill_flat

    model = _model(device)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    layout = shard_layout(entries_of(qwen3(_MODEL), "bfloat16", 2), world, rank)
    rows: dict[str, Tensor] = {n: p.to_local().detach() for n, p in model.named_parameters()}
    held = [entry for entry in layout.entries if entry.num_bytes]
    flat = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8, device=device)
    fill_flat(flat, tuple(held), [rows[entry.name] for entry in held])
    model.unshard()
    wrong = 0
    gathered: dict[str, Tensor] = dict(model.named_parameters())
    for entry in held:
        whole = gathered[entry.name].detach()
        here = shard_rows(whole.shape[0], world, rank)
        bits = whole[here.start : here.stop].contiguous().view(-1).view(torch.uint8)
        wrong += int((bits != flat[entry.offset : entry.offset + entry.num_bytes]).sum())
    model.reshard()
    return wrong


def _gradient_error(rank: int, world: int, device: str) -> float:
    """Largest relative error of a sharded gradient's rows, in float32."""
    import torch
    from torch.distributed.fsdp import fully_shard

    tokens = torch.arange(24, device=device).view(2, 12) * 7 % 200
    plain, sharded = _model(device), _model(device)
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    for model in (plain, sharded):
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    worst = 0.0
    for (_, one), (_, other) in zip(
        plain.named_parameters(), sharded.named_parameters(), strict=True
    ):
        here = shard_rows(one.shape[0], world, rank)
        expected, found = one.grad[here.start : here.stop], other.grad.to_local()
        if len(here):
            error = (found - expected).norm() / expected.norm().clamp(min=1e-12)
            worst = max(worst, float(error))
    return worst


def compare_ranks(session: Session, environments: Sequence[Mapping[str, str]]) -> Outcome:
    """Run one rank in each environment and judge them together."""
    meet = str(session.folder / f"ranks-{secrets.token_hex(4)}")
    with ExitStack() as stack:
        ranks: list[Peer] = [stack.enter_context(peer(each)) for each in environments]
        for rank, other in enumerate(ranks):
            other.start("shard_bits", rank, len(ranks), meet)
        found = [other.finish() for other in ranks]
    wrong, error = sum(each[0] for each in found), max(each[1] for each in found)
    value = f"{len(ranks)} ranks: {wrong} wrong bytes, gradients off by {error:.1e}"
    return judge(wrong == 0 and error <= 1e-6, value, _NOT_BUILT)._replace(exact=wrong == 0)


def check_one_rank(session: Session) -> Outcome:
    """One NCCL rank on one GPU."""
    return compare_ranks(session, [{}])
