"""python -m sdpa.bench.guide_tables: the tables of docs/guide that bench/results makes, of what is slower and of the
examples."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from sdpa.bench.examples import EXAMPLES
from sdpa.bench.inserted import Inserted
from sdpa.bench.last_runs import OF_SMALL_CALLS, last_rows
from sdpa.bench.pictures import PEERS, RESULTS, ROOT
from sdpa.bench.race import direction_of
from sdpa.bench.race_pages import PAGES
from sdpa.bench.record import Record

GUIDE, MODULE = ROOT / "docs" / "guide", "sdpa.bench.guide_tables"
NOTED = 0.97  # of the best peer's speed: what is between it and 1 is as much as runs differ by
TIMED_ON = "amd_zen4_examples.json"


class Kind(NamedTuple):
    """What rows that are told of together have in common."""

    device: str
    direction: str
    mask: str
    peer: str


def slower() -> str:
    """The kinds of problems below `NOTED`, the slowest first."""
    found: dict[Kind, list[Record]] = {}
    for name in PAGES:
        for device, row in last_rows(name):
            if float(row["ratio"]) < NOTED:
                mask = row["problem"].split()[2].rstrip("0123456789").replace("none", "no mask")
                peer = PEERS.get(row["best_peer"], row["best_peer"])
                found.setdefault(Kind(device, manner_of(row), mask, peer), []).append(row)
    lines = sorted((worst(rows), kind, rows) for kind, rows in found.items())
    about = f"These had less than {NOTED} of the speed of the best other library, by the last run of each problem"
    head = "| device | direction | mask | head sizes | faster there | problems | our share of its speed |"
    return "\n".join(
        [f"{about}:\n", head, "|---|---|---|---|---|---|---|", *(line(kind, rows) for _, kind, rows in lines), ""]
    )


def manner_of(row: Record) -> str:
    """The direction; of a small call also what is special about it, which costs on the way to the kernel."""
    if row["suite"] not in OF_SMALL_CALLS:
        return direction_of(row["problem"])
    return f"small call: {row['problem'].rsplit(' ', 1)[-1]}"


def worst(rows: Iterable[Record]) -> float:
    return min(float(row["ratio"]) for row in rows)


def line(kind: Kind, rows: list[Record]) -> str:
    sizes = sorted({row["problem"].split()[1].split(",")[-1] for row in rows}, key=lambda size: int(size.split("/")[0]))
    shares = sorted({f"{float(row['ratio']):.3f}" for row in rows})
    share = shares[0] if len(shares) == 1 else f"{shares[0]} to {shares[-1]}"
    cells = [kind.device, kind.direction, kind.mask, ", ".join(sizes), kind.peer, str(len(rows)), share]
    return f"| {' | '.join(cells)} |"


def examples() -> str:
    told = json.loads((RESULTS / TIMED_ON).read_text())
    threads, torch = told["threads"], told["versions"]["torch"]
    where = f"{told['description']} (`{told['device']}`), {threads} thread{'s' * (threads != 1)}, torch {torch}"
    lines = [
        f"On an {where}, {told['date'][:10]}, by `{told['command']}`:\n",
        "| task | command | times the plain way's speed, in each run | what it says |",
        "|---|---|---|---|",
        *(example_row(task, [r for r in told["rows"] if r["example"] == file]) for file, (task, _) in EXAMPLES.items()),
    ]
    return "\n".join(lines) + "\n"


def example_row(task: str, rows: list[dict[str, Any]]) -> str:
    """Of both ways' rows, in every run: the ratios of the second way, and what the last run printed beside them."""
    last = rows[-1]
    command = " ".join(["python", f"examples/{last['example']}", *last["arguments"]])
    ratios = ", ".join(f"{row['ratio']:.2f}" for row in rows if row["way"] == last["way"])
    said = "; ".join(part.rstrip(":") for part in last["told"] if not part.startswith("swapped"))
    return f"| {task} | `{command}` | {ratios} | {said} |"


TABLES = (
    Inserted(GUIDE / "speed.md", "slower", MODULE, slower),
    Inserted(GUIDE / "showcases.md", "examples", MODULE, examples),
)


def main() -> None:
    for table in TABLES:
        table.write()


if __name__ == "__main__":
    main()
