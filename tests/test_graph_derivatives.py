"""Derivatives that are taken of a graph: by torch.compile, by torch.func inside of it, of what torch.export wrote."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad

import sdpa
import sdpa.nn
from sdpa import Mask, operators, torch_private
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


def operators_of(function, *args):
    """Our operators in the graph that a compiler gets after derivatives and maps are taken."""
    called = []

    def look(graph, _):
        called.extend(str(node.target) for node in graph.graph.nodes if "sdpa" in str(node.target))
        return graph

    out = torch.compile(function, backend=aot_autograd(fw_compiler=look), fullgraph=True)(*args)
    return out, called


@pytest.mark.parametrize("learning", [True, False])
def test_a_compiled_vmap_asks_a_kernel_once(learning):
    """The mapped dimension is part of the batch; torch's way is a call per sample."""
    samples, (k, v) = torch.randn(3, *SHAPE), torch.randn(2, *SHAPE)
    function = torch.vmap(lambda q: attention(q, k, v, is_causal=True))
    with torch.set_grad_enabled(learning):
        got, called = operators_of(function, samples)
    assert torch.allclose(got, function(samples), atol=1e-6)
    assert len(called) == 1


def test_a_compiled_vmap_with_weights():
    layer, samples = sdpa.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(3, 2, 8, 16)
    function = torch.vmap(lambda x: layer(x, x, x)[1])
    got, called = operators_of(function, samples)
    torch.testing.assert_close(got, function(samples))
    assert len(called) == 2, "the forward and the weights"


@pytest.mark.parametrize("name", ["jvp", "jacfwd", "grad"])
def test_transforms_under_no_grad(name):
    """Which switches off neither forward mode nor torch.func."""
    q, k, v = (torch.randn(1, 1, 5, 4) for _ in range(3))
    function = TRANSFORMS[name](loss_of(k, v))
    wanted = function(q)
    with torch.no_grad():
        got = torch.compile(function, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("learning", [True, False])
def test_tangents_around_a_compiled_function(learning):
    q, k, v, tangent = torch.randn(4, 1, 1, 5, 4)
    loss = loss_of(k, v)
    compiled = torch.compile(loss, backend="aot_eager")
    _, wanted = torch.func.jvp(loss, (q,), (tangent,))
    with torch.set_grad_enabled(learning), forward_ad.dual_level():
        got = forward_ad.unpack_dual(compiled(forward_ad.make_dual(q, tangent))).tangent
    torch.testing.assert_close(got, wanted)


def test_forward_mode_of_forward_mode():
    """Outside of a compiler: of operations of torch's, whose composition with math is the reference."""
    q, k, v, tangent = torch.randn(4, 1, 1, 5, 4, dtype=torch.float64)

    def written_out(q):
        return ((q @ k.mT / 2).softmax(-1) @ v).square().sum()

    def twice(loss):
        return torch.func.jvp(lambda x: torch.func.jvp(loss, (x,), (tangent,))[1], (q,), (tangent,))[1]

    torch.testing.assert_close(twice(loss_of(k, v)), twice(written_out))
    second = torch.func.jacfwd(torch.func.jacfwd(loss_of(k, v)))(q)
    torch.testing.assert_close(second, torch.func.jacfwd(torch.func.jacfwd(written_out))(q))


@pytest.mark.parametrize("dynamic", [False, True])
def test_forward_mode_in_a_graph_refuses_as_outside(dynamic):
    """A kernel asked for by name answers or raises, also where operations of torch's carry the tangents."""
    q, k, v = (torch.randn(1, 1, 5, 4) for _ in range(3))
    function = TRANSFORMS["jvp"](loss_of(k, v, kernel="cuda_flash"))
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)):
        with pytest.raises(RuntimeError, match="No available kernel"):
            call(q)
    function = TRANSFORMS["jvp"](loss_of(k, v, kernel="math"))
    got = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)(q)
    torch.testing.assert_close(got, function(q))


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


def test_programs_exported_under_no_grad_learn():
    model, x = Model(), torch.randn(2, 8, 16)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
    torch.testing.assert_close(gradients(program.module(), x), gradients(model, x))


def test_an_exported_program_without_tangents_asks_a_kernel():
    """Also where forward mode is on for others."""
    model, x = Model(), torch.randn(2, 8, 16)
    program = torch.export.export(model, (x,)).module()
    with torch.no_grad(), forward_ad.dual_level(), sdpa.sdpa_kernel("math"):
        program(x)
        assert sdpa.last_choice().kernel.family == "math"
    with torch.no_grad(), forward_ad.dual_level(), sdpa.sdpa_kernel("cpu_flash"):
        program(x)
        assert sdpa.last_choice().kernel.name == "cpu_flash"


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


def generated(operator: str) -> str:
    """What generated code calls: an operator's function, or the operator where torch (2.10) has no hook for that."""
    return f"torch.ops.sdpa.{operator if find_spec(torch_private.CODEGEN) is None else operators.GENERATED[operator]}"


def test_generated_training_code_calls_functions_past_the_dispatcher():
    from torch._inductor.utils import run_fw_bw_and_get_code

    tensors = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, is_causal=True) * 2, fullgraph=True)
    _, codes = run_fw_bw_and_get_code(lambda: compiled(*tensors))
    forward, backward = codes
    assert generated("attention_forward") in forward
    assert generated("attention_backward") in backward
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
    assert generated("attention_forward") in forward
    assert generated("attention_backward") in backward
