"""Every check of a dense call. Each message is one sentence that says what was expected and what was got."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdpa.mask import Mask
from sdpa.scalars import as_int, conversion, is_scalar, shown, type_name

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MIN_RANK = 2
NAMES = ("query", "key", "value")  # of the parameters

# torch prints C++ type names in its messages, which programs may match.
DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "c10::BFloat16",
    torch.float16: "c10::Half",
    torch.bool: "bool",
    torch.int64: "long int",
    torch.int32: "int",
    torch.int16: "short int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype))


class Options(NamedTuple):
    """Every argument beside query, key and value that changes the result."""

    attn_mask: Tensor | Mask | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | Tensor | None = None
    enable_gqa: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None


class Call(NamedTuple):
    """A call's arguments, as they are checked and normalised."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: Options
    places: Any  # Documents, Pages or None


class Sizes(NamedTuple):
    """The dimensions that masks are checked against and fitted to, and the batch dimensions as they were given."""

    B: int
    H: int
    M: int
    N: int
    lead: tuple[int, ...]


def check_dense(call: Call) -> Sizes:
    """Check a call of scaled_dot_product_attention."""
    query, key, value, options, _ = call
    check_tensors(query, key, value)
    check_sizes(query, key, value)
    check_options(options)
    lead = leading_shape(query, key, value)
    H, heads_k, heads_v = (t.shape[-3] if t.dim() > MIN_RANK else 1 for t in (query, key, value))
    check_heads(H, heads_k, heads_v, options.enable_gqa)
    H = max(heads_k, heads_v) if H == 1 and not options.enable_gqa else H
    check_sinks(options.sinks, query, H)
    mask = check_mask_argument(options, query)
    sizes = Sizes(math.prod(lead), H, query.shape[-2], key.shape[-2], tuple(lead))
    if mask is not None:
        check_mask(mask, query, sizes)
    return sizes


def check_options(options: Options, function: str = "scaled_dot_product_attention") -> None:
    check_numbers(options.dropout_p, options.scale, options.softcap)
    check_flag("is_causal", options.is_causal, function)
    check_flag("enable_gqa", options.enable_gqa, function)


def leading_shape(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """The broadcast of everything before the heads, at least one dimension."""
    leads = [t.shape[:-3] for t in (query, key, value)]
    if leads[0] == leads[1] == leads[2]:
        return leads[0] if len(leads[0]) else torch.Size([1])
    try:
        return torch.broadcast_shapes(*leads, (1,))
    except RuntimeError:
        got = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise RuntimeError(
            f"Expected the batch dimensions of query, key and value to broadcast, but got shapes {got}."
        ) from None


def check_mask_argument(options: Options, query: Tensor) -> Tensor | Mask | None:
    """Check the type of attn_mask, and that it is not given beside is_causal."""
    given = options.attn_mask
    if given is None:
        return None
    if options.is_causal:
        raise RuntimeError(
            "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True; combine them as "
            "attn_mask=sdpa.Mask(causal=True) & attn_mask."
        )
    if isinstance(given, Mask):
        return given
    if not isinstance(given, Tensor):
        raise TypeError(f"attn_mask must be a Tensor, a sdpa.Mask or None, but got {type_name(given)}")
    check_strided("attn_mask", given)
    check_mask_dtype("attn_mask", given, query)
    return given


def check_mask(mask: Tensor | Mask, query: Tensor, sizes: Sizes) -> None:
    """Check that the tensors of a mask are on the query's device and fit the sizes of the call."""
    tensors = [("attn_mask", mask)] if isinstance(mask, Tensor) else mask.tensors()
    for name, tensor in tensors:
        check_strided(name, tensor)
        if tensor.device != query.device:
            raise RuntimeError(
                f"Expected {name} to be on the query's device {query.device}, but got {tensor.device} instead."
            )
    if isinstance(mask, Tensor):
        return check_broadcast("attn_mask", mask, sizes)
    B, H = sizes.B, sizes.H
    check_segments(mask, sizes)
    for name, lengths in (("lengths", mask.lengths), ("query_lengths", mask.query_lengths)):
        if lengths is not None:
            check_shape(name, lengths, ((B,), (1,), ()))
    if isinstance(mask.prefix, Tensor):
        check_shape("prefix", mask.prefix, ((B,), (1,), ()))
    if mask.alibi is not None:
        check_alibi(mask.alibi, B, H)
    if mask.allowed is not None:
        check_broadcast("Mask.allowed", mask.allowed, sizes)
    if mask.bias is not None:
        check_mask_dtype("Mask.bias", mask.bias, query)
        check_broadcast("Mask.bias", mask.bias, sizes)
    return None


def check_dense_mask(mask: Mask, sizes: dict[str, int]) -> None:
    """The sizes of `Mask.dense`, and that the tensors of the mask are together."""
    for name, size in sizes.items():
        if not isinstance(size, Tensor):  # torch.jit.trace makes tensors of sizes
            check_count(name, size, "Mask.dense")
    tensors = mask.tensors()
    for name, tensor in tensors:
        first, device = tensors[0][0], tensors[0][1].device
        if tensor.device != device:
            raise RuntimeError(
                f"Expected the tensors of a mask on one device, but got {first} on {device} and {name} on "
                f"{tensor.device}."
            )


def check_segments(mask: Mask, sizes: Sizes) -> None:
    """Ids (B|1, M) and (B|1, N), or cumulative lengths (documents + 1,)."""
    given = mask.segments if mask.segments is not None else mask.cu_seqlens
    if given is None:
        return
    pair = given if isinstance(given, tuple) else (given, given)
    for name, ids, size in zip(("query", "key"), pair, (sizes.M, sizes.N), strict=True):
        if mask.segments is not None:
            check_shape(f"{name} segments", ids, ((sizes.B, size), (1, size), (size,)))
        elif ids.dim() != 1 or ids.numel() < 2:
            raise RuntimeError(
                f"Expected cu_seqlens to have shape (documents + 1,), but got {tuple(ids.shape)} instead."
            )
    if mask.segments is None and not isinstance(given, tuple) and sizes.M != sizes.N:
        raise RuntimeError(
            f"Mask.cu_seqlens is one tensor for queries and keys alike, but there are {sizes.M} queries and {sizes.N} "
            "keys; give a pair of tensors."
        )


def check_alibi(slopes: Tensor, B: int, H: int) -> None:
    check_shape("alibi slopes", slopes, ((H,), (1, H), (B, H)))
    if slopes.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "Expected alibi slopes without requires_grad, because they have no gradient; detach them, or pass "
            "-slope * distance as a bias, which has one."
        )


