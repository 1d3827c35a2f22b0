"""The masks of torch's modules as ours: there True and lengths say what is hidden, here what is seen."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa import sharded
from sdpa.mask import Mask
from sdpa.nn.padding import is_lengths
from sdpa.scalars import type_name
from sdpa.validate import check_tensor

NAMES = ("key_padding_mask", "attn_mask")  # what a caller knows them by
DECODER_INPUTS = ("tgt", "memory")
DECODER_MASKS = ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask")


def check_kinds(module: torch.nn.Module, inputs: Mapping[str, object], masks: Mapping[str, object]) -> None:
    """Inputs are tensors, and masks are if they are given."""
    for name, given in inputs.items():
        if not isinstance(given, Tensor):
            refuse_proxy(module, given)
            check_tensor(name, given, type(module).__name__)
    for name, given in masks.items():
        if given is not None and not isinstance(given, Tensor):
            kind = type_name(given)
            raise TypeError(f"{type(module).__name__}(): argument '{name}' must be Tensor or None, not {kind}")


def check_decoder(module: torch.nn.Module, inputs: tuple[object, ...], masks: tuple[object, ...]) -> None:
    """The same of a decoder or a layer of one."""
    check_kinds(module, dict(zip(DECODER_INPUTS, inputs, strict=True)), dict(zip(DECODER_MASKS, masks, strict=True)))


def refuse_proxy(module: torch.nn.Module, given: object) -> None:
    """torch.fx takes torch's own modules for nodes, and would trace through ours."""
    if type(given).__module__ == "torch.fx.proxy":
        raise TypeError(
            f"torch.fx.symbolic_trace cannot trace {type(module).__name__}, whose code depends on the values of its "
            "arguments; sdpa.restore(model) makes it torch's again, or give a torch.fx.Tracer whose is_leaf_module is "
            "true for it; torch.export can trace it."
        )


def check_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool, names: tuple[str, str] = NAMES
) -> None:
    """torch's complaints, in its words."""
    for name, mask in zip(names, (key_padding_mask, attn_mask), strict=True):
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise AssertionError(f"only bool and floating types of {name} are supported")
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "Need attn_mask if specifying the is_causal hint. You may use the Transformer module method "
            "`generate_square_subsequent_mask` to create this mask."
        )


def check_lengths(key_padding_mask: Tensor | None, query: Tensor) -> None:
    """What torch would not say of one dimension: that lengths are taken, too. Of a bool mask torch says enough."""
    if key_padding_mask is None or query.dim() != 3 or key_padding_mask.dim() != 1:
        return
    if is_lengths(key_padding_mask) or key_padding_mask.dtype == torch.bool:
        return
    raise AssertionError(
        "For batched (3-D) `query`, expected `key_padding_mask` to be a 2-D mask, bool or floating, or 1-D lengths, "
        f"which are integers, but got a 1-D tensor of {key_padding_mask.dtype}"
    )


def check_shapes(key_padding_mask: Tensor | None, attn_mask: Tensor | None, query: Tensor, N: int) -> None:
    """Of the masks for queries (B, H, M, D) and N keys."""
    B, H, M, _ = query.shape
    if attn_mask is not None:
        wanted = (M, N) if attn_mask.dim() == 2 else (B * H, M, N)
        if tuple(attn_mask.shape) != wanted:
            raise RuntimeError(
                f"The shape of the {attn_mask.dim()}D attn_mask is {attn_mask.shape}, but should be {wanted}."
            )
    if key_padding_mask is None:
        return
    expected = (B,) if is_lengths(key_padding_mask) else (B, N)
    for dim, (got, want) in enumerate(zip(key_padding_mask.shape, expected, strict=True)):
        if got != want:
            raise AssertionError(f"Expected key_padded_mask.shape[{dim}] to be {want}, but got {got}")


def mask_of(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    N: int,
    extra: int,
    query: Tensor,
) -> Mask | None:
    """What a query (B, H, M, D) sees of N keys and of `extra` ones behind them, which all see.

    A causal mask is told by its hint and not read; with a padding mask torch reads it, and extra keys it does not know.
    """
    if key_padding_mask is None and attn_mask is None:
        return None
    if key_padding_mask is not None or not is_causal:
        sharded.refuse_inside(
            "layers take no mask but a causal one, said by is_causal=True, because theirs are of their own rows"
        )
    mask = Mask()
    if is_causal and not extra:
        mask = Mask(causal=True)
    elif attn_mask is not None:
        attn_mask = attn_mask.unsqueeze(0) if attn_mask.dim() == 2 else attn_mask.unflatten(0, query.shape[:2])
        mask = as_seen(attn_mask, extra, query)
    if key_padding_mask is None:
        return mask
    if is_lengths(key_padding_mask):
        if not extra:
            return mask & Mask(lengths=key_padding_mask)
        key_padding_mask = torch.arange(N, device=query.device) >= key_padding_mask[:, None]
    return mask & as_seen(key_padding_mask[:, None, None, :], extra, query)


def as_seen(mask: Tensor, extra: int, query: Tensor) -> Mask:
    """A mask of torch's modules, bool (True = hidden) or float (added), with `extra` keys behind that all see."""
    if mask.dtype == torch.bool:
        return Mask(allowed=F.pad(~mask, (0, extra), value=True) if extra else ~mask)
    mask = mask if mask.dtype == torch.float32 else mask.to(query.dtype)
    return Mask(bias=F.pad(mask, (0, extra)) if extra else mask)
