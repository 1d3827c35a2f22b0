"""varlen_attention refuses in one line that says what was expected and what was got."""

from __future__ import annotations

import pytest
import torch

import sdpa
from helpers import CU_K, CU_Q, T_Q, draw, int32, operands
from sdpa import Mask

varlen = sdpa.varlen_attention


def call_varlen(**changes):
    tensors, documents = operands(own=True)
    names = ("query", "key", "value", "cu_q", "cu_k", "max_q", "max_k")
    return varlen(**dict(zip(names, (*tensors, *documents), strict=True)) | changes)


VARLEN_ERRORS = {
    "kind": ({"query": [1.0]}, TypeError, "varlen_attention(): argument 'query' must be Tensor, not list"),
    "dtypes": (
        {"key": draw(T_Q, 4, 6, dtype=torch.float32)},
        RuntimeError,
        "Expected query, key, and value to have the same dtype, but got query.dtype: double key.dtype: float",
    ),
    "dimensions": (
        {"query": draw(1, T_Q, 4, 6)},
        RuntimeError,
        "Expected query to have shape (T, H, D), but got (1, 15, 4, 6) instead.",
    ),
    "value_dimensions": (
        {"value": draw(T_Q, 5)},
        RuntimeError,
        "Expected value to have shape (T, Hkv, Dv), but got (15, 5) instead.",
    ),
    "head_size": (
        {"key": draw(T_Q, 4, 8)},
        RuntimeError,
        "same head size (last dimension), but got query.shape: (15, 4, 6) and key.shape: (15, 4, 8) instead.",
    ),
    "rows": (
        {"value": draw(T_Q + 1, 4, 5)},
        RuntimeError,
        "same number of rows (first dimension), but got key.shape: (15, 4, 6) and value.shape: (16, 4, 5) instead.",
    ),
    "heads": (
        {"key": draw(T_Q, 2, 6), "value": draw(T_Q, 2, 5)},
        RuntimeError,
        "equal numbers of heads, or one that broadcasts, but got 4, 2 and 2; enable_gqa=True allows fewer",
    ),
    "cu_kind": ({"cu_q": [0, 3]}, TypeError, "varlen_attention(): argument 'cu_q' must be Tensor, not list"),
    "cu_dtype": ({"cu_q": CU_Q.long()}, RuntimeError, "Expected cu_q to be int32, but got long int instead."),
    "cu_shape": (
        {"cu_k": CU_Q.view(1, -1)},
        RuntimeError,
        "Expected cu_k to have shape (documents + 1,), but got (1, 5) instead.",
    ),
    "cu_empty": (
        {"cu_k": CU_Q[:0]},
        RuntimeError,
        "Expected cu_k to have shape (documents + 1,), but got (0,) instead",
    ),
    "cu_sizes": (
        {"cu_k": CU_Q[:-1]},
        RuntimeError,
        "Expected cu_q and cu_k to tell of equally many documents, but got cu_q.shape: (5,) and cu_k.shape: (4,)",
    ),
    "cu_device": (
        {"cu_q": CU_Q.to("meta")},
        RuntimeError,
        "Expected cu_q to be on the query's device cpu, but got meta instead.",
    ),
    "max_q": ({"max_q": -1}, RuntimeError, "Expected max_q to be 0 or more, but got -1."),
    "max_k": ({"max_k": CU_K[-1]}, TypeError, "varlen_attention(): argument 'max_k' must be int, not Tensor"),
    "tensor_mask": (
        {"attn_mask": torch.ones(1, dtype=torch.bool)},
        TypeError,
        "varlen_attention(): attn_mask must be a sdpa.Mask or None, not Tensor",
    ),
    "segments": (
        {"attn_mask": Mask(segments=torch.zeros(T_Q, dtype=torch.int32), bias=draw(T_Q))},
        RuntimeError,
        "Expected a Mask of causal, align, window, query_lengths, prefix, alibi and lengths in varlen_attention, but "
        "got one with segments and bias.",
    ),
    "causal_twice": (
        {"attn_mask": Mask(window=(1, 1)), "is_causal": True},
        RuntimeError,
        "Explicit attn_mask should not be set when is_causal=True",
    ),
    "lengths": (
        {"attn_mask": Mask(lengths=int32(1, 2))},
        RuntimeError,
        "Expected lengths to have shape (4,) or (1,) or (), but got (2,) instead.",
    ),
    "is_causal": ({"is_causal": 1}, TypeError, "varlen_attention(): argument 'is_causal' must be bool, not int"),
    "return_lse": ({"return_lse": 1}, TypeError, "varlen_attention(): argument 'return_lse' must be bool, not int"),
    "dropout": ({"dropout_p": 2.0}, RuntimeError, "dropout probability has to be between 0 and 1, but got 2.0"),
    "sinks": ({"sinks": draw(3)}, RuntimeError, "Expected sinks to have shape (4,), but got (3,) instead."),
    "kernel": ({"kernel": "fastest"}, ValueError, "unknown kernel or backend 'fastest'"),
}


@pytest.mark.parametrize("name", VARLEN_ERRORS)
def test_errors_say_what_was_expected_and_what_was_got(name):
    changes, error, text = VARLEN_ERRORS[name]
    with pytest.raises(error) as caught:
        call_varlen(**changes)
    assert text in str(caught.value) and "\n" not in str(caught.value)
