"""Attention together with its weights: the fused forward, and the weights from its log-sum-exp without a softmax."""

from __future__ import annotations

from torch import Tensor

from sdpa.entry import answer
from sdpa.kinds import WEIGHTS
from sdpa.validate import Options


def attention_with_weights(q: Tensor, k: Tensor, v: Tensor, options: Options, average: bool) -> tuple[Tensor, Tensor]:
    """(out (B, H, M, Dv), weights (B, M, N), or (B, H, M, N) unless `average`) after dropout; both differentiable."""
    return answer(WEIGHTS[average], (q, k, v), tuple(options), True, None)
