"""The kernel `cuda_flash`: flash attention for Hopper, in the native library (sm90/flash.cuh, flash_backward.cuh,
flash_backward_pair.cuh)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import itemgetter

import torch
from torch import Tensor

from sdpa import philox
from sdpa.kernels.cuda.library import load_error
from sdpa.layout import empty_as, with_dense_rows
from sdpa.packing import unseen_lse
from sdpa.problem import (
    UNLIMITED,
    AttentionInputs,
    AttentionProblem,
    Gradients,
    Results,
    Tile,
    as_batch,
    read_of,
    refill_of,
)
from sdpa.sinks import sinks_grad

# What instances for bands know beside windows.
BAND = frozenset({"k_lengths", "q_lengths", "sinks", "softcap", "packed", "segments"})
BAND_FIELDS = ("q", "k", "v", "k_lengths", "q_lengths", "sinks", "cu_q", "cu_k")
GROUP_ROWS = 64  # of queries that four warps multiply
TILES: tuple[Tile, ...] = ()  # each head size has one, in the library


def unavailable() -> str | None:
    return load_error()


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None = None) -> Results:
    if is_empty(inputs, problem):
        return Results(empty_as(inputs.q, problem.Dv).zero_(), unseen_lse(inputs))
    if heads_are_rows(inputs.q, problem):
        few = inputs._replace(q=as_rows(inputs.q, problem.G))
        found = forward(few, problem._replace(H=problem.Hkv, M=few.q.shape[2]), tile)
        return Results(*(t.reshape(*inputs.q.shape[:3], *t.shape[3:]) for t in found))
    if is_banded(problem):
        beside = (inputs.k_lengths, inputs.q_lengths, sinks_of(inputs), inputs.softcap)
        if inputs.q_segments is not None:
            ids = (in_rows(inputs.q_segments), in_rows(inputs.k_segments))
            return Results(*operators()[2](*inputs[:7], *ids, *beside))
        return Results(*operators()[1](*inputs[:7], *beside, inputs.cu_q, inputs.cu_k, inputs.max_q, inputs.max_k))
    if inputs.rng is not None:
        dropout = (inputs.rng, philox.threshold(inputs.dropout_p))
        return Results(*operators()[4](*inputs[:4], problem.causal, problem.bottom_right, *dropout))
    return Results(*operators()[0](*inputs[:4], problem.causal, problem.bottom_right))


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None = None
) -> Gradients:
    if is_empty(inputs, problem):
        return empty_gradients(inputs, results, upstream)
    out, grad_out = with_dense_rows(results.out), with_dense_rows(upstream.out)
    given = (grad_out, *inputs[:3], out, results.lse.contiguous())
    grad_lse = None if upstream.lse is None else upstream.lse.contiguous()
    lengths, packed = (inputs.k_lengths, inputs.q_lengths), (inputs.cu_q, inputs.cu_k, inputs.max_q, inputs.max_k)
    has_sinks = inputs.sinks is not None
    rows = [None if t is None else in_rows(t) for t in (inputs.q_segments, inputs.k_segments, inputs.alibi)]
    dropout = () if inputs.rng is None else (inputs.rng, philox.threshold(inputs.dropout_p))
    asked = (inputs.softcap, *packed, has_sinks, problem.deterministic, *rows, *dropout)
    dq, dk, dv, delta = operators()[3](*given, grad_lse, *inputs[3:7], *lengths, *asked)
    return Gradients(dq, dk, dv, None, sinks_grad(inputs.sinks, given[-1], delta) if has_sinks else None)


def empty_gradients(inputs: AttentionInputs, results: Results, upstream: Results) -> Gradients:
    """Where there are no queries or no keys: zeros, but for sinks, of which the log-sum-exp consists."""
    dq, dk, dv = (empty_as(t, t.shape[3]).zero_() for t in inputs[:3])
    if inputs.sinks is None or results.lse is None or upstream.lse is None:
        return Gradients(dq, dk, dv, None, None if inputs.sinks is None else torch.zeros_like(inputs.sinks))
    return Gradients(dq, dk, dv, None, sinks_grad(inputs.sinks, results.lse, -upstream.lse))


def record(
    tensors: tuple, problem: AttentionProblem, tile: Tile | None
) -> tuple[Results | Gradients, Callable[..., Results | Gradients | None] | None]:
    """Like `forward` or `backward`, and what does it again for tensors of the same form (`read_of`, and what follows it
    in a backward): plain calls past all questions, others by the function itself."""
    inputs, *learning = tensors
    if learning:
        before, upstream = learning
        gradients = backward(inputs, before, upstream, problem, tile)
        return gradients, backward_again(inputs, before, upstream, problem)
    results = forward(inputs, problem, tile)
    if is_empty(inputs, problem):
        return results, None
    others = inputs.q_segments is not None or inputs.rng is not None or len(read_of(inputs)) < 3
    if others or heads_are_rows(inputs.q, problem):
        refill, count = refill_of(inputs), len(read_of(inputs))
        return results, lambda *given: forward(refill(given), problem, tile) if len(given) == count else None
    if is_banded(problem):
        return results, banded_again(inputs)
    plain, scale = operators()[0], inputs.scale
    causal, bottom_right = problem.causal, problem.bottom_right
    return results, lambda q, k, v: Results(*plain(q, k, v, scale, causal, bottom_right))


def banded_again(inputs: AttentionInputs) -> Callable[..., Results]:
    """What runs a call again whose operator is that for bands without segments."""
    run, band, softcap, sizes = operators()[1], inputs[3:7], inputs.softcap, (inputs.max_q, inputs.max_k)
    places = {id(tensor): place for place, tensor in enumerate(read_of(inputs))}
    # A tensor that is not there has the last place, which holds None.
    pick = itemgetter(*(places.get(id(getattr(inputs, name)), -1) for name in BAND_FIELDS))

    def again(*given: Tensor) -> Results:
        q, k, v, k_lengths, q_lengths, sinks, cu_q, cu_k = pick((*given, None))
        sinks = None if sinks is None else sinks.float().contiguous()
        q, k, v = as_batch(q), as_batch(k), as_batch(v)
        return Results(*run(q, k, v, *band, k_lengths, q_lengths, sinks, softcap, cu_q, cu_k, *sizes))

    return again


def backward_again(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem
) -> Callable[..., Gradients] | None:
    """What runs a backward again, given what it reads and then out, lse and the gradients of these, each in the order
    of memory that it has here."""
    if is_empty(inputs, problem):
        return None
    refill, count = refill_of(inputs), len(read_of(inputs))
    if count == 3 and is_plain(inputs, results, upstream):
        options = (*inputs[3:7], None, None, 0.0, None, None, 0, 0, False, problem.deterministic)
        run = operators()[3]

        def again(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *upstream: Tensor) -> Gradients:
            grad_out, grad_lse = (*upstream, None)[:2]
            dq, dk, dv, _ = run(grad_out, q, k, v, out, lse, grad_lse, *options)
            return Gradients(dq, dk, dv, None, None)

        return again

    def banded(*given: Tensor) -> Gradients:
        out, lse, grad_out, *grad_lse = given[count:]
        upstream = Results(grad_out, grad_lse[0] if grad_lse else None)
        return backward(refill(given[:count]), Results(out, lse), upstream, problem)

    return banded


def is_plain(inputs: AttentionInputs, results: Results, upstream: Results) -> bool:
    """Whether a backward reads no more of its inputs than q, k, v and the numbers of a band, and all as it is."""
    rows = (results.lse, *(() if upstream.lse is None else (upstream.lse,)))
    dense = results.out.stride(3) == upstream.out.stride(3) == 1 and all(t.is_contiguous() for t in rows)
    return dense and inputs.softcap == 0.0 and inputs.cu_q is None


def heads_are_rows(q: Tensor, problem: AttentionProblem) -> bool:
    """Whether the few queries of all heads of a group can stand in one block, which a group of 64 rows would else take
    for each: where no row's mask depends on its place, and one stride leads through the heads and their rows."""
    if problem.G == 1 or problem.M >= GROUP_ROWS or problem.features - {"gqa", "k_lengths", "lse"}:
        return False
    return problem.M == 1 or q.stride(1) == problem.M * q.stride(2)


