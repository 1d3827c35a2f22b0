"""Context parallelism: each rank has a part of the sequence, and a block in which attention sees the whole of it.

Ulysses (Jacobs et al., DeepSpeed-Ulysses, 2023): before a call ranks exchange their parts of the sequence for parts of
the heads, so that each computes some heads with all queries and keys, and afterwards back. Every rank sees whole rows,
so a call takes any mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Token
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from sdpa.functional import scaled_dot_product_attention
from sdpa.mask import Mask, as_mask
from sdpa.sharded import INSIDE
from sdpa.torch_private import TORCHS
from sdpa.varlen import paged_attention, varlen_attention

MODES = ("ulysses",)
# What would attend to this rank's part alone, and what to call instead.
REFUSED: dict[Callable[..., Any], str] = {
    varlen_attention: "varlen_attention is not supported; make it a call with Mask(segments=...)",
    paged_attention: "paged_attention is not supported",
    F.multi_head_attention_forward: "torch.nn.MultiheadAttention is not reached; take sdpa.nn.MultiheadAttention",
}
REFUSED |= {
    getattr(torch, name): "torch's fused layers of inference are not reached; take those of sdpa.nn"
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
    if hasattr(torch, name)
}


class context_parallel(TorchFunctionMode):
    """A block in which calls of attention take this rank's part of each sequence, and the ranks of `mesh` the rest.

    Query, key and value are (B, heads, own length, head size): ranks hold consecutive parts of the sequence, in the
    order of their rank. Masks and biases are those of the whole sequence; tensors of heads (slopes, sinks) have all
    heads. Results are this rank's part. It reaches `sdpa.scaled_dot_product_attention`, torch's function and the layers
    of `sdpa.nn`, and nothing else of torch changes.

        with sdpa.distributed.context_parallel(mesh):
            out = sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)

    Args:
        mesh: one dimension; its ranks share the sequence.
        mode: "ulysses", which exchanges parts of the sequence for heads.
        lengths: how many positions each rank has, in order, of queries and keys alike. Without it every call asks all
            ranks, which takes a small collective and on a GPU waits for it.

    Gradients of query, key and value are those of this rank's part. A bias or sinks, which every rank has whole, get
    the part of this rank's heads: sum it over the mesh.

    Raises:
        ValueError: another mode, a mesh of several dimensions, heads that the ranks do not divide, other lengths.
        RuntimeError: dropout, packed or paged calls, weights; tensors that are not (B, heads, length, head size).
    """

    def __init__(self, mesh: DeviceMesh, mode: str = "ulysses", lengths: Sequence[int] | None = None) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"context_parallel: expected mode as one of {', '.join(MODES)}, got {mode!r}")
        if mesh.ndim != 1:
            raise ValueError(
                f"context_parallel: expected a mesh of one dimension, got one of shape {tuple(mesh.shape)}"
            )
        if lengths is not None and len(lengths) != mesh.size():
            raise ValueError(f"context_parallel: expected a length for each of {mesh.size()} ranks, got {len(lengths)}")
        self.mesh, self.lengths = mesh, None if lengths is None else tuple(lengths)
        self.tokens: list[Token[bool]] = []

    def __enter__(self) -> context_parallel:
        self.tokens.append(INSIDE.set(True))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        INSIDE.reset(self.tokens.pop())

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in REFUSED:
            raise RuntimeError(f"context_parallel: {REFUSED[function]}")
        if function is not scaled_dot_product_attention and function is not TORCHS:
            return function(*args, **kwargs)
        return self.attend(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        """A call of this rank's parts, by heads of the whole sequence."""
        if dropout_p:
            raise RuntimeError("context_parallel: dropout is not supported: its bits would not be those of one device")
        if not query.dim() == key.dim() == value.dim() == 4:
            raise RuntimeError("context_parallel: expected query, key and value as (B, heads, length, head size)")
        heads = Heads(self.mesh, query.shape[1], key.shape[1])
        queries, keys = self.lengths_of(query.shape[2], key.shape[2])
        q, k, v = (heads.gather(t, of) for t, of in ((query, queries), (key, keys), (value, keys)))
        sinks = options.pop("sinks", None)
        sinks = None if sinks is None else heads.own(sinks, 0, query.shape[1])
        found: Any = scaled_dot_product_attention(
            q, k, v, heads.mask(attn_mask), 0.0, is_causal, sinks=sinks, **options
        )
        if not options.get("return_lse", False):
            return heads.scatter(found, queries)
        out, lse = found
        return heads.scatter(out, queries), heads.scatter(lse.unsqueeze(3), queries).squeeze(3)

    def lengths_of(self, M: int, N: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The positions that each rank has, of queries and of keys."""
        if self.lengths is not None:
            own = self.lengths[self.mesh.get_local_rank()]
            if not M == N == own:
                raise ValueError(
                    f"context_parallel: this rank has {M} queries and {N} keys, where lengths tells of {own}"
                )
            return self.lengths, self.lengths
        here = torch.tensor([M, N], device=self.mesh.device_type)
        found = [torch.empty_like(here) for _ in range(self.mesh.size())]
        dist.all_gather(found, here, group=self.mesh.get_group())
        queries, keys = torch.stack(found, 1).tolist()
        return tuple(queries), tuple(keys)


class Exchange(torch.autograd.Function):
    """What ranks send each other, in one piece for each; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, sent_sizes: list[int], received_sizes: list[int], group: Any) -> Tensor:
        ctx.back = received_sizes, sent_sizes, group
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.apply(gradient.contiguous(), *ctx.back), None, None, None


