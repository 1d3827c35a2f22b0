"""What is right under dropout: the mean of many results, over heads of which the first row is no judge."""

from __future__ import annotations

import pytest
import torch

from sdpa.bench import calls, contest, peers, truth, workload
from sdpa.bench.problems import Problem


def under_dropout(scale, kept=None):
    """A step of attention written out, whose kept weights are multiplied by `scale`. `kept`: what each call keeps."""
    work = workload.make_workload(Problem(1, 2, 64, 64, 16, mask="causal", direction="backward", call="dropout"))
    q, k, v = work.qkv
    seen = torch.ones(64, 64, dtype=torch.bool).tril()

    def forward():
        weights = (q @ k.mT * 16**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        keep = torch.rand(weights.shape) >= calls.DROPOUT if kept is None else kept
        return weights * keep * scale @ v

    class Noisy(peers.Contestant):
        def gradients(self, out, retain=True):
            return tuple(g * (1 + 1e-6 * torch.rand(())) for g in super().gradients(out, retain))

    one = Noisy("fake", forward, work.leaves, work.grad_out)
    return contest.Judge(work).error(one, one.forward())


def test_dropout_is_judged_by_its_mean():
    torch.manual_seed(5)
    assert under_dropout(1 / (1 - calls.DROPOUT)).rms < truth.DROPOUT_TOLERANCE
    with pytest.raises(workload.WrongResult, match="relative distance"):
        under_dropout(1.0)
    with pytest.raises(workload.WrongResult, match=r"calls with dropout of 0\.1 agree"):
        under_dropout(1.0, kept=torch.ones(()))  # gradients that differ as by the order of sums do not hide it


def test_a_first_row_that_was_often_dropped_is_no_wrong_result():
    """Under a causal mask it is the first row of v alone, as large as all others that are compared together."""
    torch.manual_seed(5)
    right = torch.randn(1, 256, 64, dtype=torch.float64) / torch.arange(1, 4097, 16)[:, None].sqrt()
    unlucky = right.clone()
    unlucky[:, 0] *= 1 - 3 * 0.042  # three standard deviations
    with pytest.raises(workload.WrongResult):
        truth.distance_under_dropout("out", unlucky, right, rows=False)
    assert truth.distance_under_dropout("out", unlucky, right, rows=True).rms > truth.DROPOUT_TOLERANCE / 2
    for wrong in (right * 0.9, torch.where(torch.arange(256)[:, None] < 200, 0.9 * right, right)):
        with pytest.raises(workload.WrongResult, match="relative distance"):
            truth.distance_under_dropout("out", wrong, right, rows=True)
    for factor in (0.0, 2.0):
        wrong = right * (1 + 0.04 * torch.randn(256, 1))
        wrong[:, 0] = factor * right[:, 0]
        with pytest.raises(workload.WrongResult, match=r"tolerance 0\.3"):
            truth.distance_under_dropout("out", wrong, right, rows=True)
    right[:, 7] = 0.0  # a row that sees no key
    truth.distance_under_dropout("out", right, right, rows=True)
    with pytest.raises(workload.WrongResult):
        truth.distance_under_dropout("out", right + 1e-3 * (right == 0), right, rows=True)
