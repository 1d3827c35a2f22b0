"""Encoder and decoder layers: torch's, without a fast path to miss, on padded batches or packed rows alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sdpa.nn.attention import MultiheadAttention
from sdpa.nn.masks import check_kinds

P = ParamSpec("P")
R = TypeVar("R")


def like(original: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """A decorator: the decorated function has the signature of torch's `original`, for editors and checkers, too."""
    return wraps(original)


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
        is_ours = isinstance(self.self_attn, MultiheadAttention)
        if is_ours:
            check_kinds(self, {"src": src}, {"src_mask": src_mask, "src_key_padding_mask": src_key_padding_mask})
        if src.is_nested or not is_ours:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        x = src
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), src_mask, src_key_padding_mask, is_causal=is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal))
        return self.norm2(x + self._ff_block(x))


class TransformerDecoderLayer(torch.nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer, whose forward needs no change but a check: its two attentions are ours."""

    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention

    @like(torch.nn.TransformerDecoderLayer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_over(self)

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
    ) -> Tensor:
        """As torch's; masks reach the attentions as they are.

        Args:
            tgt: (L, B, E), (B, L, E) with batch_first, or (L, E).
            memory: (S, B, E), likewise.
            tgt_mask, memory_mask: (L, L) and (L, S), or with a leading B * nhead: True = hidden, or float, added.
            tgt_key_padding_mask, memory_key_padding_mask: (B, L) and (B, S): True = padding, or float; or (B,) integer
                lengths.
            tgt_is_causal, memory_is_causal: hints that a mask is causal.
        """
        masks = {
            "tgt_mask": tgt_mask,
            "memory_mask": memory_mask,
            "tgt_key_padding_mask": tgt_key_padding_mask,
            "memory_key_padding_mask": memory_key_padding_mask,
        }
        if isinstance(self.self_attn, MultiheadAttention) and isinstance(self.multihead_attn, MultiheadAttention):
            check_kinds(self, {"tgt": tgt, "memory": memory}, masks)
        return super().forward(
            tgt,
            memory,
            tgt_mask,
            memory_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            tgt_is_causal,
            memory_is_causal,
        )
