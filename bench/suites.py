"""The named suites: lists of problems as data, for CPUs, for GPUs, and for those of Apple's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from sdpa.bench.problems import DIRECTIONS, DTYPES, MODULES, VIT, Problem, square

# The papers' grid: every cell has so many tokens and so many features, so that a GPU is full and cells compare.
TOKENS = 16384
WIDTH = 2048
GPU_HEAD_SIZES = (64, 128, 256)
GPU_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HALF: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda"}
GPU_WINDOW = 1024
MPS_WIDTH = 1024  # features of a cell, so that the longest takes the smallest GPU a tenth of a second


def cpu_forward() -> tuple[Problem, ...]:
    lengths = (64, 128, 256, 512, 1024, 2048, 4096)
    grid = product(DTYPES, (64, 128), lengths, ("none", "causal"))
    cells = [square(length, D, dtype=dtype, mask=mask) for dtype, D, length, mask in grid]
    for dtype in DTYPES:
        cells += [
            square(512, 128, dtype=dtype, mask="causal", Hkv=2),
            square(1024, 64, dtype=dtype, mask="none", Hkv=1),
            square(1024, 64, dtype=dtype, mask="padding"),
            Problem(4, 8, 256, 256, 64, dtype=dtype, mask="lengths"),
            Problem(**VIT, dtype=dtype, layout="bmhd"),
        ]
    cells += [square(length, 64, dtype=d, mask="window") for d in ("float32", "bfloat16") for length in (1024, 4096)]
    cells += [square(512, 64, dtype=d, mask="bias") for d in ("float32", "bfloat16")]
    return tuple(cells)


def cpu_backward() -> tuple[Problem, ...]:
    grid = product(("float32", "bfloat16"), (64, 128), (128, 256, 512, 1024), ("none", "causal"))
    cells = [square(length, D, dtype=dtype, mask=mask, direction="backward") for dtype, D, length, mask in grid]
    for dtype in ("float32", "bfloat16"):
        cells += [
            square(512, 64, dtype=dtype, mask="causal", Hkv=2, direction="backward"),
            square(512, 64, dtype=dtype, mask="padding", direction="backward"),
            Problem(**VIT, dtype=dtype, layout="bmhd", direction="backward"),
        ]
    # torch's float16 backward takes ten times its float32 one: two cells show it, more would only take time.
    cells += [square(length, 64, dtype="float16", mask="causal", direction="backward") for length in (256, 512)]
    return tuple(cells)


def cpu_decode() -> tuple[Problem, ...]:
    grid = product(("bfloat16", "float32"), (32, 8), (1024, 4096, 16384))
    return tuple(Problem(1, 32, 1, N, 128, dtype=dtype, Hkv=Hkv) for dtype, Hkv, N in grid)


def overhead() -> tuple[Problem, ...]:
    """Calls so small that only the way to the kernel costs: plain ones, and one of each that asks more.

    What torch does not have stands beside torch's closest call, and its row says so. torch has nothing close to a
    softcap: that row tells our time alone, and no geomean counts it.
    """
    small: dict[str, Any] = {"B": 1, "H": 4, "M": 16, "N": 16, "D": 64}
    asked = ("dropout", "softcap", "return_lse", "parameter", "autocast", "kernel", *MODULES)
    return (
        Problem(**small),
        Problem(**small, grad=True),
        Problem(**small, direction="backward"),
        Problem(**small, mask="causal"),
        Problem(**small, dtype="bfloat16"),
        Problem(**small, mask="padding"),
        Problem(**small, layout="bmhd"),
        Problem(**small, Hkv=2),
        Problem(1, 1, 1, 1, 64),
        Problem(1, 4, 1, 16, 64),
        Problem(2, 8, 32, 32, 32, grad=True),
        Problem(**small, mask="allowed"),
        Problem(**small, mask="lengths"),
        *(Problem(**small, call=call) for call in asked),
        Problem(**small, call="module", grad=True),
        Problem(**small, call="varlen", mask="segments"),
    )


def gpu_square(D: int, N: int, mask: str, direction: str = "forward") -> Problem:
    return Problem(TOKENS // N, WIDTH // D, N, N, D, mask=mask, direction=direction, **HALF)


def papers_grid(direction: str) -> tuple[Problem, ...]:
    grid = product(GPU_HEAD_SIZES, ("none", "causal"), GPU_LENGTHS)
    return tuple(gpu_square(D, N, mask, direction) for D, mask, N in grid)


def gpu_gqa() -> tuple[Problem, ...]:
    """Query heads that share key/value heads, as in models of 7, 8 and 70 billion parameters, and keys wider than
    values, as in multi-head latent attention (DeepSeek-V2)."""
    cells = [
        Problem(TOKENS // N, H, N, N, 128, mask=mask, Hkv=8, **HALF)
        for H, N, mask in product((32, 64), (2048, 8192), ("none", "causal"))
    ]
    backward = [replace(cell, direction="backward") for cell in cells if cell.mask == "causal" and cell.H == 32]
    training: dict[str, Any] = {"D": 128, "mask": "causal", "direction": "backward", **HALF}
    backward.append(Problem(2, 64, 8192, 8192, Hkv=8, **training))
    # Lengths that are no multiple of a tile, as texts have.
    backward += [Problem(4, H, N, N, Hkv=Hkv, **training) for (H, Hkv), N in product(((32, 8), (28, 4)), (2000, 3333))]
    latent = [Problem(4, 16, 4096, 4096, 192, Dv=128, mask="causal", direction=d, **HALF) for d in DIRECTIONS]
    return (*cells, *backward, *latent)


def gpu_decode() -> tuple[Problem, ...]:
    """One new token, and four that are checked at once in speculative decoding."""
    shared = [(1, 8192, 1), (1, 131072, 1), (16, 8192, 1), (64, 4096, 1), (1, 8192, 4), (16, 8192, 4)]
    return (*(Problem(B, 32, M, N, 128, Hkv=8, **HALF) for B, N, M in shared), Problem(1, 32, 1, 1024, 128, **HALF))


def gpu_mask() -> tuple[Problem, ...]:
    short: dict[str, Any] = {"B": 8, "H": 32, "M": 2048, "N": 2048, "D": 64, **HALF}
    long: dict[str, Any] = {"B": 2, "H": 16, "M": 8192, "N": 8192, "D": 128, "window": GPU_WINDOW, **HALF}
    return (
        Problem(**short, mask="bias"),
        Problem(**short, mask="bias_grad", direction="backward"),
        *(Problem(**short, mask=m, direction=d) for d, m in product(DIRECTIONS, ("lengths", "padding"))),
        *(Problem(**long, mask=m, direction=d) for d, m in product(DIRECTIONS, ("window", "alibi", "segments"))),
        Problem(**long, mask="allowed"),
        *(Problem(1, 16, TOKENS, TOKENS, 128, mask="segments", call="varlen", direction=d, **HALF) for d in DIRECTIONS),
    )


def gpu_dropout() -> tuple[Problem, ...]:
    """Training with dropout, as GPT-2 and BERT were trained."""
    grid = product(DIRECTIONS, (64, 128), ("none", "causal"), (512, 1024, 2048, 4096))
    return tuple(replace(gpu_square(D, N, mask, direction), call="dropout") for direction, D, mask, N in grid)


def gpu_bias() -> tuple[Problem, ...]:
    """A bias that many batch entries share: windows of 7 x 7 and 8 x 8 patches (Swin), pairs of residues."""
    sizes = [(2048, 49), (2048, 64), (256, 256), (170, 384), (128, 512), (64, 1024)]
    kinds = (("bias", "forward"), ("bias", "backward"), ("bias_grad", "backward"))
    return tuple(
        Problem(B, 4, N, N, 32, mask=mask, direction=direction, layout="bmhd", **HALF)
        for (mask, direction), (B, N) in product(kinds, sizes)
    )


def gpu_cross() -> tuple[Problem, ...]:
    """The cross attention of diffusion models: few keys, which are a text's tokens (Stable Diffusion, PixArt, SD3)."""
    sizes = [(8, 8, 4096, 77, 40), (8, 8, 1024, 77, 80), (2, 10, 4096, 77, 64), (16, 20, 1024, 77, 64)]
    sizes += [(8, 8, 256, 77, 160), (4, 16, 4096, 120, 72), (2, 24, 4096, 226, 64)]
    return tuple(Problem(*size, direction=d, layout="bmhd", **HALF) for d, size in product(DIRECTIONS, sizes))


