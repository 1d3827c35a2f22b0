"""Autocast: the floating tensors of a call in the dtype that torch asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sdpa.mask import Mask
from sdpa.repeated import Repeated
from sdpa.torch_private import without_autocast
from sdpa.validate import Call, Options


def autocast_dtype(query: object) -> torch.dtype | None:
    """The dtype that autocast asks for on the query's device; None where it is off."""
    device_type = query.device.type if isinstance(query, Tensor) else "cpu"
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast(tensor: Any, dtype: torch.dtype) -> Any:
    """A floating tensor in autocast's dtype. float64 stays, as torch's rule for this function has it."""
    if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(dtype)
    return tensor


def cast_mask(mask: Any, dtype: torch.dtype) -> Any:
    """The same of a mask, or of a Mask's bias."""
    if isinstance(mask, Mask):
        return mask if mask.bias is None else mask.replace(bias=cast(mask.bias, dtype))
    return cast(mask, dtype)


def cast_options(options: Options, dtype: torch.dtype) -> Options:
    """Options with their mask and sinks in autocast's dtype."""
    if options.attn_mask is None and options.sinks is None:
        return options
    return options._replace(attn_mask=cast_mask(options.attn_mask, dtype), sinks=cast(options.sinks, dtype))


def cast_call(call: Call, dtype: torch.dtype) -> Call:
    """The call in autocast's dtype."""
    q, k, v = (cast(t, dtype) for t in call[:3])
    return Call(q, k, v, cast_options(call.options, dtype), call.places)


def cast_first(run: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """`run` of a prepared call, given that call's tensors before they are cast."""
    casts = Casts(dtype)

    def attend(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Any:
        with without_autocast():
            if given:
                mask, sinks, places = given
                given = cast_mask(mask, dtype), cast(sinks, dtype), places
            return run(*casts(query, key, value), *given)

    return attend


class Casts(Repeated):
    """Query, key and value of one form in autocast's dtype. From the third call on nothing is asked any more where each
    of them is cast. On a GPU one launch does it then, where none needs a gradient."""

    __slots__ = ("calls", "dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.calls = dtype, 0

    def first_time(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self.calls += 1
        found = [cast(t, self.dtype) for t in tensors]
        if self.calls == 2 and all(f is not t for f, t in zip(found, tensors, strict=True)):
            one_launch = tensors[0].is_cuda and not any(t.requires_grad for t in tensors)
            self.again = (self.recorded(tensors) if one_launch else None) or self.one_by_one
        return found

    def one_by_one(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        dtype = self.dtype
        return query.to(dtype), key.to(dtype), value.to(dtype)

    def recovered(self, error: Exception, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [cast(t, self.dtype) for t in tensors]

    def recorded(self, tensors: Sequence[Tensor]) -> Callable[..., Any] | None:
        """The launch. None where there is none for such tensors, or Triton cannot make one: then each is cast alone."""
        try:
            from sdpa.kernels.triton.cast import record

            return record(tensors, self.dtype)
        except Exception:  # no Triton, a device that it does not serve, no compiler, no memory
            return None
