"""DTensors: a call on sharded tensors is the call on whole ones, and stays sharded by batch entries and heads."""

from __future__ import annotations

import distributed_cases as cases
import pytest
from ranks import run

import sdpa
from sdpa.distributed import context_parallel

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


@pytest.mark.parametrize("world", [2, 4])
def test_every_mode(world):
    """Parts of the sequence of one length, and of several; in the order of ranks, and so that ranks have equal work."""
    run(world, cases.every_mode, world)


def test_gathered_keys_give_the_same_bits():
    run(2, cases.exact_rows)


def test_ulysses_elsewhere():
    run(2, cases.ulysses_elsewhere)


def test_models_in_parts():
    pytest.importorskip("transformers")
    run(2, cases.models)


def test_training_in_parts():
    run(2, cases.training)


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_a_rank_that_is_gone(mode):
    run(2, cases.alone, mode)


def test_bytes_that_a_rank_sends():
    run(4, cases.volume)


def test_edges_of_ulysses():
    run(2, cases.ulysses_edges)


def test_edges_of_dtensors():
    run(2, cases.edges)


def test_the_package_is_found():
    assert sdpa.distributed.context_parallel is context_parallel
