"""python -m sdpa.bench.front: README.md's speed table and its figure docs/pictures/speed.svg, of bench/results."""

from __future__ import annotations

from collections.abc import Iterator

from sdpa.bench.inserted import Inserted
from sdpa.bench.pictures import FOLDER, OURS, ROOT, TORCH, Figures, Panel, bars_of, length_of, picture
from sdpa.bench.plots import Group
from sdpa.bench.record import geomean

FIGURE = FOLDER / "speed.svg"
H200, WITH_FA4, DROPOUT, ZEN5 = "nvidia_h200", "nvidia_h200_fa4", "nvidia_h200_dropout", "amd_zen5"

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
ALT = "TFLOP/s beside FlashAttention-4, cuDNN and torch"


def main() -> None:
    SPEED.write()
    FIGURE.write_text(figure())


def table() -> str:
    lines = [
        f"![{ALT}](docs/pictures/speed.svg)\n",
        "How many times as fast, as a geometric mean over the problems of a suite, in brackets the worst of them:\n",
        "| | beside torch's fused backends | beside another peer, too |",
        "|---|---|---|",
        *(f"| H200, {what} | {rows.told('torch_ratio')} | {beside(rows, peer)} |" for what, rows, peer in ROWS),
        *(f"| Zen 5, one thread, {what} | {rows.told('torch_ratio')} | |" for what, rows in CPU_ROWS),
    ]
    return "\n".join(lines) + "\n"


SPEED = Inserted(ROOT / "README.md", "speed", "sdpa.bench.front", table)


def beside(rows: Figures, peer: str) -> str:
    return f"{peer}: {rows.told('ratio')}" if peer else ""


def figure() -> str:
    """Three panels side by side under a legend."""
    panels = [
        Panel(FORWARD, "TFLOP/s", speeds(Figures(WITH_FA4, "gpu-forward"))),
        Panel(BACKWARD, "TFLOP/s", speeds(Figures(WITH_FA4, "gpu-backward", "backward", "cuda_flash"))),
        Panel("on a Zen 5, one thread", "times torch's speed", list(of_the_cpu())),
    ]
    return picture(ALT, panels)


def speeds(rows: Figures) -> list[Group]:
    """TFLOP/s of each contestant, of the problems in the figure by their lengths."""
    shown = (record for record in rows.records() if SHAPE in record["problem"])
    return list(bars_of(shown, lambda record: f"N={length_of(record)}"))


def of_the_cpu() -> Iterator[Group]:
    for what, rows in CPU_ROWS:
        yield what, {OURS: geomean([float(record["torch_ratio"]) for record in rows.records()]), TORCH: 1.0}


if __name__ == "__main__":
    main()
