"""Attention as torch's own operations: decomposed(), its table, and the tracers that ask for it by themselves."""

from __future__ import annotations

import contextvars
import threading
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacfwd, jacrev

import sdpa
from helpers import CLOSE, draw, operands
from sdpa import Mask, nn, packing, sdpa_kernel
from sdpa.decomposed import is_decomposed

attention = sdpa.scaled_dot_product_attention
B, H, M, N, D = 2, 4, 5, 7, 8
SINKS, BIAS, ALLOWED = draw(H), draw(M, N), draw(B, 1, M, N) > -0.5
CALLS = {
    "plain": attention,
    "causal": lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.3),
    "allowed": lambda q, k, v: attention(q, k, v, ALLOWED),
    "bias": lambda q, k, v: attention(q, k, v, BIAS),
    "groups": lambda q, k, v: attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "mask": lambda q, k, v: attention(q, k, v, Mask(causal=True, align="bottom_right", window=(3, 0))),
    "lengths": lambda q, k, v: attention(q, k, v, Mask(lengths=torch.tensor([2, 7]))),
    "both": lambda q, k, v: attention(q, k, v, Mask(causal=True) & BIAS),
    "features": lambda q, k, v: attention(q, k, v, softcap=2.0, sinks=SINKS),
    "lse": lambda q, k, v: attention(q, k, v, return_lse=True)[1],
    "rank_3": lambda q, k, v: attention(q[0], k[0], v[0]),
    "rank_5": lambda q, k, v: attention(q[None], k[None], v[None]),
    "twice": lambda q, k, v: attention(q, k, attention(k, k, v)),
}


