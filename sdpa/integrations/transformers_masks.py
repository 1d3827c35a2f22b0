"""transformers' mask function that says what it can as fields of a Mask, and the rest as a tensor.

transformers builds a mask once for all layers, from a function of indices. Where that function is one of its own
(causal, sliding windows, documents packed in a row), the fields of a Mask say the same without an M x N tensor, and
kernels skip key blocks. Anything else is the bool tensor of its own `sdpa_mask`. In a graph that torch.compile traces
only causal masks and padding are fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    eager_mask,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from sdpa.integrations.transformers_models import adds_masks, require_interface_of
from sdpa.mask import Mask

NAME = "sdp_kernels"

# What not every release of transformers has.
bidirectional_mask_function = getattr(masking_utils, "bidirectional_mask_function", None)
sliding_window_both_ways = getattr(masking_utils, "sliding_window_bidirectional_mask_function", None)
remap_positions = getattr(masking_utils, "remap_positions_for_packed_sequence", None)

# Functions of a tensor that add a FieldMask to scores, for which it is 0 and -inf.
ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)

HOLE = object()  # in a pattern: any value, which is wanted
Sides = tuple[int | None, int | None]  # how far a query sees to the left and right; None: all


class FieldMask:
    """A mask on its way from transformers' mask function to its attention function.

    For our attention it is `mask`; models that treat it as a tensor find one, bool (B, 1, M, N), made when they do. To
    scores it adds 0 and -inf. It is an instance of torch.Tensor for whoever asks.
    """

    __class__ = property(lambda self: Tensor)  # DeepSeek-V4 asks isinstance

    def __init__(self, mask: Mask, shape: Sequence[int], device: torch.device | str) -> None:
        """The shape is (B, 1, M, N)."""
        self.mask, self.shape, self.device = mask, torch.Size(shape), torch.device(device)
        self.sizes, self.place = self.shape, self.device

    ndim, dtype = 4, torch.bool
    shape, device = torch.Size(()), torch.device("cpu")  # of each its own; Dynamo looks for tensors' names in the class
    # Where a mask comes into a graph that began before, Dynamo asks whether this is torch's, and then finds torch's
    # `shape` and `device` of it, but `sizes` and `place` of ours.
    __torch_dispatch__ = None

    def tensor(self) -> Tensor:
        return self.mask.dense(*self.shape).to(self.device)

    def __reduce__(self) -> tuple[Any, ...]:
        """What __class__ says is not what a pickle makes."""
        return FieldMask, (self.mask, self.shape, self.device)

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
        scores = next((a for a in args if type(a) is not FieldMask and isinstance(a, Tensor)), None)
        dtype = scores.dtype if function in ADDITIONS and scores is not None and scores.is_floating_point() else None
        return function(*as_tensors(args, dtype), **as_tensors(kwargs or {}, dtype))


def as_tensors(given: Any, added_to: torch.dtype | None = None) -> Any:
    """Arguments with tensors in place of FieldMasks, in lists, tuples and dicts, too: bool, or what is added to scores
    of a dtype."""
    if type(given) is FieldMask:
        return given.tensor() if added_to is None else as_scores(given.tensor(), added_to)
    if type(given) is dict:
        return {name: as_tensors(value, added_to) for name, value in given.items()}
    return type(given)(as_tensors(value, added_to) for value in given) if type(given) in (list, tuple) else given


def as_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a bool mask lets through, else the least number, as transformers has it."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def as_tensor(operator: str) -> Callable[..., Any]:
    """An operator, which Python looks up in the class and not by __getattr__, of the tensor that a FieldMask is."""

    def apply(self: FieldMask, *others: Any) -> Any:
        if operator in ("__add__", "__radd__") and type(others[0]) is not FieldMask and isinstance(others[0], Tensor):
            return FieldMask.__torch_function__(torch.add, (), (others[0], self))
        given = [other.tensor() if type(other) is FieldMask else other for other in others]
        return getattr(self.tensor(), operator)(*given)

    return apply


for operator in ("eq", "ne", "add", "radd", "sub", "rsub", "mul", "rmul", "neg", "and", "or", "xor", "len", "iter"):
    setattr(FieldMask, f"__{operator}__", as_tensor(f"__{operator}__"))


def attention_mask(
    batch_size: int,
    kv_length: int,
    q_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: FunctionType = causal_mask_function,
    attention_mask: Any = None,
    device: torch.device | str | None = None,
    cache_position: Tensor | None = None,
    **options: Any,
) -> FieldMask | Tensor | None:
    """transformers' mask interface: what attends to what. It is not None where everything does, or all but the future:
    not every model's attention knows by itself whether it is causal.

    Args:
        q_offset, kv_offset: positions of the first query and key; a tensor where a static cache counts on the device.
        attention_mask: (B, tokens until now) bool, False = padding; or what this function returned before.
        cache_position: (M,) positions of the queries, in earlier releases: their `q_length`, `q_offset`, `device`.
        options: `local_size`, the window; `allow_is_causal_skip` and `allow_is_bidirectional_skip`: whether the caller
            takes another thing than a tensor; `config`; and what is only for others.

    Raises:
        ValueError: a model that would take our mask for one of its own eager attention's.
    """
    if type(attention_mask) is FieldMask:
        return attention_mask
    config = options.get("config")
    require_interface_of(config, NAME)
    theirs = {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, "mask_function": mask_function}
    theirs |= {"attention_mask": attention_mask, **options}
    B, M, N = batch_size, q_length, kv_length
    if cache_position is not None:
        M, device = cache_position.shape[0], cache_position.device
        q_offset = first_position(cache_position)
        theirs |= {"cache_position": cache_position}
    else:
        theirs |= {"q_length": q_length, "q_offset": q_offset} | ({} if device is None else {"device": device})
    if config is not None and adds_masks(type(config)):
        return eager_mask(**theirs)
    mask = as_fields(mask_function, options, M, N, q_offset - kv_offset)
    if mask is None:
        return sdpa_mask(**theirs)
    if attention_mask is not None:
        seen = padding(attention_mask, N, kv_offset)
        mask = mask & without_padding(seen, lengths=not mask.has_band or mask.align == "top_left")
    return FieldMask(mask, (B, 1, M, N), device or "cpu")


def first_position(positions: Tensor) -> int | Tensor:
    """The first of positions that go up by 1, read on the host; the tensor where they do not, or are traced."""
    found = [] if is_traced(positions) else positions.tolist()
    return found[0] if found and found == list(range(found[0], found[0] + len(found))) else positions


def padding(seen: Tensor, N: int, offset: int) -> Tensor:
    """(B, tokens) for N keys from the offset on; what it does not reach is padding."""
    return torch.nn.functional.pad(seen, (0, max(0, N + offset - seen.shape[-1])))[:, offset : offset + N]


def is_traced(tensor: Tensor) -> bool:
    """Whether what a tensor holds cannot be read on the host: it is traced, captured or none."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(tensor, torch.fx.Proxy):
        return True
    if type(tensor).__name__ == "FakeTensor":  # by name, since its module is private
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_flag(mask: Mask) -> bool:
    """Whether torch's causal flag, set or not, says as much."""
    others = (mask.window, mask.lengths, mask.allowed, mask.segments)
    return all(field is None for field in others) and (not mask.causal or mask.align == "top_left")


def without_padding(seen: Tensor, lengths: bool) -> Mask:
    """What is True in (B, N): nothing where all is, lengths where those may be and say it, or a mask of keys.

    Read on the host once, as transformers does itself to drop a mask of ones, but for a graph that is traced.
    """
    if is_traced(seen):
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
    if isinstance(offset, Tensor) and (offset.ndim > 0 or is_traced(offset)):
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
    known: list[tuple[FunctionType, Sides]] = [(causal_mask_function, (None, 0))]
    if bidirectional_mask_function is not None:
        known.append((bidirectional_mask_function, (None, None)))
    if window:  # 0, which some configurations have, lets through nothing
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
