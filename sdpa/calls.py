"""The one cache of calls, and what it holds: kernels that were selected, with their recorded launches.

A call is recognised by its state (every argument and switch that is no tensor), by its tensors (their types, dispatch
keys, dtypes, devices, sizes, strides and requires_grad), and by facts that only some calls have. The last few calls of
a state are compared with the given tensors by the guards of torch.compile, in one call into torch. All other calls are
found by a key of the tensors, which takes three times as long to build. The least recently used entry is dropped first.

The form of a call is everything that its kernel depends on beside the numbers in its tensors: which fields of
AttentionInputs are given, their sizes, strides, dtypes and device, and every other number. A `Pass` is one direction of
the calls of one form.
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

from sdpa.alignment import ADDRESS_BITS, has_memory
from sdpa.dispatch import autotune
from sdpa.dispatch.caches import CACHES, LAST
from sdpa.dispatch.choice import Choice
from sdpa.dispatch.context import CURRENT, current_text
from sdpa.dispatch.recovery import recover
from sdpa.problem import AttentionInputs, Held, Results, as_batch
from sdpa.repeated import Operator, Repeated, configure
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
MAX_STATES = 1024  # a backward has one of its own for each form
LATEST = 4  # calls of a state that are compared before a key is built
PLAIN_TYPES = frozenset({Tensor, Parameter})

Check = Callable[..., bool]
Key = tuple[Hashable, ...]

WITH_LSE = frozenset({"lse"})
AVERAGED = frozenset({"averaged"})
NO_EXTRA: frozenset[str] = frozenset()
PLAIN: tuple[Any, Any, Any] = (0, 1, 2)  # places of q, k and v
FIRST_NUMBER, END_NUMBERS = 3, 7  # scale, left, right, bottom_right
PLAIN_REST = AttentionInputs(*PLAIN, 1.0)[END_NUMBERS:]
CU_Q, CU_K = (AttentionInputs._fields.index(name) for name in ("cu_q", "cu_k"))
LEARNED = ("bias", "sinks")  # fields beside q, k and v that have gradients

configure(last=LAST)


# -- how a call is found ----------------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """What guards do not see of a call's tensors. None is what need not be asked again where guards take them."""

    autocast: torch.dtype | None = None  # guards see whether it is on, by the dispatch keys
    alignment: int | None = None  # `form_of`: of forwards and backwards on a GPU
    precision: str | None = None  # of float32 products: of forwards on a GPU, and of every backward


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


def form_of(tensors: Sequence[Tensor]) -> int | None:
    """The bits of the addresses below multiples of 16 bytes, on a GPU; guards and keys do not hold them. 0 where a
    tensor has no address, as gradients in batches have none: `find` takes no such tensor. None elsewhere."""
    if not tensors[0].is_cuda:
        return None
    address = 0
    try:
        for tensor in tensors:
            address |= tensor.data_ptr()
    except RuntimeError:
        return 0
    return address & ADDRESS_BITS


