"""python -m sdpa.bench.front: README.md's speed table and its figure docs/pictures/speed.svg, of bench/results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sdpa.bench.contest import DEFAULT
from sdpa.bench.inserted import Inserted
from sdpa.bench.last_runs import DEVICES, last_of_suite, others_of
from sdpa.bench.pictures import FOLDER, OURS, ROOT, TORCH, Panel, bars_of, length_of, picture
from sdpa.bench.plots import Group
from sdpa.bench.problems import DTYPES
from sdpa.bench.record import Record, geomean

FIGURE = FOLDER / "speed.svg"


class Part(NamedTuple):
    """One direction of a suite on a device, by each problem's last run."""

    name: str
    suite: str
    direction: str = "forward"
    threads: str = ""

    def rows(self, column: str = "ratio") -> list[Record]:
        return last_of_suite(self.name, self.suite, self.direction, column, self.threads)

    def told(self, column: str) -> str:
        """The geometric mean of a column of ratios, and its worst."""
        ratios = [float(record[column]) for record in self.rows(column)]
        return f"{geomean(ratios):.2f} ({min(ratios):.2f})"


def on_a_cpu(name: str, threads: str) -> tuple[tuple[str, Part], ...]:
    return tuple((d, Part(name, f"cpu-{d}", d if d == "backward" else "forward", threads)) for d in KINDS)


H200, KINDS = "nvidia_h200", ("forward", "backward", "decode")
FORWARDS, BACKWARDS = Part(H200, "gpu-forward"), Part(H200, "gpu-backward", "backward")
ZEN5 = on_a_cpu("amd_zen5", "1 thread")
# What is told, of which rows: once beside torch's backends, once beside every peer of the run.
ROWS = (
    ("forward", FORWARDS),
    ("backward", BACKWARDS),
    ("masks, forward", Part(H200, "gpu-mask")),
    ("masks, backward", Part(H200, "gpu-mask", "backward")),
    ("decode", Part(H200, "gpu-decode")),
    ("dropout 0.1, forward", Part(H200, "gpu-dropout")),
    ("dropout 0.1, backward", Part(H200, "gpu-dropout", "backward")),
    *ZEN5,
    *on_a_cpu("amd_zen4", "1 thread"),
    *on_a_cpu("intel_sapphire_rapids", "16 threads"),
)
SHAPE = ",128 causal"  # of the problems in the figure
ALT = "TFLOP/s beside FlashAttention-4, cuDNN and torch"
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def main() -> None:
    SPEED.write()
    FIGURE.write_text(figure())


def table() -> str:
    lines = [
        f"![{ALT}](docs/pictures/speed.svg)\n",
        "How many times as fast, as a geometric mean over the problems of a suite, in brackets the worst of them. "
        "Of each\nproblem the last run counts:\n",
        "| | dtypes | beside torch | beside another peer, too |",
        "|---|---|---|---|",
        *(
            f"| {title(what, part)} | {dtypes_of(part)} | {part.told('torch_ratio')} | {beside(part)} |"
            for what, part in ROWS
        ),
    ]
    return "\n".join(lines) + "\n"


SPEED = Inserted(ROOT / "README.md", "speed", "sdpa.bench.front", table)


def title(what: str, part: Part) -> str:
    """With the kernel where all rows are of one that was asked for by name."""
    asked = {record["asked"] for record in part.rows()}
    by_name = f", by {asked.pop()}" if len(asked) == 1 and DEFAULT not in asked else ""
    kind = " CPU" if part.threads else ""
    return f"{', '.join(filter(None, [DEVICES[part.name] + kind, part.threads, what]))}{by_name}"


def dtypes_of(part: Part) -> str:
    found = {record["problem"].split()[0] for record in part.rows()}
    return ", ".join(SHORT[name] for name in DTYPES if name in found)


def beside(part: Part) -> str:
    """Of the faster of all peers of the run."""
    others = others_of(part.rows())
    return f"{', '.join(others)}: {part.told('ratio')}" if others else ""


def figure() -> str:
    """Three panels side by side under a legend."""
    panels = [
        *(Panel(f"{title(what, part)}, bf16, causal, D=128", "TFLOP/s", speeds(part)) for what, part in ROWS[:2]),
        Panel("on a Zen 5, one thread", "times torch's speed", list(of_the_cpu())),
    ]
    return picture(ALT, panels)


def speeds(part: Part) -> list[Group]:
    """TFLOP/s of each contestant, of the problems in the figure by their lengths."""
    shown = (record for record in part.rows() if SHAPE in record["problem"])
    return list(bars_of(shown, lambda record: f"N={length_of(record)}"))


def of_the_cpu() -> Iterator[Group]:
    for what, part in ZEN5:
        yield what, {OURS: geomean([float(record["torch_ratio"]) for record in part.rows("torch_ratio")]), TORCH: 1.0}


if __name__ == "__main__":
    main()
