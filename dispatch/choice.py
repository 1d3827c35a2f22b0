"""Choice: the kernel selected for a problem, its tile, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from sdpa.dispatch import recovery
from sdpa.dispatch.kernel import Kernel
from sdpa.dispatch.placing import call_on_copies, record_on_copies
from sdpa.dispatch.refusal import describe
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile


@dataclass(frozen=True)
class Choice:
    """The selected kernel and how it is called."""

    kernel: Kernel
    tile: Tile | None
    problem: AttentionProblem
    reason: str  # why it was selected, as a clause
    setting: str = ""  # under which it was selected, and its successor is, if it fails
    copies: tuple[str, ...] = ()  # tensors (of sdpa.problem.PLACED) that are copied first, where they need it

    def __str__(self) -> str:
        return f"{self.kernel.name} for {describe(self.problem)} ({self.reason})"

    def run(self, *tensors: AttentionInputs | Results | Tensor) -> Results | Gradients | Tensor:
        """`call`; where the kernel cannot be started, that of the next able one (`recover`)."""
        try:
            return self.call(*tensors)
        except Exception as error:
            return recovery.recover(self, error, *tensors)

    def call(self, *tensors: AttentionInputs | Results | Tensor) -> Results | Gradients | Tensor:
        """The forward of (inputs,), the backward of (inputs, results, upstream) or the weights of (inputs, lse), as the
        problem's direction says."""
        return self.function(self.problem.direction)(*tensors, self.problem, self.tile)

    def function(self, direction: str) -> Callable[..., Any]:
        """(*tensors, problem, tile) -> results: the kernel's own, or on copies."""
        own = getattr(self.kernel.load(), direction)
        return partial(call_on_copies, own, self.kernel.aligned) if self.copies else own

    @property
    def forward(self) -> Callable[..., Any]:
        return self.function("forward")

    @property
    def backward(self) -> Callable[..., Any]:
        return self.function("backward")

    @property
    def weights(self) -> Callable[..., Any]:
        return self.function("weights")

    @property
    def record(self) -> Callable[..., Any] | None:
        """(tensors, problem, tile) -> (results, again), where the kernel's module has one. `again` repeats the call for
        tensors of the same form; of a library of ours it returns a plain tuple."""
        module = self.kernel.load()
        own = getattr(module, "record", None)
        if own is None or not self.copies:
            return own
        return partial(record_on_copies, own, getattr(module, self.problem.direction), self.kernel.aligned)

    @property
    def native(self) -> Callable[..., Any] | None:
        """(inputs,) -> torch's own operator, its options behind q, k and v, and those by name, where the kernel
        is one that reads tensors where they lie."""
        return None if self.copies else getattr(self.kernel.load(), "native", None)
