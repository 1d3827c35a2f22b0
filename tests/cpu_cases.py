"""Problems for the native CPU kernel as AttentionInputs, and its forward held against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sdpa.kernels.cpu import flash
from sdpa.problem import AttentionInputs, AttentionProblem, Results, Tile
from sdpa.reference import attention
from sdpa.testing import Comparison, compare

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Sizes:
    B: int = 2
    H: int = 4
    Hkv: int = 2
    M: int = 37
    N: int = 83
    D: int = 24
    Dv: int = 24


@dataclass
class Case:
    """Sizes, and the features of AttentionInputs by name."""

    sizes: Sizes = Sizes()
    features: dict[str, object] = field(default_factory=dict)


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def coins(*shape: int) -> Tensor:
    return torch.rand(*shape) < 0.6


def make(case: Case, dtype: torch.dtype, seed: int = 0) -> AttentionInputs:
    torch.manual_seed(seed)
    s = case.sizes
    q, k, v = random(s.B, s.H, s.M, s.D), random(s.B, s.Hkv, s.N, s.D), random(s.B, s.Hkv, s.N, s.Dv)
    return AttentionInputs(q.to(dtype), k.to(dtype), v.to(dtype), max(s.D, 1) ** -0.5, **case.features)


def lay_out(tensor: Tensor, kind: str) -> Tensor:
    """The same values in other memory."""
    if kind == "bmhd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "strided":
        return tensor.repeat_interleave(3, dim=-1)[..., ::3]
    if kind == "transposed":
        return tensor.mT.contiguous().mT
    if kind == "unaligned":
        return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)
    return tensor[:1].expand_as(tensor)


def run_forward(inputs: AttentionInputs, tile: Tile | None = None) -> Results:
    return flash.forward(inputs, AttentionProblem.of(inputs), tile)


def wanted_of(inputs: AttentionInputs) -> tuple[Results, Results]:
    """What the reference makes of it, in float64 and in the dtype of the query."""
    return attention(inputs), attention(inputs, inputs.q.dtype)


def check_forward(
    inputs: AttentionInputs, tile: Tile | None = None, wanted: tuple[Results, Results] | None = None
) -> None:
    exact, plain = wanted or wanted_of(inputs)
    results, terms = zip(run_forward(inputs, tile), exact, plain, strict=True), inputs.k.shape[2]
    expect([compare(name, *result, terms) for name, result in zip(Results._fields, results, strict=True)])


def expect(comparisons: list[Comparison]) -> None:
    assert all(c.ok for c in comparisons), "; ".join(str(c) for c in comparisons if not c.ok)
