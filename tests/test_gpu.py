"""Every kernel that serves CUDA against the float64 reference there; cases from the catalog. Run by `make gpu-test`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from gpu_cases import OURS, compile_ahead, name_for, real, right

import sdpa
from sdpa import Mask
from sdpa.dispatch import select
from sdpa.dispatch.catalog import by_name, kernels_for
from sdpa.dispatch.context import ALL_TOGGLES, Setting
from sdpa.inputs import Options, build_inputs
from sdpa.problem import Gradients, Tile
from sdpa.sequences import Documents, Pages, build_packed, build_paged
from sdpa.testing import (
    MASKS,
    Case,
    Draw,
    able,
    backward_bands,
    check_inputs,
    check_kernel,
    compare,
    differentiate,
    make_inputs,
    problem_of,
    run_kernel,
    trains,
)

pytestmark = pytest.mark.gpu

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (
    {"M": 67, "N": 67},
    {"M": 64, "N": 128, "D": 64, "Dv": 64},
    {"M": 200, "N": 200, "D": 128, "Dv": 128, "Hkv": 1},
    {"M": 1, "N": 264, "D": 128, "Dv": 128, "Hkv": 2},
)


def cases_of(mask):
    """bfloat16 at every size, the others at every other one: float16 runs bfloat16's code, and float32's compiles for
    ten times as long."""
    turn = list(MASKS).index(mask)
    for number, size in enumerate(SIZES):
        for dtype in (BFLOAT16, (FLOAT16, FLOAT32)[(number + turn) % 2]):
            yield Case(**size, mask=mask, dtype=dtype, device="cuda")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", kernels_for("cuda"), ids=lambda kernel: kernel.name)
def test_kernel(kernel, mask):
    """All cases the kernel takes."""
    reasons = {case: able(kernel.name, case) for case in cases_of(mask)}
    taken = [case for case, why in reasons.items() if not why]
    if not taken:
        pytest.skip(f"{kernel.name}: {next(iter(reasons.values()))[0]}")
    compile_ahead(kernel.name, taken)
    for case in taken:
        right(check_kernel(kernel.name, case), case)


@pytest.mark.parametrize("kernel", kernels_for("cuda"), ids=lambda kernel: kernel.name)
def test_no_kernel_is_left_out(kernel):
    assert any(not able(kernel.name, case) for mask in MASKS for case in cases_of(mask))


HEAD_SIZES = ((96, 96), (192, 128), (33, 65), (256, 256), (512, 512))
# Sizes at which kernels of others were seen to give NaN, or garbage, or nothing.
REAL = {
    "last_half_tile": [real(M=960, N=960, mask=m) for m in ("none", "causal", "window", "lengths", "segments_causal")],
    "last_half_tile_dense": [real(M=960, N=960, mask=m) for m in ("allowed", "padding", "bias", "bias_rows")],
    "one_key_more_expanded": [real(M=1025, N=1025, layout="expanded", mask=m) for m in ("none", "causal", "padding")],
    "width_not_of_eight": [real(M=500, N=1003, mask=m) for m in ("allowed", "padding", "bias", "bias_rows")],
    "groups": [real(H=32, Hkv=8, D=128, Dv=128, mask=m) for m in ("causal", "segments")],
    "head_sizes": [real(M=400, N=333, D=d, Dv=e, mask="causal") for d, e in HEAD_SIZES],
    "layouts": [real(layout="bmhd", mask=m, dtype=FLOAT16) for m in ("none", "alibi")],
    "long": [real(B=1, H=2, Hkv=1, M=4096, N=4096, mask=m) for m in ("causal", "prefix", "padding")],
    "extras": [
        real(softcap=5.0, mask="causal"),
        real(sinks=True, mask="window", H=8, Hkv=2),
        real(dropout_p=0.2, mask="causal"),
        real(scale=-0.2),
        real(scale=0.0, dtype=FLOAT32),
        real(softcap=5.0, sinks=True, dropout_p=0.1, mask="bias_causal", requires_bias_grad=True),
    ],
    "bias_gradients": [real(M=700, N=600, mask=m, requires_bias_grad=True) for m in ("bias", "bias_rows")],
    "float32": [real(M=500, N=700, D=d, Dv=d, dtype=FLOAT32, mask=m) for d, m in ((64, "bias"), (128, "causal"))],
}  # fmt: skip


@pytest.mark.parametrize("group", REAL)
def test_real_sizes(group):
    cases = REAL[group]
    compile_ahead(OURS[1], cases)
    for case in cases:
        name = name_for(make_inputs(case))
        assert not able(name, case), able(name, case)
        right(check_kernel(name, case), case)


@pytest.mark.parametrize("sizes", [{"B": 70000, "H": 1, "Hkv": 1}, {"B": 1, "H": 70000, "Hkv": 35000}], ids=["B", "H"])
def test_more_entries_than_a_grid_has_rows(sizes):
    for mask in ("causal", "padding"):
        case = real(**sizes, M=17, N=33, D=16, Dv=16, mask=mask)
        right(check_kernel(name_for(make_inputs(case)), case), case)


def far_apart(shape, strides, seed):
    """A bfloat16 tensor of more than 2^31 elements from its first to its last, NaN in all that is not its own."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assert last > 2**31
    values = torch.full((last + 1,), torch.nan, dtype=BFLOAT16, device="cuda").as_strided(shape, strides)
    return values.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


