"""The operator in place of what was written out: the nodes that bring tensors into its form, and its result back."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sdpa.operators import FORWARD, forward_arguments
from sdpa.patterns.products import NotAttention, Rows, order_of
from sdpa.patterns.reading import (
    dtype_of,
    looks,
    name_of,
    overwritten_behind,
    readers,
    shape_of,
    spelling_of,
    tensor_of,
)
from sdpa.patterns.written import ABSORBING, Step, Written
from sdpa.problem import UNLIMITED, AttentionInputs

LOWEST = torch.finfo(torch.float32).min  # beside which every score is absorbed
SEEDS = 2**62  # dropout's seeds are below it, as those of `philox.draw_seed`
# What takes a tensor in any order of its memory, and gives back one that is contiguous.
TAKES_ANY_ORDER = ("linear", "matmul", "bmm")
# Functions and no methods: torch 2.10's autograd cache takes no graph with a method of a node that is not Dynamo's.
TO, CONTIGUOUS = torch.ops.aten.to.dtype, torch.ops.aten.contiguous.default
HEADS_INSIDE = (0, 2, 1, 3)  # (B, H, M, D) turned to (B, M, H, D), and back


def rewrite(found: Written) -> None:
    """Put the operator in place of an attention."""
    out, rank = found.out, len(found.order)
    graph, order = out.graph, order_in_memory(found)
    with graph.inserting_before(out):
        q, k, v = (laid(graph, rows, found) for rows in (found.q, found.k, found.v))
        bias, allowed = masks_of(graph, found)
        inputs: Any = AttentionInputs(q, k, v, found.scale, UNLIMITED, 0 if found.causal else UNLIMITED)
        inputs = inputs._replace(bias=bias, allowed=allowed, softcap=found.softcap)
        arguments = forward_arguments(with_seed(graph, inputs, found), False, "")
        result = graph.call_function(operator.getitem, (graph.call_function(FORWARD, arguments), 0))
        if rank == 3:
            function, dims = (torch.squeeze, (0,)) if found.heads is None else (torch.flatten, (0, 1))
            result = graph.call_function(function, (result, *dims))
        if found.order != tuple(range(rank)):
            result = graph.call_function(torch.permute, (result, found.order))
        if order is not None:
            result = in_memory(graph, result, order)
    result.meta = dict(out.meta)
    out.replace_all_uses_with(result)
    for node in reversed(found.passed):
        erase(node)


def with_seed(graph: Graph, inputs: Any, found: Written) -> Any:
    if not found.dropout_p:
        return inputs
    device = fake(found.out).device
    seed = graph.call_function(torch.randint, (0, SEEDS, (2,)), {"dtype": torch.int64, "device": device})
    return inputs._replace(dropout_p=found.dropout_p, rng=seed)


def fake(node: Node) -> Tensor:
    tensor = tensor_of(node)
    assert tensor is not None
    return tensor


def laid(graph: Graph, rows: Rows, found: Written) -> Any:
    """Rows as a tensor (B, H, M, D): a view, converted where autocast converted it for the product."""
    node = rows.node
    if rows.order != tuple(range(len(rows.order))):
        node = graph.call_function(torch.permute, (node, rows.order))
    if dtype_of(rows.node) != found.dtype:
        node = graph.call_function(TO, (node, found.dtype))
    if len(found.order) == 4:
        return node
    if found.heads is None:  # (H, M, D)
        return graph.call_function(torch.unsqueeze, (node, 0))
    return graph.call_function(torch.unflatten, (node, 0, (-1, found.heads)))


# -- masks -----------------------------------------------------------------------------------------------------------


def masks_of(graph: Graph, found: Written) -> tuple[Node | None, Node | None]:
    """(bias, allowed) of what was done to the scores. Infinities are a boolean mask unless a number is filled in after
    them; all else is one tensor that is added, of the size that the masks have together."""
    finite = [place for place, step in enumerate(found.steps) if step.fill not in (None, -math.inf)]
    last = finite[-1] if finite else -1
    hidden = [step for place, step in enumerate(found.steps) if place > last and step.fill is not None]
    summed = [step for place, step in enumerate(found.steps) if place <= last or step.fill is None]
    bias: Node | None = None
    for step in summed:
        bias = with_step(graph, bias, step, found.dtype)
    allowed: Node | None = None
    for step in hidden:
        kept = graph.call_function(torch.logical_not, (step.node,)) if step.where else step.node
        allowed = kept if allowed is None else graph.call_function(torch.logical_and, (allowed, kept))
    return padded(graph, bias, summed), padded(graph, allowed, hidden)


def with_step(graph: Graph, bias: Node | None, step: Step, dtype: torch.dtype) -> Node:
    """What is added to the scores, after one step more."""
    if step.fill is None:
        own = step.node
        if dtype_of(own) not in (torch.float32, dtype):
            own = graph.call_function(TO, (own, torch.float32))
        return own if bias is None else graph.call_function(torch.add, (bias, own))
    if bias is None:
        base = graph.call_function(torch.zeros_like, (step.node,), {"dtype": torch.float32})
    else:
        base = graph.call_function(TO, (bias, torch.float32))
    fill = step.fill if step.fill <= ABSORBING else LOWEST
    sides = (fill, base) if step.where else (base, fill)
    return graph.call_function(torch.where, (step.node, *sides))


def padded(graph: Graph, mask: Node | None, steps: list[Step]) -> Node | None:
    """The mask that was made of these, with four dimensions."""
    rank = max((fake(step.node).dim() for step in steps), default=4)
    for _ in range(4 - rank):
        mask = graph.call_function(torch.unsqueeze, (mask, 0))
    return mask


# -- the result in memory --------------------------------------------------------------------------------------------


def order_in_memory(found: Written) -> tuple[int, ...] | None:
    """The dimensions of a result by their strides, the largest first; None where no reader can tell, as after
    `out.transpose(1, 2).reshape(B, M, H * D)`: the operator's, which is that of the queries, then saves a copy."""
    out, tensor = found.out, fake(found.out)
    free = all(takes_any_order(reader, found.order == HEADS_INSIDE) for reader in readers(out))
    if free and overwritten_behind(out, []) is None:  # a copy that became a view must not be written into
        return None
    if name_of(out) in ("matmul", "bmm", "baddbmm"):
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    if not all(isinstance(number, int) for number in (*strides, *tensor.shape)):
        raise NotAttention("how its result lies in memory is not known")
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    if not tensor.permute(order).is_contiguous():
        raise NotAttention("its result lies in memory with gaps")
    return order


