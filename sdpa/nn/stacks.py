"""Stacks of layers: a padded batch is packed before the first and unpacked after the last, in training as well."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from sdpa.nn.attention import MultiheadAttention, like
from sdpa.nn.generation import DecoderCache, check_memory, check_step, new_cache
from sdpa.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer, take_over
from sdpa.nn.masks import check_decoder, check_kinds, check_masks
from sdpa.nn.padding import Packed, Packing, can_pack, clear_padding, is_lengths, whole
from sdpa.nn.rowwise import has_values, is_rowwise, is_unchanged, takes_rows


class TransformerEncoder(torch.nn.TransformerEncoder):
    """torch.nn.TransformerEncoder; padding costs nothing, in training and inference, wherever it lies in a sequence.

    Padded outputs are 0 (torch: 0 on its nested fast path, else what padding happens to give). Which rows are padding
    is read on the host once per call; with integer lengths (B,) as `src_key_padding_mask`, under compile and in CUDA
    graphs it is not, and the batch stays padded; as it does where hooks, modules of another make or an activation that
    is no known function would see the rows (sdpa.nn.rowwise).
    """

    @like(torch.nn.TransformerEncoder.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():  # about conditions of torch's fast path
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            super().__init__(*args, **kwargs)
        become_ours(self.layers)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As torch's.

        Args:
            src: (L, B, E), (B, L, E) with batch_first, or (L, E).
            mask: (L, L) or (B * nhead, L, L): True = hidden, or float, added to the scores.
            src_key_padding_mask: (B, L): True = padding, or float; or (B,) integer lengths.
            is_causal: a hint that `mask` is causal; None: look.
        """
        is_ours = are_ours(self.layers)
        if is_ours:
            check_kinds(self, {"src": src}, {"mask": mask, "src_key_padding_mask": src_key_padding_mask})
        if src.is_nested or not is_ours:
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        batch_first = is_batch_first(self)
        padding = None if is_lengths(src_key_padding_mask) and src.dim() == 3 else src_key_padding_mask
        check_masks(padding, mask, bool(is_causal), ("src_key_padding_mask", "mask"))
        causal = looks_causal(mask, is_causal, src, batch_first)
        packings = packings_of(self, ((src, src_key_padding_mask),), batch_first) if mask is None or causal else None
        if packings is None:
            output = through(self, src, src_mask=mask, is_causal=causal, src_key_padding_mask=src_key_padding_mask)
            return clear_padding(output, src_key_padding_mask, batch_first)
        (packing,) = packings
        rows = through(self, packing.pack(src), _inside=Packed(packing, packing, causal))
        return packing.unpack(rows, src)


