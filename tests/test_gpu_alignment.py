"""Tensors that begin at odd addresses on a GPU: every kernel by its name, and the default, right in both directions."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import right

import sdpa
from sdpa.dispatch.catalog import by_name, kernels_for
from sdpa.inputs import Options, build_inputs
from sdpa.problem import AttentionProblem
from sdpa.testing import backward_bands, compare, differentiate, forward_band

pytestmark = pytest.mark.gpu

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
NAMES = [*(kernel.name for kernel in kernels_for("cuda")), "default"]
B, H, M, N, D = 2, 2, 512, 128, 16  # where cuDNN was seen to answer with wrong numbers
OFFSETS = (1, 2, 4)  # elements
# Which tensors begin at an offset. Triton compiles for each combination, so its kernels try few.
WHERE = {
    "q": {"q"},
    "rows": {"q", "k", "v"},
    "bias": {"bias"},
    "upstream": {"grad_out"},
    "all": {"q", "k", "v", "bias", "grad_out"},
}
FEW = ("rows", "all")


def at(offset, *shape, dtype, device="cuda", seed=0):
    """Normal numbers in memory that begins `offset` elements behind a multiple of 16 bytes."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.empty(offset + torch.Size(shape).numel(), dtype=dtype, device=device)
    tensor = buffer[offset:].view(shape)
    return tensor.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))


def tensors_at(offset, moved, dtype, device="cuda"):
    """q, k, v, bias and grad_out, of which `moved` begin at the offset; the same numbers wherever they lie."""
    shapes = {
        "q": (B, H, M, D), "k": (B, H, N, D), "v": (B, H, N, D), "bias": (1, H, M, N), "grad_out": (B, H, M, D)
    }  # fmt: skip
    return {
        name: at(offset if name in moved else 0, *shape, dtype=dtype, device=device, seed=seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def refused(name, inputs, direction="forward", extra=()):
    """Why a kernel does not take aligned tensors like these; another one's backward follows where it has none."""
    if name == "default" or direction not in by_name()[name].directions:
        return []
    return by_name()[name].why_not(AttentionProblem.of(inputs, direction, frozenset(extra)))


def able(name, inputs):
    """Whether a kernel's forward and backward take inputs that learn; a skip where it does not take them at all."""
    if reasons := refused(name, inputs):
        pytest.skip(f"{name}: {reasons[0]}")
    return not refused(name, inputs, "forward", {"lse"}) and not refused(name, inputs, "backward")


class Reference:
    """float64 results of the numbers of `tensors_at`, and those of torch operations in the same precision."""

    def __init__(self, dtype, biased, device="cuda"):
        given = tensors_at(0, (), dtype, device)
        self.bias = given["bias"] if biased else None
        self.grad_out = given["grad_out"]
        self.inputs = build_inputs(given["q"], given["k"], given["v"], Options(self.bias))
        self.wanted = differentiate(self.inputs, self.grad_out, torch.float64)
        self.plain = differentiate(self.inputs, self.grad_out, dtype)

    def judge(self, out, grads):
        (wanted, wanted_grads), (plain, plain_grads) = self.wanted, self.plain
        terms, dtype = M + N, self.inputs.q.dtype
        found = [compare("out", out, wanted.out, plain.out, terms, forward_band(self.inputs, wanted), dtype)]
        bands = backward_bands(self.inputs, self.grad_out, wanted, wanted_grads)
        for name, got, want, rough in zip("qkv", grads, wanted_grads, plain_grads, strict=False):
            found.append(compare(f"grad_{name}", got, want, rough, terms, bands[name], dtype))
        return found


def call(name, tensors, biased, learns):
    """(out, gradients) of a call of a user."""
    q, k, v = (tensors[n].detach().requires_grad_(learns) for n in "qkv")
    kernel = None if name == "default" else name
    out = sdpa.scaled_dot_product_attention(q, k, v, tensors["bias"] if biased else None, kernel=kernel)
    return out.detach(), torch.autograd.grad(out, (q, k, v), tensors["grad_out"]) if learns else ()


def check(name, dtype, biased, device="cuda"):
    """Aligned tensors, others of the same form, and aligned ones again: what is remembered of a call holds for none of
    another alignment."""
    reference = Reference(dtype, biased, device)
    learns = able(name, reference.inputs)
    places = FEW if name.startswith("triton_") or name == "default" else tuple(WHERE)
    for place in places:
        moved = WHERE[place] if biased else WHERE[place] - {"bias"}
        for offset in (0, *OFFSETS, 0) if moved else ():
            tensors = tensors_at(offset, moved, dtype, device)
            for with_gradients in {False, learns}:
                out, grads = call(name, tensors, biased, with_gradients)
                right(reference.judge(out, grads), f"{name}, {place} at {offset}, gradients: {with_gradients}")
    torch.zeros(1, device=device).sum().item()  # the device still answers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_addresses(name, dtype):
    check(name, DTYPES[dtype], False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_addresses_with_a_bias(name, dtype):
    check(name, DTYPES[dtype], True)


@pytest.mark.parametrize("name", NAMES)
def test_slices_of_a_packed_buffer(name):
    """Rows of 3 * D + 1 numbers: strides and addresses are odd."""
    reference = Reference(BFLOAT16, False)
    if not able(name, reference.inputs):
        pytest.skip(f"{name}: makes no gradients")
    tensors = tensors_at(0, (), BFLOAT16)
    for n in "qkv":
        wide = torch.full((*tensors[n].shape[:3], 3 * D + 1), torch.nan, device="cuda", dtype=BFLOAT16)
        tensors[n] = wide[..., D + 1 : 2 * D + 1].copy_(tensors[n])
    tensors["grad_out"] = at(1, B, M, H, D, dtype=BFLOAT16).transpose(1, 2).copy_(tensors["grad_out"])
    for _ in range(2):
        right(reference.judge(*call(name, tensors, False, True)), name)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_a_sum(name):
    """An upstream gradient whose strides are all 0, and one that repeats its rows."""
    reference = Reference(BFLOAT16, False)
    if not able(name, reference.inputs):
        pytest.skip(f"{name}: makes no gradients")
    for grad_out in (torch.ones(1, device="cuda", dtype=BFLOAT16), at(1, D, dtype=BFLOAT16)):
        tensors = tensors_at(1, {"q", "k", "v"}, BFLOAT16) | {"grad_out": grad_out.expand(B, H, M, D)}
        reference.grad_out = tensors["grad_out"].clone()
        reference.wanted = differentiate(reference.inputs, reference.grad_out, torch.float64)
        reference.plain = differentiate(reference.inputs, reference.grad_out, BFLOAT16)
        right(reference.judge(*call(name, tensors, False, True)), name)


VENDORS = ("vendor_cudnn", "vendor_flash", "vendor_efficient", "cuda_flash", "triton_hopper")


@pytest.mark.parametrize("name", VENDORS)
def test_explain_and_the_choice_tell_of_copies(name):
    tensors = tensors_at(1, {"q", "k"}, BFLOAT16)
    q, k, v = (tensors[n] for n in "qkv")
    able(name, build_inputs(q.clone(), k.clone(), v, Options()))
    clause = "on copies of q and k, which do not lie at multiples of 16 bytes"
    sdpa.scaled_dot_product_attention(q, k, v, kernel=name)
    assert sdpa.last_choice().kernel.name == name and clause in sdpa.last_choice().reason
    assert clause in str(sdpa.explain(q, k, v, kernel=name))
