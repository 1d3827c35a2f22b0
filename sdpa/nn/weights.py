"""Attention together with its weights: the fused forward, and the weights from its log-sum-exp without a softmax."""

from __future__ import annotations

from torch import Tensor

from sdpa.entry import answer
from sdpa.kinds import WEIGHTS
from sdpa.validate import Options


def attention_with_weights(q: Tensor, k: Tensor, v: Tensor, options: Options, average: bool) -> tuple[Tensor, Tensor]:
    """(out, weights) of q (B, H, M, D), k (B, Hkv, N, D) and v (B, Hkv, N, Dv).

    out is (B, H, M, Dv). The weights are after dropout, (B, M, N) with `average`, else (B, H, M, N). Both are
    differentiable.
    """
    return answer(WEIGHTS[average], (q, k, v), tuple(options), True, None)
