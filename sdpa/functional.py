"""scaled_dot_product_attention, the front door: checks a call and asks for the fastest correct kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from sdpa import eager, flops
from sdpa.autograd import Attention, apply, below_autograd, is_transformed, needs_grad
from sdpa.decomposed import is_decomposed, results_of
from sdpa.dispatch.context import request_text
from sdpa.graph import in_graph, nests_forward, plain
from sdpa.inputs import Options, build_inputs, restore_rank
from sdpa.interop import as_mask, cast_for_autocast, is_nested, nested_attention
from sdpa.mask import Mask
from sdpa.plans import select_by_modes
from sdpa.problem import AttentionInputs, Results
from sdpa.validate import check_flag


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
            A forward-only kernel leaves the backward to whoever has one.

    Returns:
        (..., H, M, Dv) in the memory layout of `query`, or in the one torch returns where its kernel answers a plain
        call; with `return_lse` a pair. A row that sees no key is 0, with log-sum-exp -inf and gradient 0.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, in torch's words where torch has them.
        TypeError, ValueError: an argument of the wrong kind; an unknown kernel.
        NoKernelError (a RuntimeError): no kernel is able and allowed; lists each with its reasons.

    Method: online softmax over tiles (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
    """
    if dropout_p == 0.0 and softcap is None and sinks is None and return_lse is False:
        out = eager.attend(query, key, value, attn_mask, is_causal, scale, enable_gqa, kernel)
        if out is not None:
            return out
    check_flag("return_lse", return_lse, "scaled_dot_product_attention")
    options = Options(attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks)
    tensors = (query, key, value, None if isinstance(attn_mask, Mask) else attn_mask, sinks)
    if has_torch_function(tensors):
        mask = as_mask(attn_mask)
        if mask is attn_mask:
            return handle_torch_function(
                scaled_dot_product_attention,
                tensors,
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
                softcap=softcap,
                sinks=sinks,
                return_lse=return_lse,
                kernel=kernel,
            )
        if is_causal:
            raise ValueError("CausalBias should not be used with causal=True")
        options = options._replace(attn_mask=mask)
    request = request_text(kernel)
    if is_nested(query, key, value):
        return nested_attention(query, key, value, options, request, attend, return_lse)
    device_type = query.device.type if isinstance(query, Tensor) else "cpu"
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        query, key, value, options = cast_for_autocast(query, key, value, options, device_type)
        with torch.autocast(device_type, enabled=False):
            results = attend(query, key, value, options, return_lse, request)
    else:
        results = attend(query, key, value, options, return_lse, request)
    return results if return_lse else results.out


def attend(query: Tensor, key: Tensor, value: Tensor, options: Options, needs_lse: bool, request: str) -> Results:
    """A checked call through autograd or straight to the operator."""
    inputs = build_inputs(query, key, value, options)
    return dropped(restore_rank(run(inputs, needs_lse, request), query, key, value), options)


def dropped(results: Results, options: Options) -> Results:
    """Nothing is left where every weight is dropped; kernels only know probabilities below 1."""
    if options.dropout_p != 1.0:
        return results
    return results._replace(out=torch.nn.functional.dropout(results.out, 1.0))


def run(inputs: AttentionInputs, needs_lse: bool, request: str) -> Results:
    """The operator, in eager mode inside the autograd.Function where a derivative may be asked for."""
    if is_decomposed():
        return results_of(inputs, needs_lse)
    if torch.compiler.is_compiling():
        return in_graph(inputs, needs_lse, request)
    if select_by_modes():
        flops.announce()
    if nests_forward():
        return in_graph(inputs, needs_lse, request)
    if needs_grad(inputs) or is_transformed():
        return Results(*apply(Attention, *inputs, request))
    with below_autograd():
        return plain(inputs, needs_lse, request)
