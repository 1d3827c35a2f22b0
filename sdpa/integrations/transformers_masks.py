"""transformers' mask function that says what it can as fields of a Mask, and the rest as a tensor.

transformers builds a mask once for all layers, from a function of indices. Where that function is one of its own
(causal, sliding windows, documents packed in a row), the fields of a Mask say the same without an M x N tensor, and
kernels skip key blocks. Anything else is the bool tensor of its own `sdpa_mask`. In a graph that torch.compile traces
only causal masks and padding are fields.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.utils.import_utils import is_tracing

from sdpa.mask import Mask

# What not every release of transformers 5 has: the first came with 5.23.
remap_positions = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
sliding_window_both_ways = getattr(masking_utils, "sliding_window_bidirectional_mask_function", None)

HOLE = object()  # in a pattern: any value, which is wanted
Sides = tuple[int | None, int | None]  # how far a query sees to the left and right; None: all


class FieldMask:
    """A mask on its way from transformers' mask function to its attention function.

    For our attention it is `mask`; models that treat it as a tensor find one, bool (B, 1, M, N), made when they do.
    """

    def __init__(self, mask: Mask, shape: Sequence[int], device: torch.device | str) -> None:
        """The shape is (B, 1, M, N)."""
        self.mask, self.shape, self.device = mask, torch.Size(shape), torch.device(device)

    ndim, dtype = 4, torch.bool

    def tensor(self) -> Tensor:
        return self.mask.dense(*self.shape).to(self.device)

    def contiguous(self) -> FieldMask:
        """What generation asks of every mask."""
        return self

    def to(self, *target: Any, **how: Any) -> FieldMask | Tensor:
        """On another device, where layers are spread over several; anything else makes it a tensor."""
        (device,) = target or (how.pop("device", None),) if len(target) < 2 else (None,)
        if how or not isinstance(device, str | torch.device):
            given = {} if device is None else {"device": device}
            return self.tensor().to(*target, **(how if target else how | given))
        return FieldMask(self.mask.to(device), self.shape, device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "mask":  # what copying looks for
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]

    def __invert__(self) -> Tensor:
        return ~self.tensor()

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return function(*as_tensors(args), **as_tensors(kwargs or {}))


def as_tensors(given: Any) -> Any:
    """Arguments with tensors in place of FieldMasks, in lists, tuples and dicts, too."""
    if isinstance(given, FieldMask):
        return given.tensor()
    if type(given) is dict:
        return {name: as_tensors(value) for name, value in given.items()}
    return type(given)(map(as_tensors, given)) if type(given) in (list, tuple) else given


def as_tensor(operator: str) -> Callable[..., Any]:
    """An operator, which Python looks up in the class and not by __getattr__, of the tensor that a FieldMask is."""

    def apply(self: FieldMask, *others: object) -> object:
        given = [other.tensor() if isinstance(other, FieldMask) else other for other in others]
        return getattr(self.tensor(), operator)(*given)

    return apply


for operator in ("eq", "ne", "add", "radd", "sub", "rsub", "mul", "rmul", "neg", "and", "or", "xor", "len", "iter"):
    setattr(FieldMask, f"__{operator}__", as_tensor(f"__{operator}__"))


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: FunctionType = causal_mask_function,
    attention_mask: Tensor | FieldMask | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> FieldMask | Tensor | None:
    """transformers' mask interface: what attends to what, or None where everything does. A causal mask is never None:
    not every model's attention knows by itself that it is causal.

    Args:
        q_offset, kv_offset: positions of the first query and key; a tensor where a static cache counts on the device.
        attention_mask: (B, tokens until now) bool, False = padding; or what this function returned before.
        options: `local_size`, the window; `allow_is_causal_skip` and `allow_is_bidirectional_skip`: whether the caller
            takes another thing than a tensor; `config`; and what is only for others.

    Raises:
        ValueError: a model that would take our mask for one of its own eager attention's.
    """
    if isinstance(attention_mask, FieldMask):
        return attention_mask
    require_interface(options.get("config"))
    B, M, N = batch_size, q_length, kv_length
    mask = as_fields(mask_function, options, M, N, q_offset - kv_offset)
    if mask is None:
        given = {"mask_function": mask_function, "attention_mask": attention_mask, "device": device}
        return sdpa_mask(B, M, N, q_offset, kv_offset, **given, **options)
    if attention_mask is not None:
        seen = prepare_padding_mask(attention_mask, N, kv_offset)[:, kv_offset : kv_offset + N]
        mask = mask & without_padding(seen, lengths=not mask.has_band or mask.align == "top_left")
    return None if hides_nothing_but_the_future(mask) and not mask.causal else FieldMask(mask, (B, 1, M, N), device)


def require_interface(config: PreTrainedConfig | None) -> None:
    """transformers takes a name like ours for every model, also where attention is the model's own code."""
    kind: type = type(config)
    if config is None or torch.compiler.is_compiling() or calls_interface(kind):
        return
    raise ValueError(
        f"models of a {kind.__name__} compute attention by their own code and not by transformers' attention "
        "interface; use attn_implementation='eager'"
    )


