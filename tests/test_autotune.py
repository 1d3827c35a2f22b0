"""sdpa.autotune: what is measured at a first call and when, what the user's table gets, and what is left alone."""

from __future__ import annotations

import threading
from importlib import import_module

import pytest
import torch

import helpers
import sdpa
from sdpa import scaled_dot_product_attention as attend
from sdpa.bench import autotune as measuring
from sdpa.bench import tuner
from sdpa.bench.book import BookError
from sdpa.dispatch import tables
from sdpa.dispatch.device import device_of
from sdpa.dispatch.select import clear_caches
from sdpa.problem import AttentionInputs

pytestmark = pytest.mark.usefixtures("own_surroundings", "off_again")
state = import_module("sdpa.dispatch.autotune")


@pytest.fixture
def off_again():
    yield
    sdpa.autotune(False)
    state.ASKED.clear()
    state.Everywhere.prepared_without = False


@pytest.fixture
def measured(monkeypatch):
    """The problems that are measured, and every one of them answered at once: `math` is the fastest."""
    seen = []

    def compete(ready, time_limit, contest):
        seen.append(ready)
        return {"ms": {kernel.name: 1.0 + (kernel.name != "math") for kernel in ready.kernels}}

    everyone = lambda problem: tuple(c.kernel for c in tuner.select.consider(problem) if c.able)  # noqa: E731
    monkeypatch.setattr(measuring, "contestants", everyone)
    monkeypatch.setattr(tuner, "compete", compete)
    return seen


def qkv(M=9, **options):
    return helpers.qkv(1, 2, M, M, 8, **options)


def table(folder):
    return tables.read(str(folder / "tables" / f"{device_of('cpu').names[0]}.yaml"))


def test_nothing_is_measured_where_nobody_asked(measured, tmp_path):
    attend(*qkv())
    assert not measured and table(tmp_path) is None


def test_the_first_call_of_a_bucket_is_measured_once_and_the_table_has_it(measured, tmp_path):
    tensors = qkv()
    wanted = attend(*tensors)
    sdpa.autotune(True)
    for _ in range(3):
        out = attend(*tensors)
        assert sdpa.last_choice().kernel.name == "math" and "measured at" in sdpa.last_choice().reason
    torch.testing.assert_close(out, wanted)
    assert [ready.asked.direction for ready in measured] == ["forward"]
    (bucket,) = table(tmp_path).buckets
    assert bucket.sizes == (1, 2, 2, 9, 9, 8, 8) and bucket.ms["math"] == 1.0 and not bucket.beside
    attend(*qkv(10))
    assert len(measured) == 2 and len(table(tmp_path).buckets) == 2
    clear_caches()
    state.ASKED.clear()  # as another process
    attend(*tensors)
    assert len(measured) == 2 and sdpa.last_choice().kernel.name == "math"
    sdpa.autotune(False)
    attend(*qkv(10))
    assert sdpa.last_choice().kernel.name == "math", "the table speaks without it, too"


def test_a_real_measurement(tmp_path):
    tensors = qkv(33)
    with sdpa.autotune(seconds=1.0):
        out = attend(*tensors, is_causal=True)
    torch.testing.assert_close(out, attend(*tensors, is_causal=True, kernel="math"))
    (bucket,) = table(tmp_path).buckets
    assert len(bucket.ms) >= 2 and bucket.mask == "causal"
    attend(*tensors, is_causal=True)
    assert sdpa.last_choice().kernel.name == min(bucket.ms, key=bucket.ms.get)
    assert "measured at B1,H2,Hkv2,M33,N33,D8,Dv8 causal" in str(sdpa.explain(*tensors, is_causal=True))


def test_backwards_are_measured(tmp_path):
    tensors = qkv(17, grad=True)
    with sdpa.autotune(seconds=1.0):
        grads = torch.autograd.grad(attend(*tensors).square().sum(), tensors)
    assert {bucket.direction for bucket in table(tmp_path).buckets} == {"forward", "backward"}
    wanted = torch.autograd.grad(attend(*tensors, kernel="math").square().sum(), tensors)
    torch.testing.assert_close(grads, wanted)


