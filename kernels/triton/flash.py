"""The kernel `triton_flash`: structured masks, any head size, forward and backward."""

from __future__ import annotations

from sdpa.kernels.triton.availability import unavailable
from sdpa.kernels.triton.backward import backward
from sdpa.kernels.triton.forward import forward
from sdpa.kernels.triton.tiles import TILES, tiles

__all__ = ["TILES", "backward", "forward", "tiles", "unavailable"]
