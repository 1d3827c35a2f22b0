"""Hooks of saved tensors may return them with other strides, or at other addresses, than those that were saved."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from helpers import MOVES, draw, hooked_gradients, integers
from sdpa import Mask, prepared
from sdpa import scaled_dot_product_attention as attend
from sdpa.calls import CALLS
from sdpa.nn.weights import attention_with_weights
from sdpa.validate import Options

GPU_KERNELS = ("cuda_flash", "triton_hopper", "triton_flash", "triton_efficient")
GPU_KERNELS += ("vendor_flash", "vendor_cudnn", "vendor_efficient")


def right_under_hooks(kernel, move, dtype, device, tolerance):
    generator = torch.Generator().manual_seed(0)
    packed, grad_out = (torch.randn(*n, generator=generator) for n in ((2, 17, 3, 2, 16), (2, 2, 17, 16)))
    packed, grad_out = (t.to(device, dtype) for t in (packed, grad_out))
    leaf = packed.double().requires_grad_()
    F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in leaf.unbind(2))).backward(grad_out.double())
    for step, found in enumerate(hooked_gradients(partial(attend, kernel=kernel), move, packed, grad_out)):
        distance = (found.double() - leaf.grad).norm() / leaf.grad.norm()
        assert distance <= tolerance, f"step {step}: {distance}"


@pytest.mark.parametrize("kernel", [None, "cpu_flash", "vendor_cpu_flash", "math"])
@pytest.mark.parametrize("move", MOVES)
def test_gradients_of_saved_tensors_that_moved(kernel, move):
    right_under_hooks(kernel, move, torch.float32, "cpu", 1e-5)


# Which of query, key, value and bias are one tensor.
SHARED = ("xxx", "qxx", "xxv", "xkx", "xxxx")
NO_BIAS_GRAD = ("cuda_flash", "triton_flash", "vendor_cpu_flash", "vendor_flash", "vendor_cudnn")


def shared_by(*kernels):
    """Tensors and kernels, without a gradient of the bias for kernels that have none."""
    return [(letters, k) for letters in SHARED for k in kernels if len(letters) == 3 or k not in NO_BIAS_GRAD]


def gradients_of_shared(letters, kernel, dtype, device, hook=None):
    """Gradients of the distinct tensors that `letters` names, float64 ones without a kernel of ours."""
    made = {x: draw(2, 3, 16, 16, dtype=torch.float32, seed=ord(x)).to(device, dtype).requires_grad_() for x in letters}
    tensors = [made[letter] for letter in letters]
    with nullcontext() if hook is None else saved_tensors_hooks(lambda t: t, hook):
        out = F.scaled_dot_product_attention(*tensors) if kernel == "torch" else attend(*tensors, kernel=kernel)
    return torch.autograd.grad(out.square().sum(), list(made.values()))


def right_where_one_tensor_has_several_places(letters, kernel, dtype, device, tolerance):
    wanted = gradients_of_shared(letters, "torch", torch.float64, device)
    one = {}  # what a hook returns for tensors of equal numbers
    hooks = (torch.clone, torch.clone, None, lambda t: one.setdefault((t.shape, t.sum().item()), t), None)
    for step, hook in enumerate(hooks):
        for found, right in zip(gradients_of_shared(letters, kernel, dtype, device, hook), wanted, strict=True):
            assert (found.double() - right).norm() <= tolerance * right.norm(), f"step {step}"


@pytest.mark.parametrize("letters,kernel", shared_by(None, "cpu_flash", "vendor_cpu_flash", "math"))
def test_one_tensor_in_several_places_that_comes_back_as_several(letters, kernel):
    CALLS.clear()
    right_where_one_tensor_has_several_places(letters, kernel, torch.float32, "cpu", 1e-5)


@pytest.mark.parametrize("letters", SHARED)
def test_checkpoints_of_one_tensor_in_several_places(letters):
    CALLS.clear()
    made = {letter: draw(2, 3, 16, 16, dtype=torch.float32, seed=ord(letter)).requires_grad_() for letter in letters}
    attend_shared = partial(attend, *(made[letter] for letter in letters))
    right = torch.autograd.grad(attend_shared(kernel="math").sum(), list(made.values()))
    for _ in range(3):
        out = checkpoint(attend_shared, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), list(made.values())), right)


@pytest.mark.parametrize("hook", [torch.clone, lambda t: t], ids=["clone", "none"])
def test_ids_that_come_back_as_two_tensors(hook):
    """Ids of one tensor for queries and keys, which are replaced by int32 ones."""
    CALLS.clear()
    mask = Mask(segments=integers(*[0] * 5 + [1] * 7, dtype=torch.int64))
    q, k, v = (draw(1, 2, 12, 8, dtype=torch.float32, seed=n).requires_grad_() for n in range(3))
    right = torch.autograd.grad(attend(q, k, v, mask, kernel="math").sum(), (q, k, v))
    for _ in range(3):
        with saved_tensors_hooks(hook, lambda t: t):
            out = attend(q, k, v, mask)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), right)


def negative(out):
    """A gradient that has the negative bit, whose memory holds other numbers, arrives."""
    return torch.complex(torch.ones_like(out), out).conj().abs().sum()


def gradient_of(function, loss, hook=None, create_graph=False):
    q, k, v = (draw(2, 4, 24, 32, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3))
    with nullcontext() if hook is None else saved_tensors_hooks(lambda t: t, hook):
        out = function(q, k, v)
    return torch.autograd.grad(loss(out), (q, k, v), create_graph=create_graph)


@pytest.mark.parametrize("kernel", [None, "vendor_cpu_flash", "math"])
def test_gradients_with_the_negative_bit(kernel):
    """Between ordinary ones, of which the recorded backward is."""
    ours = partial(attend, kernel=kernel)
    for loss in (torch.sum, torch.sum, negative, negative, torch.sum, negative):
        wanted = gradient_of(F.scaled_dot_product_attention, loss)
        for one, other in zip(gradient_of(ours, loss), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_gradients_without_memory():
    """torch's zeros without storage: zeros, and later backwards are as before."""
    q, k, v = (draw(2, 4, 24, 32, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3))
    ordinary = torch.randn(2, 4, 24, 32)

    def grads(grad_out):
        return torch.autograd.grad(attend(q, k, v), (q, k, v), grad_out)

    wanted, *_ = (grads(ordinary) for _ in range(3))
    for _ in range(2):
        assert not any(g.any() for g in grads(torch._efficientzerotensor(ordinary.shape)))
        assert all(map(torch.equal, grads(ordinary), wanted))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_in_batches(device):
    """torch.autograd.grad(is_grads_batched=True), at the first time and after a backward was recorded."""
    q, k, v = (draw(1, 2, 5, 8, dtype=torch.float32, seed=seed).to(device).requires_grad_() for seed in range(3))
    batch = torch.randn(3, 1, 2, 5, 8, device=device)
    for _ in range(3):
        found = torch.autograd.grad(attend(q, k, v), (q, k, v), batch, is_grads_batched=True)
        for n in range(3):
            wanted = torch.autograd.grad(attend(q, k, v), (q, k, v), batch[n])
            assert all(torch.allclose(f[n], w, atol=1e-6) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("hook", [torch.Tensor.half, torch.Tensor.double, lambda t: t[:1].clone()])
def test_hooks_that_return_other_tensors_are_refused(hook, create_graph):
    """Other dtypes or sizes than were saved, after a backward was recorded."""
    wanted, *_ = (gradient_of(attend, torch.sum, None, create_graph) for _ in range(3))

    def changed(tensor):
        return tensor if tensor.requires_grad and tensor.is_leaf else hook(tensor)  # the results, not what was given

    for _ in range(2):
        with pytest.raises(RuntimeError):
            gradient_of(attend, torch.sum, changed, create_graph)
    assert all(map(torch.equal, gradient_of(attend, torch.sum, None, create_graph), wanted))


@pytest.mark.parametrize("name", ["grad_out", "out", "lse"])
@pytest.mark.parametrize("change", [torch.Tensor.half, torch.Tensor.double, lambda t: t[:1].clone()])
def test_the_operator_refuses_other_tensors_after_a_recorded_backward(name, change):
    q, k, v = (draw(2, 4, 24, 32, dtype=torch.float32, seed=seed) for seed in range(3))
    out, lse = torch.ops.sdpa.attention_forward(q, k, v, 0.2, needs_lse=True)
    given = {"grad_out": out, "out": out.clone(), "lse": lse}
    for _ in range(3):
        torch.ops.sdpa.attention_backward(**given, q=q, k=k, v=v, scale=0.2)
    with pytest.raises(RuntimeError, match="cpu_flash: expected"):
        torch.ops.sdpa.attention_backward(**{**given, name: change(given[name])}, q=q, k=k, v=v, scale=0.2)


def test_autocast_does_not_reach_backwards():
    """Derivatives that are compositions of torch's operations keep the dtype of their tensors."""
    q, k, v, upstream = (draw(2, 3, 17, 16, dtype=torch.float32, seed=n).requires_grad_() for n in range(4))
    weights_of = partial(attention_with_weights, options=Options(), average=False)
    with_autocast = []
    for on in (False, True):
        out = attend(q, k, v)
        first = torch.autograd.grad(out, (q, k, v), upstream, create_graph=True)
        weights = weights_of(q, k, v)[1]
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            second = torch.autograd.grad([t.square().sum() for t in first], (q, k, v, upstream))
            by_weights = torch.autograd.grad(weights.square().sum(), (q, k))
        with_autocast.append((*second, *by_weights))
    torch.testing.assert_close(*with_autocast, rtol=0, atol=0)


def test_the_precision_of_a_backward_is_the_one_it_runs_under(monkeypatch):
    """Not that of its forward or of an earlier backward: one may multiply float32 as TF32, and another not."""
    CALLS.clear()
    asked, precision = [], [""]
    monkeypatch.setattr(prepared, "float32_precision", lambda: precision[0])
    backward = prepared.Prepared.backward
    monkeypatch.setattr(prepared.Prepared, "backward", lambda *args: asked.append(precision[0]) or backward(*args))
    q, k, v = (draw(1, 2, 12, 8, dtype=torch.float32, seed=n).requires_grad_() for n in range(3))
    for precision[0] in ("tf32", "ieee", "tf32", "ieee"):
        attend(q, k, v).sum().backward()
    assert asked == ["tf32", "ieee"]


@pytest.mark.gpu
def test_tf32_in_a_backward_alone():
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", requires_grad=True) for _ in range(3))
    found = []
    for precision in ("highest", "high", "highest", "high"):
        out = attend(q, k, v, kernel="triton_flash")
        torch.set_float32_matmul_precision(precision)
        try:
            found.append(torch.autograd.grad(out.sum(), (q, k, v)))
        finally:
            torch.set_float32_matmul_precision("highest")
    for i in range(3):
        exact, rounded, again, rounded_again = (grads[i] for grads in found)
        assert not torch.equal(exact, rounded)
        torch.testing.assert_close([again, rounded_again], [exact, rounded], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("letters,kernel", shared_by(None, *GPU_KERNELS))
def test_one_tensor_in_several_places_on_a_gpu(letters, kernel):
    right_where_one_tensor_has_several_places(letters, kernel, torch.float16, "cuda", 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [None, *GPU_KERNELS])
@pytest.mark.parametrize("move", MOVES)
def test_the_same_on_a_gpu(kernel, move):
    right_under_hooks(kernel, move, torch.float16, "cuda", 5e-3)
