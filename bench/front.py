"""python -m sdpa.bench.front: README.md's speed table and its figure docs/pictures/speed.svg, of bench/results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sdpa.bench.plots import Group
from sdpa.bench.race import direction_of
from sdpa.bench.race_chart import chart
from sdpa.bench.record import Record, geomean, read

ROOT = Path(__file__).resolve().parent.parent
RESULTS, README, FIGURE = ROOT / "bench" / "results", ROOT / "README.md", ROOT / "docs" / "pictures" / "speed.svg"
BEGIN, END = "<!-- begin speed: python -m sdpa.bench.front -->\n", "<!-- end speed -->"
OURS, FA4, CUDNN, FA2, TORCH = "sdpa", "FlashAttention-4", "cuDNN", "torch's FlashAttention-2", "torch's default"
COLOURS = {OURS: "#2563eb", FA4: "#d97706", CUDNN: "#059669", FA2: "#94a3b8", TORCH: "#94a3b8"}
PEERS = {"fa4": FA4, "cudnn": CUDNN, "flash": FA2}
KINDS = {name: number for number, name in enumerate(COLOURS)}
H200, WITH_FA4, DROPOUT, ZEN5 = "nvidia_h200", "nvidia_h200_fa4", "nvidia_h200_dropout", "amd_zen5"
PANEL, LAST, TITLE, LEGEND, BARS = 414, 280, 26, 22, 178  # pixels: widths of panels; heights of what is above bars


@dataclass(frozen=True)
class Figures:
    """Rows of one CSV: a suite, by the default choice or a kernel asked for."""

    file: str
    suite: str
    direction: str = "forward"
    asked: str = "default"

    def records(self) -> list[Record]:
        wanted = (self.suite, self.direction, self.asked)
        every = ((r, (r["suite"], direction_of(r["problem"]), r["asked"])) for r in records_of(self.file))
        return [record for record, told in every if told == wanted]

    def told(self, column: str) -> str:
        """The geometric mean of a column of ratios, and its worst."""
        ratios = [float(record[column]) for record in self.records() if record[column]]
        return f"{geomean(ratios):.2f} ({min(ratios):.2f})"


# What is told, of which rows: once beside torch's backends, once beside every peer of the run.
ROWS = (
    ("forward", Figures(WITH_FA4, "gpu-forward"), "FlashAttention-4"),
    ("backward, by `cuda_flash`", Figures(WITH_FA4, "gpu-backward", "backward", "cuda_flash"), "FlashAttention-4"),
    ("masks and biases, forward", Figures(H200, "gpu-mask"), "FlexAttention"),
    ("masks and biases, backward", Figures(H200, "gpu-mask", "backward"), "FlexAttention"),
    ("decode", Figures(H200, "gpu-decode"), "FlexAttention"),
    ("dropout 0.1, forward", Figures(DROPOUT, "gpu-dropout"), ""),
    ("dropout 0.1, backward", Figures(DROPOUT, "gpu-dropout", "backward"), ""),
)
CPU_ROWS = (
    ("forward", Figures(ZEN5, "cpu-forward")),
    ("backward", Figures(ZEN5, "cpu-backward", "backward")),
    ("decode", Figures(ZEN5, "cpu-decode")),
)
FORWARD = "forward on an H200, bf16, causal, D=128"
BACKWARD = "backward on an H200, bf16, causal, D=128"
SHAPE = ",128 causal"  # of the problems in the figure


def main() -> None:
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
    FIGURE.write_text(figure())


@cache
def records_of(file: str) -> list[Record]:
    return read(RESULTS / f"{file}.csv")[1]


def table() -> str:
    lines = [
        "![TFLOP/s beside FlashAttention-4, cuDNN and torch](docs/pictures/speed.svg)\n",
        "How many times as fast, as a geometric mean over the problems of a suite, in brackets the worst of them:\n",
        "| | beside torch's fused backends | beside another peer, too |",
        "|---|---|---|",
        *(f"| H200, {what} | {rows.told('torch_ratio')} | {beside(rows, peer)} |" for what, rows, peer in ROWS),
        *(f"| Zen 5, one thread, {what} | {rows.told('torch_ratio')} | |" for what, rows in CPU_ROWS),
    ]
    return "\n".join(lines) + "\n"


def beside(rows: Figures, peer: str) -> str:
    return f"{peer}: {rows.told('ratio')}" if peer else ""


def figure() -> str:
    """Three panels side by side under a legend."""
    panels = [
        (FORWARD, "TFLOP/s", list(speeds(Figures(WITH_FA4, "gpu-forward").records()))),
        (BACKWARD, "TFLOP/s", list(speeds(Figures(WITH_FA4, "gpu-backward", "backward", "cuda_flash").records()))),
        ("on a Zen 5, one thread", "times torch's speed", list(of_the_cpu())),
    ]
    drawn = []
    for place, (title, unit, groups) in enumerate(panels):
        x, y = PANEL * place, LEGEND
        drawn.append(f'<text class="title" x="{x + 8}" y="{y + 16}">{title}: {unit}</text>')
        drawn.append(chart(title, unit, groups, KINDS).replace("<svg ", f'<svg x="{x}" y="{y + TITLE}" ', 1))
    width, height = PANEL * (len(panels) - 1) + LAST, LEGEND + TITLE + BARS
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}">',
            f"<style>{style()}</style>",
            *legend(),
            *drawn,
            "</svg>\n",
        ]
    )


def speeds(records: Iterable[Record]) -> Iterator[Group]:
    """TFLOP/s of each contestant, of the problems in the figure by their lengths."""
    for record in records:
        shape = record["problem"].split()[1]
        if SHAPE not in record["problem"]:
            continue
        own, ms = float(record["tflops_or_gbs"]), float(record["ms"])
        times = dict(pair.split(":") for pair in record["peers"].split(";"))
        bars = {PEERS[name]: own * ms / float(time) for name, time in times.items() if name in PEERS}
        yield f"N={shape.split(',')[2]}", {OURS: own} | bars


def of_the_cpu() -> Iterator[Group]:
    for what, rows in CPU_ROWS:
        yield what, {OURS: geomean([float(record["torch_ratio"]) for record in rows.records()]), TORCH: 1.0}


def legend() -> Iterator[str]:
    x = 8
    for name, number in KINDS.items():
        yield f'<rect class="k{number}" x="{x}" y="6" width="10" height="10"/>'
        yield f'<text class="title" x="{x + 14}" y="15">{name}</text>'
        x += 34 + 7 * len(name)


def style() -> str:
    bars = "".join(f".k{number}{{fill:{COLOURS[name]}}}" for name, number in KINDS.items())
    return (
        "text{font:11px system-ui,sans-serif;fill:#475569;text-anchor:middle}.ticks text{text-anchor:end}"
        f".title{{font-size:12px;text-anchor:start}}.grid{{stroke:#94a3b8;stroke-opacity:.35;fill:none}}{bars}"
        "@media(prefers-color-scheme:dark){text{fill:#cbd5e1}}"
    )


if __name__ == "__main__":
    main()
