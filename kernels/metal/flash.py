"""The kernel `metal_flash`: fused attention, forward, backward and weights, on Apple GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sdpa import packing
from sdpa.kernels.metal.arguments import VECTOR, dense_of, readable, rows_of
from sdpa.kernels.metal.launch import Dispatch, Tensors, Work, dispatches_of, run
from sdpa.kernels.metal.source import FRAGMENT, MOST_ROWS, ROWS_OF_COMBINE, Tiles, fitting
from sdpa.layout import empty_as, with_dense_rows
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile, read_of, refill_of
from sdpa.sinks import sinks_grad

FEWEST_KEYS_OF_SPLIT = 128  # fewer are not worth a second pass over their results
ENOUGH_SIMDGROUPS = 1024  # some for each core of the largest GPU, which has 80
# No table was measured; `tiles` lists those that a problem can have.
TILES: tuple[Tile, ...] = ()

Again = Callable[..., Any]


@cache
def unavailable() -> str | None:
    if not hasattr(torch, "mps") or not hasattr(torch.mps, "compile_shader"):
        return f"torch {torch.__version__} has no torch.mps.compile_shader"
    if not torch.backends.mps.is_available():
        return "this machine has no GPU that torch's MPS backend can use"
    return None


def needs_whole_rows(problem: AttentionProblem, lse: Tensor) -> bool:
    """Rows with a large log-sum-exp are normalised anew (`may_be_coarse`)."""
    return bool(problem.features & {"bias", "alibi"})


def tiles(problem: AttentionProblem) -> tuple[Tile, ...]:
    """The tiles that fit threadgroup memory, the default first. The backward's second kernel has tiles of its own."""
    name = {"forward": "forward", "backward": "backward_q", "weights": "weights"}[problem.direction]
    rows = row_count(problem) if name == "forward" else problem.M
    found = fitting(name, problem.dtype, problem.D, problem.Dv, rows)
    return tuple(Tile(t.BLOCK_M, t.BLOCK_N) for t in found)


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None = None) -> Results:
    return forward_pass(readable(inputs), problem, tile)[0]


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None = None
) -> Gradients:
    return backward_pass(readable(inputs), results, upstream, problem, tile)[0]


def weights(inputs: AttentionInputs, lse: Tensor, problem: AttentionProblem, tile: Tile | None = None) -> Tensor:
    """(B, H, M, N) after dropout in the query's dtype, or (B, M, N), their mean over heads, where that is asked for."""
    return weights_pass(readable(inputs), lse, problem, tile)[0]


def record(tensors: tuple, problem: AttentionProblem, tile: Tile | None) -> tuple[Any, Again]:
    """What a pass returns, and what does it again for tensors of the same form without choosing anything."""
    make, prepare = PASSES[problem.direction]
    inputs, *rest = tensors
    result, dispatches = make(readable(inputs), *rest, problem, tile)
    refill, count = refill_of(inputs), len(read_of(inputs))

    def again(*given: Tensor) -> Any:
        own, others = readable(refill(given[:count])), regrouped(problem, given[count:])
        made, found = prepare(own, *others, problem)
        if not all(fits(dispatch, made) for dispatch in dispatches):
            return None
        run(dispatches, made)
        return found()

    return result, again


