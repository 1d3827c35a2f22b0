"""Copies, at multiples of 16 bytes, of tensors that a kernel cannot read where they lie, or would read more slowly."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from sdpa.alignment import BULK_BYTES, alignment_of, has_rows, stride_alignment
from sdpa.layout import empty_as
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile, as_batch, read_of

REPEATING = 3  # dimensions that may keep a stride of 0: all but the last


def call_on_copies(
    function: Callable[..., Any], names: Collection[str], *arguments: Any
) -> Results | Gradients | Tensor:
    """`function` of (*tensors, problem, tile) on copies of those tensors, of `names`, that need one."""
    *tensors, problem, tile = arguments
    assert isinstance(problem, AttentionProblem) and (tile is None or isinstance(tile, Tile))
    return function(*placed(names, *tensors), problem.placed(names), tile)


def record_on_copies(
    record: Callable[..., Any], function: Callable[..., Any], names: Collection[str], *call: Any
) -> tuple[Any, Callable[..., Any] | None]:
    """A kernel's `record` of a call (tensors, problem, tile), on such copies: the results, and what does the call again
    for tensors of the same form. None, by the kernel's `function`, where several fields hold one tensor, of which each
    would get a copy, or where the log-sum-exp is copied."""
    tensors, problem, tile = call
    moved, problem = placed(names, *tensors), problem.placed(names)
    given, read = read_of(*tensors), read_of(*moved)
    if len(given) != len(read) or copies_lse(tensors, moved):
        return function(*moved, problem, tile), None
    results, again = record(moved, problem, tile)
    if again is None:
        return results, None
    apart, odd = [one is not other for one, other in zip(given, read, strict=True)], list(map(is_odd, given))

    def on_copies(*tensors: Tensor) -> Any:
        """Which tensors are copied does not change: the launches know the strides of the copies."""
        if len(tensors) != len(apart) or list(map(is_odd, tensors)) != odd:
            return None
        pairs = zip(apart, tensors, strict=True)
        return again(*[aligned_copy(as_batch(tensor)) if one else tensor for one, tensor in pairs])

    return results, on_copies


def copies_lse(tensors: tuple[Any, ...], moved: tuple[Any, ...]) -> bool:
    """Of a backward, whether the log-sum-exp has a copy."""
    return len(tensors) > 2 and tensors[1].lse is not moved[1].lse


def is_odd(tensor: Tensor) -> bool:
    """Whether a tensor begins at no multiple of 16 bytes."""
    return alignment_of(tensor, strides=False) < BULK_BYTES


def placed(names: Collection[str], inputs: AttentionInputs, *rest: Any) -> tuple[Any, ...]:
    """The tensors of a call, those of `names` at multiples of 16 bytes."""
    moved: dict[str, Any] = {name: at_home(getattr(inputs, name)) for name in ("q", "k", "v") if name in names}
    if inputs.bias is not None and "bias" in names:
        moved["bias"] = home_of_bias(inputs.bias, "bias_rows" in names)
    inputs = inputs._replace(**moved)
    if len(rest) != 2:  # a forward, or weights by a log-sum-exp, which is read number by number
        return inputs, *rest
    results, upstream = rest
    out = at_home(results.out) if "out" in names else results.out
    lse = results.lse.clone() if "lse" in names and alignment_of(results.lse, False) < BULK_BYTES else results.lse
    grad_out = at_home(upstream.out) if "grad_out" in names else upstream.out
    return inputs, Results(out, lse), upstream._replace(out=grad_out)


def at_home(tensor: Tensor) -> Tensor:
    """The tensor itself where its rows can be read by vectors, else a copy."""
    return tensor if has_rows(tensor) and alignment_of(tensor) == BULK_BYTES else aligned_copy(tensor)


def home_of_bias(bias: Tensor, rows: bool) -> Tensor:
    """The same for a bias; `rows` says whether its strides matter beside its address."""
    at_vectors = alignment_of(bias, strides=False) == BULK_BYTES
    dense = (bias.stride(3) == 1 or bias.shape[3] == 1) and stride_alignment(bias) == BULK_BYTES
    return bias if at_vectors and (dense or not rows) else aligned_copy(bias)


def aligned_copy(tensor: Tensor) -> Tensor:
    """A copy (B, H, M, D) in the memory order of `tensor`. Its address and strides are multiples of 16 bytes, and its
    last stride is 1. Other dimensions of stride 0 keep it."""
    whole = tensor.shape
    for dimension in range(REPEATING):
        if tensor.stride(dimension) == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    unit = BULK_BYTES // tensor.element_size()
    width = -(-tensor.shape[3] // unit) * unit
    with torch.no_grad():
        copy = empty_as(tensor, width)[..., : tensor.shape[3]].copy_(tensor)
    return copy.expand(whole)


def told(problem: AttentionProblem, names: tuple[str, ...]) -> str:
    """The copies of these tensors as a clause."""
    apart = tuple(name for name in names if not problem.unaligned_at(name))
    others = tuple(name for name in names if name not in apart)
    why = f"which {'do' if len(listed(others)) > 1 else 'does'} not lie at multiples of {BULK_BYTES} bytes"
    clauses = [(apart, "whose last dimension is not the only one of stride 1"), (others, why)]
    return "on copies " + ", and ".join(f"of {joined(listed(some))}, {clause}" for some, clause in clauses if some)


def listed(names: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys("the bias" if name.startswith("bias") else name for name in names))


def joined(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