class TransformerDecoder(torch.nn.TransformerDecoder):
    """torch.nn.TransformerDecoder; padding of the target and of the memory costs nothing, and padded outputs are 0."""

    @like(torch.nn.TransformerDecoder.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        become_ours(self.layers)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """As torch's.

        Args:
            tgt: (L, B, E), (B, L, E) with batch_first, or (L, E).
            memory: (S, B, E), likewise.
            tgt_mask: (L, L), or with a leading B * nhead: True = hidden, or float, added.
            memory_mask: (L, S), likewise.
            tgt_key_padding_mask: (B, L): True = padding, or float; or (B,) integer lengths.
            memory_key_padding_mask: (B, S), likewise.
            tgt_is_causal: a hint that tgt_mask is causal; None: look.
            memory_is_causal: the same of memory_mask.
        """
        if not are_ours(self.layers):
            masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
            return super().forward(tgt, memory, *masks, tgt_is_causal, memory_is_causal)
        check_decoder(self, (tgt, memory), (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask))
        batch_first = is_batch_first(self)
        for side, x, mask, padding, hint in (
            ("tgt", tgt, tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            ("memory", memory, memory_mask, memory_key_padding_mask, memory_is_causal),
        ):
            names = (f"{side}_key_padding_mask", f"{side}_mask")
            check_masks(None if is_lengths(padding) and x.dim() == 3 else padding, mask, bool(hint), names)
        causal = looks_causal(tgt_mask, tgt_is_causal, tgt, batch_first)
        structured = (tgt_mask is None or causal) and memory_mask is None and not memory_is_causal
        sides = ((tgt, tgt_key_padding_mask), (memory, memory_key_padding_mask))
        packings = packings_of(self, sides, batch_first) if structured else None
        if packings is None:
            output = through(
                self,
                tgt,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=causal,
                memory_is_causal=memory_is_causal,
            )
            return clear_padding(output, tgt_key_padding_mask, batch_first)
        queries, keys = packings
        inside = Packed(queries, queries, causal), Packed(queries, keys)
        rows = through(self, queries.pack(tgt), keys.pack(memory), _inside=inside)
        return queries.unpack(rows, tgt)

    def new_cache(self, memory: Tensor, max_length: int, memory_key_padding_mask: Tensor | None = None) -> DecoderCache:
        """What `step` keeps for sequences of up to `max_length` positions; the memory is projected here, once.

        Like a step it has no gradient and runs under torch.no_grad.

        Args:
            memory: (S, B, E), or (B, S, E) with batch_first: the encoder's output.
            max_length: positions of the target that there is to be room for.
            memory_key_padding_mask: bool (B, S), True = padding.

        Raises:
            TypeError: a layer or an attention that is not ours, a memory or mask that is no tensor.
            ValueError: a layer with learned or zero keys, a memory or mask of another shape, a mask that is not bool,
                a length that is no positive integer.
            RuntimeError: a memory that requires a gradient while gradients are recorded.
        """
        layers = [steppable(layer, number) for number, layer in enumerate(self.layers)]
        max_length = check_memory(memory, max_length, memory_key_padding_mask, first_attention(self))
        with torch.no_grad():
            return new_cache(layers, memory, max_length, memory_key_padding_mask)

    def step(self, tgt: Tensor, cache: DecoderCache) -> Tensor:
        """The outputs of the next positions of each sequence: what `forward` gives there under a causal mask.

        Any number of positions at a time: a prompt first, then one by one. Shapes depend on nothing but `tgt`, and
        no value is read on the host, so a step can be captured in a CUDA graph; nor is therefore checked whether the
        cache still has room (CPU: it is). It has no gradient, because it stores in place: it runs under torch.no_grad,
        whatever the caller's mode, and its result does not require one. A decoder that fully_shard has sharded needs
        torch.distributed.fsdp.register_fsdp_forward_method(decoder, "step") once.

        Args:
            tgt: (M, B, E), or (B, M, E) with batch_first: the embeddings of the next M positions.
            cache: of `new_cache`; its stores and lengths are changed in place.

        Raises:
            TypeError: a `tgt` that is no tensor, a `cache` that is none, a layer that is not ours.
            ValueError: another number of dimensions, of features, of sequences or of layers than the cache has.
            IndexError: more positions than the cache has room for, as far as this is known.
            RuntimeError: a `tgt` that requires a gradient while gradients are recorded.
        """
        attention = first_attention(self)
        check_step(tgt, cache, len(self.layers), attention)
        for number, layer in enumerate(self.layers):
            if not isinstance(layer, TransformerDecoderLayer):  # exchanged since the cache was made
                steppable(layer, number)
        with torch.no_grad():
            for layer, own, memory in zip(self.layers, cache.own, cache.memory, strict=True):
                tgt = layer(tgt, tgt, _inside=(own, memory))  # the memory is in the cache
            cache.lengths.add_(tgt.shape[1] if attention.batch_first else tgt.shape[0])
            return tgt if self.norm is None else self.norm(tgt)


class Transformer(torch.nn.Transformer):
    """torch.nn.Transformer with our encoder and decoder; custom ones stay as they are."""

    @like(torch.nn.Transformer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            super().__init__(*args, **kwargs)
        given = [id(argument) for argument in (*args, *kwargs.values())]
        for module, ours in ((self.encoder, TransformerEncoder), (self.decoder, TransformerDecoder)):
            if id(module) not in given:
                module.__class__ = ours
                become_ours(module.layers)

    @like(torch.nn.Transformer.forward)
    def forward(self, src: Tensor, tgt: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        check_kinds(self, {"src": src, "tgt": tgt}, {})
        return super().forward(src, tgt, *args, **kwargs)


LAYERS = {
    torch.nn.TransformerEncoderLayer: TransformerEncoderLayer,
    torch.nn.TransformerDecoderLayer: TransformerDecoderLayer,
}


def become_ours(layers: torch.nn.ModuleList) -> None:
    for layer in layers:
        if type(layer) in LAYERS:
            layer.__class__ = LAYERS[type(layer)]
            take_over(layer)


def are_ours(layers: torch.nn.ModuleList) -> bool:
    """Others get what torch gives them: a float mask where it was bool."""
    return all(isinstance(layer, tuple(LAYERS.values())) for layer in layers)


def through(stack: TransformerEncoder | TransformerDecoder, x: Tensor, *memory: Tensor, **how: Any) -> Tensor:
    """Layers and the last norm, of padded batches with their masks or of packed rows."""
    for layer in stack.layers:
        x = layer(x, *memory, **how)
    return x if stack.norm is None else stack.norm(x)


def steppable(layer: torch.nn.Module, number: int) -> TransformerDecoderLayer:
    """A decoder's layer if it and its attentions run our code: `step` gives them what no code of others expects."""
    # fully_shard (FSDP2) makes a class of its own of ours.
    if not isinstance(layer, TransformerDecoderLayer) or not is_unchanged(layer, TransformerDecoderLayer):
        raise TypeError(f"step needs sdpa.nn.TransformerDecoderLayer, got {type(layer).__name__} as layer {number}")
    for name, attention in (("self_attn", layer.self_attn), ("multihead_attn", layer.multihead_attn)):
        if not isinstance(attention, MultiheadAttention) or not is_unchanged(attention, MultiheadAttention):
            raise TypeError(
                f"step needs sdpa.nn.MultiheadAttention, got {type(attention).__name__} as {name} of layer {number}"
            )
        if not attention.can_pack():
            raise ValueError(f"step knows no keys beside those of positions, layer {number} has bias_k or a zero key")
    return layer


def is_batch_first(stack: TransformerEncoder | TransformerDecoder) -> bool:
    return first_attention(stack).batch_first


def first_attention(stack: TransformerEncoder | TransformerDecoder) -> torch.nn.MultiheadAttention:
    first: Any = stack.layers[0]  # of our classes
    return first.self_attn


def looks_causal(mask: Tensor | None, is_causal: bool | None, x: Tensor, batch_first: bool) -> bool:
    """The hint, or what the mask looks like: True (hidden) or -inf above the diagonal, nothing elsewhere. A graph that
    must serve every mask does not look."""
    if is_causal is not None or mask is None:
        return bool(is_causal)
    L = x.shape[-2] if batch_first or x.dim() == 2 else x.shape[0]
    if not can_pack() or mask.shape != (L, L) or not has_values(mask):
        return False
    causal = torch.ones_like(mask, dtype=torch.bool).triu_(1)
    if mask.dtype != torch.bool:
        causal = torch.zeros_like(mask).masked_fill_(causal, -torch.inf)
    return torch.equal(mask, causal)


def packings_of(
    stack: TransformerEncoder | TransformerDecoder,
    sides: tuple[tuple[Tensor, Tensor | None], ...],
    batch_first: bool,
) -> list[Packing] | None:
    """How to pack each batch with its padding mask; None where one cannot be packed or none has padding."""
    if not can_pack() or not all(is_packable(batch, padding, batch_first) for batch, padding in sides):
        return None
    if all(padding is None for _, padding in sides) or not all(map(takes_rows, stack.layers)):
        return None
    if stack.norm is not None and not is_rowwise(stack.norm):
        return None
    packings = [None if padding is None else Packing.of(padding, batch_first) for _, padding in sides]
    if all(packing is None for packing in packings):
        return None
    return [packing or whole(batch, batch_first) for packing, (batch, _) in zip(packings, sides, strict=True)]


def is_packable(batch: Tensor, padding: Tensor | None, batch_first: bool) -> bool:
    """Whether a batch of sequences has no padding, or a bool mask of its own shape."""
    if batch.dim() != 3 or padding is None:
        return batch.dim() == 3
    if padding.dtype != torch.bool or not has_values(padding):
        return False
    return padding.shape == (batch.shape[:2] if batch_first else batch.shape[:2][::-1])
