"""What a plain eager call with given sizes, dtype, device and settings comes to, found out once.

A plan is made by the ordinary path, so it can never say anything else; it only remembers. Where torch's own operator
answers it may also leave the derivative to torch (`native`): then nothing of ours runs in the backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sdpa import autograd
from sdpa.autograd import AttentionBackward
from sdpa.dispatch import failure, learning, select
from sdpa.dispatch.context import Setting, torch_toggles
from sdpa.dispatch.select import LAST
from sdpa.inputs import fit_tensors, with_rank
from sdpa.mask import Mask
from sdpa.ops import NO_EXTRA, WITH_LSE
from sdpa.problem import AttentionInputs, Gradients, Results, lengths_of, read_of
from sdpa.repeats import Check, Forward

saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Plan(Forward):
    """How calls of one key are answered: by torch's operator as it is, by launches run again, or by a forward."""

    __slots__ = (
        "again_backward",
        "backward_choice",
        "backward_problem",
        "backward_state",
        "is_alike",
        "learns",
        "watch",
    )

    def __init__(self, inputs: AttentionInputs, learns: bool, setting: str) -> None:
        super().__init__(inputs, WITH_LSE if learns else NO_EXTRA, setting, learns)
        self.learns = learns
        self.is_alike: Check | None = None  # of the tensors it was last taken for
        self.backward_problem = learning.backward_of(self.problem)
        self.backward_choice: select.Choice | None = None
        self.backward_state: tuple | None = None
        self.again_backward: Callable | None = None
        self.watch: Tensor | None = None
        if not learns:
            return
        is_left = self.native is not None and self.problem.flops() < learning.SMALL_FLOPS and self.backward_stays()
        self.native = self.native_of(inputs, learns) if is_left else None
        self.watch = None if self.native is None else self.make_watch()
        self.attend = self.by_function if self.native is None else self.by_differentiable_operator

    def backward_stays(self) -> bool:
        """Whether the kernel of the forward is wanted for the backward, too."""
        if Setting.decode(self.setting).priority:
            try:
                choice = select.choose(self.backward_problem, self.setting, torch_toggles())
            except select.NoKernelError:  # that is for the backward to say, if there is one
                return False
            return choice.kernel is self.choice.kernel
        return learning.stays(self.choice.kernel, select.followers(self.problem, self.setting, torch_toggles()))

    def by_function(self, *given: Tensor) -> Tensor:
        return apply(self, *given)

    def by_differentiable_operator(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if saving_hooks(False) is not None:  # checkpointing hands out what was saved once: see after_backward
            return apply(self, query, key, value)
        LAST.choice = self.choice
        try:
            out = self.native(query, key, value)
        except Exception as error:
            if failure.kind_of(error) is None:  # checkpointing ends a forward so
                raise
            return apply(self, query, key, value)
        out.grad_fn._register_hook_dict(self.watch)
        return out

    def run_backward(self, given: list[Tensor], out: Tensor, lse: Tensor, grad_out: Tensor) -> Gradients | tuple:
        state = (torch_toggles(), torch._C._get_deterministic_algorithms())
        if state != self.backward_state:
            problem = self.backward_problem = self.backward_problem._replace(deterministic=state[1])
            self.backward_choice = select.select(problem, select.backward_setting(self.setting))
            self.backward_state, self.again_backward = state, None
        choice = LAST.choice = self.backward_choice
        tensors = (self.inputs(*given), Results(out, lse), Results(grad_out, None))
        try:
            if choice.record is None or self.is_passing:
                return choice.call(*tensors)
            again = self.again_backward
            gradients = None if again is None else again(*read_of(tensors[0]), out, lse, grad_out)
            if gradients is None:
                gradients, again = choice.record(tensors, choice.problem, choice.tile)
                self.again_backward = again or self.again_backward
            return gradients
        except Exception as error:
            return select.recover(choice, error, *tensors)

    def differentiable_backward(
        self, given: list[Tensor], out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of query, key and value the ordinary way."""
        inputs = self.inputs(*given)
        return autograd.apply(AttentionBackward, grad_out, None, out, lse, *inputs, False, self.setting)[:3]

    def make_watch(self) -> Tensor:
        """A tensor whose hooks nodes can share: `Tensor.register_hook` would make new ones for each call."""
        watch = torch.empty(0)
        watch._backward_hooks = {0: self.before_backward}
        return watch

    def before_backward(self, grad_out: Tensor) -> None:
        """torch's own backward of the operator has no derivative: where one may be asked for, ours replaces it."""
        if torch.is_grad_enabled():
            node = torch._C._current_autograd_node()
            if "sdpa" not in node.metadata:  # a graph that is kept is gone through again
                node.metadata["sdpa"] = node.register_hook(self.after_backward)

    def after_backward(self, grads: tuple, upstream: tuple) -> tuple | None:
        if not torch.is_grad_enabled() or upstream[0] is None:
            return None
        node = torch._C._current_autograd_node()
        inputs = self.inputs(node._saved_query, node._saved_key, node._saved_value)
        lse = node._saved_log_sumexp if hasattr(node, "_saved_log_sumexp") else node._saved_logsumexp
        lse = lse.detach().reshape(*inputs.q.shape[:2], -1)[:, :, : inputs.q.shape[2]]  # its rows may be padded
        out = node._saved_output.detach()
        found = autograd.apply(AttentionBackward, upstream[0], None, out, lse, *inputs, False, self.setting)
        return (*(None if g is None else f for g, f in zip(grads[:3], found, strict=False)), *grads[3:])


class MaskedPlan(Plan):
    """The same of calls with a mask, whose tensors are fitted at each: what they hold may have changed."""

    __slots__ = ("fitted_attend", "shape")

    def __init__(self, inputs: AttentionInputs, learns: bool, setting: str) -> None:
        super().__init__(inputs, learns, setting)
        B, M, N = lengths_of(inputs)
        self.shape = (B, inputs.q.shape[1], M, N)
        self.fitted_attend, self.attend = self.attend, self.by_mask

    def by_mask(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | Mask) -> Tensor:
        if type(mask) is Tensor:
            return self.fitted_attend(query, key, value, with_rank(mask))
        tensors = fit_tensors(mask, query, None, self.shape)
        return self.fitted_attend(query, key, value, *[tensors[name] for name in self.fields])


class PackedPlan(Plan):
    """The same of packed sequences: of rows (T, H, D) as they are given, and cumulative lengths, once where they are
    the same for queries and keys. A batch with as many rows may never come again but for the layers of a stack, so
    launches are recorded when the second call does."""

    __slots__ = ("came", "template")

    def __init__(self, inputs: AttentionInputs, learns: bool, setting: str) -> None:
        super().__init__(inputs, learns, setting)
        self.template = inputs._replace(q=None, k=None, v=None, cu_q=None, cu_k=None)
        self.came = False

    def inputs(
        self, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor | None = None
    ) -> AttentionInputs:
        q, k, v = map(as_batch, (query, key, value))
        return self.template._replace(q=q, k=k, v=v, cu_q=cu_q, cu_k=cu_q if cu_k is None else cu_k)

    def by_forward(self, *given: Tensor) -> Tensor:
        return self.run(*given).out

    def run(self, *given: Tensor) -> Results:
        self.is_passing, self.came = not self.came, True
        out, lse = super().run(*given)
        return Results(as_rows(out).data, lse)  # a tensor and no view, which nobody could change in place

    def run_backward(self, given: list[Tensor], out: Tensor, lse: Tensor, grad_out: Tensor) -> Gradients:
        return Gradients(*map(as_rows, super().run_backward(given, as_batch(out), lse, as_batch(grad_out))[:3]))

    def differentiable_backward(
        self, given: list[Tensor], out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(map(as_rows, super().differentiable_backward(given, as_batch(out), lse, as_batch(grad_out))))


def as_batch(rows: Tensor) -> Tensor:
    """(1, H, T, D) of (T, H, D)."""
    return rows.transpose(0, 1).unsqueeze(0)


def as_rows(batch: Tensor) -> Tensor:
    """(T, H, D) of (1, H, T, D)."""
    return batch.squeeze(0).transpose(0, 1)


class PlannedAttention(torch.autograd.Function):
    """Training through a plan; a second derivative goes the ordinary way."""

    @staticmethod
    def forward(ctx, plan, *given):
        out, lse = plan.run(*given)
        ctx.plan = plan
        ctx.save_for_backward(*given, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        *given, out, lse = ctx.saved_tensors
        differentiable = torch.is_grad_enabled() or select_by_modes()
        backward = ctx.plan.differentiable_backward if differentiable else ctx.plan.run_backward
        grads = backward(given, out, lse, grad_out)
        return (None, *grads[:3], *(None,) * (len(given) - 3))


# Function.apply without its questions about functorch, which were answered before a plan is taken: 2 us.
apply = super(torch.autograd.Function, PlannedAttention).apply


def select_by_modes() -> bool:
    """A TorchDispatchMode (FLOP counter, selective checkpointing, fake tensors) must see the operator."""
    return torch._C._len_torch_dispatch_stack() > 0
