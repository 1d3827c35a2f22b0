"""Contests: everyone is asked the same in every kind of call, who is wrong is not timed, and the clock of a device."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch
from fake_peers import FlashInfers, OpenVINOs, zentorchs

import sdpa
from sdpa.bench import calls, contest, peers, record, truth, workload
from sdpa.bench.contest import Options
from sdpa.bench.problems import CALLS, DIRECTIONS, MASKS, Problem
from sdpa.bench.suites import SUITES
from sdpa.bench.timing import Pace
from sdpa.dispatch.select import NoKernelError

TINY = Problem(2, 4, 40, 40, 8, Hkv=2)
ONCE = Pace(rounds=1)
FAST = Options(pace=ONCE)
pytestmark = pytest.mark.usefixtures("threads_restored")


# what is right


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_ours_and_torch_agree_with_float64(mask, direction, monkeypatch):
    """Tight enough to tell masks from each other; more rows than a chunk of the gradients."""
    monkeypatch.setattr(truth, "CHUNK", 128)
    monkeypatch.setitem(workload.TOLERANCE, torch.float64, 1e-9)
    problem = Problem(2, 4, 300, 300, 8, "float64", mask, direction, Hkv=2)
    (row,) = contest.measure_cell("s", problem, FAST)
    assert row.own.seconds and row.own.error < 1e-9 and row.own.kernel, row.own
    (peer,) = row.peers
    assert peer.name == "torch" and peer.seconds and peer.error < 1e-9, peer
    assert row.ratio() == row.torch_ratio == peer.seconds / row.own.seconds


@pytest.mark.parametrize("mask, call", [*((m, "") for m in MASKS if m != "none"), ("segments", "varlen")])
def test_flex_is_asked_the_same(mask, call):
    problem = Problem(1 if call else 2, 4, 300, 300, 16, mask=mask, Hkv=2, call=call)
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=("flex",)))
    assert row.peers[0].seconds and row.peers[0].error < 1e-5, row.peers[0]


def test_window_size_is_the_problems():
    assert Problem(1, 1, 50, 50, 8, mask="window", window=4).visible_pairs() == 5 * 50 - 10
    (row,) = contest.measure_cell("s", replace(TINY, mask="window", window=4), replace(FAST, peers=("flex", "torch")))
    assert all(entry.seconds for entry in (row.own, *row.peers)), row


# calls that ask more

ASKED = [call for call in CALLS if call]


def problem_of(call, **changes):
    return replace(next(p for p in SUITES["overhead"] if p.call == call), **changes)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("call", ASKED)
def test_every_call_is_right_and_beside_torchs(call, grad):
    """softcap is the only one that has nothing of torch's beside it, and so no ratio."""
    (row,) = contest.measure_cell("s", problem_of(call, grad=grad), FAST)
    (peer,) = row.peers
    assert row.own.seconds and row.own.kernel == ("math" if call == "weights" else "cpu_flash"), row.own
    assert (peer.reason, row.ratio()) == ("torch has no softcap", None) if call == "softcap" else peer.seconds, peer
    assert (row.own.note == contest.NOT_TORCHS) == (call in ("softcap", "return_lse", "kernel", "varlen"))
    assert row.own.error < 1e-5 or call in ("dropout", "autocast")
    assert record.as_record(row)["note"] == row.own.note and not peer.failed


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("call", ASKED)
def test_each_call_is_what_it_says(call, grad, monkeypatch):
    """Who leaves out what a call asks, or gets it wrong, is not timed."""
    honest = calls.FORMS[call]
    plain = calls.FORMS[""].ours

    def spoiled(work, kernel=None):
        if call in ("dropout", "softcap"):
            return plain(work, kernel)
        made = honest.ours(work, kernel)
        if call == "return_lse":
            return lambda: (lambda results: (results[0], results[1] + 0.1))(made())
        if call == "module":
            return lambda: (made()[0] * 1.01, None)
        if call == "weights":
            return lambda: (lambda results: (results[0], results[1] * 1.01))(made())
        factor = 1.2 if call == "autocast" else 1.01
        return lambda: made() * factor

    monkeypatch.setitem(calls.FORMS, call, replace(honest, ours=spoiled))
    (row,) = contest.measure_cell("s", problem_of(call, grad=grad), FAST)
    assert row.own.failed and row.own.reason.startswith("wrong result: out"), row.own