def gpu_fp32() -> tuple[Problem, ...]:
    """float32 as accurate as float32 is, and with products rounded to TF32."""
    grid = product(("highest", "high"), DIRECTIONS, ("none", "causal"))
    return tuple(
        Problem(8, 16, 2048, 2048, 64, mask=mask, direction=direction, precision=precision, device="cuda")
        for precision, direction, mask in grid
    )


def gpu_overhead() -> tuple[Problem, ...]:
    """The small problems, and in half precision those that fused kernels are asked for most."""
    cells = list(overhead())
    cells += [replace(cells[0], dtype="bfloat16", grad=True), replace(cells[0], dtype="bfloat16", direction="backward")]
    # torch's varlen_attn takes no float32.
    cells += [replace(cells[0], dtype="bfloat16", call="varlen", mask="segments")]
    return tuple(replace(cell, device="cuda", host=True) for cell in cells)


def gpu_small_training() -> tuple[Problem, ...]:
    """Training steps, forward and backward, that the host takes longer for than the device: few heads of short rows, as
    in small images, windows, short texts and tabular data."""
    kinds = [(4, 3, 197, 16, "none"), (1, 8, 128, 64, "none"), (2, 12, 64, 64, "none"), (4, 16, 256, 64, "none")]
    kinds += [(1, 16, 100, 80, "none"), (4, 8, 90, 96, "none"), (2, 8, 256, 160, "none"), (2, 8, 77, 40, "none")]
    kinds += [(2, 8, 200, 64, "causal"), (2, 4, 256, 128, "causal"), (3, 6, 33, 24, "causal")]
    kinds += [(8, 8, 49, 32, "bias"), (8, 8, 49, 32, "bias_grad"), (4, 12, 128, 64, "padding")]
    kinds += [(4, 8, 130, 64, "lengths"), (2, 8, 256, 32, "allowed")]
    float32 = [(1, 4, 16, 64, "none"), (1, 1, 32, 32, "none"), (2, 8, 64, 64, "causal"), (2, 8, 256, 64, "none")]
    cells = [(*kind, "bfloat16") for kind in kinds] + [(*kind, "float32") for kind in float32]
    step: dict[str, Any] = {"call": "parameter", "device": "cuda", "host": True}
    return tuple(Problem(B, H, N, N, D, dtype=dtype, mask=mask, **step) for B, H, N, D, mask, dtype in cells)


