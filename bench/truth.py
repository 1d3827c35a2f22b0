"""What is right: attention of a few heads in float64, small enough for the longest problem, and the distance to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdpa.bench.calls import DROPOUT, FORMS, SOFTCAP, module_input, module_of
from sdpa.bench.problems import MODULES, Problem
from sdpa.bench.workload import Workload, WrongResult, alibi_slopes, deterministic

GRADIENTS = ("grad_q", "grad_k", "grad_v", "grad_bias")  # of `leaves`
# Outputs and gradients under dropout whose mean is held against those without it: both are linear in which pairs are
# kept. The relative distance over a head, by chance, is about sqrt(p / (1 - p) / draws), 0.04, and up to 0.07 for heads
# of 17 queries. Kept weights that were not scaled would make it 0.11. Under a causal mask the first row is as large as
# the other 255 that are compared together, and it is the first value alone, kept or dropped: so rows are compared as if
# all were as long. A row that is wrong by itself is beyond ROW_TOLERANCE, which is seven times what chance makes it.
DRAWS = 64
DROPOUT_TOLERANCE, ROW_TOLERANCE = 0.08, 0.3
# Queries whose results are compared, spread over all; rows of scores that are in memory at once for gradients.
ROWS = 256
CHUNK = 1024
LEAST = 1e-30  # what is divided by, where all of what is right is 0


class Distance(NamedTuple):
    """How far a result is from float64; of several the largest."""

    largest: float  # absolute
    rms: float  # the root mean square over that of what is right


def host_work(work: Workload) -> Workload:
    """The workload where float64 is: that of an MPS device, which has none, on the CPU."""
    if not work.problem.device.startswith("mps"):
        return work
    q, k, v, grad_out = (t.detach().cpu() for t in (*work.qkv, work.grad_out))
    mask = None if work.torch_mask is None else work.torch_mask.detach().cpu()
    problem = replace(work.problem, device="cpu")
    return replace(work, problem=problem, q=q, k=k, v=v, grad_out=grad_out, torch_mask=mask)


@dataclass(frozen=True)
class Slice:
    """Query rows (R,) of the query heads that share one key/value head of one batch entry."""

    work: Workload
    b: int
    head: int  # of keys and values
    rows: Tensor

    @property
    def heads(self) -> slice:
        group = self.work.problem.H // self.work.problem.Hkv
        return slice(self.head * group, (self.head + 1) * group)

    def queries(self, tensor: Tensor) -> Tensor:
        """(B, H, M, X) -> (G, R, X)"""
        return tensor[self.b, self.heads][:, self.rows]

    def seen(self) -> Tensor | None:
        """Which keys the rows see: (G|1, R, N) bool, or None for all."""
        p, mask = self.work.problem, self.work.torch_mask
        if p.mask in ("causal", "alibi"):
            return (torch.arange(p.N, device=p.device) <= self.rows[:, None])[None]
        if mask is None or mask.dtype != torch.bool:
            return None
        return mask.expand(p.B, p.H, p.M, p.N)[self.b, self.heads][:, self.rows]

    def added(self) -> Tensor | None:
        """What is added to the scores: (G, R, N) float64, or None. ALiBi from its slopes, which are not rounded."""
        p = self.work.problem
        if p.mask == "alibi":
            distance = self.rows[:, None] - torch.arange(p.N, device=p.device)
            return -alibi_slopes(p.H, p.device)[self.heads, None, None].double() * distance
        if p.mask in ("bias", "bias_grad"):
            mask: Any = self.work.torch_mask
            return self.queries(mask.detach().expand(p.B, p.H, p.M, p.N)).double()
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> Tensor:
        """q (G, R, D), k (N, D), v (N, Dv) -> (G, R, Dv); where it is asked for, the log-sum-exp as one more column"""
        p = self.work.problem
        scores = q @ k.mT * p.D**-0.5
        scores = SOFTCAP * torch.tanh(scores / SOFTCAP) if p.call == "softcap" else scores
        scores = scores if added is None else scores + added
        seen = self.seen()
        scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
        out = torch.softmax(scores, -1) @ v
        return torch.cat((out, scores.logsumexp(-1, keepdim=True)), -1) if p.call == "return_lse" else out


@dataclass(frozen=True)
class Whole:
    """All of an output, where it is that of a module."""

    def queries(self, tensor: Tensor) -> Tensor:
        return tensor


def out_slices(work: Workload) -> Iterator[Slice]:
    """Some rows of the first heads of the first batch entry and of the last of the last."""
    p = work.problem
    rows = torch.linspace(0, p.M - 1, min(p.M, ROWS), device=p.device).round().long()
    for b, head in dict.fromkeys(((0, 0), (p.B - 1, p.Hkv - 1))):
        yield Slice(work, b, head, rows)


# Products by cuBLAS may raise in deterministic mode, which is for those who are judged.
@deterministic(False)
@torch.no_grad()
def right_out(work: Workload) -> list[tuple[Slice | Whole, Tensor]]:
    p = work.problem
    if p.call in MODULES:
        x = module_input(work).double()
        results = module_of(torch.nn.MultiheadAttention, work).double()(x, x, x, need_weights=p.call == "weights")
        return [(Whole(), FORMS[p.call].read(results))]
    found: list[tuple[Slice | Whole, Tensor]] = []
    for part in out_slices(work):
        q = part.queries(work.q).double()
        k, v = (t[part.b, part.head].double() for t in (work.k, work.v))
        found.append((part, part.attend(q, k, v, part.added())))
    return found


@deterministic(False)
@torch.enable_grad()
def right_gradients(work: Workload) -> tuple[Tensor, ...]:
    """Of q (G, M, D), k (N, D) and v (N, Dv) of the last heads of the last batch entry; and of a bias that learns
    (G, M, N), which every batch entry adds to."""
    p = work.problem
    learns = p.mask == "bias_grad"
    head = p.Hkv - 1
    biases: Any = None
    for b in range(p.B) if learns else (p.B - 1,):
        k, v = (t[b, head].detach().double().requires_grad_() for t in (work.k, work.v))
        chunks = []
        for rows in torch.arange(p.M, device=p.device).split(CHUNK):
            part = Slice(work, b, head, rows)
            q = part.queries(work.q).detach().double().requires_grad_()
            added: Any = part.added()
            leaves = (q, k, v, added.requires_grad_()) if learns else (q, k, v)
            out = part.attend(q, k, v, added)
            chunks.append(torch.autograd.grad(out, leaves, part.queries(work.grad_out).double()))
        grad_q, grad_k, grad_v, *grad_bias = (list(column) for column in zip(*chunks, strict=True))
        if learns:
            bias = torch.cat(grad_bias[0], 1)
            biases = bias if biases is None else biases + bias
    found: tuple[Any, ...] = (torch.cat(grad_q, 1), sum(grad_k), sum(grad_v))
    return (*found, biases) if learns else found


def out_error(work: Workload, out: Tensor, right: list[tuple[Slice | Whole, Tensor]]) -> Distance:
    """The distance of an output. Raises WrongResult beyond rounding, or where it is not finite."""
    check_form("out", out, out_shape(work.problem), work.out_dtype)
    pairs = [(part.queries(out.detach()), expected) for part, expected in right]
    if work.problem.call != "dropout":
        return largest(distance("out", *pair, work.tolerance, (-1,)) for pair in pairs)
    return largest(distance_under_dropout("out", *pair, rows=True) for pair in pairs)


def out_shape(p: Problem) -> tuple[int, ...]:
    if p.call in MODULES:
        return p.B, p.M, p.H * p.D + p.N * (p.call == "weights")
    return p.B, p.H, p.M, p.Dv + (p.call == "return_lse")


def mean_under_dropout(draw: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The means of many results, which are near those without dropout. Raises WrongResult where nothing is dropped."""
    first = tuple(tensor.detach() for tensor in draw())
    totals, agree = [tensor.double() for tensor in first], torch.ones((), dtype=torch.bool, device=first[0].device)
    for _ in range(DRAWS - 1):
        made = draw()
        agree &= (made[0] == first[0]).all()  # gradients may differ by the order of their sums
        for total, tensor in zip(totals, made, strict=True):
            total += tensor.detach()
    if bool(agree):
        raise WrongResult(f"out: {DRAWS} calls with dropout of {DROPOUT} agree")
    return tuple((total / DRAWS).to(tensor.dtype) for total, tensor in zip(totals, first, strict=True))


