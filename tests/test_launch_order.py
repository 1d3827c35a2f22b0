"""Launches of a pass that overlap: which wait for which, and on a device that the results are those of one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options
from sdpa.problem import Results, Tile
from sdpa.sequences import Documents, build_packed
from sdpa.testing import Case, Draw, make_inputs, problem_of

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from sdpa.kernels.triton import backward, decode, forward, hopper_backward, tiles  # noqa: E402
from sdpa.kernels.triton.launch import Launch  # noqa: E402
from sdpa.kernels.triton.order import AFTER, ALONE, BESIDE, in_order  # noqa: E402
from sdpa.kernels.triton.target import Target, assume  # noqa: E402

HOPPER, AMPERE = (Target("cuda", arch, 227 << 10, 132, 50 << 20) for arch in (90, 80))


def launch(name, programs=1):
    return Launch(name, (programs,), (name, ALONE.value), Tile(16, 16, 4, 1))


def orders(launches):
    return [(one.args[-1], one.pdl) for one in launches]


def test_the_first_of_a_group_waits_to_begin_and_the_others_to_end():
    found = in_order(HOPPER, [launch("a"), launch("b")], [launch("c"), launch("d"), launch("e")], [launch("f")])
    after, beside = (AFTER.value, True), (BESIDE.value, True)
    assert orders(found) == [(AFTER.value, False), beside, after, beside, beside, after]
    assert [one.kernel for one in found] == list("abcdef")
    assert all(one.args[0] == one.kernel for one in found)


def test_what_has_no_programs_does_not_stand_for_its_group():
    found = in_order(HOPPER, [launch("a", 0), launch("b")], [launch("c", 0), launch("d"), launch("e")])
    assert orders(found)[1] == (AFTER.value, False), "nothing of the pass runs before it"
    assert orders(found)[3:] == [(AFTER.value, True), (BESIDE.value, True)]


@pytest.mark.parametrize(
    "target,groups",
    [(AMPERE, ([launch("a")], [launch("b")])), (HOPPER, ([launch("a")],)), (HOPPER, ([launch("a", 0)], [launch("b")]))],
)
def test_nothing_overlaps_without_pdl_or_with_one_launch(target, groups):
    assert all(order == (ALONE.value, False) for order in orders(in_order(target, *groups)))


def case(**more):
    sizes = {"B": 2, "H": 4, "Hkv": 4, "M": 200, "N": 200, "D": 64, "Dv": 64, "dtype": torch.bfloat16}
    return Case(**{**sizes, **more})


READS_DELTA = {"dkdv_kernel", "dq_kernel", "bias_grad_kernel"}
CASES = {
    "plain": case(),
    "float32 and a bias": case(dtype=torch.float32, mask="bias"),
    "segments": case(mask="segments"),
    "large": case(D=512, Dv=512),
    "shared keys": case(H=8, Hkv=1, dtype=torch.float32, mask="causal"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_reads_another_launchs_results_comes_in_a_later_group(name):
    inputs = make_inputs(CASES[name])
    with assume(HOPPER):
        problem = problem_of(inputs, "backward", inputs.bias is not None)
        out = torch.empty(*inputs.q.shape[:3], inputs.v.shape[3], dtype=inputs.q.dtype)
        results = Results(out, torch.empty(out.shape[:3]))
        launches = backward.backward_launches(
            inputs, results, Results(torch.empty_like(out), None), problem, tiles.tiles(problem)[0]
        ).launches
    names = [one.kernel.fn.__name__ for one in launches]
    first = min(place for place, one in enumerate(names) if one in READS_DELTA)
    summed = names[-1:] == ["sum_heads_kernel"]
    assert summed == (name == "shared keys")
    assert set(names[first : len(names) - summed]) <= READS_DELTA, "what they read stands before them"
    wanted = [AFTER, *[BESIDE] * (first - 1), AFTER, *[BESIDE] * (len(names) - first - 1 - summed), *[AFTER] * summed]
    assert [one.args[-1] for one in launches] == [order.value for order in wanted]


@pytest.mark.parametrize("D", [64, 128, 256])
def test_hoppers_backward_waits_for_delta_and_no_longer(D):
    inputs = make_inputs(case(D=D, Dv=D))
    with assume(HOPPER):
        problem = problem_of(inputs, "backward")
        out = torch.empty_like(inputs.q)
        results = Results(out, torch.empty(out.shape[:3]))
        tile = hopper_backward.tiles(problem)[0]
        _, launches = hopper_backward.backward_launches(inputs, results, Results(out, None), problem, tile)
    passes = 2 if D <= 128 else 3
    wanted = [(AFTER.value, False), (AFTER.value, True), *[(BESIDE.value, True)] * (passes - 1)]
    assert orders(launches) == wanted


def test_a_second_launch_of_a_forward_waits():
    with assume(HOPPER):
        inputs = make_inputs(case(dtype=torch.float32))
        problem = problem_of(inputs, "forward")
        parts = forward.forward_launches(inputs, problem, tiles.tiles(problem)[0])[1]
        inputs = make_inputs(case(M=1, N=2000))
        problem = problem_of(inputs, "forward")
        splits = decode.forward_launches(inputs, problem, decode.tiles(problem)[0])[1]
    for launches in (parts, splits):
        assert orders(launches) == [(AFTER.value, False), (AFTER.value, True)]


ON_DEVICE = {
    **CASES,
    "dropout": case(dropout_p=0.1, N=300),
    "lengths": case(mask="lengths"),
    "many": case(B=8, H=16, M=1024, N=1024, mask="causal"),
    "few": case(B=1, H=1, Hkv=1, M=129, N=130, mask="allowed"),
    "grouped": case(H=8, Hkv=2, M=150, N=333),
    "few grouped": case(B=1, H=32, Hkv=2, M=333, N=150, dtype=torch.float32),
    "three launches of Hopper's": case(D=256, Dv=256),
    "documents": case(mask="documents"),
}
ROUNDS = 8


def made(one, seed):
    """Inputs of a case. Documents are of very different lengths, so that some programs have nothing to do."""
    if one.mask != "documents":
        return make_inputs(one, seed)
    draw = Draw(one, seed)
    cu = torch.tensor([0, 3, 3, 700, 760], dtype=torch.int32, device=one.device)
    q, k, v = (draw.normal(800, heads, one.D) for heads in (one.H, one.Hkv, one.Hkv))
    return build_packed(q, k, v, Documents(cu, cu, 697, 697), Options(is_causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["float32", "split keys"])
def test_forwards_are_those_of_launches_one_by_one(name, monkeypatch):
    one = case(dtype=torch.float32, M=300, N=300) if name == "float32" else case(M=1, N=5000)
    module = by_name()["triton_flash" if name == "float32" else "triton_decode"].load()
    given = [made(replace(one, device="cuda"), seed) for seed in range(ROUNDS)]
    problem = problem_of(given[0], "forward")
    found = [module.forward(inputs, problem, module.tiles(problem)[0]).out for inputs in given]
    with monkeypatch.context() as patch:
        patch.setattr(Target, "has_pdl", property(lambda self: False))
        wanted = [module.forward(inputs, problem, module.tiles(problem)[0]).out for inputs in given]
    assert all(map(torch.equal, found, wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton_efficient", "triton_hopper"])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_gradients_are_those_of_launches_one_by_one(name, kernel, monkeypatch):
    """Bit for bit, with other data in each of several calls one behind the other, and in a captured graph."""
    given = [made(replace(ON_DEVICE[name], device="cuda"), seed) for seed in range(ROUNDS)]
    problem = problem_of(given[0], "backward", given[0].bias is not None)
    reasons = by_name()[kernel].why_not(problem)
    if reasons:
        pytest.skip(reasons[0])
    module, math = (by_name()[one].load() for one in (kernel, "math"))
    tile = module.tiles(problem)[0]
    results = [math.forward(inputs, problem_of(inputs, "forward"), None) for inputs in given]
    upstream = [Results(torch.randn_like(one.out), None) for one in results]

    def gradients():
        calls = zip(given, results, upstream, strict=True)
        return [[g for g in module.backward(*one, problem, tile) if g is not None] for one in calls]

    found = gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    for tensor in (t for grads in captured for t in grads):
        tensor.fill_(torch.nan)
    graph.replay()
    with monkeypatch.context() as patch:
        patch.setattr(Target, "has_pdl", property(lambda self: False))
        wanted = gradients()
    for one, again, right in zip(found, captured, wanted, strict=True):
        assert all(map(torch.equal, one, right)) and all(map(torch.equal, again, right))
