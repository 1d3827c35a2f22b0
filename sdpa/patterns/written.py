"""Attention as it is written out: from a softmax inwards to the product of queries and keys, outwards to the values.

Every result in between has one reader, so that nobody misses it. What is found has a place for everything that changes
the result; anything else on the way ends the search, with the reason as a sentence.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from sdpa.patterns.products import NotAttention, Product, Rows, peel, product_of, scaling, unrepeated
from sdpa.patterns.reading import (
    FLOATING,
    argument,
    between,
    broadcasts,
    dtype_of,
    equal,
    is_plain,
    name_of,
    number_of,
    only_reader,
    operands,
    overwritten_behind,
    same_shape,
    shape_of,
    tensor_of,
    writes,
)

# A weight whose score was filled with this or less is 0 beside any other: exp(-1e4) is, in every floating type.
FAR = -1e4
# Beside this or less every score is absorbed, in float32 and in bfloat16.
ABSORBING = -1e30
DEVICES = ("cpu", "cuda")


class Step(NamedTuple):
    """One thing that was done to the scores: a tensor added to them, or a number filled in."""

    node: Node  # what was added, or the boolean mask
    fill: float | None = None  # None: the node was added
    where: bool = True  # the value of the mask where the number stands


class Scores(NamedTuple):
    """What stands between the product of queries and keys and the softmax, from the softmax inwards."""

    product: Node
    factor: float
    softcap: float
    steps: tuple[Step, ...]
    passed: tuple[Node, ...]  # the nodes on the way, the product among them


class Written(NamedTuple):
    """One attention as it is written."""

    q: Rows
    k: Rows
    v: Rows
    dtype: torch.dtype  # of the product with the values
    scale: float
    softcap: float
    steps: tuple[Step, ...]  # from the product to the softmax
    dropout_p: float
    heads: Any  # where tensors of rank 3 have heads folded into the batch, how many; else None
    out: Node  # the product with the values
    order: tuple[int, ...]  # of its dimensions
    passed: tuple[Node, ...]  # all nodes of which nothing is left, `out` among them
    causal: bool = False


def written_of(softmax: Node) -> Written:
    """The attention around a softmax; NotAttention where there is none, or where it isn't certain."""
    rank = len(shape_of(softmax))
    dim = argument(softmax, 1, "dim", "axis")
    if not isinstance(dim, int) or dim not in (-1, rank - 1):
        raise NotAttention("its softmax is not known to be over the last dimension")
    inside: Any = argument(softmax, 0, "input", "self")
    scores = scores_of(inside, softmax, Scores(softmax, 1.0, 0.0, (), ()))
    weights, outer, dropout_p = weights_of(softmax)
    out = only_reader(weights)
    product = product_of(scores.product, scores=True)
    values = None if out is None else product_of(out, scores=False)
    if out is None or values is None or values.left.node is not weights or product is None:
        raise NotAttention("its weights are read by something else than one product with values")
    if values.right.node is weights or values.left.order != tuple(range(len(values.left.order))):
        raise NotAttention("its weights are multiplied in another order than they were computed in")
    passed = (*reversed(scores.passed), softmax, *outer, out)
    return checked(assembled(scores, product, values, dropout_p, passed))


def scores_of(node: Any, reader: Node, found: Scores) -> Scores:
    """Inwards from `node`, which `reader` reads."""
    if not isinstance(node, Node) or only_reader(node) is not reader:
        raise NotAttention("its scores are read elsewhere, too")
    if dtype_of(node) not in FLOATING:
        raise NotAttention(f"its scores are of dtype {dtype_of(node)}")
    product = product_of(node, scores=True)
    found = found._replace(passed=(*found.passed, node))
    if product is not None:
        return with_product(node, product, found)
    name = name_of(node)
    inner = argument(node, 0, "input", "self")
    if name in ("cast", "contiguous") or (name == "view" and folds_heads(inner, node)):
        return scores_of(inner, node, found)
    if name in ("mul", "div"):
        scale = scaling(node, name)
        if scale is None or (writes(node) and scale[0] is not inner):
            raise NotAttention("its scores are multiplied by something else than a number")
        return scores_of(scale[0], node, found._replace(factor=found.factor * scale[1]))
    if name == "tanh" and not found.softcap and found.factor > 0:
        return scores_of(inner, node, found._replace(softcap=found.factor))
    if name == "add":
        return added(node, found)
    if name in ("masked_fill", "where"):
        inner, step = filled(node, name)
        if not same_shape(shape_of(inner), shape_of(node)):
            raise NotAttention("a mask does not broadcast to its scores")
        return scores_of(inner, node, with_step(found, step, node))
    raise NotAttention(f"{name or node.target} stands between its softmax and a product of queries and keys")


def with_product(node: Node, product: Product, found: Scores) -> Scores:
    factor = found.factor
    if product.added is not None:
        found = with_step(found, Step(product.added), node)
    if product.order != tuple(range(len(product.order))):
        raise NotAttention("its scores are transposed")
    return found._replace(product=node, factor=factor * product.factor)


