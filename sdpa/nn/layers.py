"""Encoder and decoder layers: torch's, without a fast path to miss, on padded batches or packed rows alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdpa.nn.attention import Inside, MultiheadAttention, like
from sdpa.nn.masks import check_decoder, check_kinds

Block = Callable[[Tensor], Tensor]


def take_over(module: torch.nn.Module) -> None:
    """Make torch's attention in `module` ours: the same parameters, drawn from the same random numbers."""
    for child in module.children():
        if type(child) is torch.nn.MultiheadAttention:
            child.__class__ = MultiheadAttention


class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer; every call runs what torch keeps for its inference fast path's conditions."""

    self_attn: MultiheadAttention

    @like(torch.nn.TransformerEncoderLayer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_over(self)

    @like(torch.nn.TransformerEncoderLayer.forward)
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        _inside: Inside | None = None,
    ) -> Tensor:
        """As torch's; masks reach the attention as they are.

        Args:
            src: (L, B, E), (B, L, E) with batch_first, or (L, E).
            src_mask: (L, L) or (B * nhead, L, L): True = hidden, or float, added to the scores.
            src_key_padding_mask: (B, L): True = padding, or float; or (B,) integer lengths.
            is_causal: a hint that src_mask is causal.
        """
        if _inside is not None:
            return self._run(src, lambda x: self.dropout1(self.self_attn(x, x, x, _inside=_inside)[0]))
        is_ours = isinstance(self.self_attn, MultiheadAttention)
        if is_ours:
            check_kinds(self, {"src": src}, {"src_mask": src_mask, "src_key_padding_mask": src_key_padding_mask})
        if src.is_nested or not is_ours:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        return self._run(src, lambda x: self._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal))

    def _run(self, x: Tensor, attend: Block) -> Tensor:
        """The layer around its attention, of a batch or of packed rows."""
        if self.norm_first:
            x = x + attend(self.norm1(x))
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + attend(x))
        return self.norm2(x + self._ff_block(x))


class TransformerDecoderLayer(torch.nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer, whose two attentions are ours."""

    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention

    @like(torch.nn.TransformerDecoderLayer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_over(self)

    @like(torch.nn.TransformerDecoderLayer.forward)
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        _inside: tuple[Inside, Inside] | None = None,
    ) -> Tensor:
        """As torch's; masks reach the attentions as they are.

        Args:
            tgt: (L, B, E), (B, L, E) with batch_first, or (L, E).
            memory: (S, B, E), likewise.
            tgt_mask: (L, L), or with a leading B * nhead: True = hidden, or float, added.
            memory_mask: (L, S), likewise.
            tgt_key_padding_mask: (B, L): True = padding, or float; or (B,) integer lengths.
            memory_key_padding_mask: (B, S), likewise.
            tgt_is_causal: a hint that tgt_mask is causal.
            memory_is_causal: the same of memory_mask.
        """
        if _inside is not None:
            own, across = _inside
            return self._run(
                tgt,
                lambda x: self.dropout1(self.self_attn(x, x, x, _inside=own)[0]),
                lambda x: self.dropout2(self.multihead_attn(x, memory, memory, _inside=across)[0]),
            )
        if isinstance(self.self_attn, MultiheadAttention) and isinstance(self.multihead_attn, MultiheadAttention):
            masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
            check_decoder(self, (tgt, memory), masks)
        return self._run(
            tgt,
            lambda x: self._sa_block(x, tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            lambda x: self._mha_block(x, memory, memory_mask, memory_key_padding_mask, memory_is_causal),
        )

    def _run(self, x: Tensor, attend: Block, attend_memory: Block) -> Tensor:
        """The layer around its attentions, of a batch or of packed rows."""
        if self.norm_first:
            x = x + attend(self.norm1(x))
            x = x + attend_memory(self.norm2(x))
            return x + self._ff_block(self.norm3(x))
        x = self.norm1(x + attend(x))
        x = self.norm2(x + attend_memory(x))
        return self.norm3(x + self._ff_block(x))
