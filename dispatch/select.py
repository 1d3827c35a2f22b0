"""can -> should -> Choice: the fastest kernel that is able and allowed, cached by problem."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from torch import Tensor

from sdpa.dispatch import cost, failure, learning, tuning
from sdpa.dispatch.catalog import KERNELS, by_name, kernels_for
from sdpa.dispatch.context import ALL_TOGGLES, Setting, enabled_families, torch_toggles
from sdpa.dispatch.kernel import FAMILIES, Kernel
from sdpa.problem import UNLIMITED, AttentionInputs, AttentionProblem, Gradients, Results, Tile, read_of

# Scores of a problem (B * H * M * N) above which falling to math on an accelerator is worth a warning.
LARGE_PROBLEM = 1 << 24
CACHED_CHOICES = 4096
KNOWN = frozenset(FAMILIES) | frozenset(by_name())
# What asks for no tensor but a dense mask, and for no number but the scale and what the problem holds.
SIMPLE = frozenset({"band", "bottom_right", "nonpositive_scale", "gqa", "lse", "backward", "bias", "allowed"})
RECORDED = SIMPLE | {"packed"}
MAX_FORMS = 64


@dataclass(frozen=True)
class Choice:
    """Who answers and how."""

    kernel: Kernel
    tile: Tile | None
    problem: AttentionProblem
    reason: str  # why this one, in a clause
    setting: str = ""  # what it was chosen under, and where it fails another is
    # By scale and strides, what runs the launches of a call before again (`record`).
    memory: dict[tuple, Callable] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.kernel.name} for {describe(self.problem)} ({self.reason})"

    def run(self, *tensors: AttentionInputs | Results | Tensor) -> Results | Gradients | Tensor:
        """The forward of (inputs,), the backward of (inputs, results, upstream) or the weights of (inputs, lse), as the
        problem's direction says; where the kernel cannot be started, that of the next able one (`recover`)."""
        try:
            return self.call(*tensors)
        except Exception as error:
            return recover(self, error, *tensors)

    def call(self, *tensors: AttentionInputs | Results | Tensor) -> Results | Gradients | Tensor:
        """Like `run`, without a second try; on a CPU to look for a call made before takes longer than it saves."""
        launched = self.problem.device_type != "cpu" and self.problem.direction != "weights"
        if launched and self.problem.features <= SIMPLE and self.record is not None:
            return self.call_again(*tensors)
        return getattr(self, self.problem.direction)(*tensors, self.problem, self.tile)

    def call_again(self, inputs: AttentionInputs, *rest: Results) -> Results | Gradients:
        """`call` by the launches of a call before, if there was one of these strides and masks of these sizes."""
        read = read_of(inputs)
        given = (*read, *rest[0], rest[1].out) if rest else read
        masks = tuple((mask.shape, mask.dtype, mask is inputs.bias) for mask in read[3:])
        same = inputs.q is inputs.k, inputs.q is inputs.v, inputs.k is inputs.v  # `read_of` has those once
        form = (inputs.scale, masks, same, *(tensor.stride() for tensor in given))
        again = self.memory.get(form)
        results = None if again is None else again(*given)
        if results is None:
            results, again = self.record((inputs, *rest), self.problem, self.tile)
            if again is not None:
                if len(self.memory) >= MAX_FORMS:
                    self.memory.clear()
                self.memory[form] = again
        return results

    @property
    def forward(self) -> Callable:
        return self.kernel.load().forward

    @property
    def backward(self) -> Callable:
        return self.kernel.load().backward

    @property
    def weights(self) -> Callable:
        return self.kernel.load().weights

    @property
    def record(self) -> Callable | None:
        """(tensors, problem, tile) -> what `call` returns, and what does it again for tensors of the same form (a CPU's
        in a plain tuple); where the kernel's module has such, which knows no other tensors than `read_of`."""
        return getattr(self.kernel.load(), "record", None) if self.problem.features <= RECORDED else None


@dataclass(frozen=True)
class Candidate:
    """One kernel's answer to a problem: what keeps it from running, and how long it should take."""

    kernel: Kernel
    reasons: tuple[str, ...]
    seconds: float | None
    source: str  # where `seconds` comes from
    tile: Tile | None = None
    measured: bool = False

    @property
    def able(self) -> bool:
        return not self.reasons


class NoKernelError(RuntimeError):
    """No kernel is both able and allowed; the message gives every reason."""


