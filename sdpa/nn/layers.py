"""Encoder and decoder layers: torch's, without a fast path to miss, on padded batches or packed rows alike."""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor

from sdpa.nn.attention import MultiheadAttention


def take_over(module: torch.nn.Module) -> None:
    """Make torch's attention in `module` ours: the same parameters, drawn from the same random numbers."""
    for child in module.children():
        if type(child) is torch.nn.MultiheadAttention:
            child.__class__ = MultiheadAttention


class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer; every call runs what torch keeps for its inference fast path's conditions."""

    @wraps(torch.nn.TransformerEncoderLayer.__init__)
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        take_over(self)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As torch's; masks reach the attention as they are.

        Args:
            src: (L, B, E), (B, L, E) with batch_first, or (L, E).
            src_mask: (L, L) or (B * nhead, L, L): True = hidden, or float, added to the scores.
            src_key_padding_mask: (B, L): True = padding, or float; or (B,) integer lengths.
            is_causal: a hint that src_mask is causal.
        """
        if src.is_nested or not isinstance(self.self_attn, MultiheadAttention):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        x = src
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), src_mask, src_key_padding_mask, is_causal=is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal))
        return self.norm2(x + self._ff_block(x))


class TransformerDecoderLayer(torch.nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer, whose forward needs no change: its two attentions are ours."""

    @wraps(torch.nn.TransformerDecoderLayer.__init__)
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        take_over(self)