def check_broadcast(name: str, mask: Tensor, sizes: Sizes) -> None:
    """A dense mask broadcasts to (..., H, M, N)."""
    full, given = (*sizes.lead, sizes.H, sizes.M, sizes.N), tuple(mask.shape)
    own = (1,) * (4 - len(given)) + given
    own = (1,) * (len(full) - len(own)) + own
    if len(own) != len(full) or any(s not in (1, f) for s, f in zip(own, full, strict=True)):
        raise RuntimeError(f"{name} of shape {given} does not broadcast to (..., H, M, N) = {full}")


def check_sinks(sinks: object, query: Tensor, H: int) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks must be a Tensor of shape (H,) or None, but got {type_name(sinks)}")
    check_same_device("sinks", sinks, query)
    check_shape("sinks", sinks, ((H,),))
    if sinks.dtype not in (torch.float32, query.dtype):
        raise RuntimeError(
            f"Expected sinks to be float32 or of the query's dtype {query.dtype}, but got {sinks.dtype}."
        )


def check_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    function: str = "scaled_dot_product_attention",
    names: tuple[str, str, str] = NAMES,
) -> None:
    """Types, dtypes, devices and ranks of the three inputs agree; `names` are those of the function's parameters."""
    for name, tensor in zip(names, (query, key, value), strict=True):
        check_tensor(name, tensor, function)
    for name, tensor in zip(names, (query, key, value), strict=True):
        check_strided(name, tensor)
    q, k, v = names
    listed = f"Expected {q}, {k}, and {v} to"
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            f"{listed} have the same dtype, but got {q}.dtype: {dtype_name(query.dtype)} {k}.dtype: "
            f"{dtype_name(key.dtype)} and {v}.dtype: {dtype_name(value.dtype)} instead."
        )
    if not query.device == key.device == value.device:
        raise RuntimeError(
            f"{listed} have the same device type, but got {q}.device: {query.device} {k}.device: {key.device} and "
            f"{v}.device: {value.device} instead."
        )
    if min(query.dim(), key.dim(), value.dim()) < MIN_RANK:
        raise RuntimeError(
            f"{listed} all be  at least {MIN_RANK} dimensional, but got {q}.dim: {query.dim()} {k}.dim: {key.dim()} "
            f"and {v}.dim: {value.dim()} instead."
        )
    if query.dtype not in FLOATING:
        raise RuntimeError(
            f"{listed} be float32, float64, bfloat16 or float16, but got {dtype_name(query.dtype)} instead."
        )


def check_tensor(name: str, tensor: object, function: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}(): argument '{name}' must be Tensor, not {type_name(tensor)}")


