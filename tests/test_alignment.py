"""Where tensors lie: told by a problem, a reason of kernels, and copies where a kernel cannot read, or reads slower."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from fake_kernels import catalog_of_fakes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import sdpa
from sdpa.alignment import PLACED, alignment_of
from sdpa.dispatch import choice as choosing
from sdpa.dispatch import cost, explain, placing, select
from sdpa.dispatch.catalog import KERNELS, by_name
from sdpa.dispatch.context import ALL_TOGGLES
from sdpa.inputs import Options, build_inputs
from sdpa.problem import AttentionInputs, AttentionProblem, Results, as_batch, read_of

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
ON_GPU = AttentionProblem("cuda:0", BFLOAT16, 2, 4, 4, 128, 128, 64, 64)
GPU_KERNELS = [kernel for kernel in KERNELS if kernel.devices == ("cuda",)]


@pytest.fixture
def anywhere(monkeypatch):
    """As if the CPU's tensors lay on a GPU."""
    monkeypatch.setattr("sdpa.alignment.lies_on_gpu", lambda tensor: True)


@pytest.fixture
def rows(monkeypatch, tmp_path):
    """Puts a catalog of fake rows in place; each is given as (name, error, limits), the fastest first."""
    yield from catalog_of_fakes(monkeypatch, tmp_path)


def at(offset, *shape, dtype=BFLOAT16):
    """A tensor that begins `offset` elements behind a multiple of 16 bytes."""
    generator = torch.Generator().manual_seed(offset)
    numbers = torch.randn(offset + torch.Size(shape).numel(), generator=generator).to(dtype)
    return numbers[offset:].view(shape)


def inputs_at(q=0, k=0, v=0, shape=(1, 2, 16, 8), dtype=BFLOAT16, **options):
    return AttentionInputs(*(at(offset, *shape, dtype=dtype) for offset in (q, k, v)), 1.0, **options)


@pytest.mark.parametrize("dtype,offset,expected", [
    (BFLOAT16, 0, 16), (BFLOAT16, 1, 2), (BFLOAT16, 2, 4), (BFLOAT16, 4, 8), (BFLOAT16, 8, 16), (BFLOAT16, 3, 2),
    (FLOAT32, 1, 4), (FLOAT32, 2, 8), (FLOAT32, 4, 16), (torch.float64, 1, 8),
])  # fmt: skip
def test_alignment_of_addresses(dtype, offset, expected, anywhere):
    assert alignment_of(at(offset, 2, 3, 4, 8, dtype=dtype)) == expected


def test_alignment_of_strides(anywhere):
    wide = torch.zeros(2, 3, 4, 20, dtype=BFLOAT16)
    assert alignment_of(wide[..., :16]) == 8
    assert alignment_of(wide[..., :16], strides=False) == 16
    assert alignment_of(wide[:1, :1, :1, :16]) == 16, "dimensions of one need no true stride"
    assert alignment_of(wide.transpose(1, 2)) == 8
    assert alignment_of(torch.zeros(4, 16, dtype=BFLOAT16).expand(2, 3, 4, 16)) == 16


def test_a_problem_names_the_tensors(anywhere):
    bias = at(2, 1, 1, 16, 16)
    found = AttentionProblem.of(inputs_at(q=1, v=4, bias=bias))
    assert dict(found.unaligned) == {"q": 2, "v": 8, "bias": 4} and found.alignment == 2
    padded = torch.zeros(1, 1, 16, 20, dtype=BFLOAT16)[..., :16]
    assert dict(AttentionProblem.of(inputs_at(bias=padded)).unaligned) == {"bias_rows": 8}
    assert AttentionProblem.of(inputs_at()).unaligned == () and AttentionProblem.of(inputs_at()).alignment == 16


