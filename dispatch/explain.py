"""The selection as data and as text: each kernel is chosen, able, refused or disabled, with its reasons and its
time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from sdpa.dispatch.candidates import Candidate, allows, consider, consider_elsewhere, ranking, toggles_for
from sdpa.dispatch.context import Setting
from sdpa.dispatch.device import device_of
from sdpa.dispatch.placing import told as copied
from sdpa.dispatch.refusal import NoKernelError, describe, reason_of
from sdpa.dispatch.select import by_preference, choose, why
from sdpa.problem import AttentionProblem

STATUSES = ("chosen", "able", "refused", "disabled")


@dataclass(frozen=True)
class Row:
    kernel: str
    status: str  # of STATUSES
    reasons: tuple[str, ...]
    seconds: float | None
    source: str
    tile: tuple[int, ...] | None = None  # BLOCK_M, BLOCK_N, warps, stages
    copies: str = ""  # which tensors would be copied first, as a clause
    varies: bool = False  # whether the bits of its results may vary from call to call


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns; prints as a table, `as_dict()` for machines."""

    problem: AttentionProblem
    rows: tuple[Row, ...]
    chosen: str | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        problem = self.problem._asdict() | {
            "dtype": str(self.problem.dtype).removeprefix("torch."),
            "features": sorted(self.problem.features),
            "bias_dtype": str(self.problem.bias_dtype) if self.problem.bias_dtype else None,
        }
        rows = [asdict(row) | {"reasons": list(row.reasons)} for row in self.rows]
        return {"problem": problem, "chosen": self.chosen, "reason": self.reason, "kernels": rows}

    def __str__(self) -> str:
        width = max(len(row.kernel) for row in self.rows)
        lines = [describe(self.problem), f"chosen: {self.chosen or 'none'} ({self.reason})"]
        for row in self.rows:
            time = f"{row.seconds * 1e3:9.3f} ms" if row.seconds is not None else " " * 12
            note = "; ".join(row.reasons) or with_tile(row)
            lines.append(f"  {row.kernel:<{width}}  {row.status:<8}  {time}  {note}")
        return "\n".join(lines)


def with_tile(row: Row) -> str:
    """The source of the time, the tile where a kernel has several, the copies it includes, and whether bits vary."""
    tile = [str(size) for size in row.tile or () if size]
    note = f"{row.source}, tile {' x '.join(tile[:2])}{warps_of(tile)}" if tile else row.source
    return ", ".join(filter(None, (note, row.copies, "bits vary" if row.varies else "")))


def warps_of(tile: list[str]) -> str:
    return f", {tile[2]} warps, {tile[3]} stages" if len(tile) > 3 else ""


def explain_problem(problem: AttentionProblem, setting: str = "") -> Explanation:
    """Explain the selection for a problem that needs no tensors."""
    toggles = toggles_for(problem.direction)
    try:
        choice = choose(problem, setting, toggles)
        chosen, reason = choice.kernel.name, choice.reason
    except NoKernelError as error:
        chosen, reason = None, reason_of(error)
    rows = tuple(row_of(c, problem, chosen, setting, toggles) for c in consider(problem))
    return Explanation(problem, rows, chosen, reason)


def explain_elsewhere(
    problem: AttentionProblem, setting: str, which: str, figures: str = "public figures"
) -> Explanation:
    """The same for a device that this machine has not and whose facts are known all the same: by an estimate, or by a
    table that was measured elsewhere. `which` is a clause about the device, `figures` what an estimate is made of."""
    toggles, asked = toggles_for(problem.direction), Setting.decode(setting)
    candidates = consider_elsewhere(problem)
    able = [c for c in candidates if c.able and allows(asked, toggles, c.kernel)]
    device = f"{device_of(problem.device).description}, {which}"
    if able:
        rank = ranking(able)
        best = by_preference(able, asked, rank) if asked.priority else min(able, key=rank)
        source = best.source if best.measured else f"{best.source} from {figures}"
        best = replace(best, source=f"{source} for {device}")
        chosen, reason = best.kernel.name, why(problem, best, able, asked)
        if best.source not in reason:
            reason = f"{reason}; {best.source}"
    else:
        chosen, reason = None, f"no kernel is able and allowed on {device}"
    rows = tuple(row_of(c, problem, chosen, setting, toggles) for c in candidates)
    return Explanation(problem, rows, chosen, reason)


def row_of(candidate: Candidate, problem: AttentionProblem, chosen: str | None, setting: str, toggles: int) -> Row:
    name = candidate.kernel.name
    if name == chosen:
        status = "chosen"
    elif candidate.reasons:
        status = "refused"
    else:
        status = "able" if allows(Setting.decode(setting), toggles, candidate.kernel) else "disabled"
    tile = None if candidate.tile is None else tuple(candidate.tile)
    copies = copied(problem, candidate.copies) if candidate.copies else ""
    varies = candidate.able and candidate.kernel.varies(problem)
    return Row(name, status, candidate.reasons, candidate.seconds, candidate.source, tile, copies, varies)
