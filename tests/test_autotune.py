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
from sdpa.bench.record import versions
from sdpa.dispatch import tables
from sdpa.dispatch.device import device_of
from sdpa.dispatch.select import clear_caches
from sdpa.problem import AttentionInputs

pytestmark = pytest.mark.usefixtures("own_surroundings", "off_again")
state, context = import_module("sdpa.dispatch.autotune"), import_module("sdpa.dispatch.context")


@pytest.fixture
def off_again():
    def forget():
        state.Everywhere.seconds, state.Everywhere.prepared_without = 0.0, False
        state.ASKED.clear()
        measuring.REFUSED.clear()

    forget()
    yield
    forget()


def everyone(problem):
    return [candidate for candidate in tuner.select.consider(problem) if candidate.able]


@pytest.fixture
def measured(monkeypatch):
    """The calls that are measured, as (problem, inputs), and every one of them answered at once: `math` is fastest."""
    seen = []

    def contest(problem, found, tensors, seconds):
        seen.append((problem, tensors[0]))
        return {(c.kernel.name, c.tile): 1e-6 * (1 + (c.kernel.name != "math")) for c in found}

    monkeypatch.setattr(measuring, "contestants", everyone)
    monkeypatch.setattr(measuring, "contest", contest)
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
    assert [problem.direction for problem, _ in measured] == ["forward"]
    (bucket,) = table(tmp_path).buckets
    assert bucket.sizes == (1, 2, 2, 9, 9, 8, 8) and bucket.ms["math"] == 1e-3 and not bucket.beside
    attend(*qkv(12))
    assert len(measured) == 2 and len(table(tmp_path).buckets) == 2
    attend(*helpers.qkv(1, 2, 12, 14, 8))
    assert len(measured) == 2, "14 keys are near 12"
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
        with sdpa.autotune(seconds=0):
            attend(*qkv(15))
        assert len(measured) == 1
        attend(*qkv(23))
    attend(*qkv(33))
    assert len(measured) == 2
    sdpa.autotune(True)
    thread = threading.Thread(target=lambda: attend(*qkv(44)))
    thread.start()
    thread.join()
    assert len(measured) == 3, "from now on in every thread"
    with sdpa.autotune(seconds=0):
        attend(*qkv(60))
    assert len(measured) == 3
    sdpa.autotune(False)
    attend(*qkv(80))
    assert len(measured) == 3


def test_one_block_again_and_again(measured):
    block = sdpa.autotune(seconds=0)
    for M in (9, 15):
        with block, sdpa.autotune(), block:
            attend(*qkv(M))
    with sdpa.autotune() as inner, inner:
        attend(*qkv(23))
    attend(*qkv(33))
    assert [problem.M for problem, _ in measured] == [23]


def test_blocks_leave_the_process_alone(measured):
    first, second = sdpa.autotune(), sdpa.autotune()
    for block in (first, second, first):
        with block:
            attend(*qkv())
        assert not state.Everywhere.seconds
    kept = dict(import_module("sdpa.calls").CALLS.known)
    with first:
        attend(*qkv())
    assert set(kept) <= set(import_module("sdpa.calls").CALLS.known)
    with pytest.raises(TypeError, match="hold in the whole process"), sdpa.autotune(True):
        pytest.fail("entered")


def test_as_a_decorator(measured):
    decorated = sdpa.autotune()(attend)
    attend(*qkv(15))
    assert not measured and not state.Everywhere.seconds
    for _ in range(2):
        decorated(*qkv())
    assert len(measured) == 1


def test_a_backward_runs_in_a_thread_of_its_own(measured):
    """As those of CUDA do: the setting is the call's, and not the thread's."""
    tensors = qkv(grad=True)
    with sdpa.autotune():
        loss = attend(*tensors).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert [problem.direction for problem, _ in measured] == ["forward", "backward"]


def test_inside_and_around_kernel_settings(measured):
    with sdpa.autotune(), sdpa.sdpa_kernel():
        attend(*qkv())
    assert len(measured) == 1
    with sdpa.sdpa_kernel(["flash", "math"]), sdpa.autotune():
        attend(*qkv(15))
        assert sdpa.last_choice().kernel.family in ("flash", "math")
    with sdpa.sdpa_kernel(strict=True), sdpa.autotune():
        attend(*qkv(23))
        assert sdpa.last_choice().kernel.family == "flash", "math is measured as the fastest, and refused"
    assert [problem.M for problem, _ in measured] == [9, 23]


