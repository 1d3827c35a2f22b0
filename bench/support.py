"""python -m sdpa.bench.support: what each kernel of the catalog takes, as docs/support.md.

Asked of the catalog by `Kernel.limits`, so that the page and the dispatcher cannot differ; no kernel runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from sdpa.dispatch import cards
from sdpa.dispatch.catalog import KERNELS, SERVED, kernels_for
from sdpa.dispatch.device import Device
from sdpa.dispatch.kernel import Kernel
from sdpa.problem import UNLIMITED, AttentionProblem

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"
LARGEST = 1024  # the largest head size that is asked
BOTH = ("forward", "backward")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A title, the device of torch, the architecture of a GPU of NVIDIA's.
DEVICES = (
    ("CPUs", "cpu", ""),
    ("NVIDIA Hopper (compute capability 9.0)", "cuda", "sm90"),
    ("NVIDIA Ampere, Ada and later (8.0 and above)", "cuda", "sm80"),
    ("Apple's GPUs", "mps", ""),
)
CAUSAL: dict[str, Any] = {"right": 0}
BIAS: dict[str, Any] = {"bias_matrices": 16}
FLOAT_BIAS: dict[str, Any] = {"dtype": torch.bfloat16, "bias_dtype": torch.float32}
# What a user asks for, in the words of the guides: features of sdpa.problem.FEATURES, and what else they change.
ROWS: tuple[tuple[str, frozenset[str], dict[str, Any]], ...] = tuple(
    (label, frozenset(features.split()), changes)
    for label, features, changes in (
        ("no mask", "", {}),
        ("`is_causal`, as many queries as keys", "band", CAUSAL),
        ("causal, aligned to the bottom right", "band bottom_right", {**CAUSAL, "M": 128, "bottom_right": True}),
        ("window", "band", {"left": 64, "right": 0}),
        ("lengths of keys", "k_lengths", {}),
        ("lengths of queries", "q_lengths", {}),
        ("segments", "segments", {}),
        ("packed documents (`varlen_attention`)", "packed", {}),
        ("prefix", "prefix band", CAUSAL),
        ("ALiBi", "alibi", {}),
        ("boolean mask (M, N)", "allowed", {}),
        ("boolean mask (1, N): padding", "allowed", {"row_mask": True}),
        ("bias (M, N)", "bias", BIAS),
        ("bias (M, N) in float32, queries in bfloat16", "bias", {**BIAS, **FLOAT_BIAS}),
        ("bias beside causal", "bias band", {**CAUSAL, **BIAS}),
        ("softcap", "softcap", {}),
        ("sinks", "sinks", {}),
        ("dropout", "dropout", {}),
        ("grouped heads (`enable_gqa`)", "gqa", {"Hkv": 2}),
        ("head sizes 192 of keys and 128 of values", "", {"D": 192, "Dv": 128}),
        ("the same bits in every run", "", {"deterministic": True}),
    )
)
# What one direction alone has.
ONE_WAY: tuple[tuple[str, str, frozenset[str], dict[str, Any]], ...] = (
    ("pages (`paged_attention`)", "forward", frozenset({"paged", "k_lengths"}), {"M": 1}),
    ("the log-sum-exp as a result", "forward", frozenset({"lse"}), {}),
    ("a gradient arriving at the log-sum-exp", "backward", frozenset({"lse_grad"}), {}),
    ("the gradient of a bias", "backward", frozenset({"bias", "bias_grad"}), BIAS),
    ("weights, averaged over heads", "weights", frozenset({"averaged"}), {}),
)
HEAD = """# Support matrix

What each kernel takes, asked of the catalog (`dispatch/catalog.py`) by `python -m sdpa.bench.support`. For a problem of
yours, `sdpa explain` says the same, with the reason of each refusal in a sentence.

- `yes`: forward and backward. `forward` or `backward`: that one alone. `-`: another kernel of the table answers.
- Each row is asked alone: 256 queries and keys, head size 64, float32 on CPUs and bfloat16 elsewhere. A combination may
  be refused where both of its parts are taken, as a bias beside causal is by torch's kernels.
- Below each table stands where a kernel answers otherwise in another of its dtypes.
- On CPUs packed documents reach a kernel as segments, and pages are gathered first.
- `math` takes everything, and writes out the scores.
"""

AMD = """## AMD's GPUs (CDNA2 and later, with ROCm)

Not measured, and not run. The catalog takes these GPUs for devices of the name `cuda`, as torch does:

- {able} take what the table of Ampere says. Tests compile them for gfx90a and gfx942.
- {refused} refuse them: they are made for NVIDIA's Hopper.
- The catalog has no rule of ROCm for {theirs}: the torch that runs says whether it has them.
- {any} take what they take elsewhere.
"""


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    return "\n".join([HEAD, *kernels(), *(section(*device) for device in DEVICES), amd()])


def kernels() -> Iterator[str]:
    """The catalog's own words."""
    yield "## The kernels\n"
    rows = ((f"`{one.name}`", one.family, ", ".join(one.devices) or "any", one.summary) for one in KERNELS)
    yield from table(["name", "family", "devices", "what it is"], rows)
    yield ""