def takes_any_order(reader: Node, turned: bool) -> bool:
    """Whether a reader's result lies in memory as it did; `turned` tensors are (B, M, H, D), which the operator's
    result is or is not in memory: folding those makes a contiguous one."""
    name, spelling = name_of(reader), spelling_of(reader)
    if spelling in ("reshape", "flatten"):
        return turned
    if spelling == "contiguous":
        return not reader.kwargs and len(reader.args) == 1
    order = order_of(reader, name, len(shape_of(reader)))
    if order is None:
        return name in TAKES_ANY_ORDER
    return order == HEADS_INSIDE and all(takes_any_order(further, not turned) for further in readers(reader))


def in_memory(graph: Graph, result: Node, order: tuple[int, ...]) -> Node:
    """The same tensor in an order of memory; nothing happens where it has that."""
    if order == tuple(range(len(order))):
        return graph.call_function(CONTIGUOUS, (result,))
    turned = graph.call_function(CONTIGUOUS, (graph.call_function(torch.permute, (result, order)),))
    return graph.call_function(torch.permute, (turned, tuple(order.index(dim) for dim in range(len(order)))))


def erase(node: Node) -> None:
    """Take a node out of its graph that nobody reads any more, with those that only looked at its form."""
    for user in [user for user in node.users if looks(user, node) and not user.users]:
        node.graph.erase_node(user)
    if not node.users:
        node.graph.erase_node(node)
