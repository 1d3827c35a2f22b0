"""The kernel `triton_flash`: structured masks, any head size, forward, backward and weights."""

from __future__ import annotations

from sdpa.kernels.triton import backward as backward_pass
from sdpa.kernels.triton import forward as forward_pass
from sdpa.kernels.triton.availability import unavailable
from sdpa.kernels.triton.backward import backward
from sdpa.kernels.triton.forward import forward
from sdpa.kernels.triton.replay import Replay
from sdpa.kernels.triton.tiles import TILES, tiles
from sdpa.kernels.triton.weights import weights
from sdpa.problem import AttentionProblem, Gradients, Results, Tile

__all__ = ["TILES", "backward", "forward", "record", "tiles", "unavailable", "weights"]


def record(tensors: tuple, problem: AttentionProblem, tile: Tile) -> tuple[Results | Gradients, Replay | None]:
    """Like the pass that the problem names, and what does it again for tensors of the same form."""
    run = forward_pass if problem.direction == "forward" else backward_pass
    return run.record(tensors, problem, tile)
