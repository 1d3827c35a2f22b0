"""Can and should: for every kernel its reasons or its time for a problem, and the order of those that are able."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sdpa.dispatch import cost, failure, tuning
from sdpa.dispatch.catalog import KERNELS, by_name
from sdpa.dispatch.context import ALL_TOGGLES, Setting, enabled_families, torch_toggles
from sdpa.dispatch.kernel import ROWS, Kernel
from sdpa.problem import AttentionProblem, Tile


@dataclass(frozen=True)
class Candidate:
    """One kernel for a problem: the reasons why it cannot run, or the time that it should take."""

    kernel: Kernel
    reasons: tuple[str, ...]
    seconds: float | None
    source: str  # where `seconds` comes from
    tile: Tile | None = None
    measured: bool = False
    copies: tuple[str, ...] = ()  # the tensors (of sdpa.problem.PLACED) that it would be given copies of
    handicap: float = 1.0  # by which its time is multiplied in the order of candidates (tuning.prefer_built)

    @property
    def able(self) -> bool:
        return not self.reasons

    @property
    def time(self) -> float:
        """`seconds` of a kernel that is able."""
        assert self.seconds is not None
        return self.seconds


def consider(problem: AttentionProblem, kernels: Iterable[Kernel] | None = None) -> list[Candidate]:
    """Each of `kernels` (all of the catalog) with its reasons, or its time where it is able. Modules of no others are
    imported."""
    table = tuning.measured(problem)
    return [candidate_of(kernel, problem, table) for kernel in (KERNELS if kernels is None else kernels)]


def consider_allowed(problem: AttentionProblem, setting: Setting, toggles: int) -> list[Candidate]:
    """The same of the kernels that setting and switches allow."""
    return consider(problem, [kernel for kernel in KERNELS if allows(setting, toggles, kernel)])


def consider_elsewhere(problem: AttentionProblem) -> list[Candidate]:
    """The same for a device that this machine has not, where nobody has tensors: what is missing here is no reason."""
    table = tuning.measured(problem)
    return [timed(kernel, problem, table, tuple(kernel.limits(problem))) for kernel in KERNELS]


def candidate_of(kernel: Kernel, problem: AttentionProblem, table: tuning.Measurement | None) -> Candidate:
    """The faster of reading unaligned tensors where they lie and reading copies; copies alone where a kernel needs
    them."""
    direct = weigh(kernel, problem, table)
    if not problem.unaligned:
        return direct
    if direct.able:
        direct = replace(direct, seconds=direct.time * cost.slowing(kernel, problem))
    moved = on_copies(kernel, problem, table)
    if moved is None or not moved.able:
        return direct
    return moved if not direct.able or moved.time < direct.time else direct


def on_copies(kernel: Kernel, problem: AttentionProblem, table: tuning.Measurement | None) -> Candidate | None:
    """The candidate with copies of the tensors that the kernel reads by vectors. None where none is needed, and for
    pages, which belong to many sequences."""
    names = tuple(name for name, _ in problem.unaligned if name in kernel.aligned)
    if not kernel.alignment or not names or ("paged" in problem.features and ROWS & set(names)):
        return None
    moved = weigh(kernel, problem.placed(names), table)
    return replace(moved, seconds=moved.time + cost.copying(problem, names), copies=names) if moved.able else moved


def weigh(kernel: Kernel, problem: AttentionProblem, table: tuning.Measurement | None) -> Candidate:
    """The candidate of a kernel that reads all tensors where they lie."""
    return timed(kernel, problem, table, tuple(kernel.why_not(problem)))


def timed(
    kernel: Kernel, problem: AttentionProblem, table: tuning.Measurement | None, reasons: tuple[str, ...]
) -> Candidate:
    """The candidate with these reasons, or where it has none with the time that it should take."""
    if reasons:
        return Candidate(kernel, reasons, None, "")
    tile = tile_of(kernel, problem, table.tile.get(kernel.name) if table else None)
    reasons = failure.reasons(kernel, tile, problem)
    if reasons:
        return Candidate(kernel, reasons, None, "")
    slower = cost.ordering(kernel, problem)  # tables are measured without torch.use_deterministic_algorithms
    handicap = tuning.prefer_built(problem) if kernel.compiles else 1.0
    if table is not None and kernel.name in table.seconds:
        seconds = table.seconds[kernel.name] * slower
        return Candidate(kernel, (), seconds, table.source, tile, measured=True, handicap=handicap)
    return Candidate(kernel, (), cost.estimate(kernel, problem, tile) * slower, "estimated", tile, handicap=handicap)


def tiles_of(kernel: Kernel, problem: AttentionProblem) -> tuple[Tile, ...]:
    """The tiles that a kernel offers for a problem, the best guess first; none where its module does not import, as
    Triton's on a machine without it that is asked about another."""
    try:
        module = kernel.load()
    except ImportError:
        return ()
    offered = getattr(module, "tiles", None)
    return tuple(offered(problem) if offered else getattr(module, "TILES", ()))


def tile_of(kernel: Kernel, problem: AttentionProblem, measured: Tile | None = None) -> Tile | None:
    """The measured tile, if the kernel still offers it (as the object it offers), else the kernel's first. Tiles that
    the device refused before are left out, unless it refused all."""
    every = tiles_of(kernel, problem)
    offered = [tile for tile in every if not failure.reasons(kernel, tile, problem)] or every
    if measured is not None and measured in offered:
        return offered[offered.index(measured)]
    return offered[0] if offered else None


def ranking(able: list[Candidate], by_time_alone: bool = False) -> Callable[[Candidate], tuple[bool, float]]:
    """The order of candidates: by time, and unless that is to count alone by their handicap, those without a measured
    time after those with one.

    An estimate tends to be lower than a measurement. Where a measured bucket is near, a kernel that it lacks could not
    run or is newer than the table. Only where nothing but kernels that write out the scores was measured may an
    estimate come first.
    """
    decided = any(c.measured and not c.kernel.materialises for c in able)
    return lambda c: (decided and not c.measured, c.time if by_time_alone else c.time * c.handicap)


def allows(setting: Setting, toggles: int, kernel: Kernel) -> bool:
    """Whether our setting names the kernel or its family, and torch's switches leave the family on.

    A kernel asked for by its own name is not subject to torch's switches, because the setting is more specific.
    """
    if kernel.name in setting.allowed:
        return True
    if setting.forced and setting.allowed[0] in by_name():
        return False  # "math" names a family and a kernel: kernel= means the kernel
    if setting.allowed and kernel.family not in setting.allowed:
        return False
    return kernel.family in enabled_families(setting.switches(toggles))


def toggles_for(direction: str) -> int:
    """torch's switches. They do not apply to weights, which torch's modules compute whatever is switched off."""
    return ALL_TOGGLES if direction == "weights" else torch_toggles()