FAR = 2**31 + 2**12
STRIDES = {
    "batch": ((2, 2, 300, 64), (FAR, 300 * 64, 64, 1)),
    "head": ((2, 2, 300, 64), (300 * 64, FAR, 64, 1)),
    "row": ((1, 1, 300, 64), (0, 0, 2**23, 1)),
}


@pytest.mark.parametrize("far", ["q", "k", "v"])
@pytest.mark.parametrize("which", STRIDES)
def test_offsets_beyond_32_bits(which, far):
    shape, strides = STRIDES[which]
    tensors = {name: torch.randn(shape, device="cuda").to(BFLOAT16) for name in "qkv"}
    tensors[far] = far_apart(shape, strides, 3)
    inputs = build_inputs(*tensors.values(), Options(Mask(causal=True)))
    right(check_inputs("triton_flash", inputs, torch.randn(shape, device="cuda").to(BFLOAT16)), (which, far))


def test_bias_offsets_beyond_32_bits():
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda").to(BFLOAT16) for _ in range(3))
    for shape, strides in (((1, 2, 300, 300), (0, FAR, 300, 1)), ((1, 1, 300, 300), (0, 0, 2**23, 1))):
        inputs = build_inputs(q, k, v, Options(far_apart(shape, strides, 4)))
        right(check_inputs("triton_efficient", inputs, torch.randn_like(q), bias_grad=True), shape)


def test_results_beyond_32_bits():
    """2^31 + 2^16 numbers of out and grad_q: the last rows are those of a call with the last rows alone."""
    rows, few = 2**25 + 2**10, 2**10
    q = torch.randn(1, 1, rows, 64, device="cuda", dtype=BFLOAT16)
    k, v = (torch.randn(1, 1, 64, 64, device="cuda", dtype=BFLOAT16) for _ in range(2))
    found = []
    for queries in (q, q[:, :, -few:]):
        inputs = build_inputs(queries, k, v, Options())
        results, grads = run_kernel("triton_flash", inputs, queries)
        found.append([t[:, :, -few:].clone() for t in (*results, grads.q)])
    for whole, part in zip(*found, strict=True):
        assert torch.equal(whole, part)


@pytest.mark.parametrize("bias", [(1, 1, 500, 1003), (2, 1, 1, 1003), (1, 4, 500, 1), (1, 1, 1, 1)], ids=str)
def test_only_the_mask_requires_a_gradient(bias):
    """By the front door, with the kernel it chooses."""
    case = real(M=500, N=1003)
    inputs = make_inputs(case)
    mask = torch.randn(bias, generator=torch.Generator().manual_seed(5)).to("cuda", BFLOAT16).requires_grad_()
    grad_out = Draw(case, 6).normal(2, 4, 500, 64)
    out = sdpa.scaled_dot_product_attention(*inputs[:3], mask)
    (got,) = torch.autograd.grad(out, mask, grad_out)
    assert sdpa.last_choice().kernel.family != "math"
    inputs = inputs._replace(bias=mask.detach())
    wanted, plain = (differentiate(inputs, grad_out, dtype) for dtype in (torch.float64, BFLOAT16))
    band = backward_bands(inputs, grad_out, *wanted)["bias"]
    right([compare("grad_bias", got, wanted[1].bias, plain[1].bias, 500 + 1003, band)], bias)


