"""Mask: what a query may see, as orthogonal fields instead of an M x N tensor."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sdpa import dense
from sdpa.problem import UNLIMITED, AttentionInputs
from sdpa.scalars import as_int, conversion, shown, type_name
from sdpa.torch_private import TORCHS

ALIGNMENTS = ("top_left", "bottom_right")
ANDS: tuple[Callable[..., Any], ...] = (operator.and_, operator.iand)
ANDS += (Tensor.__and__, Tensor.__rand__, Tensor.__iand__)
ANDS += (Tensor.bitwise_and, Tensor.bitwise_and_)  # the functions that torch and torch.compile may call for `&`
Window = tuple[int | None, int | None]
KNOWN = (int, torch.SymInt)  # integers that need no conversion
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask made of any subset of these fields; `a & b` has the fields of both, `mask & tensor` adds a dense one.

    What `a & b` lets through is what both let through; a diagonal aligned to the bottom right is that of the lengths in
    `a & b`.

    Args:
        causal: query i sees keys up to its own position.
        align: "top_left" (torch's `is_causal`) puts query 0 at key 0; "bottom_right" puts the last query at the last
            key, of the lengths where they are given. Applies to causal, window and alibi. Without any of them there is
            nothing to align: it hides no key, and `&` takes the other mask's.
        window: (left, right) keys visible on each side of the own position; None lifts a side.
        lengths: (B,) integers (uint8, int8 to int64, as all that follow), the valid keys of each batch entry. More than
            there are means all of them.
        query_lengths: (B,) integers, the valid queries; rows beyond them are 0.
        segments: document ids, (M,) or (B, M) integers for self-attention, or a pair for queries and keys. A query
            sees the keys of its own document.
        cu_seqlens: the same by cumulative lengths (documents + 1,), or a pair for queries and keys.
        prefix: an integer or (B,) integers: keys that every query sees whatever causal and window say.
        alibi: slopes (H,) or (B, H); slope * distance is subtracted from the scores (Press et al., 2022).
        allowed: bool, True = attend, broadcastable to (B, H, M, N) and read through its strides.
        bias: float, added to the scaled scores, broadcastable likewise. It may require a gradient.

    Raises:
        ValueError, TypeError: a field of a wrong type or value, or two fields that exclude each other.
    """

    causal: bool = False
    align: str = "top_left"
    window: Window | None = None
    lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    segments: Tensor | tuple[Tensor, Tensor] | None = None
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None
    prefix: int | Tensor | None = None
    alibi: Tensor | None = None
    allowed: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        try:
            self.check()
        except TypeError:
            if not is_symbolic(self):
                raise

    def check(self) -> None:
        if not isinstance(self.causal, (bool, torch.SymBool)):
            hint = "; a mask of its own goes in as allowed or bias" if isinstance(self.causal, Tensor) else ""
            hint = hint or conversion("causal", self.causal, bool)
            raise TypeError(f"Mask.causal must be bool, got {type_name(self.causal)}{hint}")
        if self.align not in ALIGNMENTS:
            raise ValueError(f"Mask.align must be one of {ALIGNMENTS}, got {self.align!r}")
        plain_integers(self)
        check_window(self.window)
        check_integers(self)
        if self.segments is not None and self.cu_seqlens is not None:
            raise ValueError("Mask takes segments or cu_seqlens, got both")
        if self.allowed is not None and kind_of(self.allowed) != torch.bool:
            raise TypeError(
                f"Mask.allowed must be a bool tensor, got {kind_of(self.allowed)}; a float one goes in as bias"
            )
        for name in ("bias", "alibi"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Tensor) and value.is_floating_point()):
                raise TypeError(f"Mask.{name} must be a floating point tensor, got {kind_of(value)}")
            if isinstance(as_mask(value), Mask):  # its numbers are memory that nobody filled
                raise TypeError(f"Mask.{name} must be numbers, got {type_name(value)}; combine it with a Mask by &")

    def __and__(self, other: Mask | Tensor) -> Mask:
        if isinstance(other, Tensor):
            other = of_dense(other, "Mask & tensor")
        if not isinstance(other, Mask):
            raise TypeError(f"A Mask is combined with a Mask or a dense tensor by &, got {kind_of(other)}")
        from sdpa.mask_algebra import combine

        return combine(self, other)

    __rand__ = __and__

    def __or__(self, other: object) -> Mask:
        raise TypeError(
            "Masks are combined by &, and not by | or ~: a union goes in as allowed=a.dense(B, H, M, N) | "
            "b.dense(B, H, M, N), a boolean tensor"
        )

    __ror__ = __or__

    def __invert__(self) -> Mask:
        return self | None

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Mask:
        """`tensor & mask`. Also `mask & tensor` under torch.compile, which treats it as torch's operator and asks here
        first."""
        if function is TORCHS or (function not in ANDS and len(types) == 1):  # whom nobody else will answer
            ours = "sdpa.scaled_dot_product_attention" if function is TORCHS else "functions and layers of sdpa"
            raise TypeError(
                f"torch's {function.__name__} takes no sdpa.Mask; pass it to {ours}, or mask.dense(B, H, M, N) to "
                "torch's"
            )
        if function not in ANDS or len(args) != 2:
            return NotImplemented
        a, b = args
        return a.__and__(b) if isinstance(a, Mask) else b.__and__(a)

    def __repr__(self) -> str:
        """The fields that are not their default, tensors by dtype and shape."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        said = [f"{f.name}={told(given[f.name])}" for f in fields(self) if not is_default(given[f.name], f.default)]
        return f"Mask({', '.join(said)})"

    @property
    def band(self) -> tuple[int, int]:
        """(left, right) visible keys on each side of the diagonal, UNLIMITED (-1) where a side is open."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(0, right)
        return (UNLIMITED if left is None else left, UNLIMITED if right is None else right)

    @property
    def has_band(self) -> bool:
        return self.causal or self.window is not None

    def dense(self, B: int, H: int, M: int, N: int) -> Tensor:
        """The mask as a tensor (B, H, M, N): bool, or float with -inf where it has a bias or ALiBi slopes."""
        from sdpa.inputs import with_mask
        from sdpa.validate import Sizes, check_dense_mask, check_mask

        check_dense_mask(self, {"B": B, "H": H, "M": M, "N": N})
        device = self.device() or torch.device("cpu")
        like = torch.empty(0, dtype=None if self.bias is None else self.bias.dtype, device=device)
        q, k = like.new_empty((B, H, M, 0)), like.new_empty((B, H, N, 0))
        sizes = Sizes(B, H, M, N, (B,))
        check_mask(self, q, sizes)
        inputs = with_mask(AttentionInputs(q, k, k, 1.0), self, sizes)
        seen, added = dense.visible(inputs), dense.additive(inputs)
        if added is None:
            seen = torch.ones((), dtype=torch.bool, device=device) if seen is None else seen
            return seen.expand(B, H, M, N)
        if seen is not None:
            added = torch.where(seen, added, -torch.inf)
        return added.expand(B, H, M, N)

    def device(self) -> torch.device | None:
        """The device of the first tensor among the fields."""
        tensors = self.tensors()
        return tensors[0][1].device if tensors else None

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors among the fields with their fields' names."""
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Tensor):
                    found.append((field.name, item))
        return found

    def to(self, device: torch.device | str) -> Mask:
        """The same with its tensors on `device`."""

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        pairs: dict[str, Any] = {
            name: tuple(map(moved, v)) if isinstance(v, tuple) else moved(v) for name, v in given.items()
        }
        return Mask(**pairs)

    def replace(self, **changes: Any) -> Mask:
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_tensor(cls, mask: Tensor, recognise: bool = False) -> Mask:
        """A dense bool or float tensor as a Mask; with `recognise`, as fields where it is all-True, causal or padding.

        Recognition reads the tensor on the host, which synchronises an accelerator: never done by default.
        """
        if not isinstance(mask, Tensor):
            raise TypeError(f"Mask.from_tensor expects a Tensor, got {type_name(mask)}")
        if recognise and mask.dtype == torch.bool:
            from sdpa.mask_algebra import recognise_bool

            return recognise_bool(mask)
        return of_dense(mask, "Mask.from_tensor")


