"""The short forms of the operators, which graphs call where nothing but a band hides keys: plain inference, and the
two passes of plain training.

Few arguments, because each takes the dispatcher time, but for those that it leaves out; tensors like those of a call
before are recognised; and generated code calls the functions themselves (`inductor`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdpa import inductor
from sdpa.dispatch import select
from sdpa.dispatch.context import effective, keep, kept
from sdpa.layout import empty_as, like_layout
from sdpa.ops import (
    BAND_END,
    FIRST_NUMBER,
    LIBRARY,
    NO_EXTRA,
    WITH_LSE,
    allocate,
    attention_backward,
    attention_forward,
    is_empty,
)
from sdpa.problem import UNLIMITED, AttentionInputs, AttentionProblem, Results
from sdpa.repeats import Forward, Recent, check_of, remember, switches

BAND_SCHEMA = 'float scale, SymInt left=-1, SymInt right=-1, bool bottom_right=False, str setting=""'
LIBRARY.define(f"attention_forward.plain(Tensor q, Tensor k, Tensor v, {BAND_SCHEMA}) -> Tensor")
LIBRARY.define(f"attention_forward.learning(Tensor q, Tensor k, Tensor v, {BAND_SCHEMA}) -> (Tensor, Tensor)")
LIBRARY.define(
    "attention_backward.plain(Tensor grad_out, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, "
    f"{BAND_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
MAX_KNOWN = 4096


class Memory:
    """What calls came to: the last few of each state, and all by a key of their tensors."""

    def __init__(self) -> None:
        self.recent: Recent = {}
        self.known: dict[tuple, tuple] = {}
        select.CACHES += (self.recent.clear, self.known.clear)

    def find(self, state: tuple, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """What is known of a call like this; None where there was none."""
        for is_alike, known in self.recent.get(state, ()):
            if is_alike(q, k, v):
                return known
        check, known = self.known.get(key_of(state, q, k, v), (None, None))
        if check is not None and check(q, k, v):
            remember(self.recent, state, check, known)
        return known

    def keep(self, state: tuple, q: Tensor, k: Tensor, v: Tensor, known: Any) -> Any:
        check = check_of(q, k, v)
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        self.known[key_of(state, q, k, v)] = check, known
        if check is not None and check(q, k, v):
            remember(self.recent, state, check, known)
        return known


def key_of(state: tuple, *tensors: Tensor) -> tuple:
    return (state, *((t.shape, t.stride(), t.dtype, t.device) for t in tensors))


def has_nested(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Nested tensors have no strides, for which a guard ends the process."""
    return q.is_nested or k.is_nested or v.is_nested


INFERENCE, LEARNING, BACKWARD = Memory(), Memory(), Memory()


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int = UNLIMITED, right: int = UNLIMITED,
    bottom_right: bool = False, setting: str = "",
) -> Tensor:  # fmt: skip
    """A forward of which nobody wants more than the output."""
    state = (scale, left, right, bottom_right, setting, switches())
    if has_nested(q, k, v):
        return attention_forward(*AttentionInputs(q, k, v, *state[:4]), False, setting)[0]
    known = INFERENCE.find(state, q, k, v)
    if known is None:
        inputs = AttentionInputs(q, k, v, *state[:4])
        if is_empty(inputs):
            return allocate(inputs, False)[0].zero_()
        known = Forward(inputs, NO_EXTRA, effective(setting)).attend, empty_as(q, v.shape[3]).stride()
        INFERENCE.keep(state, q, k, v, known)
    attend, stride = known
    out = attend(q, k, v)
    return out if out.stride() == stride else like_layout(out, q)


def learning_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int = UNLIMITED, right: int = UNLIMITED,
    bottom_right: bool = False, setting: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A forward with its log-sum-exp, for the backward."""
    state = (scale, left, right, bottom_right, setting, switches())
    inputs = AttentionInputs(q, k, v, *state[:4])
    if has_nested(q, k, v):
        return attention_forward(*inputs, True, setting)
    known = LEARNING.find(state, q, k, v)
    if known is None:
        if is_empty(inputs):
            return attention_forward(*inputs, True, setting)
        known = Forward(inputs, WITH_LSE, effective(setting)).run, empty_as(q, v.shape[3]).stride()
        LEARNING.keep(state, q, k, v, known)
    attend, stride = known
    out, lse = attend(q, k, v)
    lse = lse.contiguous()
    keep(lse, effective(setting))
    return out if out.stride() == stride else like_layout(out, q), lse


def plain_backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, left: int = UNLIMITED,
    right: int = UNLIMITED, bottom_right: bool = False, setting: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v where none arrives at the log-sum-exp."""
    setting = kept(setting, lse)
    state = (scale, left, right, bottom_right, setting, switches())
    inputs = AttentionInputs(q, k, v, *state[:4])
    if has_nested(q, k, v):
        return attention_backward(grad_out, None, out, lse, *inputs, False, setting)[:3]
    known = BACKWARD.find(state, q, k, v)
    if known is None:
        if is_empty(inputs):
            return attention_backward(grad_out, None, out, lse, *inputs, False, setting)[:3]
        problem = AttentionProblem.of(inputs, "backward", NO_EXTRA)
        choice = select.select(problem, select.backward_setting(setting))
        known = BACKWARD.keep(state, q, k, v, (choice, [empty_as(t, t.shape[3]).stride() for t in (q, k, v)]))
    choice, strides = known
    select.LAST.choice = choice
    grads = choice.run(inputs, Results(out, lse), Results(grad_out, None))[:3]
    return tuple(
        grad if grad.stride() == stride else like_layout(grad, source)
        for grad, stride, source in zip(grads, strides, (q, k, v), strict=True)
    )


def is_plain(inputs: AttentionInputs) -> bool:
    """Whether the short forms can say it: nothing but a band and a scale."""
    masks = (*inputs[BAND_END:FIRST_NUMBER], inputs.rng, inputs.cu_q, inputs.cu_k, inputs.block_table)
    return all(mask is None for mask in masks) and inputs.softcap == 0.0 and inputs.dropout_p == 0.0


def fake_plain(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return empty_as(q, v.shape[3])


def fake_learning(q: Tensor, k: Tensor, v: Tensor, scale: float, *_: object) -> tuple[Tensor, Tensor]:
    return allocate(AttentionInputs(q, k, v, scale), True)


def fake_backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, ...]:
    return tuple(empty_as(t, t.shape[3]) for t in (q, k, v))


inductor.register(LIBRARY, "attention_forward.plain", plain_forward, fake_plain)
inductor.register(LIBRARY, "attention_forward.learning", learning_forward, fake_learning)
inductor.register(LIBRARY, "attention_backward.plain", plain_backward, fake_backward)
PLAIN = torch.ops.sdpa.attention_forward.plain
LEARNING_FORWARD = torch.ops.sdpa.attention_forward.learning
PLAIN_BACKWARD = torch.ops.sdpa.attention_backward.plain