def test_a_backward_names_what_it_reads_beside_them(anywhere):
    given = inputs_at(k=1)
    out, lse, grad_out = at(2, 1, 2, 16, 8), at(1, 1, 2, 16, dtype=FLOAT32), at(4, 1, 2, 16, 8)
    found = AttentionProblem.of(given, "backward", others=(out, lse, grad_out))
    assert dict(found.unaligned) == {"k": 2, "out": 4, "lse": 4, "grad_out": 8}
    alike = AttentionProblem.of(given, "backward")
    assert AttentionProblem.of(given, "backward", others=(given.q, None, given.q)) == alike
    summed = torch.ones((), dtype=BFLOAT16).expand(1, 2, 16, 8)
    found = AttentionProblem.of(given, "backward", others=(given.q, lse[..., 1:], summed))
    assert found.unaligned[1:] == (("lse", 8),), "kernels copy these themselves"


def test_on_a_cpu_addresses_do_not_matter():
    assert AttentionProblem.of(inputs_at(q=1, k=2, v=3)).unaligned == ()
    turned = inputs_at()._replace(k=torch.ones(1, 2, 8, 16).mT)
    assert AttentionProblem.of(turned).unaligned == (("k", 0),)


def test_tensors_without_memory_are_taken_for_aligned(anywhere):
    seen = []

    def describe(q):
        seen.append(AttentionProblem.of(AttentionInputs(q, q, q, 1.0)).unaligned)
        return q.sum()

    odd = at(1, 2, 1, 2, 16, 8, dtype=FLOAT32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.vmap(describe)(odd)
        torch.func.grad(describe)(odd[0])
        describe(torch.empty(1, 2, 16, 8, device="meta"))
    assert seen == [(), (), ()]


def test_tensors_of_a_trace_are_not_asked():
    """Whose device is only a name."""
    with FakeTensorMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        strides = (288, 144, 9, 1)
        memory = torch.empty_strided((1, 2, 16, 8), strides, dtype=BFLOAT16, device="meta")
        fake = FakeTensor(mode, memory, torch.device("cuda:0"))
        assert fake.is_cuda
        assert AttentionProblem.of(AttentionInputs(fake, fake, fake, 1.0)).unaligned == ()


NEEDS = {
    "cuda_flash": set(PLACED) - {"lse"},
    "triton_hopper": {"q", "k", "v", "bias", "bias_rows", "grad_out"},
    "triton_flash": set(),
    "triton_efficient": set(),
    "triton_decode": set(),
    "vendor_cudnn": set(PLACED) - {"bias_rows"},
    "vendor_flash": {"q", "k", "v", "out", "grad_out"},
    "vendor_efficient": set(PLACED),
}


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("got", [8, 4, 2])
def test_what_a_kernel_cannot_read_is_a_reason_with_the_value(kernel, got):
    for name in PLACED:
        reasons = [r for r in kernel.why_not(ON_GPU._replace(unaligned=((name, got),))) if "would copy" in r]
        told = f"multiples of 16 bytes, and would copy otherwise, got {name.replace('_', ' ')} at multiples of {got}"
        assert ([told in r for r in reasons] == [True]) == (name in NEEDS[kernel.name]), reasons
    assert not [r for r in kernel.why_not(ON_GPU) if "would copy" in r]


def test_every_gpu_kernel_is_listed_with_what_it_needs():
    assert {kernel.name for kernel in GPU_KERNELS} == set(NEEDS)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_rows_whose_numbers_are_apart(kernel):
    reasons = kernel.why_not(ON_GPU._replace(unaligned=(("k", 0),)))
    refused = "needs the last stride of q, k and v to be 1, and would copy otherwise" in reasons
    assert refused == (kernel.name not in ("cpu_flash", "vendor_math", "math"))
    told = "needs the last stride of the bias to be 1, and would copy otherwise"
    apart = kernel.why_not(ON_GPU._replace(unaligned=(("bias_rows", 0),)))
    assert (told in apart) == ("bias_rows" in NEEDS.get(kernel.name, ()))


def test_heads_that_a_kernel_fills_up_itself_need_no_copy():
    flash, odd = by_name()["vendor_flash"], ON_GPU._replace(D=17, Dv=17, unaligned=(("q", 2), ("grad_out", 2)))
    assert not flash.misplaced(odd) and cost.slowing(flash, odd) == 1.0
    assert flash.misplaced(odd._replace(D=16)) == ("q", "grad_out")
    assert flash.misplaced(odd._replace(unaligned=(("q", 0),))) == ("q",)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("shape", [(1, 2, 16, 8), (3, 1, 5, 7), (2, 3, 1, 1), (1, 1, 4, 1003)])
def test_copies(shape, dtype, anywhere):
    B, H, M, D = shape
    flat = at(1, *shape, dtype=dtype)
    sources = {
        "flat": flat,
        "heads inside": at(1, B, M, H, D, dtype=dtype).transpose(1, 2),
        "apart": at(1, B, H, M, 2 * D, dtype=dtype)[..., ::2],
        "repeated": at(1, 1, H, 1, D, dtype=dtype).expand(shape),
        "one number": at(1, 1, 1, 1, 1, dtype=dtype).expand(shape),
    }
    for name, source in sources.items():
        copy = placing.aligned_copy(source)
        assert torch.equal(copy, source), name
        assert alignment_of(copy) == 16 and copy.stride(3) == 1, name
    repeated = placing.aligned_copy(sources["repeated"])
    assert B == 1 or repeated.stride(0) == 0
    assert M == 1 or repeated.stride(2) == 0
    inside = placing.aligned_copy(sources["heads inside"])
    assert H == 1 or M == 1 or inside.stride(1) < inside.stride(2)


FUSED = {"alignment": 16, "aligned": frozenset(PLACED)}


def seen_by(module, monkeypatch, direction="forward"):
    """What the fake kernel of a module is called with."""
    seen, own = [], getattr(module, direction)

    def noted(*given):
        seen.append(given)
        return own(*given)

    monkeypatch.setattr(module, direction, noted)
    return seen


def test_a_forward_gets_copies_of_just_the_tensors_that_need_one(rows, anywhere, monkeypatch):
    (module,) = rows(("fused", None, FUSED))
    seen = seen_by(module, monkeypatch)
    given = inputs_at(q=1, v=2, bias=at(4, 1, 1, 16, 16))
    choice = select.choose(AttentionProblem.of(given), "", ALL_TOGGLES)
    assert choice.copies == ("q", "v", "bias")
    assert choice.reason == (
        "the only kernel that is able and allowed, on copies of q, v and the bias, which do not lie at multiples of "
        "16 bytes"
    )
    choice.run(given)
    ((got, problem, _),) = seen
    assert got.k is given.k and problem.unaligned == ()
    for name in ("q", "v", "bias"):
        mine, theirs = getattr(given, name), getattr(got, name)
        assert theirs is not mine and torch.equal(theirs, mine) and alignment_of(theirs) == 16
    assert choice.native is None


def recorder(module, monkeypatch):
    """What the `record` of a module's fake kernel, and what it records, are given."""
    seen = []

    def record(tensors, problem, tile):
        assert problem.unaligned == ()
        seen.append(read_of(*tensors))
        return "first", lambda *given: seen.append(given)

    monkeypatch.setattr(module, "record", record, raising=False)
    return seen


def test_a_call_on_copies_is_recorded(rows, anywhere, monkeypatch):
    """Later calls get copies of what the first one needed copies of, in the same memory order."""
    (module,) = rows(("fused", None, FUSED | {"aligned": frozenset(PLACED) - {"lse"}}))
    seen = recorder(module, monkeypatch)
    results = Results(at(1, 1, 2, 16, 8), at(0, 1, 2, 16, dtype=FLOAT32))
    given = inputs_at(k=1, bias=torch.randn(1, 2, 16, 13, dtype=BFLOAT16))
    upstream = Results(at(0, 1, 2, 16, 8), None)
    problem = AttentionProblem.of(given, "backward", others=(*results, upstream.out))
    choice = select.choose(problem, "", ALL_TOGGLES)
    assert choice.copies == ("k", "bias_rows", "out")
    first, again = choice.record((given, results, upstream), problem, None)
    tensors = read_of(given, results, upstream)
    assert first == "first" and again(*tensors[1:]) is None and len(seen) == 1
    again(*tensors)
    for mine, one, other in zip(tensors, *seen, strict=True):
        assert torch.equal(mine, one) and torch.equal(mine, other) and one.stride() == other.stride()
        assert (one is mine) == (other is mine)
    moved = [mine is not one for mine, one in zip(tensors, seen[0], strict=True)]
    assert moved == [False, True, False, True, True, False, False]
    q, k, *others = tensors
    assert again(at(1, *q.shape), at(0, *k.shape), *others) is None, "of another one a copy is needed now"
    assert again(q, at(0, *k.shape), *others) is None and len(seen) == 2


@pytest.mark.parametrize("memory", ["of one head size", "apart", "heads expanded"])
def test_packed_rows_get_the_copies_that_were_recorded(memory, rows, anywhere, monkeypatch):
    """A call of packed rows is repeated with (T, H, D), and recorded with (1, H, T, D)."""
    (module,) = rows(("fused", None, FUSED))
    seen = recorder(module, monkeypatch)
    packed = {
        "of one head size": torch.randn(5, 3, 36, dtype=BFLOAT16),
        "apart": torch.randn(5, 3, 3 * 64, dtype=BFLOAT16)[..., ::3],
        "heads expanded": torch.randn(5, 1, 36, dtype=BFLOAT16).expand(5, 3, 36),
    }[memory]
    q, k, v = (packed.clone() if memory == "of one head size" else packed[:] for _ in range(3))
    inputs = AttentionInputs(*map(as_batch, (q, k, v)), 1.0)
    problem = AttentionProblem.of(inputs)
    assert {name for name, _ in problem.unaligned} == {"q", "k", "v"}
    _, again = placing.record_on_copies(module.record, module.forward, PLACED, (inputs,), problem, None)
    again(q, k, v)
    for mine, one, other in zip((q, k, v), *seen, strict=True):
        assert one.stride() == other.stride() and torch.equal(one, other) and torch.equal(one, as_batch(mine))


def test_what_several_copies_would_be_made_of_is_not_recorded(rows, anywhere, monkeypatch):
    (module,) = rows(("fused", None, FUSED))
    seen, shared = recorder(module, monkeypatch), at(1, 1, 2, 16, 8)
    inputs = inputs_at()._replace(q=shared, k=shared)
    problem = AttentionProblem.of(inputs)
    _, again = placing.record_on_copies(module.record, module.forward, PLACED, (inputs,), problem, None)
    assert again is None and not seen and module.ran == 1


def test_a_backward_gets_copies_of_upstream_gradients(rows, anywhere, monkeypatch):
    (module,) = rows(("fused", None, FUSED))
    seen = seen_by(module, monkeypatch, "backward")
    given = inputs_at()
    out, lse, grad_out = at(1, 1, 2, 16, 8), at(1, 1, 2, 16, dtype=FLOAT32), at(2, 1, 2, 16, 8)
    problem = AttentionProblem.of(given, "backward", others=(out, lse, grad_out))
    choice = select.choose(problem, "", ALL_TOGGLES)
    assert choice.copies == ("out", "lse", "grad_out")
    choice.call(given, Results(out, lse), Results(grad_out, None))
    ((inputs, results, upstream, *_),) = seen
    assert all(mine is theirs for mine, theirs in zip(inputs[:3], given[:3], strict=True))
    for mine, theirs in ((out, results.out), (lse, results.lse), (grad_out, upstream.out)):
        assert torch.equal(mine, theirs) and alignment_of(theirs, strides=mine is not lse) == 16
    assert upstream.lse is None


def test_aligned_tensors_are_handed_on_as_they_are(rows, anywhere, monkeypatch):
    (module,) = rows(("fused", None, FUSED))
    seen, given = seen_by(module, monkeypatch), inputs_at()
    choice = select.choose(AttentionProblem.of(given), "", ALL_TOGGLES)
    choice.run(given)
    assert choice.copies == () and seen[0][0] is given and "copies" not in choice.reason


def test_a_kernel_by_name_runs_on_copies(rows, anywhere, monkeypatch):
    first, second = rows(("first", None, FUSED), ("second", None, {}))
    seen = seen_by(first, monkeypatch)
    q = at(1, 1, 2, 16, 8)
    sdpa.scaled_dot_product_attention(q, q, q, kernel="first")
    assert alignment_of(seen[0][0].q) == 16 and second.ran == 0
    assert sdpa.last_choice().reason.startswith("asked for by name, on copies of q, k and v")


def test_another_reason_is_none_that_copies_mend(rows, anywhere):
    rows(("fused", None, FUSED | {"max_head_size": 4}), ("other", None, {}))
    problem = AttentionProblem.of(inputs_at(q=1))
    assert select.choose(problem, "", ALL_TOGGLES).kernel.name == "other"
    with pytest.raises(sdpa.NoKernelError, match="takes head sizes up to 4") as error:
        select.choose(problem, "fused;f", ALL_TOGGLES)
    assert "got q at multiples of 2" in str(error.value)


def test_copies_or_another_kernel_whichever_is_faster(rows, monkeypatch):
    """A large problem is worth copies, a small one is answered by a kernel that reads from any address."""
    rows(("fused", None, FUSED | {"efficiency": 0.75}), ("loose", None, {"alignment": 1, "efficiency": 0.5}))
    far = ON_GPU._replace(unaligned=(("q", 2), ("k", 2), ("v", 2)))
    large, small = far._replace(M=8192, N=8192), far._replace(B=1, M=16, N=16)
    chosen = [select.choose(problem, "", ALL_TOGGLES) for problem in (large, small)]
    assert [(choice.kernel.name, bool(choice.copies)) for choice in chosen] == [("fused", True), ("loose", False)]
    aligned = select.choose(large._replace(unaligned=()), "", ALL_TOGGLES)
    assert aligned.kernel.name == "fused" and not aligned.copies


def test_a_kernel_that_reads_slower_may_be_given_copies(rows):
    rows(("loose", None, {"alignment": 1}))
    large = ON_GPU._replace(M=8192, N=8192, unaligned=(("k", 2),))
    (moved,), (small,) = (select.consider(p) for p in (large, large._replace(B=1, M=16, N=16)))
    assert moved.copies == ("k",) and small.copies == ()
    (aligned,) = select.consider(large.placed(PLACED))
    assert moved.seconds == pytest.approx(aligned.seconds + cost.copying(large, ("k",)))


def test_pages_are_not_copied(rows):
    rows(("fused", None, FUSED), ("loose", None, {"alignment": 1}))
    paged = ON_GPU._replace(features=frozenset({"paged"}), M=8192, N=8192, unaligned=(("k", 2),))
    first, second = select.consider(paged)
    assert not first.able and second.able and not second.copies


def test_explain_tells_of_copies(rows):
    rows(("fused", None, FUSED), ("loose", None, {"alignment": 1, "efficiency": 0.01}))
    problem = ON_GPU._replace(M=8192, N=8192, unaligned=(("q", 4), ("k", 0)))
    found = explain.explain_problem(problem)
    clause = (
        "on copies of k, whose last dimension is not the only one of stride 1, and of q, which does not lie at "
        "multiples of 16 bytes"
    )
    assert found.chosen == "fused" and clause in found.reason and str(found).count(clause) == 3
    assert found.as_dict()["kernels"][0]["copies"] == clause


def test_what_was_never_chosen_on_copies_has_its_own_functions(rows):
    (module,) = rows(("fused", None, FUSED))
    choice = select.choose(ON_GPU, "", ALL_TOGGLES)
    assert choice.forward is module.forward and choice.backward is module.backward
    assert isinstance(choice, choosing.Choice)


def test_a_failure_on_copies_is_one_on_aligned_tensors(rows, anywhere):
    """A launch that is refused is refused wherever the tensors lie."""
    error = RuntimeError("CUDA error: no kernel image is available for execution on the device")
    first, _ = rows(("first", error, FUSED), ("second", None, {"overhead": 1e-3}))
    given = inputs_at(q=1)
    with pytest.warns(UserWarning, match="second answers instead"):
        select.choose(AttentionProblem.of(given), "", ALL_TOGGLES).run(given)
    assert select.choose(AttentionProblem.of(inputs_at()), "", ALL_TOGGLES).kernel.name == "second" and first.ran == 1


def test_a_strided_call_by_name_on_a_cpu():
    """torch's CPU flash wants a last stride of 1 and is given it."""
    q, k, v = (torch.randn(1, 2, 8, 16).mT for _ in range(3))
    found = sdpa.scaled_dot_product_attention(q, k, v, kernel="vendor_cpu_flash")
    torch.testing.assert_close(found, sdpa.scaled_dot_product_attention(q, k, v, kernel="math"))
    sdpa.scaled_dot_product_attention(q, k, v, kernel="vendor_cpu_flash")
    assert sdpa.last_choice().copies == ("q", "k", "v")


OVERLAPPING = {"rows": (500, 100, 1, 1), "heads": (500, 1, 64, 1), "batch": (1, 500, 64, 1)}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_rows_that_overlap_in_memory_on_a_cpu(name):
    """torch makes results in the memory order of the queries, and its CPU flash writes them as if that had rows."""
    base = torch.randn(4000)
    overlapping = base.as_strided((2, 3, 7, 16), OVERLAPPING[name])
    apart = [torch.randn(2, 3, 40, 16) for _ in range(2)]
    for q, k, v in ((overlapping, *apart), (apart[0], overlapping, overlapping)):
        tensors = [t.detach().requires_grad_() for t in (q, k, v)]
        exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
        for kernel in ("vendor_cpu_flash", "cpu_flash"):
            found, wanted = (
                sdpa.scaled_dot_product_attention(*given, kernel=by)
                for given, by in ((tensors, kernel), (exact, "math"))
            )
            torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
            upstream = torch.randn_like(wanted)
            grads = torch.autograd.grad(found, tensors, upstream.float())
            for got, want in zip(grads, torch.autograd.grad(wanted, exact, upstream), strict=True):
                torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_inputs_as_a_user_gives_them(anywhere):
    """Slices of one packed buffer, whose row is one number too long."""
    packed = torch.zeros(2, 3, 16, 3 * 8 + 1, dtype=BFLOAT16)
    q, k, v = packed[..., 1:].chunk(3, dim=-1)
    problem = AttentionProblem.of(build_inputs(q, k, v, Options()))
    assert problem.unaligned == (("q", 2), ("k", 2), ("v", 2))


def test_the_bandwidth_of_copies_is_the_devices(monkeypatch):
    monkeypatch.setattr(cost, "device_of", lambda name: SimpleNamespace(bandwidth=1e12))
    one, two = (cost.copying(ON_GPU, names) for names in (("q",), ("q", "k")))
    size = 2 * 4 * 128 * 64 * 2
    assert one == pytest.approx(2 * size / 1e12 + cost.GPU_COPY_OVERHEAD) and two == pytest.approx(2 * one)
    assert cost.copying(ON_GPU, ("bias", "bias_rows")) == cost.copying(ON_GPU, ("bias",))
