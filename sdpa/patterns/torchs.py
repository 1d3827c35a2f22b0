"""A call of torch's own scaled_dot_product_attention in a graph, whoever kept the reference that it was called by."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from sdpa.patterns.products import NotAttention, Rows
from sdpa.patterns.reading import FLOATING, argument, broadcasts, dtype_of, number_of, shape_of
from sdpa.patterns.written import Step, Written, checked, unexpanded


def torchs_of(node: Node) -> Written:
    """The call as an attention that is written out."""
    q, k, v = (argument(node, place, name) for place, name in enumerate(("query", "key", "value")))
    mask, dropout_p = argument(node, 3, "attn_mask"), argument(node, 4, "dropout_p", default=0.0)
    causal, scale = argument(node, 5, "is_causal", default=False), node.kwargs.get("scale")
    dtype, rank = dtype_of(node), len(shape_of(node))
    if dtype not in FLOATING or rank not in (3, 4) or not all(len(shape_of(t)) == rank for t in (q, k, v)):
        raise NotAttention(f"it is of dtype {dtype} and {rank} dimensions")
    factor = number_of(scale) if scale is not None else unit_scale(q)
    if factor is None or not isinstance(causal, bool) or not isinstance(dropout_p, (int, float)):
        raise NotAttention("its scale, its dropout or its mask is not known")
    order = tuple(range(rank))
    return checked(
        Written(
            q=Rows(q, order),
            k=Rows(k, order),
            v=Rows(v, order),
            dtype=dtype,
            scale=factor,
            softcap=0.0,
            steps=() if mask is None else (mask_of(mask, (*shape_of(q)[:-1], shape_of(k)[-2])),),
            dropout_p=float(dropout_p),
            heads=None,
            out=node,
            order=order,
            passed=(node,),
            causal=causal,
        )
    )


def unit_scale(q: Node) -> float | None:
    D = shape_of(q)[-1]
    return 1.0 / math.sqrt(D) if isinstance(D, int) and D else None


def mask_of(mask: object, scores: tuple[object, ...]) -> Step:
    """What a mask does to scores of this shape: True of a boolean one lets a key be seen."""
    if not isinstance(mask, Node) or dtype_of(mask) not in (torch.bool, *FLOATING):
        raise NotAttention(f"its mask has dtype {dtype_of(mask)}")
    own = unexpanded(mask)
    if not broadcasts(shape_of(own), scores):
        raise NotAttention("its mask does not broadcast to its scores")
    return Step(own, -math.inf, False) if dtype_of(mask) == torch.bool else Step(own)
