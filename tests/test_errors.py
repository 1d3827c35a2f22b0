"""Every wrong argument: one sentence with what was expected and what was got, before any kernel runs."""

from __future__ import annotations

import math
import re
import traceback
from functools import partial

import pytest
import torch
import torch.nn.attention.bias as torch_bias
import torch.nn.functional as F

import helpers
import sdpa
from sdpa import Mask
from sdpa.dispatch import select
from sdpa.dispatch.catalog import KERNELS

attention = sdpa.scaled_dot_product_attention
qkv = partial(helpers.qkv, M=5, N=7)


def t(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(*shape, dtype=dtype, device=device)


def same(shape=(2, 3, 5, 8), **options):
    return [t(*shape, **options)] * 3


# name: (arguments, options, exception, text that torch says as well)
TORCH_TEXTS = {
    "dtypes": (
        lambda: ([t(2, 3, 5, 8), t(2, 3, 7, 8, dtype=torch.float64), t(2, 3, 7, 8)], {}),
        "Expected query, key, and value to have the same dtype, but got query.dtype: float key.dtype: double and "
        "value.dtype: float instead.",
    ),
    "dtypes_half": (
        lambda: ([t(2, 8, dtype=torch.bfloat16), t(2, 8, dtype=torch.float16), t(2, 8, dtype=torch.bfloat16)], {}),
        "Expected query, key, and value to have the same dtype, but got query.dtype: c10::BFloat16 key.dtype: "
        "c10::Half and value.dtype: c10::BFloat16 instead.",
    ),
    "devices": (
        lambda: ([t(2, 3, 5, 8), t(2, 3, 7, 8, device="meta"), t(2, 3, 7, 8)], {}),
        "Expected query, key, and value to have the same device type, but got query.device: cpu key.device: meta",
    ),
    "rank": (
        lambda: ([t(8), t(8), t(8)], {}),
        "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: 1 key.dim: 1 and "
        "value.dim: 1 instead.",
    ),
    "mask_float64": (
        lambda: ([*qkv(), t(5, 7, dtype=torch.float64)], {}),
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: double and  "
        "query.dtype: float instead.",
    ),
    "mask_int": (
        lambda: ([*qkv(), t(5, 7, dtype=torch.int64)], {}),
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: long int and  "
        "query.dtype: float instead.",
    ),
    "mask_of_other_half": (
        lambda: ([*qkv(dtype=torch.bfloat16), t(5, 7, dtype=torch.float16)], {}),
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: c10::Half and  "
        "query.dtype: c10::BFloat16 instead.",
    ),
    "heads_do_not_divide": (
        lambda: ([t(2, 6, 5, 8), t(2, 4, 5, 8), t(2, 4, 5, 8)], {"enable_gqa": True}),
        "Number of heads in key and value must divide the number of heads in ",
    ),
    "more_key_heads": (
        lambda: ([t(2, 2, 5, 8), t(2, 4, 5, 8), t(2, 4, 5, 8)], {"enable_gqa": True}),
        "Number of heads in key and value must divide the number of heads in ",
    ),
    "dropout_above_1": (
        lambda: ([*qkv()], {"dropout_p": 1.5}),
        "dropout probability has to be between 0 and 1, but got 1.5",
    ),
}


@pytest.mark.parametrize("name", TORCH_TEXTS)
def test_texts_of_torch(name):
    make, text = TORCH_TEXTS[name]
    arguments, options = make()
    with pytest.raises(RuntimeError, match=re.escape(text)):
        F.scaled_dot_product_attention(*arguments, **options)
    with pytest.raises(RuntimeError, match=re.escape(text)):
        attention(*arguments, **options)


def test_mask_with_is_causal_in_the_words_of_torchs_math():
    text = "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
    mask = t(5, 7, dtype=torch.bool)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), pytest.raises(RuntimeError, match=text):
        F.scaled_dot_product_attention(*qkv(), mask, is_causal=True)
    for given in (mask, t(5, 7), Mask(causal=True), Mask()):
        with pytest.raises(RuntimeError, match=text):
            attention(*qkv(), given, is_causal=True)


def test_causal_bias_with_is_causal():
    bias = torch_bias.causal_upper_left(5, 7)
    for call in (F.scaled_dot_product_attention, attention):
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            call(*qkv(), bias, is_causal=True)


