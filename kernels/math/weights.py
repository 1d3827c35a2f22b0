"""Attention's weights exp(score - lse) by torch operations: as a tensor, made part by part, and as a formula.

`composite_weights` and `weights_gradients` are plain compositions: autograd, functorch and torch.compile may
differentiate or trace through them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sdpa import dense, philox
from sdpa.kernels.math.scores import finite, over_group, per_group, quarantine, scaled_scores_less, scores_of
from sdpa.problem import AttentionInputs, AttentionProblem, Tile
from sdpa.torch_private import without_autocast

# Scores that are made at once: 4 MiB in float32, which stay in a processor's cache until they are weights.
PART = 1 << 20
# Fields of AttentionInputs (B, ...) or (1, ...) that heads share.
PER_ENTRY = ("q_lengths", "k_lengths", "prefix", "q_segments", "k_segments")


class WeightTerms(NamedTuple):
    """What the weights and their gradients share."""

    probabilities: Tensor  # [B, H, M, N], before dropout
    keep: Tensor | None  # [B, H, M, N], dropout's factor: 0 or philox.kept_factor(p)
    slope: Tensor | None  # [B, H, M, N], derivative of softcap
    q: Tensor
    k: Tensor

    @property
    def weights(self) -> Tensor:
        return self.probabilities if self.keep is None else self.probabilities * self.keep


class WeightGradients(NamedTuple):
    q: Tensor
    k: Tensor
    bias: Tensor | None
    lse: Tensor


def weights(inputs: AttentionInputs, lse: Tensor, problem: AttentionProblem, tile: Tile | None) -> Tensor:
    """(B, H, M, N) after dropout in the query's dtype, or (B, M, N), their mean over heads, where that is asked for."""
    average = "averaged" in problem.features
    with without_autocast():
        if problem.B * problem.H * problem.M * problem.N <= PART:
            return composite_weights(inputs, lse, average)
        return weights_by_part(inputs, lse, problem, average)


def weights_by_part(inputs: AttentionInputs, lse: Tensor, problem: AttentionProblem, average: bool) -> Tensor:
    """Batch entry by batch entry, and of large ones group of heads by group of heads."""
    B, H, M, N = problem.B, problem.H, problem.M, problem.N
    result = inputs.q.new_empty((B, M, N) if average else (B, H, M, N))
    heads = min(H, problem.G * max(1, PART // (problem.G * M * N)))
    entries = max(1, PART // (heads * M * N))
    for first in range(0, B, entries):
        some, total = slice(first, min(B, first + entries)), 0.0
        for head in range(0, H, heads):
            its = slice(head, min(H, head + heads))
            made = part_terms(inputs, lse, some, its).weights
            if average:
                total = total + made.sum(1)
            else:
                result[some, its] = made
        if average:
            result[some] = total / H
    return result


def part_terms(inputs: AttentionInputs, lse: Tensor, entries: slice, heads: slice) -> WeightTerms:
    """The terms of some batch entries and of some heads, which are whole groups."""
    H, G = inputs.q.shape[1], inputs.q.shape[1] // inputs.k.shape[1]
    groups = slice(heads.start // G, heads.stop // G)
    batch, head = (torch.arange(part.start, part.stop, device=lse.device) for part in (entries, heads))
    both = {name: cut(getattr(inputs, name), entries, heads) for name in ("bias", "allowed", "alibi")}
    one = {name: cut(getattr(inputs, name), entries) for name in PER_ENTRY}
    q, k, v = inputs.q[entries, heads], inputs.k[entries, groups], inputs.v[entries, groups]
    part = inputs._replace(q=q, k=k, v=v, **both, **one)
    streams = None if inputs.rng is None else philox.streams_of(inputs.rng, batch[:, None], head, H)
    return weight_terms(part, lse[entries, heads], streams)


def cut(tensor: Tensor | None, *parts: slice) -> Tensor | None:
    """A part of the first dimensions, of those that do not broadcast."""
    if tensor is None:
        return None
    return tensor[tuple(part if size > 1 else slice(None) for part, size in zip(parts, tensor.shape, strict=False))]


def weight_terms(inputs: AttentionInputs, lse: Tensor, streams: Tensor | None = None) -> WeightTerms:
    """At least in float32: the log-sum-exp of a fused forward is that of sums in float32, and against scores rounded to
    half precision the weights of a row would not add up to 1. `streams`: those of dropout (sdpa.philox.keep_mask)."""
    q, k = inputs.q.to(lse.dtype), inputs.k.to(lse.dtype)
    k_bad = None
    if dense.structured(inputs) is not None:
        k, k_bad = quarantine(k)
    base, slope = finite(lse).unsqueeze(-1), None
    unmasked = k_bad is None and inputs.bias is None and inputs.allowed is None and inputs.alibi is None
    if unmasked and not inputs.softcap:
        differences = scaled_scores_less(q, k, inputs.scale, base)
    else:
        scores, slope = scores_of(inputs, q, k, k_bad)
        differences = scores - base
    probabilities = torch.exp(differences)  # in place is nothing for a graph
    keep = None
    if inputs.rng is not None:
        kept = philox.keep_mask(inputs.rng, inputs.dropout_p, tuple(probabilities.shape), streams)
        keep = kept.to(lse.dtype) * philox.kept_factor(inputs.dropout_p)
    return WeightTerms(probabilities, keep, slope, q, k)


def composite_weights(inputs: AttentionInputs, lse: Tensor, average: bool) -> Tensor:
    """`weights` all at once, as a composition of operations."""
    made = weight_terms(inputs, lse).weights
    return (made.mean(1) if average else made).to(inputs.q.dtype)


def weights_gradients(
    inputs: AttentionInputs, lse: Tensor, upstream: Tensor, average: bool, bias_grad: bool
) -> WeightGradients:
    """Gradients with respect to q, k, the bias and the log-sum-exp of `upstream`, which arrives at the weights, by the
    closed formula; the probabilities are computed again, so that the result is differentiable again."""
    terms = weight_terms(inputs, lse)
    grad = upstream.to(lse.dtype)
    if average:
        grad = grad.unsqueeze(1) / inputs.q.shape[1]
    if terms.keep is not None:
        grad = grad * terms.keep
    grad = terms.probabilities * grad  # [B, H, M, N], of the scores
    grad_lse = -grad.sum(-1)
    grad_bias = grad.sum_to_size(inputs.bias.shape).to(inputs.bias.dtype) if bias_grad else None
    if terms.slope is not None:
        grad = grad * terms.slope
    grad_q = per_group(grad, terms.k) * inputs.scale
    grad_k = over_group(grad.mT @ terms.q, inputs) * inputs.scale
    dtype = inputs.q.dtype
    return WeightGradients(grad_q.to(dtype), grad_k.to(dtype), grad_bias, grad_lse)