@functools.cache
def calls_interface(config: type) -> bool:
    """Whether a configuration's models let others compute attention; where they are not found it is believed."""
    try:
        module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return True
    here = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    models: list[Any] = [value for value in here if isinstance(value, type) and issubclass(value, PreTrainedModel)]
    return not models or hasattr(module, "ALL_ATTENTION_FUNCTIONS") or any(model._supports_sdpa for model in models)


def is_causal_flag(mask: Mask) -> bool:
    """Whether torch's causal flag says as much."""
    return mask.causal and mask.align == "top_left" and hides_nothing_but_the_future(mask)


def hides_nothing_but_the_future(mask: Mask) -> bool:
    return all(field is None for field in (mask.window, mask.lengths, mask.allowed, mask.segments))


def without_padding(seen: Tensor, lengths: bool) -> Mask:
    """What is True in (B, N): nothing where all is, lengths where those may be and say it, or a mask of keys.

    Read on the host once, as transformers does itself to drop a mask of ones, but for a graph that is traced.
    """
    if is_tracing(seen):
        return Mask(allowed=seen[:, None, None])
    filled = seen.sum(-1)
    prefix = torch.arange(seen.shape[-1], device=seen.device) < filled[:, None]
    everything, on_the_right = torch.stack([seen.all(), (seen == prefix).all()]).tolist()
    if everything:
        return Mask()
    return Mask(lengths=filled) if lengths and on_the_right else Mask(allowed=seen[:, None, None])


def as_fields(function: FunctionType, options: dict[str, Any], M: int, N: int, offset: int | Tensor) -> Mask | None:
    """A function of transformers' own as a Mask for M queries, the first at key `offset`; None for any other.

    Where the caller wants a tensor it gets one, as for the steps of a static cache. Packed documents come without the
    allowance that others have, since torch's causal flag cannot say them. An offset on the device is read, as
    transformers does, but for a graph that is traced.
    """
    if isinstance(offset, Tensor) and is_tracing(offset):
        return None
    allowed = options.get("allow_is_causal_skip", True) or options.get("allow_is_bidirectional_skip", False)
    traced = torch.compiler.is_compiling()  # where only functions of modules are known, and not those made at each call
    for known, sides in known_functions(None if traced else options.get("local_size")):
        if allowed and held(function, known) is not None:
            return band(sides, M, N, int(offset))
        documents = None if traced else documents_of(function, known)
        if documents is not None:
            within = band(sides, M, N, int(offset))
            return within and within.replace(segments=documents)
    return None


def documents_of(function: FunctionType, known: FunctionType) -> Any:
    """The number of each token's document (B, N), where `function` is `known` inside of documents packed in a row; None
    where it is not. transformers 5.23 names the documents first, its other releases last."""
    alike = packed_sequence_mask_function(HOLE)
    inside = known if remap_positions is None else remap_positions(known, HOLE)
    for place, parts in ((0, (alike, inside)), (-1, (inside, alike))):
        found = held(function, and_masks(*parts))
        if found is not None:
            return found[place]  # beside the positions
    return None


def known_functions(window: int | None) -> list[tuple[FunctionType, Sides]]:
    known: list[tuple[FunctionType, Sides]] = [
        (causal_mask_function, (None, 0)),
        (bidirectional_mask_function, (None, None)),
    ]
    if window is not None:
        known.append((sliding_window_causal_mask_function(window), (window - 1, 0)))
        if sliding_window_both_ways is not None:
            known.append((sliding_window_both_ways(window), (window, window)))
    return known


def band(sides: Sides, M: int, N: int, offset: int) -> Mask | None:
    """The sides as causal and window, without those that reach every key; None for an alignment that Mask has not."""
    left, right = sides
    left = None if left is None or left >= offset + M - 1 else left
    right = None if right is None or right >= N - 1 - offset else right
    if left is None and right is None:
        return Mask()
    if offset not in (0, N - M):
        return None
    window = None if left is None and right == 0 else (left, right)
    return Mask(causal=right == 0, window=window, align="top_left" if offset == 0 else "bottom_right")


def held(found: object, pattern: object) -> list[Any] | None:
    """What `found` has where `pattern` has a HOLE, if both are the same but for that; None if they are not.

    Functions are the same where their code is, and what they closed over, which torch.compile does not show.
    """
    if torch.compiler.is_compiling():
        return [] if found is pattern else None
    if pattern is HOLE:
        return [found]
    if isinstance(found, FunctionType) and isinstance(pattern, FunctionType) and found.__code__ is pattern.__code__:
        found, pattern = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (found, pattern))
    if isinstance(found, list | tuple) and isinstance(pattern, list | tuple) and len(found) == len(pattern):
        parts = [held(one, other) for one, other in zip(found, pattern, strict=True)]
        return None if None in parts else [value for part in parts if part is not None for value in part]
    return [] if found is pattern or (isinstance(found, int) and found == pattern) else None