def check_strided(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise RuntimeError(f"Expected {name} to be a dense tensor (torch.strided), but got {tensor.layout} instead.")


def check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Head size of query and key, and length of key and value, agree."""
    check_head_sizes(query, "key", key)
    if key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            "Expected key and value to have the same length (second to last dimension), but got "
            f"{shapes(key=key, value=value)} instead."
        )


def check_numbers(dropout_p: float, scale: object, softcap: Any) -> None:
    if not is_scalar(dropout_p):
        raise TypeError(f"dropout_p must be a number between 0 and 1, but got {shown(dropout_p)}")
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    if isinstance(scale, Tensor) and scale.dim() != 0:
        raise TypeError(
            f"scale must be a number or a 0-dimensional tensor, but got a tensor of shape {tuple(scale.shape)}"
        )
    if scale is not None and not is_scalar(scale):
        raise TypeError(f"scale must be a number or a 0-dimensional tensor, but got {type_name(scale)}")
    if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled():
        raise TypeError("scale must be a number, or a tensor without requires_grad: multiply the query by one with it")
    if softcap is None:
        return
    told = "softcap must be None or a finite number >= 0 (0 means none), but got"
    number = isinstance(softcap, numbers.Real) and not isinstance(softcap, bool)
    if not number:
        raise TypeError(f"{told} {shown(softcap)}")
    huge = isinstance(softcap, int) and softcap > sys.float_info.max
    if huge or not 0 <= softcap < math.inf:
        raise RuntimeError(f"{told} {shown(softcap)}")


def check_flag(name: str, value: object, function: str) -> None:
    if not isinstance(value, (bool, torch.SymBool)):
        instead = conversion(name, value, bool)
        raise TypeError(f"{function}(): argument '{name}' must be bool, not {type_name(value)}{instead}")


def check_count(name: str, value: object, function: str) -> None:
    count = as_int(value)
    if count is None:
        instead = conversion(name, value, int)
        raise TypeError(f"{function}(): argument '{name}' must be int, not {type_name(value)}{instead}")
    if count < 0:
        raise RuntimeError(f"Expected {name} to be 0 or more, but got {count}.")


def check_heads(H: int, heads_k: int, heads_v: int, enable_gqa: bool, names: tuple[str, str, str] = NAMES) -> None:
    """Equal heads, or one head that broadcasts, or with enable_gqa a divisor of the query's heads."""
    if H == heads_k == heads_v:
        return
    q, k, v = names
    if enable_gqa:
        if any(h == 0 or H % h for h in (heads_k, heads_v)) and H:
            raise RuntimeError(
                f"Number of heads in {k} and {v} must divide the number of heads in {q}, but got "
                f"{H} {q} heads, {heads_k} {k} heads and {heads_v} {v} heads."
            )
        return
    several = {h for h in (H, heads_k, heads_v) if h != 1}
    if len(several) > 1:
        raise RuntimeError(
            f"Expected {q}, {k} and {v} to have equal numbers of heads, or one that broadcasts, but got "
            f"{H}, {heads_k} and {heads_v}; enable_gqa=True allows fewer key and value heads."
        )


def check_mask_dtype(name: str, mask: Tensor, query: Tensor) -> None:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            f"Expected {name} dtype to be bool or float or to match query dtype, but got {name}.dtype: "
            f"{dtype_name(mask.dtype)} and  query.dtype: {dtype_name(query.dtype)} instead."
        )


def check_same_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise RuntimeError(
            f"Expected {name} to be on the query's device {query.device}, but got {tensor.device} instead."
        )


def check_shape(name: str, tensor: Tensor, accepted: tuple[tuple[int, ...], ...]) -> None:
    """`tensor` has one of the accepted shapes."""
    if tuple(tensor.shape) not in accepted:
        wanted = " or ".join(dict.fromkeys(map(str, accepted)))
        raise RuntimeError(f"Expected {name} to have shape {wanted}, but got {tuple(tensor.shape)} instead.")


def check_dimensions(name: str, tensor: Tensor, dimensions: str) -> None:
    """`dimensions` are names separated by commas, as many as the tensor must have."""
    if tensor.dim() != dimensions.count(",") + 1:
        raise RuntimeError(f"Expected {name} to have shape ({dimensions}), but got {tuple(tensor.shape)} instead.")


def check_int32(name: str, tensor: Tensor, query: Tensor) -> None:
    """Check indices that kernels read: int32 on the query's device."""
    if tensor.dtype != torch.int32:
        raise RuntimeError(f"Expected {name} to be int32, but got {dtype_name(tensor.dtype)} instead.")
    check_same_device(name, tensor, query)


def check_head_sizes(query: Tensor, name: str, key: Tensor) -> None:
    if query.shape[-1] != key.shape[-1]:
        raise RuntimeError(
            f"Expected query and {name} to have the same head size (last dimension), but got "
            f"{shapes(**{'query': query, name: key})} instead."
        )


def shapes(**tensors: Tensor) -> str:
    return " and ".join(f"{name}.shape: {tuple(tensor.shape)}" for name, tensor in tensors.items())