@pytest.mark.parametrize("N, D", [(49, 32), (64, 64), (64, 24), (17, 32)], ids=str)
def test_windows_share_a_bias(N, D):
    """Backwards of one tile, whose bias TMA can follow and cannot, and the kernel of the bias's gradient."""
    for mask, dropout_p, dtype in product(("bias", "none", "padding"), (0.0, 0.2), (torch.bfloat16, torch.float16)):
        case = real(B=300, H=3, Hkv=3, M=N, N=N, D=D, Dv=D, mask=mask, dropout_p=dropout_p, dtype=dtype)
        inputs = make_inputs(case)
        up = torch.randn_like(inputs.q)
        right(check_inputs("triton_efficient", inputs, up, mask == "bias"), case)
    case = real(B=40, H=2, Hkv=2, M=200, N=136, D=32, Dv=32, mask="bias")
    inputs = make_inputs(case)
    right(check_inputs("triton_efficient", inputs, torch.randn_like(inputs.q), True), case)


@pytest.mark.parametrize("mask", ["none", "causal", "lengths", "segments", "allowed", "bias", "alibi"])
@pytest.mark.parametrize("sizes", [(105, 105, 64, 1), (72, 72, 64, 4), (300, 77, 96, 1), (61, 61, 256, 2)], ids=str)
def test_one_block_of_keys(sizes, mask):
    """Backwards of several blocks of queries and of a group's heads, and dense masks whose rows are copied."""
    M, N, D, G = sizes
    case = Case(B=3, H=2 * G, Hkv=2, M=M, N=N, D=D, Dv=D, mask=mask, dtype=BFLOAT16, device="cuda")
    right(check_kernel("triton_efficient", case), case)


def test_packed_sequences():
    cu = torch.tensor([0, 100, 100, 612, 1500], dtype=torch.int32, device="cuda")
    draw = Draw(real(), 7)
    q, k, v = (draw.normal(1500, heads, 64) for heads in (8, 2, 2))
    for mask in (Mask(), Mask(causal=True), Mask(window=(200, 0)), Mask(causal=True, prefix=50)):
        inputs = build_packed(q, k, v, Documents(cu, cu, 888, 888), Options(mask, enable_gqa=True))
        right(check_inputs("triton_flash", inputs, draw.normal(1, 8, 1500, 64)), mask)


