"""One direction of a prepared call: the kernel that was selected, and its recorded launches.

The form of a call is everything that its kernel depends on beside the numbers in its tensors: which fields of
AttentionInputs are given, their sizes, strides, dtypes and device, and every other number. `calls` recognises it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sdpa.calls import first_places
from sdpa.dispatch.caches import LAST
from sdpa.dispatch.choice import Choice
from sdpa.dispatch.recovery import recover
from sdpa.problem import AttentionInputs, Gradients, Results, as_batch
from sdpa.repeated import Repeated, configure

WITH_LSE = frozenset({"lse"})
AVERAGED = frozenset({"averaged"})
NO_EXTRA: frozenset[str] = frozenset()
PLAIN: tuple[Any, Any, Any] = (0, 1, 2)  # places of q, k and v
FIRST_NUMBER, END_NUMBERS = 3, 7  # scale, left, right, bottom_right
CU_Q, CU_K = (AttentionInputs._fields.index(name) for name in ("cu_q", "cu_k"))


configure(last=LAST)


class Form:
    """Which fields of AttentionInputs are tensors, and the values of the other fields."""

    __slots__ = ("alike", "firsts", "numbers", "places", "same", "template")

    def __init__(self, inputs: AttentionInputs) -> None:
        self.alike = inputs.cu_k is not None and inputs.cu_k is inputs.cu_q  # then it is given once
        given = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]
        self.places = tuple(place for place in given if not (self.alike and place == CU_K))
        self.same = first_places([inputs[place] for place in self.places])
        # Recorded launches are given each tensor once: the numbers of the places that hold one for the first time.
        self.firsts = tuple(dict.fromkeys(self.same))
        self.template: list[Any] = [None if isinstance(value, Tensor) else value for value in inputs]
        plain = self.places == PLAIN and inputs[END_NUMBERS:] == PLAIN_REST
        self.numbers = inputs[FIRST_NUMBER:END_NUMBERS] if plain else None

    def inputs(self, tensors: Sequence[Any]) -> AttentionInputs:
        """AttentionInputs of these tensors, given in the order of the fields."""
        if self.numbers is not None:
            return AttentionInputs(*tensors, *self.numbers)
        values = self.template.copy()
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        if self.alike:
            values[CU_K] = values[CU_Q]
        return AttentionInputs(*values)

    def distinct(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The form's tensors among all tensors of inputs, in order, without a second one that is the same."""
        if not self.alike:
            return tensors
        place = self.places.index(CU_Q) + 1
        return (*tensors[:place], *tensors[place + 1 :])

    def tensors(self, inputs: AttentionInputs) -> list[Tensor]:
        """The tensors of inputs of this form."""
        values: Sequence[Any] = inputs
        return [values[place] for place in self.places]


PLAIN_REST = AttentionInputs(*PLAIN, 1.0)[END_NUMBERS:]


class RowsForm(Form):
    """The form of packed calls whose q, k and v are given as rows (T, H, D), so that nothing is made of them before a
    launch that reads addresses alone."""

    __slots__ = ()

    def inputs(self, tensors: Sequence[Any]) -> AttentionInputs:
        return super().inputs((*map(as_batch, tensors[:3]), *tensors[3:]))


def as_rows(batch: Tensor) -> Tensor:
    """(T, H, D) of (1, H, T, D)."""
    return batch.squeeze(0).transpose(0, 1)


class Pass(Repeated):
    """One direction of the calls of one form.

    It is called with the form's tensors. For a backward they are followed by out, lse, the gradient of out and, where
    one arrives, that of lse; for weights by lse. It returns (out, lse), gradients in the order of Gradients, or the
    weights.
    """

    __slots__ = ("form", "is_passing")

    def __init__(self, form: Form, choice: Choice) -> None:
        self.form, self.choice = form, choice
        self.again = None  # its recorded launches
        self.is_passing = False  # not expected to be called again: launches are not recorded

    def first_time(self, tensors: Sequence[Tensor]) -> Any:
        try:
            return self.first(tensors)
        except Exception as error:
            return self.recovered(error, tensors)

    def recovered(self, error: Exception, tensors: Sequence[Tensor]) -> Any:
        return recover(self.choice, error, *self.nouns(tensors))

    def first(self, tensors: Sequence[Tensor]) -> Results | Gradients | Tensor:
        """Run the kernel and record its launches; for later calls whose tensors the recorded launches do not fit, run
        it again."""
        form, choice = self.form, self.choice
        count = len(form.places)
        # What hooks of saved tensors return for one tensor may be several, and for several one.
        given = [tensors[number] for number in form.same]
        nouns = self.nouns((*given, *tensors[count:]))
        record = None if self.is_passing else choice.record
        if record is None or first_places(given) != form.same:
            return choice.call(*nouns)
        results, again = record(nouns, choice.problem, choice.tile)
        if again is not None:
            self.again = again if len(form.firsts) == count else self.once(again)
        return results

    def once(self, again: Callable[..., Any]) -> Callable[..., Any]:
        """`again`, given each tensor once."""
        firsts, count = self.form.firsts, len(self.form.places)
        return lambda *tensors: again(*[tensors[number] for number in firsts], *tensors[count:])

    def nouns(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments of the kernel's function of this direction."""
        number, direction = len(self.form.places), self.choice.problem.direction
        inputs, rest = self.form.inputs(tensors[:number]), tensors[number:]
        if direction == "forward":
            return (inputs,)
        if direction == "weights":
            return inputs, rest[0]
        out, lse, grad_out, *grad_lse = rest
        return inputs, Results(out, lse), Results(grad_out, grad_lse[0] if grad_lse else None)