def test_a_training_step_is_a_forward_and_its_backward(monkeypatch):
    """On parameters, with gradients that are right, in a graph of its own each time."""
    work = workload.make_workload(problem_of("parameter"))
    assert all(isinstance(leaf, torch.nn.Parameter) for leaf in work.leaves)
    one = peers.ours(work, None)
    call, _ = contest.call_of(one, one.forward(), work.problem)
    assert [g.shape for g in call()] == [leaf.shape for leaf in work.leaves] and call() is not None
    monkeypatch.setitem(peers.PEERS, "fake", Faulty(with_wrong_gradient))
    (row,) = contest.measure_cell("s", work.problem, replace(FAST, peers=("fake",)))
    assert row.peers[0].reason.startswith("wrong result: grad_q")


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_gradients_under_dropout_are_right_in_the_mean(mask, monkeypatch):
    torch.manual_seed(4)  # of a mean of few draws, which a tolerance must hold
    problem = Problem(1, 2, 64, 64, 16, mask=mask, direction="backward", call="dropout")
    monkeypatch.setitem(peers.PEERS, "fake", Faulty(lambda out: out + 0.2 * (out - out.detach())))
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=("torch", "fake")))
    assert row.own.seconds and row.peers[0].seconds and row.own.rms_error < 0.08, row
    assert row.peers[1].reason.startswith("wrong result: grad_q")


def test_autocast_surrounds_a_call():
    problem = problem_of("autocast")
    with workload.surroundings(problem):
        out = calls.our_call(workload.make_workload(problem))()
    assert out.dtype == torch.bfloat16 and not torch.is_autocast_enabled("cpu")


def test_a_kernel_is_named():
    calls.our_call(workload.make_workload(problem_of("kernel")), "math")()
    assert sdpa.last_choice().kernel.name == "math"
    with pytest.raises(NoKernelError):
        calls.our_call(workload.make_workload(problem_of("kernel")), "triton_flash")()
    (row,) = contest.measure_cell("s", problem_of("module"), Options(("math",), pace=ONCE))
    assert row.own.reason == "a module takes no kernel by name" and not row.own.failed


@pytest.mark.parametrize("told", [{"is_causal": True}, {"window_size": (-1, 0)}])
def test_torchs_varlen_is_causal_in_every_release(told, monkeypatch):
    seen = {}
    if "is_causal" in told:

        def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
            seen.update(is_causal=is_causal, shape=q.shape, ends=cu_q.tolist(), longest=max_q)
    else:

        def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, window_size=(-1, -1)):
            seen.update(window_size=window_size, shape=q.shape, ends=cu_q.tolist(), longest=max_q)

    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = varlen_attn
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    monkeypatch.setattr(calls, "has_varlen", lambda work: True)
    calls.torch_call(workload.make_workload(problem_of("varlen")))()
    assert seen == {**told, "shape": (16, 4, 64), "ends": [0, 4, 16], "longest": 12}


def test_who_makes_which_calls():
    on_gpu = {call: peers.peers_for(problem_of(call, device="cuda", host=True)) for call in ASKED}
    for call in ("softcap", "return_lse", "varlen", "module"):
        assert on_gpu[call] == ("torch",)
    for call in ("dropout", "parameter", "autocast", "kernel"):
        assert set(on_gpu[call]) >= {"torch", *peers.TORCH_BACKENDS}
    (row,) = contest.measure_cell("s", problem_of("dropout"), replace(FAST, peers=("flex", "fa4")))
    assert {peer.reason for peer in row.peers} == {"asked for plain attention, got a call of the kind dropout"}


