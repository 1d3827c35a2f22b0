"""Query, key and value in another dtype by one launch, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from sdpa.kernels.triton.cast import BLOCK, LARGEST, cast_pass
from sdpa.kernels.triton.launch import OnDevice, run


def of_sizes(*shapes, dtype=torch.float32):
    """Numbers that bfloat16 has, too: the interpreter cuts off where a GPU rounds."""
    return [torch.randn(shape).bfloat16().half().bfloat16().to(dtype) for shape in shapes]


def cast_of(tensors, dtype):
    work = cast_pass(tensors, dtype)
    for made in work.made:
        made.fill_(torch.nan)
    run(work.launches, OnDevice("cpu"))
    return work.finished()


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_are_torchs(given, to):
    """Of several blocks, of other sizes, and of memory in another order."""
    q, k, v = of_sizes((1, 2, 40, 33), (1, 1, 3, 33), (2, 8, BLOCK // 8), dtype=given)
    tensors = [q, k.transpose(1, 2), v.transpose(0, 1)]
    if given == to:
        assert cast_pass(tensors, to) is None
        return
    for got, tensor in zip(cast_of(tensors, to), tensors, strict=True):
        wanted = tensor.to(to)
        assert torch.equal(got, wanted) and got.stride() == wanted.stride() and got.dtype == to


def test_no_number_beyond_a_tensor_is_written():
    (padded,) = of_sizes((2, BLOCK))
    tensors = [padded[:, :5].contiguous() for _ in range(3)]
    work = cast_pass(tensors, torch.bfloat16)
    behind = torch.full((3, 64), 7.0, dtype=torch.bfloat16)
    (launch,) = work.launches
    args = (*launch.args[:3], *[row[:10].view(2, 5) for row in behind], *launch.args[6:])
    run([launch._replace(args=args)], OnDevice("cpu"))
    assert all(torch.equal(row[:10].view(2, 5), t.bfloat16()) for row, t in zip(behind, tensors, strict=True))
    assert bool((behind[:, 10:] == 7).all())


@pytest.mark.parametrize("what", ["holes", "expanded", "empty", "large", "one cast already"])
def test_others_are_cast_one_by_one(what):
    q, k, v = of_sizes((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    odd = {
        "holes": q[..., :4],
        "expanded": q[:, :1].expand(1, 2, 4, 8),
        "empty": q[:, :, :0],
        "large": torch.empty(1, device="meta").expand(LARGEST + 1),
        "one cast already": q.bfloat16(),
    }[what]
    assert cast_pass([odd, k, v], torch.bfloat16) is None
    assert cast_pass([q, k, v], torch.bfloat16) is not None