def test_nested_tensors_with_a_mask():
    nested = torch.nested.nested_tensor([t(4, 3, 8), t(2, 3, 8)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(RuntimeError, match="Nested tensors for query / key are not supported when an explicit attn_ma"):
        attention(nested, nested, nested, t(4, 4))
    with pytest.raises(RuntimeError, match="jagged nested tensors together, but key is not nested"):
        attention(nested, t(2, 3, 4, 8), t(2, 3, 4, 8))


def test_no_backend_in_the_words_of_torch():
    text = "No viable backend for scaled_dot_product_attention was found. This is likely due to turning off both"
    with torch.nn.attention.sdpa_kernel([]):
        for call in (F.scaled_dot_product_attention, attention):
            with pytest.raises(RuntimeError, match=text):
                call(*qkv())


@pytest.mark.filterwarnings("ignore")
def test_no_able_kernel_in_the_words_of_torch():
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        with pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)"):
            F.scaled_dot_product_attention(*qkv())
        with pytest.raises(sdpa.NoKernelError, match=r"No available kernel. Aborting execution.") as error:
            attention(*qkv())
    assert "vendor_cudnn" in str(error.value) and "got cpu" in str(error.value)


# name: (arguments, options, exception, pattern): no text of torch to follow
OWN_TEXTS = {
    "head_sizes": (lambda: ([t(2, 3, 5, 8), t(2, 3, 7, 4), t(2, 3, 7, 8)], {}), RuntimeError, r"head size.*8\).*4\)"),
    "lengths": (lambda: ([t(2, 3, 5, 8), t(2, 3, 7, 8), t(2, 3, 6, 8)], {}), RuntimeError, r"length.*7, 8\).*6, 8\)"),
    "batches": (lambda: ([t(2, 3, 5, 8), t(3, 3, 7, 8), t(2, 3, 7, 8)], {}), RuntimeError, r"batch dimensions.*\(3, 3"),
    "heads": (lambda: ([t(2, 6, 5, 8), t(2, 3, 7, 8), t(2, 3, 7, 8)], {}), RuntimeError, r"6, 3 and 3; enable_gqa"),
    "integers": (lambda: (same(dtype=torch.int64), {}), RuntimeError, r"float32, float64.*got long int"),
    "complex": (lambda: (same(dtype=torch.complex64), {}), RuntimeError, r"float32, float64.*got c10::complex<float>"),
    "mask_too_large": (lambda: ([*qkv(), t(5, 9)], {}), RuntimeError,
                       r"^attn_mask of shape \(5, 9\) does not broadcast to \(..., H, M, N\) = \(2, 3, 5, 7\)$"),
    "bias_too_large": (lambda: ([*qkv(), Mask(bias=t(5, 9))], {}), RuntimeError,
                       r"^Mask.bias of shape \(5, 9\) does not broadcast to .* = \(2, 3, 5, 7\)$"),
    "bias_float64": (lambda: ([*qkv(), Mask(bias=t(5, 7, dtype=torch.float64))], {}), RuntimeError,
                     r"^Expected Mask.bias dtype to be .*, but got Mask.bias.dtype: double"),
    "allowed_too_large": (lambda: ([*qkv(), Mask(allowed=t(5, 9, dtype=torch.bool))], {}), RuntimeError,
                          r"^Mask.allowed of shape \(5, 9\) does not broadcast to .* = \(2, 3, 5, 7\)$"),
    "mask_of_more_batches": (lambda: ([*qkv(), t(4, 1, 5, 7)], {}), RuntimeError, r"\(4, 1, 5, 7\) does not broadcast"),
    "mask_of_higher_rank": (lambda: ([*qkv(), t(2, 2, 3, 5, 7)], {}), RuntimeError, r"does not broadcast"),
    "mask_as_batch": (lambda: ([*qkv(), t(2, 5, 7)], {}), RuntimeError, r"\(2, 5, 7\) does not broadcast"),
    "mask_device": (lambda: ([*qkv(), t(5, 7, device="meta")], {}), RuntimeError, r"attn_mask.*cpu, but got meta"),
    "mask_type": (lambda: ([*qkv(), [[True]]], {}), TypeError, r"attn_mask must be.*got list"),
    "query_type": (lambda: ([None, *qkv()[1:]], {}), TypeError, r"argument 'query' must be Tensor, not NoneType"),
    "value_type": (lambda: ([*qkv()[:2], 3.0], {}), TypeError, r"argument 'value' must be Tensor, not float"),
    "dropout_below_0": (lambda: (qkv(), {"dropout_p": -0.1}), RuntimeError, r"between 0 and 1, but got -0.1"),
    "dropout_nan": (lambda: (qkv(), {"dropout_p": float("nan")}), RuntimeError, r"between 0 and 1, but got nan"),
    "dropout_none": (lambda: (qkv(), {"dropout_p": None}), TypeError, r"dropout_p must be a number.*None"),
    "dropout_text": (lambda: (qkv(), {"dropout_p": "0.1"}), TypeError, r"dropout_p must be a number.*'0.1'"),
    "is_causal_tensor": (lambda: (qkv(), {"is_causal": torch.tensor(True)}), TypeError, r"must be bool, not Tensor"),
    "is_causal_int": (lambda: (qkv(), {"is_causal": 1}), TypeError, r"'is_causal' must be bool, not int"),
    "return_lse_text": (lambda: (qkv(), {"return_lse": "no"}), TypeError, r"'return_lse' must be bool, not str"),
    "return_lse_none": (lambda: (qkv(), {"return_lse": None}), TypeError, r"'return_lse' must be bool, not NoneType"),
    "scale_vector": (lambda: (qkv(), {"scale": t(3)}), TypeError, r"0-dimensional tensor.*shape \(3,\)"),
    "scale_text": (lambda: (qkv(), {"scale": "big"}), TypeError, r"scale must be a number.*got str"),
    "softcap": (lambda: (qkv(), {"softcap": -1.0}), RuntimeError, r"softcap must be.*got -1.0"),
    "softcap_inf": (lambda: (qkv(), {"softcap": math.inf}), RuntimeError, r"softcap must be.*finite.*got inf"),
    "softcap_huge": (lambda: (qkv(), {"softcap": 10**400}), RuntimeError, r"softcap must be.*finite.*got 1000"),
    "softcap_text": (lambda: (qkv(), {"softcap": "no"}), TypeError, r"softcap must be.*'no'"),
    "softcap_bool": (lambda: (qkv(), {"softcap": True}), TypeError, r"softcap must be.*True"),
    "sinks_shape": (lambda: (qkv(), {"sinks": t(4)}), RuntimeError, r"sinks to have shape \(3,\), but got \(4,\)"),
    "sinks_dtype": (lambda: (qkv(), {"sinks": t(3, dtype=torch.float64)}), RuntimeError, r"sinks.*got torch.float64"),
    "sinks_device": (lambda: (qkv(), {"sinks": t(3, device="meta")}), RuntimeError, r"sinks.*cpu, but got meta"),
    "lengths_shape": (lambda: ([*qkv(), Mask(lengths=torch.ones(3, dtype=torch.int32))], {}), RuntimeError,
                      r"lengths to have shape \(2,\) or \(1,\) or \(\), but got \(3,\)"),
    "segments_shape": (lambda: ([*qkv(), Mask(segments=torch.ones(5, dtype=torch.int32))], {}), RuntimeError,
                       r"key segments to have shape \(2, 7\) or \(1, 7\) or \(7,\), but got \(5,\)"),
    "alibi_shape": (lambda: ([*qkv(), Mask(alibi=t(5))], {}), RuntimeError, r"alibi slopes.*\(3,\).*got \(5,\)"),
    "cu_seqlens_shape": (lambda: ([*qkv(), Mask(cu_seqlens=torch.ones(1, dtype=torch.int32))], {}), RuntimeError,
                         r"cu_seqlens to have shape \(documents \+ 1,\), but got \(1,\)"),
    "kernel": (lambda: (qkv(), {"kernel": "warp_drive"}), ValueError, r"unknown kernel or backend 'warp_drive'"),
    "kernel_type": (lambda: (qkv(), {"kernel": 3}), TypeError, r"^kernel must be a str or None, but got int$"),
    "kernel_unhashable": (lambda: (qkv(), {"kernel": {}}), TypeError, r"^kernel must be a str or None, but got dict$"),
    "keyword": (lambda: (qkv(), {"sclae": 1.0}), TypeError, r"unexpected keyword argument 'sclae'"),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_TEXTS)
def test_texts_of_our_own(name):
    make, kind, pattern = OWN_TEXTS[name]
    arguments, options = make()
    with pytest.raises(kind, match=pattern) as error:
        attention(*arguments, **options)
    assert len(str(error.value).splitlines()) == 1


def test_seven_positional_arguments_are_too_many():
    for call in (F.scaled_dot_product_attention, attention):
        with pytest.raises(TypeError, match=r"takes from 3 to 6 positional arguments but 7 were given"):
            call(*qkv(), None, 0.0, False, 1.0)


@pytest.mark.parametrize("name", OWN_TEXTS)
def test_wrong_calls_reach_no_kernel(name, monkeypatch):
    for kernel in KERNELS:
        if kernel.unavailable() is None:
            monkeypatch.setattr(kernel.load(), "forward", lambda *a: pytest.fail("a kernel ran"))
    select.clear_caches()
    make, kind, _ = OWN_TEXTS[name]
    arguments, options = make()
    with pytest.raises(kind):
        attention(*arguments, **options)
    monkeypatch.undo()
    select.clear_caches()


@pytest.mark.parametrize("name", OWN_TEXTS)
def test_wrong_calls_fail_alike_when_gradients_are_needed(name):
    make, kind, pattern = OWN_TEXTS[name]
    arguments, options = make()
    arguments = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
    with pytest.raises(kind, match=pattern):
        attention(*arguments, **options)


@pytest.mark.parametrize("learns", [False, True], ids=["plain", "learns"])
@pytest.mark.parametrize("name", [*TORCH_TEXTS, *OWN_TEXTS])
def test_a_wrong_call_prints_one_traceback(name, learns):
    arguments, options = (TORCH_TEXTS | OWN_TEXTS)[name][0]()
    if learns:
        arguments = [a.requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments]
    with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
        attention(*arguments, **options)
    assert printed(error.value).count("Traceback") == 1


def test_a_call_that_no_kernel_answers_prints_one_traceback():
    with pytest.raises(sdpa.NoKernelError) as error:
        attention(*qkv(), kernel="vendor_flash")
    assert error.value.__context__ is None and printed(error.value).count("Traceback") == 1


def printed(error):
    """What a user sees of an error."""
    return "".join(traceback.format_exception(error))


def test_an_unknown_kernel_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown kernel or backend 'warp_drive'") as error:
        attention(*qkv(), kernel="warp_drive")
    for name in ("flash", "efficient", "cudnn", "math", *(k.name for k in KERNELS)):
        assert name in str(error.value)


def test_several_kernels_in_place_of_one():
    with pytest.raises(ValueError, match=r"one kernel or family, got \['cpu_flash', 'math'\]; sdpa_kernel"):
        sdpa.scaled_dot_product_attention(*qkv(), kernel=["cpu_flash", "math"])


def test_a_forced_kernel_that_cannot_gives_all_its_reasons():
    q, k, v = t(2, 6, 5, 8), t(2, 3, 7, 8), t(2, 3, 7, 12)
    with pytest.raises(sdpa.NoKernelError) as error:
        attention(q, k, v, t(5, 7), 0.5, enable_gqa=True, softcap=2.0, kernel="vendor_cpu_flash")
    text = str(error.value)
    for part in ("vendor_cpu_flash", "needs D == Dv, got D = 8, Dv = 12", "bias", "softcap", "dropout", "M=5 N=7"):
        assert part in text
    assert "math:" not in text


def test_a_forced_kernel_on_another_device_says_so():
    with pytest.raises(sdpa.NoKernelError, match=r"vendor_flash:\n    - runs on cuda, got cpu"):
        attention(*qkv(), kernel="vendor_flash")


def test_explain_given_sizes_says_what_it_takes():
    sizes = (1, 8, 128, 64)
    with pytest.raises(TypeError, match=r"^explain\(\): argument 'query' must be Tensor, not tuple; .*--shape"):
        sdpa.explain(sizes, sizes, sizes)


def test_explain_refuses_like_the_call():
    with pytest.raises(TypeError, match=r"^explain\(\): argument 'return_lse' must be bool, not str$"):
        sdpa.explain(*qkv(), return_lse="no")
    with pytest.raises(TypeError, match=r"^kernel must be a str or None, but got int$"):
        sdpa.explain(*qkv(), kernel=3)
    with pytest.raises(RuntimeError, match="same dtype"):
        sdpa.explain(*qkv()[:2], t(2, 3, 7, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="direction must be 'forward', 'backward' or 'weights', got 'sideways'"):
        sdpa.explain(*qkv(), direction="sideways")


def test_a_scale_that_wants_a_gradient():
    q, scale = torch.randn(1, 2, 4, 8), torch.tensor(0.3, requires_grad=True)
    with pytest.raises(TypeError, match="scale must be a number, or a tensor without requires_grad"):
        sdpa.scaled_dot_product_attention(q, q, q, scale=scale)
    with torch.no_grad():
        out = sdpa.scaled_dot_product_attention(q, q, q, scale=scale)
    assert torch.allclose(out, sdpa.scaled_dot_product_attention(q, q, q, scale=0.3))


def test_out_of_memory_of_the_cpu_library_is_torchs_error_and_names_the_problem():
    """Its allocations fail with an error of their own, which the dispatcher has to know. 70 TB from inputs that are
    expanded."""
    q, k = (torch.ones(1, 1, 1, 64).expand(1 << 14, 1 << 10, rows, 64) for rows in (1 << 14, 4))
    with pytest.raises(torch.OutOfMemoryError, match=r"kernel cpu_flash ran out of memory on .*B=16384.*no room"):
        sdpa.scaled_dot_product_attention(q, k, k, kernel="cpu_flash")
