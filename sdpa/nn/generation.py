"""Generation with a decoder: keys and values kept from step to step, in tensors that never change their size.

A step runs the very layers that training runs, called with `Stored` instead of masks. Nothing is read on the host: a
step can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sdpa.functional import scaled_dot_product_attention
from sdpa.mask import Mask
from sdpa.scalars import as_int, shown, type_name
from sdpa.torch_private import register_pytree

if TYPE_CHECKING:
    from sdpa.nn.attention import MultiheadAttention
    from sdpa.nn.layers import TransformerDecoderLayer

INDICES = (torch.int64, torch.int32)  # torch treats bool and uint8 as a mask, which it reads on the host


class Stored(NamedTuple):
    """Keys and values (B, H, N, D) of one attention, which queries see as far as `lengths` say."""

    keys: Tensor
    values: Tensor
    lengths: Tensor | None  # (B,) how many are there before this step; None: all of them
    seen: Tensor | None  # bool (B, 1, 1, N), of a memory with padding
    grows: bool  # a step's own keys and values are added: self-attention

    def attend(self, attention: MultiheadAttention, query: Tensor, key: Tensor) -> Tensor:
        """The attention's output for the queries of a step, (B, M, E) or (M, B, E); `key` is not read."""
        batch_first = attention.batch_first
        if self.grows:
            q, k, v = attention.all_heads(attention.project(query, query, query), batch_first)
            self.append(k, v)
        else:
            (q,) = attention.all_heads((attention.project_query(query),), batch_first)
        keys, values = (t.to(q.dtype) for t in (self.keys, self.values))
        out: Any = scaled_dot_product_attention(q, keys, values, self.mask(q.shape[2]))
        return attention.merge(out, batch_first)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write the keys and values (B, H, M, D) of a step behind those that are there."""
        B, _, M, _ = k.shape
        sequence = torch.arange(B, device=k.device)[:, None]
        assert self.lengths is not None  # self-attention has lengths
        position = self.lengths[:, None] + torch.arange(M, device=k.device)
        try:
            for kept, new in ((self.keys, k), (self.values, v)):
                # On a transposed view the indexed dimensions are neighbours; vmap's rule is wrong for others.
                kept.transpose(1, 2).index_put_((sequence, position), new.transpose(1, 2).to(kept.dtype))
        except IndexError:  # only a CPU checks indices
            raise IndexError(
                f"a sequence of the cache has no room for {M} more positions, max_length is {self.keys.shape[2]}"
            ) from None
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise RuntimeError(
                "a step stores in place, so that under vmap the cache has to be mapped as tgt is: call new_cache "
                "inside of the mapped function with a memory that is mapped, or give the cache to it as a mapped "
                "argument."
            ) from error

    def mask(self, M: int) -> Mask | None:
        """The mask of M queries of a step, the last of which stands at the last key."""
        if self.grows and self.lengths is not None:
            return Mask(causal=True, align="bottom_right", lengths=self.lengths + M)
        return None if self.seen is None else Mask(allowed=self.seen)


@dataclass(frozen=True, eq=False)
class DecoderCache:
    """The state of `TransformerDecoder.step`, made by `TransformerDecoder.new_cache`.

    It is a pytree. Its layers share one tensor of lengths, also when it is built again; torch would build every
    NamedTuple again leaf by leaf.
    """

    own: tuple[Stored, ...]  # by layer: of the target so far
    memory: tuple[Stored, ...]  # by layer: of the encoder's output, projected once
    lengths: Tensor  # (B,) int64, positions of each sequence that are filled; `step` adds to it in place

    @property
    def max_length(self) -> int:
        return self.own[0].keys.shape[2] if self.own else 0

    @property
    def seen(self) -> Tensor | None:
        """The padding mask of the memory, which all layers share."""
        return self.memory[0].seen if self.memory else None

    def reset(self) -> None:
        """Forget the target, in place: the same memory, another generation (or another replay of a graph)."""
        self.lengths.zero_()

    def reorder(self, order: Tensor) -> None:
        """Let sequence b go on as sequence order[b], in place, as beam search wants it; `order` (B,) int64 or int32.

        Raises:
            TypeError, ValueError: an order that is no tensor, of another shape or dtype; its values are not looked at.
        """
        check_tensor("order", order)
        if order.shape != self.lengths.shape or order.dtype not in INDICES:
            wanted, got = tuple(self.lengths.shape), tuple(order.shape)
            raise ValueError(f"order must be int64 or int32 of shape {wanted}, got {order.dtype} of shape {got}")
        stores = (*self.own, *self.memory)
        kept = [tensor for stored in stores for tensor in (stored.keys, stored.values)]
        # Layers share the mask and the lengths, which must be reordered once only.
        for tensor in (*kept, *([] if self.seen is None else [self.seen]), self.lengths):
            tensor.copy_(tensor[order])


def flatten_cache(cache: DecoderCache) -> tuple[list[Any], bool]:
    """Keys and values by layer, and once what layers share; the context is whether the memory has padding."""
    own, memory = ([(stored.keys, stored.values) for stored in stores] for stores in (cache.own, cache.memory))
    seen = [] if cache.seen is None else [cache.seen]
    return [own, memory, cache.lengths, *seen], bool(seen)


def flatten_cache_with_keys(cache: DecoderCache) -> tuple[list[Any], bool]:
    parts, context = flatten_cache(cache)
    return list(zip(("own", "memory", "lengths", "seen"), parts, strict=False)), context


def build_cache(parts: Iterable[Any], has_seen: bool) -> DecoderCache:
    own, memory, lengths, *seen = parts
    return DecoderCache(
        tuple(Stored(keys, values, lengths, None, grows=True) for keys, values in own),
        tuple(Stored(keys, values, None, seen[0] if has_seen else None, grows=False) for keys, values in memory),
        lengths,
    )


register_pytree(
    DecoderCache,
    flatten_cache,
    build_cache,
    serialized_type_name="sdpa.nn.DecoderCache",
    to_dumpable_context=bool,
    from_dumpable_context=bool,
    flatten_with_keys_fn=flatten_cache_with_keys,
)
torch.serialization.add_safe_globals([DecoderCache, Stored])


@contextmanager
def gathered(layer: object) -> Iterator[None]:
    """Gather the whole parameters of a layer sharded by fully_shard (FSDP2), which else only its forward does."""
    if not isinstance(layer, Sharded):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


@runtime_checkable
class Sharded(Protocol):
    """The methods that fully_shard adds to a module's class; FSDP2 itself need not be imported."""

    def unshard(self) -> object: ...

    def reshard(self) -> object: ...