def section(title: str, device: str, architecture: str) -> str:
    """The tables of a kind of device, whether this machine has one or not."""
    card = Device(device, title, (), 1, 1.0, 1.0, 1.0, 1.0, "nvidia", architecture)
    with cards.assumed(card) if architecture else nullcontext():
        here = [kernel for kernel in kernels_for(device) if able(kernel, plain(kernel, device))]
        columns = {kernel: answers(kernel, plain(kernel, device)) for kernel in here}
        others = [line for kernel, column in columns.items() for line in other_dtypes(kernel, device, column)]
    rows = [("dtypes", *map(dtypes, here))]
    rows += [(label, *(column[label] for column in columns.values())) for label in columns[here[0]]]
    told = ["Otherwise in another dtype:\n", *others] if others else ["Each kernel answers alike in all of its dtypes."]
    return "\n".join([f"## {title}\n", *table(["", *(f"`{kernel.name}`" for kernel in here)], rows), "", *told, ""])


def other_dtypes(kernel: Kernel, device: str, column: dict[str, str]) -> Iterator[str]:
    """What the kernel answers otherwise in a dtype that is not the column's."""
    usual = plain(kernel, device)
    for dtype in (one for one in DTYPES if one in kernel.dtypes and one != usual.dtype):
        found = answers(kernel, usual._replace(dtype=dtype))
        changed = [f"{label}: {cell}" for label, cell in found.items() if cell != column[label]]
        if changed:
            yield f"- `{kernel.name}`, {name_of(dtype)}: {'; '.join(changed)}"


def amd() -> str:
    """In words: nothing was measured there, and torch's own kernels have no rule of ROCm."""
    card = Device("cuda", "AMD", (), 1, 1.0, 1.0, 1.0, 1.0, "amd", "sm90")  # (9, 0) is what torch says of a gfx90a
    with cards.assumed(card), rocm():
        here = {kernel: able(kernel, plain(kernel, "cuda")) for kernel in kernels_for("cuda")}
    theirs = [kernel for kernel in here if kernel.devices and ".vendor." in kernel.module]
    ours = {kernel: can for kernel, can in here.items() if kernel.devices and kernel not in theirs}
    return AMD.format(
        able=listed(kernel for kernel, can in ours.items() if can),
        refused=listed(kernel for kernel, can in ours.items() if not can),
        theirs=listed(theirs),
        any=listed(kernel for kernel in here if not kernel.devices),
    )


@contextmanager
def rocm() -> Iterator[None]:
    """Inside of it the catalog's rules take torch for one that was built for ROCm."""
    before = torch.version.hip
    torch.version.hip = "assumed"
    try:
        yield
    finally:
        torch.version.hip = before


def listed(kernels: Iterable[Kernel]) -> str:
    *others, last = (f"`{kernel.name}`" for kernel in kernels)
    return f"{', '.join(others)} and {last}" if others else last


def table(head: list[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cells)} |"


def plain(kernel: Kernel, device: str) -> AttentionProblem:
    """A call of no feature, in the dtype that most use on such a device."""
    common = torch.float32 if device == "cpu" else torch.bfloat16
    dtype = common if common in kernel.dtypes else next(dtype for dtype in DTYPES if dtype in kernel.dtypes)
    return AttentionProblem(device, dtype, 2, 8, 8, 256, 256, 64, 64, UNLIMITED, UNLIMITED)


def able(kernel: Kernel, problem: AttentionProblem) -> bool:
    return not kernel.limits(problem)


def answers(kernel: Kernel, usual: AttentionProblem) -> dict[str, str]:
    """What the kernel says to each row, by its label; `usual` is a call of no feature."""
    told = {f"head sizes, {way}": span(sizes_of(kernel, usual._replace(direction=way))) for way in BOTH}
    told |= {label: both_ways(kernel, asked(usual, features, changes)) for label, features, changes in ROWS}
    for label, direction, features, changes in ONE_WAY:
        problem = asked(usual, features, changes)._replace(direction=direction)
        told[label] = "yes" if able(kernel, problem) else "-"
    return told


def asked(usual: AttentionProblem, features: frozenset[str], changes: dict[str, Any]) -> AttentionProblem:
    """A row's problem, in the form in which such a device's kernels take it (sdpa.sequences)."""
    if "packed" in features and usual.device not in SERVED["packed"]:
        features = features - {"packed"} | {"segments"}
    if "paged" in features and usual.device not in SERVED["paged"]:
        features = features - {"paged"}
    bias = {"bias_dtype": usual.dtype} if "bias" in features else {}
    return usual._replace(**{"features": features, **bias, **changes})


def both_ways(kernel: Kernel, problem: AttentionProblem) -> str:
    ways = [way for way in BOTH if able(kernel, problem._replace(direction=way))]
    return "yes" if len(ways) == 2 else "".join(ways) or "-"


def dtypes(kernel: Kernel) -> str:
    return ", ".join(name_of(dtype) for dtype in DTYPES if dtype in kernel.dtypes)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sizes_of(kernel: Kernel, usual: AttentionProblem) -> list[int]:
    return [D for D in range(1, LARGEST + 1) if able(kernel, usual._replace(D=D, Dv=D))]


def span(sizes: list[int]) -> str:
    """Head sizes in words."""
    if not sizes:
        return "-"
    steps = {after - before for before, after in pairwise(sizes)}
    if len(steps) != 1:
        return ", ".join(map(str, sizes))
    step, largest = steps.pop(), sizes[-1]
    kind = "any" if step == 1 else f"multiples of {step}"
    return kind if largest == LARGEST else f"{kind} to {largest}"


if __name__ == "__main__":
    main()
