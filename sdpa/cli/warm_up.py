"""sdpa warm-up: compiles what calls of given sizes need, before a program makes them."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

import click
import torch
from rich.markup import escape
from rich.table import Table

from sdpa.bench.calls import our_call
from sdpa.bench.problems import MASKS, Problem
from sdpa.bench.warm_up import warm_up as warm
from sdpa.bench.workload import make_workload
from sdpa.cli.asked import Sizes
from sdpa.cli.common import DTYPES, as_json, compiling_kernels, console, duration, print_json, require_device
from sdpa.dispatch.select import NoKernelError

NOTHING = "nothing to compile on {}: its kernels were built with the library; sdpa explain says which one answers"


@click.command("warm-up", short_help="Compiles ahead what calls of given sizes need.")
@click.option("--shape", "shapes", required=True, multiple=True, type=Sizes("B,H,M,N,D", 1), metavar="B,H,M,N,D")
@click.option("--dv", type=click.IntRange(1), help="Head size of the values, if not D.")
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads, if fewer than H.")
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option("--mask", "masks", multiple=True, type=click.Choice(MASKS), default=("none",), show_default=True)
@click.option("--training", is_flag=True, help="The backward, too.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda, cuda:N or mps. A GPU where there is one.")
@click.option("--jobs", type=click.IntRange(1), help="Processes that compile at once, on a GPU.")
@as_json
def warm_up(shapes: tuple[tuple[int, ...], ...], masks: tuple[str, ...], json_out: bool, **options: Any) -> None:
    """Runs each call once, so that what its kernel has to compile lies in Triton's cache on disk (TRITON_CACHE_DIR),
    where later processes find it. Prints which kernel answers and how long the first run took. --shape and --mask
    repeat: every shape is run with every mask. On a CPU nothing is run: its kernels are compiled when the library is
    built.

    What sdpa.warm_up(model, batch) does for a whole model. Example:

    sdpa warm-up --shape 8,16,2048,2048,128 --mask causal --training
    """
    device = require_device(options["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    common = {"dtype": options["dtype"], "grad": options["training"], "device": device}
    common |= {"Hkv": options["kv_heads"] or 0, "Dv": options["dv"] or 0}
    problems = [problem_of(shape, mask, common) for shape, mask in product(shapes, masks)]
    if not compiling_kernels(device):
        click.echo(NOTHING.format(device), err=json_out)
        if json_out:
            print_json([])
        return

    def every_call() -> list[Any]:
        return [our_call(make_workload(problem))() for problem in problems]

    try:
        warmed = warm(every_call, jobs=options["jobs"])
    except (NoKernelError, RuntimeError) as error:
        raise click.ClickException(str(error)) from None
    if json_out:
        print_json([asdict(one) for one in warmed])
        return
    table = Table("problem", "kernel", "first run")
    table.columns[2].justify = "right"
    for one in warmed:
        table.add_row(escape(one.problem), one.kernel, duration(one.seconds))
    console().print(table)


def problem_of(shape: tuple[int, ...], mask: str, common: dict[str, Any]) -> Problem:
    """Raises UsageError in one sentence."""
    B, H, M, N, D = shape
    if H % (common["Hkv"] or H):
        raise click.UsageError(f"expected --kv-heads to divide the {H} heads, got {common['Hkv']}")
    if mask == "segments" and M != N:
        raise click.UsageError(f"--mask segments needs as many queries as keys, got M={M} and N={N}")
    return Problem(B, H, M, N, D, mask=mask, **common)
