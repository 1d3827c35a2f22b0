"""What each kernel of Metal takes of threadgroup memory and registers, and how often it reads: docs/metal_kernels.md.

Run as a script, it prints the page's tables.
"""

from __future__ import annotations

import torch

from sdpa.kernels.metal import source

KERNELS = ("forward", "backward_q", "backward_kv", "bias_grad", "weights")
SIZES = (64, 128, 256)
DTYPES = {"float16": torch.float16, "float32": torch.float32}
LONG = 4096  # rows, more than a tile has


def registers(kernel: str, D: int, tiles: source.Tiles) -> int:
    """float32 numbers of a lane in arrays, where D and Dv are the same: accumulators, scores and their gradients."""
    d, n, m = D // 4, tiles.BLOCK_N // 4, tiles.BLOCK_M // 4  # two of the 64 numbers of a fragment are a lane's
    return {
        "forward": d + n,
        "backward_q": d + 2 * n,
        "backward_kv": 2 * d + 2 * m,
        "bias_grad": 3 * n,
        "weights": 2 * n,
    }[kernel]


def resources_table() -> list[str]:
    lines = ["| kernel | dtype | D = Dv | BLOCK_M x BLOCK_N | simdgroups | threadgroup bytes | registers |"]
    lines.append("|---|---|---|---|---|---|---|")
    for kernel in KERNELS:
        for name, dtype in DTYPES.items():
            for D in SIZES:
                tiles = source.fitting(kernel, dtype, D, D, LONG)[0]
                rows = tiles.BLOCK_N if kernel == "backward_kv" else tiles.BLOCK_M
                size = source.memory_of(kernel, dtype, D, D, tiles)
                cells = (kernel, name, D, f"{tiles.BLOCK_M} x {tiles.BLOCK_N}", rows // 8, size)
                lines.append(f"| {' | '.join(map(str, cells))} | {registers(kernel, D, tiles)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(resources_table()))