# peers that are not timed


class Faulty:
    """A peer whose output or gradients are spoiled."""

    def __init__(self, spoil) -> None:
        self.spoil = spoil

    def __call__(self, work):
        call = calls.torch_call(work)
        return peers.contestant("fake", lambda: self.spoil(call()), work)


def with_nan(out):
    return out.clone().index_fill(2, torch.tensor([17]), torch.nan)


def with_wrong_gradient(out):
    return out + 0.02 * (out - out.detach())


def that_raises(out):
    raise RuntimeError("no kernel; try another\nand more")


@pytest.mark.parametrize(
    ("spoil", "direction", "reason"),
    [
        (lambda out: out * 1.01, "forward", "wrong result: out: relative distance to float64 0.01"),
        (with_nan, "forward", "wrong result: out: not finite in 64 of 2560 places"),
        (lambda out: out[:, :, :-1], "forward", "wrong result: out: expected (2, 4, 40, 8)"),
        (lambda out: out.double(), "forward", "torch.float64"),
        (with_wrong_gradient, "backward", "wrong result: grad_q: relative distance to float64 0.02"),
        (that_raises, "backward", "RuntimeError: no kernel; try another"),
    ],
)
def test_a_peer_that_is_wrong_is_never_timed(spoil, direction, reason, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "fake", Faulty(spoil))
    (row,) = contest.measure_cell("s", replace(TINY, direction=direction), replace(FAST, peers=("fake", "torch")))
    fake, honest = row.peers
    assert fake.seconds is None and reason in fake.reason and fake.failed, fake
    assert honest.seconds and row.best() == honest and row.own.seconds


def test_packed_sequences_in_training():
    (row,) = contest.measure_cell(
        "s", replace(TINY, B=1, M=40, N=40, call="varlen", mask="segments", direction="backward"), FAST
    )
    assert row.own.seconds and row.own.error < 1e-5
    (torchs,) = row.peers
    assert torchs.reason == "torch's varlen_attn takes half precisions on a GPU, got torch.float32 on cpu"


def attend_rows(q, k, v, allowed):
    """(B, N, H, D) by torch's attention, with heads that share keys."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = allowed.expand(q.shape[0], 1, *allowed.shape)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def flash_attn_func(q, k, v, causal=False, window_size=(None, None)):
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = distance >= 0 if causal or window_size[1] == 0 else distance == distance
    return attend_rows(q, k, v, seen & (distance <= (window_size[0] or distance.max()))), None


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    ids = torch.searchsorted(cu_seqlens_q, torch.arange(len(q)), right=True)
    seen = (ids[:, None] == ids) & torch.ones(len(q), len(q), dtype=torch.bool).tril()
    return attend_rows(q[None], k[None], v[None], seen)[0]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"mask": "causal", "Hkv": 2},
        {"mask": "window", "window": 7},
        {"mask": "segments", "B": 2},
        {"mask": "segments", "B": 1, "call": "varlen"},
    ],
    ids=str,
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_flash_attention_4_is_given_and_gives(asked, direction, monkeypatch):
    """With a module in its place that has its form, and torch's numbers."""
    module = types.SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(cute=module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    problem = replace(TINY, **{"B": 2, "M": 40, "N": 40, "direction": direction} | asked)
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=("fa4",)))
    assert row.peers[0].seconds and row.peers[0].error < 1e-5, row.peers[0]


def test_peers_refuse_in_a_sentence(monkeypatch):
    asked = replace(FAST, peers=("fa4", "math"))
    monkeypatch.setattr(peers, "MOST_SCORES", 1e4)
    (row,) = contest.measure_cell("s", replace(TINY, Hkv=4), asked)
    assert "flash_attn" in row.peers[0].reason
    assert row.peers[1].reason == "expected scores below 0 GB, got 0" and row.best() is None and row.ratio() is None
    (row,) = contest.measure_cell("s", replace(TINY, mask="alibi"), asked)
    assert "asked for the masks none, causal, window and segments, got alibi" in row.peers[0].reason
    (row,) = contest.measure_cell("s", replace(TINY, M=4, mask="causal"), asked)
    assert "M=4 and N=40" in row.peers[0].reason


