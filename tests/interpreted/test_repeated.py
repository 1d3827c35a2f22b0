"""Calls that differ only in what is remembered between them, and tensors as other kernels leave them in memory."""

from __future__ import annotations

import pytest
import torch

from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options, build_inputs
from sdpa.problem import Results, Tile
from sdpa.sequences import Documents, build_packed
from sdpa.testing import Case, Draw, make_inputs, problem_of

SIZES = {"B": 2, "H": 4, "Hkv": 2, "M": 20, "N": 24, "D": 16, "Dv": 16}
SMALL = Tile(16, 16, 4, 1)


@pytest.mark.parametrize("caps", [(1.0, 50.0), (50.0, 1.0)])
def test_another_softcap_in_the_same_sizes(caps, judge, judge_decode):
    for cap in caps:
        judge(make_inputs(Case(**SIZES, softcap=cap)))
        judge_decode(make_inputs(Case(**{**SIZES, "M": 1}, softcap=cap)))


def test_longer_packed_keys_in_the_same_sizes(judge):
    draw = Draw(Case(**SIZES), 0)
    q = draw.normal(12, 2, 16)
    for keys in (16, 48, 20):
        k, v = draw.normal(keys, 2, 16), draw.normal(keys, 2, 16)
        cu_q, cu_k = (torch.tensor([0, 6, size], dtype=torch.int32) for size in (12, keys))
        judge(build_packed(q, k, v, Documents(cu_q, cu_k, 8, 48), Options()))


def test_results_of_another_kernel_that_pads_its_rows():
    """The memory-efficient kernel's log-sum-exp is a slice of a padded one."""
    inputs, module = make_inputs(Case(**SIZES, mask="causal")), by_name()["triton_flash"].load()
    upstream = Results(torch.randn_like(inputs.q), None)
    results = module.forward(inputs, problem_of(inputs, "forward"), SMALL)
    sliced = Results(*(torch.nn.functional.pad(t, (0, 7))[..., : t.shape[-1]] for t in results))
    strided = Results(torch.stack([results.out, results.out], -1)[..., 0], sliced.lse)
    wanted = module.backward(inputs, results, upstream, problem_of(inputs, "backward"), SMALL)
    for given in (sliced, strided):
        assert not given.lse.is_contiguous()
        found = module.backward(inputs, given, upstream, problem_of(inputs, "backward"), SMALL)
        assert all(torch.equal(a, b) for a, b in zip(found[:3], wanted[:3], strict=True))


@pytest.mark.parametrize("layout", ["expanded", "column"])
def test_sinks_with_strides(layout, judge, judge_decode):
    H = SIZES["H"]
    sinks = torch.tensor([0.7]).expand(H) if layout == "expanded" else torch.randn(H, 3)[:, 1]
    for sizes in (SIZES, {**SIZES, "M": 1}):
        plain = make_inputs(Case(**sizes))
        inputs = build_inputs(*plain[:3], Options(enable_gqa=True, sinks=sinks))
        (judge if sizes is SIZES else judge_decode)(inputs)
