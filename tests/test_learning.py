"""Small calls that learn: a forward and its backward are chosen together where the host is what is waited for."""

from __future__ import annotations

import pytest
import torch

from sdpa.dispatch import learning, select
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.context import ALL_TOGGLES
from sdpa.problem import AttentionProblem

SMALL = AttentionProblem(
    direction="forward", dtype=torch.float32, device="cuda:0", B=1, H=4, Hkv=4, M=16, N=16, D=64, Dv=64,
    features=frozenset({"lse"}),
)  # fmt: skip
OWN, TORCHS, OTHER = "triton_decode", "vendor_efficient", "triton_flash"


@pytest.fixture
def figures(monkeypatch):
    """Seconds by direction and kernel, for all there is; by default our forward is the fastest by 3 us."""
    seconds = {"forward": {OWN: 29e-6, TORCHS: 32e-6, OTHER: 40e-6}, "backward": {TORCHS: 50e-6, OTHER: 30e-6}}

    def consider(problem):
        given = seconds[problem.direction]
        return [select.Candidate(by_name()[name], (), s, "measured", measured=True) for name, s in given.items()]

    monkeypatch.setattr(select, "consider", consider)
    select.choose.cache_clear()
    yield seconds
    select.choose.cache_clear()


def choose(problem=SMALL, setting="", learns=True):
    select.choose.cache_clear()
    return select.choose(problem, setting, ALL_TOGGLES, learns)


def test_a_small_call_that_learns_goes_to_torchs_operator_as_a_whole(figures):
    choice = choose()
    assert choice.kernel.name == TORCHS
    assert "fastest with its backward of 3" in choice.reason
    assert learning.stays(choice.kernel, select.followers(SMALL, "", ALL_TOGGLES))


@pytest.mark.parametrize("change", ["inference", "large", "mask", "cpu"])
def test_others_go_to_the_fastest_forward(change, figures):
    problem = {
        "inference": SMALL,
        "large": SMALL._replace(M=1 << 14, N=1 << 14),
        "mask": SMALL._replace(features=SMALL.features | {"bias"}),
        "cpu": SMALL._replace(device="cpu"),
    }[change]
    choice = choose(problem, learns=change != "inference")
    assert choice.kernel.name == OWN
    assert "with its backward" not in choice.reason


def test_a_node_of_ours_pays_where_torchs_backward_is_far_slower(figures):
    figures["backward"][TORCHS] = figures["backward"][OTHER] + 2 * learning.OWN_NODE
    assert choose().kernel.name == OWN
    assert not learning.stays(by_name()[TORCHS], select.followers(SMALL, "", ALL_TOGGLES))


def test_where_torchs_operator_has_no_backward(figures):
    del figures["backward"][TORCHS]
    assert choose().kernel.name == OWN
    assert not learning.stays(by_name()[TORCHS], select.followers(SMALL, "", ALL_TOGGLES))


def test_settings_hold_for_both(figures):
    assert choose(setting=f"{OWN};f").kernel.name == OWN
    assert choose(setting=f"{OWN},{OTHER}").kernel.name == OWN
    assert choose(setting=f"{OWN},{TORCHS};p").kernel.name == OWN
    assert choose(setting=f"{TORCHS},{OTHER};p").kernel.name == TORCHS
    assert [c.kernel.name for c in select.followers(SMALL, f"{TORCHS};f", ALL_TOGGLES)] == [TORCHS]
    assert {c.kernel.name for c in select.followers(SMALL, f"{OWN};f", ALL_TOGGLES)} == {TORCHS, OTHER}


def test_only_measured_backwards_count_where_there_are_some(figures, monkeypatch):
    """An estimate is an optimist beside a measurement."""
    measured = select.consider

    def consider(problem):
        found = measured(problem)
        if problem.direction == "backward":
            found.append(select.Candidate(by_name()["triton_hopper"], (), 1e-9, "estimated"))
        return found

    monkeypatch.setattr(select, "consider", consider)
    assert {c.kernel.name for c in select.followers(SMALL, "", ALL_TOGGLES)} == {TORCHS, OTHER}
    assert choose().kernel.name == TORCHS


def test_the_host_decides_where_it_takes_longer_than_the_device(figures):
    """Tables hold the device's time. A call of cuDNN's keeps the host busy for longer than both kernels run."""
    figures["forward"] = {"vendor_cudnn": 5e-6, TORCHS: 8e-6}
    figures["backward"] = {"vendor_cudnn": 36e-6, TORCHS: 51e-6}
    half = SMALL._replace(dtype=torch.bfloat16)
    assert choose(half).kernel.name == TORCHS
    assert choose(half, learns=False).kernel.name == "vendor_cudnn"
    figures["forward"]["vendor_cudnn"], figures["backward"]["vendor_cudnn"] = 50e-6, 60e-6
    figures["forward"][TORCHS], figures["backward"][TORCHS] = 80e-6, 140e-6
    assert choose(half).kernel.name == "vendor_cudnn"
