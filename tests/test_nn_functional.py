"""accelerate(model, functional=True) where something else runs or records the model: the compiler, checkpointing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import CLOSE, randn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.utils.checkpoint import checkpoint

import sdpa
import sdpa.nn


class Functional(torch.nn.Module):
    """Attention called as a function, and by a subclass of torch's module, which stays torch's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = type("Derived", (torch.nn.MultiheadAttention,), {})(8, 2, batch_first=True)

    def forward(self, x):
        x = self.attention(x, x, x, need_weights=False)[0].unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("learns", (True, False))
def test_a_compiled_model_with_functional_calls_is_one_graph(learns):
    model, x = Functional().requires_grad_(learns).train(learns), randn(3, 5, 8)
    wanted = model(x)
    assert list(sdpa.nn.accelerate(model, functional=True).left) == ["attention"]
    recorded = EagerAndRecordGraphs()
    compiled = torch.compile(model, backend=recorded, fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted, **CLOSE)
    torch.testing.assert_close(compiled(x + 0.0), wanted, **CLOSE)
    (graph,) = recorded.graphs
    called = [str(node.target) for module in graph.modules() for node in module.graph.nodes]
    assert sum("attention_forward" in name for name in called) == 2
    assert not any("scaled_dot_product" in name for name in called)


class Checkpointed(torch.nn.Module):
    """Attention with dropout, as a function and by a subclass of torch's module, run again in the backward."""

    def __init__(self, kind, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.attention = type("Derived", (torch.nn.MultiheadAttention,), {})(8, 2, dropout=0.5, batch_first=True)
        self.run = {"function": self.function, "module": self.module}[kind]
        self.use_reentrant = use_reentrant

    def function(self, x):
        x = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    def module(self, x):
        return self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", ["function", "module"])
def test_what_checkpointing_runs_again_is_the_same(kind, use_reentrant):
    """Dropout draws the same numbers in the forward and in the backward, which runs outside of the mode."""

    def learnt(model):
        torch.manual_seed(1)
        x = randn(3, 5, 8).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        return out.detach(), x.grad

    model = Checkpointed(kind, use_reentrant)
    wanted = learnt(model)
    sdpa.nn.accelerate(model, functional=True)
    for found, want in zip(learnt(model), wanted, strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("kind", ["function", "module"])
def test_dropout_that_is_not_on_is_no_reason(kind):
    model = Checkpointed(kind, True).eval()
    model.run = model.module if kind == "module" else lambda x: F.scaled_dot_product_attention(x, x, x)
    sdpa.nn.accelerate(model, functional=True)
    sdpa.scaled_dot_product_attention(*[torch.zeros(1, 1, 2, 4)] * 3, kernel="math")
    with torch.no_grad():
        model(randn(3, 5, 8))
    assert sdpa.last_choice().kernel.name != "math"
