"""A backward like one before is recognised in C++, with the gradients of the first time, where nothing differs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as torch_kernel

import sdpa
from sdpa import derivatives, repeated
from sdpa.dispatch.caches import clear_caches

pytestmark = pytest.mark.skipif(not repeated.BUILT, reason="sdpa/repeated was not built: no Python.h")
ROWS = 5


@pytest.fixture
def found(monkeypatch):
    """What the backwards of a test were recognised as, one after the other, where no call was known before."""
    clear_caches()
    answers = []
    recognise = derivatives.recognise_backward
    monkeypatch.setattr(
        derivatives, "recognise_backward", lambda *asked: answers.append(recognise(*asked)) or answers[-1]
    )
    return answers


def draw(*shape):
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("learns", [False, True], ids=["given", "learned"])
@pytest.mark.parametrize("shape", [None, (1, 3, ROWS, ROWS), (1, 3, ROWS, 1)], ids=str)
def test_gradients_of_the_first_time_again(shape, learns, found):
    """A learned bias of one column is left to Python: its gradient is a sum over keys of what torch computes."""
    q, k, v = (draw(2, 3, ROWS, 8) for _ in range(3))
    bias = None if shape is None else draw(*shape).requires_grad_(learns)
    learned = [] if bias is None or not learns else [bias]
    leaves, up = (q, k, v, *learned), torch.randn(2, 3, ROWS, 8)

    def gradients():
        return torch.autograd.grad(sdpa.scaled_dot_product_attention(q, k, v, bias), leaves, up)

    first = gradients()
    for _ in range(3):
        torch.testing.assert_close(gradients(), first, rtol=0, atol=0)
    sums = learned and shape[3] == 1
    assert [one is not None for one in found] == ([] if sums else [False, True, True, True])
    if not sums:
        beside = [] if bias is None else [not learned]
        assert [gradient is None for gradient in found[-1]] == [True, False, False, False, *beside]


def test_a_gradient_that_is_differentiated_takes_another_way(found):
    q, k, v = (draw(2, 3, ROWS, 8) for _ in range(3))
    for graph in (False, False, True, False):
        out = sdpa.scaled_dot_product_attention(q, k, v)
        grad = torch.autograd.grad(out.sum(), q, create_graph=graph)[0]
        assert grad.requires_grad == graph
    assert [one is not None for one in found] == [False, True, False, True]


def test_the_gradient_of_the_log_sum_exp_makes_it_another_backward(found):
    q, k, v = (draw(2, 3, ROWS, 8) for _ in range(3))
    for with_lse in (False, True, True, False):
        out, lse = sdpa.scaled_dot_product_attention(q, k, v, return_lse=True)
        got = torch.autograd.grad(out.sum() + lse.sum() if with_lse else out.sum(), (q, k, v))
        wanted = sdpa.scaled_dot_product_attention(q, k, v, return_lse=True, kernel="math")
        total = wanted[0].sum() + wanted[1].sum() if with_lse else wanted[0].sum()
        torch.testing.assert_close(got, torch.autograd.grad(total, (q, k, v)))
        found.pop()  # that of math
    assert [one is not None for one in found] == [False, False, True, True]


def test_switches_make_it_another_backward(found):
    """What a backward's kernel depends on beside its tensors: torch's switches, and its deterministic mode."""
    q, k, v = (draw(1, 2, 4, 8) for _ in range(3))

    def learn(switches=None):
        for _ in range(3):
            out = sdpa.scaled_dot_product_attention(q, k, v)
            with torch_kernel(switches) if switches else nullcontext():
                torch.autograd.grad(out.sum(), (q, k, v))

    learn()
    learn(SDPBackend.MATH)
    torch.use_deterministic_algorithms(True)
    try:
        learn()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [one is not None for one in found] == [False, True, True] * 3
