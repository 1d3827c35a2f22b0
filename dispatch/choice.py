"""Choice: who answers a problem, with which tile, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from sdpa.dispatch import recovery
from sdpa.dispatch.kernel import Kernel
from sdpa.dispatch.placing import call_on_copies
from sdpa.dispatch.refusal import describe
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile


@dataclass(frozen=True)
class Choice:
    """Who answers and how."""

    kernel: Kernel
    tile: Tile | None
    problem: AttentionProblem
    reason: str  # why this one, in a clause
    setting: str = ""  # what it was chosen under, and where it fails another is
    copies: tuple[str, ...] = ()  # the tensors (of sdpa.problem.PLACED) that it is given copies of, where they need one

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
        """(tensors, problem, tile) -> what `call` returns, and what does it again for tensors of the same form (a CPU's
        in a plain tuple); where the kernel's module has such, and reads tensors where they lie."""
        if self.copies:
            return None
        return getattr(self.kernel.load(), "record", None)

    @property
    def native(self) -> Callable[..., Any] | None:
        """(inputs, learns) -> torch's own operator of (q, k, v), where the kernel is one that reads tensors where they
        lie."""
        return None if self.copies else getattr(self.kernel.load(), "native", None)