@pytest.mark.parametrize("peer", ["fa3", "fa4"])
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_flash_attention_gets_its_own_layout(direction, pair, peer, monkeypatch):
    """And torch's mode as its argument."""
    seen = []

    def flash_attn_func(q, k, v, causal, deterministic=False):
        seen.append((tuple(q.shape), q.is_contiguous(), deterministic))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        out = out.transpose(1, 2)
        return (out, None) if pair else out

    package = types.ModuleType("flash_attn")
    package.cute = types.ModuleType("flash_attn.cute")
    package.cute.flash_attn_func = package.flash_attn_func = flash_attn_func
    for name, module in {
        "flash_attn": package,
        "flash_attn.cute": package.cute,
        "flash_attn_interface": package,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    problem = replace(TINY, mask="causal", direction=direction, deterministic=pair)
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=(peer,)))
    assert row.peers[0].seconds and set(seen) == {((2, 40, 4, 8), True, pair)}, row.peers


@pytest.fixture
def zen(monkeypatch):
    """Masks that ZenTorch's operator is given."""
    seen = []
    monkeypatch.setitem(sys.modules, "zentorch", types.ModuleType("zentorch"))
    monkeypatch.setattr(torch.ops, "zentorch", zentorchs(seen), raising=False)
    return seen


@pytest.fixture
def vino(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", package := OpenVINOs())
    return package


FORWARD = replace(TINY, Hkv=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_peers_of_a_cpu_are_asked_the_same(mask, dtype, zen, vino):
    problem = replace(FORWARD, mask=mask, dtype=dtype, layout="bmhd" if mask == "window" else "bhmd")
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=("zentorch", "openvino")))
    assert all(peer.seconds and peer.error < 0.02 for peer in row.peers), row.peers
    (given,) = {type(mask) for mask in zen}
    assert given is (type(None) if mask in ("none", "causal") else torch.Tensor)
    assert all(mask.dtype == problem.torch_dtype for mask in zen if mask is not None)
    assert vino.causal == (mask == "causal") and len(vino.views) == (3 if mask in ("none", "causal") else 4)


@pytest.mark.parametrize(("dtype", "hint"), [("float32", "f32"), ("bfloat16", "bf16"), ("float16", "f16")])
def test_openvino_computes_as_torch_would_on_torchs_memory(dtype, hint, vino, two_threads):
    """On as many threads, in the dtype of the tensors, on what the tensors have when it runs."""
    work = workload.make_workload(replace(FORWARD, dtype=dtype, mask="allowed"))
    contestant = peers.openvino(work)
    assert vino.options["INFERENCE_PRECISION_HINT"] == hint and vino.options["INFERENCE_NUM_THREADS"] == 2
    assert vino.options["NUM_STREAMS"] == 1 and vino.options["PERFORMANCE_HINT"] == "LATENCY"
    for place, tensor in enumerate((*work.qkv, work.torch_mask)):
        assert vino.views[place].array.ctypes.data == tensor.data_ptr()
    work.v.zero_()
    out = contestant.forward()
    assert not out.any() and vino.written.array.ctypes.data == out.data_ptr() and contestant.forward() is out


def test_openvino_reads_copies_of_what_is_not_contiguous(vino):
    work = workload.make_workload(replace(FORWARD, layout="bmhd", mask="bias", grad=True))
    contestant = peers.openvino(work)
    assert all(vino.views[place].array.ctypes.data != work.qkv[place].data_ptr() for place in range(3))
    assert vino.views[3].array.ctypes.data == work.torch_mask.data_ptr()
    wanted = calls.torch_call(work)()
    del work
    assert torch.allclose(contestant.forward(), wanted, atol=1e-6)


