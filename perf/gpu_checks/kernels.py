"""Checks 1, 10, 11 and 12: rates, the publish cast, attention, the head. Not run on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from perf.gpu_checks.measure import peak_bytes, rate, seconds
from perf.gpu_checks.models import document_lengths, entries_of, qwen3, starts_of
from perf.gpu_checks.outcome import GIB, Outcome, Session, judge

if TYPE_CHECKING:
    from torch import Tensor


# -- 1: ceilings ---------------------------------------------------------------------------------


def check_ceilings(session: Session) -> Outcome:
    """Measure a local copy and a matmul: what all other rates are held against."""
    import torch

    scale = session.scale
    source = torch.empty(scale.buffer_bytes, dtype=torch.uint8, device=session.on)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / seconds(lambda: target.copy_(source))
    side = scale.matmul_side
    a, b = (torch.randn(side, side, device=session.on, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * side**3 / seconds(lambda: torch.mm(a, b), 10)
    session.figures.update(copy_bytes_per_s=copied, matmul_flops=flops)
    value = f"{rate(copied)} read + written, {flops / 1e12:.0f} TFLOP/s"
    name = torch.cuda.get_device_name() if session.on == "cuda" else "a CPU"
    if "H200" not in name:
        return Outcome("SKIP", value, f"the limits are of an H200, this is {name}")
    return judge(copied >= 3.5e12 and flops >= 650e12, value)


# -- 10: the publish cast ------------------------------------------------------------------------


def check_cast(session: Session) -> Outcome:
    """Cast a model into the flat bf16 buffer by the learner's own `fill_flat`, alone and beside
    matmuls; compare the bits with plain casts."""
    import torch

    from asyncrl_node.learner.weights import fill_flat

    if "copy_bytes_per_s" not in session.figures:
        check_ceilings(session)
    entries = entries_of(qwen3(session.scale.cast_model), "bfloat16", 2)
    sources = [torch.randn(entry.shape, device=session.on) for entry in entries]
    num_bytes = entries[-1].offset + entries[-1].num_bytes
    flat = torch.zeros(num_bytes, dtype=torch.uint8, device=session.on)

    def cast() -> None:
        fill_flat(flat, entries, sources)

    cast_s = seconds(cast)
    exact = all(
        torch.equal(
            flat[entry.offset : entry.offset + entry.num_bytes],
            source.bfloat16().flatten().view(torch.uint8),
        )
        for entry, source in zip(entries, sources, strict=True)
    )
    share = 6 * sum(s.numel() for s in sources) / cast_s / session.figures["copy_bytes_per_s"]
    slower = _slowed(session, cast)
    value = f"{1e3 * cast_s:.1f} ms, {share:.2f} of the copy rate, matmuls {slower:+.1%}"
    passed = share >= 0.40 and slower <= 0.15
    return judge(exact and passed, value, "" if exact else "bits differ from a plain cast")


def _slowed(session: Session, cast: Callable[[], None]) -> float:
    """By what share matmuls take longer with the cast on a stream beside them; NaN on a CPU."""
    import torch

    side = session.scale.matmul_side
    matrix = torch.randn(side, side, device=session.on, dtype=torch.bfloat16)

    def matmuls() -> None:
        for _ in range(20):  # about 28 ms: the cast in front of them would be +11 %
            torch.mm(matrix, matrix)

    if session.on == "cpu":
        return math.nan
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def beside() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            cast()
        matmuls()
        torch.cuda.current_stream().wait_stream(stream)

    return seconds(beside) / seconds(matmuls) - 1


# -- 11: attention -------------------------------------------------------------------------------


def check_attention(session: Session) -> Outcome:
    """Compare packed attention with plain attention per document, and look for leaks."""
    import torch

    from asyncrl_node.learner.attention import packed_attention, plan_attention

    scale = session.scale
    lengths = document_lengths(scale.packed_tokens, 32, scale.longest_document)
    generator = torch.Generator(session.on).manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (1, heads, sum(lengths), 128)
        return torch.randn(shape, generator=generator, device=session.on, dtype=torch.bfloat16)

    inputs = [draw(heads).requires_grad_() for heads in (16, 8, 8)]
    plan = plan_attention(lengths, session.on)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(torch.nn.Module(), query, key, value, None, pack=plan)[0]

    output = forward(*inputs)
    upstream = torch.randn_like(output)
    grads = torch.autograd.grad(output, inputs, upstream)
    expected, expected_grads = attend_by_document(lengths, inputs, upstream)
    error = float((output.detach().float() - expected).abs().max())
    grad_error = max(
        float((g.float() - e).norm() / e.norm()) for g, e in zip(grads, expected_grads, strict=True)
    )
    leaks = leaking_documents(forward, lengths, [t.detach() for t in inputs])
    squares = 2 * 16 * 128 * sum(length**2 for length in lengths)
    forward_flops = squares / seconds(lambda: forward(*[t.detach() for t in inputs]))
    both_s = seconds(lambda: torch.autograd.grad(forward(*inputs), inputs, upstream))
    backward_flops = 2.5 * squares / max(1e-9, both_s - squares / forward_flops)
    value = (
        f"error {error:.1e}, gradients {grad_error:.1e}, {leaks} leaks, "
        f"{forward_flops / 1e12:.0f} / {backward_flops / 1e12:.0f} TFLOP/s"
    )
    fast = forward_flops >= 300e12 and backward_flops >= 200e12
    return judge(error <= 2e-2 and grad_error <= 2e-2 and not leaks and fast, value)


def attend_by_document(
    lengths: Sequence[int], inputs: Sequence[Tensor], upstream: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Plain causal attention in float32, one document at a time: [1, T, H, d] and gradients."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    parts = [torch.split(tensor, list(lengths), 2) for tensor in exact]
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for q, k, v in zip(*parts, strict=True)
    ]
    output = torch.cat(outputs, 2).transpose(1, 2)
    return output.detach(), list(torch.autograd.grad(output, exact, upstream.float()))


def leaking_documents(
    forward: Callable[..., Tensor], lengths: Sequence[int], inputs: Sequence[Tensor]
) -> int:
    """Change one token's key and value; count outputs before it, and of others, that move."""
    import torch

    plain = forward(*inputs)[0]
    starts = starts_of(lengths)
    leaks = 0
    for place in (0, 1):
        token = starts[place] + lengths[place] - 1
        query, key, value = inputs[0], inputs[1].clone(), inputs[2].clone()
        key[:, :, token] += 1.0
        value[:, :, token] += 1.0
        changed = forward(query, key, value)[0]
        moved = torch.nonzero((changed != plain).flatten(1).any(1)).flatten().tolist()
        leaks += sum(position != token for position in moved) + (token not in moved)
    return leaks


