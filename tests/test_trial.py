"""Recorded launches of a release of Triton that was never seen on a GPU: kept only where a trial gave the same bits."""

from __future__ import annotations

import warnings

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from recorded_calls import inputs_of, problem_of  # noqa: E402
from test_recorded import device  # noqa: E402, F401

from sdpa.kernels.triton import flash, recorded, trial, triton_private  # noqa: E402
from sdpa.kernels.triton.launch import Launch  # noqa: E402
from sdpa.problem import Gradients, Results  # noqa: E402


@pytest.fixture(autouse=True)
def capturing(monkeypatch):
    """What torch says where there is no device is an error. Yields [whether a graph is being captured]."""
    said = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: said[0])
    return said


class Kernel:
    """In the place of a compiled one."""


class Again:
    """A recorded call that returns `found`, or raises it."""

    def __init__(self, found, *kernels):
        self.found, self.kernels, self.calls = found, kernels or (Kernel(),), 0

    def __call__(self, *given):
        self.calls += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def results(value=1.0, lse=True):
    return Results(torch.full((1, 2, 3, 4), value), torch.zeros(1, 2, 3) if lse else None)


NAN = torch.full((1, 2, 3, 4), float("nan"))
ALIKE = [
    (results(), results()),
    (results(lse=False), results(lse=False)),
    (Results(NAN, None), Results(NAN.clone(), None)),
    (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)),
    (Gradients(NAN, NAN, NAN, None, torch.ones(2)), Gradients(NAN, NAN, NAN, None, torch.ones(2))),
    (results()._replace(out=torch.empty(1, 2, 0, 4)), results()._replace(out=torch.empty(1, 2, 0, 4))),
]
DIFFERENT = [
    (results(), results(2.0)),
    (results(0.0), results(-0.0)),
    (results(lse=False), results()),
    (results(), results()._replace(out=torch.ones(1, 2, 3, 4, dtype=torch.float64))),
    (results(), results()._replace(out=torch.ones(1, 3, 2, 4).transpose(1, 2))),
    (torch.ones(2, 3), torch.ones(3, 2)),
    (results(), tuple(results())[:1]),
    (ValueError("a launcher with other arguments"), results()),
]


@pytest.mark.parametrize("found,wanted", ALIKE)
def test_the_same_bits_are_kept_and_tried_once(found, wanted):
    trials, again = trial.Trials(), Again(found)
    assert trials.allow(again, (), wanted) and trials.allow(again, (), wanted)
    assert again.calls == 1 and not trials.failed


@pytest.mark.parametrize("found,wanted", DIFFERENT)
def test_other_bits_end_recording_for_good(found, wanted):
    trials, again = trial.Trials(), Again(found)
    with pytest.warns(UserWarning, match="other results than Triton's own"):
        assert not trials.allow(again, (), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not trials.allow(Again(wanted), (), wanted)
    assert trials.failed


def test_each_compiled_kernel_is_tried():
    trials, (first, second) = trial.Trials(), (Kernel(), Kernel())
    assert trials.allow(Again(results(), first), (), results())
    again = Again(results(), first, second)
    assert trials.allow(again, (), results()) and again.calls == 1
    assert trials.allow(Again(results(), second), (), results())
    del first, again
    assert len(trials.passed) == 1  # nothing is kept alive by having been tried


def test_nothing_is_tried_while_a_graph_is_captured_or_somebody_watches(capturing):
    trials, watched, again = trial.Trials(), Again(None), Again(results())
    assert not trials.allow(watched, (), results())
    assert not trials.allow(Again(torch.OutOfMemoryError("no room for two")), (), results())
    capturing[0] = True
    assert not trials.allow(again, (), results())
    assert again.calls == 0 and not trials.failed
    capturing[0] = False
    assert trials.allow(again, (), results())


@pytest.mark.parametrize("alike", [True, False])
def test_a_call_is_recorded_only_after_its_trial(alike, device, monkeypatch):  # noqa: F811
    """Launchers that write nothing, into memory that is told: what a call makes its repetition makes, or not."""
    monkeypatch.setattr(triton_private, "UNTRIED", (triton_private.VERSION,))
    monkeypatch.setattr(recorded, "TRIALS", trial.Trials())
    filled = Launch.__call__

    def launch(self, backend, arch):
        for arg in self.args:
            if isinstance(arg, torch.Tensor) and arg.dim() == 4 and arg.data_ptr() not in given:
                arg.fill_(1)
        return filled(self, backend, arch)

    monkeypatch.setattr(Launch, "__call__", launch)
    value = 1.0 if alike else 2.0
    monkeypatch.setattr(
        recorded, "empty_strided_cuda", lambda size, stride, dtype: torch.full(size, value, dtype=dtype)
    )
    inputs = inputs_of("plain", 1)
    given = {t.data_ptr() for t in inputs[:3]}
    problem = problem_of((inputs,), "forward", (), "cuda:0")
    _, called = device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if not alike else "error")
        found, again = flash.record((inputs,), problem, flash.tiles(problem)[0])
    assert len(called) == 1 and (again is not None) == alike
    assert found.out.eq(1).all()
    assert (flash.record((inputs,), problem, flash.tiles(problem)[0])[1] is not None) == alike
    assert len(called) == (2 if alike else 1)  # the fixture's kernels are new ones each time
