"""Padded batches as packed rows: what a mask leaves of (B, L, E) or (L, B, E), one sequence after the other.

Norms, projections and dropout work on rows, and attention inside each sequence: a layer is called with packed rows
where the padded batch stood, and with `Packed` instead of masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from sdpa import sharded
from sdpa.mask import is_integer
from sdpa.torch_private import mode_traces, peek_interpreter_stack
from sdpa.varlen import varlen_attention

if TYPE_CHECKING:
    from sdpa.nn.attention import MultiheadAttention


class Packing(NamedTuple):
    """Which rows of a padded batch are there."""

    places: Tensor  # (T,) in the batch, flattened as it lies; sequence by sequence, in order
    cu: Tensor  # (B + 1,) int32, cumulative lengths
    longest: int

    @classmethod
    def of(cls, hidden: Tensor, batch_first: bool) -> Packing | None:
        """From a bool mask (B, L), True where a position is padding; None where nothing is. The lengths come to the
        host, in one piece: until then a GPU waits."""
        B, L = hidden.shape
        there = ~hidden
        lengths = there.sum(1)
        counts = lengths.tolist()
        if sum(counts) == B * L:
            return None
        index = places_of(there.flatten(), sum(counts))
        if not batch_first:
            index = index % L * B + index // L
        return cls(index, torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), max(counts))

    def pack(self, batch: Tensor) -> Tensor:
        """(T, E) of (B, L, E) or (L, B, E)."""
        return batch.flatten(0, 1).index_select(0, self.places)

    def unpack(self, rows: Tensor, like: Tensor) -> Tensor:
        """A batch of the shape of `like` with `rows` in their places and 0 in the padding."""
        size = like.shape[0] * like.shape[1]
        batch = rows.new_zeros(size, rows.shape[-1]).index_copy(0, self.places, rows)
        # Not a view, on which fully_shard's hooks would be lost if it is changed in place.
        return torch.ops.aten._unsafe_view(batch, (*like.shape[:2], rows.shape[-1]))


def places_of(there: Tensor, number: int) -> Tensor:
    """Where the `number` true entries of (n,) `there` are, without asking a device for their number again."""
    if there.device.type not in ("cpu", "cuda"):  # torch 2.10 has nonzero_static for these
        return there.nonzero().squeeze(1)
    return torch.nonzero_static(there, size=number).squeeze(1)


class Packed(NamedTuple):
    """Attention inside of each packed sequence: to its own rows, or to those of a memory."""

    queries: Packing
    keys: Packing
    is_causal: bool = False

    def attend(self, attention: MultiheadAttention, query: Tensor, key: Tensor) -> Tensor:
        """The attention's output (T, E) for packed queries (T, E) and keys (U, E), which are its values, too."""
        q, k, v = (t.unflatten(-1, (attention.num_heads, -1)) for t in attention.project(query, key, key))
        queries, keys = self.queries, self.keys
        out: Any = varlen_attention(
            q, k, v, queries.cu, keys.cu, queries.longest, keys.longest,
            dropout_p=attention.dropout if attention.training else 0.0, is_causal=self.is_causal,
        )  # fmt: skip
        last = attention.out_proj
        return torch.nn.functional.linear(out.flatten(-2), last.weight, last.bias)


def whole(batch: Tensor, batch_first: bool) -> Packing:
    """The packing of a batch without padding."""
    B, L = batch.shape[:2] if batch_first else (batch.shape[1], batch.shape[0])
    rows = torch.arange(B * L, device=batch.device)
    index = rows if batch_first else rows.view(L, B).t().flatten()
    return Packing(index, L * torch.arange(B + 1, dtype=torch.int32, device=batch.device), L)


def is_lengths(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Whether what was given as a padding mask is (B,) integer lengths instead: ours, and never read on the host."""
    if not isinstance(mask, Tensor) or mask.dim() != 1:
        return False
    return is_integer(mask)


def can_pack() -> bool:
    """Packing needs the number of rows on the host: not inside a graph that must serve every mask. Nor where rows are a
    part of a sequence, whose other parts are on other ranks."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or sharded.is_inside():
        return False
    if peek_interpreter_stack() is not None or mode_traces():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def clear_padding(output: Tensor, mask: Tensor | None, batch_first: bool) -> Tensor:
    """`output` with 0 in the padding that a mask (B, L), or (L,) of one sequence, or lengths (B,) tell of."""
    if mask is None:
        return output
    if is_lengths(mask):
        L = output.shape[1] if batch_first else output.shape[0]
        mask = torch.arange(L, device=output.device) >= mask[:, None]
    elif mask.is_floating_point():
        mask = mask == -torch.inf
    in_order = batch_first or output.dim() == 2
    return output.masked_fill((mask if in_order else mask.t()).unsqueeze(-1), 0.0)