def as_rows(q: Tensor, G: int) -> Tensor:
    """A view (B, Hkv, G * M, D) of (B, H, M, D)."""
    B, H, M, D = q.shape
    row = q.stride(1) if M == 1 else q.stride(2)
    return q.as_strided((B, H // G, G * M, D), (q.stride(0), G * q.stride(1), row, 1))


def is_empty(inputs: AttentionInputs, problem: AttentionProblem) -> bool:
    return not (problem.M and problem.N and inputs.q.numel() and inputs.k.numel())


def is_banded(problem: AttentionProblem) -> bool:
    """Whether it takes the operator for bands, which lengths alone leave to instances without."""
    return bool(problem.features & BAND) or problem.left != UNLIMITED or problem.right not in (UNLIMITED, 0)


def sinks_of(inputs: AttentionInputs) -> Tensor | None:
    return None if inputs.sinks is None else inputs.sinks.float().contiguous()


def in_rows(numbers: Tensor) -> Tensor:
    """Ids (B|1, positions) or slopes (B|1, H), those of a batch entry side by side."""
    return numbers if numbers.stride(1) == 1 else numbers.contiguous()


@cache
def operators() -> tuple[Callable[..., tuple[Tensor, ...]], ...]:
    """The bare operators: forwards without a band, with one and with segments, the backward, and forwards with dropout.
    They cost a third of calling them through their packets."""
    reason = load_error()
    if reason is not None:
        raise RuntimeError(f"cuda_flash is not available: {reason}")
    library = torch.ops.sdpa_cuda
    packets = (
        library.flash_forward,
        library.flash_forward_band,
        library.flash_forward_segments,
        library.flash_backward,
        library.flash_forward_dropout,
    )
    return tuple(packet.default._op for packet in packets)
