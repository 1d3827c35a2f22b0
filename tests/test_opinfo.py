"""torch's own samples for nn.functional.scaled_dot_product_attention, every dtype listed for CPU, against ours."""

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
from sdpa.inputs import Options, build_inputs
from sdpa.reference import attention as reference
from sdpa.testing import compare, forward_band

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
    assert (
        {torch.float32, torch.float64, torch.bfloat16, torch.float16} >= set(DTYPES) >= {torch.float32, torch.float64}
    )


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


def assert_within_budget(got, sample):
    """Our result against the reference in float64, under the seed of `call`."""
    torch.manual_seed(1)
    inputs = build_inputs(sample.input, *sample.args, Options(**sample.kwargs))
    wanted, plain = reference(inputs), reference(inputs, inputs.q.dtype)
    wide = got.reshape(wanted.out.shape)
    found = compare("out", wide, wanted.out, plain.out, inputs.k.shape[2], forward_band(inputs, wanted))
    assert found.ok, f"{label(sample)}: {found}"


@dtypes
def test_dropped_samples(dtype):
    """Under one seed ours drops what the reference drops; and the result is of the shape and dtype that torch gives."""
    dropped = list(filter(is_drop, samples(dtype)))
    assert len(dropped) > 3
    for sample in dropped:
        got, like = (call(run, sample) for run in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention))
        assert (got.shape, got.dtype) == (like.shape, like.dtype)
        assert_within_budget(got, sample)


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
        assert gradcheck(function, tensors, check_forward_ad=True, check_backward_ad=False, fast_mode=True), label(
            sample
        )


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
    for sample in samples(dtype):
        got = call(sdpa.scaled_dot_product_attention, sample.noncontiguous())
        assert_within_budget(got, sample)