LAST = threading.local()


def select(problem: AttentionProblem, setting: str) -> Choice:
    """The choice for `problem` under `setting` (Setting.encode). Raises NoKernelError with all reasons."""
    choice = choose(problem, setting, toggles_for(problem.direction))
    LAST.choice = choice
    return choice


def toggles_for(direction: str) -> int:
    """torch's switches, which say nothing of the weights: its modules make those whatever is off."""
    return ALL_TOGGLES if direction == "weights" else torch_toggles()


def last_choice() -> Choice | None:
    """The choice that the most recent call in this thread ran with."""
    return getattr(LAST, "choice", None)


@lru_cache(maxsize=CACHED_CHOICES)
def choose(problem: AttentionProblem, text: str, toggles: int, learns: bool = False) -> Choice:
    """`learns`: torch may differentiate its own operator here, so that a small forward is chosen with its backward."""
    setting = Setting.decode(text)
    candidates = [c for c in consider(problem) if allows(setting, toggles, c.kernel)]
    if not candidates and not setting.forced:
        raise NoKernelError(
            "No viable backend for scaled_dot_product_attention was found. This is likely due to turning off both the "
            f"math kernel and the fused kernels. {disabled_sentence(setting, toggles)}"
        )
    able = [candidate for candidate in candidates if candidate.able]
    if not able:
        raise NoKernelError(refusal(problem, setting, candidates))
    rank, told = ranking(able), ""
    if learns and not setting.priority and len(able) > 1 and learning.is_small(problem):
        fastest, rank = min(able, key=rank), learning.ranking_together(rank, followers(problem, text, toggles))
        told = " with its backward" if min(able, key=rank) is not fastest else ""
    best = by_preference(able, setting, rank) if setting.priority else min(able, key=rank)
    choice = Choice(best.kernel, best.tile, problem, why(best, able, setting, told), text)
    if choice.kernel.family == "math":
        fell_to_math(choice, setting, toggles)
    return choice


def consider(problem: AttentionProblem) -> list[Candidate]:
    """Every kernel of the catalog with its reasons, or its time where it is able."""
    table = tuning.measured(problem)
    return [candidate_of(kernel, problem, table) for kernel in KERNELS]


def candidate_of(kernel: Kernel, problem: AttentionProblem, table: tuning.Measurement | None) -> Candidate:
    reasons = tuple(kernel.why_not(problem))
    if reasons:
        return Candidate(kernel, reasons, None, "")
    tile = tile_of(kernel, problem, table.tile.get(kernel.name) if table else None)
    reasons = failure.reasons(kernel, tile, problem)
    if reasons:
        return Candidate(kernel, reasons, None, "")
    if table is not None and kernel.name in table.seconds:
        return Candidate(kernel, (), table.seconds[kernel.name], table.source, tile, measured=True)
    return Candidate(kernel, (), cost.estimate(kernel, problem, tile), "estimated", tile)


def tiles_of(kernel: Kernel, problem: AttentionProblem) -> tuple[Tile, ...]:
    """The tiles a kernel offers for a problem, its best guess first."""
    module = kernel.load()
    offered = getattr(module, "tiles", None)
    return tuple(offered(problem) if offered else getattr(module, "TILES", ()))


def tile_of(kernel: Kernel, problem: AttentionProblem, measured: Tile | None = None) -> Tile | None:
    """The measured tile if the kernel still offers it (as the object it offers), else the kernel's first; of those
    that the device did not refuse, unless it refused all."""
    offered = tiles_of(kernel, problem)
    offered = [tile for tile in offered if not failure.reasons(kernel, tile, problem)] or offered
    if measured in offered:
        return offered[offered.index(measured)]
    return offered[0] if offered else None


def ranking(able: list[Candidate]) -> Callable[[Candidate], tuple[bool, float]]:
    """The order among candidates: by time, but those without a figure after those with one.

    An estimate is an optimist beside a measurement: with a bucket near, a kernel it lacks could not run or is newer
    than the table. Only where nothing was measured but kernels that write out the scores may an estimate come first.
    """
    decided = any(c.measured and not c.kernel.materialises for c in able)
    return lambda c: (decided and not c.measured, c.seconds)


