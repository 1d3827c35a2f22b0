"""sdpa check: every kernel this machine has against the float64 reference, with a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sdpa.cli.cases import cases
from sdpa.cli.common import (
    as_json,
    console,
    counted,
    device_option,
    print_json,
    require_device,
    require_kernels,
    seed_option,
)
from sdpa.dispatch.catalog import by_name, kernels_for
from sdpa.testing import Case, able, check_kernel

FAILURES_SHOWN = 20
# Cases with fewer scores per head run on one thread: on a busy machine waking the others takes a hundred times longer.
THREADED_SCORES = 1 << 16


@dataclass
class Verdict:
    """What became of one kernel: cases it took, cases it refuses by its limits, the worst of its errors, failures."""

    kernel: str
    unavailable: str | None = None
    cases: int = 0
    refused: int = 0
    worst: float = 0.0  # of error / budget
    worst_case: str = ""
    failures: list[dict[str, Any]] = field(default_factory=list)

    def judge(self, case: Case, seed: int) -> None:
        """Run one case and remember the outcome; an exception is a failure like any other."""
        if able(self.kernel, case):
            self.refused += 1
            return
        self.cases += 1
        try:
            found = check_kernel(self.kernel, case, seed)
        except Exception as error:
            told = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            self.failures.append({"case": str(case), "seed": seed, "what": told})
            return
        wrong = [str(comparison) for comparison in found if not comparison.ok]
        if wrong:
            self.failures.append({"case": str(case), "seed": seed, "what": "; ".join(wrong)})
        ratio = max(share(c.error, c.budget) for c in found)
        if ratio > self.worst:
            self.worst, self.worst_case = ratio, str(case)


def share(error: float, budget: float) -> float:
    """The part of its budget an error takes."""
    if error == 0.0:
        return 0.0
    return error / budget if budget > 0 else float("inf")


def run_check(
    names: Iterable[str], chosen: Iterable[Case], seed: int, step: Callable[[], object] = lambda: None
) -> list[Verdict]:
    """One verdict per kernel; `step` is called after every case."""
    verdicts = [Verdict(name, by_name()[name].unavailable()) for name in names]
    threads = torch.get_num_threads()
    try:
        for case in chosen:
            torch.set_num_threads(threads if case.M * case.N >= THREADED_SCORES else 1)
            for verdict in verdicts:
                if verdict.unavailable is None:
                    verdict.judge(case, seed)
            step()
    finally:
        torch.set_num_threads(threads)
    return verdicts


def chosen_cases(device: str, quick: bool, only: str = "") -> list[Case]:
    """The grid without repeats, or its cases whose names contain `only`."""
    return [case for case in dict.fromkeys(cases(device, quick)) if only in str(case)]


def summary(verdicts: Iterable[Verdict]) -> str:
    verdicts = list(verdicts)
    total, failed = sum(v.cases for v in verdicts), sum(len(v.failures) for v in verdicts)
    return f"check: {total} cases, {failed} failed"


@click.command(short_help="Every kernel against the float64 reference.")
@click.option("--quick", is_flag=True, help="A few hundred cases in seconds.")
@click.option("--kernel", "kernels", multiple=True, help="Only this one; may be given several times.")
@click.option("--only", default="", metavar="TEXT", help="Only cases whose names contain TEXT: re-runs a failure.")
@seed_option
@device_option
@as_json
def check(quick: bool, kernels: tuple[str, ...], only: str, seed: int, device: str, json_out: bool) -> None:
    """Runs every kernel this machine has, forward and backward, against the float64 reference over masks, dtypes,
    layouts and sizes. An error may be twice that of the same attention done by torch operations in the same precision,
    plus a rounding. Exit code 1 when a case fails or nothing was checked."""
    require_device(device)
    names = require_kernels(kernels) or tuple(kernel.name for kernel in kernels_for(device.partition(":")[0]))
    chosen = chosen_cases(device, quick, only)
    if not chosen:
        raise click.UsageError(f"no case's name contains {only!r}")
    with counted("checking", len(chosen), json_out) as step:
        verdicts = run_check(names, chosen, seed, step)
    if json_out:
        print_json(
            {"device": device, "seed": seed, "summary": summary(verdicts), "kernels": [vars(v) for v in verdicts]}
        )
    else:
        show(verdicts, console())
    good = any(v.cases for v in verdicts) and not any(v.failures for v in verdicts)
    click.get_current_context().exit(0 if good else 1)


def show(verdicts: list[Verdict], out: Console) -> None:
    table = Table("kernel", "verdict", "cases", "refused", "worst error / budget", "in case")
    for column in table.columns[2:5]:
        column.justify = "right"
    for v in verdicts:
        if v.unavailable is not None:
            table.add_row(v.kernel, "[yellow]not here", "", "", "", escape(v.unavailable))
            continue
        verdict = f"[red]{len(v.failures)} failed" if v.failures else "[green]ok" if v.cases else "[yellow]no case"
        table.add_row(v.kernel, verdict, str(v.cases), str(v.refused), f"{v.worst:.2f}", escape(v.worst_case))
    out.print(table)
    for v in verdicts:
        for failure in v.failures[:FAILURES_SHOWN]:
            case, again = failure["case"], f"--kernel {v.kernel} --only {failure['case']} --seed {failure['seed']}"
            out.print(f"[red]failed[/] {v.kernel} {case}: {escape(failure['what'])}", soft_wrap=True)
            out.print(f"       again: sdpa check {again}", soft_wrap=True)
        if len(v.failures) > FAILURES_SHOWN:
            out.print(f"[red]{v.kernel}: {len(v.failures) - FAILURES_SHOWN} more failures, listed by --json")
    out.print(summary(verdicts))