def test_zentorch_gets_a_bool_mask_as_what_is_added(zen):
    work = workload.make_workload(replace(FORWARD, mask="allowed", dtype="bfloat16"))
    contestant = peers.zentorch(work)
    out, again = contestant.forward(), contestant.forward()
    assert torch.equal(out, again) and zen[0] is zen[1]
    assert zen[0].dtype == torch.bfloat16 and torch.equal(zen[0] == 0, work.torch_mask)
    assert torch.equal(zen[0].isneginf(), ~work.torch_mask)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"direction": "backward"}, "{}'s attention has no backward"),
        ({"Hkv": 2}, "{}'s attention has no grouped heads, got H=4 and Hkv=2"),
        ({"call": "dropout"}, "asked for plain attention, got a call of the kind dropout"),
        ({"device": "meta"}, "{}'s attention is asked for CPUs, got meta"),
    ],
    ids=str,
)
def test_the_peers_of_a_cpu_refuse_in_a_sentence(changes, reason, zen, vino):
    """Before they look at a tensor."""
    asked = workload.Workload(replace(FORWARD, **changes), *(None,) * 6)
    for make, name in ((peers.zentorch, "ZenTorch"), (peers.openvino, "OpenVINO")):
        with pytest.raises(peers.Refusal) as raised:
            make(asked)
        assert str(raised.value) == reason.format(name)


def test_what_openvino_alone_refuses(zen, vino):
    both = replace(FAST, peers=("zentorch", "openvino"))
    for changes, reason in (
        ({"M": 1}, "OpenVINO decodes with stateful models, whose caches are its own"),
        ({"dtype": "float64"}, "OpenVINO computes in float32, bfloat16 and float16, got float64"),
    ):
        (row,) = contest.measure_cell("s", replace(FORWARD, **changes), both)
        zentorch, openvino = row.peers
        assert zentorch.seconds and (openvino.reason, openvino.failed) == (reason, False), openvino


def test_the_peers_of_a_cpu_that_are_not_installed(monkeypatch):
    for name in peers.CPU_PEERS:
        monkeypatch.setitem(sys.modules, name, None)
    (row,) = contest.measure_cell("s", FORWARD, replace(FAST, peers=peers.CPU_PEERS))
    assert all(peer.name in peer.reason and peer.seconds is None for peer in row.peers) and row.own.seconds


@pytest.mark.parametrize(
    "changes",
    [{}, {"mask": "causal"}, {"M": 9, "mask": "lower_right"}, {"mask": "window", "window": 7}, {"M": 3}],
    ids=str,
)
def test_flashinfer_plans_once_and_gets_rows(changes, monkeypatch):
    plans = []
    monkeypatch.setitem(sys.modules, "flashinfer", FlashInfers(plans))
    problem = replace(TINY, B=2, H=4, Hkv=2, **changes)
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=("flashinfer",)))
    assert row.peers[0].seconds and row.peers[0].error < 1e-5, row.peers[0]
    assert plans == [(problem.M, problem.N)]


def test_flashinfer_refuses_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", FlashInfers([]))
    asked = replace(FAST, peers=("flashinfer",))
    for changes, told in (
        ({"direction": "backward"}, "no backward"),
        ({"mask": "padding"}, "got padding, M=40 and N=40"),
        ({"M": 4, "mask": "causal"}, "got causal, M=4 and N=40"),
        ({"call": "softcap"}, "got a call of the kind softcap"),
    ):
        (row,) = contest.measure_cell("s", replace(TINY, **changes), asked)
        assert told in row.peers[0].reason and row.peers[0].seconds is None, row.peers[0]


def installed(monkeypatch, *names):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name if name in names else None)


