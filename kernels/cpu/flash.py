"""The kernel `cpu_flash`: fused attention, forward and backward, in the native library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sdpa.alignment import LOW_ADDRESS, has_memory
from sdpa.kernels.cpu.library import functions, load_error
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile, read_of, refill_of
from sdpa.repeated import BUILT, LibraryCall, Recording
from sdpa.torch_private import empty_strided_cpu, profiler_enabled

# The library's own choice, which depends on the instruction set, the direction and the threads; others gained at most
# 2 % on one thread of a Zen 4.
TILES = (Tile(768, 384),)

# Fields of AttentionInputs: those of a dense call, and the rest, which is passed by name where it is there. Of the last
# ones, of packed and paged calls, only the table of pages comes here.
DENSE = AttentionInputs._fields.index("allowed") + 1
FIRST_OPTION = AttentionInputs._fields.index("bias")
END = AttentionInputs._fields.index("cu_q")
OPTIONS = AttentionInputs._fields[FIRST_OPTION:END]
LSE_ROUNDING = 8192  # kLseRounding in backward.cpp


def unavailable() -> str | None:
    return load_error()


def needs_whole_rows(problem: AttentionProblem, lse: Tensor) -> bool:
    """Where a row's log-sum-exp is so large that the row is normalised anew (backward.cpp, is_coarse)."""
    largest = 1 / (LSE_ROUNDING * torch.finfo(lse.dtype).eps)
    return bool(((lse.abs() > largest) & lse.isfinite()).any())


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None = None) -> Results:
    if _is_dense(inputs, tile):
        return Results._make(_operator("flash_forward_dense")(*inputs[:DENSE]))
    return Results._make(_operator("flash_forward")(*inputs[:FIRST_OPTION], **_options(inputs, tile)))


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None = None
) -> Gradients:
    given = (upstream.out, inputs.q, inputs.k, inputs.v, results.out, results.lse)
    if _is_plain(problem, inputs, tile, upstream):
        return Gradients._make((*_operator("flash_backward_dense")(*given, *inputs[3:DENSE]), None, None))
    bias_grad, options = "bias_grad" in problem.features, _options(inputs, tile)
    dq, dk, dv, dbias, dsinks = _operator("flash_backward")(
        *given, *inputs[3:FIRST_OPTION], grad_lse=upstream.lse, bias_grad=bias_grad, **options
    )
    return Gradients(dq, dk, dv, dbias if bias_grad else None, None if inputs.sinks is None else dsinks)


def record(
    tensors: tuple, problem: AttentionProblem, tile: Tile | None
) -> tuple[Results | Gradients, Callable[..., tuple]]:
    """What `forward` or `backward` returns, and what does it again for tensors of the same form (`read_of`, and what
    follows it in a backward) without asking anything, in a plain tuple."""
    inputs, *learning = tensors
    results = (backward if learning else forward)(*tensors, problem, tile)
    if BUILT and "bias_grad" not in problem.features and (not learning or inputs.sinks is None):
        return results, _by_addresses(tensors, problem, tile, results)
    given = sum(isinstance(value, Tensor) for value in inputs)
    if learning and len(read_of(inputs)) == given:  # no tensor is in two places
        return results, _backward_again(inputs, problem, tile)
    return results, _refilling(tensors, problem, tile)


def _by_addresses(
    tensors: tuple, problem: AttentionProblem, tile: Tile | None, results: Results | Gradients
) -> Callable[..., Any]:
    """A forward, or a backward that gives the gradients of q, k and v alone, past torch's dispatcher, which takes 2 us
    longer."""
    inputs, *learning = tensors
    given, options = inputs[:FIRST_OPTION], _options(inputs, tile)
    made: Sequence[Any]
    finish: tuple[int, ...]
    if learning:
        (out, lse), upstream = learning
        made, finish, beside = results[:3], (0, 1, 2, -1, -1), 3 + (upstream.lse is not None)
        like: Any = dict(zip(("dq", "dk", "dv"), made, strict=True))
        address: Any = _operator("record_backward")(
            upstream.out, *given[:3], out, lse, *given[3:], grad_lse=upstream.lse, **options, **like
        )
    else:
        has_lse, beside = "lse" in problem.features and results[1] is not None, 0
        made, finish = (results[:2], (0, 1)) if has_lse else (results[:1], (0, -1))
        address = _operator("record_forward")(*given, **options, out=results[0], lse=has_lse)
    numbers: dict[int, int] = {}  # of the tensors that are given: one in two fields is given once
    places = [numbers.setdefault(id(value), len(numbers)) for value in inputs if isinstance(value, Tensor)]
    expected = len(numbers) + beside
    places += range(len(numbers), expected)
    run, forget = functions()
    recording = Recording(
        given=len(places),
        device=-1,
        forms=tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in made),
        empty=empty_strided_cpu,
        steps=((None, (run, address)),),
        finish=finish,
        watched=profiler_enabled,
        low=LOW_ADDRESS,
        check_memory=lambda tensors: all(map(has_memory, tensors)),
        unaligned=False,
    )
    recorded = LibraryCall(recording, address, forget)
    if len(places) == expected:
        return recorded
    return lambda *given: recorded(*[given[place] for place in places]) if len(given) == expected else None


