"""Recorded calls of every kind on a device: run again with other tensors they give the bits of the ordinary way."""

from __future__ import annotations

import signal

import pytest
import torch
from recorded_calls import DECODED, KINDS, M, backward_of, given_of, inputs_of, problem_of, tensors_in

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

AGAIN = 3  # other tensors, one after the other


@pytest.fixture(scope="module")
def modules():
    """The kernels' modules, which import Triton."""
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    from sdpa.kernels.triton import decode, flash, hopper

    return {"flash": flash, "decode": decode, "hopper": hopper}


def inputs(kind, rows=M, dtype=torch.float16):
    """What draws (inputs,) from a seed."""
    return lambda seed: (inputs_of(kind, seed, "cuda", rows, dtype),)


def backward_tensors(kind, lse_grad=False, dtype=torch.float16):
    """What draws (inputs, results, upstream) from a seed."""
    return lambda seed: backward_of(inputs_of(kind, seed, "cuda", dtype=dtype), seed, lse_grad, dtype)


def run_again(module, make, direction, extra):
    """Record a call, run it again with other tensors, and compare each with the ordinary way."""
    problem = problem_of(make(0), direction, extra)
    tile = module.tiles(problem)[0]
    first, again = module.record(make(0), problem, tile)
    assert again is not None
    for seed in range(AGAIN):
        tensors = make(seed)
        wanted = tensors_in(getattr(module, direction)(*tensors, problem, tile))
        found = again(*given_of(tensors))
        assert found is not None
        for got, want in zip(tensors_in(found), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            assert got.stride() == want.stride()
    return first, again


DECODES = [("decode", "paged", M), *(("decode", kind, 1) for kind in sorted(DECODED))]


@pytest.mark.parametrize("lse", [True, False], ids=["lse", "no lse"])
@pytest.mark.parametrize("name,kind,rows", [*(("flash", kind, M) for kind in KINDS), *DECODES])
def test_every_kind_of_forward_again(name, kind, rows, lse, modules):
    run_again(modules[name], inputs(kind, rows), "forward", {"lse"} if lse else ())


@pytest.mark.parametrize("kind", ["plain", "causal", "packed", "everything"])
def test_float32_forwards_again(kind, modules):
    """Two launches: of float16 parts, and of what these do not hold."""
    run_again(modules["flash"], inputs(kind, dtype=torch.float32), "forward", {"lse"})


@pytest.mark.parametrize("lse_grad", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_backward_again(kind, lse_grad, modules):
    make = backward_tensors(kind, lse_grad)
    run_again(modules["flash"], make, "backward", {"bias_grad"} if make(0)[0].bias is not None else ())


@pytest.mark.parametrize("lse_grad", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("kind", ["plain", "packed", "bias", "everything"])
def test_float32_backwards_again(kind, lse_grad, modules):
    """One launch more, of float16 parts, and the memory that these and their units take."""
    make = backward_tensors(kind, lse_grad, dtype=torch.float32)
    run_again(modules["flash"], make, "backward", {"bias_grad"} if make(0)[0].bias is not None else ())


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("kind", ["plain", "causal", "dropout", "bias", "padding", "unaligned"])
def test_weights_again(kind, averaged, modules):
    def make(seed):
        return inputs_of(kind, seed, "cuda"), torch.zeros(2, 4, M, device="cuda") + seed

    run_again(modules["flash"], make, "weights", {"averaged"} if averaged else ())


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["plain", "causal", "bias"])
def test_hopper_again(kind, direction, modules):
    hopper = modules["hopper"]
    if hopper.unavailable():
        pytest.skip(hopper.unavailable())
    if direction == "forward":
        run_again(hopper, inputs(kind, dtype=torch.bfloat16), "forward", {"lse"})
    elif kind != "bias":
        run_again(hopper, backward_tensors(kind, dtype=torch.bfloat16), "backward", ())


BY_ADDRESSES = ("plain", "causal", "softcap", "dropout", "key lengths", "both lengths", "segments", "packed")
BY_ADDRESSES += ("segments of one tensor",)


@pytest.mark.parametrize(
    "direction,kind", [("forward", "sinks"), *((d, kind) for d in ("forward", "backward") for kind in BY_ADDRESSES)]
)
def test_cuda_flash_again_by_addresses(kind, direction):
    """Its library runs the call again for other tensors. Sums of grad_q are in the order in which blocks arrive."""
    from sdpa.kernels.cuda import flash
    from sdpa.repeated import LibraryCall

    if flash.unavailable():
        pytest.skip(flash.unavailable())
    make = inputs(kind) if direction == "forward" else backward_tensors(kind)
    problem = problem_of(make(0), direction, {"lse"} if direction == "forward" else ())
    _, again = flash.record(make(0), problem, None)
    assert isinstance(again, LibraryCall)
    for seed in range(AGAIN):
        tensors = make(seed)
        wanted = tensors_in(getattr(flash, direction)(*tensors, problem))
        found = again(*given_of(tensors))
        assert found is not None
        for got, want in zip(tensors_in(found), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
            assert got.stride() == want.stride()


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16], ids=str)
def test_casts_of_autocast(given, autocast):
    """One by one at first, then in one launch, on other tensors."""
    from sdpa.autocast import Casts

    casts = Casts(autocast)
    for count in range(5):
        tensors = [torch.randn(2, 3, 16, 40, device="cuda").to(given).transpose(1, 2) for _ in range(3)]
        for got, tensor in zip(casts(*tensors), tensors, strict=True):
            wanted = tensor.to(autocast)
            assert torch.equal(got, wanted) and got.stride() == wanted.stride()
        assert (casts.again is not None) == (count > 0 and given != autocast)


def test_calls_under_autocast_again():
    import sdpa

    attend = torch.nn.functional.scaled_dot_product_attention
    for seed in range(4):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(1, 4, 16, 64, device="cuda") for _ in range(3))
        for learns in (False, True):
            tensors = [t.requires_grad_(learns) for t in (q, k, v)]
            with torch.autocast("cuda", torch.bfloat16):
                got, wanted = sdpa.scaled_dot_product_attention(*tensors), attend(*tensors)
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-2)
            if learns:
                pairs = zip(*(torch.autograd.grad(o.sum(), tensors) for o in (got, wanted)), strict=True)
                for f, w in pairs:
                    assert f.dtype == torch.float32
                    torch.testing.assert_close(f, w, rtol=3e-2, atol=2e-2)