def test_gradients_of_the_log_sum_exp_are_measured_without_them(tmp_path):
    tensors = qkv(grad=True)
    with sdpa.autotune(seconds=0.5):
        out, lse = attend(*tensors, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.square().sum(), tensors)
    out, lse = attend(*tensors, return_lse=True, kernel="math")
    torch.testing.assert_close(grads, torch.autograd.grad(out.sum() + lse.square().sum(), tensors))
    assert "backward" in {bucket.direction for bucket in table(tmp_path).buckets}


def test_a_block_holds_for_its_own_context(measured):
    others = []
    with sdpa.autotune():
        thread = threading.Thread(target=lambda: others.append(attend(*qkv(11))))
        thread.start()
        thread.join()
        assert not measured and len(others) == 1
        attend(*qkv())
        with sdpa.autotune(False):
            attend(*qkv(12))
        assert len(measured) == 1
        attend(*qkv(13))
    attend(*qkv(14))
    assert len(measured) == 2
    sdpa.autotune()
    thread = threading.Thread(target=lambda: attend(*qkv(15)))
    thread.start()
    thread.join()
    assert len(measured) == 3, "from now on in every thread"


def test_one_block_again_and_again(measured):
    block = sdpa.autotune(False)
    for M in (9, 10):
        with block, sdpa.autotune(), block:
            attend(*qkv(M))
    with sdpa.autotune() as inner, inner:
        attend(*qkv(11))
    attend(*qkv(12))
    assert [ready.asked.M for ready in measured] == [11]


def test_calls_that_were_prepared_before_are_measured(measured):
    tensors = qkv()
    for _ in range(2):
        attend(*tensors)
    with sdpa.autotune():
        for _ in range(2):
            attend(*tensors)
    assert len(measured) == 1
    with sdpa.autotune():
        kept = len(import_module("sdpa.calls").CALLS.known)
        attend(*tensors)
    assert kept and len(measured) == 1, "a block that changes nothing forgets nothing"


def named(*tensors):
    return attend(*tensors, kernel="cpu_flash")


def restricted(*tensors):
    with sdpa.sdpa_kernel(["flash", "math"]):
        return attend(*tensors)


def switched(*tensors):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return attend(*tensors)


def repeatable(*tensors):
    torch.use_deterministic_algorithms(True)
    try:
        return attend(*tensors)
    finally:
        torch.use_deterministic_algorithms(False)


def empty(q, k, v):
    return attend(q, k[:, :, :0], v[:, :, :0])


@pytest.mark.parametrize("call", [named, restricted, switched, repeatable, empty])
def test_what_is_not_measured(call, measured, tmp_path):
    with sdpa.autotune():
        call(*qkv())
    assert not measured and table(tmp_path) is None


def test_graphs_are_measured_when_they_run(measured):
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with sdpa.autotune():
        exported = torch.export.export(Attend(), tuple(qkv(21)))
        assert not measured
        out = compiled(*qkv())
        assert len(measured) == 1
        torch.testing.assert_close(out, attend(*qkv(), kernel="cpu_flash"))
        exported.module()(*qkv(21))
        assert len(measured) == 2


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return attend(q, k, v)


def test_dropout_is_a_bucket_of_its_own(measured, tmp_path):
    tensors = qkv()
    with sdpa.autotune():
        attend(*tensors, dropout_p=0.5)
        attend(*tensors, softcap=3.0, sinks=torch.zeros(2))
        attend(*tensors)
    assert [bucket.beside for bucket in table(tmp_path).buckets] == [{"dropout"}, {"sinks", "softcap"}, frozenset()]
    assert "with dropout" in sdpa.explain(*tensors, dropout_p=0.5).reason
    assert "with" not in sdpa.explain(*tensors).reason.partition("measured")[2]


