"""Context parallelism: a call in parts of a sequence is that of one process, in every mode."""

from __future__ import annotations

import context_bits_cases as bits
import context_cases as cases
import pytest
import torch
from ranks import run

import sdpa
from sdpa.distributed import context_parallel


@pytest.mark.parametrize("world", [2, 4])
def test_every_mode(world):
    """Parts of the sequence of one length, and of several; in the order of ranks, and so that ranks have equal work."""
    run(world, cases.every_mode, world)


@pytest.mark.parametrize("world", [2, 4])
def test_dropout(world):
    run(world, bits.dropping, world)


def test_dropout_of_blocks():
    run(2, bits.dropping_blocks)


def test_mistakes_of_one_rank_and_of_all():
    run(2, cases.told_on_every_rank)


def test_gathered_keys_give_the_same_bits():
    run(2, bits.exact_rows)


def test_gathered_keys_give_the_same_bits_beside_options():
    run(2, bits.exact_calls)


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


def test_parts_that_are_odd_or_empty():
    run(2, cases.odd_parts)


def test_two_dimensions_with_empty_parts():
    run(4, cases.uneven_hybrid)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_rank_on_nccl():
    run(1, cases.on_one_gpu, backend="nccl")


def test_misuse():
    run(2, cases.misuse)


def test_the_package_is_found():
    assert sdpa.distributed.context_parallel is context_parallel