def test_a_signal_handler_may_run_the_same_launches(modules):
    """A timer whose handler calls what its interrupted code is in the middle of calling."""
    flash = modules["flash"]
    one, other = (inputs("causal")(seed) for seed in (1, 2))
    problem = problem_of(one, "forward", {"lse"})
    tile = flash.tiles(problem)[0]
    _, again = flash.record(one, problem, tile)
    wanted, of_handler = (flash.forward(*tensors, problem, tile).out for tensors in (one, other))
    wrong, calls = [], []

    def handler(number, frame):
        calls.append(number)
        wrong.extend([] if torch.equal(again(*given_of(other))[0], of_handler) else ["inner"])

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(2000):
            signal.setitimer(signal.ITIMER_REAL, 2e-5)  # once: a handler is not to be interrupted by the next
            wrong.extend([] if torch.equal(again(*given_of(one))[0], wanted) else ["outer"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls and not wrong


def test_freed_tensors_are_refused(modules):
    """And the context of the device lives on."""
    flash = modules["flash"]
    tensors = inputs("plain")(1)
    problem = problem_of(tensors, "forward", {"lse"})
    tile = flash.tiles(problem)[0]
    _, again = flash.record(tensors, problem, tile)
    broken = tensors[0]._replace(v=tensors[0].v.clone())
    broken.v.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="0 bytes"):
        again(*given_of((broken,)))
    with pytest.raises(RuntimeError, match="0 bytes"):
        flash.forward(broken, problem, tile)
    torch.cuda.synchronize()
    assert again(*given_of(tensors)) is not None