class Calling(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.linear = torch.nn.Linear(D, D, dtype=torch.float64)

    def forward(self, q, k, v):
        return self.call(self.linear(q), k, v)


@pytest.fixture
def qkv():
    return draw(B, H, M, D), draw(B, H, N, D, seed=1), draw(B, H, N, D, seed=2)


def module_of(name):
    torch.manual_seed(0)
    return Calling(CALLS[name])


def targets(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def learned(function, *tensors):
    tensors = [t.detach().requires_grad_() for t in tensors]
    out = function(*tensors)
    return [out, *torch.autograd.grad(out.square().sum(), tensors, materialize_grads=True)]


@pytest.mark.parametrize("name", CALLS)
def test_eager_gives_the_same(name, qkv):
    call = CALLS[name]
    for _ in range(2):  # a call that the memory knows
        want = learned(call, *qkv)
    with sdpa.decomposed():
        before = sdpa.last_choice()
        got = learned(call, *qkv)
        assert sdpa.last_choice() is before
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert torch.equal(call(*qkv), learned(call, *qkv)[0])


ORDERS = {
    "forward, forward, reverse": lambda f: jacfwd(jacfwd(jacrev(f))),
    "forward, reverse, forward": lambda f: jacfwd(jacrev(jacfwd(f))),
    "reverse, forward, forward": lambda f: jacrev(jacfwd(jacfwd(f))),
    "reverse": lambda f: jacrev(jacrev(jacrev(f))),
}


@pytest.mark.parametrize("third", ORDERS.values(), ids=ORDERS)
def test_derivatives_of_third_order(third, qkv):
    """With kernels and without, beside attention written out."""
    q = qkv[0][0, 0, :3, :2]

    def written(q):
        scores = (q @ q.mT / 2**0.5).masked_fill(torch.ones(3, 3).triu(1) > 0, -torch.inf)
        return (scores.softmax(-1) @ q).sum()

    def called(q):
        return attention(q, q, q, is_causal=True).sum()

    want = third(written)(q)
    torch.testing.assert_close(third(called)(q), want)
    with sdpa.decomposed():
        torch.testing.assert_close(third(called)(q), want)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("name", CALLS)
def test_export_holds_torchs_operations(name, strict, qkv):
    module = module_of(name)
    with sdpa.decomposed():
        program = torch.export.export(module, qkv, strict=strict)
    names = targets(program)
    assert not any("sdpa" in target for target in names)
    simple = name in ("plain", "causal", "allowed", "bias", "groups", "rank_3", "rank_5", "twice")
    assert ("aten.scaled_dot_product_attention.default" in names) == simple
    torch.testing.assert_close(program.module()(*qkv), module(*qkv), **CLOSE)


def test_block_inside_of_a_compiled_function(qkv):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(q, k, v):
        with sdpa.decomposed():
            inside = attention(q, k, v, Mask(causal=True))
        return inside, attention(q, k, v)

    torch.testing.assert_close(compiled(*qkv), (attention(*qkv, Mask(causal=True)), attention(*qkv)), **CLOSE)
    assert len([n for n in graphs[0].graph.nodes if "attention_forward" in str(n.target)]) == 1


def nodes(graph):
    return str([node.target for node in graph.graph.nodes])


def test_compiled_functions_do_not_depend_on_the_block_around(qkv):
    """Their graph outlives it. A graph that was compiled with a block inside changes no other."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def plain(q, k, v):
        return attention(q, k, v)

    def inside(q, k, v):
        with sdpa.decomposed(), sdpa_kernel("cpu_flash"):
            return attention(q, k, v)

    for function in (inside, plain, plain):
        torch.compiler.reset()
        with sdpa.decomposed():
            torch.compile(function, backend=backend, fullgraph=True)(*qkv)
    assert ["attention_forward" in nodes(graph) for graph in graphs] == [False, True, True]


def test_blocks_of_kernels_inside_and_outside(qkv):
    """Inside of decomposed() no kernel runs, also where a block of kernels is the innermost."""
    with sdpa_kernel("cpu_flash"), sdpa.decomposed(), sdpa_kernel("vendor_math"):
        before = sdpa.last_choice()
        attention(*qkv)
        assert sdpa.last_choice() is before
    with sdpa.decomposed(), sdpa_kernel("vendor_math"):
        pass
    with sdpa_kernel("vendor_math"):
        attention(*qkv)
        assert sdpa.last_choice().kernel.name == "vendor_math"


def test_a_block_left_in_another_context(qkv):
    def generator():
        with sdpa.decomposed():
            yield

    steps = generator()
    contextvars.copy_context().run(next, steps)
    steps.close()
    assert not is_decomposed()
    with sdpa.decomposed():
        assert is_decomposed()


@pytest.mark.parametrize("name", CALLS)
def test_table_rewrites_a_program(name, qkv):
    module = module_of(name)
    program = torch.export.export(module, qkv)
    assert any("sdpa" in target for target in targets(program))
    program = program.run_decompositions(sdpa.decomposition_table())
    assert not any("sdpa" in target for target in targets(program))
    torch.testing.assert_close(program.module()(*qkv), module(*qkv), **CLOSE)


def test_table_knows_every_overload():
    names = {str(operator) for operator in sdpa.decomposition_table()}
    held = set(torch.ops.sdpa.attention_forward.overloads())
    assert {f"sdpa.attention_forward.{name}" for name in held} <= names
    assert {"sdpa.attention_backward.default", "sdpa.attention_weights.default"} <= names


def test_table_rewrites_weights_and_packed_rows():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64)

        def forward(self, x, q, k, v, cu_q, cu_k):
            return *self.attention(x, x, x), sdpa.varlen_attention(q, k, v, cu_q, cu_k, 7, 9)

    tensors, (cu_q, cu_k, _, _) = operands()
    given = draw(B, M, D), *(t.detach() for t in tensors), cu_q, cu_k
    module = Both()
    program = torch.export.export(module, given).run_decompositions(sdpa.decomposition_table())
    assert not any("sdpa" in target for target in targets(program))
    for a, b in zip(program.module()(*given), module(*given), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


# Documents and pages: tensors, and a call of them.
ROWS = draw(8, H, D)
CU, CU_K = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 0, 6], dtype=torch.int32)
TABLE, LENGTHS = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([5, 7])
PLACED = {
    "mask": ((draw(B, H, M, D), CU), lambda q, cu: attention(q, q, q, Mask(cu_seqlens=cu))),
    "packed": ((ROWS, CU), lambda q, cu: sdpa.varlen_attention(q, q, q, cu, cu, 8, 8)),
    "apart": ((ROWS, CU, CU_K), lambda q, cu, cu_k: sdpa.varlen_attention(q, q, q, cu, cu_k, 8, 6)),
    "pages": ((draw(B, 1, H, D), draw(4, 4, H, D), TABLE, LENGTHS), lambda q, c, *p: sdpa.paged_attention(q, c, c, *p)),
}


def placed_module(name):
    class Placed(torch.nn.Module):
        def forward(self, *tensors):
            return PLACED[name][1](*tensors)

    return Placed(), PLACED[name][0]


@pytest.mark.parametrize("inside", [False, True], ids=["table", "inside"])
@pytest.mark.parametrize("name", PLACED)
def test_exported_documents_and_pages(name, inside):
    """No torch.searchsorted, which ONNX lacks, and the right numbers of other documents than those of the export."""
    module, tensors = placed_module(name)
    with sdpa.decomposed() if inside else nullcontext():
        program = torch.export.export(module, tensors)
    if not inside:
        program = program.run_decompositions(sdpa.decomposition_table())
    assert not any("sdpa" in target or "searchsorted" in target for target in targets(program))
    for given in (tensors, tuple(t if t.is_floating_point() else (t - 1).clamp(min=0) for t in tensors)):
        torch.testing.assert_close(program.module()(*given), module(*given), **CLOSE)


@pytest.mark.parametrize("cu", [[0], [3], [0, 1, 4], [0, 0, 0, 6], [-2, -1, 5], [2, 2, 9, 12]], ids=str)
@pytest.mark.parametrize("size", [0, 1, 6])
def test_marks_say_what_a_search_says(cu, size, monkeypatch):
    ends = torch.tensor(cu, dtype=torch.int32)
    searched = packing.ends_before(ends, size)
    monkeypatch.setattr(packing, "is_exporting", lambda: True)
    summed = packing.ends_before(ends, size)
    assert summed.dtype == searched.dtype == torch.int32
    assert summed.tolist() == searched.tolist() == [sum(end <= place for end in cu) for place in range(size)]


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="torch.onnx.export needs onnxscript")
@pytest.mark.parametrize("name", PLACED)
def test_onnx_has_documents_and_pages(name):
    runtime = pytest.importorskip("onnxruntime")
    module, tensors = placed_module(name)
    model = torch.onnx.export(module, tensors, dynamo=True, verbose=False).model_proto
    session = runtime.InferenceSession(model.SerializeToString())
    given = {one.name: tensor.numpy() for one, tensor in zip(session.get_inputs(), tensors, strict=True)}
    torch.testing.assert_close(torch.from_numpy(session.run(None, given)[0]), module(*tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("name", CALLS)
def test_jit_trace_keeps_gradients(name, inside, qkv):
    """Also where the memory of calls has the call, and for other sizes than those that were traced."""
    module = module_of(name)
    module(*qkv)
    if inside:
        with sdpa.decomposed():
            traced = torch.jit.trace(module, qkv)
    else:
        traced = torch.jit.trace(module, qkv)
    names = str(traced.inlined_graph)
    assert "sdpa::" not in names and "PythonOp" not in names and "^" not in names
    for a, b in zip(learned(traced, *qkv), learned(module, *qkv), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    if name not in ("allowed", "bias", "both", "lengths"):
        longer = [torch.cat([t, t], 2) for t in qkv]
        torch.testing.assert_close(traced(*longer), module(*longer), **CLOSE)


def test_jit_trace_keeps_a_window_wider_than_the_example(qkv):
    traced = torch.jit.trace(lambda q: attention(q, q, q, Mask(window=(20, 0), causal=True)), qkv[:1])
    longer = draw(1, 1, 40, D)
    torch.testing.assert_close(traced(longer), attention(longer, longer, longer, Mask(window=(20, 0), causal=True)))


def test_onnx_asks_for_it_by_itself(qkv, monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    program = torch.export.export(module_of("mask"), qkv, strict=False)  # what torch.onnx.export tries first
    assert not any("sdpa" in target for target in targets(program))


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="torch.onnx.export needs onnxscript")
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_onnx_export(need_weights, inside):
    runtime = pytest.importorskip("onnxruntime")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=need_weights)[: 1 + need_weights]

    x, model = draw(B, M, D, dtype=torch.float32), Model().eval()
    if inside:
        with sdpa.decomposed():
            exported = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    else:
        exported = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    session = runtime.InferenceSession(exported.model_proto.SerializeToString())
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for a, b in zip(found, model(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b, rtol=0, atol=1e-5)


def test_other_threads_keep_their_kernels(qkv):
    seen = []

    def other():
        attention(*qkv)
        seen.append(sdpa.last_choice().kernel.name)

    with sdpa.decomposed():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen and seen[0] != "math"


def test_nests_and_decorates(qkv):
    @sdpa.decomposed()
    def inner():
        return torch.fx.experimental.proxy_tensor.make_fx(lambda q: attention(q, q, q, Mask(causal=True)))(qkv[0])

    with sdpa.decomposed(), pytest.raises(ZeroDivisionError):
        inner()
        raise ZeroDivisionError
    assert "sdpa" not in str(inner().graph)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda q: attention(q, q, q, Mask(causal=True)))(qkv[0])
    assert "sdpa" in str(graph.graph)


def test_weights_dropout_and_nested_tensors():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64)
    x = draw(B, M, D)
    want = module(x, x, x)
    rows = torch.nested.nested_tensor([draw(3, H, D), draw(5, H, D)], layout=torch.jagged).transpose(1, 2)
    nested = attention(rows, rows, rows)
    with sdpa.decomposed():
        for a, b in zip(module(x, x, x), want, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        torch.testing.assert_close(attention(rows, rows, rows).values(), nested.values(), **CLOSE)
        assert attention(x[:, None], x[:, None], x[:, None], dropout_p=1.0).abs().max() == 0


def test_autocast_holds(qkv):
    q, k, v = (t.float() for t in qkv)
    with torch.autocast("cpu", torch.bfloat16), sdpa.decomposed():
        assert attention(q, k, v).dtype == torch.bfloat16


class Written(torch.nn.Module):
    """A model as others write it."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(D, D)

    def forward(self, x):
        q = self.linear(x)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.parametrize("tracer", [torch.fx.symbolic_trace, torch.jit.script], ids=["fx", "script"])
def test_patched_models_are_read_by(tracer):
    x, model = draw(B, H, M, D, dtype=torch.float32), Written()
    want = learned(model, x)
    with sdpa.patch():
        read = tracer(model)
        got = learned(read, x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(read(x), want[0])


def test_fx_sees_our_function_as_one_node(qkv):
    graph = torch.fx.symbolic_trace(lambda q, k, v: attention(q, k, v, Mask(causal=True), softcap=2.0))
    assert attention in [node.target for node in graph.graph.nodes]
    torch.testing.assert_close(graph(*qkv), attention(*qkv, Mask(causal=True), softcap=2.0))


def test_fx_makes_masks_of_proxies(qkv):
    graph = torch.fx.symbolic_trace(lambda q, k, v, lengths: attention(q, k, v, Mask(causal=True, lengths=lengths)))
    for lengths in (torch.tensor([2, 7]), torch.tensor([1, 4])):
        torch.testing.assert_close(graph(*qkv, lengths), attention(*qkv, Mask(causal=True, lengths=lengths)), **CLOSE)
    with pytest.raises(TypeError, match=r"Mask\.lengths must be an integer tensor"):
        Mask(lengths=3)


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_fx_is_told_what_to_do_with_our_modules(kind):
    with pytest.raises(TypeError, match=r"torch\.fx\.symbolic_trace cannot trace .* sdpa\.restore\(model\)"):
        torch.fx.symbolic_trace(kind(8, 2))


def test_patched_models_are_traced():
    x, model = draw(B, H, M, D, dtype=torch.float32), Written()
    want = learned(model, x)
    with sdpa.patch():
        model(x)
        traced = torch.jit.trace(model, x)
    for a, b in zip(learned(traced, x), want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["plain", "causal", "bias", "groups", "mask", "features", "rank_3"])
def test_functionalize(name, qkv):
    got = torch.func.functionalize(CALLS[name])(*qkv)
    torch.testing.assert_close(got, CALLS[name](*qkv), **CLOSE)
    gradient = torch.func.grad(lambda q, k, v: CALLS[name](q, k, v).square().sum(), argnums=(0, 1, 2))
    for a, b in zip(torch.func.functionalize(gradient)(*qkv), gradient(*qkv), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_jit_trace_holds_for_other_head_sizes():
    """The scale that depends on the head size is torch's to find."""
    q, wide = draw(2, 4, 5, 8), draw(2, 3, 6, 32)
    traced = torch.jit.trace(lambda x: attention(x, x, x, is_causal=True), q)
    torch.testing.assert_close(traced(wide), attention(wide, wide, wide, is_causal=True), **CLOSE)
