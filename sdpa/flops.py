"""Formulas for torch's FlopCounterMode: matrix products of our operators, counted without regard to masks, as torch
counts its own.

torch.utils.flop_counter imports Triton where there is one, so it is not imported to register formulas. A counter copies
the registered formulas when it is made. So ours are given to the counters that are active when a call passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdpa.operators import of_backward, of_forward, of_weights
from sdpa.problem import AttentionInputs, lengths_of
from sdpa.torch_private import dispatch_mode_stack


def announce() -> None:
    """Give the operators' formulas to every active FlopCounterMode."""
    for mode in dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.setdefault(torch.ops.sdpa.attention_forward, forward_flops)
            registry.setdefault(torch.ops.sdpa.attention_backward, backward_flops)
            registry.setdefault(torch.ops.sdpa.attention_weights, weights_flops)


def forward_flops(*args: Any, **options: Any) -> int:
    """Two products: scores and results."""
    inputs, _, _ = of_forward(args)
    return 2 * pairs_of(inputs) * inputs.q.shape[1] * (inputs.q.shape[3] + inputs.v.shape[3])


def backward_flops(*args: Any, **options: Any) -> int:
    """Five products: the scores again, gradients of the weights, and of q, k and v."""
    inputs, *_ = of_backward(args)
    return 2 * pairs_of(inputs) * inputs.q.shape[1] * (3 * inputs.q.shape[3] + 2 * inputs.v.shape[3])


def weights_flops(*args: Any, **options: Any) -> int:
    """One product: the scores."""
    inputs, *_ = of_weights(args)
    return 2 * pairs_of(inputs) * inputs.q.shape[1] * inputs.q.shape[3]


def pairs_of_segments(queries: Tensor, keys: Tensor) -> int:
    """How many queries and keys have the same id."""
    ids, places = torch.cat([queries, keys]).unique(return_inverse=True)
    of_queries, of_keys = (part.bincount(minlength=len(ids)) for part in places.split([len(queries), len(keys)]))
    return int(of_queries @ of_keys)


def pairs_of(inputs: AttentionInputs) -> int:
    """B * M * N. For packed documents it is the sum of their M * N where the lengths can be read, else as if all were
    the longest. Segments, and lengths of queries and keys, count as documents, because CPU kernels get packed sequences
    in these forms."""
    B, M, N = lengths_of(inputs)
    queries, keys = inputs.q_segments, inputs.k_segments
    if type(queries) is Tensor and type(keys) is Tensor and queries.device.type != "meta":
        rows = max(queries.shape[0], keys.shape[0])
        pairs = zip(queries.expand(rows, -1), keys.expand(rows, -1), strict=True)
        return B // rows * sum(map(pairs_of_segments, *zip(*pairs, strict=True)))
    q_lengths, k_lengths = inputs.q_lengths, inputs.k_lengths
    if type(q_lengths) is Tensor and type(k_lengths) is Tensor:
        if "meta" not in (q_lengths.device.type, k_lengths.device.type):
            return int((q_lengths.long() * k_lengths).sum())
    if type(inputs.cu_q) is Tensor and type(inputs.cu_k) is Tensor and inputs.cu_q.device.type != "meta":
        return int((inputs.cu_q.diff().long() * inputs.cu_k.diff()).sum())
    return B * M * N
