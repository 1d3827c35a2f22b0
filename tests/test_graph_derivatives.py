"""Derivatives that are taken of a graph: by torch.compile, by torch.func inside of it, of what torch.export wrote."""

from __future__ import annotations

import pytest
import torch

import sdpa
import sdpa.nn
from sdpa import Mask, inductor
from sdpa import scaled_dot_product_attention as attention

SHAPE = (2, 2, 8, 16)  # B, H, M = N, D
TRANSFORMS = {
    "grad": torch.func.grad,
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.tensor(1.5)),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),)),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "grad of grad": lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum()),
    "hessian": torch.func.hessian,
}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"attn_mask": Mask(window=(2, 1))},
    "softcap": {"softcap": 2.0},
}


def loss_of(k, v, **options):
    return lambda q: attention(q, k, v, **options).square().sum()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_inside_a_compiled_function(transform, options):
    q, k, v = (torch.randn(1, 1, 5, 4) for _ in range(3))
    function = transform(loss_of(k, v, **options))
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(got, function(q), atol=1e-5, rtol=1e-5)


def test_a_compiled_transform_by_differences():
    """Against what no derivative of ours has made."""
    q, k, v, step = (torch.randn(1, 1, 5, 4, dtype=torch.float64) for _ in range(4))
    loss = loss_of(k, v)
    grad = torch.compile(torch.func.grad(loss), backend="aot_eager", fullgraph=True)(q)
    slope = (loss(q + 1e-6 * step) - loss(q - 1e-6 * step)) / 2e-6
    assert torch.allclose((grad * step).sum(), slope, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"dropout_p": 0.0, "return_lse": True}], ids=str)
def test_compiled_gradients_of_samples(options):
    """vmap of grad, of mapped queries and common keys."""
    samples, (k, v) = torch.randn(3, *SHAPE), torch.randn(2, *SHAPE)

    def loss(q):
        results = attention(q, k, v, **options)
        return results[0].sum() + results[1].square().sum() if "return_lse" in options else results.square().sum()

    function = torch.vmap(torch.func.grad(loss))
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(samples)
    assert torch.allclose(got, torch.stack([torch.func.grad(loss)(q) for q in samples]), atol=1e-5)


@pytest.mark.parametrize("learning", [True, False])
def test_a_compiled_vmap_asks_a_kernel_once(learning, recwarn):
    """The mapped dimension is part of the batch; torch's way is a call per sample, and a warning."""
    samples, (k, v) = torch.randn(3, *SHAPE), torch.randn(2, *SHAPE)
    function = torch.vmap(lambda q: attention(q, k, v, is_causal=True))
    with torch.set_grad_enabled(learning):
        got = torch.compile(function, backend="aot_eager", fullgraph=True)(samples)
    assert torch.allclose(got, function(samples), atol=1e-6)
    assert not any("batching rule" in str(warning.message) for warning in recwarn)


class Model(torch.nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.qkv, self.options = torch.nn.Linear(16, 48), options

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return attention(q, k, v, **self.options)


def gradients(model, *args):
    model.zero_grad()
    model(*args).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_learn(options, strict):
    model, x = Model(**options), torch.randn(2, 8, 16)
    program = torch.export.export(model, (x,), strict=strict)
    torch.testing.assert_close(gradients(program.module(), x), gradients(model, x))


@pytest.mark.parametrize("need_weights", [False, True])
def test_exported_layers_learn(need_weights):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = sdpa.nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            out, weights = self.attention(x, x, x, need_weights=need_weights)
            return out if weights is None else torch.cat([out.flatten(), weights.flatten()])

    model, x = Layer(), torch.randn(2, 8, 16)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(gradients(program.module(), x), gradients(model, x))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_a_compiled_transform_of_a_layer(need_weights, transform):
    layer, x = sdpa.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 8, 16)

    def loss(x):
        out, weights = layer(x, x, x, need_weights=need_weights)
        return out.square().sum() + (0.0 if weights is None else weights.square().sum())

    function = TRANSFORMS[transform](loss)
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, function(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_operator_learns_by_itself(options):
    """As it stands in an exported program, called from Python."""
    q, k, v = (torch.randn(SHAPE, requires_grad=True) for _ in range(3))
    got = torch.autograd.grad(torch.compile(attention, backend="eager")(q, k, v, **options).square().sum(), (q, k, v))
    wanted = torch.autograd.grad(attention(q, k, v, **options).square().sum(), (q, k, v))
    torch.testing.assert_close(got, wanted)


def test_generated_training_code_calls_functions_past_the_dispatcher():
    from torch._inductor.utils import run_fw_bw_and_get_code

    tensors = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, is_causal=True) * 2, fullgraph=True)
    _, codes = run_fw_bw_and_get_code(lambda: compiled(*tensors))
    forward, backward = codes
    assert inductor.NAMES["attention_forward.learning"] in forward
    assert inductor.NAMES["attention_backward.plain"] in backward
    got = [tensor.grad.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    (attention(*tensors, is_causal=True) * 2).sum().backward()
    torch.testing.assert_close(got, [tensor.grad for tensor in tensors])


def test_generated_code_with_masks_calls_functions_past_the_dispatcher():
    from torch._inductor.utils import run_fw_bw_and_get_code

    tensors, lengths = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)], torch.tensor([3, 8])
    compiled = torch.compile(lambda *t: attention(*t, attn_mask=Mask(lengths=lengths)) * 2, fullgraph=True)
    _, (forward, backward) = run_fw_bw_and_get_code(lambda: compiled(*tensors))
    assert inductor.NAMES["attention_forward.default"] in forward
    assert inductor.NAMES["attention_backward.default"] in backward
