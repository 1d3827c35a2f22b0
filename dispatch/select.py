"""The fastest kernel that is able and allowed, as a Choice cached by problem, setting and torch's switches."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sdpa.dispatch.caches import CACHES, LAST, clear_caches, forget_choices
from sdpa.dispatch.candidates import (
    Candidate,
    allows,
    candidate_of,
    consider,
    consider_allowed,
    ranking,
    tile_of,
    tiles_of,
    toggles_for,
)
from sdpa.dispatch.catalog import by_name, kernels_for
from sdpa.dispatch.choice import Choice
from sdpa.dispatch.context import Setting
from sdpa.dispatch.placing import told as copied
from sdpa.dispatch.recovery import recover
from sdpa.dispatch.refusal import NO_BACKEND, NoKernelError, describe, disabled_sentence, fell_to_math, refusal
from sdpa.problem import AttentionProblem

__all__ = [
    "CACHES",
    "LAST",
    "Candidate",
    "Choice",
    "NoKernelError",
    "allows",
    "backward_setting",
    "candidate_of",
    "choose",
    "clear_caches",
    "consider",
    "describe",
    "forget_choices",
    "last_choice",
    "recover",
    "select",
    "tile_of",
    "tiles_of",
    "toggles_for",
    "weights_setting",
]
CACHED_CHOICES = 4096


def select(problem: AttentionProblem, setting: str) -> Choice:
    """The choice for `problem` under `setting` (Setting.encode). Raises NoKernelError with all reasons."""
    choice = choose(problem, setting, toggles_for(problem.direction))
    LAST.choice = choice
    return choice


def last_choice() -> Choice | None:
    """The choice that the most recent call in this thread ran with."""
    return getattr(LAST, "choice", None)


@lru_cache(maxsize=CACHED_CHOICES)
def choose(problem: AttentionProblem, text: str, toggles: int) -> Choice:
    """As `select`, under torch's switches `toggles`."""
    setting = Setting.decode(text)
    candidates = consider_allowed(problem, setting, toggles)
    if not candidates and not setting.forced:
        raise NoKernelError(NO_BACKEND + disabled_sentence(setting, toggles))
    able = [candidate for candidate in candidates if candidate.able]
    if not able:
        raise NoKernelError(refusal(problem, setting, candidates))
    if setting.strict:  # math may be the fastest and still is refused
        able = [candidate for candidate in able if candidate.kernel.family != "math"] or able
    rank = ranking(able)
    best = by_preference(able, setting, rank) if setting.priority else min(able, key=rank)
    if best.kernel.family == "math":
        fell_to_math(best.kernel.name, problem, setting, toggles)
    return Choice(best.kernel, best.tile, problem, why(problem, best, able, setting), text, best.copies)


CACHES.append(choose.cache_clear)


def by_preference(able: list[Candidate], setting: Setting, rank: Callable[[Candidate], tuple[Any, ...]]) -> Candidate:
    def place(candidate: Candidate) -> tuple[int, tuple[Any, ...]]:
        kernel = candidate.kernel
        name = kernel.name if kernel.name in setting.allowed else kernel.family
        return setting.allowed.index(name) if name in setting.allowed else len(setting.allowed), rank(candidate)

    return min(able, key=place)


def why(problem: AttentionProblem, best: Candidate, able: list[Candidate], setting: Setting) -> str:
    if setting.forced:
        reason = "asked for by name"
    elif len(able) == 1:
        reason = "the only kernel that is able and allowed"
    elif setting.priority:
        reason = "first in the order given"
    else:
        first = min(able, key=ranking(able, by_time_alone=True))
        reason = f"fastest of {len(able)} able kernels, {best.source}"
        if first.kernel is not best.kernel:
            share = f"{best.time / first.time:.2f} times as long as {first.kernel.name}"
            reason = f"built already, {share}, which a first call compiles, {best.source}"
    return f"{reason}, {copied(problem, best.copies)}" if best.copies else reason


def backward_setting(text: str, problem: AttentionProblem) -> str:
    """The setting of a backward. It is free where `text` names kernels without any backward, or without this one though
    one of them has the forward."""
    setting = Setting.decode(text)
    named = [kernel for name in setting.allowed if (kernel := by_name().get(name)) is not None]
    if not named or len(named) < len(setting.allowed):  # families are no kernels' names
        return text

    def some_is_able(asked: AttentionProblem) -> bool:
        return any(candidate_of(kernel, asked, None).able for kernel in named)

    forward = problem._replace(direction="forward", features=problem.features - {"lse_grad", "bias_grad"} | {"lse"})
    if all("backward" not in kernel.directions for kernel in named) or (
        some_is_able(forward) and not some_is_able(problem)
    ):
        return Setting(toggles=setting.toggles, autotune=setting.autotune).encode()
    return text


@lru_cache(maxsize=1024)
def weights_setting(text: str, device_type: str) -> str:
    """The setting of weights. It is free where no kernel that it names computes weights on the device. It is also free
    where strict mode would leave none, because math alone computes them there."""
    setting = Setting.decode(text)._replace(toggles=None)
    makers = [kernel for kernel in kernels_for(device_type) if "weights" in kernel.directions]
    named = [k for k in makers if not setting.allowed or {k.name, k.family} & set(setting.allowed)]
    only_math = all(kernel.family == "math" for kernel in makers)
    return setting.encode() if named and not (setting.strict and only_math) else ""
