"""torch's own samples for nn.functional.scaled_dot_product_attention against our function, every dtype listed for CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as torch_kernel
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map_only

import sdpa

NAME = "nn.functional.scaled_dot_product_attention"
OP = next(op for op in op_db if op.name == NAME)
DTYPES = sorted(OP.supported_dtypes("cpu"), key=str)
LARGE = 600  # inputs with more elements are checked in gradcheck's fast mode, which projects Jacobians


def label(sample):
    shapes = [tuple(t.shape) for t in (sample.input, *sample.args)]
    options = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in sample.kwargs.items()}
    return f"{shapes} {options}"


def samples(dtype, requires_grad=False):
    """torch's samples, the same whenever they are asked for. Empty would mean that nothing is tested."""
    torch.manual_seed(0)
    found = list(OP.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    assert len(found) > 10
    return found


def is_drop(sample):
    """Samples with dropout: no kernel's random stream is another's, and torch's differ among themselves."""
    return sample.kwargs.get("dropout_p", 0.0) > 0.0


def call(function, sample, tensors=None):
    q, k, v = (sample.input, *sample.args) if tensors is None else tensors
    torch.manual_seed(1)
    return function(q, k, v, **sample.kwargs)


dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def test_all_floating_dtypes_are_listed():
    assert {torch.float32, torch.float64, torch.bfloat16, torch.float16} >= set(DTYPES) >= {torch.float32, torch.float64}


@dtypes
def test_results_and_gradients(dtype, matches_torch):
    compared = 0
    for sample in samples(dtype):
        q, k, v = sample.input, *sample.args
        if is_drop(sample):
            continue  # compared with our own math in test_dropped_samples
        options = {name: value for name, value in sample.kwargs.items() if name not in ("attn_mask", "dropout_p")}
        try:
            matches_torch(q, k, v, sample.kwargs.get("attn_mask"), **options)
        except AssertionError as error:
            pytest.fail(f"{label(sample)}: {error}")
        compared += 1
    assert compared > 5


@dtypes
def test_dropped_samples(dtype):
    """Against our math in float64 under the same seed; and of the shape and dtype that torch gives."""
    seen = 0
    for sample in filter(is_drop, samples(dtype)):
        got = call(sdpa.scaled_dot_product_attention, sample)
        torch.manual_seed(1)
        wide = tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, sample.kwargs)
        with sdpa.sdpa_kernel("math"):
            tensors = (t.double() for t in (sample.input, *sample.args))
            wanted = sdpa.scaled_dot_product_attention(*tensors, **wide)
        like = call(F.scaled_dot_product_attention, sample)
        assert (got.shape, got.dtype) == (like.shape, like.dtype)
        bound = 8 * torch.finfo(dtype).eps * wanted.abs().max()
        assert (got.double() - wanted).abs().max() <= bound, label(sample)
        seen += 1
    assert seen > 3


@pytest.mark.filterwarnings("ignore:.*requires floating point")
def test_gradcheck_and_gradgradcheck_of_float64_samples():
    for sample in samples(torch.float64, requires_grad=True):
        tensors = (sample.input, *sample.args)
        fast = sum(t.numel() for t in tensors) > LARGE

        def function(*given, sample=sample):
            return call(sdpa.scaled_dot_product_attention, sample, given)

        assert gradcheck(function, tensors, fast_mode=fast), label(sample)
        assert gradgradcheck(function, tensors, fast_mode=True), label(sample)


def test_forward_mode_of_float64_samples():
    for sample in samples(torch.float64, requires_grad=True):

        def function(*given, sample=sample):
            return call(sdpa.scaled_dot_product_attention, sample, given)

        tensors = (sample.input, *sample.args)
        assert gradcheck(function, tensors, check_forward_ad=True, check_backward_ad=False, fast_mode=True), label(sample)


def described(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type


@dtypes
def test_fake_tensors(dtype):
    for sample in samples(dtype):
        wanted = call(sdpa.scaled_dot_product_attention, sample)
        with FakeTensorMode() as mode:
            fakes = tree_map_only(torch.Tensor, mode.from_tensor, ((sample.input, *sample.args), sample.kwargs))
            got = sdpa.scaled_dot_product_attention(*fakes[0], **fakes[1])
        assert described(got) == described(wanted), label(sample)


@dtypes
def test_shapes_and_dtypes_are_those_of_torch(dtype):
    for sample in samples(dtype):
        with torch_kernel(SDPBackend.MATH):
            wanted = call(F.scaled_dot_product_attention, sample)
        got = call(sdpa.scaled_dot_product_attention, sample)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), label(sample)


@dtypes
def test_non_contiguous_samples(dtype):
    for sample in filter(lambda s: not is_drop(s), samples(dtype)):
        wanted = call(sdpa.scaled_dot_product_attention, sample)
        got = call(sdpa.scaled_dot_product_attention, sample.noncontiguous())
        assert torch.allclose(got, wanted, rtol=0, atol=8 * torch.finfo(dtype).eps * float(wanted.abs().max())), label(sample)


def test_error_samples():
    """torch lists none today; if it starts to, they have to fail here as well."""
    errors = [] if OP.error_inputs_func is None else list(OP.error_inputs("cpu"))
    for error in errors:
        sample = error.sample_input
        with pytest.raises(error.error_type):
            call(sdpa.scaled_dot_product_attention, sample)