def test_which_peers_of_a_cpu_take_part(monkeypatch):
    """Of plain forwards, where they are installed."""
    installed(monkeypatch, "openvino")
    assert peers.peers_for(TINY) == ("torch", "openvino")
    installed(monkeypatch, "zentorch", "openvino")
    assert peers.peers_for(replace(TINY, grad=True)) == ("torch", "zentorch", "openvino")
    assert peers.peers_for(replace(TINY, direction="backward")) == ("torch",)
    assert all(peers.peers_for(problem_of(call)) == ("torch",) for call in ASKED)
    assert peers.peers_for(TINY, ("openvino",)) == ("openvino",)
    for changes in ({}, {"mask": "window"}, {"host": True}, {"direction": "backward"}):
        assert not set(peers.CPU_PEERS) & set(peers.peers_for(replace(TINY, device="cuda", **changes)))
    assert not set(peers.CPU_PEERS) & set(peers.TORCH_PEERS)


def test_which_peers_take_part(monkeypatch):
    installed(monkeypatch)
    plain = replace(TINY, device="cuda", Hkv=4)
    assert peers.peers_for(TINY) == ("torch",)
    for mask in ("none", "causal"):
        assert peers.peers_for(replace(plain, mask=mask)) == ("cudnn", "flash", "efficient", "math", "fa4")
    assert "flex" in peers.peers_for(replace(plain, mask="window")) and "flex" in peers.peers_for(replace(plain, Hkv=2))
    host = peers.peers_for(replace(plain, mask="padding", host=True))
    assert "torch" in host and "flex" not in host
    installed(monkeypatch, "flash_attn_interface", "flashinfer")
    assert peers.peers_for(plain)[-3:] == ("fa3", "fa4", "flashinfer")
    assert peers.peers_for(plain, ("flex",)) == ("flex",)


def test_kernels_beside_each_other_and_what_they_cannot():
    rows = contest.measure_cell("s", replace(TINY, Dv=4), Options(("default", "math", "vendor_cpu_flash"), pace=ONCE))
    assert [row.own.name for row in rows] == ["default", "math", "vendor_cpu_flash"]
    assert rows[0].own.kernel and rows[1].own.kernel == "math" and rows[0].peers == rows[2].peers
    assert "D == Dv" in rows[2].own.reason and rows[2].own.seconds is None and not rows[2].own.failed
    (row,) = contest.measure_cell("s", replace(TINY, mask="nonsense"), FAST)
    assert row.own.failed and row.own.reason.startswith("ValueError: a problem's mask must be one of")


def test_the_best_of_our_own(monkeypatch):
    """The names allowed decide, in a forward and, without the context, in its backward; the one chosen is told."""
    assert contest.OWN_KERNELS and all(name.startswith("triton_") for name in contest.OWN_KERNELS)
    (row,) = contest.measure_cell("s", TINY, Options(("triton",), pace=ONCE))
    assert "runs on cuda, got cpu" in row.own.reason and not row.own.failed and row.own.kernel == ""
    for direction in DIRECTIONS:
        problem = replace(TINY, Hkv=4, direction=direction)
        (row,) = contest.measure_cell("s", problem, FAST)
        other = "cpu_flash" if row.own.kernel != "cpu_flash" else "vendor_cpu_flash"
        monkeypatch.setattr(contest, "OWN_KERNELS", (other, "triton_flash"))
        rows = contest.measure_cell("s", problem, Options(("default", "triton"), pace=ONCE))
        assert [(r.own.name, r.own.kernel) for r in rows] == [("default", row.own.kernel), ("triton", other)]
        written = record.as_record(rows[1])
        assert rows[1].own.seconds and (written["asked"], written["kernel"]) == ("triton", other)


def test_a_kernel_without_a_backward_is_not_timed_by_another(monkeypatch):
    for row in contest.measure_cell("s", replace(TINY, direction="backward"), Options(("triton_decode",), pace=ONCE)):
        assert row.own.reason == "has no backward pass" and not row.own.failed and row.own.seconds is None


