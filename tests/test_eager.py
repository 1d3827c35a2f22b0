"""Plans of eager calls follow every switch; settings that are entered again, and masks that used to be misread."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as torch_kernel

import sdpa
from sdpa import scaled_dot_product_attention as attend


def qkv(grad: bool = False):
    torch.manual_seed(0)
    return [torch.randn(2, 4, 12, 8, requires_grad=grad) for _ in range(3)]


def ran() -> str:
    return sdpa.last_choice().kernel.name


def test_backward_of_a_plan_follows_torchs_switches():
    q, k, v = qkv(grad=True)
    out = attend(q, k, v)
    with torch_kernel(SDPBackend.MATH):
        torch.autograd.grad(out.sum(), q, retain_graph=True)
        assert ran() == "math"
    torch.autograd.grad(out.sum(), q)
    assert ran() == "cpu_flash"


def test_backward_of_a_plan_follows_deterministic_mode():
    q, k, v = qkv(grad=True)
    for deterministic in (False, True, False):
        out = attend(q, k, v)
        torch.use_deterministic_algorithms(deterministic)
        torch.autograd.grad(out.sum(), q)
        assert sdpa.last_choice().problem.deterministic == deterministic


def test_plan_sees_the_layout_of_a_mask():
    q, k, v = qkv()
    mask = torch.rand(12, 12)
    attend(q, k, v, mask)
    with pytest.raises(RuntimeError, match=r"Expected attn_mask to be a dense tensor .* but got torch.sparse_coo"):
        attend(q, k, v, mask.to_sparse())


def test_one_setting_entered_again():
    q, k, v = qkv()
    setting = sdpa.sdpa_kernel("math")
    with setting:
        with setting:
            pass
        attend(q, k, v)
        assert sdpa.last_choice().kernel.family == "math"
    attend(q, k, v)
    assert ran() == "cpu_flash"


def test_setting_as_a_decorator():
    @sdpa.sdpa_kernel("vendor_cpu_flash")
    def run():
        attend(*qkv())
        return ran()

    assert run() == "vendor_cpu_flash"


def test_strict_refuses_math_beside_others():
    q, k, v = qkv()
    window = sdpa.Mask(window=(2, 2))  # torch's CPU flash knows none
    with sdpa.sdpa_kernel(["vendor_cpu_flash", "math"]):
        attend(q, k, v, window)
        assert sdpa.last_choice().kernel.family == "math"
    with sdpa.sdpa_kernel(["vendor_cpu_flash", "math"], strict=True), pytest.raises(sdpa.NoKernelError, match="strict"):
        attend(q, k, v, window)


@pytest.mark.parametrize("side", [24, sys.maxsize, 2**63, 2**80], ids=str)
def test_window_wider_than_the_matrix_is_open(side):
    q, k, v = qkv()
    assert torch.equal(attend(q, k, v, sdpa.Mask(window=(0, side))), attend(q, k, v, sdpa.Mask(window=(0, None))))
    assert torch.equal(attend(q, k, v, sdpa.Mask(window=(side, side))), attend(q, k, v))


@pytest.mark.parametrize("paired", [False, True], ids=["self", "pair"])
def test_ids_of_64_bits_stay_different(paired):
    q, k, v = qkv()
    ids = torch.tensor([0, 2**32, 1, 1, -(2**40), 0]).repeat(2)
    others = ids.flip(0) if paired else ids
    mask = sdpa.Mask(segments=(ids, others) if paired else ids)
    assert torch.allclose(attend(q, k, v, mask), attend(q, k, v, ids[:, None] == others), atol=1e-6)


def test_alibi_that_wants_a_gradient_is_refused():
    with pytest.raises(RuntimeError, match="alibi slopes without requires_grad"):
        attend(*qkv(), sdpa.Mask(alibi=torch.ones(4, requires_grad=True)))


@pytest.mark.parametrize("same", ["key is value", "all"])
def test_one_tensor_twice_compiles(same):
    q, k, _ = qkv(grad=True)
    call = (lambda a, b: attend(a, b, b)) if same == "key is value" else (lambda a, b: attend(a, a, a))
    wanted = torch.autograd.grad(call(q, k).sum(), [q, k], allow_unused=True)
    found = torch.autograd.grad(
        torch.compile(call, fullgraph=True, backend="aot_eager")(q, k).sum(), [q, k], allow_unused=True
    )
    for f, w in zip(found, wanted, strict=True):
        assert (f is None and w is None) or torch.allclose(f, w, atol=1e-6)