class Heads:
    """The heads that this rank computes, and the way there and back."""

    def __init__(self, mesh: DeviceMesh, H: int, Hkv: int) -> None:
        self.group, self.ranks, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.H = H
        if H % self.ranks or Hkv % self.ranks:
            raise ValueError(
                f"context_parallel: {H} query heads and {Hkv} key heads are not both multiples of the {self.ranks} "
                "ranks, which share them"
            )

    def gather(self, rows: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """(B, own heads, whole length, size) of (B, heads, own length, size)."""
        B, heads, own, size = rows.shape
        each = B * (heads // self.ranks) * size
        sent = torch.cat([part.reshape(-1) for part in rows.chunk(self.ranks, 1)])
        received = self.exchange(sent, [each * own] * self.ranks, [each * length for length in lengths])
        parts = received.split([each * length for length in lengths])
        shaped = [p.view(B, -1, n, size) for p, n in zip(parts, lengths, strict=True)]
        return torch.cat(shaped, 2)

    def scatter(self, rows: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """The way back: (B, heads, own length, size) of (B, own heads, whole length, size)."""
        B, heads, _, size = rows.shape
        own = lengths[self.rank]
        sent = torch.cat([part.reshape(-1) for part in rows.split(lengths, 2)])
        each = [B * heads * size * length for length in lengths]
        received = self.exchange(sent, each, [B * heads * size * own] * self.ranks)
        return torch.cat([p.view(B, heads, own, size) for p in received.chunk(self.ranks)], 1)

    def exchange(self, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        """What every rank sent to this one; its gradient goes back."""
        found: Tensor = Exchange.apply(sent, sent_sizes, received_sizes, self.group)
        return found

    def own(self, tensor: Tensor, dim: int, heads: int) -> Tensor:
        """This rank's heads of a tensor; all of it where the dimension is broadcast."""
        if tensor.shape[dim] == 1 and heads != 1:
            return tensor
        return tensor.chunk(self.ranks, dim)[self.rank]

    def mask(self, given: Any) -> Any:
        """The mask of this rank's heads."""
        given = as_mask(given)
        if isinstance(given, Tensor):
            return self.own(given, -3, self.H) if given.dim() >= 3 else given
        if not isinstance(given, Mask):
            return given
        fields = {"alibi": -1, "allowed": -3, "bias": -3}
        found = {name: getattr(given, name) for name in fields}
        return given.replace(
            **{
                name: self.own(value, fields[name], self.H)
                for name, value in found.items()
                if value is not None and value.dim() >= -fields[name]
            }
        )