def test_who_was_lost_while_compiling_does_not_run(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "fake", lambda work: pytest.fail("asked again"))
    (row,) = contest.measure_cell("s", TINY, replace(FAST, peers=("fake",), lost={(TINY, "fake"): "hangs"}))
    assert row.own.seconds and row.peers[0].failed and row.peers[0].reason == "hangs"


def test_precision_is_the_problems_and_put_back(monkeypatch):
    seen = []

    def note(work):
        seen.append(torch.get_float32_matmul_precision())
        raise peers.Refusal("only looks")

    monkeypatch.setitem(peers.PEERS, "fake", note)
    before = torch.get_float32_matmul_precision()
    contest.measure_cell("s", replace(TINY, precision="high"), replace(FAST, peers=("fake",)))
    contest.measure_cell("s", TINY, replace(FAST, peers=("fake",)))
    assert seen == ["high", "highest"] and torch.get_float32_matmul_precision() == before


def test_a_device_that_is_lost_ends_the_run(monkeypatch):
    def unusable(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(peers.PEERS, "fake", Faulty(that_raises))
    monkeypatch.setattr(contest, "recover", unusable)
    with pytest.raises(contest.DeviceLost, match="after fake the device is unusable: RuntimeError: no kernel"):
        contest.measure_cell("s", TINY, replace(FAST, peers=("fake",)))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_extra_bytes_are_the_peak_over_what_was_there(direction, monkeypatch):
    state = types.SimpleNamespace(peak=500)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: state.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(state, "peak", 100))
    work = workload.make_workload(replace(TINY, direction=direction))
    call = calls.torch_call(work)

    def forward():
        state.peak += 40
        return call()

    class Counting(peers.Contestant):
        def gradients(self, out, retain=True):
            state.peak += 7
            return super().gradients(out, retain)

    contestant = Counting("fake", forward, work.leaves, work.grad_out)
    problem = replace(TINY, direction=direction, device="cuda")
    assert contest.extra_bytes(contestant, problem) == (40 if direction == "forward" else 47)
    assert contest.extra_bytes(contestant, TINY) is None


def test_contestants_draw_alone(monkeypatch):
    seen, own = [], contest.drawing_alone
    monkeypatch.setattr(contest, "drawing_alone", lambda *given: seen.append(given) or own(*given))
    problem = replace(TINY, call="dropout")
    (row,) = contest.measure_cell("s", problem, FAST)
    assert row.own.seconds and [given[1] for given in seen] == [problem] * (
        1 + sum(p.seconds is not None for p in row.peers)
    )


# on a device


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_has_a_contest_on_a_gpu(mask, direction):
    """Ours is right and timed, and so is one of torch's backends."""
    problem = Problem(2, 8, 256, 256, 64, "bfloat16", mask, direction, device="cuda")
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=tuple(peers.TORCH_BACKENDS)))
    assert row.own.seconds and row.own.kernel and row.own.bytes, row.own
    assert any(peer.seconds and peer.bytes for peer in row.peers), row.peers


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask", ["window", "alibi", "segments", "lengths", "bias_grad"])
def test_flex_is_compiled_on_a_gpu(mask, direction):
    problem = Problem(2, 8, 256, 256, 64, "bfloat16", mask, direction, device="cuda")
    (row,) = contest.measure_cell("s", problem, replace(FAST, peers=("flex",)))
    assert row.peers[0].seconds and row.peers[0].bytes, row.peers


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("call", ASKED)
def test_every_call_has_a_contest_on_a_gpu(call, dtype):
    (row,) = contest.measure_cell("s", problem_of(call, device="cuda", host=True, dtype=dtype), FAST)
    told = next(peer for peer in row.peers if peer.name == "torch")
    assert row.own.seconds and row.own.kernel, row.own
    assert told.reason == "torch has no softcap" if call == "softcap" else told.seconds, told
