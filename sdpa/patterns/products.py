"""The two products of attention, as rows: whichever function multiplies, and in whichever order its tensors lie.

Rows are a node's tensor with its dimensions brought into the order (.., rows, columns): queries (.., M, D), keys
(.., N, D), values (.., N, Dv).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from sdpa.patterns.reading import (
    Shape,
    argument,
    dtype_of,
    equal,
    name_of,
    number_of,
    operands,
    same_shape,
    shape_of,
    writes,
)


class NotAttention(Exception):
    """Says in a sentence why something is left as it is written."""


class Rows(NamedTuple):
    node: Node
    order: tuple[int, ...]  # dimension i of the rows is dimension order[i] of the node

    @property
    def shape(self) -> Shape:
        shape = shape_of(self.node)
        return tuple(shape[place] for place in self.order)


class Product(NamedTuple):
    """left right^T of two rows where `scores`, else left right: (.., M, N) weights by (.., N, Dv) values."""

    left: Rows
    right: Rows
    order: tuple[int, ...]  # of the result: its dimension i is dimension order[i] of (.., M, N) or (.., M, Dv)
    factor: float = 1.0
    added: Node | None = None  # to the scores, after the factor


def plain_order(rank: int) -> tuple[int, ...]:
    return tuple(range(rank))


def swapped_order(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def product_of(node: Node, scores: bool) -> Product | None:
    """The product that a node is, None where it is none."""
    name = name_of(node)
    if name == "einsum":
        return einsum_of(node, scores)
    if name not in ("matmul", "bmm", "baddbmm"):
        return None
    left, right = operands(node) if name != "baddbmm" else (argument(node, 1, "batch1"), argument(node, 2, "batch2"))
    rank = len(shape_of(node))
    if not (isinstance(left, Node) and isinstance(right, Node)) or rank < 3:
        return None
    if len(shape_of(left)) != rank or len(shape_of(right)) != rank:
        return None
    order = swapped_order(rank) if scores else plain_order(rank)
    found = Product(Rows(left, plain_order(rank)), Rows(right, order), plain_order(rank))
    return with_sum(node, found) if name == "baddbmm" else found


def with_sum(node: Node, product: Product) -> Product | None:
    """beta * input + alpha * batch1 batch2."""
    beta, alpha = number_of(argument(node, 3, "beta", default=1)), number_of(argument(node, 4, "alpha", default=1))
    given = argument(node, 0, "input", "self")
    if alpha is None or beta not in (0.0, 1.0) or not isinstance(given, Node):
        return None
    return product._replace(factor=alpha, added=given if beta else None)


def einsum_of(node: Node, scores: bool) -> Product | None:
    """einsum of two tensors, of which one letter is summed over and each has one of its own."""
    equation, *given = node.args
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        given = list(given[0])
    if not isinstance(equation, str) or len(given) != 2 or not all(isinstance(g, Node) for g in given):
        return None
    terms, arrow, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if not arrow or len(letters) != 2:
        return None
    if not all(3 <= len(term) == len(set(term)) and term.isalpha() for term in (*letters, result)):
        return None
    inputs: list[tuple[str, Any]] = list(zip(letters, given, strict=True))
    return scores_of(inputs, result) if scores else values_of(inputs, result)


def scores_of(inputs: list[tuple[str, Any]], result: str) -> Product | None:
    """Scores end in the letter of the queries and that of the keys."""
    query, key = result[-2], result[-1]
    if key in inputs[0][0]:
        inputs = inputs[::-1]
    (left, q), (right, k) = inputs
    lead, summed = result[:-2], [letter for letter in left if letter not in result]
    if len(summed) != 1 or query in right or key in left or query not in left:
        return None
    return arranged((left, q, lead + query + summed[0]), (right, k, lead + key + summed[0]), result, result)


def values_of(inputs: list[tuple[str, Any]], result: str) -> Product | None:
    """Weights end in the letter of the keys; which of the two tensors they are shows in the letters, too."""
    for (left, weights), (right, v) in (inputs, inputs[::-1]):
        lead, query, key = left[:-2], left[-2], left[-1]
        columns = [letter for letter in right if letter not in left]
        if key in right and key not in result and query not in right and len(columns) == 1:
            return arranged(
                (left, weights, left), (right, v, lead + key + columns[0]), result, lead + query + columns[0]
            )
    return None


def arranged(left: tuple[str, Any, str], right: tuple[str, Any, str], result: str, plain: str) -> Product | None:
    """A product of tensors given by their letters as they are and as rows."""
    if any(sorted(given) != sorted(rows) for given, _, rows in (left, right)) or sorted(result) != sorted(plain):
        return None
    rows = [Rows(node, tuple(map(given.index, wanted))) for given, node, wanted in (left, right)]
    if any(len(shape_of(r.node)) != len(r.order) for r in rows):
        return None
    return Product(rows[0], rows[1], tuple(map(plain.index, result)))


# -- what stands between a tensor and its product --------------------------------------------------------------------


class Peeled(NamedTuple):
    rows: Rows
    factor: float
    computed: tuple[Node, ...]  # nodes that are passed over though they compute something


def peel(rows: Rows, scaled: bool, cast: torch.dtype | None = None) -> Peeled:
    """Rows past transpositions, copies, where `scaled` past factors that are numbers, and where `cast` is a dtype past
    a conversion from it."""
    found = Peeled(rows, 1.0, ())
    while (further := peel_once(found, scaled, cast)) is not None:
        found = further
    return found


def peel_once(found: Peeled, scaled: bool, cast: torch.dtype | None) -> Peeled | None:
    node, order = found.rows
    if writes(node):
        return None
    name, rank = name_of(node), len(order)
    inner = argument(node, 0, "input", "self")
    moved = order_of(node, name, rank)
    if moved is not None and isinstance(inner, Node) and len(shape_of(inner)) == rank:
        return found._replace(rows=Rows(inner, tuple(moved[place] for place in order)))
    passed = (*found.computed, node)
    if name == "contiguous" and isinstance(inner, Node) and same_shape(shape_of(inner), shape_of(node)):
        return Peeled(Rows(inner, order), found.factor, passed)
    if name == "cast" and cast is not None and isinstance(inner, Node) and dtype_of(inner) == cast:
        return Peeled(Rows(inner, order), found.factor, passed)
    if scaled and name in ("mul", "div"):
        scale = scaling(node, name)
        if scale is not None and dtype_of(scale[0]) == dtype_of(node):
            return Peeled(Rows(scale[0], order), found.factor * scale[1], passed)
    return None


def order_of(node: Node, name: str, rank: int) -> tuple[int, ...] | None:
    """The dimensions of a node's argument in the order in which the node has them."""
    if name == "getattr":
        return swapped_order(rank) if node.args[1] == "mT" and rank >= 2 else None
    if name == "permute":
        given: Any = node.args[1:] if len(node.args) > 2 else argument(node, 1, "dims")
        given = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        if not all(isinstance(dim, int) for dim in given) or len(given) != rank:
            return None
        return tuple(dim % rank for dim in given)
    if name != "transpose":
        return None
    pair = argument(node, 1, "dim0", "axis0"), argument(node, 2, "dim1", "axis1")
    if not all(isinstance(dim, int) for dim in pair):
        return None
    order = list(range(rank))
    one, other = (dim % rank for dim in pair)
    order[one], order[other] = other, one
    return tuple(order)


