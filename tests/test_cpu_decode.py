"""The native CPU kernel with few queries: keys and values in place, and shared by threads where heads are few."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import DTYPES, Case, Sizes, check_forward, coins, lengths, make, random, run_forward
from torch import Tensor

from sdpa.kernels.cpu import library

if library.load_error() is not None:
    pytest.skip(library.load_error(), allow_module_level=True)

BFLOAT16_AND_FLOAT32 = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@BFLOAT16_AND_FLOAT32
@pytest.mark.parametrize("Dv", [16, 32, 48, 80, 96, 112, 128, 144, 208, 256])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8])
def test_rows_and_widths(isa, dtype, Dv, rows):
    """Each is another cut into tiles; lengths of keys end blocks, pairs and what is asked for ahead at other places."""
    for N in (1, 2, 33, 130, 257):
        check_forward(make(Case(Sizes(1, rows, 1, 1, N, 72, Dv)), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [1, 8, 12])
def test_values_of_no_width(isa, dtype, M):
    """There is nothing to write but the log-sum-exp."""
    inputs = make(Case(Sizes(1, 2, 2, M, 300, 64, 0)), dtype)
    results = run_forward(inputs)
    assert results.out.shape == (1, 2, M, 0)
    wanted = torch.logsumexp(inputs.q.double() @ inputs.k.double().mT / 8, -1)
    torch.testing.assert_close(results.lse.double(), wanted, rtol=1e-6, atol=1e-6)


def segments(length: int, run: int) -> Tensor:
    """Ids [1, length] of documents of `run` positions."""
    return (torch.arange(length) // run).int()[None]


FEATURES = {
    "plain": lambda N: {},
    "causal": lambda N: {"right": 0, "bottom_right": True},
    "window": lambda N: {"left": 700, "right": 0, "bottom_right": True},
    "lengths": lambda N: {"k_lengths": lengths(N - 77), "right": 0, "bottom_right": True},
    "no_keys": lambda N: {"k_lengths": lengths(0)},
    "first_keys": lambda N: {"k_lengths": lengths(9)},
    "sinks": lambda N: {"sinks": random(4)},
    "bias": lambda N: {"bias": random(1, 4, 2, N)},
    "hidden_parts": lambda N: {"allowed": (torch.arange(N) // 600 % 2 == 1)[None, None, None]},
    "scattered": lambda N: {"allowed": coins(1, 4, 2, N)},
    "dropout": lambda N: {"dropout_p": 0.3, "rng": torch.tensor([9, 2**33 + 1])},
    "alibi_softcap": lambda N: {"alibi": torch.rand(1, 4) / 50, "softcap": 3.0},
    "documents": lambda N: {"q_segments": segments(2, 2000), "k_segments": segments(N, 500)},
    "shuffled": lambda N: {"q_segments": segments(2, 1), "k_segments": torch.randint(0, 3, (1, N), dtype=torch.int32)},
    "prefix": lambda N: {"left": 300, "right": 0, "bottom_right": True, "prefix": lengths(700)},
}


@BFLOAT16_AND_FLOAT32
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_keys_of_one_head(isa, threads_restored, dtype, name, threads):
    """Blocks of more keys than are packed at once; with threads, a part for each of them."""
    torch.manual_seed(2)
    N = 2600
    torch.set_num_threads(threads)
    check_forward(make(Case(Sizes(1, 4, 1, 2, N, 64, 48), FEATURES[name](N)), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "N"), [(1, 9000), (40, 1700)])
def test_parts_are_told_by_their_rounding(isa, threads_restored, dtype, M, N):
    """Of keys in place and of packed ones. Sums in parts are other sums: were they equal to the last bit, threads would
    not have shared the keys."""
    inputs = make(Case(Sizes(1, 2, 1, M, N, 64, 48), {"right": 0, "bottom_right": True}), dtype)
    torch.set_num_threads(1)
    alone = run_forward(inputs)
    torch.set_num_threads(3)
    first, second = run_forward(inputs), run_forward(inputs)
    assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)
    assert dtype.itemsize == 2 or not torch.equal(first.out, alone.out), "half precisions may hide it"
    check_forward(inputs)


def poisoned(values: Tensor, position: int, value: float) -> Tensor:
    values = values.clone()
    values[:, :, position] = value
    return values


@BFLOAT16_AND_FLOAT32
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("threads", [1, 4])
def test_values_that_a_diagonal_hides(isa, threads_restored, dtype, value, threads):
    """The last keys are hidden from the first queries, whose results they may not reach, and from nobody else."""
    torch.set_num_threads(threads)
    inputs = make(Case(Sizes(1, 1, 1, 5, 2200, 64, 64), {"right": 0, "bottom_right": True}), dtype)
    clean = run_forward(inputs).out
    found = run_forward(inputs._replace(v=poisoned(inputs.v, 2197, value))).out
    torch.testing.assert_close(found[:, :, :2], clean[:, :, :2], rtol=2.0**-7, atol=2.0**-7)
    assert not found[:, :, 2:].isfinite().any()


@BFLOAT16_AND_FLOAT32
@pytest.mark.parametrize("position", [3, 1100, 2199])
def test_not_a_number_in_a_part(isa, threads_restored, dtype, position):
    torch.set_num_threads(4)
    inputs = make(Case(Sizes(1, 2, 1, 2, 2200, 64, 64)), dtype)
    assert run_forward(inputs._replace(k=poisoned(inputs.k, position, torch.nan))).out.isnan().all()
    assert run_forward(inputs._replace(v=poisoned(inputs.v, position, torch.nan))).out.isnan().all()


def test_large_scores_in_one_part(isa, threads_restored):
    """What the other parts came to is worth nothing beside it."""
    torch.set_num_threads(4)
    inputs = make(Case(Sizes(1, 1, 1, 3, 2200, 64, 64)), torch.float32)
    k = inputs.k.clone()
    k[:, :, 1500] *= 1e4
    check_forward(inputs._replace(k=k, q=inputs.q.abs()))
