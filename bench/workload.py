"""A problem's tensors, the same call to us and to the peer, and the check that both say the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import sdpa
from sdpa.bench.problems import MASKS, Problem

# Distance per row relative to the row's length, between two right answers in the same precision. Errors are judged by
# `sdpa check`; this only keeps a wrong answer from being timed.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
TF32_TOLERANCE = 1e-2  # products of float32 numbers rounded to 10 bits, as many as float16 has
GRADIENTS = ("grad_q", "grad_k", "grad_v", "grad_bias")  # of `leaves`
# Share of keys the "allowed" mask leaves.
ALLOWED_SHARE = 0.9


class WrongResult(RuntimeError):
    """Ours and the peer's results differ by more than rounding."""


@dataclass(frozen=True)
class Workload:
    """q (B,H,M,D), k (B,Hkv,N,D), v (B,Hkv,N,Dv), the gradient of the output, and the mask in both languages."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    our_mask: sdpa.Mask | Tensor | None
    peer_mask: Tensor | None

    def ours(self, kernel: str | None = None) -> Tensor:
        return sdpa.scaled_dot_product_attention(*self.qkv, attn_mask=self.our_mask, **self.options, kernel=kernel)

    def peer(self) -> Tensor:
        return torch_attention(*self.qkv, attn_mask=self.peer_mask, **self.options)

    def peer_backend(self) -> str:
        """Which of its kernels torch chooses for this call."""
        arguments = (*self.qkv, self.peer_mask, 0.0, self.options["is_causal"])
        number = torch._fused_sdp_choice(*arguments, enable_gqa=self.options["enable_gqa"])
        names = {member.value: name for name, member in SDPBackend.__members__.items()}
        return names.get(number, str(number)).lower().removesuffix("_attention")

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What a backward gives gradients of: q, k, v, and a bias that learns (1, H, M, N)."""
        return (*self.qkv, self.peer_mask) if self.problem.mask == "bias_grad" else self.qkv

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.q.dtype] if self.problem.precision == "highest" else TF32_TOLERANCE

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def options(self) -> dict:
        return {"is_causal": self.problem.mask == "causal", "enable_gqa": self.problem.H != self.problem.Hkv}


def make_workload(problem: Problem, seed: int = 0) -> Workload:
    p = problem
    generator = torch.Generator(device=p.device).manual_seed(seed)

    def draw(heads: int, length: int, size: int) -> Tensor:
        shape = (p.B, heads, length, size) if p.layout == "bhmd" else (p.B, length, heads, size)
        values = torch.randn(shape, generator=generator, dtype=p.torch_dtype, device=p.device)
        values = values if p.layout == "bhmd" else values.transpose(1, 2)
        return values.requires_grad_(p.needs_grad)

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
    if p.mask == "segments":
        sizes = torch.tensor(p.document_lengths(), device=p.device)
        ids = torch.arange(len(sizes), dtype=torch.int32, device=p.device).repeat_interleave(sizes)  # [N], sorted
        return sdpa.Mask(causal=True, segments=ids), (distance >= 0) & (ids[:, None] == ids)
    if p.mask == "alibi":
        slopes = alibi_slopes(p.H, p.device)
        bias = (-slopes[:, None, None] * distance).to(p.torch_dtype)  # [H, M, N]
        return sdpa.Mask(causal=True, alibi=slopes), bias.masked_fill_(distance < 0, -torch.inf)[None]
    raise ValueError(f"a problem's mask must be one of {', '.join(MASKS)}, got {p.mask!r}")


def alibi_slopes(H: int, device: str) -> Tensor:
    """A geometric sequence from 2**(-8/H) to 2**-8 (Press et al., 2022), (H,) float32."""
    return torch.exp2(-8.0 * torch.arange(1, H + 1, device=device) / H)


def backward_of(work: Workload, out: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """The backward alone, on a graph that is kept, so that it can be repeated."""
    return lambda: torch.autograd.grad(out, work.leaves, work.grad_out, retain_graph=True)


def calls(work: Workload, kernel: str | None) -> tuple[Callable[[], object], Callable[[], object]]:
    """What is timed, ours and the peer's."""
    if work.problem.direction == "backward":
        return backward_of(work, work.ours(kernel)), backward_of(work, work.peer())
    return lambda: work.ours(kernel), work.peer


def check_agreement(names: tuple[str, ...], ours: tuple[Tensor, ...], peer: tuple[Tensor, ...]) -> None:
    """Raises WrongResult naming the first tensor that differs by more than rounding."""
    for name, a, b in zip(names, ours, peer, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise WrongResult(f"{name}: expected {tuple(b.shape)} {b.dtype}, got {tuple(a.shape)} {a.dtype}")
        a, b = a.detach().double(), b.detach().double()
        # A gradient's row may be 0 but for cancellation, so gradients are compared per head.
        dims = -1 if name == "out" else (-1, -2)
        distance = torch.linalg.vector_norm(a - b, dim=dims)
        allowed = TOLERANCE[ours[0].dtype] * torch.linalg.vector_norm(b, dim=dims) + torch.finfo(torch.float32).tiny
        if not bool((distance <= allowed).all()):
            tolerance = TOLERANCE[ours[0].dtype]
            worst = float((distance / allowed).nan_to_num(torch.inf).max()) * tolerance
            raise WrongResult(f"{name}: relative distance to the peer {worst:.2g}, tolerance {tolerance:.2g}")
