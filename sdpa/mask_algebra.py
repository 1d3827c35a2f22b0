"""`Mask & Mask`, and the recognition of structure in a dense bool tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sdpa.mask import Mask, Window


def combine(a: Mask, b: Mask) -> Mask:
    """The mask that lets through what both let through. Raises ValueError where the fields cannot express it."""
    return Mask(
        causal=a.causal or b.causal,
        align=common_alignment(a, b),
        window=narrower(a.window, b.window),
        lengths=both("lengths", a, b, torch.minimum),
        query_lengths=both("query_lengths", a, b, torch.minimum),
        segments=one_of("segments", a, b),
        cu_seqlens=one_of("cu_seqlens", a, b),
        prefix=common_prefix(a, b),
        alibi=both("alibi", a, b, torch.add),
        allowed=both("allowed", a, b, torch.logical_and),
        bias=both("bias", a, b, torch.add),
    )


def both(name: str, a: Mask, b: Mask, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    """A field of both masks. Raises ValueError where its shapes do not broadcast."""
    x, y = getattr(a, name), getattr(b, name)
    if x is None or y is None:
        return y if x is None else x
    if any(one != other and 1 not in (one, other) for one, other in zip(x.shape[::-1], y.shape[::-1], strict=False)):
        raise ValueError(f"masks with {name} of shapes {tuple(x.shape)} and {tuple(y.shape)} cannot be combined")
    return join(x, y)


def common_alignment(a: Mask, b: Mask) -> str:
    """The alignment of the mask that has something to align. Raises ValueError where both have, and they differ."""
    aligned = [m for m in (a, b) if m.has_band or m.alibi is not None]
    if len({m.align for m in aligned}) > 1:
        raise ValueError(f"masks aligned {a.align} and {b.align} cannot be combined; make one of them dense first")
    if aligned:
        return aligned[0].align
    return b.align if a.align == "top_left" else a.align


def narrower(x: Window | None, y: Window | None) -> Window | None:
    if x is None or y is None:
        return y if x is None else x
    left, right = ([s for s in sides if s is not None] for sides in zip(x, y, strict=True))
    return (min(left) if left else None, min(right) if right else None)


def one_of(name: str, a: Mask, b: Mask) -> Tensor | tuple[Tensor, Tensor] | None:
    x, y = getattr(a, name), getattr(b, name)
    other = {"segments": "cu_seqlens", "cu_seqlens": "segments"}[name]
    clash = (x is not None and (y is not None or getattr(b, other) is not None)) or (
        y is not None and getattr(a, other) is not None
    )
    if clash and x is not y:
        raise ValueError("two masks with segments cannot be combined; give one set of ids that tells both apart")
    return y if x is None else x


def common_prefix(a: Mask, b: Mask) -> int | Tensor | None:
    """(band | p) & (band | q) is band | min(p, q); a prefix on one side only needs the other to have no band."""
    if a.prefix is None and b.prefix is None:
        return None
    same_band = a.band == b.band and a.prefix is not None and b.prefix is not None
    if same_band:
        numbers = [m.prefix for m in (a, b) if isinstance(m.prefix, int)]
        if len(numbers) == 2:
            return min(numbers)
        p, q = (torch.as_tensor(m.prefix) for m in (a, b))
        return torch.minimum(p.to(q.device) if p.dim() == 0 else p, q.to(p.device) if q.dim() == 0 else q)
    owner, other = (a, b) if a.prefix is not None else (b, a)
    if other.has_band or other.prefix is not None:
        raise ValueError("a mask with a prefix cannot be combined with another causal mask, window or prefix")
    return owner.prefix


def recognise_bool(mask: Tensor) -> Mask:
    """All-True, a causal triangle (either alignment) or left-aligned padding as fields; anything else as it is."""
    if bool(mask.all()):
        return Mask()
    if mask.dim() >= 2:
        M, N = mask.shape[-2:]
        for align, diagonal in (("top_left", 0), ("bottom_right", N - M)):
            triangle = torch.ones(M, N, dtype=torch.bool, device=mask.device).tril(diagonal)
            if M > 1 and bool((mask == triangle).all()):
                return Mask(causal=True, align=align)
    if mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] == 1:
        lengths = mask[:, 0, 0].sum(-1)
        left_aligned = torch.arange(mask.shape[-1], device=mask.device) < lengths[:, None]
        if bool((mask[:, 0, 0] == left_aligned).all()):
            return Mask(lengths=lengths.to(torch.int32))
    return Mask(allowed=mask)
