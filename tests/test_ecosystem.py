"""What torch's tools make of our calls: counters, profilers, compiled autograd, a patch inside of compiled code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import sdpa
from helpers import CLOSE, draw, operands
from sdpa import Mask, nn

attention = sdpa.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("own", [False, True], ids=["cross", "self"])
def test_flops_of_packed_documents_are_those_of_each(own):
    """On a device whose kernels take packed rows in another form."""
    tensors, documents = operands(own)
    with FlopCounterMode(display=False) as counter:
        sdpa.varlen_attention(*tensors, *documents).sum().backward()
    lengths = (5, 0, 1, 7), (5, 0, 1, 7) if own else (3, 4, 0, 9)
    pairs = 4 * sum(M * N for M, N in zip(*lengths, strict=True))
    assert counter.get_total_flops() == 2 * pairs * (6 + 5) + 2 * pairs * (3 * 6 + 2 * 5)


def test_flops_of_segments_shared_by_a_batch():
    q = draw(3, 2, 5, 8)
    with FlopCounterMode(display=False) as counter:
        attention(q, q, q, Mask(segments=torch.tensor([7, 7, 0, 0, 0])))
    assert counter.get_total_flops() == 2 * 3 * 2 * (4 + 9) * (8 + 8)


def test_profiler_names_the_composition():
    q = draw(1, 2, 5, 8).requires_grad_()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        attention(q, q, q, kernel="math").sum().backward()
    names = {event.name for event in profiler.events()}
    assert "sdpa::math_forward" in names and "sdpa::math_backward" in names


@pytest.mark.parametrize("average", [False, True])
def test_compiled_autograd_of_weights(average):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)

    def gradients(x):
        x = x.detach().requires_grad_()
        out, weights = module(x, x, x, average_attn_weights=average)
        (out.square().sum() + weights.square().sum()).backward()
        return x.grad

    x = draw(2, 5, 8)
    want = gradients(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        torch.testing.assert_close(gradients(x), want, **CLOSE)


def inside(q):
    with sdpa.patch():
        patched = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return patched + F.scaled_dot_product_attention(q, q, q)


@sdpa.patch()
def decorated(q):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.parametrize("function", [inside, decorated])
def test_patch_inside_of_compiled_code(function):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    q = draw(2, 3, 5, 8)
    got = torch.compile(function, fullgraph=True, backend=backend)(q)
    torch.testing.assert_close(got, function(q), **CLOSE)
    names = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("sdpa.attention_forward" in name for name in names) == 1
    assert sum("scaled_dot_product_attention" in name for name in names) == (function is inside)
    assert F.scaled_dot_product_attention is not attention
