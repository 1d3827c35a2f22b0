"""Attention written out, and a backend that runs our pass on it: what the tests of sdpa.patterns share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sdpa.patterns import hook

B, H, M, N, D = 2, 4, 9, 11, 16
SCALE = D**-0.5
INF = float("inf")
TORCHS = F.scaled_dot_product_attention
OURS = torch.ops.sdpa.attention_forward.default


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(dtype=torch.float32, learn=True, heads=H, rows=M, keys=N):
    shapes = (B, H, rows, D), (B, heads, keys, D), (B, heads, keys, D)
    return [draw(*shape, dtype=dtype, seed=seed).requires_grad_(learn) for seed, shape in enumerate(shapes)]


class Graphs:
    """A backend of torch.compile that runs the pass on each graph and then the graph itself, operation by operation."""

    def __init__(self):
        self.replaced, self.graphs = 0, []

    def __call__(self, module, inputs):
        self.replaced += hook.replace(module.graph)
        self.graphs.append(module.graph)
        module.recompile()
        return module

    @property
    def targets(self):
        return [node.target for graph in self.graphs for node in graph.nodes]


def results(function, args, learned):
    """(the output, the gradients of what is learned) of a loss that weighs every number of the output by another."""
    out = function(*args)
    upstream = draw(*out.shape, dtype=out.dtype, seed=9)
    return out, *torch.autograd.grad(out, learned, upstream)


def wide(args):
    return [t.detach().double().requires_grad_(t.requires_grad) if torch.is_tensor(t) and t.is_floating_point() else t
            for t in args]  # fmt: skip


def same(function, args, expected=1):
    """The function with our attention is no further from the truth than as it is written; returns the graphs."""
    graphs = Graphs()
    learned = [t for t in args if torch.is_tensor(t) and t.requires_grad]
    written = results(function, args, learned)
    found = results(torch.compile(function, backend=graphs, fullgraph=True), args, learned)
    assert graphs.replaced == expected
    assert graphs.targets.count(OURS) == expected
    exact = wide(args)
    truth = results(function, exact, [t for t in exact if torch.is_tensor(t) and t.requires_grad])
    assert found[0].stride() == written[0].stride()
    for ours, theirs, true in zip(found, written, truth, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        rounding = torch.finfo(ours.dtype).eps * true.abs().max()
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + 2 * rounding
    return graphs


def left(function, args):
    """The graph stays as it was, node by node, but for what nobody reads."""
    graphs = Graphs()
    expected = function(*args)
    torch.testing.assert_close(torch.compile(function, backend=graphs)(*args), expected)
    assert graphs.replaced == 0 and OURS not in graphs.targets
    return graphs


def times(q, k, v):
    return (torch.matmul(q, k.transpose(-2, -1)) * SCALE).softmax(dim=-1) @ v


def before(q, k, v):
    return F.softmax(torch.matmul(q * SCALE, k.permute(0, 1, 3, 2)), dim=3).matmul(v)


def inside(tensors):
    """The same numbers as (B, M, H, D) in memory."""
    return [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(t.requires_grad) for t in tensors]


def scored(q, k):
    return q @ k.transpose(-2, -1) * SCALE


def filled(q, k, v, mask):
    return scored(q, k).masked_fill(mask, -INF).softmax(-1) @ v


def kept_where(q, k, v, mask):
    return torch.where(~mask, scored(q, k), -INF).softmax(-1) @ v


def hidden(shape):
    """Some keys of every row are hidden, never all."""
    mask = draw(*shape, seed=5) > 0.3
    mask[..., 0] = False
    return mask


def model(x, weight, mask):
    """An encoder's attention, with the projection around it."""
    q, k, v = F.linear(x, weight).view(B, M, 3, H, D).permute(2, 0, 3, 1, 4)
    weights = F.softmax(q @ k.transpose(-2, -1) * SCALE + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2).reshape(B, M, H * D)
