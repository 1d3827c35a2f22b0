"""The nearest bucket on a GPU: kinds of masks, dtypes, how full the device is, decoding and shared heads."""

from __future__ import annotations

import pytest
import torch

from helpers import ON_GPU, entry
from sdpa.dispatch import tuning
from sdpa.problem import AttentionProblem

SIZES = {"B": 16, "H": 16, "Hkv": 16, "M": 1024, "N": 1024, "D": 128, "Dv": 128}


def buckets(*changes):
    """Buckets whose only kernel is named by what makes them different."""
    made = []
    for number, change in enumerate(changes):
        name = ",".join(map(str, change.values()))
        options = {"dtype": "bfloat16", **SIZES, **change}
        made.append(tuning.parse_entry(number, entry({name: 1.0}, **options)))
    return tuple(made)


def answer(found, problem):
    bucket = tuning.nearest(found, problem)
    return bucket and next(iter(bucket.ms))


def features(*names, **changes):
    return ON_GPU._replace(features=frozenset(names), **changes)


KINDS = {
    "none": (features(), ["none"]),
    "dropout": (features("dropout", "lse"), ["none"]),
    "alibi": (features("alibi", "band", right=0), ["causal"]),
    "window": (features("band", left=64, right=0), ["window"]),
    "bias": (features("bias"), ["bias", "dense"]),
    "bias_causal": (features("bias", "band", right=0), ["bias", "dense"]),
    "bias_grad": (features("bias", "bias_grad", direction="backward"), ["bias_grad", "bias", "dense"]),
    "dense": (features("allowed"), ["dense", "bias"]),
    "lengths": (features("k_lengths"), ["lengths", "structured", "none"]),
    "lengths_causal": (features("k_lengths", "band", right=0), ["lengths", "structured", "causal"]),
    "packed_causal": (features("packed", "band", right=0), ["lengths", "structured", "causal"]),
    "a_few_new_queries": (features("band", "bottom_right", right=0, bottom_right=True, M=8, N=4096), ["none"]),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_masks_and_what_stands_in_for_them(name, gpu):
    problem, kinds = KINDS[name]
    assert list(tuning.mask_kinds(problem)) == kinds and tuning.mask_kind(problem) == kinds[0]
    sizes = {"M": problem.M, "N": problem.N, "direction": problem.direction}
    found = buckets(*({"mask": kind, **sizes} for kind in ("dense", "causal", "rows", *kinds, "window", "none")))
    for place, kind in enumerate(kinds):
        left = tuple(b for b in found if b.mask not in kinds[:place])
        assert tuning.nearest(left, problem).mask == kind
    assert tuning.nearest(tuple(b for b in found if b.mask not in kinds), problem) is None


def test_a_mask_of_one_row_is_told_from_one_of_many(gpu):
    class WithRows(AttentionProblem):
        row_mask = True

    assert tuning.mask_kinds(WithRows(*features("allowed"))) == ("rows", "dense", "bias")


def test_dtypes_of_a_gpu(gpu):
    found = buckets({"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "tfloat32"})
    half, single = ON_GPU._replace(dtype=torch.float16), ON_GPU._replace(dtype=torch.float32)
    assert answer(found, half) == "bfloat16" and answer(found, single) == "float32"
    assert answer(found, single._replace(tf32=True)) == "tfloat32"
    assert answer(found[:2], single._replace(tf32=True)) is None
    assert answer((*found, *buckets({"dtype": "float16"})), half) == "float16"


def test_a_gpu_that_is_not_full_is_another_problem(gpu):
    full, empty = {"B": 16}, {"B": 1, "H": 4, "Hkv": 4}
    found = buckets(full, empty)
    assert answer(found, ON_GPU._replace(B=2, H=2, Hkv=2)) == "1,4,4"
    assert answer(found, ON_GPU._replace(B=512)) == "16"
    assert answer(found[:1], ON_GPU._replace(B=1, H=1, Hkv=1)) is None, "8 programs say nothing of 264"
    assert answer(found[:1], ON_GPU._replace(B=4096)) == "16", "full is full"


def test_decoding_and_shared_heads(gpu):
    step = {"M": 1, "N": 8192}
    found = buckets({**step, "B": 1}, {**step, "B": 64}, {**step, "B": 64, "Hkv": 4}, {"N": 8192})
    decode = ON_GPU._replace(M=1, N=8192)
    assert answer(found, decode._replace(B=2)) == "1,8192,1"
    assert answer(found, decode._replace(B=32)) == "1,8192,64"
    assert answer(found, decode._replace(B=32, Hkv=4)) == "1,8192,64,4"
    assert answer(found, decode._replace(M=512)) == "8192"
