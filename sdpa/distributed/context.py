"""Context parallelism: each rank has a part of the sequence, and a block in which attention sees the whole of it.

Ulysses (Jacobs et al., DeepSpeed-Ulysses, 2023): before a call ranks exchange their parts of the sequence for parts of
the heads, so that each computes some heads with all queries and keys, and afterwards back. Every rank sees whole rows,
so a call takes any mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import Token
from functools import cache
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from sdpa import sharded
from sdpa.entry import unrecognised
from sdpa.functional import scaled_dot_product_attention
from sdpa.mask import Mask, as_mask
from sdpa.sharded import INSIDE
from sdpa.torch_private import TORCHS
from sdpa.varlen import paged_attention, varlen_attention

MODES = ("ulysses",)
HEAD_DIMENSIONS = {"alibi": -1, "allowed": -3, "bias": -3}  # of the fields of a mask
LOCK = Lock()  # of the count of open blocks
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
    of `sdpa.nn` without masks, in this thread. Nothing else is reached: flex_attention, operators of torch.ops, other
    libraries and other threads see this rank's part alone.

    Under torch.compile torch's function is traced with the block. Calls of sdpa are not compiled in it: the graph
    breaks. Activation checkpointing wants use_reentrant=False and the block inside of the function that it calls again.

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
        RuntimeError: dropout, packed or paged calls, weights, masks of layers, blocks inside of blocks, reentrant
            checkpointing; tensors that are not (B, heads, length, head size).
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
        if INSIDE.get():
            raise RuntimeError("context_parallel: blocks do not nest")
        self.tokens.append(INSIDE.set(True))
        with LOCK:
            sharded.not_compiled = eager()
            sharded.open_blocks += 1
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        with LOCK:
            sharded.open_blocks -= 1
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
        if not all(isinstance(t, Tensor) and t.dim() == 4 for t in (query, key, value)):
            raise RuntimeError("context_parallel: expected query, key and value as (B, heads, length, head size)")
        if is_reentrant():
            raise RuntimeError(
                "context_parallel: reentrant checkpointing makes the call again outside of the block; take "
                "use_reentrant=False, with the block inside of the function that is checkpointed"
            )
        heads = Heads(self.mesh, query.shape[1], key.shape[1])
        queries, keys = self.lengths_of(query, key, value)
        check_whole(attn_mask, sum(queries), sum(keys))
        mask, sinks = heads.mask(attn_mask), heads.sinks(options.pop("sinks", None))  # before anything is sent
        q, k, v = (heads.gather(t, of) for t, of in ((query, queries), (key, keys), (value, keys)))
        found: Any = scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, sinks=sinks, **options)
        if not options.get("return_lse", False):
            return heads.scatter(found, queries)
        out, lse = found
        return heads.scatter(out, queries), heads.scatter(lse.unsqueeze(3), queries).squeeze(3)

    def lengths_of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The positions that each rank has, of queries and of keys. All else has to be the same on all ranks."""
        M, N = query.shape[2], key.shape[2]
        if self.lengths is not None:
            own = self.lengths[self.mesh.get_local_rank()]
            if not M == N == own:
                raise ValueError(
                    f"context_parallel: this rank has {M} queries and {N} keys, where lengths tells of {own}"
                )
            return self.lengths, self.lengths
        sizes = [size for t in (query, key, value) for size in (t.shape[0], t.shape[1], t.shape[3], t.element_size())]
        here = torch.tensor([M, N, *sizes], device=self.mesh.device_type)
        found = [torch.empty_like(here) for _ in range(self.mesh.size())]
        dist.all_gather(found, here, group=self.mesh.get_group())
        queries, keys, *others = torch.stack(found, 1).tolist()
        if any(len(set(size)) > 1 for size in others):
            raise ValueError("context_parallel: ranks have tensors of different batch, heads, head size or dtype")
        return tuple(queries), tuple(keys)


@cache
def eager() -> Callable[..., Any]:
    """What answers a call without a compiler. It imports the compiler."""
    found: Callable[..., Any] = torch.compiler.disable(unrecognised)
    return found


def is_reentrant() -> bool:
    """Whether torch's reentrant checkpointing calls, which does so without gradients."""
    if torch.is_grad_enabled():
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint" and frame.f_code.co_name == "forward":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def check_whole(mask: Any, M: int, N: int) -> None:
    """torch's CausalBias has the sizes of the matrix that it is made for."""
    if hasattr(mask, "seq_len_q") and (mask.seq_len_q, mask.seq_len_kv) != (M, N):
        raise RuntimeError(
            f"context_parallel: expected a mask of the whole sequence, {M} x {N}, got one of {mask.seq_len_q} x "
            f"{mask.seq_len_kv}"
        )


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
        shaped = [p.view(B, heads // self.ranks, n, size) for p, n in zip(parts, lengths, strict=True)]
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

    def own(self, name: str, tensor: Tensor, dim: int) -> Tensor:
        """This rank's heads of a tensor; all of it where the dimension is missing or broadcast."""
        if tensor.dim() < -dim or (tensor.shape[dim] == 1 and name != "sinks"):
            return tensor
        if tensor.shape[dim] != self.H:
            raise RuntimeError(f"context_parallel: expected {name} of {self.H} heads, got {tuple(tensor.shape)}")
        return tensor.chunk(self.ranks, dim)[self.rank]

    def sinks(self, given: Any) -> Any:
        if given is not None and not (isinstance(given, Tensor) and given.dim() == 1):
            raise TypeError(f"context_parallel: expected sinks as a Tensor of shape ({self.H},) or None")
        return None if given is None else self.own("sinks", given, -1)

    def mask(self, given: Any) -> Any:
        """The mask of this rank's heads."""
        given = as_mask(given)
        if isinstance(given, Tensor):
            return self.own("attn_mask", given, -3)
        if not isinstance(given, Mask):
            return given
        found = {name: getattr(given, name) for name in HEAD_DIMENSIONS}
        return given.replace(
            **{n: self.own(f"Mask.{n}", t, HEAD_DIMENSIONS[n]) for n, t in found.items() if t is not None}
        )