def test_kernels_are_called_with_copies(measured):
    base = torch.randn(1, 2, 9, 24)
    q, k, v = base.split(8, 3)
    bias = torch.randn(1, 1, 9, 1).expand(1, 2, 9, 9)
    lengths = torch.tensor([7])
    with sdpa.autotune():
        attend(q, k, v, sdpa.Mask(bias=bias, lengths=lengths))
        attend(q, q, q)
    given, twice = (ready.inputs for ready in measured)
    for mine, theirs in ((q, given.q), (k, given.k), (v, given.v)):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride() and mine.data_ptr() != theirs.data_ptr()
    assert given.bias.untyped_storage().nbytes() < 9 * 9 * 4, "what repeats is not laid out"
    assert twice.k is twice.q and twice.v is twice.q


def test_pages_are_not_copied():
    """They belong to many sequences. The kernels of CPUs are given them as packed keys."""
    cache, table = torch.randn(4, 2, 16, 8), torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
    inputs = AttentionInputs(torch.randn(2, 2, 1, 8), cache, cache, 1.0, block_table=table)
    copied = measuring.copied(inputs)
    assert copied.k is cache and copied.v is cache
    assert copied.block_table is not table and torch.equal(copied.block_table, table)
    assert copied.q.data_ptr() != inputs.q.data_ptr()


def test_seconds_bound_the_measurement(monkeypatch, tmp_path):
    """After half of them no further kernel is begun."""
    now, begun = [0.0], []
    monkeypatch.setattr(measuring.time, "monotonic", lambda: now[0])
    honest = tuner.first_sample

    def first_sample(call, device):
        begun.append(call)
        now[0] += 0.6
        return honest(call, device)

    monkeypatch.setattr(tuner, "first_sample", first_sample)
    with sdpa.autotune(seconds=1.0):
        attend(*qkv())
    assert len(begun) == 1 and table(tmp_path) is None, "one kernel alone says nothing"


def test_a_table_of_another_torch_is_left_as_it_is(measured, tmp_path):
    old = helpers.table(helpers.entry({"math": 1.0}), versions={"torch": "1.0"}, device=device_of("cpu").names[0])
    path = helpers.put(tmp_path / "tables", old, device_of("cpu").names[0])
    before = path.read_text()
    with (
        sdpa.autotune(),
        pytest.warns(UserWarning, match="remembers nothing of forward B=1.*measured with 1.0"),
    ):
        out = attend(*qkv())
    assert path.read_text() == before
    torch.testing.assert_close(out, attend(*qkv(), kernel="math"))


def test_a_folder_that_cannot_be_written(measured, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SDPA_TUNING_DIR", str(tmp_path / "file" / "tables"))
    with sdpa.autotune(), pytest.warns(UserWarning, match="cannot write a table to"):
        attend(*qkv())
    monkeypatch.setattr(measuring.environment, "tuning_dir", lambda: None)
    with pytest.raises(BookError, match="set SDPA_TUNING_DIR"):
        measuring.table_of(measured[0].asked if measured else None)


def test_too_little_memory_for_copies(monkeypatch):
    def refuse(inputs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(measuring, "copied", refuse)
    with sdpa.autotune(), pytest.warns(UserWarning, match="its tensors do not fit twice"):
        out = attend(*qkv())
    torch.testing.assert_close(out, attend(*qkv(), kernel="math"))


WRONG = {
    "enabled": (TypeError, lambda: sdpa.autotune("yes"), "expected enabled as a bool, got str"),
    "seconds": (TypeError, lambda: sdpa.autotune(seconds="1"), "expected seconds as a number, got str"),
    "zero": (ValueError, lambda: sdpa.autotune(seconds=0), "expected a positive number of seconds, got 0"),
    "endless": (ValueError, lambda: sdpa.autotune(seconds=torch.inf), "expected a positive number of seconds, got inf"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    error, call, told = WRONG[name]
    with pytest.raises(error, match=told):
        call()
    assert not state.state().enabled