def test_kernels_of_the_environment_stay(measured, monkeypatch):
    monkeypatch.setenv("SDPA_KERNEL", "vendor_math")
    context.environment_text.cache_clear()
    try:
        with sdpa.autotune():
            attend(*qkv())
            assert sdpa.last_choice().kernel.name == "vendor_math"
    finally:
        monkeypatch.delenv("SDPA_KERNEL")
        context.environment_text.cache_clear()
    assert not measured


def test_a_setting_as_text():
    for seconds in (0.0, 2.0, 1e-05, 0.1):
        setting = context.Setting(("flash",), strict=True, autotune=seconds, toggles=5)
        assert context.Setting.decode(setting.encode()) == setting
    assert context.Setting.decode(context.Setting(toggles=15).encode()) == context.Setting(toggles=15)


def test_calls_that_were_prepared_before_are_measured(measured):
    tensors = qkv()
    for _ in range(2):
        attend(*tensors)
    sdpa.autotune(True)
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
        exported = torch.export.export(Attend(), tuple(qkv(33)))
        assert not measured
        out = compiled(*qkv())
        assert len(measured) == 1
        torch.testing.assert_close(out, attend(*qkv(), kernel="cpu_flash"))
        exported.module()(*qkv(33))
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


class Block(torch.nn.Module):
    def forward(self, q, k, v):
        with sdpa.autotune():
            return attend(q, k, v)


def test_inside_of_an_exported_function_a_block_does_nothing(measured):
    exported = torch.export.export(Block(), tuple(qkv(33)), strict=False)
    with sdpa.sdpa_kernel("math"):
        exported.module()(*qkv(33))
        assert sdpa.last_choice().kernel.family == "math"
    assert not measured


def test_inside_of_a_compiled_function_a_block_does_nothing(measured):
    @torch.compile(backend="eager")
    def function(q, k, v):
        with sdpa.autotune():
            return attend(q, k, v)

    function(*qkv())
    assert not measured and not state.Everywhere.seconds


def test_kernels_are_called_with_copies(measured):
    base = torch.randn(1, 2, 9, 24)
    q, k, v = base.split(8, 3)
    bias = torch.randn(1, 1, 9, 1).expand(1, 2, 9, 9)
    lengths = torch.tensor([7])
    with sdpa.autotune():
        attend(q, k, v, sdpa.Mask(bias=bias, lengths=lengths))
        attend(q, q, q)
    given, twice = (inputs for _, inputs in measured)
    for mine, theirs in ((q, given.q), (k, given.k), (v, given.v)):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride() and mine.data_ptr() != theirs.data_ptr()
    assert given.q.untyped_storage().nbytes() == base.untyped_storage().nbytes()
    assert given.q.untyped_storage().data_ptr() == given.v.untyped_storage().data_ptr(), "memory is copied once"
    assert given.bias.untyped_storage().nbytes() < 9 * 9 * 4, "what repeats is not laid out"
    assert twice.k is twice.q and twice.v is twice.q


def test_copies_take_the_part_of_memory_that_is_seen():
    """A view of a large buffer, as of the cache of one layer, is not the buffer."""
    buffer = torch.randn(1000, 2, 9, 8)
    given = AttentionInputs(*(buffer[number : number + 1] for number in (500, 501, 503)), 1.0)
    (copied,) = measuring.copied([given])
    assert copied.q.untyped_storage().nbytes() == 4 * given.q.nbytes
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(given[:3], copied[:3], strict=True))


def test_views_far_apart_are_left_out(measured):
    """As of a cache of all layers, where what lies between is many times the call."""
    cache = torch.randn(2, 40, 1, 2, 64, 8)
    with sdpa.autotune():
        attend(torch.randn(1, 2, 3, 8), cache[0, 3, :, :, :9], cache[1, 3, :, :, :9])
    assert not measured


def test_pages_are_not_copied():
    """They belong to many sequences. The kernels of CPUs are given them as packed keys."""
    cache, table = torch.randn(4, 2, 16, 8), torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
    inputs = AttentionInputs(torch.randn(2, 2, 1, 8), cache, cache, 1.0, block_table=table)
    (copied,) = measuring.copied([inputs])
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


def test_a_problem_that_takes_too_long_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "contest", pytest.fail)
    with sdpa.autotune(seconds=1e-9):
        attend(*qkv())
    assert table(tmp_path) is None


