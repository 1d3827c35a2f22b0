"""Recovery where a selected kernel cannot be started: its next tile, or the next able kernel, always with a warning."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from sdpa.dispatch import failure
from sdpa.dispatch.caches import LAST, forget_choices
from sdpa.dispatch.candidates import Candidate, consider, consider_allowed, ranking, toggles_for
from sdpa.dispatch.context import Setting
from sdpa.dispatch.refusal import describe
from sdpa.problem import AttentionInputs, Gradients, Results

if TYPE_CHECKING:
    from sdpa.dispatch.choice import Choice


def recover(
    choice: Choice, error: Exception, *tensors: AttentionInputs | Results | Tensor
) -> Results | Gradients | Tensor:
    """The results of the next able choice for `tensors`, after `choice` failed with `error`.

    Errors that are not a device's refusal are raised as they are: they are bugs. Where a tile was refused, the kernel's
    next tile runs, else the next kernel; a kernel asked for by name has no successor. Out of memory goes only to
    kernels that do not write out the scores. A warning names the failure, and a launch that failed is not tried again.
    """
    exhausted: set[str] = set()  # kernels whose failure may not come again at the next call
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
            lean = [c.kernel.name for c in needing_less(choice, exhausted)] if kind == failure.MEMORY else []
            less = f"; {' and '.join(lean)} would need less beside the results" if lean else ""
            raise failure.as_error(kind, told + less) from error
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
    """The problem in one line, with the tile where it is the cause."""
    told = describe(choice.problem)
    return f"{told} with {choice.tile}" if kind == failure.TILE and choice.tile else told


def successor(choice: Choice, kind: str, exhausted: set[str]) -> Choice | None:
    """The choice that may run in place of `choice`, or None. Another tile of its kernel comes before all other
    kernels."""
    setting, problem = Setting.decode(choice.setting), choice.problem
    toggles = toggles_for(problem.direction)
    candidates = consider_allowed(problem, setting, toggles)
    able = [c for c in candidates if c.able and c.kernel.name not in exhausted]
    own = [c for c in able if c.kernel is choice.kernel]
    if own:
        return in_place_of(choice, own[0], "in place of a tile that failed")
    if setting.forced:
        return None
    if kind == failure.MEMORY or setting.strict:
        able = [c for c in able if not c.kernel.materialises]
    if not able:
        return None
    best = min(able, key=ranking(able))
    return in_place_of(choice, best, f"in place of {choice.kernel.name}, which failed")


def needing_less(choice: Choice, exhausted: set[str]) -> list[Candidate]:
    """The able kernels that need less memory than that of `choice` and did not run out of it, the fastest first; also
    those that the setting leaves out."""
    problem = choice.problem
    needed = choice.kernel.extra_bytes(problem)
    lean = [c for c in consider(problem) if c.able and c.kernel.extra_bytes(problem) < needed]
    able = [c for c in lean if c.kernel.name not in exhausted]
    return sorted(able, key=ranking(able))


def in_place_of(choice: Choice, heir: Candidate, reason: str) -> Choice:
    return replace(choice, kernel=heir.kernel, tile=heir.tile, reason=reason, copies=heir.copies)