def gradient_error(work: Workload, gradients: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> Distance:
    """The same of gradients of q, k, v (B, heads, length, .) and of a bias (1, H, M, N)."""
    p, distances = work.problem, []
    group = p.H // p.Hkv
    for name, gradient, leaf, expected in zip(GRADIENTS, gradients, work.leaves, right, strict=False):
        check_form(name, gradient, tuple(leaf.shape), leaf.dtype)
        got = gradient[-1, -1] if name in ("grad_k", "grad_v") else gradient[-1, -group:]
        if p.call == "dropout":
            distances.append(distance_under_dropout(name, got, expected, rows=name == "grad_v"))
        else:  # a gradient's row may be 0 but for cancellation, so gradients are compared per head
            distances.append(distance(name, got, expected, work.tolerance, (-1, -2)))
    return largest(distances)


def check_form(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
        got = None if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        raise WrongResult(f"{name}: expected {shape} {dtype}, got {got}")
    if not bool(torch.isfinite(tensor).all()):
        raise WrongResult(f"{name}: not finite in {int((~torch.isfinite(tensor)).sum())} of {tensor.numel()} places")


def distance(name: str, got: Tensor, right: Tensor, tolerance: float, dims: tuple[int, ...]) -> Distance:
    """The distance, after the relative one over `dims` was held against the tolerance."""
    apart = got.double() - right
    off, length = (torch.linalg.vector_norm(tensor, dim=dims) for tensor in (apart, right))
    relative = off / length.clamp_min(LEAST)
    if not bool((relative <= tolerance).all()):
        raise WrongResult(
            f"{name}: relative distance to float64 {float(relative.max()):.2g}, tolerance {tolerance:.2g}"
        )
    # Norms of norms are those of all numbers.
    rms = torch.linalg.vector_norm(off) / torch.linalg.vector_norm(length).clamp_min(LEAST)
    return Distance(float(apart.abs().max()), float(rms))


def distance_under_dropout(name: str, got: Tensor, right: Tensor, rows: bool) -> Distance:
    """The distance of a mean, after that over each head was held against the tolerance. With `rows` each row is divided
    by the length of the right one before, and held against a tolerance of its own; the distance returned is that of
    rows as they are, and may be larger."""
    if rows:
        distance(name, got, right, ROW_TOLERANCE, (-1,))
    distance(name, *(of_equal_rows(got, right) if rows else (got, right)), DROPOUT_TOLERANCE, (-1, -2))
    return distance(name, got, right, math.inf, (-1, -2))


def of_equal_rows(got: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both, each row divided by the length of the right one."""
    length = torch.linalg.vector_norm(right, dim=-1, keepdim=True).clamp_min(LEAST)
    return got.double() / length, right / length


def largest(distances: Iterable[Distance]) -> Distance:
    return Distance(*map(max, zip(*distances, strict=True)))