def followers(problem: AttentionProblem, text: str, toggles: int) -> list[Candidate]:
    """Who may be chosen for the backward of a forward: of all that are able, those that `ranking` has in front."""
    backward = learning.backward_of(problem)
    setting = Setting.decode(backward_setting(text))
    able = [c for c in consider(backward) if c.able and allows(setting, toggles, c.kernel)]
    rank = ranking(able)
    return [c for c in able if rank(c)[0] == min(rank(other)[0] for other in able)]


def allows(setting: Setting, toggles: int, kernel: Kernel) -> bool:
    """Whether our setting names the kernel or its family, and torch's own switches leave the family on.

    A kernel asked for by its own name is not subject to torch's switches: the closer word holds.
    """
    if kernel.name in setting.allowed:
        return True
    if setting.forced and setting.allowed[0] in by_name():
        return False  # "math" names a family and a kernel: kernel= means the kernel
    if setting.allowed and kernel.family not in setting.allowed:
        return False
    return kernel.family in enabled_families(toggles)


def by_preference(able: list[Candidate], setting: Setting, rank: Callable[[Candidate], tuple]) -> Candidate:
    def place(candidate: Candidate) -> tuple[int, tuple]:
        kernel = candidate.kernel
        name = kernel.name if kernel.name in setting.allowed else kernel.family
        return setting.allowed.index(name) if name in setting.allowed else len(setting.allowed), rank(candidate)

    return min(able, key=place)


def why(best: Candidate, able: list[Candidate], setting: Setting, told: str = "") -> str:
    if setting.forced:
        return "asked for by name"
    if len(able) == 1:
        return "the only kernel that is able and allowed"
    if setting.priority:
        return "first in the order given"
    return f"fastest{told} of {len(able)} able kernels, {best.source}"


def refusal(problem: AttentionProblem, setting: Setting, candidates: list[Candidate]) -> str:
    """All reasons of all allowed kernels, in the form users paste into bug reports."""
    asked = f" (asked for: {', '.join(setting.allowed)})" if setting.allowed else ""
    lines = [
        f"No available kernel. Aborting execution. No kernel can run this problem{asked}:",
        f"  {describe(problem)}",
    ]
    for candidate in candidates:
        lines.append(f"  {candidate.kernel.name}:")
        lines.extend(f"    - {reason}" for reason in candidate.reasons)
    return "\n".join(lines)


def disabled_sentence(setting: Setting, toggles: int) -> str:
    off = [family for family in FAMILIES if family not in enabled_families(toggles)]
    asked = ", ".join(setting.allowed) or "all kernels"
    switched = ", ".join(off) or "none"
    return f"Expected at least one enabled kernel, got {asked} allowed and torch's switches off for: {switched}."


def fell_to_math(choice: Choice, setting: Setting, toggles: int) -> None:
    """Strict mode refuses math unless nothing else was asked for; otherwise a large problem on an accelerator warns.

    It warns once, because choices are cached, and not where math was named among what is allowed.
    """
    problem = choice.problem
    families = {name if name in FAMILIES else by_name()[name].family for name in setting.allowed if name in KNOWN}
    if families == {"math"}:
        return
    if setting.strict:
        told = explanation_of(problem, setting, toggles)
        raise NoKernelError(f"strict mode: only math is able and allowed to run this problem:\n{told}")
    if "math" in families:
        return
    if problem.device_type != "cpu" and problem.B * problem.H * problem.M * problem.N >= LARGE_PROBLEM:
        told = explanation_of(problem, setting, toggles)
        warnings.warn(f"attention falls to {choice.kernel.name} on a large problem:\n{told}", stacklevel=2)


def explanation_of(problem: AttentionProblem, setting: Setting, toggles: int) -> str:
    """Each kernel with its reasons, or whether it is only not allowed."""
    lines = [f"  {describe(problem)}"]
    for candidate in consider(problem):
        able = "able" if allows(setting, toggles, candidate.kernel) else "able, but not allowed"
        lines.append(f"  {candidate.kernel.name}: {'; '.join(candidate.reasons) or able}")
    return "\n".join(lines)


def describe(problem: AttentionProblem) -> str:
    """One line: sizes, dtype, device, mask and features."""
    p = problem
    sizes = f"B={p.B} H={p.H} Hkv={p.Hkv} M={p.M} N={p.N} D={p.D} Dv={p.Dv}"
    extras = ", ".join(band_of(p) if name == "band" else name for name in sorted(p.features)) or "no mask"
    return f"{p.direction} {sizes} {str(p.dtype).removeprefix('torch.')} on {p.device}: {extras}"


