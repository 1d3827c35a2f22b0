"""Generation with a decoder: keys and values kept from step to step, in tensors that never change their size.

A `Stored` stands in a layer's call where the padding mask stood (as a Packing does), so that a step runs the very
layers that training runs. Nothing is read on the host: a step can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sdpa.mask import Mask


class Stored(NamedTuple):
    """Keys and values (B, H, N, D) of one attention, which queries see as far as `lengths` say."""

    keys: Tensor
    values: Tensor
    lengths: Tensor | None  # (B,) how many are there before this step; None: all of them
    seen: Tensor | None  # bool (B, 1, 1, N), of a memory with padding
    grows: bool  # a step's own keys and values are added: self-attention

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write the keys and values (B, H, M, D) of a step behind those that are there."""
        B, _, M, _ = k.shape
        sequence = torch.arange(B, device=k.device)[:, None]
        position = self.lengths[:, None] + torch.arange(M, device=k.device)
        self.keys[sequence, :, position] = k.detach().transpose(1, 2).to(self.keys.dtype)
        self.values[sequence, :, position] = v.detach().transpose(1, 2).to(self.values.dtype)

    def mask(self, M: int) -> Mask | None:
        """What M queries of a step see, of which the last stands at the last key."""
        if self.grows:
            return Mask(causal=True, align="bottom_right", lengths=self.lengths + M)
        return None if self.seen is None else Mask(allowed=self.seen)


class DecoderCache(NamedTuple):
    """What `TransformerDecoder.step` keeps: made by `TransformerDecoder.new_cache`."""

    own: tuple[Stored, ...]  # by layer: of the target so far
    memory: tuple[Stored, ...]  # by layer: of the encoder's output, projected once
    lengths: Tensor  # (B,) int64, positions of each sequence that are filled; `step` adds to it in place

    @property
    def max_length(self) -> int:
        return self.own[0].keys.shape[2] if self.own else 0

    def reset(self) -> None:
        """Forget the target, in place: the same memory, another generation (or another replay of a graph)."""
        self.lengths.zero_()

    def reorder(self, order: Tensor) -> None:
        """Let sequence b go on as sequence order[b], in place, as beam search wants it; `order` (B,) int64."""
        for stored in (*self.own, *self.memory):
            for tensor in (stored.keys, stored.values, *([] if stored.seen is None else [stored.seen])):
                tensor.copy_(tensor[order])
        self.lengths.copy_(self.lengths[order])


def new_cache(
    layers: torch.nn.ModuleList, memory: Tensor, max_length: int, memory_key_padding_mask: Tensor | None
) -> DecoderCache:
    """Empty target stores and the projected memory of each layer."""
    B = memory.shape[0] if layers[0].self_attn.batch_first else memory.shape[1]
    lengths = torch.zeros(B, dtype=torch.int64, device=memory.device)
    seen = None if memory_key_padding_mask is None else ~memory_key_padding_mask[:, None, None, :]
    own, projected = [], []
    for layer in layers:
        k, v = layer.multihead_attn.project_memory(memory)
        projected.append(Stored(k, v, None, seen, grows=False))
        shape = (B, layer.self_attn.num_heads, max_length, layer.self_attn.head_dim)
        keys, values = k.new_zeros((2, *shape))
        own.append(Stored(keys, values, lengths, None, grows=True))
    return DecoderCache(tuple(own), tuple(projected), lengths)