def scaling(node: Node, name: str) -> tuple[Node, float] | None:
    """(tensor, factor) of a tensor times or over a number."""
    one, other = operands(node)
    if name == "mul" and shape_of(one) == ():
        one, other = other, one
    if "rounding_mode" in node.kwargs or not isinstance(one, Node) or not same_shape(shape_of(one), shape_of(node)):
        return None
    number = number_of(other)
    if number is None or (name == "div" and number == 0.0):
        return None
    return one, number if name == "mul" else 1.0 / number


def unrepeated(rows: Rows) -> Rows | None:
    """Keys or values before each of their heads was repeated, one copy after the other, for the query heads that share
    it."""
    node, order = rows
    if len(order) != 4 or order[:2] != (0, 1):
        return None
    inner = repeated_by_view(node) if name_of(node) == "view" else repeated_by_name(node)
    return None if inner is None else Rows(inner, order)


def repeated_by_name(node: Node) -> Node | None:
    if name_of(node) != "repeat_interleave":
        return None
    inner, count = argument(node, 0, "input", "self"), argument(node, 1, "repeats")
    dim = argument(node, 2, "dim")
    is_heads = isinstance(count, int) and dim in (1, -3) and len(shape_of(inner)) == 4
    return inner if is_heads and isinstance(inner, Node) else None


def repeated_by_view(node: Node) -> Node | None:
    """(B, Hkv, N, D) with a dimension put behind the heads, expanded, and folded into the heads."""
    expanded: Any = argument(node, 0, "input", "self")
    if name_of(expanded) != "expand":
        return None
    put: Any = argument(expanded, 0, "input", "self")
    inner = argument(put, 0, "input", "self") if name_of(put) in ("getitem", "unsqueeze") else None
    own, full = shape_of(inner), shape_of(expanded)
    if not isinstance(inner, Node) or len(own) != 4 or len(full) != 5 or len(shape_of(node)) != 4:
        return None
    places: Any = argument(put, 1, "dim")
    whole = slice(None, None, None)
    if places not in (2, -3) and places != (whole, whole, None) and places != (whole, whole, None, whole, whole):
        return None
    kept = same_shape(own, (*full[:2], *full[3:])) and same_shape(shape_of(node)[2:], own[2:])
    return inner if kept and equal(shape_of(node)[1], full[1] * full[2]) else None