def folds_heads(inner: Any, node: Node) -> bool:
    """Whether a view only folds heads into the batch, or takes them apart."""
    own, other = shape_of(inner), shape_of(node)
    return same_shape(own, other) or ({len(own), len(other)} == {3, 4} and same_shape(own[-2:], other[-2:]))


def added(node: Node, found: Scores) -> Scores:
    """Scores plus a tensor, on whichever side each stands."""
    if argument(node, 2, "alpha", default=1) != 1:
        raise NotAttention("a mask is added to its scores with a factor")
    sides = operands(node)
    reason = NotAttention("nothing that is added to its scores is a tensor")
    for inner, mask in (sides, sides[::-1]):
        if not (isinstance(inner, Node) and isinstance(mask, Node)) or (writes(node) and inner is not sides[0]):
            continue
        if not same_shape(shape_of(inner), shape_of(node)):
            continue
        try:
            return scores_of(inner, node, with_step(found, Step(mask), node))
        except NotAttention as refusal:
            reason = refusal
    raise reason


def filled(node: Node, name: str) -> tuple[Any, Step]:
    """(scores, step) of masked_fill or where."""
    if name == "masked_fill":
        inner, mask, value = (argument(node, i, *n) for i, n in enumerate((("input", "self"), ("mask",), ("value",))))
        where = True
    else:
        first, second, other = (
            argument(node, i, *n) for i, n in enumerate((("condition",), ("input", "self"), ("other",)))
        )
        if node.op == "call_method":  # scores.where(condition, other)
            first, second = argument(node, 1, "condition"), node.args[0]
        where = number_of(second, any_shape=True) is not None
        mask, inner, value = (first, other, second) if where else (first, second, other)
    fill = number_of(value, any_shape=True)
    if fill is None or not isinstance(mask, Node) or dtype_of(mask) != torch.bool:
        raise NotAttention("what is filled into its scores is not a number, or not by a boolean mask")
    if not fill <= FAR:
        raise NotAttention(f"{fill} is filled into its scores, which leaves weights")
    return inner, Step(mask, fill, where)


def with_step(found: Scores, step: Step, node: Node) -> Scores:
    mask = unexpanded(step.node)
    if found.softcap:
        raise NotAttention("a mask stands inside of its softcap")
    if found.factor != 1.0 and not (step.fill == -math.inf and found.factor > 0):
        raise NotAttention("its scores are multiplied after they were masked")
    if not broadcasts(shape_of(mask), shape_of(node)) or tensor_of(mask) is None:
        raise NotAttention("a mask does not broadcast to its scores")
    if step.fill is None and dtype_of(mask) not in FLOATING:
        raise NotAttention(f"a mask of dtype {dtype_of(mask)} is added to its scores")
    return found._replace(steps=(*found.steps, step._replace(node=mask)))


def unexpanded(node: Node) -> Node:
    """A mask before it was expanded, which broadcasts all the same and has fewer elements."""
    while name_of(node) == "expand" and not writes(node):
        inner = argument(node, 0, "input", "self")
        if not isinstance(inner, Node) or tensor_of(inner) is None:
            break
        node = inner
    return node


def weights_of(softmax: Node) -> tuple[Node, tuple[Node, ...], float]:
    """(the weights as the values are multiplied by them, the nodes from the softmax there, the dropout)."""
    node, passed, dropout_p = softmax, [], 0.0
    while (reader := only_reader(node)) is not None:
        name = name_of(reader)
        if argument(reader, 0, "input", "self") is not node:
            break
        if name == "dropout":
            p, training = argument(reader, 1, "p", default=0.5), argument(reader, 2, "training", "train", default=True)
            if not isinstance(p, (int, float)) or not isinstance(training, bool) or (training and dropout_p):
                raise NotAttention("how many of its weights are dropped is not known, or they are dropped twice")
            dropout_p = float(p) if training else dropout_p
        elif name not in ("cast", "contiguous") and not (name == "view" and folds_heads(node, reader)):
            break
        if dtype_of(reader) not in FLOATING:
            raise NotAttention(f"its weights are of dtype {dtype_of(reader)}")
        passed.append(reader)
        node = reader
    return node, tuple(passed), dropout_p


# -- what was found, held together -----------------------------------------------------------------------------------


