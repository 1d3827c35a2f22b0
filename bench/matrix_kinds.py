"""Kinds of call of the matrix (sdpa.bench.matrix): what is called, and the tensors it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sdpa
from sdpa import Mask, nn

B, H, L, D = 2, 2, 4, 4
E = H * D
attention = sdpa.scaled_dot_product_attention


@dataclass(frozen=True)
class Kind:
    """A call of tensors, of which the first few may learn."""

    call: Callable[..., object]  # of the tensors; of a module and the tensors where there is one
    tensors: tuple[Tensor, ...]
    learn: int = 3
    module: torch.nn.Module | None = None
    is_random: bool = False


class Calling(torch.nn.Module):
    """A kind as a module, as torch.export and torch.jit want one."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.inner = kind.module

    def forward(self, *tensors: Tensor) -> object:
        return self.kind.call(*tensors) if self.inner is None else self.kind.call(self.inner, *tensors)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def qkv(*lead: int, heads: int = H, keys: int = L) -> tuple[Tensor, Tensor, Tensor]:
    shape = (lead or (B,), (L, D), (keys, D))
    return (
        draw(*shape[0], H, *shape[1]),
        draw(*shape[0], heads, *shape[2], seed=1),
        draw(*shape[0], heads, *shape[2], seed=2),
    )


def plain_kinds() -> dict[str, Kind]:
    """The signature of torch's function, and what ours adds to it."""
    bias, allowed = draw(L, L), draw(B, 1, L, L) > -1.5
    sinks, slopes = draw(H), draw(H).abs()
    parameter = torch.nn.Parameter(draw(B, H, L, D, seed=3))
    return {
        "plain": Kind(attention, qkv()),
        "causal": Kind(lambda q, k, v: attention(q, k, v, is_causal=True), qkv()),
        "scale": Kind(lambda q, k, v: attention(q, k, v, scale=-0.3), qkv()),
        "scale, a tensor": Kind(lambda q, k, v: attention(q, k, v, scale=torch.tensor(0.3)), qkv()),
        "bool mask": Kind(attention, (*qkv(), allowed)),
        "float mask": Kind(attention, (*qkv(), bias)),
        "bias with gradient": Kind(attention, (*qkv(), bias), learn=4),
        "dropout": Kind(lambda q, k, v: attention(q, k, v, dropout_p=0.4), qkv(), is_random=True),
        "enable_gqa": Kind(lambda q, k, v: attention(q, k, v, enable_gqa=True), qkv(heads=1)),
        "softcap": Kind(lambda q, k, v: attention(q, k, v, softcap=2.0), qkv()),
        "sinks": Kind(lambda q, k, v, s: attention(q, k, v, sinks=s), (*qkv(), sinks), learn=4),
        "return_lse": Kind(lambda q, k, v: attention(q, k, v, return_lse=True), qkv()),
        "kernel=": Kind(lambda q, k, v: attention(q, k, v, kernel="math"), qkv()),
        "parameters": Kind(lambda m, q, k: attention(q, k, m.value), qkv()[:2], learn=2, module=Holding(parameter)),
        "3 dimensions": Kind(attention, qkv()[:0] + tuple(t[0] for t in qkv())),
        "5 dimensions": Kind(attention, tuple(t.unsqueeze(1) for t in qkv())),
        "ALiBi": Kind(lambda q, k, v, s: attention(q, k, v, Mask(alibi=s, causal=True)), (*qkv(), slopes)),
        "F under patch()": Kind(patched, qkv()),
    }


def patched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa.patch():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Holding(torch.nn.Module):
    def __init__(self, value: torch.nn.Parameter) -> None:
        super().__init__()
        self.value = value


def masked(**given: Any) -> Callable[..., object]:
    return lambda q, k, v: attention(q, k, v, Mask(**given))


def with_field(name: str, **given: Any) -> Callable[..., object]:
    return lambda q, k, v, value: attention(q, k, v, Mask(**{name: value}, **given))


def mask_kinds() -> dict[str, Kind]:
    """The fields of Mask; those that are tensors are inputs of the call."""
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    return {
        "Mask(causal, bottom_right)": Kind(masked(causal=True, align="bottom_right"), qkv(keys=L + 2)),
        "Mask(window)": Kind(masked(window=(1, 2)), qkv()),
        "Mask(lengths)": Kind(with_field("lengths", causal=True), (*qkv(), torch.tensor([2, 4]))),
        "Mask(query_lengths)": Kind(with_field("query_lengths"), (*qkv(), torch.tensor([2, 4]))),
        "Mask(segments)": Kind(with_field("segments"), (*qkv(), ids)),
        "Mask(cu_seqlens)": Kind(with_field("cu_seqlens"), (*qkv(), torch.tensor([0, 1, 4]))),
        "Mask(prefix)": Kind(with_field("prefix", causal=True), (*qkv(), torch.tensor([1, 3]))),
        "Mask(causal) & bias": Kind(lambda q, k, v, b: attention(q, k, v, Mask(causal=True) & b), (*qkv(), draw(L, L))),
    }


def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> object:
    return sdpa.varlen_attention(q, k, v, cu, cu, 5, 5, is_causal=True)


def crossed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> object:
    return sdpa.varlen_attention(q, k, v, cu_q, cu_k, 5, 6)


def stepped(decoder: nn.TransformerDecoder, tgt: Tensor, memory: Tensor) -> Tensor:
    cache = decoder.new_cache(memory, 8)
    return decoder.step(tgt, cache) + decoder.step(tgt, cache)


def other_kinds() -> dict[str, Kind]:
    """Packed and paged sequences, and modules."""
    torch.manual_seed(0)
    wide: dict[str, Any] = {"batch_first": True, "dtype": torch.float64}
    heads = nn.MultiheadAttention(E, H, **wide)
    encoder = nn.TransformerEncoderLayer(E, H, 8, 0.0, **wide)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 8, 0.0, **wide), 2).eval()
    int32 = torch.int32
    rows = draw(8, H, D), draw(8, H, D, seed=1), draw(8, H, D, seed=2)
    cu, cu_k = torch.tensor([0, 3, 8], dtype=int32), torch.tensor([0, 2, 8], dtype=int32)
    table, lengths = torch.tensor([[2, 0], [1, 3]], dtype=int32), torch.tensor([5, 7])
    caches = draw(4, 4, H, D), draw(4, 4, H, D, seed=1)
    x = draw(B, L, E)
    return {
        "varlen": Kind(packed, (*rows, cu)),
        "varlen, cross": Kind(crossed, (*rows, cu, cu_k)),
        "paged": Kind(sdpa.paged_attention, (draw(B, 1, H, D), *caches, table, lengths)),
        "MHA": Kind(lambda m, x: m(x, x, x, need_weights=False)[0], (x,), 1, heads),
        "MHA, need_weights": Kind(lambda m, x: m(x, x, x), (x,), 1, heads),
        "encoder layer": Kind(lambda m, x: m(x), (x,), 1, encoder),
        "decoder": Kind(lambda m, x, y: m(x, y, tgt_is_causal=False), (x, draw(B, L, E, seed=5)), 2, decoder),
        "decoder step": Kind(stepped, (x[:, :1], draw(B, L, E, seed=5)), 2, decoder),
    }


def kinds() -> dict[str, Kind]:
    return plain_kinds() | mask_kinds() | other_kinds()
