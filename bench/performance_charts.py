"""The charts of docs/performance.md: of each device's page which rows of bench/results they show."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sdpa.bench.contest import DEFAULT
from sdpa.bench.pictures import OURS, TORCH, Figures, Panel, bars_of, length_of
from sdpa.bench.record import Record

LABEL = 10  # letters of a line below a group of bars
SIZES = 3  # words of a model's batch and length: "4 x 4096"


class Chart(NamedTuple):
    """One panel, which fits a phone; `shape` is a regular expression of the problems in it, by their labels."""

    name: str
    title: str
    rows: Figures
    shape: str
    place: Callable[[Record], str] = length_of

    def panel(self) -> Panel:
        shown = [record for record in self.rows.records() if re.match(self.shape, record["problem"])]
        (unit,) = {record["unit"] for record in shown}
        return Panel(self.title, unit, list(bars_of(sorted(shown, key=longer), self.place)))


def longer(record: Record) -> int:
    return int(length_of(record))


def mask_of(record: Record) -> str:
    """Packed documents are called in another way than the same segments in a batch."""
    _, _, mask, manner = record["problem"].split()
    return "packed" if "varlen" in manner else mask.rstrip("0123456789")


def causal(dtype: str, D: int) -> str:
    """As many heads of keys as of queries, as many keys as queries."""
    return rf"{dtype} \d+,\d+,\d+,{D} causal "


def on_a_gpu(file: str, direction: str, asked: str, D: int) -> Chart:
    rows, by_name = Figures(file, f"gpu-{direction}", direction, asked), f" by {asked}" * (asked != DEFAULT)
    return Chart(f"{direction}_{D}", f"{direction}{by_name}, bf16, causal, D={D}", rows, causal("bfloat16", D))


def on_a_cpu(file: str, direction: str, dtype: str) -> Chart:
    rows, title = Figures(file, f"cpu-{direction}", direction), f"{direction}, {dtype}, causal, D=128"
    return Chart(f"{direction}_{dtype}", title, rows, causal(dtype, 128))


H200, H100 = "nvidia_h200", "nvidia_h100_fa4"
CPUS = ("amd_zen5", "amd_zen4", "intel_sapphire_rapids")
CPU_KINDS = (("forward", "float32"), ("forward", "bfloat16"), ("backward", "float32"))
LONG = r"bfloat16 \d+,16,\d+,128 "  # rows of suite gpu-mask
# By the pages of bench/race_pages.py. The run on an H100 asked for cuda_flash by name.
CHARTS: dict[str, tuple[Chart, ...]] = {
    "nvidia_h200": (
        *(on_a_gpu(H200, "forward", DEFAULT, D) for D in (64, 128)),
        *(on_a_gpu(H200, "backward", DEFAULT, D) for D in (64, 128)),
        Chart("mask_forward", "masks, forward, bf16, D=128", Figures(H200, "gpu-mask"), LONG, mask_of),
        Chart("mask_backward", "masks, backward, bf16, D=128", Figures(H200, "gpu-mask", "backward"), LONG, mask_of),
    ),
    "nvidia_h100": (on_a_gpu(H100, "backward", "cuda_flash", 128),),
    **{cpu: tuple(on_a_cpu(cpu, *kind) for kind in CPU_KINDS) for cpu in CPUS},
}


def of_training(ratios: Mapping[str, float]) -> Panel:
    """How many times as fast as torch whole models are; those that train are shown."""
    shown = {model: ratio for model, ratio in ratios.items() if "training" in model}
    groups = [(label_of(model), {OURS: ratio, TORCH: 1.0}) for model, ratio in shown.items()]
    return Panel("training steps of models", "times torch's speed", groups)


def label_of(model: str) -> str:
    """ "GPT", "4 x 4096" and "compiled" of "GPT training 4 x 4096, 12 x 768 bfloat16 compiled"."""
    name, _, rest = model.replace(",", "").partition(" training ")
    sizes = rest.split()
    return "\n".join([*textwrap.wrap(name, LABEL), " ".join(sizes[:SIZES]), *(w for w in sizes if w == "compiled")])