def assembled(scores: Scores, product: Product, values: Product, dropout_p: float, passed: tuple[Node, ...]) -> Written:
    """Queries, keys and values before what scales, converts and repeats them."""
    out = passed[-1]
    dtype, multiplied = dtype_of(out), dtype_of(scores.product)
    if dtype not in FLOATING or multiplied not in FLOATING:
        raise NotAttention(f"it is computed in {multiplied} and {dtype}")
    # Products of bfloat16 or float16 are exact in float32: queries and keys need not be converted for that.
    cast = dtype if multiplied == torch.float32 != dtype else None
    q, k = peel(product.left, scaled=True, cast=cast), peel(product.right, scaled=True, cast=cast)
    v = peel(values.right, scaled=False)
    if cast is not None and (dtype_of(q.rows.node), dtype_of(k.rows.node)) != (cast, cast):
        raise NotAttention(f"its scores are computed in {multiplied} of tensors that are not {dtype}")
    computed = (*q.computed, *k.computed, *v.computed)
    hold_still((*computed, *passed), computed, passed)
    shared = unrepeated(k.rows), unrepeated(v.rows)
    keys, rows = (k.rows, v.rows) if shared[0] is None or shared[1] is None else (shared[0], shared[1])
    scale = scores.factor * q.factor * k.factor
    steps = scores.steps[::-1]
    tell_apart(steps)
    heads = heads_of(passed, steps)
    return Written(q.rows, keys, rows, dtype, scale, scores.softcap, steps, dropout_p, heads, out, values.order, passed)


def hold_still(nodes: tuple[Node, ...], computed: tuple[Node, ...], passed: tuple[Node, ...]) -> None:
    """All that is read must be the same at the end as where it was read, and gradients and autocast be on or off for
    all of it: nothing in between writes, or changes a mode."""
    order = {node: place for place, node in enumerate(passed[-1].graph.nodes)}
    first = min(nodes, key=order.__getitem__)
    for node in between(first, passed[-1]):
        if node not in passed and not is_plain(node):
            raise NotAttention(f"{node.target} stands between its products, which may change what they read")
    for node in passed:
        target = argument(node, 0, "input", "self")
        if writes(node) and target not in passed:
            raise NotAttention(f"{node.target} writes into another tensor than its scores")


def tell_apart(steps: tuple[Step, ...]) -> None:
    """Where the keys of a row are hidden by several numbers, the largest one wins: each must be kept as it is, which
    only works for those that absorb the scores."""
    numbers = [step.fill for step in steps if step.fill != -math.inf]
    if len(numbers) > 1 and any(fill is not None and fill > ABSORBING for fill in numbers):
        raise NotAttention("a finite number is filled into its scores beside another mask")


def stay_unwritten(found: Written) -> None:
    """The operator saves its result and all that it reads for its backward, which what was written does not."""
    tensor = tensor_of(found.out)
    if tensor is None or not tensor.requires_grad:
        return
    read = [found.q.node, found.k.node, found.v.node, *(step.node for step in found.steps)]
    writer = overwritten_behind(found.out, read)
    if writer is not None:
        raise NotAttention(f"{writer.target} may write into a tensor that its backward needs")


def heads_of(passed: tuple[Node, ...], steps: tuple[Step, ...]) -> Any:
    """How many heads are folded into the batch of a tensor of rank 3; None where nothing tells."""
    shapes = [shape_of(node) for node in passed]
    ranks = {len(shape) for shape in shapes}
    if ranks != {3, 4}:
        return None
    heads = {shape[1] for shape in shapes if len(shape) == 4}
    if len(heads) != 1 or not isinstance(next(iter(heads)), int):
        raise NotAttention("how many heads are folded into its batch is not known")
    if any(len(shape_of(step.node)) == 3 and not equal(shape_of(step.node)[0], 1) for step in steps):
        raise NotAttention("a mask has one dimension for batch and heads")
    return next(iter(heads))


def checked(found: Written) -> Written:
    """Sizes are those of attention, and tensors such as the operator takes."""
    q, k, v = found.q.shape, found.k.shape, found.v.shape
    if not len(q) == len(k) == len(v) or len(q) not in (3, 4):
        raise NotAttention(f"its tensors have {len(q)}, {len(k)} and {len(v)} dimensions")
    leads = same_shape(k[:-2], v[:-2]) and equal(q[0], k[0])
    if not leads or not equal(k[-2], v[-2]) or not equal(q[-1], k[-1]) or not (len(q) == 3 or divides(k[1], q[1])):
        raise NotAttention(f"its tensors have shapes {q}, {k} and {v}")
    if not 0.0 <= found.dropout_p < 1.0 or not math.isfinite(found.scale):
        raise NotAttention(f"its scale is {found.scale}, its dropout {found.dropout_p}")
    for rows in (found.q, found.k, found.v):
        if tensor_of(rows.node) is None or dtype_of(rows.node) not in FLOATING:
            raise NotAttention("one of its tensors is of a kind that is left alone")
    device = tensor_of(found.out).device.type  # type: ignore[union-attr]
    if device not in DEVICES:
        raise NotAttention(f"it is computed on {device}")
    stay_unwritten(found)
    return found


def divides(heads: Any, all_heads: Any) -> bool:
    return equal(heads, all_heads) or (isinstance(heads, int) and isinstance(all_heads, int) and all_heads % heads == 0)
