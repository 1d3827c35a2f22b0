"""scaled_dot_product_attention: its signature and its meaning. `entry` computes it."""

from __future__ import annotations

from torch import Tensor

from sdpa.entry import answer, public
from sdpa.kinds import DENSE
from sdpa.mask import Mask


@public(DENSE)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query key^T + mask) value, by the fastest kernel that is able and allowed.

    A drop-in for torch.nn.functional.scaled_dot_product_attention; what stands after `enable_gqa` is ours.
    Shapes: B batch (any number of dimensions, which broadcast), H query heads, Hkv key/value heads, M queries, N keys,
    D and Dv head sizes.

    Args:
        query: (..., H, M, D) float32, float64, bfloat16 or float16.
        key: (..., Hkv, N, D).
        value: (..., Hkv, N, Dv).
        attn_mask: bool (True = attend) or float (added to the scaled scores) of the query's dtype or float32,
            broadcastable to (..., H, M, N) and read through its strides; or a `Mask`; or torch's CausalBias.
        dropout_p: probability in [0, 1] with which a weight is zeroed; always applied; reproducible from torch's
            generator.
        is_causal: query i sees keys 0..i (aligned to the top left also when M != N).
        scale: factor of the scores, any sign; 1 / sqrt(D) by default.
        enable_gqa: allow Hkv to be a divisor of H; keys and values are never repeated in memory.
        softcap: scores become softcap * tanh(score / softcap) before the mask (Gemma 2).
        sinks: (H,) logits that take part in the softmax and have no value (gpt-oss).
        return_lse: also return the log-sum-exp of each row, natural log, (..., H, M), float32 (float64 for float64
            inputs); it is differentiable.
        kernel: name of a kernel or family that must run; it raises with its reasons if it cannot.
            The backward of a forward-only kernel is selected freely.

    Returns:
        (..., H, M, Dv) in the memory layout of `query`, or in the one torch returns where its kernel answers; with
        `return_lse` a pair. A row that sees no key is 0, with log-sum-exp -inf and gradient 0.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, in torch's words where torch has them.
        TypeError, ValueError: an argument of the wrong kind; an unknown kernel.
        NoKernelError (a RuntimeError): no kernel is able and allowed; lists each with its reasons.

    Method: online softmax over tiles (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
    """
    options = (attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks)
    return answer(DENSE, (query, key, value), options, return_lse, kernel)
