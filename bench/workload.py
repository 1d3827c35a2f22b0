"""A problem's tensors, its mask in our words and in torch's, and what surrounds its calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import sdpa
from sdpa.bench.problems import MASKS, Problem

# Distance per row relative to the row's length, from what is right. Errors are judged by `sdpa check`; this only keeps
# a wrong answer from being timed.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
TF32_TOLERANCE = 1e-2  # products of float32 numbers rounded to 10 bits, as many as float16 has
AUTOCAST = torch.bfloat16
# Share of keys the "allowed" mask leaves.
ALLOWED_SHARE = 0.9


class WrongResult(RuntimeError):
    """A result differs from what is right by more than rounding."""


class Refusal(RuntimeError):
    """Somebody cannot express a problem, or is known to be out of the race."""


@dataclass(frozen=True)
class Workload:
    """q (B,H,M,D), k (B,Hkv,N,D), v (B,Hkv,N,Dv), the gradient of the output, and the mask in both languages."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    our_mask: sdpa.Mask | Tensor | None
    torch_mask: Tensor | None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What a backward gives gradients of: q, k, v, and a bias that learns (1, H, M, N)."""
        if self.problem.mask == "bias_grad" and self.torch_mask is not None:
            return (*self.qkv, self.torch_mask)
        return self.qkv

    @cached_property
    def packed(self) -> Packed:
        """The documents of all batch entries as packed sequences, which a backward gives gradients of."""
        lengths = self.problem.document_lengths() * self.problem.B
        ends = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=self.q.device)
        q, k, v = (pack(t.detach()).requires_grad_(self.problem.needs_grad) for t in self.qkv)
        return Packed(q, k, v, ends, max(lengths))

    @property
    def out_dtype(self) -> torch.dtype:
        return AUTOCAST if self.problem.call == "autocast" else self.q.dtype

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.out_dtype] if self.problem.precision == "highest" else TF32_TOLERANCE

    @property
    def options(self) -> dict[str, Any]:
        """What a call says beside its tensors and its mask."""
        causal = {"is_causal": True} if self.problem.mask == "causal" else {}
        return causal | ({"enable_gqa": True} if self.problem.H != self.problem.Hkv else {})


@dataclass(frozen=True)
class Packed:
    """Sequences one after the other: q, k and v are (T, heads, D or Dv), `ends` where each begins, and the end."""

    q: Tensor
    k: Tensor
    v: Tensor
    ends: Tensor
    longest: int

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def pack(tensor: Tensor) -> Tensor:
    """(B, heads, N, D) -> (B * N, heads, D), contiguous"""
    return tensor.transpose(1, 2).flatten(0, 1).contiguous()


def unpack(tensor: Tensor, B: int) -> Tensor:
    """(B * N, heads, D) -> (B, heads, N, D)"""
    return tensor.unflatten(0, (B, -1)).transpose(1, 2)


def make_workload(problem: Problem, seed: int = 0) -> Workload:
    p = problem
    generator = torch.Generator(device=p.device).manual_seed(seed)

    def draw(heads: int, length: int, size: int) -> Tensor:
        shape = (p.B, heads, length, size) if p.layout == "bhmd" else (p.B, length, heads, size)
        values = torch.randn(shape, generator=generator, dtype=p.torch_dtype, device=p.device)
        values = values if p.layout == "bhmd" else values.transpose(1, 2)
        return torch.nn.Parameter(values) if p.call == "parameter" else values.requires_grad_(p.needs_grad)

    q, k, v = draw(p.H, p.M, p.D), draw(p.Hkv, p.N, p.D), draw(p.Hkv, p.N, p.Dv)
    grad_out = draw(p.H, p.M, p.Dv).detach()
    return Workload(p, q, k, v, grad_out, *masks(p, generator))


def masks(p: Problem, generator: torch.Generator) -> tuple[sdpa.Mask | Tensor | None, Tensor | None]:
    """(ours, torch's). What torch can only say as a dense tensor goes to us as the field a user of ours would write."""
    if p.mask in ("none", "causal"):
        return None, None
    if p.mask in ("bias", "bias_grad"):
        bias = torch.randn(1, p.H, p.M, p.N, generator=generator, dtype=p.torch_dtype, device=p.device)
        bias.requires_grad_(p.mask == "bias_grad" and p.needs_grad)
        return bias, bias
    if p.mask == "allowed":
        allowed = torch.rand(p.B, 1, p.M, p.N, generator=generator, device=p.device) < ALLOWED_SHARE
        allowed[..., 0] = True  # a row that sees no key is NaN in some peers
        return allowed, allowed
    if p.mask in ("padding", "lengths"):
        lengths = torch.tensor(p.key_lengths(), dtype=torch.int32, device=p.device)
        padding = (torch.arange(p.N, device=p.device) < lengths[:, None])[:, None, None, :]  # [B, 1, 1, N]
        return (padding if p.mask == "padding" else sdpa.Mask(lengths=lengths)), padding
    distance = torch.arange(p.M, device=p.device)[:, None] - torch.arange(p.N, device=p.device)  # [M, N]
    if p.mask == "window":
        return sdpa.Mask(window=(p.window, 0)), (distance >= 0) & (distance <= p.window)
    if p.mask == "lower_right":
        return sdpa.Mask(causal=True, align="bottom_right"), distance >= p.M - p.N
    if p.mask == "segments":
        sizes = torch.tensor(p.document_lengths(), device=p.device)
        documents = torch.arange(len(sizes), dtype=torch.int32, device=p.device)
        ids = documents.repeat_interleave(sizes, output_size=p.N)  # [N], sorted
        return sdpa.Mask(causal=True, segments=ids), (distance >= 0) & (ids[:, None] == ids)
    if p.mask == "alibi":
        slopes = alibi_slopes(p.H, p.device)
        bias = (-slopes[:, None, None] * distance).to(p.torch_dtype)  # [H, M, N]
        return sdpa.Mask(causal=True, alibi=slopes), bias.masked_fill_(distance < 0, -torch.inf)[None]
    raise ValueError(f"a problem's mask must be one of {', '.join(MASKS)}, got {p.mask!r}")


def alibi_slopes(H: int, device: str) -> Tensor:
    """A geometric sequence from 2**(-8/H) to 2**-8 (Press et al., 2022), (H,) float32."""
    return torch.exp2(-8.0 * torch.arange(1, H + 1, device=device) / H)


@contextmanager
def precision(problem: Problem) -> Iterator[None]:
    """float32 products as the problem has them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(problem.precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic(mode: bool) -> Iterator[None]:
    """torch.use_deterministic_algorithms(mode). It is not called where nothing would change: it imports Inductor."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if before == (mode, False):
        yield
        return
    torch.use_deterministic_algorithms(mode)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def surroundings(problem: Problem) -> Iterator[None]:
    """What a problem's calls find when they are made: a graph only where one is needed, autocast where it is asked, and
    torch's modes as the problem has them."""
    device = torch.device(problem.device).type
    cast = torch.autocast(device, AUTOCAST) if problem.call == "autocast" else nullcontext()
    graph = nullcontext() if problem.needs_grad else torch.no_grad()
    with precision(problem), deterministic(problem.deterministic), cast, graph:
        yield
