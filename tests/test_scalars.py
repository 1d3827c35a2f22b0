"""Numbers of NumPy where Python's are wanted: taken where they say the same, else refused in one sentence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sdpa
import sdpa.nn
from helpers import int32, qkv
from sdpa import Mask

attention = sdpa.scaled_dot_product_attention
CU = int32(0, 3, 8)


class Four:
    """An integer of no library that is known."""

    def __index__(self) -> int:
        return 4


def packed():
    return torch.randn(3, 8, 2, 16).unbind()


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"scale": np.float32(0.5)}, {"scale": 0.5}),
        ({"scale": np.int64(2)}, {"scale": 2.0}),
        ({"softcap": np.float16(3.0)}, {"softcap": 3.0}),
        ({"softcap": np.float32(3.0)}, {"softcap": 3.0}),
        ({"dropout_p": np.float64(1.0)}, {"dropout_p": 1.0}),
        ({"dropout_p": np.float32(0.5)}, {"dropout_p": 0.5}),
    ],
)
@pytest.mark.filterwarnings("error")
def test_numbers_are_taken(given, plain):
    tensors = qkv(M=5, N=7)
    results = []
    for options in (given, plain):
        torch.manual_seed(0)
        results.append(attention(*tensors, **options))
    assert torch.equal(*results)
    F.scaled_dot_product_attention(*tensors, **{name: v for name, v in given.items() if name != "softcap"})


def test_integers_of_a_mask_become_pythons():
    mask = Mask(causal=True, window=(np.int64(3), None), prefix=np.uint8(2))
    assert (type(mask.window[0]), type(mask.prefix)) == (int, int)
    assert Mask(window=(Four(), np.int32(0))).window == (4, 0)
    tensors = qkv(M=5, N=7)
    assert torch.equal(attention(*tensors, mask), attention(*tensors, Mask(causal=True, window=(3, None), prefix=2)))


@pytest.mark.parametrize("count", [np.int64(5), np.uint16(5), np.array(5)], ids=["int64", "uint16", "array"])
def test_largest_lengths_of_documents(count):
    tensors = packed()
    wanted = sdpa.varlen_attention(*tensors, CU, CU, 5, 5, is_causal=True)
    for _ in range(2):  # the second is recognised
        assert torch.equal(sdpa.varlen_attention(*tensors, CU, CU, count, 5, is_causal=True), wanted)
    compiled = torch.compile(lambda *t: sdpa.varlen_attention(*t, CU, CU, 5, 5), fullgraph=True, backend="eager")
    assert torch.equal(compiled(*tensors), sdpa.varlen_attention(*tensors, CU, CU, count, count))


def test_length_of_a_cache():
    decoder = sdpa.nn.TransformerDecoder(sdpa.nn.TransformerDecoderLayer(8, 2), 1)
    assert decoder.new_cache(torch.randn(3, 2, 8), np.int64(6)).max_length == 6


@pytest.mark.parametrize("zero", [np.bool_(False), torch.tensor(0.0), torch.tensor(0)], ids=repr)
def test_what_torch_takes_for_a_float(zero):
    """Bools of NumPy and tensors without dimensions, as dropout_p and as scale."""
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    assert torch.equal(attention(q, k, v, dropout_p=zero), attention(q, k, v))
    one = zero == 0
    found = [f(q, k, v, scale=one) for f in (attention, F.scaled_dot_product_attention)]
    torch.testing.assert_close(*found)
    assert not attention(q, k, v, dropout_p=one).any()


NUMPY_BOOL = f"numpy.{type(np.bool_(True)).__name__}"
# name: (call, exception, what it says)
REFUSED = {
    "is_causal": (
        lambda: attention(*qkv(), is_causal=np.bool_(True)),
        TypeError,
        f"scaled_dot_product_attention(): argument 'is_causal' must be bool, not {NUMPY_BOOL}; pass bool(is_causal)",
    ),
    "enable_gqa": (
        lambda: attention(*qkv(), enable_gqa=np.bool_(True)),
        TypeError,
        f"scaled_dot_product_attention(): argument 'enable_gqa' must be bool, not {NUMPY_BOOL}; pass bool(enable_gqa)",
    ),
    "return_lse": (
        lambda: sdpa.varlen_attention(*packed(), CU, CU, 5, 5, return_lse=np.bool_(False)),
        TypeError,
        f"varlen_attention(): argument 'return_lse' must be bool, not {NUMPY_BOOL}; pass bool(return_lse)",
    ),
    "causal": (
        lambda: Mask(causal=np.bool_(True)),
        TypeError,
        f"Mask.causal must be bool, got {NUMPY_BOOL}; pass bool(causal)",
    ),
    "strict": (
        lambda: sdpa.sdpa_kernel("math", strict=np.bool_(True)),
        TypeError,
        f"sdpa_kernel(): argument 'strict' must be bool, not {NUMPY_BOOL}; several kernels go into one list",
    ),
    "scale": (
        lambda: attention(*qkv(), scale=np.array([0.5])),
        TypeError,
        "scale must be a number or a 0-dimensional tensor, but got numpy.ndarray",
    ),
    "dropout_p": (
        lambda: attention(*qkv(), dropout_p=np.zeros((99, 99))),
        TypeError,
        "dropout_p must be a number between 0 and 1, but got a numpy.ndarray of shape (99, 99)",
    ),
    "softcap": (
        lambda: attention(*qkv(), softcap=torch.ones(99, 99)),
        TypeError,
        "softcap must be None or a finite number >= 0 (0 means none), but got a Tensor of shape (99, 99)",
    ),
    "attn_mask": (
        lambda: attention(*qkv(), np.ones((5, 7), dtype=bool)),
        TypeError,
        "attn_mask must be a Tensor, a sdpa.Mask or None, but got numpy.ndarray",
    ),
    "query": (
        lambda: attention(np.ones((5, 7)), *qkv()[1:]),
        TypeError,
        "scaled_dot_product_attention(): argument 'query' must be Tensor, not numpy.ndarray",
    ),
    "max_q": (
        lambda: sdpa.varlen_attention(*packed(), CU, CU, np.float32(5), 5),
        TypeError,
        "varlen_attention(): argument 'max_q' must be int, not numpy.float32; pass int(max_q)",
    ),
    "max_k": (
        lambda: sdpa.varlen_attention(*packed(), CU, CU, 5, torch.tensor(5)),
        TypeError,
        "varlen_attention(): argument 'max_k' must be int, not Tensor; pass int(max_k)",
    ),
    "max_k_of_no_number": (
        lambda: sdpa.varlen_attention(*packed(), CU, CU, 5, "5"),
        TypeError,
        "varlen_attention(): argument 'max_k' must be int, not str",
    ),
    "negative": (
        lambda: sdpa.varlen_attention(*packed(), CU, CU, 5, np.int64(-2)),
        RuntimeError,
        "Expected max_k to be 0 or more, but got -2.",
    ),
    "window": (
        lambda: Mask(window=(np.int64(-1), 0)),
        ValueError,
        "Mask.window must be (left, right), each an integer >= 0 or None, got (-1, 0)",
    ),
    "window_list": (
        lambda: Mask(window=[3, 2]),
        ValueError,
        "Mask.window must be (left, right), each an integer >= 0 or None, got [3, 2]; pass tuple(window)",
    ),
    "prefix": (
        lambda: Mask(causal=True, prefix=np.zeros((99, 99))),
        TypeError,
        "Mask.prefix must be an integer >= 0 or an integer tensor, got a numpy.ndarray of shape (99, 99)",
    ),
    "lengths": (
        lambda: Mask(lengths=np.zeros((99, 99))),
        TypeError,
        "Mask.lengths must be an integer tensor, got a numpy.ndarray of shape (99, 99)",
    ),
    "bias": (lambda: Mask(bias=np.zeros(9)), TypeError, "Mask.bias must be a floating point tensor, got numpy.ndarray"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_in_one_sentence(name):
    make, error, text = REFUSED[name]
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == text


def test_torch_refuses_numpys_bools_as_well():
    with pytest.raises(TypeError, match=f"argument 'is_causal' must be bool, not {NUMPY_BOOL}"):
        F.scaled_dot_product_attention(*qkv(), is_causal=np.bool_(True))