@pytest.mark.parametrize("page_size", [16, 48, 256], ids=lambda n: f"page{n}")
def test_pages(page_size):
    lengths = torch.tensor([1500, 0, 4096, 7], device="cuda")
    per_sequence, draw = -(-4096 // page_size), Draw(real(), 8)
    keys, values = (draw.normal(4 * per_sequence, page_size, 2, 128) for _ in range(2))
    order = torch.randperm(4 * per_sequence, generator=torch.Generator().manual_seed(9))
    table = order.view(4, per_sequence).to("cuda", torch.int32)
    for M, dropout_p in ((1, 0.0), (5, 0.0), (5, 0.3)):
        query = draw.normal(4, M, 16, 128)
        pages, options = Pages(table, lengths), Options(None, dropout_p, is_causal=True, enable_gqa=True)
        inputs = build_paged(query, keys, values, pages, options)
        right(check_inputs("triton_decode", inputs, draw.normal(4, 16, M, 128)), (M, dropout_p))


def test_packed_queries_over_pages():
    """Prefill of one sequence beside single queries of others, as each is alone, with NaN behind the keys of one."""
    lengths, table = torch.tensor([700, 0, 1500, 33], device="cuda"), torch.arange(4 * 94, device="cuda").view(4, 94)
    draw, cu_q = Draw(real(), 8), torch.tensor([0, 300, 300, 301, 302], dtype=torch.int32, device="cuda")
    keys, values = (draw.normal(4 * 94, 16, 2, 128) for _ in range(2))
    pages, options = (keys, values, table.int(), lengths), {"is_causal": True, "enable_gqa": True, "return_lse": True}
    keys[table[3, 3:]] = values[table[3, 3:]] = torch.nan  # behind the 33 keys of the last sequence
    query = draw.normal(310, 16, 128)
    for _ in range(3):  # recorded at the second call, and run again at the third
        out, lse = sdpa.paged_attention(query, *pages, cu_q=cu_q, max_q=300, **options)
        assert sdpa.last_choice().kernel.family != "math"
        for b, (begin, end) in enumerate(pairwise(cu_q.tolist())):
            if begin < end:
                one = sdpa.paged_attention(
                    query[None, begin:end], *pages[:2], *(t[b : b + 1] for t in pages[2:]), **options
                )
                torch.testing.assert_close(out[begin:end], one[0][0], atol=2e-2, rtol=2e-2)
                torch.testing.assert_close(lse[:, begin:end], one[1][0], atol=1e-3, rtol=1e-3)
        assert not out[302:].any() and (lse[:, 302:] == -torch.inf).all()


@pytest.fixture
def torchs_mode(request):
    """Ours in Triton are deterministic without being asked; others where `torch.use_deterministic_algorithms` asks."""
    torch.use_deterministic_algorithms("triton" not in request.node.callspec.params["name"])
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", [kernel.name for kernel in kernels_for("cuda") if kernel.deterministic])
def test_the_same_bits_twice(name, torchs_mode):
    """Forward and backward."""
    cases = [real(H=8, Hkv=2, M=700, N=900, mask=m) for m in ("none", "causal", "bias_rows")]
    cases += [real(M=700, N=700, mask=m) for m in ("none", "causal")]
    taken = [case for case in cases if not able(name, case)]
    assert taken, f"{name} takes none of the cases"
    for case in taken:
        inputs = make_inputs(case)
        learns = trains(by_name()[name], inputs)
        grad_out = Draw(case, 1).normal(case.B, case.H, case.M, case.Dv) if learns else None
        bias_grad = inputs.bias is not None and not able(name, replace(case, requires_bias_grad=True))
        first, second = (run_kernel(name, inputs, grad_out, bias_grad) for _ in range(2))
        for a, b in zip((*first[0], *(first[1] or ())), (*second[0], *(second[1] or ())), strict=True):
            assert (a is None and b is None) or torch.equal(a, b), case


LONG = 8192
SLACK = LONG * LONG // 8  # an eighth of one bool per pair of one head
LEAN = {
    "causal": lambda: Mask(causal=True),
    "window": lambda: Mask(window=(1000, 0)),
    "lengths": lambda: Mask(lengths=torch.tensor([LONG - 100], device="cuda")),
    "segments": lambda: Mask(segments=torch.arange(LONG, device="cuda") // 1000),
    "padding": lambda: torch.arange(LONG, device="cuda").view(1, 1, 1, -1) < LONG - 100,
    "padding_expanded": lambda: (torch.arange(LONG, device="cuda") < LONG - 100).expand(1, 1, LONG, LONG),
    "learned_keys": lambda: torch.zeros(1, 1, 1, LONG, device="cuda", dtype=BFLOAT16, requires_grad=True),
    "learned_heads": lambda: torch.zeros(1, 4, 1, 1, device="cuda", dtype=BFLOAT16, requires_grad=True),
    "learned_rows": lambda: torch.zeros(1, 4, LONG, 1, device="cuda", dtype=BFLOAT16, requires_grad=True),
    "float_mask": lambda: torch.zeros(1, 1, LONG, LONG, device="cuda", dtype=BFLOAT16),
}


def growth(call):
    """Bytes by which the peak of allocated memory exceeds what was allocated before, the second time."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("name", LEAN)
def test_memory_grows_with_the_rows(name):
    """Forward and backward of 4 heads: out, its gradient, those of q, k and v, and float32 per row; nothing M x N."""
    q, k, v = (torch.randn(1, 4, LONG, 64, device="cuda", dtype=BFLOAT16, requires_grad=True) for _ in range(3))
    mask, grad_out = LEAN[name](), torch.randn(1, 4, LONG, 64, device="cuda", dtype=BFLOAT16)
    learned = [q, k, v, *([mask] if isinstance(mask, torch.Tensor) and mask.requires_grad else [])]

    def call():
        torch.autograd.grad(sdpa.scaled_dot_product_attention(q, k, v, mask, kernel=ours(mask)), learned, grad_out)

    results = 4 * q.numel() * q.element_size() + 4 * 4 * LONG * 4
    assert growth(call) < results + SLACK


def ours(mask):
    return OURS[isinstance(mask, torch.Tensor)]


def test_gradient_of_a_bias_takes_its_own_size():
    """(1, 1, M, N) summed over 8 heads: a float32 sum and the gradient itself, not one per head."""
    q, k, v = (torch.randn(1, 8, 4096, 64, device="cuda", dtype=BFLOAT16) for _ in range(3))
    bias = torch.zeros(1, 1, 4096, 4096, device="cuda", dtype=BFLOAT16, requires_grad=True)

    def call():
        out = sdpa.scaled_dot_product_attention(q, k, v, bias, kernel=OURS[1])
        torch.autograd.grad(out, bias, torch.ones_like(out))

    assert growth(call) < bias.numel() * (4 + 2) * 1.25 + 8 * q.numel() * 2


ENORMOUS = {"B": 1 << 14, "H": 1 << 10, "M": 1 << 10}  # a result of 2 TiB from inputs that are expanded


def expanded(M=ENORMOUS["M"]):
    shape = (ENORMOUS["B"], ENORMOUS["H"], M, 64)
    return torch.ones(1, 1, 1, 64, device="cuda", dtype=BFLOAT16).expand(shape)


@pytest.mark.parametrize("kernel", ["triton_flash", None])
def test_out_of_memory_names_kernel_and_problem(kernel):
    q, keys = expanded(), expanded(64)
    with pytest.raises(torch.OutOfMemoryError, match=r"kernel \w+ ran out of memory on forward B=16384 H=1024"):
        sdpa.scaled_dot_product_attention(q, keys, keys, kernel=kernel)


TOO_LARGE = Tile(64, 128, 4, 12)  # 12 stages of 128 keys and values of 128 numbers: 768 KiB of shared memory


def choice_of(inputs, setting=""):
    problem = problem_of(inputs, "forward")
    return select.Choice(by_name()["triton_flash"], TOO_LARGE, problem, "the test's", setting)


def test_tile_too_large_for_the_device():
    """A warning, and the answer of a tile that the kernel offers, also where it was asked for by name."""
    inputs = make_inputs(real(D=128, Dv=128, mask="causal"))
    told = r"kernel triton_flash could not be launched on forward B=2.*num_stages=12.*shared.*its Tile.* answers"
    try:
        for setting in ("", Setting(("triton_flash",), forced=True).encode()):
            with pytest.warns(UserWarning, match=told):
                results = choice_of(inputs, setting).run(inputs)
            assert results.out.isfinite().all()
            assert sdpa.last_choice().kernel.name == "triton_flash" and sdpa.last_choice().tile != TOO_LARGE
    finally:
        select.clear_caches()


CHOSEN = [real(mask=mask, dtype=dtype) for mask in MASKS for dtype in (BFLOAT16, FLOAT16, FLOAT32)] + [
    real(dropout_p=0.1), real(dropout_p=0.1, mask="bias"), real(softcap=2.0), real(sinks=True), real(scale=-1.0),
    real(Hkv=1), real(D=33, Dv=65), real(D=512, Dv=512), real(mask="bias", requires_bias_grad=True),
    real(M=1, N=8192, H=32, Hkv=8), real(B=70000, H=1, Hkv=1, M=16, N=16), real(layout="bmhd", mask="causal"),
]  # fmt: skip


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_the_default_is_never_math(case):
    inputs = make_inputs(case)
    for problem in (problem_of(inputs, "forward"), problem_of(inputs, "backward", case.requires_bias_grad)):
        choice = select.choose(problem, "", ALL_TOGGLES)
        assert choice.kernel.family != "math", f"{problem}: {choice}"


def errors(name, inputs, grad_out, wanted):
    """Root mean square distance from float64 of out and of each gradient."""
    results, grads = run_kernel(name, inputs, grad_out)
    pairs = [(results.out, wanted[0].out), *zip(grads[:3], wanted[1][:3], strict=True)]
    return [float((got.double() - want).square().mean().sqrt()) for got, want in pairs]


@pytest.mark.parametrize("mask", ["none", "causal", "bias"])
def test_float32_is_as_exact_as_the_efficient_kernel(mask):
    case = real(dtype=FLOAT32, mask=mask)
    inputs, grad_out = make_inputs(case), Draw(case, 1).normal(2, 4, 1024, 64)
    wanted = differentiate(inputs, grad_out, torch.float64)
    mine, theirs = (errors(name, inputs, grad_out, wanted) for name in (name_for(inputs), "vendor_efficient"))
    for name, own, other in zip(("out", *Gradients._fields), mine, theirs, strict=False):
        assert own <= other, f"{name}: {own:.3g} is more than {other:.3g}"


def test_tf32_where_it_is_allowed():
    """Faster products, within the budget that torch's own have then."""
    case = real(dtype=FLOAT32, mask="causal")
    inputs, grad_out = make_inputs(case), Draw(case, 1).normal(2, 4, 1024, 64)
    exact, _ = run_kernel("triton_flash", inputs, grad_out)
    torch.set_float32_matmul_precision("high")
    try:
        right(check_kernel("triton_flash", case), case)
        rounded, _ = run_kernel("triton_flash", inputs, grad_out)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not torch.equal(exact.out, rounded.out)


SANITIZED = [
    real(B=1, H=2, Hkv=1, M=67, N=131, D=40, Dv=24, mask=mask, requires_bias_grad=mask.startswith("bias"))
    for mask in ("causal", "window", "lengths", "segments", "prefix", "allowed", "padding", "bias", "bias_rows")
]


@pytest.mark.parametrize("case", SANITIZED, ids=str)
def test_sanitized(case):
    """`make gpu-sanitize` runs these under compute-sanitizer, which sees reads and writes out of bounds."""
    right(check_kernel(name_for(make_inputs(case)), case), case)


CUDA_SANITIZED = [
    real(B=2, H=4, Hkv=2, M=200, N=331, D=D, Dv=Dv, dtype=torch.bfloat16, mask=mask)
    for (D, Dv), mask in product(
        [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ("none", "causal", "window", "segments")
    )
] + [
    real(B=2, H=4, Hkv=2, M=200, N=331, D=D, Dv=D, dtype=torch.bfloat16, mask=mask, dropout_p=0.2)
    for D, mask in product((64, 128), ("none", "causal"))
]


ORDERED = [case for case in CUDA_SANITIZED if case.D <= 128 and case.mask != "segments"]


@pytest.mark.parametrize(
    "case, in_order", [(case, False) for case in CUDA_SANITIZED] + [(case, True) for case in ORDERED], ids=str
)
def test_sanitized_cuda(case, in_order, cuda_flash_able):
    """Forwards and backwards of the CUDA library: of single thread blocks, of pairs, and in one order."""
    torch.use_deterministic_algorithms(in_order)
    try:
        found = check_kernel("cuda_flash", case)
    finally:
        torch.use_deterministic_algorithms(False)
    assert any(c.name == "grad_q" for c in found)
    right(found, case)


def test_sanitized_decode():
    for case in (real(B=1, H=6, Hkv=2, M=3, N=700, D=40, Dv=24), real(B=1, H=2, Hkv=2, M=1, N=1031, mask="lengths")):
        right(check_kernel("triton_decode", case), case)
    test_pages(48)
    test_packed_sequences()
