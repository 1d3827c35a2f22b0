"""Prepared calls: the forward and the backward of calls of one form, and the autograd node between them.

`entry` prepares each form once, and `calls` finds it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from sdpa.calls import AVERAGED, CALLS, NO_EXTRA, WITH_LSE, Facts, Form, Pass, form_of
from sdpa.derivatives import Attention, Pair, differentiable_backward, weights
from sdpa.dispatch import select
from sdpa.dispatch.choice import Choice
from sdpa.dispatch.context import torch_toggles
from sdpa.problem import AttentionProblem, Description, Results, as_batch
from sdpa.torch_private import deterministic, float32_precision


class Prepared:
    """Calls of one form, forward and backward.

    `attend` takes the form's tensors. It returns a tuple of the output and, where `returns_lse`, the log-sum-exp.
    """

    __slots__ = ("attend", "form", "forward", "returns_lse", "run", "setting")
    takes_rows = False

    def __init__(self, description: Description, learns: bool, returns_lse: bool, setting: str) -> None:
        self.form = Form(description.fields, self.takes_rows)
        self.returns_lse, self.setting = returns_lse, setting
        extra = WITH_LSE if learns or returns_lse else NO_EXTRA
        choice = select.choose(description.problem.asked_for(extra), setting, torch_toggles())
        self.forward = Pass(self.form, choice, takes_output_alone=not extra)
        self.run: Callable[..., Any] = self.forward  # inside of the node
        self.attend: Callable[..., Any] = partial(Attention.apply, self) if learns else self.forward

    @property
    def choice(self) -> Choice:
        return self.forward.choice

    def gradients(
        self, tensors: Sequence[Tensor], results: Pair, upstream: Pair, bias_grad: bool
    ) -> Sequence[Tensor | None]:
        """The gradients of q, k, v, bias and sinks, None where there is none. `results` are (out, lse), `upstream`
        their gradients."""
        given = (*tensors, *results, upstream[0]) if upstream[1] is None else (*tensors, *results, *upstream)
        # Hooks of saved tensors may return others than were saved, and any gradient may arrive.
        state = self, torch_toggles(), deterministic(), upstream[1] is None, bias_grad
        facts = Facts(alignment=form_of(given), precision=float32_precision())
        found = CALLS.find(state, given, partial(self.backward, given, results, upstream, bias_grad), facts)
        if found is None:
            return self.differentiable(tensors, results, upstream, bias_grad)
        found.is_passing = self.forward.is_passing
        return found(*given)

    def differentiable(
        self, tensors: Sequence[Tensor], results: Pair, upstream: Pair, bias_grad: bool
    ) -> Sequence[Tensor | None]:
        """The same by a node that is itself differentiable."""
        inputs = self.form.inputs(tensors)
        return differentiable_backward(inputs, Results(*results), Results(*upstream), bias_grad, self.setting)

    def backward(self, given: Sequence[Tensor], results: Pair, upstream: Pair, bias_grad: bool) -> Pass:
        inputs = self.form.inputs(given[: len(self.form.places)])
        extra = {"bias_grad": bias_grad, "lse_grad": upstream[1] is not None}
        others = (*results, upstream[0])
        problem = AttentionProblem.of(inputs, "backward", frozenset(n for n, on in extra.items() if on), others)
        setting = select.backward_setting(self.setting, problem)
        return Pass(self.form, select.choose(problem, setting, torch_toggles()))


class PreparedRows(Prepared):
    """Calls of packed rows (T, H, D) that the device's kernels take as they are.

    The same number of rows seldom comes again, except in the layers of a stack. So launches are recorded at the second
    call.
    """

    __slots__ = ("came",)
    takes_rows = True

    def __init__(self, description: Description, learns: bool, returns_lse: bool, setting: str) -> None:
        super().__init__(description, learns, returns_lse, setting)
        self.came = False
        self.run = self.run_rows
        if not learns:
            self.attend = self.run_rows

    def run_rows(self, *tensors: Tensor) -> Pair:
        self.forward.is_passing, self.came = not self.came, True
        out, lse = self.forward(*tensors)
        return as_rows(out).data, lse  # a tensor and no view, because views of a Function cannot be changed in place

    def gradients(
        self, tensors: Sequence[Tensor], results: Pair, upstream: Pair, bias_grad: bool
    ) -> Sequence[Tensor | None]:
        return self.as_batches(super().gradients, tensors, results, upstream, bias_grad)

    def differentiable(
        self, tensors: Sequence[Tensor], results: Pair, upstream: Pair, bias_grad: bool
    ) -> Sequence[Tensor | None]:
        return self.as_batches(super().differentiable, tensors, results, upstream, bias_grad)

    def as_batches(
        self, gradients: Callable[..., Any], tensors: Sequence[Tensor], results: Pair, upstream: Pair, bias_grad: bool
    ) -> Sequence[Tensor | None]:
        batches = (*map(as_batch, tensors[:3]), *tensors[3:])
        results, upstream = (as_batch(results[0]), results[1]), (as_batch(upstream[0]), upstream[1])
        found = gradients(batches, results, upstream, bias_grad)
        return (*map(as_rows, found[:3]), *found[3:])


def as_rows(batch: Tensor) -> Tensor:
    """(T, H, D) of (1, H, T, D)."""
    return batch.squeeze(0).transpose(0, 1)


class PreparedWeights:
    """Calls that also return the weights: the forward, and the weights from its log-sum-exp."""

    __slots__ = ("average", "forward", "learns", "setting", "weights")

    def __init__(self, description: Description, learns: bool, average: bool, setting: str) -> None:
        self.forward = Prepared(description, learns, True, setting)
        self.average, self.learns, self.setting = average, learns, setting
        problem = description.problem.asked_for(AVERAGED if average else NO_EXTRA, "weights")
        choice = select.select(problem, select.weights_setting(setting, problem.device_type))
        self.weights = Pass(self.forward.form, choice)

    def attend(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.forward.attend(*tensors)
        if self.learns:
            return out, weights(self.forward.form.inputs(tensors), lse, self.average, self.setting)
        return out, self.weights(*tensors, lse.contiguous())