# -- 12: the head --------------------------------------------------------------------------------


def check_head(session: Session) -> Outcome:
    """Compare the chunked log-probability head with the plain one: memory, and float32 numbers.

    Chunks are what the learner takes; the time is told and not judged.
    """
    import torch

    from asyncrl_node.learner.logprobs import head_logprobs

    num, width, vocabulary = session.scale.head
    hidden = torch.randn(num, width, device=session.on).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, device=session.on) * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (num,), device=session.on)

    def chunked() -> Tensor:
        return head_logprobs(hidden, weight, targets, 1.0)[0]

    def naive() -> Tensor:
        logits = (hidden @ weight.T).float()
        return logits.log_softmax(1).gather(1, targets[:, None])[:, 0]

    def both_passes(score: Callable[[], Tensor]) -> None:
        torch.autograd.grad(score().sum(), (hidden, weight))

    peaks = [peak_bytes(session, partial(both_passes, score)) for score in (chunked, naive)]
    times_s = [seconds(partial(both_passes, score), 1) for score in (chunked, naive)]
    with torch.no_grad():
        pieces = zip(torch.split(hidden, 1024), torch.split(targets, 1024), strict=True)
        exact = torch.cat(
            [
                (rows.float() @ weight.float().T).log_softmax(1).gather(1, wanted[:, None])[:, 0]
                for rows, wanted in pieces
            ]
        )
        errors = (chunked() - exact).abs()
    ratio = peaks[0] / peaks[1]
    value = (
        f"peak {ratio:.3f} of naive ({peaks[1] / GIB:.1f} GiB), error {errors.mean():.1e}, "
        f"{times_s[0] / times_s[1]:.1f}x naive's time"
    )
    reason = f"the mean error; {errors.max():.1e} at most, the rounding of bf16 logits"
    return judge(ratio <= 0.15 and float(errors.mean()) <= 5e-3, value, reason)