def regrouped(problem: AttentionProblem, rest: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """What follows the inputs of a pass, as its function takes it."""
    if problem.direction != "backward":
        return rest
    out, lse, grad_out, *grad_lse = rest
    return Results(out, lse), Results(grad_out, grad_lse[0] if grad_lse else None)


def fits(dispatch: Dispatch, tensors: Tensors) -> bool:
    """Whether tensors begin where a dispatch that loads several elements together may read them."""
    rows = (tensors.get(name) for name in ("q", "k", "v", "grad_out"))
    return dispatch.vector == 1 or all(t is None or t.storage_offset() % VECTOR == 0 for t in rows)


# -- forward ---------------------------------------------------------------------------------------------------------


def is_grouped(problem: AttentionProblem) -> bool:
    """Whether a threadgroup's rows are those of all heads of a group, so that keys and values are read once for up to
    MOST_ROWS of them."""
    return problem.G > 1 and problem.M <= MOST_ROWS


def splits_of(problem: AttentionProblem, simdgroups: int) -> int:
    """Into how many parts the keys are split."""
    if "packed" in problem.features:
        return 1
    wanted = -(-ENOUGH_SIMDGROUPS // max(1, simdgroups))
    return max(1, min(wanted, problem.N // FEWEST_KEYS_OF_SPLIT))


def forward_tensors(inputs: AttentionInputs, problem: AttentionProblem) -> tuple[Tensors, Callable[[], Results]]:
    """The tensors of a forward by name, and its results once they are there."""
    q, wanted = inputs.q, "lse" in problem.features
    out = empty_as(q, inputs.v.shape[3])
    if inputs.cu_q is not None:  # rows of no document are written by nobody
        out.zero_()
    lse = None
    if wanted:
        packed = inputs.cu_q is not None
        lse = packing.unseen_lse(inputs) if packed else q.new_empty(q.shape[:3], dtype=torch.float32)
    unread = q.new_empty(1, dtype=torch.float32)
    tensors = inputs._asdict() | {"out": out, "lse": unread if lse is None else lse}
    rows, heads = -(-row_count(problem) // FRAGMENT), problem.Hkv if is_grouped(problem) else problem.H
    splits = splits_of(problem, rows * heads * problem.B)
    if splits > 1:
        tensors["parts"] = q.new_empty((splits, *out.shape), dtype=torch.float32)
        tensors["part_state"] = q.new_empty((splits, *q.shape[:3], 2), dtype=torch.float32)  # a maximum and a sum
    return tensors, lambda: Results(out, lse)


def row_count(problem: AttentionProblem) -> int:
    return problem.G * problem.M if is_grouped(problem) else problem.M


def forward_pass(
    inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None
) -> tuple[Results, list[Dispatch]]:
    p, grouped = problem, is_grouped(problem)
    tensors, results = forward_tensors(inputs, p)
    size = chosen("forward", p, row_count(p), tile)
    grid = (-(-row_count(p) // size.BLOCK_M), p.Hkv if grouped else p.H, p.B)
    flags = frozenset({"WITH_LSE"} if "lse" in p.features else ()) | frozenset({"GROUPED"} if grouped else ())
    out, parts = tensors["out"], tensors.get("parts")
    assert out is not None
    if parts is None:
        work = Work(inputs, p, {}, {"OUT": rows_of(out)})
        dispatches = dispatches_of(work, "forward", size, grid, flags)
    else:
        splits, flags, state = parts.shape[0], flags | {"SPLIT_KV"}, tensors["part_state"]
        assert state is not None
        strides = {"OUT_SPLIT": parts.stride(0), "LSE_SPLIT": state.stride(0) // 2}
        split = Work(inputs, p, {}, strides | {"OUT": rows_of(parts[0])})
        x, y, z = grid
        first = dispatches_of(split, "forward", size, (x * splits, y, z), flags, SPLITS=splits)
        first = [d._replace(names=(*d.names[:-2], "parts", "part_state")) for d in first]
        whole = Work(inputs, p, {}, strides | {"OUT": rows_of(out)})
        rows = (-(-out.shape[2] // ROWS_OF_COMBINE), p.H, out.shape[0])
        dispatches = first + dispatches_of(whole, "combine", size, rows, flags, SPLITS=splits)
    run(dispatches, tensors)
    return results(), dispatches


def chosen(kernel: str, problem: AttentionProblem, rows: int, tile: Tile | None) -> Tiles:
    """The tiles of a kernel: those asked for where they fit, else the default."""
    found = fitting(kernel, problem.dtype, problem.D, problem.Dv, rows)
    asked = (t for t in found if tile is not None and t[:2] == tile[:2])
    return next(asked, found[0])


# -- backward --------------------------------------------------------------------------------------------------------


def backward_tensors(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem
) -> tuple[Tensors, Callable[[], Gradients]]:
    """The tensors of a backward by name, and its gradients once they are there."""
    assert results.lse is not None
    packed = inputs.cu_q is not None
    grads = [empty_as(t, t.shape[3]) for t in inputs[:3]]
    if packed:  # rows of no document are written by nobody
        grads = [grad.zero_() for grad in grads]
    wanted = "bias_grad" in problem.features
    bias = inputs.bias
    dbias = bias_sums(bias, problem) if wanted and bias is not None else None
    lse = results.lse.contiguous()
    tensors = with_base(inputs, lse) | {
        "out": with_dense_rows(results.out),
        "grad_out": with_dense_rows(upstream.out),
        "grad_lse": lse if upstream.lse is None else upstream.lse.contiguous(),
        "delta": torch.empty_like(lse),
        "dq": grads[0],
        "dk": grads[1],
        "dv": grads[2],
        "dbias": dbias,
    }
    dq, dk, dv = grads

    def gradients() -> Gradients:
        whole = dbias if dbias is None or bias is None else dbias.sum_to_size(bias.shape).to(bias.dtype)
        sinks, delta = inputs.sinks, tensors["delta"]
        dsinks = None if sinks is None or delta is None else sinks_grad(sinks, lse, delta)
        return Gradients(dq, dk, dv, whole, dsinks)

    return tensors, gradients


def bias_sums(bias: Tensor, problem: AttentionProblem) -> Tensor:
    """What the gradient of a bias is written to: its own, or where it repeats along queries or keys, and so has few
    tiles, the sums of each head, float32."""
    p = problem
    rows, columns = bias.shape[2:]
    if (rows, columns) == (p.M, p.N) or bias.shape[:2] == (p.B, p.H):
        return torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    return torch.empty((p.B, p.H, rows, columns), dtype=torch.float32, device=bias.device)


def may_be_coarse(inputs: AttentionInputs) -> bool:
    """Whether a log-sum-exp may be too coarse to compute probabilities from: a bias may hold numbers that hide."""
    return inputs.bias is not None or inputs.alibi is not None


def with_base(inputs: AttentionInputs, lse: Tensor) -> dict[str, Any]:
    """The inputs by name, and what their rows' probabilities are computed from again (row_base.metal)."""
    base, inverse = (torch.empty_like(lse), torch.empty_like(lse)) if may_be_coarse(inputs) else (lse, lse)
    return inputs._asdict() | {"lse": lse, "base": base, "inverse": inverse}


def base_dispatches(work: Work) -> list[Dispatch]:
    p = work.problem
    if not may_be_coarse(work.inputs):
        return []
    size = chosen("row_base", p, p.M, None)
    return dispatches_of(work, "row_base", size, (-(-p.M // size.BLOCK_M), p.H, p.B))


def renormalised(inputs: AttentionInputs) -> frozenset[str]:
    return frozenset({"RENORMALISED"} if may_be_coarse(inputs) else ())


def backward_pass(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None
) -> tuple[Gradients, list[Dispatch]]:
    p = problem
    tensors, gradients = backward_tensors(inputs, results, upstream, p)
    out, grad_out, dbias = (tensors[name] for name in ("out", "grad_out", "dbias"))
    assert out is not None and grad_out is not None
    strides: dict[str, int | tuple[int, ...]] = {"OUT": rows_of(out), "GRAD_OUT": rows_of(grad_out)}
    for name, gradient in zip(("DQ", "DK", "DV"), (tensors[n] for n in ("dq", "dk", "dv")), strict=True):
        strides[name] = rows_of(gradient)
    if dbias is not None:
        strides["DBIAS"] = dense_of(dbias)[:3]
    work = Work(inputs, p, {"grad_out": grad_out}, strides)
    flags = renormalised(inputs) | frozenset({"GRAD_LSE"} if upstream.lse is not None else ())
    size, rows = chosen("backward_q", p, p.M, tile), out.shape[2]
    row_grid = (-(-rows // ROWS_OF_COMBINE), p.H, out.shape[0])
    dispatches = base_dispatches(work) + dispatches_of(work, "row_delta", size, row_grid, flags)
    dispatches += dispatches_of(work, "backward_q", size, (-(-p.M // size.BLOCK_M), p.H, p.B), flags)
    size = chosen("backward_kv", p, p.N, None)
    dispatches += dispatches_of(work, "backward_kv", size, (-(-p.N // size.BLOCK_N), p.Hkv, p.B), flags)
    if dbias is not None and dbias.numel():
        size = chosen("bias_grad", p, p.M, None)
        batches, heads, M, N = dbias.shape
        tiles = (-(-p.N // size.BLOCK_N) if N > 1 else 1) * (-(-p.M // size.BLOCK_M) if M > 1 else 1)
        apart = frozenset({"BIAS_BATCHES", "BIAS_HEADS", "BIAS_PARTS"} if dbias.shape != work.inputs.bias.shape else ())
        dispatches += dispatches_of(work, "bias_grad", size, (batches * heads * tiles, 1, 1), flags | apart)
    run(dispatches, tensors)
    return gradients(), dispatches


# -- weights ---------------------------------------------------------------------------------------------------------


def weights_tensors(
    inputs: AttentionInputs, lse: Tensor, problem: AttentionProblem
) -> tuple[Tensors, Callable[[], Tensor]]:
    p = problem
    heads = () if "averaged" in p.features else (p.H,)
    out = inputs.q.new_empty((p.B, *heads, p.M, p.N))
    return with_base(inputs, lse.contiguous()) | {"out": out}, lambda: out


def weights_pass(
    inputs: AttentionInputs, lse: Tensor, problem: AttentionProblem, tile: Tile | None
) -> tuple[Tensor, list[Dispatch]]:
    p, averaged = problem, "averaged" in problem.features
    tensors, result = weights_tensors(inputs, lse, p)
    out = result()
    strides = (out.stride(0), 0 if averaged else out.stride(1), out.stride(-2))
    size = chosen("weights", p, p.M, tile)
    grid = (-(-p.N // size.BLOCK_N), -(-p.M // size.BLOCK_M), p.B if averaged else p.B * p.H)
    flags = renormalised(inputs) | frozenset({"AVERAGED"} if averaged else ())
    work = Work(inputs, p, {}, {"OUT": strides})
    dispatches = base_dispatches(work) + dispatches_of(work, "weights", size, grid, flags)
    run(dispatches, tensors)
    return out, dispatches


# By direction: what makes a pass and runs it, and what makes its tensors for running it again.
PASSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "forward": (forward_pass, forward_tensors),
    "backward": (backward_pass, backward_tensors),
    "weights": (weights_pass, weights_tensors),
}
