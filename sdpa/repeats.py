"""Calls made again: what a plain call came to is remembered, and tensors like those of a call before are recognised.

Recognising is one call into torch, the guards of torch.compile; a key of shapes, strides, dtypes and devices would take
three times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdpa.dispatch import select
from sdpa.dispatch.context import current_text, torch_toggles
from sdpa.dispatch.select import LAST
from sdpa.problem import AttentionInputs, AttentionProblem, Results, float32_precision

try:  # types, dispatch keys, dtypes, devices, sizes, strides and requires_grad
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

MAX_STATES = 256
LATEST = 4  # calls remembered for each state: comparing takes a third of building a key

flash_on, efficient_on = torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled
math_on, cudnn_on = torch._C._get_math_sdp_enabled, torch._C._get_cudnn_sdp_enabled
deterministic, precision = torch._C._get_deterministic_algorithms, float32_precision

# Whether tensors (query, key, value, and those of a mask) are like those of a call before.
Check = Callable[..., bool]
# Arguments and switches -> the last few calls: whether tensors are like theirs, and what there is to know of them.
Recent = dict[tuple, tuple[tuple[Check, Any], ...]]


def switches() -> tuple:
    """What else than its arguments decides who answers a call."""
    return (current_text(), flash_on(), efficient_on(), math_on(), cudnn_on(), deterministic(), precision())


def check_of(*tensors: Tensor) -> Check | None:
    """Recognises tensors like these; None where torch has no guards, or they refuse what they were made of: one tensor
    twice."""
    if TensorGuards is None or len(set(map(id, tensors))) < len(tensors):
        return None
    sizes, strides = ([list(f(t)) for t in tensors] for f in (Tensor.size, Tensor.stride))
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def remember(recent: Recent, state: tuple, check: Check, known: object) -> None:
    """Put a call first among those of its state, with what there is to know of calls like it."""
    if len(recent) >= MAX_STATES:
        recent.clear()
    recent[state] = ((check, known), *recent.get(state, ())[: LATEST - 1])


class Forward:
    """A forward of given sizes, strides, dtype, device and settings: its kernel is chosen, its launches run again."""

    __slots__ = (
        "again",
        "attend",
        "choice",
        "fields",
        "forward",
        "is_passing",
        "native",
        "numbers",
        "problem",
        "record",
        "setting",
    )

    def __init__(self, inputs: AttentionInputs, extra: frozenset[str], setting: str, learns: bool = False) -> None:
        self.numbers = inputs[3:7]  # scale, left, right, bottom_right
        # Of tensors beside query, key and value.
        self.fields = tuple(name for name, value in inputs._asdict().items() if isinstance(value, Tensor))[3:]
        self.setting = setting
        self.problem = AttentionProblem.of(inputs, extra=extra)
        self.choice = select.choose(self.problem, setting, torch_toggles(), learns)
        self.forward, self.record = self.choice.forward, self.choice.record
        self.is_passing = False  # not expected to come again: launches are not recorded
        self.again: Callable | None = None
        self.native: Callable | None = self.native_of(inputs)
        # (query, key, value, and what a mask comes to) -> the result
        self.attend: Callable[..., Tensor] = self.by_forward if self.native is None else self.by_operator

    def native_of(self, inputs: AttentionInputs, learns: bool = False) -> Callable[..., Tensor] | None:
        """torch's own operator of (query, key, value), where the chosen kernel is one."""
        make = self.choice.native
        return None if make is None or self.fields else make(inputs, learns)

    def inputs(self, query: Tensor, key: Tensor, value: Tensor, *masks: Tensor) -> AttentionInputs:
        if not masks:
            return AttentionInputs(query, key, value, *self.numbers)
        return AttentionInputs(query, key, value, *self.numbers, **dict(zip(self.fields, masks, strict=True)))

    def by_forward(self, *given: Tensor) -> Tensor:
        """The output of `run`, without its frame where that was recorded: small calls feel it."""
        if self.again is None:
            return self.run(*given)[0]
        LAST.choice = self.choice
        try:
            return (self.again(*given) or self.run_and_record(*given))[0]
        except Exception as error:
            return select.recover(self.choice, error, self.inputs(*given)).out

    def by_operator(self, *given: Tensor) -> Tensor:
        LAST.choice = self.choice
        try:
            return self.native(*given)
        except Exception as error:
            return select.recover(self.choice, error, self.inputs(*given)).out

    def run(self, *given: Tensor) -> Results | tuple[Tensor, Tensor | None]:
        LAST.choice = self.choice
        try:
            if self.record is None or self.is_passing:
                return self.forward(self.inputs(*given), self.problem, self.choice.tile)
            return (self.again and self.again(*given)) or self.run_and_record(*given)
        except Exception as error:
            return select.recover(self.choice, error, self.inputs(*given))

    def run_and_record(self, *given: Tensor) -> Results:
        results, again = self.record((self.inputs(*given),), self.problem, self.choice.tile)
        self.again = again or self.again  # these tensors may be the exception: not aligned
        return results
