"""The kernel `cuda_flash`: flash attention for Hopper, in the native library (sm90/flash.cuh, flash_backward.cuh,
flash_backward_pair.cuh)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_uint64
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sdpa import philox
from sdpa.alignment import ADDRESS_BITS, LOW_ADDRESS, has_memory
from sdpa.kernels.cuda.library import functions, load_error
from sdpa.layout import empty_as, with_dense_rows
from sdpa.packing import unseen_lse
from sdpa.problem import (
    UNLIMITED,
    AttentionInputs,
    AttentionProblem,
    Gradients,
    Results,
    Tile,
    read_of,
    refill_of,
)
from sdpa.repeated import BUILT, LibraryCall, Recording
from sdpa.sinks import sinks_grad
from sdpa.torch_private import current_stream, empty_strided_cuda, profiler_enabled

# What instances for bands know beside windows.
BAND = frozenset({"k_lengths", "q_lengths", "sinks", "softcap", "packed", "segments"})
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
    dropped = 0 if inputs.rng is None else philox.threshold(inputs.dropout_p)
    asked = (inputs.softcap, *packed, has_sinks, problem.deterministic, *rows, inputs.rng, dropped, inputs.bias)
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
) -> tuple[Results | Gradients, Callable[..., Results | Gradients | tuple | None] | None]:
    """Like `forward` or `backward`, and what does it again for tensors of the same form (`read_of`, and what follows it
    in a backward): by their addresses, or by the function itself where the library was given copies."""
    inputs, *learning = tensors
    run: Callable[..., Any] = backward if learning else forward
    if is_empty(inputs, problem):
        return run(*tensors, problem, tile), None
    given = read_of(*tensors)
    results, again = by_addresses(tensors, given, problem, tile)
    return results, again if again is not None else refilled(inputs, len(given), problem, tile)


def by_addresses(
    tensors: tuple, given: Sequence[Tensor], problem: AttentionProblem, tile: Tile | None
) -> tuple[Results | Gradients, LibraryCall | None]:
    """The results, and the call as the library recorded it; None where that reads others than those given, two of these
    begin at one address, or another device is the current one."""
    inputs, *learning = tensors
    run: Callable[..., Any] = backward if learning else forward
    able = BUILT and current_stream is not None and load_error() is None and not (learning and inputs.sinks is not None)
    if not able or torch.cuda.current_device() != inputs.q.get_device():
        return run(*tensors, problem, tile), None
    library = functions()
    library.record()
    try:
        results = run(*tensors, problem, tile)
    except BaseException:  # an interruption, too, ends the recording
        library.recorded(None, 0)
        raise
    made = results[: 3 if learning else 2]
    addresses = [tensor.data_ptr() for tensor in (*given, *made)]
    address = library.recorded((c_uint64 * len(addresses))(*addresses), len(addresses))
    if not address:
        return results, None
    recording = Recording(
        given=len(given),
        device=inputs.q.get_device(),
        forms=tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in made),
        empty=empty_strided_cuda,
        steps=((None, (library.run, address)),),
        finish=(0, 1, 2, -1, -1) if learning else (0, 1),
        watched=profiler_enabled,
        low=LOW_ADDRESS,
        check_memory=lambda tensors: all(map(has_memory, tensors)),
        unaligned=tuple(address & ADDRESS_BITS != 0 for address in addresses),
        stream_of=current_stream,
    )
    again = LibraryCall(recording, address, library.forget)
    return results, again if len(set(addresses)) == len(addresses) else None


def refilled(
    inputs: AttentionInputs, count: int, problem: AttentionProblem, tile: Tile | None
) -> Callable[..., Results | Gradients | None]:
    """What runs a call of so many tensors again by the function itself, in the form that these inputs have."""
    refill, read = refill_of(inputs), len(read_of(inputs))

    def again(*given: Tensor) -> Results | Gradients | None:
        if len(given) != count:
            return None
        if count == read:
            return forward(refill(given), problem, tile)
        out, lse, grad_out, *grad_lse = given[read:]
        upstream = Results(grad_out, grad_lse[0] if grad_lse else None)
        return backward(refill(given[:read]), Results(out, lse), upstream, problem, tile)

    return again


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
