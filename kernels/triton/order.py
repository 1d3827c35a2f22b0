"""The order of the launches of a pass, which may overlap on devices with programmatic dependent launch (PDL).

Launches come in groups. Those of one group read nothing of one another. The first of each group waits, at its
beginning, for the launch before it. It lets the next one begin only then, so that all of its group find complete what
the groups before wrote. The others do not wait to begin: they end after the launch before them, which keeps it true
that a launch is complete where its successor is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdpa.kernels.triton.launch import Launch
from sdpa.kernels.triton.target import Target

# What a kernel's last argument says.
ALONE = tl.constexpr(0)  # no other launch overlaps with it
AFTER = tl.constexpr(1)  # it begins its work when the launch before it is complete
BESIDE = tl.constexpr(2)  # it ends when the launch before it is complete


@triton.jit
def begin_in_order(ORDER: tl.constexpr):
    """To be called before what another launch of the pass wrote is read, and before what one touches is written."""
    if ORDER == AFTER:
        gdc_wait()
    if ORDER != ALONE:
        gdc_launch_dependents()


@triton.jit
def end_in_order(ORDER: tl.constexpr):
    """To be called wherever a program ends. A grid is complete only when all its programs are: let one wait."""
    if ORDER == BESIDE:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            gdc_wait()


def in_order(target: Target, *groups: list[Launch]) -> list[Launch]:
    """All launches, of kernels whose last argument is ALONE. On a device with PDL they get the order of their groups.

    A launch without programs does not count: nothing runs in its place.
    """
    launches = [launch for group in groups for launch in group]
    if not target.has_pdl or sum(bool(launch.grid[0]) for launch in launches) < 2:
        return launches
    ordered, follows = [], False
    for group in groups:
        order = AFTER
        for launch in group:
            ordered.append(launch._replace(args=(*launch.args[:-1], order.value), pdl=follows))
            if launch.grid[0]:
                order, follows = BESIDE, True
    return ordered
