"""The one cache of calls: what was prepared for a call, and is found again by calls like it.

The least recently used entry is dropped first.

A call is recognised by its state (every argument and switch that is no tensor), by its tensors (their types, dispatch
keys, dtypes, devices, sizes, strides and requires_grad), and by facts that only some calls have. The last few calls of
a state are compared with the given tensors by the guards of torch.compile, in one call into torch. All other calls are
found by a key of the tensors, which takes three times as long to build.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from sdpa.alignment import ADDRESS_BITS
from sdpa.dispatch.caches import CACHES
from sdpa.dispatch.context import CURRENT, current_text
from sdpa.torch_private import (
    TensorGuards,
    autocast_is_on,
    cudnn_enabled,
    deterministic,
    efficient_enabled,
    flash_enabled,
    float32_precision,
    math_enabled,
)

MAX_CALLS = 4096  # a server with more shapes prepares the least recently used ones again
MAX_STATES = 1024
LATEST = 4  # calls of a state that are compared before a key is built
PLAIN_TYPES = frozenset({Tensor, Parameter})

Check = Callable[..., bool]
Key = tuple[Hashable, ...]


class Facts(NamedTuple):
    """What guards do not see of a call's tensors. None is what need not be asked again where guards take them."""

    autocast: torch.dtype | None = None  # guards see whether it is on, by the dispatch keys
    alignment: int | None = None  # `form_of`, on a GPU
    precision: str | None = None  # of float32 products, on a GPU


NO_FACTS = Facts()
Entry = tuple[Check, Any, Key, Facts]  # with what was prepared


def switches() -> tuple[Any, ...]:
    """Everything beside its arguments that the selection for a call depends on."""
    return (
        CURRENT.get() and current_text(),
        flash_enabled(),
        efficient_enabled(),
        math_enabled(),
        cudnn_enabled(),
        deterministic(),
        float32_precision(),
        autocast_is_on(),
    )


def form_of(tensors: Sequence[Tensor]) -> int:
    """The bits of the addresses below multiples of 16 bytes, on a GPU; guards and keys do not hold them."""
    if not tensors[0].is_cuda:
        return 0
    address = 0
    for tensor in tensors:
        address |= tensor.data_ptr()
    return address & ADDRESS_BITS


class Calls:
    """Maps calls to what was prepared for them: a function of their tensors, or a pass."""

    def __init__(self) -> None:
        self.recent: dict[Hashable, tuple[Entry, ...]] = {}
        self.known: OrderedDict[Key, Any] = OrderedDict()
        self.changing = RLock()  # of `known`; re-entrant, since a finaliser may make a call inside of another one

    def look_up(self, state: Hashable, tensors: Sequence[Tensor], facts: Facts = NO_FACTS) -> Any:
        """What is cached for a call like this. None where there is nothing, or where a tensor is of a subclass."""
        for is_alike, found, _, known in self.recent.get(state, ()):
            if is_alike(*tensors) and known == facts:
                return found
        key = key_of(state, tensors, facts)
        if key is None:
            return None
        found = self.known.get(key)
        if found is not None:
            self.remember(state, tensors, facts, found, key)
        return found

    def keep(self, state: Hashable, tensors: Sequence[Tensor], found: Any, facts: Facts = NO_FACTS) -> Any:
        """Cache `found` for calls like this one, and return it."""
        key = key_of(state, tensors, facts)
        if key is not None:
            self.remember(state, tensors, facts, found, key)
        return found

    def remember(self, state: Hashable, tensors: Sequence[Tensor], facts: Facts, found: Any, key: Key) -> None:
        """Put a call first among the latest of its state. A call that drops out of these counts as used until now in
        the order of all calls."""
        self.use(key, found)
        check = check_of(tensors)
        if check is None:
            return
        latest = [entry for entry in self.recent.pop(state, ()) if entry[2] != key]
        self.recent[state] = ((check, found, key, facts), *latest[: LATEST - 1])
        for _, was, left, _ in latest[LATEST - 1 :]:
            self.use(left, was)  # calls of other states may have dropped it
        if len(self.recent) > MAX_STATES:
            for oldest in list(self.recent)[:-MAX_STATES]:  # a list, since other threads change the order
                self.recent.pop(oldest, None)

    def use(self, key: Key, found: Any) -> None:
        """Put a call last in the order of all calls. The first ones are dropped where there are too many."""
        with self.changing:
            self.known.pop(key, None)
            self.known[key] = found
            while len(self.known) > MAX_CALLS:
                with suppress(KeyError):  # a finaliser's call may have emptied it
                    self.known.popitem(last=False)

    def clear(self) -> None:
        with self.changing:
            self.recent.clear()
            self.known.clear()


def check_of(tensors: Sequence[Tensor]) -> Check | None:
    """What recognises tensors like these; None where torch has no guards.

    Guards refuse a tensor that is given twice, as in self-attention without projections. There a guard sees each tensor
    once, and the same places have to hold the same tensor.
    """
    if TensorGuards is None:
        return None
    firsts = first_places(tensors)
    once = [tensors[place] for place in dict.fromkeys(firsts)]
    sizes, strides = ([list(f(t)) for t in once] for f in (Tensor.size, Tensor.stride))
    check: Check = TensorGuards(*once, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if not check(*once):
        return None
    return check if len(once) == len(tensors) else partial(check_once, check, firsts)


def check_once(check: Check, firsts: tuple[int, ...], *tensors: Tensor) -> bool:
    """Whether `check`, which sees each tensor once, recognises tensors that are the same in the same places."""
    return first_places(tensors) == firsts and check(*[tensors[place] for place in dict.fromkeys(firsts)])


def first_places(tensors: Sequence[object]) -> tuple[int, ...]:
    """For each tensor the first place that holds it."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(t), place) for place, t in enumerate(tensors)])


def key_of(state: Hashable, tensors: Sequence[Tensor], facts: Facts) -> Key | None:
    """The same as a key. None for tensors that are never cached: subclasses, and tensors without strides."""
    try:
        forms = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad, type(t)) for t in tensors]
    except (RuntimeError, AttributeError):
        return None
    if any(form[-1] not in PLAIN_TYPES for form in forms):
        return None
    return (state, facts, first_places(tensors), *forms)


CALLS = Calls()
CACHES.append(CALLS.clear)
