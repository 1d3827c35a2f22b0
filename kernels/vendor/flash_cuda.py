"""FlashAttention-2 as torch ships it, forward and backward."""

from __future__ import annotations

import torch

from sdpa.kernels.vendor.common import Native, is_causal, no_cuda, no_rng, scale_option
from sdpa.layout import with_dense_rows
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile

TILES: tuple[Tile, ...] = ()
HEAD_MULTIPLE = 8  # its kernels are compiled for head sizes padded to this

unavailable = no_cuda


def padded(inputs: AttentionInputs) -> AttentionInputs:
    """Head sizes filled up with zeros to a multiple of 8, as torch does; they change neither scores nor values."""
    missing = -inputs.q.shape[-1] % HEAD_MULTIPLE
    if not missing:
        return inputs
    q, k, v = (torch.nn.functional.pad(t, (0, missing)) for t in inputs[:3])
    return inputs._replace(q=q, k=k, v=v)


def native(inputs: AttentionInputs) -> Native | None:
    """torch's operator as torch calls it; None where head sizes have to be padded."""
    if inputs.q.shape[-1] % HEAD_MULTIPLE:
        return None
    options = (0.0, True) if is_causal(inputs) else ()
    return torch._scaled_dot_product_flash_attention, options, scale_option(inputs)


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None) -> Results:
    wide = padded(inputs)
    results = torch.ops.aten._scaled_dot_product_flash_attention.default(
        wide.q, wide.k, wide.v, 0.0, is_causal(inputs), False, scale=inputs.scale
    )
    return Results(results[0][..., : inputs.q.shape[-1]], results[1])


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None
) -> Gradients:
    D = inputs.q.shape[-1]
    wide = padded(inputs)
    out, grad_out = (padded(inputs._replace(q=with_dense_rows(t))).q for t in (results.out, upstream.out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        grad_out,
        wide.q,
        wide.k,
        wide.v,
        out,
        results.lse.contiguous(),  # hooks of saved tensors may return one with gaps; the operator does not ask
        None,
        None,
        inputs.q.shape[2],
        inputs.k.shape[2],
        0.0,
        is_causal(inputs),
        *no_rng(inputs.q),
        scale=inputs.scale,
    )
    return Gradients(*(g[..., :D] for g in grads))