def band_of(problem: AttentionProblem) -> str:
    """A causal mask or a window, as a user would write it."""
    left, right = (None if side == UNLIMITED else side for side in (problem.left, problem.right))
    return "causal" if (left, right) == (None, 0) else f"window=({left}, {right})"


def backward_setting(text: str) -> str:
    """A forward-only kernel asked for by name leaves the backward to whoever has one."""
    named = [by_name().get(name) for name in Setting.decode(text).allowed]
    if named and all(kernel is not None and "backward" not in kernel.directions for kernel in named):
        return ""
    return text


@lru_cache(maxsize=1024)
def weights_setting(text: str, device_type: str) -> str:
    """The same for the weights: a setting is left where no kernel that it names makes weights on the device, or where
    strict mode would leave none, because math is the only one that does."""
    setting = Setting.decode(text)
    makers = [kernel for kernel in kernels_for(device_type) if "weights" in kernel.directions]
    named = [k for k in makers if not setting.allowed or {k.name, k.family} & set(setting.allowed)]
    only_math = all(kernel.family == "math" for kernel in makers)
    return text if named and not (setting.strict and only_math) else ""


def recover(
    choice: Choice, error: Exception, *tensors: AttentionInputs | Results | Tensor
) -> Results | Gradients | Tensor:
    """What the next able choice makes of `tensors` after `choice` failed with `error`; called while handling it.

    Errors that are not the device's are raised as they are: those are faults, and hiding them would be worse. Where a
    tile was refused, the kernel's next one answers; else the next kernel, but none in place of one asked for by name.
    Out of memory falls only to kernels that do not write out the scores. Warns with the text; a launch that failed is
    not tried again.
    """
    exhausted: set[str] = set()  # kernels whose failure says nothing of the next call
    while True:
        kind = failure.kind_of(error)
        if kind is None:
            raise error
        told = failure.sentence(kind, choice.kernel.name, what_failed(choice, kind), error)
        if kind in failure.PASSING:
            exhausted.add(choice.kernel.name)
        else:
            failure.remember(kind, choice.kernel, choice.tile, choice.problem, error)
            forget_choices()
        heir = successor(choice, kind, exhausted)
        if heir is None:
            raise failure.as_error(kind, told) from error
        who = heir.kernel.name if heir.kernel is not choice.kernel else f"its {heir.tile}"
        warnings.warn(f"{told}; {who} answers instead", stacklevel=3)
        # The frames of the failed call hold its temporaries: the next one needs that memory.
        traceback.clear_frames(error.__traceback__)
        choice = LAST.choice = heir
        try:
            return heir.call(*tensors)
        except Exception as following:
            error = following


def what_failed(choice: Choice, kind: str) -> str:
    """The problem in a line, and the tile where it is to blame."""
    told = describe(choice.problem)
    return f"{told} with {choice.tile}" if kind == failure.TILE and choice.tile else told


def successor(choice: Choice, kind: str, exhausted: set[str]) -> Choice | None:
    """Who may answer in place of `choice`, or None: its kernel, if that has another tile, before all others."""
    setting, problem = Setting.decode(choice.setting), choice.problem
    toggles = toggles_for(problem.direction)
    candidates = [c for c in consider(problem) if allows(setting, toggles, c.kernel)]
    able = [c for c in candidates if c.able and c.kernel.name not in exhausted]
    own = [c for c in able if c.kernel is choice.kernel]
    if own:
        return Choice(choice.kernel, own[0].tile, problem, "in place of a tile that failed", choice.setting)
    if setting.forced:
        return None
    if kind == failure.MEMORY or setting.strict:
        able = [c for c in able if not c.kernel.materialises]
    if not able:
        return None
    best = min(able, key=ranking(able))
    return Choice(best.kernel, best.tile, problem, f"in place of {choice.kernel.name}, which failed", choice.setting)


# What `clear_caches` empties; holders of choices further up add themselves.
CACHES: list[Callable[[], None]] = [choose.cache_clear, tuning.read.cache_clear]


def clear_caches() -> None:
    """Forget choices, tables and failed launches, after a table was written or the number of threads changed."""
    failure.FAILED.clear()
    forget_choices()


def forget_choices() -> None:
    for clear in CACHES:
        clear()