def mps() -> tuple[Problem, ...]:
    """Apple's GPUs, of which the smallest computes 2.6 TFLOP/s: forward, backward, decode, windows, grouped heads."""
    half: dict[str, Any] = {"dtype": "float16", "device": "mps"}
    cells = [
        Problem(1, MPS_WIDTH // D, N, N, D, mask=mask, direction=direction, **half)
        for direction, D, N, mask in product(DIRECTIONS, (64, 128), (512, 2048, 4096), ("none", "causal"))
    ]
    for dtype, direction in product(("float32", "bfloat16"), DIRECTIONS):
        cells.append(Problem(1, 16, 2048, 2048, 64, mask="causal", dtype=dtype, direction=direction, device="mps"))
    cells += [Problem(1, 16, N, N, D, **half) for N, D in ((2048, 40), (2048, 80), (197, 64))]
    cells += [Problem(1, 32, 1, N, 128, Hkv=Hkv, **half) for Hkv, N in product((32, 8, 4), (1024, 8192, 32768))]
    cells += [Problem(1, 32, 4, 8192, 128, Hkv=8, **half)]
    grouped: dict[str, Any] = {"B": 1, "H": 32, "M": 2048, "N": 2048, "D": 128, "Hkv": 8, "mask": "causal", **half}
    long: dict[str, Any] = {"B": 1, "H": 8, "M": 8192, "N": 8192, "D": 64, "window": GPU_WINDOW, **half}
    for direction in DIRECTIONS:
        cells += [Problem(**grouped, direction=direction)]
        cells += [Problem(**long, mask=mask, direction=direction) for mask in ("window", "segments")]
        cells += [Problem(1, 16, 1024, 1024, 64, mask=m, direction=direction, **half) for m in ("alibi", "padding")]
    small = [Problem(1, 4, 16, 16, 64, grad=grad, device="mps", host=True) for grad in (False, True)]
    return (*cells, Problem(1, 16, 1024, 1024, 64, mask="bias_grad", direction="backward", **half), *small)


GPU_SUITES = {
    "gpu-forward": papers_grid("forward"),
    "gpu-backward": papers_grid("backward"),
    "gpu-gqa": gpu_gqa(),
    "gpu-decode": gpu_decode(),
    "gpu-mask": gpu_mask(),
    "gpu-dropout": gpu_dropout(),
    "gpu-bias": gpu_bias(),
    "gpu-cross": gpu_cross(),
    "gpu-fp32": gpu_fp32(),
    "gpu-overhead": gpu_overhead(),
    "gpu-small-training": gpu_small_training(),
}
SUITES = {
    "cpu-forward": cpu_forward(),
    "cpu-backward": cpu_backward(),
    "cpu-decode": cpu_decode(),
    "overhead": overhead(),
    **GPU_SUITES,
    "mps": mps(),
}
