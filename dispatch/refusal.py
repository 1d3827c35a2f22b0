"""The messages where no kernel may run, or only math: NoKernelError, all reasons, and a problem in the user's terms."""

from __future__ import annotations

import warnings

from sdpa.dispatch.candidates import Candidate, allows, consider
from sdpa.dispatch.catalog import KERNELS, by_name
from sdpa.dispatch.context import Setting, enabled_families
from sdpa.dispatch.kernel import FAMILIES
from sdpa.problem import UNLIMITED, AttentionProblem

# Scores of a problem (B * H * M * N) above which falling to math on an accelerator is worth a warning.
LARGE_PROBLEM = 1 << 24
KNOWN = frozenset(FAMILIES) | frozenset(by_name())


# torch's words, which programs may match, before ours.
NO_KERNEL = "No available kernel. Aborting execution. "
NO_BACKEND = (
    "No viable backend for scaled_dot_product_attention was found. This is likely due to turning off both the math "
    "kernel and the fused kernels. "
)


class NoKernelError(RuntimeError):
    """No kernel is both able and allowed; the message gives every reason."""


def refusal(problem: AttentionProblem, setting: Setting, candidates: list[Candidate]) -> str:
    """All reasons of all allowed kernels, in the form users paste into bug reports, and who takes the problem."""
    asked = f" (asked for: {', '.join(setting.allowed)})" if setting.allowed else ""
    lines = [
        f"{NO_KERNEL}No kernel can run this problem{asked}:",
        f"  {describe(problem)}",
    ]
    for candidate in candidates:
        lines.append(f"  {candidate.kernel.name}:")
        lines.extend(f"    - {reason}" for reason in candidate.reasons)
    refused = {candidate.kernel.name for candidate in candidates}
    # By their limits alone: whether they are available would import their modules.
    others = [kernel.name for kernel in KERNELS if kernel.name not in refused and not kernel.limits(problem)]
    if others:
        lines.append(f"  Others take it: {', '.join(others)}. Ask for one of these, or leave the choice open.")
    return "\n".join(lines)


def reason_of(error: NoKernelError) -> str:
    """The first line of a refusal without torch's words, for an explanation whose rows have the rest."""
    return str(error).splitlines()[0].removeprefix(NO_KERNEL).removeprefix(NO_BACKEND).rstrip(":")


def disabled_sentence(setting: Setting, toggles: int) -> str:
    off = [family for family in FAMILIES if family not in enabled_families(setting.switches(toggles))]
    asked = ", ".join(setting.allowed) or "all kernels"
    switched = ", ".join(off) or "none"
    return f"Expected at least one enabled kernel, got {asked} allowed and torch's switches off for: {switched}."


def fell_to_math(kernel: str, problem: AttentionProblem, setting: Setting, toggles: int) -> None:
    """Strict mode refuses math, unless only math was asked for. Otherwise a large problem on an accelerator warns.

    It warns once, because choices are cached, and not where math is named among the allowed kernels.
    """
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
        warnings.warn(f"attention falls to {kernel} on a large problem:\n{told}", stacklevel=2)


def explanation_of(problem: AttentionProblem, setting: Setting, toggles: int) -> str:
    """Each kernel with its reasons, or that it is able, or able but not allowed."""
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
