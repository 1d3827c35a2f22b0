"""Results of some keys added to those of others by one launch, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from sdpa.kernels.triton.merge import ROWS, merge


def merged(out, lse, more, more_lse):
    """The same by torch's operations, in float64."""
    both = torch.stack([lse.double(), more_lse.double()])
    shares = torch.softmax(both, 0).nan_to_num(0.0).unsqueeze(-1)
    return (shares * torch.stack([out.double(), more.double()])).sum(0), torch.logsumexp(both, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows,size", [(5, 24), (ROWS, 64), (3 * ROWS + 1, 40)])
def test_merging(dtype, rows, size):
    """Rows inside of a longer sequence; those beside them keep what they hold."""
    sums = torch.promote_types(dtype, torch.float32)
    rounding = 8 * torch.finfo(sums).eps
    whole, whole_lse = torch.randn(2, 3, rows + 9, size, dtype=sums), torch.randn(2, 3, rows + 9, dtype=sums)
    out, lse = whole[:, :, 4 : 4 + rows], whole_lse[:, :, 4 : 4 + rows]
    more = torch.randn(2, rows, 3, size, dtype=sums).transpose(1, 2).to(dtype)
    more_lse = torch.randn(2, 3, rows + 3, dtype=sums)[..., :rows]
    before, wanted = (whole.clone(), whole_lse.clone()), merged(out, lse, more, more_lse)
    merge(out, lse, more, more_lse)
    for found, exact in zip((out, lse), wanted, strict=True):
        torch.testing.assert_close(found.double(), exact, atol=rounding, rtol=rounding)
    for now, then in zip((whole, whole_lse), before, strict=True):
        assert torch.equal(now[:, :, :4], then[:, :, :4]) and torch.equal(now[:, :, 4 + rows :], then[:, :, 4 + rows :])


def test_rows_without_keys():
    """What has no key counts for nothing; a row that has none at all stays 0."""
    lse = torch.tensor([[[-torch.inf, 0.5, -torch.inf, -3000.0]]])
    more_lse = torch.tensor([[[0.25, -torch.inf, -torch.inf, -3000.0]]])
    out, more = torch.zeros(1, 1, 4, 16), torch.full((1, 1, 4, 16), 2.0)
    out[0, 0, 1], out[0, 0, 3], more[0, 0, 1], more[0, 0, 2] = 3.0, 4.0, 0.0, 0.0
    merge(out, lse, more, more_lse)
    assert torch.equal(out[0, 0, :, 0], torch.tensor([2.0, 3.0, 0.0, 3.0]))
    assert torch.equal(lse[0, 0, :3], torch.tensor([0.25, 0.5, -torch.inf])) and lse[0, 0, 3] > -3000.0
