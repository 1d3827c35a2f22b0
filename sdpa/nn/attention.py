"""MultiheadAttention: torch's module, with projections that copy nothing and our attention between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa.functional import scaled_dot_product_attention
from sdpa.inputs import Options
from sdpa.nn.masks import check_kinds, check_lengths, check_masks, check_shapes, mask_of
from sdpa.nn.padding import is_lengths
from sdpa.nn.weights import attention_with_weights

P = ParamSpec("P")
R = TypeVar("R")


def like(original: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """A decorator: the decorated function has the signature of torch's `original`, for editors and checkers, too."""
    return wraps(original, assigned=())


class Inside(Protocol):
    """What a stack tells its attentions instead of masks: that rows are packed, or which keys earlier steps left."""

    def attend(self, attention: MultiheadAttention, query: Tensor, key: Tensor) -> Tensor:
        """The attention's output for rows of queries and of keys, which are its values, too."""


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with the fastest correct kernel in every mode: training, inference, self- and
    cross-attention, with or without weights, under autocast and compile.

    Constructor, parameters, initialisation, state_dict and errors are torch's. What differs: a row that sees no key
    is 0 (before the last projection) where torch may give NaN; `key_padding_mask` may be (B,) integer lengths, which
    are never read on the host; a bool mask stays bool, and a mismatch of mask dtypes is no reason to warn.
    """

    @like(torch.nn.MultiheadAttention.forward)
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        _inside: Inside | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of projected queries to projected keys. L queries, S keys, E = embed_dim, B batch, H heads.

        Args:
            query: (L, B, E), (B, L, E) with batch_first, or (L, E).
            key: (S, B, kdim), likewise.
            value: (S, B, vdim), likewise.
            key_padding_mask: (B, S) or (S,): True = padding, or float, added to the scores; or (B,) integer lengths.
            need_weights: also return the weights, from the log-sum-exp of the fused kernel.
            attn_mask: (L, S) or (B * H, L, S): True = hidden, or float, added to the scores.
            average_attn_weights: the weights' mean over heads, (B, L, S), instead of (B, H, L, S).
            is_causal: a hint that attn_mask is causal, which is then not read.

        Returns:
            The output in the shape of `query`, and the weights after dropout, or None.

        Raises:
            AssertionError, RuntimeError: shapes and dtypes that do not fit, in torch's words.
            TypeError: what is no tensor.
        """
        if _inside is not None:
            return _inside.attend(self, query, key), None
        inputs = {"query": query, "key": key, "value": value}
        check_kinds(self, inputs, {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask})
        if query.is_nested or key.is_nested or value.is_nested:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        is_batched = self.check_call(query, key, value, key_padding_mask, attn_mask, is_causal)
        batch_first = self.batch_first or not is_batched
        is_own = is_batched and query is key and key is value and self._qkv_same_embed_dim
        # What torch.jit traces may serve calls that learn, whatever the trace is made under.
        if is_own and not torch.is_grad_enabled() and not torch.jit.is_tracing():
            heads = self.own_heads(query)
        else:
            projected = self.project(query, key, value)
            if not is_batched:
                projected = [t.unsqueeze(0) for t in projected]
                key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
            heads = self.all_heads(projected, batch_first)
        average = bool(average_attn_weights) if need_weights else None
        out, weights = self.attend(heads, key_padding_mask, attn_mask, is_causal, average)
        out = self.merge(out, batch_first)
        if is_batched:
            return out, weights
        return out.squeeze(0), None if weights is None else weights.squeeze(0)

    def attend(
        self,
        heads: Sequence[Tensor],
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        average: bool | None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, H, L, D) of projected heads, and the weights, of which `average` says: averaged, by head, or None."""
        q, k, v = heads
        N, extra, mask = k.shape[2], 0, None
        if self.bias_k is not None or self.add_zero_attn:
            k, v, extra = self.extend(k, v)
        if key_padding_mask is not None or attn_mask is not None:
            is_read = not is_causal or average is not None or key_padding_mask is not None or extra > 0
            check_shapes(key_padding_mask, attn_mask if is_read else None, q, N)
            mask = mask_of(key_padding_mask, attn_mask, is_causal, N, extra, q)
        dropout_p = self.dropout if self.training else 0.0
        if average is not None:
            return attention_with_weights(q, k, v, Options(mask, dropout_p), average)
        out: Any = scaled_dot_product_attention(q, k, v, mask, dropout_p)  # one tensor: no log-sum-exp is asked for
        return out, None

    def check_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> bool:
        """torch's complaints, in its words. Returns whether the inputs have a batch dimension."""
        if key_padding_mask is not None:
            check_lengths(key_padding_mask, query)
            if is_lengths(key_padding_mask) and query.dim() == 3:
                key_padding_mask = None  # torch knows no lengths
        is_batched = query.dim() == 3
        if not fits_dimensions(query, key, value, key_padding_mask, attn_mask, self.num_heads):
            complain(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        if key_padding_mask is not None or attn_mask is not None or is_causal:
            check_masks(key_padding_mask, attn_mask, is_causal)
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(f"was expecting embedding dimension of {self.embed_dim}, but got {query.shape[-1]}")
        if self._qkv_same_embed_dim and key.shape != value.shape:
            raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
        if key.shape[:-1] != value.shape[:-1]:
            raise AssertionError(
                f"key's sequence and batch dims {key.shape[:-1]} do not match value's {value.shape[:-1]}"
            )
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch] != key.shape[batch]:
            raise RuntimeError(
                f"Expected query and key to have one batch size, but got {query.shape[batch]} and {key.shape[batch]}."
            )
        return is_batched

    def own_heads(self, query: Tensor) -> Sequence[Tensor]:
        """(B, H, L, D) of self-attention's queries, keys and values, as views made of one product at once.

        For inference alone: gradients of three views that are made one by one are put together in one copy less.
        """
        rows = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        first, second, width = rows.shape
        split = rows.view(first, second, 3, self.num_heads, width // (3 * self.num_heads))
        return split.permute((2, 0, 3, 1, 4) if self.batch_first else (2, 1, 3, 0, 4)).unbind()

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values (..., E); of one tensor in one product, as views of its result."""
        bias = self.in_proj_bias
        if self._qkv_same_embed_dim:
            weight, E = self.in_proj_weight, self.embed_dim
            if query is key and key is value:
                return F.linear(query, weight, bias).chunk(3, -1)
            if key is value:
                own, other = (None, None) if bias is None else bias.split([E, 2 * E])
                k, v = F.linear(key, weight[E:], other).chunk(2, -1)
                return F.linear(query, weight[:E], own), k, v
            weights = weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return [F.linear(*of) for of in zip((query, key, value), weights, biases, strict=True)]

    def project_query(self, query: Tensor) -> Tensor:
        """Queries (..., E) alone, where a memory's keys are there already."""
        bias = None if self.in_proj_bias is None else self.in_proj_bias[: self.embed_dim]
        return F.linear(query, self.in_proj_weight[: self.embed_dim], bias)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, D) of a memory, dense, for many steps."""
        bias = None if self.in_proj_bias is None else self.in_proj_bias[self.embed_dim :]
        rows = F.linear(memory, self.in_proj_weight[self.embed_dim :], bias).chunk(2, -1)
        keys, values = (t.contiguous() for t in self.all_heads(rows, self.batch_first))
        return keys, values

    def all_heads(self, projected: Sequence[Tensor], batch_first: bool) -> list[Tensor]:
        """(B, H, L, D) of each, a view of projected (B, L, E) or (L, B, E)."""
        H, found = self.num_heads, []
        for rows in projected:
            split = rows.view(*rows.shape[:-1], H, rows.shape[-1] // H)
            found.append(split.transpose(1, 2) if batch_first else split.permute(1, 2, 0, 3))
        return found

    def merge(self, out: Tensor, batch_first: bool) -> Tensor:
        """The last projection of the heads' results (B, H, L, D)."""
        rows = out.transpose(1, 2) if batch_first else out.permute(2, 0, 1, 3)
        last = self.out_proj
        return F.linear(rows.flatten(-2), last.weight, last.bias)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keys and values (B, H, S, D) with the learned and the zero one behind them, and how many those are."""
        extra = 0
        B, H, _, D = k.shape
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([t, b.view(1, H, 1, D).to(t.dtype).expand(B, -1, -1, -1)], 2)
                for t, b in ((k, self.bias_k), (v, self.bias_v))
            )
            extra += 1
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
            extra += 1
        return k, v, extra

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """What torch.jit.script asks first."""
        raise NotImplementedError(
            "torch.jit.script cannot compile sdpa.nn.MultiheadAttention; torch.export can, and sdpa.nn.restore(model) "
            "makes it torch's again."
        )

    def can_pack(self) -> bool:
        """Keys that every query sees besides its sequence's belong to no sequence."""
        return self.bias_k is None and not self.add_zero_attn


def fits_dimensions(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, attn_mask: Tensor | None, num_heads: int
) -> bool:
    """Whether numbers of dimensions fit, and the shape of a mask of the heads of one sequence."""
    rank = query.dim()
    if rank not in (2, 3) or not key.dim() == value.dim() == rank:
        return False
    if padding is not None and padding.dim() != rank - 1:
        return False
    if attn_mask is None or attn_mask.dim() == 2:
        return True
    return attn_mask.dim() == 3 and (rank == 3 or attn_mask.shape == (num_heads, query.shape[0], key.shape[0]))


def complain(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, attn_mask: Tensor | None, num_heads: int
) -> NoReturn:
    """torch's own sentence about dimensions that do not fit, which its function begins with."""
    nothing: Any = None
    F.multi_head_attention_forward(
        query, key, value, query.shape[-1], num_heads, *(nothing,) * 4, False, 0.0, nothing, nothing,
        key_padding_mask=padding, attn_mask=attn_mask,
    )  # fmt: skip
    raise AssertionError("expected inputs and masks whose dimensions fit")