def new_cache(
    layers: Sequence[TransformerDecoderLayer], memory: Tensor, max_length: int, memory_key_padding_mask: Tensor | None
) -> DecoderCache:
    """Empty target stores and the projected memory of each layer."""
    B = memory.shape[0] if layers[0].self_attn.batch_first else memory.shape[1]
    lengths = memory.new_zeros(B, dtype=torch.int64)  # under vmap mapped as the memory is
    seen = None if memory_key_padding_mask is None else ~memory_key_padding_mask[:, None, None, :]
    own, projected = [], []
    for layer in layers:
        with gathered(layer):
            k, v = layer.multihead_attn.project_memory(memory)
        projected.append(Stored(k, v, None, seen, grows=False))
        shape = (B, layer.self_attn.num_heads, max_length, layer.self_attn.head_dim)
        keys, values = k.new_zeros((2, *shape))
        own.append(Stored(keys, values, lengths, None, grows=True))
    return DecoderCache(tuple(own), tuple(projected), lengths)


def check_memory(
    memory: Tensor, max_length: int, padding: Tensor | None, attention: torch.nn.MultiheadAttention
) -> int:
    """The arguments of `TransformerDecoder.new_cache`, of which no value is read; `max_length` as Python's integer."""
    B, S = check_batch("memory", memory, attention)
    length = as_int(max_length)
    if length is None or length < 1:
        raise ValueError(f"max_length must be a positive integer, got {shown(max_length)}")
    if padding is None:
        return length
    check_tensor("memory_key_padding_mask", padding)
    if padding.dtype != torch.bool:
        raise ValueError(f"memory_key_padding_mask must be bool here, got {padding.dtype}")
    if padding.shape != (B, S):
        raise ValueError(
            f"memory_key_padding_mask must have shape {(B, S)}, as memory has {B} sequences of {S} positions, "
            f"got {tuple(padding.shape)}"
        )
    return length


def check_step(tgt: Tensor, cache: DecoderCache, layers: int, attention: torch.nn.MultiheadAttention) -> None:
    """The arguments of `TransformerDecoder.step` of so many layers; no value is read."""
    if not isinstance(cache, DecoderCache):
        raise TypeError(f"cache must be a DecoderCache, which new_cache makes, got {type(cache).__name__}")
    B, M = check_batch("tgt", tgt, attention)
    if layers != len(cache.own):
        raise ValueError(f"the cache is of {len(cache.own)} layers, expected this decoder's {layers}")
    if B != cache.lengths.shape[0]:
        raise ValueError(f"tgt has {B} sequences, expected the cache's {cache.lengths.shape[0]}")
    if M > cache.max_length:
        raise IndexError(f"tgt has {M} positions, the cache room for {cache.max_length}")


def check_batch(name: str, batch: Tensor, attention: torch.nn.MultiheadAttention) -> tuple[int, int]:
    """The number of sequences and of positions of a batch of embeddings for `attention` that asks for no gradient."""
    check_tensor(name, batch)
    batch_first, features = attention.batch_first, attention.embed_dim
    dimensions = "batch, length" if batch_first else "length, batch"
    if batch.dim() != 3:
        raise ValueError(f"{name} must be ({dimensions}, features), got shape {tuple(batch.shape)}")
    if batch.shape[2] != features:
        raise ValueError(f"{name} must be ({dimensions}, {features}), got shape {tuple(batch.shape)}")
    if batch.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} requires a gradient, which steps that store keys and values in place do not have: generate under "
            f"torch.no_grad() or torch.inference_mode(), or detach {name}."
        )
    first, second = batch.shape[:2]
    return (first, second) if batch_first else (second, first)


def check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        by_fx = type(tensor).__module__ == "torch.fx.proxy"
        advice = ": torch.fx.symbolic_trace cannot trace steps that store in place, use torch.export" if by_fx else ""
        raise TypeError(f"{name} must be a Tensor, got {type_name(tensor)}{advice}")
