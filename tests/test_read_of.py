"""The tensors of a call in the order of its fields, and inputs made of others: what a recorded call is given."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from recorded_calls import KINDS, inputs_of

from sdpa.problem import AttentionInputs, read_of, refill_of

EVERY = [*KINDS, "paged"]


@pytest.mark.parametrize("kind", EVERY)
def test_every_tensor_is_there_once_in_the_order_of_fields(kind):
    inputs = inputs_of(kind, 1)
    found = iter(read_of(inputs))
    seen = []
    for value in inputs:
        if isinstance(value, torch.Tensor) and not any(value is tensor for tensor in seen):
            assert next(found) is value
            seen.append(value)
    assert next(found, None) is None


@pytest.mark.parametrize("kind", EVERY)
def test_inputs_are_made_of_other_tensors(kind):
    first, second = (inputs_of(kind, seed) for seed in (1, 2))
    made = refill_of(first)(read_of(second))
    assert type(made) is AttentionInputs
    assert all(a is b or (not isinstance(b, torch.Tensor) and a == b) for a, b in zip(made, second, strict=True))


def test_a_tensor_that_two_fields_share_is_shared_again():
    first, second = (inputs_of("packed alike", seed) for seed in (1, 2))
    assert len(read_of(first)) == 4
    made = refill_of(first)(read_of(second))
    assert made.cu_q is made.cu_k is second.cu_q


def test_no_tensor_is_kept():
    inputs = inputs_of("everything", 1)
    refill, watched = refill_of(inputs), [weakref.ref(tensor) for tensor in read_of(inputs)]
    del inputs
    gc.collect()
    assert callable(refill) and not any(ref() is not None for ref in watched)
