"""Prepared calls: the forward and the backward of calls of one form, and the autograd node between them.

`entry` prepares each form once, and `calls` finds it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sdpa.alignment import ADDRESS_BITS
from sdpa.derivatives import Attention, Pair, differentiable_backward, weights
from sdpa.dispatch import failure, learning, select
from sdpa.dispatch.choice import Choice
from sdpa.dispatch.context import Setting, torch_toggles
from sdpa.dispatch.placing import readable
from sdpa.dispatch.refusal import NoKernelError
from sdpa.passes import AVERAGED, NO_EXTRA, WITH_LSE, Form, Pass, RowsForm, as_batch, as_rows
from sdpa.problem import AttentionInputs, AttentionProblem, Results
from sdpa.repeated import Operator, Repeated
from sdpa.torch_private import current_node, deterministic, saved_tensors_hooks

LEARNED = ("bias", "sinks")  # fields beside q, k and v that have gradients
MAX_BACKWARDS = 16  # of one form, by switches and by the strides and alignment of the incoming gradient


class Prepared:
    """Calls of one form, forward and backward.

    `attend` takes the form's tensors. It returns a tuple of the output and, where `returns_lse`, the log-sum-exp.
    """

    __slots__ = (
        "attend",
        "backwards",
        "batch_form",
        "form",
        "forward",
        "learned",
        "readable_strides",
        "returns_lse",
        "run",
        "setting",
    )

    def __init__(self, inputs: AttentionInputs, learns: bool, returns_lse: bool, setting: str) -> None:
        self.form = self.batch_form = Form(inputs)
        self.returns_lse, self.setting = returns_lse, setting
        self.learned = tuple(
            (name, self.form.places.index(AttentionInputs._fields.index(name)))
            for name in LEARNED
            if getattr(inputs, name) is not None
        )
        extra = WITH_LSE if learns or returns_lse else NO_EXTRA
        problem = AttentionProblem.of(inputs, extra=extra)
        plain = self.form.numbers is not None and not returns_lse
        choice = select.choose(problem, setting, torch_toggles(), learns and plain)
        self.forward = Pass(self.form, choice)
        self.backwards: dict[tuple[Any, ...], Pass] = {}
        self.readable_strides: set[tuple[int, ...]] = set()  # of incoming gradients that torch's backward has read
        self.run: Callable[..., Any] = self.forward  # inside of the node
        native = self.choice.native if plain and (not learns or self.stays(problem)) else None
        operator = None if native is None else native(inputs, learns)
        self.attend = self.entrance(operator, learns)

    def entrance(self, operator: Any, learns: bool) -> Callable[..., Any]:
        """`operator` is torch's own and its options, where the chosen kernel is one."""
        if not learns:
            if operator is not None:
                self.forward.again = Operator(*operator)
            return self.forward
        return self.by_function if operator is None else DifferentiableOperator(self, operator)

    @property
    def is_left_to_torch(self) -> bool:
        """Whether torch differentiates its own operator."""
        return isinstance(self.attend, DifferentiableOperator)

    @property
    def choice(self) -> Choice:
        return self.forward.choice

    # -- torch's own operator, where the kernel is one ----------------------------------------------------------------

    def stays(self, problem: AttentionProblem) -> bool:
        """Whether the kernel of a small forward is best for the backward, too, so that torch may differentiate its
        operator."""
        if current_node is None or problem.flops() >= learning.SMALL_FLOPS:
            return False
        if Setting.decode(self.setting).priority:
            try:
                backward = select.choose(learning.backward_of(problem), self.setting, torch_toggles())
            except NoKernelError:  # the backward raises it, if it runs
                return False
            return backward.kernel is self.choice.kernel
        return learning.stays(self.choice.kernel, select.followers(problem, self.setting, torch_toggles()))

    def make_watch(self) -> Tensor:
        """A tensor whose hook dictionary the nodes of all calls share; `Tensor.register_hook` would make one for each
        call."""
        watch = torch.empty(0)
        watch._backward_hooks = {0: self.before_backward}
        return watch

    def before_backward(self, grad_out: Tensor) -> Tensor | None:
        """torch's backward of its operator has no derivative, so where one may be asked for, `after_backward` replaces
        the gradients. torch's kernels also need the incoming gradient at multiples of 16 bytes."""
        if torch.is_grad_enabled():
            node = current_node()
            if "sdpa" not in node.metadata:  # a graph with retain_graph=True runs again
                node.metadata["sdpa"] = node.register_hook(self.after_backward)
            return None
        if grad_out is None or not grad_out.is_cuda:
            return None
        strides = self.readable_strides
        if grad_out.data_ptr() & ADDRESS_BITS == 0 and grad_out.stride() in strides:
            return None
        read = readable(grad_out)
        if read is grad_out and len(strides) < MAX_BACKWARDS:
            strides.add(grad_out.stride())
        return read

    def after_backward(self, grads: tuple[Any, ...], upstream: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.is_grad_enabled() or upstream[0] is None:
            return None
        node = current_node()
        inputs = self.form.inputs((node._saved_query, node._saved_key, node._saved_value))
        lse = node._saved_log_sumexp if hasattr(node, "_saved_log_sumexp") else node._saved_logsumexp
        lse = lse.detach().reshape(*inputs.q.shape[:2], -1)[:, :, : inputs.q.shape[2]]  # its rows may be padded
        results = Results(node._saved_output.detach(), lse)
        found = differentiable_backward(inputs, results, Results(upstream[0], None), False, self.setting)
        return (*(None if g is None else f for g, f in zip(grads[:3], found, strict=False)), *grads[3:])

    # -- our node of the graph ----------------------------------------------------------------------------------------

    def by_function(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = Attention.apply(self, *tensors)
        return found if self.returns_lse else (found,)

    def gradients(
        self, tensors: Sequence[Tensor], results: Pair, upstream: Pair, bias_grad: bool
    ) -> Sequence[Tensor | None]:
        """The gradients of q, k, v, bias and sinks, None where there is none. `results` are (out, lse), `upstream`
        their gradients."""
        out, grad_out = results[0], upstream[0]
        given = (*tensors, *results, grad_out) if upstream[1] is None else (*tensors, *results, *upstream)
        address = (grad_out.data_ptr() | out.data_ptr()) & ADDRESS_BITS if out.is_cuda else 0
        state = torch_toggles(), deterministic(), upstream[1] is None, bias_grad, address, grad_out.stride()
        found = self.backwards.get(state)
        if found is None:
            if len(self.backwards) >= MAX_BACKWARDS:
                self.backwards.clear()
            found = self.backwards[state] = self.backward(given, results, upstream, bias_grad)
        found.is_passing = self.forward.is_passing
        return found(*given)

    def differentiable(
        self, tensors: Sequence[Tensor], results: Pair, upstream: Pair, bias_grad: bool
    ) -> Sequence[Tensor | None]:
        """The same by a node that is itself differentiable."""
        inputs = self.form.inputs(tensors)
        return differentiable_backward(inputs, Results(*results), Results(*upstream), bias_grad, self.setting)

    def backward(self, given: Sequence[Tensor], results: Pair, upstream: Pair, bias_grad: bool) -> Pass:
        inputs = self.batch_form.inputs(given[: len(self.form.places)])
        extra = {"bias_grad": bias_grad, "lse_grad": upstream[1] is not None}
        others = (*results, upstream[0])
        problem = AttentionProblem.of(inputs, "backward", frozenset(n for n, on in extra.items() if on), others)
        return Pass(self.batch_form, select.choose(problem, select.backward_setting(self.setting), torch_toggles()))


class DifferentiableOperator(Repeated):
    """The forward by torch's own operator, which torch differentiates."""

    __slots__ = ("prepared",)

    def __init__(self, prepared: Prepared, operator: Any) -> None:
        self.prepared, self.choice = prepared, prepared.choice
        # Checkpointing lets `after_backward` read what is saved only once: under its hooks the node is ours.
        function, options, named = operator
        self.again = Operator(function, options, named, saved_tensors_hooks, prepared.make_watch())

    def first_time(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.prepared.by_function(*tensors)

    def recovered(self, error: Exception, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if failure.kind_of(error) is None:  # as the exception by which checkpointing ends a forward
            raise error
        return self.prepared.by_function(*tensors)


class PreparedRows(Prepared):
    """Calls of packed rows (T, H, D) that the device's kernels take as they are.

    The same number of rows seldom comes again, except in the layers of a stack. So launches are recorded at the second
    call.
    """

    __slots__ = ("came",)

    def __init__(self, inputs: AttentionInputs, learns: bool, returns_lse: bool, setting: str) -> None:
        super().__init__(inputs, learns, returns_lse, setting)
        self.form = self.forward.form = RowsForm(inputs)
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
        inputs = self.form.inputs(tensors)

        def gradients(_: object, results: Pair, upstream: Pair, bias_grad: bool) -> Sequence[Tensor | None]:
            return differentiable_backward(inputs, Results(*results), Results(*upstream), bias_grad, self.setting)

        return self.as_batches(gradients, tensors, results, upstream, bias_grad)

    def as_batches(
        self, gradients: Callable[..., Any], tensors: Sequence[Tensor], results: Pair, upstream: Pair, bias_grad: bool
    ) -> Sequence[Tensor | None]:
        batches = (*map(as_batch, tensors[:3]), *tensors[3:])
        results, upstream = (as_batch(results[0]), results[1]), (as_batch(upstream[0]), upstream[1])
        found = gradients(batches, results, upstream, bias_grad)
        return (*map(as_rows, found[:3]), *found[3:])


class PreparedWeights:
    """Calls that also return the weights: the forward, and the weights from its log-sum-exp."""

    __slots__ = ("average", "forward", "learns", "setting", "weights")

    def __init__(self, inputs: AttentionInputs, learns: bool, average: bool, setting: str) -> None:
        self.forward = Prepared(inputs, learns, True, setting)
        self.average, self.learns, self.setting = average, learns, setting
        problem = AttentionProblem.of(inputs, "weights", AVERAGED if average else NO_EXTRA)
        choice = select.select(problem, select.weights_setting(setting, problem.device_type))
        self.weights = Pass(self.forward.form, choice)

    def attend(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.forward.attend(*tensors)
        if self.learns:
            return out, weights(self.forward.form.inputs(tensors), lse, self.average, self.setting)
        return out, self.weights(*tensors, lse.contiguous())