def _backward_again(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None) -> Callable[..., Any]:
    """A backward that gives gradients of a bias or of sinks, too: the operator, whose options are put together once."""
    names = [name for name in OPTIONS if isinstance(getattr(inputs, name), Tensor)]
    numbers = {name: value for name, value in _options(inputs, tile).items() if name not in names}
    band, run_back, count = inputs[3:FIRST_OPTION], _operator("flash_backward"), len(names)
    bias_grad, sinks = "bias_grad" in problem.features, inputs.sinks is not None

    def again(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, grad_out, *upstream = rest[count:]
        masks = dict(zip(names, rest[:count], strict=True))
        grad_lse = upstream[0] if upstream else None
        dq, dk, dv, dbias, dsinks = run_back(
            grad_out, q, k, v, out, lse, *band, grad_lse=grad_lse, bias_grad=bias_grad, **masks, **numbers
        )
        return dq, dk, dv, dbias if bias_grad else None, dsinks if sinks else None

    return again


def _refilling(tensors: tuple, problem: AttentionProblem, tile: Tile | None) -> Callable[..., Results | Gradients]:
    """What runs a call of any kind again: the pass itself, with other tensors in the same places; None where there are
    more or fewer of them."""
    refill, count = refill_of(tensors[0]), len(read_of(tensors[0]))
    if len(tensors) == 1:
        return lambda *given: forward(refill(given), problem, tile) if len(given) == count else None

    expected = count + 3 + (tensors[2].lse is not None)

    def again(*given: Tensor) -> Gradients | None:
        if len(given) != expected:
            return None
        out, lse, grad_out, *grad_lse = given[count:]
        upstream = Results(grad_out, grad_lse[0] if grad_lse else None)
        return backward(refill(given), Results(out, lse), upstream, problem, tile)

    return again


def _is_dense(inputs: AttentionInputs, tile: Tile | None) -> bool:
    """Whether there is nothing but a band, a bias and a dense mask, in tiles of the usual size."""
    if tile is not None and tile is not TILES[0]:
        return False
    # Asked by identity: to compare a tensor with None takes 30 us.
    q_lengths, k_lengths, q_segments, _, prefix, alibi, sinks, softcap, dropout_p, _ = inputs[DENSE:END]
    absent = q_lengths is k_lengths is q_segments is prefix is alibi is sinks is None  # a paged call has lengths
    return absent and softcap == 0.0 and dropout_p == 0.0


def _is_plain(problem: AttentionProblem, inputs: AttentionInputs, tile: Tile | None, upstream: Results) -> bool:
    """Whether a backward is dense, starts from the output's gradient alone and gives none of the bias."""
    return "bias_grad" not in problem.features and upstream.lse is None and _is_dense(inputs, tile)


@cache
def _operator(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """The bare operator: a third of the cost of calling it through its packet."""
    reason = load_error()
    if reason is not None:
        raise RuntimeError(f"cpu_flash is not available: {reason}")
    return getattr(torch.ops.sdpa_cpu, name).default._op


def _options(inputs: AttentionInputs, tile: Tile | None) -> dict[str, Tensor | float | int]:
    """The optional arguments that are there, by name."""
    given = {name: value for name, value in zip(OPTIONS, inputs[FIRST_OPTION:END], strict=True) if value is not None}
    if inputs.block_table is not None:
        given["block_table"] = inputs.block_table
    if tile is not None and tile is not TILES[0]:
        given.update(block_m=tile.BLOCK_M, block_n=tile.BLOCK_N)
    return given
