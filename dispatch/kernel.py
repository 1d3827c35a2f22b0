"""A kernel as a row of data: its limits, and `why_not`, which returns a sentence for each limit that a problem
exceeds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from sdpa.problem import FEATURES, AttentionInputs, AttentionProblem, Gradients, Results, Tile

Rule = Callable[[AttentionProblem], "str | None"]
FAMILIES = ("flash", "efficient", "cudnn", "math")
ROWS = frozenset({"q", "k", "v"})


class KernelModule(Protocol):
    """A kernel's module. It has those of the three directions that its row names.

    `TILES`, `tiles`, `native`, `record` and `needs_whole_rows` are optional and not listed; callers check for them.
    """

    def unavailable(self) -> str | None: ...

    def forward(self, inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None) -> Results: ...

    def backward(
        self, inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None
    ) -> Gradients: ...

    def weights(self, inputs: AttentionInputs, lse: Tensor, problem: AttentionProblem, tile: Tile | None) -> Tensor: ...


@dataclass(frozen=True)
class Kernel:
    """One row of the catalog.

    `why_not` is about correctness and does not depend on measurements. `efficiency` and `overhead` are about speed, and
    are used only where no table has a measured time. `efficiency` is the share of the device's peak that the kernel
    reaches, of Triton's less: with such numbers the fastest is chosen more often on an H200 (docs/log/choice.md).
    `overhead` is what a repeated call takes at least, in seconds; `backward_overhead` is that for a backward, where it
    is another.
    """

    name: str
    family: str
    module: str
    devices: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    features: frozenset[str]
    summary: str
    directions: tuple[str, ...] = ("forward", "backward")
    max_head_size: int | None = None
    deterministic: bool = True  # under torch.use_deterministic_algorithms at least
    varies_in: tuple[str, ...] = ()  # directions in which its sums come in any order without that, and bits vary
    order_cost: float = 1.0  # the factor of time in these directions where bits must not vary
    efficiency: float = 0.5
    dense_efficiency: float = 1.0  # the factor of that where it reads a dense mask or a bias
    overhead: float = 5e-6
    backward_overhead: float | None = None
    # From so many rows of queries on, times (G - 1), its backward adds up gradients of keys in float32 in any
    # case where heads of queries share these and later rows see more of them. 0: never for that.
    sums_groups: int = 0
    sums_queries: bool = False  # its backward adds up gradients of queries in float32, in memory beside its results
    mask_launches: int = 0  # on a GPU, beside its own: a dense mask is converted, and rows without a key are zeroed
    materialises: bool = False  # needs memory of size M x N
    compiles: bool = False  # the first call of a new kind waits for a compiler
    splits_keys: bool = False  # splits keys over programs; heads that share keys are in one program
    # Addresses and strides of what it reads by vectors must be multiples of this, in bytes. 1: a last stride of 1, any
    # address; 0: any strides.
    alignment: int = 0
    aligned: frozenset[str] = ROWS  # tensors of sdpa.problem.PLACED that it reads by vectors
    pads_columns: bool = False  # computes with head sizes filled up to powers of two
    pads_heads: int = 0  # copies q, k and v itself where their head size is no multiple of this
    rules: tuple[Rule, ...] = ()

    def overhead_of(self, direction: str) -> float:
        own = self.backward_overhead if direction == "backward" else None
        return self.overhead if own is None else own

    def load(self) -> KernelModule:
        """The module with each direction, TILES and unavailable; imported when the kernel is first considered."""
        return load_module(self.module)

    def unavailable(self) -> str | None:
        """Why the kernel cannot run on this machine at all, or None."""
        try:
            return self.load().unavailable()
        except ImportError as error:
            return f"its module does not import: {error}"

    def why_not(self, problem: AttentionProblem) -> list[str]:
        """Each reason why the kernel cannot run `problem`, a sentence with the value it got. Empty means that it
        can."""
        reasons = self.limits(problem)
        unavailable = self.unavailable() if self.serves(problem.device_type) else None
        return reasons if unavailable is None else [*reasons, unavailable]

    def limits(self, problem: AttentionProblem) -> list[str]:
        """The same without what this machine lacks: what `problem` exceeds on any."""
        answers = [check(self, problem) for check in CHECKS] + [rule(problem) for rule in self.rules]
        return [reason for reason in answers if reason]

    def misplaced(self, problem: AttentionProblem) -> tuple[str, ...]:
        """The tensors that the kernel cannot read where they lie."""
        need = min(self.alignment, 1) if self.copies_rows(problem) else self.alignment
        return tuple(name for name, got in problem.unaligned if got < need and name in self.aligned)

    def varies(self, problem: AttentionProblem) -> bool:
        """Whether the bits of its results may vary from call to call."""
        return problem.direction in self.varies_in and not problem.deterministic

    def extra_bytes(self, problem: AttentionProblem) -> int:
        """Memory beside its results, as far as it grows with the problem."""
        rows = problem.B * problem.H * problem.M * torch.float32.itemsize
        sums = rows * problem.D if self.sums_queries and problem.direction == "backward" else 0
        return sums + (rows * problem.N if self.materialises else 0)

    def needs_whole_rows(self, problem: AttentionProblem, lse: Tensor) -> bool:
        """Whether the backward of `problem` finds rows' sums in the keys it is given, instead of taking them from the
        results, of which `lse` is one: these must then be of no other keys."""
        own = getattr(self.load(), "needs_whole_rows", None)
        return own is not None and own(problem, lse)

    def copies_rows(self, problem: AttentionProblem) -> bool:
        return bool(self.pads_heads and problem.D % self.pads_heads)

    def serves(self, device_type: str) -> bool:
        return not self.devices or device_type in self.devices


def wrong_device(kernel: Kernel, problem: AttentionProblem) -> str | None:
    if kernel.serves(problem.device_type):
        return None
    return f"runs on {' or '.join(kernel.devices)}, got {problem.device_type}"


def wrong_dtype(kernel: Kernel, problem: AttentionProblem) -> str | None:
    if problem.dtype in kernel.dtypes:
        return None
    names = sorted(str(d).removeprefix("torch.") for d in kernel.dtypes)
    return f"takes {', '.join(names)}, got {str(problem.dtype).removeprefix('torch.')}"


def wrong_direction(kernel: Kernel, problem: AttentionProblem) -> str | None:
    return None if problem.direction in kernel.directions else f"has no {problem.direction} pass"


def head_too_large(kernel: Kernel, problem: AttentionProblem) -> str | None:
    limit = kernel.max_head_size
    if limit is None or max(problem.D, problem.Dv) <= limit:
        return None
    return f"takes head sizes up to {limit}, got D = {problem.D}, Dv = {problem.Dv}"


def missing_features(kernel: Kernel, problem: AttentionProblem) -> str | None:
    missing = sorted(problem.features - kernel.features, key=list(FEATURES).index)
    return f"does not support {', '.join(FEATURES[name] for name in missing)}" if missing else None


def not_deterministic(kernel: Kernel, problem: AttentionProblem) -> str | None:
    if kernel.deterministic or not problem.deterministic:
        return None
    return "is not deterministic, and torch.use_deterministic_algorithms(True) is set"


def apart(kernel: Kernel, problem: AttentionProblem) -> str | None:
    """A last stride that is not 1."""
    names = {name for name in kernel.misplaced(problem) if not problem.unaligned_at(name)}
    if not names:
        return None
    whose = "q, k and v" if names & ROWS else "the bias"
    return f"needs the last stride of {whose} to be 1, and would copy otherwise"


def misaligned(kernel: Kernel, problem: AttentionProblem) -> str | None:
    got = [(name, problem.unaligned_at(name)) for name in kernel.misplaced(problem)]
    told = [f"{name.replace('_', ' ')} at multiples of {found}" for name, found in got if found]
    if not told:
        return None
    return (
        f"needs addresses and strides that are multiples of {kernel.alignment} bytes, and would copy otherwise, got "
        f"{', '.join(told)}"
    )


CHECKS = (
    wrong_device,
    wrong_dtype,
    wrong_direction,
    head_too_large,
    missing_features,
    not_deterministic,
    apart,
    misaligned,
)


@cache
def load_module(name: str) -> KernelModule:
    return cast(KernelModule, importlib.import_module(name))