def is_integer(tensor: Tensor) -> bool:
    """Whether it is of integers that torch computes with."""
    return tensor.dtype in INTEGERS


def is_symbolic(mask: Mask) -> bool:
    """Whether torch.fx traces the call: a field is then a proxy."""
    fx = sys.modules.get("torch.fx")
    return fx is not None and any(isinstance(getattr(mask, field.name), fx.Proxy) for field in fields(mask))


def as_mask(attn_mask: Any) -> Any:
    """torch.nn.attention.bias.CausalBias as a Mask; anything else as it is."""
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None or not isinstance(attn_mask, module.CausalBias):
        return attn_mask
    upper_left = attn_mask.variant == module.CausalVariant.UPPER_LEFT
    return Mask(causal=True, align="top_left" if upper_left else "bottom_right")


def of_dense(tensor: Tensor, function: str) -> Mask:
    """A bool tensor as `allowed`, a float tensor as `bias`, torch's CausalBias as what it stands for."""
    mask = as_mask(tensor)
    if isinstance(mask, Mask):
        return mask
    if tensor.dtype == torch.bool:
        return Mask(allowed=tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{function} expects a bool or floating point tensor, got {tensor.dtype}")
    return Mask(bias=tensor)


def kind_of(value: object) -> torch.dtype | str:
    """A tensor's dtype; the type's name for anything else."""
    return value.dtype if isinstance(value, Tensor) else type_name(value)


def told(value: object) -> str:
    """A field's value as text. Tensors are named by dtype and shape, because printing their numbers would read them
    from a device."""
    if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
        return f"({', '.join(map(told, value))})"
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def is_default(value: object, default: object) -> bool:
    """Whether a value is the default, by value: a pickled mask has other objects."""
    return value is default or (isinstance(value, str) and value == default)


def is_count(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) and value >= 0


def plain_integers(mask: Mask) -> None:
    """Write NumPy's integers and others in window and prefix as Python's own; what is no integer stays as it is."""
    if isinstance(mask.window, tuple) and not all(side is None or isinstance(side, KNOWN) for side in mask.window):
        sides = tuple(side if (own := as_int(side)) is None else own for side in mask.window)
        object.__setattr__(mask, "window", sides)
    if mask.prefix is not None and not isinstance(mask.prefix, (*KNOWN, Tensor)):
        own = as_int(mask.prefix)
        object.__setattr__(mask, "prefix", mask.prefix if own is None else own)


def check_window(window: Window | None) -> None:
    if window is None:
        return
    sides = isinstance(window, tuple) and len(window) == 2
    if not sides or not all(side is None or is_count(side) for side in window):
        instead = "; pass tuple(window)" if isinstance(window, list) else ""
        raise ValueError(f"Mask.window must be (left, right), each an integer >= 0 or None, got {window!r}{instead}")


def check_integers(mask: Mask) -> None:
    """Lengths, ids, cumulative lengths and prefixes are integer tensors."""
    for name in ("lengths", "query_lengths", "segments", "cu_seqlens", "prefix"):
        value = getattr(mask, name)
        if value is None or (name == "prefix" and is_count(value)):
            continue
        if name == "prefix" and not isinstance(value, (Tensor, tuple)):
            raise TypeError(f"Mask.prefix must be an integer >= 0 or an integer tensor, got {shown(value)}")
        items = value if isinstance(value, tuple) else (value,)
        if isinstance(value, tuple) and (len(value) != 2 or name not in ("segments", "cu_seqlens")):
            raise TypeError(
                f"Mask.{name} must be a tensor or, for segments and cu_seqlens, a pair, got {len(value)} items"
            )
        for item in items:
            if not isinstance(item, Tensor) or not is_integer(item):
                got = item.dtype if isinstance(item, Tensor) else shown(item)
                hint = "; of these there are uint8 and int8 to int64" if str(got).startswith("torch.uint") else ""
                raise TypeError(f"Mask.{name} must be an integer tensor, got {got}{hint}")
