"""sdpa explain: from the sizes alone, which kernel would run and why the others would not."""

from __future__ import annotations

from typing import Any

import click
import torch
from rich.markup import escape
from rich.table import Table

from sdpa.cli.common import DTYPES, as_json, console, device_option, duration, print_json
from sdpa.dispatch.catalog import KERNELS
from sdpa.dispatch.context import effective, request_text
from sdpa.dispatch.explain import Explanation, Row, explain_problem
from sdpa.dispatch.select import describe
from sdpa.mask import ALIGNMENTS
from sdpa.problem import UNLIMITED, AttentionProblem

# What a mask of each name asks for, in the words of sdpa.problem.FEATURES.
MASK_FEATURES = {
    "none": (),
    "causal": ("band",),
    "padding": ("allowed",),
    "allowed": ("allowed",),
    "bias": ("bias",),
    "lengths": ("k_lengths",),
    "both-lengths": ("k_lengths", "q_lengths"),
    "segments": ("segments",),
    "prefix": ("prefix",),
    "alibi": ("alibi",),
}
# Features that a diagonal's alignment matters to even where M == N.
LENGTHS = frozenset({"k_lengths", "q_lengths"})
COLOURS = {"chosen": "bold green", "able": "green", "refused": "red", "disabled": "yellow"}


class Sizes(click.ParamType):
    """Comma-separated integers, a fixed number of them."""

    name = "integers"

    def __init__(self, names: str, lowest: int, optional: bool = False) -> None:
        self.names, self.lowest, self.optional = names, lowest, optional

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")]
        wanted = len(self.names.split(","))
        try:
            sizes = tuple(None if self.optional and part in ("", "none") else int(part) for part in parts)
        except ValueError:
            sizes = ()
        if len(sizes) != wanted or any(size is not None and size < self.lowest for size in sizes):
            self.fail(f"expected {self.names} as {wanted} integers >= {self.lowest}, got {value!r}", param, ctx)
        return sizes


@click.command(short_help="Which kernel would run, and why not the others.")
@click.option("--shape", required=True, type=Sizes("B,H,M,N,D", 1), metavar="B,H,M,N,D")
@click.option("--dv", type=click.IntRange(1), help="Head size of the values, if not D.")
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads, if fewer than H.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--causal", is_flag=True, help="The same as --mask causal.")
@click.option(
    "--align", type=click.Choice(ALIGNMENTS), default=ALIGNMENTS[0], show_default=True, help="Of the diagonal."
)
@click.option("--window", type=Sizes("L,R", 0, optional=True), metavar="L,R", help="Keys seen on each side, or 'none'.")
@click.option("--mask", "masks", multiple=True, type=click.Choice(tuple(MASK_FEATURES)), help="Several combine.")
@click.option("--softcap", is_flag=True, help="With a softcap.")
@click.option("--sinks", is_flag=True, help="With attention sinks.")
@click.option("--dropout", is_flag=True, help="With dropout.")
@click.option("--backward", is_flag=True, help="The backward pass instead of the forward.")
@click.option("--weights", is_flag=True, help="The weights, averaged over heads, instead of the forward.")
@click.option("--training", is_flag=True, help="A forward that a backward follows.")
@click.option("--kernel", help="As kernel=: a kernel or family that must run.")
@device_option
@as_json
def explain(json_out: bool, kernel: str | None, **asked: Any) -> None:
    """Which kernel would run for a problem given by its sizes alone, its time and where that figure comes from, and why
    not each of the others. Sizes: B batch, H query heads, M queries, N keys, D head size.

    Exit code 1 when no kernel can. Example: sdpa explain --shape 1,32,1,4096,128 --kv-heads 8 --dtype bfloat16
    """
    try:
        setting = effective(request_text(kernel))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    explanation = answer(problem_of(**asked), setting)
    if json_out:
        print_json(explanation.as_dict())
    else:
        show(explanation)
    click.get_current_context().exit(0 if explanation.chosen else 1)


def problem_of(
    *,
    shape: tuple[int, int, int, int, int],
    dv: int | None,
    kv_heads: int | None,
    dtype: str,
    causal: bool,
    align: str,
    window: tuple[int | None, int | None] | None,
    masks: tuple[str, ...],
    softcap: bool,
    sinks: bool,
    dropout: bool,
    backward: bool,
    weights: bool,
    training: bool,
    device: str,
) -> AttentionProblem:
    """What is asked, without a tensor."""
    B, H, M, N, D = shape
    if backward and weights:
        raise click.UsageError("expected --backward or --weights, got both")
    Hkv = kv_heads or H
    if H % Hkv:
        raise click.UsageError(f"expected --kv-heads to divide the {H} heads, got {Hkv}")
    try:
        torch.device(device)
    except RuntimeError:
        raise click.UsageError(f"expected a device such as cpu or cuda:0, got {device!r}") from None
    left, right = (UNLIMITED if side is None else side for side in window or (None, None))
    right = 0 if causal or "causal" in masks or (right == UNLIMITED and "prefix" in masks) else right
    present = {
        "band": (left, right) != (UNLIMITED, UNLIMITED),
        "softcap": softcap,
        "sinks": sinks,
        "dropout": dropout,
        "gqa": Hkv != H,
        "lse": training and not (backward or weights),
        "averaged": weights,
    }
    features = {name for name, on in present.items() if on}.union(*(MASK_FEATURES[mask] for mask in masks))
    aligned = bool(features & {"band", "alibi"}) and (M != N or bool(features & LENGTHS))
    corner = aligned and align == "bottom_right"
    return AttentionProblem(
        device, getattr(torch, dtype), B, H, Hkv, M, N, D, dv or D, left, right, corner,
        frozenset(features | {"bottom_right"} if corner else features),
        bias_dtype=getattr(torch, dtype) if "bias" in features else None,
        direction="backward" if backward else "weights" if weights else "forward",
        row_mask="padding" in masks and "bias" not in masks,
        full_bias="bias" in features,
    )  # fmt: skip


def answer(problem: AttentionProblem, setting: str) -> Explanation:
    """The dispatcher's explanation, or where the device is not there each kernel's reasons beside that one."""
    absent = absence(problem.device)
    if absent is None:
        return explain_problem(problem, setting)
    rows = []
    for kernel in KERNELS:
        reasons = [reason for reason in kernel.why_not(problem) if not reason.startswith(absent)]
        reasons += [absent] if kernel.serves(problem.device_type) else []
        rows.append(Row(kernel.name, "refused", tuple(reasons), None, ""))
    return Explanation(problem, tuple(rows), None, absent)


def absence(device: str) -> str | None:
    """Why this machine has no such device, or None."""
    if device == "cpu":
        return None
    if device.startswith("cuda") and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def show(explanation: Explanation) -> None:
    out = console()
    out.print(describe(explanation.problem), style="bold")
    out.print(escape(f"chosen: {explanation.chosen or 'none'} ({explanation.reason})"))
    table = Table("kernel", "status", "time", "source or reasons")
    table.columns[2].justify = "right"
    for row in explanation.rows:
        time = "" if row.seconds is None else duration(row.seconds)
        table.add_row(
            row.kernel, f"[{COLOURS[row.status]}]{row.status}", time, escape("; ".join(row.reasons) or row.source)
        )
    out.print(table)
