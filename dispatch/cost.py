"""Roofline estimate of a kernel's time, for what no table has measured."""

from __future__ import annotations

from sdpa.dispatch.device import Device, device_of
from sdpa.dispatch.kernel import Kernel
from sdpa.problem import AttentionProblem

# A kernel that writes the scores moves each about this often: product, softmax (read and write), product.
SCORE_PASSES = 4


def estimate(kernel: Kernel, problem: AttentionProblem) -> float:
    """Seconds `kernel` should take: the larger of arithmetic and traffic, plus the fixed cost of a call."""
    device = device_of(problem.device)
    return max(arithmetic(kernel, problem, device), traffic(kernel, problem, device)) + kernel.overhead


def arithmetic(kernel: Kernel, problem: AttentionProblem, device: Device) -> float:
    flops = problem.flops()
    if kernel.materialises:
        share = problem.visible_share()
        flops = flops / share if share else flops  # computes what a mask hides, too
    return flops / (device.peak(problem.dtype) * kernel.efficiency)


def traffic(kernel: Kernel, problem: AttentionProblem, device: Device) -> float:
    moved = problem.bytes()
    if kernel.materialises:
        moved += SCORE_PASSES * problem.B * problem.H * problem.M * problem.N * 4  # float32 scores
    return moved / device.bandwidth
