"""torch's own attention on Apple's GPUs: its operator for MPS, which has neither a log-sum-exp nor a backward."""

from __future__ import annotations

import torch

from sdpa.kernels.vendor.common import Native, float_mask, is_causal, scale_option, settle
from sdpa.problem import AttentionInputs, AttentionProblem, Results, Tile

TILES: tuple[Tile, ...] = ()
FUSED_TORCH = (2, 13)


def unavailable() -> str | None:
    if not torch.backends.mps.is_available():
        return "torch sees no MPS device"
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < FUSED_TORCH:
        return f"torch has fused MPS kernels for many queries from 2.13 on, got torch {torch.__version__}"
    return None


def native(inputs: AttentionInputs) -> Native | None:
    """torch's operator without a mask, as torch calls it; None where it would be given copies."""
    if any(not tensor.is_contiguous() for tensor in inputs[:3]):
        return None
    options = (None, 0.0, True) if is_causal(inputs) else ()
    return torch._scaled_dot_product_attention_math_for_mps, options, scale_option(inputs) | group_option(inputs)


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None) -> Results:
    # Contiguous, as torch's own call gives it them: of transposed ones a release made wrong numbers (pytorch#163597).
    q, k, v = (tensor.contiguous() for tensor in inputs[:3])
    out, _ = torch.ops.aten._scaled_dot_product_attention_math_for_mps.default(
        q, k, v, float_mask(inputs), 0.0, is_causal(inputs), None, scale=inputs.scale, **group_option(inputs)
    )
    return Results(*settle(inputs, out, None))


def group_option(inputs: AttentionInputs) -> dict[str, bool]:
    return {"enable_gqa": True} if inputs.q.shape[1] != inputs.k.shape[1] else {}