def test_first_samples_decide_where_rounds_do_not_fit(monkeypatch, tmp_path):
    monkeypatch.setattr(tuner, "first_sample", lambda call, device: 0.3)
    monkeypatch.setattr(tuner, "race", pytest.fail)
    with sdpa.autotune(seconds=2.0):
        attend(*qkv())
    (bucket,) = table(tmp_path).buckets
    assert set(bucket.ms.values()) == {300.0}


def test_a_kernel_that_fails_is_left_out(monkeypatch, tmp_path):
    honest = tuner.repeated

    def repeated(kernel, *rest):
        if kernel.name == "cpu_flash":
            raise RuntimeError("no")
        return honest(kernel, *rest)

    monkeypatch.setattr(tuner, "repeated", repeated)
    monkeypatch.setattr(measuring, "contestants", everyone)
    with sdpa.autotune():
        attend(*qkv())
    (bucket,) = table(tmp_path).buckets
    assert len(bucket.ms) > 1 and "cpu_flash" not in bucket.ms


def test_a_table_of_another_torch_is_left_as_it_is(measured, tmp_path):
    old = helpers.table(helpers.entry({"math": 1.0}), versions={"torch": "1.0"}, device=device_of("cpu").names[0])
    path = helpers.put(tmp_path / "tables", old, device_of("cpu").names[0])
    before = path.read_text()
    with sdpa.autotune():
        with pytest.warns(UserWarning, match="measures nothing on cpu.*measured with 1.0; move that file away"):
            out = attend(*qkv())
        attend(*qkv(15))  # says nothing again
    assert path.read_text() == before and not measured
    torch.testing.assert_close(out, attend(*qkv(), kernel="math"))


def test_a_table_keeps_what_it_says_of_itself(measured, tmp_path):
    near = helpers.entry({"math": 1.0}, H=2, Hkv=2, M=9, N=9, D=8, Dv=8)
    mine = {"versions": versions(), "command": "sdpa tune", "threads": 7}
    name = device_of("cpu").names[0]
    entries = helpers.entry({"math": 1.0}), near
    path = helpers.put(tmp_path / "tables", helpers.table(*entries, device=name, **mine), name)
    with sdpa.autotune():
        attend(*qkv())
    data = tables.load(path.read_text())
    assert data["threads"] == 7 and data["command"] == "sdpa tune" and data["date"] == "2026-01-31"
    assert len(data["entries"]) == 2 and len(data["entries"][1]["ms"]) > 1, "the entry of one kernel made way"


def test_a_folder_that_cannot_be_written(measured, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SDPA_TUNING_DIR", str(tmp_path / "file" / "tables"))
    with sdpa.autotune(), pytest.warns(UserWarning, match="cannot write a table to"):
        attend(*qkv())
    monkeypatch.setattr(measuring.environment, "tuning_dir", lambda: None)
    with pytest.raises(BookError, match="set SDPA_TUNING_DIR"):
        measuring.table_of("cpu")


def test_another_process_that_writes_is_waited_for(tmp_path):
    path = tmp_path / "some.yaml"
    told = pytest.raises(BookError, match="another `sdpa tune` is measuring")
    with measuring.alone(path), told, measuring.alone(path, 0.05):
        pytest.fail("two have it")
    held, left = threading.Event(), threading.Event()

    def hold():
        with measuring.alone(path):
            held.set()
            left.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    threading.Timer(0.1, left.set).start()
    with measuring.alone(path, 30.0):
        assert left.is_set()
    thread.join()


def test_too_little_memory_for_copies(monkeypatch):
    def refuse(tensors):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(measuring, "copied", refuse)
    with sdpa.autotune(), pytest.warns(UserWarning, match="autotune leaves out .* its tensors do not fit twice"):
        out = attend(*qkv())
    torch.testing.assert_close(out, attend(*qkv(), kernel="math"))


WRONG = {
    "enabled": (TypeError, lambda: sdpa.autotune("yes"), "argument 'enabled' must be bool, not str"),
    "seconds": (TypeError, lambda: sdpa.autotune(seconds="1"), "argument 'seconds' must be a number, not str"),
    "negative": (ValueError, lambda: sdpa.autotune(seconds=-1), "expects a number of seconds >= 0, got -1"),
    "endless": (ValueError, lambda: sdpa.autotune(seconds=torch.inf), "expects a number of seconds >= 0, got inf"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    error, call, told = WRONG[name]
    with pytest.raises(error, match=told):
        call()
    assert not state.Everywhere.seconds
