"""The kernel `triton_flash`: structured masks, any head size, forward, backward and weights."""

from __future__ import annotations

from torch import Tensor

from sdpa.kernels.triton import backward as backward_pass
from sdpa.kernels.triton import forward as forward_pass
from sdpa.kernels.triton import weights as weights_pass
from sdpa.kernels.triton.availability import unavailable
from sdpa.kernels.triton.backward import backward
from sdpa.kernels.triton.forward import forward
from sdpa.kernels.triton.recorded import RecordedCall
from sdpa.kernels.triton.tiles import TILES, needs_whole_rows, tiles
from sdpa.kernels.triton.weights import weights
from sdpa.problem import AttentionProblem, Gradients, Results, Tile

__all__ = ["TILES", "backward", "forward", "needs_whole_rows", "record", "tiles", "unavailable", "weights"]


RECORDS = {"forward": forward_pass.record, "backward": backward_pass.record, "weights": weights_pass.record}


def record(
    tensors: tuple, problem: AttentionProblem, tile: Tile
) -> tuple[Results | Gradients | Tensor, RecordedCall | None]:
    """Like the pass that the problem names, and what does it again for tensors of the same form."""
    return RECORDS[problem.direction](tensors, problem, tile)
