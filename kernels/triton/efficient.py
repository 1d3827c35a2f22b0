"""The kernel `triton_efficient`: the same with dense masks, bias, the gradient of a bias, and dropout."""

from __future__ import annotations

from sdpa.kernels.triton.availability import unavailable
from sdpa.kernels.triton.backward import backward
from sdpa.kernels.triton.flash import record
from sdpa.kernels.triton.forward import forward
from sdpa.kernels.triton.tiles import TILES, needs_whole_rows, tiles
from sdpa.kernels.triton.weights import weights

__all__ = ["TILES", "backward", "forward", "needs_whole_rows", "record", "tiles", "unavailable", "weights"]
