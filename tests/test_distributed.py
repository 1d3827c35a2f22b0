"""DTensors: a call on sharded tensors is the call on whole ones, and stays sharded by batch entries and heads."""

from __future__ import annotations

import distributed_cases as cases
import pytest
from ranks import run

ALL = tuple(cases.MASKS)


@pytest.mark.parametrize("way", ["batch", "heads", "", "sequence"])
def test_every_mask(way):
    """Two ranks; heads that share keys. Sharded along the sequence, tensors are gathered, which is told once."""
    run(2, cases.dense, (2,), ALL, (4, 2), [way])


def test_two_dimensions():
    run(4, cases.dense, (2, 2), ("causal", "lengths", "alibi", "bias"), (4, 2), ["batch", "heads"])


def test_heads_that_do_not_divide():
    run(2, cases.uneven)


def test_every_function():
    run(2, cases.beyond)


def test_gradients_of_packed_documents():
    run(2, cases.documents)


def test_layers_in_data_parallel():
    run(2, cases.modules)


def test_edges_of_dtensors():
    run(2, cases.edges)
