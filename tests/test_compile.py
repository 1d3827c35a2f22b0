"""The operators under torch's compiler: opcheck, compile, export, FLOP counting, selective checkpointing."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import sdpa
from sdpa import Mask, operators, torch_private
from sdpa.dispatch.catalog import by_name
from sdpa.operators import BACKWARD, FORWARD, backward_arguments, call_forward, forward_arguments
from sdpa.problem import AttentionInputs, Results
from sdpa.testing import Case, Draw, make_inputs

attention = sdpa.scaled_dot_product_attention
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(B=2, H=4, M=16, N=16, D=8, requires_grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, M, D), (B, H, N, D), (B, H, N, D))
    return [torch.randn(*shape, generator=generator).requires_grad_(requires_grad) for shape in shapes]


OPERATOR_CASES = {
    "plain": Case(M=5, N=7, D=8, Dv=6),
    "causal_groups": Case(M=5, N=7, D=8, Dv=8, Hkv=2, mask="causal"),
    "rows_outside": Case(M=5, N=7, D=8, Dv=8, layout="bmhd"),
    "bias": Case(M=5, N=7, D=8, Dv=8, mask="bias", requires_bias_grad=True),
    "lengths_sinks": Case(M=5, N=7, D=8, Dv=8, mask="lengths", sinks=True, softcap=2.0),
    "allowed_dropout": Case(M=5, N=7, D=8, Dv=8, mask="allowed", dropout_p=0.2),
    "segments_bfloat16": Case(M=5, N=7, D=8, Dv=8, mask="segments", dtype=torch.bfloat16),
}
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("needs_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("case", OPERATOR_CASES.values(), ids=OPERATOR_CASES)
def test_opcheck_of_forward(case, needs_lse):
    torch.library.opcheck(FORWARD, forward_arguments(make_inputs(case), needs_lse, ""), test_utils=OPCHECKS)


@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("case", OPERATOR_CASES.values(), ids=OPERATOR_CASES)
def test_opcheck_of_backward(case, with_lse):
    inputs = make_inputs(case)
    results = Results(*call_forward(inputs, True, ""))
    upstream = Results(Draw(case, 1).normal(case.B, case.H, case.M, case.Dv), results.lse if with_lse else None)
    given = backward_arguments(inputs, results, upstream, case.requires_bias_grad, "")
    torch.library.opcheck(BACKWARD, given, test_utils=OPCHECKS)


CALLS = {
    "plain": attention,
    "causal": lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.3),
    "mask": lambda q, k, v: attention(q, k, v, (q.sum(-1, keepdim=True) + k.sum(-1)[..., None, :]) > 0),
    "bias": lambda q, k, v: attention(q, k, v, (q @ k.mT).tanh()),
    "window": lambda q, k, v: attention(q, k, v, Mask(window=(3, 0), causal=True)),
    "groups": lambda q, k, v: attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "softcap_lse": lambda q, k, v: sum(t.sum() for t in attention(q, k, v, softcap=3.0, return_lse=True)),
    "sinks": lambda q, k, v: attention(q, k, v, sinks=q[0, :, 0, 0]),
    "rank_3": lambda q, k, v: attention(q[0], k[0], v[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_one_graph_with_the_same_results(name, training):
    function = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (16, 23):
        leaves = [qkv(M=length, N=length, requires_grad=training) for _ in range(2)]
        got, wanted = function(*leaves[0]), CALLS[name](*leaves[1])
        assert torch.allclose(got, wanted, atol=1e-6)
        if training:
            got.square().sum().backward()
            wanted.square().sum().backward()
            for a, b in zip(*leaves, strict=True):
                assert torch.allclose(a.grad, b.grad, atol=1e-5)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_two_calls_in_one_dynamic_graph(training):
    def twice(q, k, v):
        return attention(q, k, attention(q, k, v))

    q, k, v = qkv(requires_grad=training)
    got = torch.compile(twice, backend="aot_eager", fullgraph=True, dynamic=True)(q, k, v)
    assert torch.allclose(got, twice(q, k, v), atol=1e-6)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_new_length_compiles_nothing(training):
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda *t: attention(*t, is_causal=True), backend=counter, fullgraph=True, dynamic=True)
    function(*qkv(requires_grad=training))
    compiled = counter.frame_count
    for length in (23, 64, 129):
        function(*qkv(M=length, N=length, requires_grad=training))
    for batch in (3, 5):
        function(*qkv(B=batch, requires_grad=training))
    assert counter.frame_count == compiled


@pytest.mark.parametrize("kernel", ["cpu_flash", "vendor_cpu_flash", "math"])
@pytest.mark.parametrize("options", [{}, {"attn_mask": Mask(causal=True)}], ids=str)
def test_inductor_trains_by_every_kernel(kernel, options):
    """Whose results lie in memory as it likes: generated code counts on strides, also of the log-sum-exp."""
    if by_name()[kernel].unavailable():
        pytest.skip(f"{kernel}: {by_name()[kernel].unavailable()}")
    compiled = torch.compile(attention, fullgraph=True)
    wanted = qkv(requires_grad=True)
    attention(*wanted, **options, kernel="math").square().sum().backward()
    for named in ({"kernel": kernel}, {}):
        ours = qkv(requires_grad=True)
        with sdpa.sdpa_kernel(kernel):  # around what was compiled for another, too
            compiled(*ours, **options, **named).square().sum().backward()
        for a, b in zip(ours, wanted, strict=True):
            assert torch.allclose(a.grad, b.grad, atol=1e-4)
        with torch.no_grad():
            out, lse = compiled(*ours, **options, **named, return_lse=True)
        right = attention(*wanted, **options, kernel="math", return_lse=True)
        assert torch.allclose(out, right[0], atol=1e-5) and torch.allclose(lse, right[1], atol=1e-5)


@pytest.mark.parametrize("option", ["plain", "return_lse", "mask", "grad"])
def test_a_graph_names_few_arguments(option):
    """Those of a plain call, and of masks up to the last that is given."""
    tensors = qkv(requires_grad=option == "grad")
    options = {"return_lse": {"return_lse": True}, "mask": {"attn_mask": torch.ones(16, 16, dtype=torch.bool)}}
    counter = CompileCounterWithBackend("eager")
    torch.compile(lambda *t: attention(*t, **options.get(option, {})), backend=counter, fullgraph=True)(*tensors)
    (node,) = [node for node in counter.graphs[0].graph.nodes if "attention_forward" in str(node.target)]
    assert len(node.args) + len(node.kwargs) == (11 if option == "mask" else 9)


def test_the_graph_holds_one_node():
    counter = CompileCounterWithBackend("eager")
    torch.compile(lambda *t: attention(*t, is_causal=True), backend=counter, fullgraph=True)(*qkv())
    targets = [str(node.target) for node in counter.graphs[0].graph.nodes]
    assert sum("attention_forward" in target for target in targets) == 1
    assert not any("softmax" in target or "matmul" in target for target in targets)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"kernel": "math"}, {"attn_mask": Mask(window=(3, 0))}], ids=str
)
def test_inductor_infers(options):
    """Twice, and by other tensors: also where arguments have their defaults, which a graph leaves out."""
    layer = torch.nn.Linear(8, 24)

    def model(x):
        q, k, v = layer(x).view(2, 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, **options).transpose(1, 2).flatten(2)

    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for seed in (0, 1, 2):
            x = qkv(seed=seed)[0][:, 0]
            assert torch.allclose(compiled(x), model(x), atol=1e-6)


@pytest.mark.skipif(find_spec(torch_private.CODEGEN) is None, reason="this torch has no hook for an operator's code")
def test_generated_code_calls_the_function_past_the_dispatcher():
    """And obeys who turns kernels off around it."""

    def model(q, k, v):
        return attention(q, k, v, is_causal=True)

    compiled, tensors = torch.compile(model, fullgraph=True), qkv()
    with torch.no_grad():
        out, (code,) = run_and_get_code(compiled, *tensors)
        name = operators.GENERATED["attention_forward"]
        assert f" = torch.ops.sdpa.{name}(" in code and "attention_forward.default(" not in code
        assert torch.allclose(out, model(*tensors), atol=1e-6)
        with sdpa.sdpa_kernel("math"):
            compiled(*tensors)
        assert sdpa.last_choice().kernel.name == "vendor_math"


def test_a_dispatch_mode_sees_what_was_compiled():
    compiled, tensors = torch.compile(attention), qkv()
    with torch.no_grad():
        compiled(*tensors)
        with FlopCounterMode(display=False) as eager:
            attention(*tensors)
        with FlopCounterMode(display=False) as counter:
            compiled(*tensors)
    assert counter.get_total_flops() == eager.get_total_flops() > 0


def test_inductor_trains():
    layer = torch.nn.Linear(8, 24)

    def model(x):
        q, k, v = layer(x).view(2, 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).square().mean()

    x = qkv()[0][:, 0]
    model(x).backward()
    wanted = layer.weight.grad.clone()
    layer.weight.grad = None
    torch.compile(model, fullgraph=True)(x).backward()
    assert torch.allclose(layer.weight.grad, wanted, atol=1e-6)


def test_dropout_under_compile_is_reproducible():
    function = torch.compile(lambda *t: attention(*t, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(function(*qkv()))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_autocast_under_compile():
    function = torch.compile(attention, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(function(*qkv()), attention(*qkv()))
        assert function(*qkv()).dtype == torch.bfloat16


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return attention(q, k, v, is_causal=True)


def test_export_with_a_dynamic_length():
    length = torch.export.Dim("length", min=2, max=512)
    shapes = {name: {2: length} for name in "qkv"}
    program = torch.export.export(Model(), tuple(qkv()), dynamic_shapes=shapes)
    assert any("sdpa.attention_forward" in str(node.target) for node in program.graph.nodes)
    for size in (16, 40):
        tensors = qkv(M=size, N=size)
        assert torch.allclose(program.module()(*tensors), attention(*tensors, is_causal=True))


def test_exported_programs_survive_decompositions_and_files(tmp_path):
    program = torch.export.export(Model(), tuple(qkv())).run_decompositions()
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert torch.equal(loaded.module()(*qkv()), attention(*qkv(), is_causal=True))


def counted(function, *leaves):
    with FlopCounterMode(display=False) as counter:
        function(*leaves).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_flops_are_those_of_torch(options):
    """torch counts two products forward and five backward, whatever a mask hides."""
    B, H, N, D = 2, 4, 16, 8
    product = 2 * B * H * N * N * D
    ours = counted(lambda *t: attention(*t, **options), *qkv(requires_grad=True))
    assert ours == 7 * product
    with FlopCounterMode(display=False) as counter:
        attention(*qkv(), **options)
    assert counter.get_total_flops() == 2 * product
    written = counted(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, *qkv(requires_grad=True))
    assert written == 6 * product  # the fifth product is the recomputed score


def test_flops_of_other_value_sizes_and_groups():
    q, k, v = torch.ones(2, 6, 5, 8), torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 12)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, enable_gqa=True)
    assert counter.get_total_flops() == 2 * 2 * 6 * 5 * 7 * (8 + 12)


def policy(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "attention_forward" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts calls of our forward operator."""

    def __init__(self):
        super().__init__()
        self.forwards = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forwards += func.overloadpacket is torch.ops.sdpa.attention_forward
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("saved,forwards", [(True, 1), (False, 2)], ids=["saved", "recomputed"])
def test_selective_checkpointing_by_the_operators_name(saved, forwards):
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    options = {"context_fn": context} if saved else {}
    q, k, v = qkv(requires_grad=True)

    def block(q, k, v):
        return attention(q.sin(), k.sin(), v, is_causal=True).sin()

    with Calls() as calls:
        checkpoint(block, q, k, v, use_reentrant=False, **options).sum().backward()
    assert calls.forwards == forwards
    grads = [t.grad.clone() for t in (q, k, v)]
    others = qkv(requires_grad=True)
    block(*others).sum().backward()
    assert all(torch.allclose(a, b.grad, atol=1e-6) for a, b in zip(grads, others, strict=True))


def test_graphs_traced_by_make_fx():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda *t: attention(*t, is_causal=True), tracing_mode="symbolic")(*qkv())
    assert torch.equal(graph(*qkv(seed=3)), attention(*qkv(seed=3), is_causal=True))


def test_the_schemas_follow_the_fields_of_attention_inputs():
    own = {"needs_lse", "kernel", "grad_out", "out", "lse", "grad_lse", "bias_grad", "average"}
    for operator in (FORWARD, BACKWARD, operators.WEIGHTS):
        names = [argument.name for argument in operator._schema.arguments]
        assert tuple(name for name in names if name not in own) == AttentionInputs._fields


def test_the_same_as_torch_under_compile():
    function = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    wanted = F.scaled_dot_product_attention(*qkv())
    assert torch.allclose(function(*qkv()), wanted, atol=1e-6)