class Calls:
    """Maps calls to what was prepared for them: a function of their tensors, or a pass."""

    def __init__(self) -> None:
        self.recent: dict[Hashable, tuple[Entry, ...]] = {}
        self.known: OrderedDict[Key, Any] = OrderedDict()
        self.changing = RLock()  # of `known`; re-entrant, since a finaliser may make a call inside of another one

    def find(self, state: Hashable, tensors: Sequence[Tensor], make: Callable[[], Any], facts: Facts = NO_FACTS) -> Any:
        """What is cached for a call like this. Where nothing is, `make` is called. What it returns is cached, unless
        that is None or a tensor is of a subclass. None for tensors that are other ones than their memory says
        (`is_wrapped`)."""
        for is_alike, found, _, known in self.recent.get(state, ()):
            if is_alike(*tensors) and known == facts:
                return found
        if any(map(is_wrapped, tensors)):
            return None
        key = key_of(state, tensors, facts)
        found = None if key is None else self.known.get(key)
        if found is None:
            found = make()
        if found is not None and key is not None:
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


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is another one than its memory says: functorch left it behind when a transform ended, torch has
    still to change its sign, or there is no memory behind it, as behind gradients that are computed in batches."""
    if torch.func.debug_unwrap(tensor, recurse=False) is not tensor or tensor.is_neg() or tensor.is_nested:
        return True
    try:
        return not has_memory(tensor)
    except RuntimeError:  # a tensor without a storage
        return True


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


# -- what is found ----------------------------------------------------------------------------------------------------


class Form:
    """Which fields of AttentionInputs are tensors, and the values of the other fields, as `fields_of` a call has them.

    With `takes_rows` its calls are packed ones whose q, k and v may be given as rows (T, H, D), so that nothing is made
    of them before a launch that reads addresses alone.
    """

    __slots__ = ("alike", "firsts", "learned", "numbers", "places", "same", "takes_rows", "template")

    def __init__(self, fields: tuple[Any, ...], takes_rows: bool = False) -> None:
        self.takes_rows = takes_rows
        self.alike = isinstance(fields[CU_K], Held) and fields[CU_K] == CU_Q  # then it is given once
        given = [place for place, value in enumerate(fields) if isinstance(value, Held)]
        self.places = tuple(place for place in given if not (self.alike and place == CU_K))
        self.same = tuple(self.places.index(fields[place]) for place in self.places)
        # Recorded launches are given each tensor once: the numbers of the places that hold one for the first time.
        self.firsts = tuple(dict.fromkeys(self.same))
        self.template: list[Any] = [None if isinstance(value, Held) else value for value in fields]
        plain = self.places == PLAIN and fields[END_NUMBERS:] == PLAIN_REST
        self.numbers = fields[FIRST_NUMBER:END_NUMBERS] if plain else None
        learned = ((name, AttentionInputs._fields.index(name)) for name in LEARNED)
        self.learned = tuple((name, self.places.index(place)) for name, place in learned if place in self.places)

    def inputs(self, tensors: Sequence[Any]) -> AttentionInputs:
        """AttentionInputs of these tensors, given in the order of the fields."""
        if self.numbers is not None:
            return AttentionInputs(*tensors, *self.numbers)
        if self.takes_rows:
            tensors = (*map(as_batch, tensors[:3]), *tensors[3:])
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


class Pass(Repeated):
    """One direction of the calls of one form.

    It is called with the form's tensors. For a backward they are followed by out, lse, the gradient of out and, where
    one arrives, that of lse; for weights by lse. It returns (out, lse), gradients in the order of Gradients, or the
    weights.
    """

    __slots__ = ("form", "is_native", "is_passing", "is_unmeasured")

    def __init__(self, form: Form, choice: Choice, takes_output_alone: bool = False) -> None:
        self.form, self.choice = form, choice
        # Whether the kernel may be an operator of torch's, which is then what is called again.
        self.is_native = takes_output_alone and form.numbers is not None
        self.again = None  # its recorded launches
        self.is_passing = False  # not expected to be called again: launches are not recorded
        self.is_unmeasured = autotune.is_wanted(choice)  # the next call may be one that sdpa.autotune measures

    def first_time(self, tensors: Sequence[Tensor]) -> Any:
        try:
            return self.first(tensors)
        except Exception as error:
            return self.recovered(error, tensors)

    def recovered(self, error: Exception, tensors: Sequence[Tensor]) -> Any:
        return recover(self.choice, error, *self.nouns(tensors))

    def first(self, tensors: Sequence[Tensor]) -> Any:
        """Run the kernel and record its launches, or torch's own operator; for later calls whose tensors the recorded
        launches do not fit, run the kernel again. Inside of `sdpa.autotune` the problem is measured before."""
        form, choice = self.form, self.choice
        count = len(form.places)
        # What hooks of saved tensors return for one tensor may be several, and for several one.
        given = [tensors[number] for number in form.same]
        nouns = self.nouns((*given, *tensors[count:]))
        if self.is_unmeasured:
            if not autotune.may_begin(choice):
                return choice.call(*nouns)
            self.choice = LAST.choice = choice = autotune.better(choice, *nouns)
            self.is_unmeasured = False  # from here on: another thread's first call waits for the same answer
        if self.is_native:
            self.is_native, native = False, choice.native
            operator = None if native is None else native(*nouns)
            if operator is not None:
                self.again = Operator(*operator)
                return self.again(*given)
        record = None if self.is_passing else choice.record
        if record is None or (len(tensors) > count and first_places(given) != form.same):
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
