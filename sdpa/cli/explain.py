"""sdpa explain: from the sizes alone, which kernel would run and why the others would not."""

from __future__ import annotations

from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from sdpa.cli.asked import MASK_FEATURES, Asked, Number, Sizes, problem_of
from sdpa.cli.common import DTYPES, absence, as_json, console, device_option, duration, print_json
from sdpa.dispatch import apple, cards
from sdpa.dispatch.catalog import KERNELS
from sdpa.dispatch.context import effective, request_text
from sdpa.dispatch.device import DEFAULT_SHARED_MEMORY, Device, compute_capability
from sdpa.dispatch.explain import Explanation, Row, explain_elsewhere, explain_problem
from sdpa.dispatch.select import backward_setting, describe, weights_setting
from sdpa.kernels.triton import target
from sdpa.mask import ALIGNMENTS
from sdpa.problem import AttentionProblem

CAP, CHANCE = Number("a finite number >= 0", 0.0), Number("a number from 0 to 1", 0.0, 1.0)
# Bytes of shared memory that one program may have, by architecture (NVIDIA's table of specifications).
SHARED_MEMORY = {"sm80": 163 << 10, "sm90": 227 << 10, "sm100": 227 << 10}
COLOURS = {"chosen": "bold green", "able": "green", "refused": "red", "disabled": "yellow"}


class OptionalNumber(click.Option):
    """A number that may be left out behind the option's name."""


class WithOptionalNumbers(click.Command):
    """What is behind such an option and reads as a number is its number: click takes -1 for an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        taking = {name for one in self.params if isinstance(one, OptionalNumber) for name in one.opts}
        read: list[str] = []
        for word in args:
            name, equals, number = word.partition("=")
            if name in taking and equals:
                read += [name, f" {number}"]
            # Behind a space it begins as no option does, and is the same number.
            else:
                read.append(f" {word}" if read and read[-1] in taking and is_negative(word) else word)
        return super().parse_args(ctx, read)


def is_negative(word: str) -> bool:
    if not word.startswith("-"):
        return False
    try:
        float(word)
    except ValueError:
        return False
    return True


@click.command(cls=WithOptionalNumbers, short_help="Which kernel would run, and why not the others.")
@click.option("--shape", required=True, type=Sizes("B,H,M,N,D", 1), metavar="B,H,M,N,D")
@click.option("--dv", type=click.IntRange(1), help="Head size of the values, if not D.")
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads, if fewer than H.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--causal", is_flag=True, help="The same as --mask causal.")
@click.option(
    "--align", type=click.Choice(ALIGNMENTS), default=ALIGNMENTS[0], show_default=True, help="Of the diagonal."
)
@click.option(
    "--window", type=Sizes("L,R", 0, optional=True), metavar="L,R",
    help="Keys seen on each side, each an integer or 'none' for all, as 128,0 or 3,none.",
)  # fmt: skip
@click.option("--mask", "masks", multiple=True, type=click.Choice(tuple(MASK_FEATURES)), help="Several combine.")
@click.option("--learned-bias", is_flag=True, help="The backward gives a gradient to the bias of --mask bias.")
@click.option("--scale", type=Number("a finite number"), help="Factor of the scores, 1 / sqrt(D) if not given.")
@click.option(
    "--softcap", cls=OptionalNumber, type=CAP, default=0.0, is_flag=False, flag_value=30.0,
    help="A softcap; 30 where no number follows.",
)  # fmt: skip
@click.option("--sinks", is_flag=True, help="With attention sinks.")
@click.option(
    "--dropout", cls=OptionalNumber, type=CHANCE, default=0.0, is_flag=False, flag_value=0.1,
    help="Its probability; 0.1 if none follows.",
)  # fmt: skip
@click.option("--return-lse", is_flag=True, help="A forward that also returns the log-sum-exp.")
@click.option("--packed", is_flag=True, help="varlen_attention of B documents, of M queries and N keys at most.")
@click.option("--paged", is_flag=True, help="paged_attention, N keys of each sequence in pages.")
@click.option("--backward", is_flag=True, help="The backward pass instead of the forward.")
@click.option("--weights", is_flag=True, help="The weights, averaged over heads, instead of the forward.")
@click.option("--training", is_flag=True, help="A forward that a backward follows.")
@click.option("--kernel", help="As kernel=: a kernel or family that must run.")
@device_option
@as_json
def explain(json_out: bool, kernel: str | None, **asked: Any) -> None:
    """Which kernel would run for a problem given by its sizes alone, its time and where that figure comes from, and why
    not each of the others. Sizes: B batch, H query heads, M queries, N keys, D head size.

    Of one of Apple's GPUs the answer is an estimate where this machine has none: --device mps assumes a chip,
    --device "mps:M4 Max" names one. --device cuda:H200 asks about a card that a tuning table tells of, on any machine.

    Exit code 1 when no kernel can. Example: sdpa explain --shape 1,32,1,4096,128 --kv-heads 8 --dtype bfloat16
    """
    try:
        setting = effective(request_text(kernel))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    explanation = answer(problem_of(Asked(**asked)), setting)
    if json_out:
        print_json(explanation.as_dict())
    else:
        show(explanation)
    click.get_current_context().exit(0 if explanation.chosen else 1)


def answer(problem: AttentionProblem, setting: str) -> Explanation:
    """The dispatcher's explanation. Where the device is not there, of one of Apple's GPUs an estimate, and of any other
    each kernel's reasons beside that one."""
    if problem.direction == "backward":
        setting = backward_setting(setting, problem)
    elif problem.direction == "weights":
        setting = weights_setting(setting, problem.device_type)
    if problem.device_type == "mps":
        which = apple.why_estimated(problem.device)
        return explain_problem(problem, setting) if which is None else explain_elsewhere(problem, setting, which)
    if cards.is_named(problem.device):
        card = cards.card_named(problem.device)
        with cards.assumed(card), target.assume(target_of(card)):
            return explain_elsewhere(problem._replace(device="cuda"), setting, "which was named", "what it reports")
    absent = absence(problem.device)
    if absent is None:
        return explain_problem(problem, setting)
    rows, told = [], absent.partition(":")[0]
    for kernel in KERNELS:
        reasons = [reason for reason in kernel.why_not(problem) if not reason.startswith(told)]
        reasons += [absent] if kernel.serves(problem.device_type) else []
        rows.append(Row(kernel.name, "refused", tuple(reasons), None, ""))
    known = f". Of a card that was measured: --device cuda:NAME, of {', '.join(cards.cards())}"
    return Explanation(problem, tuple(rows), None, absent + (known if problem.device_type == "cuda" else ""))


def target_of(card: Device) -> target.Target:
    """What kernels in Triton choose their tiles for."""
    major, minor = compute_capability(card.architecture)
    shared = SHARED_MEMORY.get(card.architecture, DEFAULT_SHARED_MEMORY)
    return target.Target("cuda", 10 * major + minor, shared, card.cores, target.DEFAULT_L2, card.bandwidth)


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
