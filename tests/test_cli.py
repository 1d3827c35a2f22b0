"""Every command but `sdpa tune` through click's runner: what it prints, its JSON, its exit code, and one sentence for
what is wrong."""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from importlib.metadata import version

import pytest
import torch

from helpers import call, complaint, complete_output

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner

import sdpa
from sdpa.bench import peers
from sdpa.bench.problems import Problem
from sdpa.bench.suites import SUITES
from sdpa.cli.app import app
from sdpa.cli.cases import cases
from sdpa.cli.check import Verdict, chosen_cases
from sdpa.cli.common import counted
from sdpa.dispatch import tables
from sdpa.dispatch.catalog import KERNELS, by_name
from sdpa.dispatch.device import device_of
from sdpa.dispatch.explain import STATUSES
from sdpa.kernels.cpu import library
from sdpa.testing import Case, on_host

pytestmark = pytest.mark.usefixtures("own_surroundings")
NAMES = [kernel.name for kernel in KERNELS]
SHAPE = ("explain", "--shape", "1,8,64,64,32")


def test_alone_it_prints_its_commands():
    result = CliRunner().invoke(app, [])
    for command in ("info", "explain", "check", "bench", "tune", "warm-up"):
        assert command in result.output
        assert "Usage" in call(command, "--help")
    assert re.search(r"\d+\.\d+\.\d+", call("--version"))


# info


def test_info_names_everything():
    text, torch_version = call("info"), version("torch")  # some builds add what they are built for to torch.__version__
    for word in (*NAMES, "processor", "torch threads", "CPU library", "python", "SDPA_TUNING_DIR", torch_version):
        assert word in text


def test_info_as_json():
    found = json.loads(call("info", "--json"))
    assert set(found) == {"machine", "libraries", "versions", "tuning tables", "environment", "kernels"}
    assert found["versions"]["sdpa"] == sdpa.__version__
    rows = {row["kernel"]: row for row in found["kernels"]}
    assert list(rows) == NAMES
    for name, row in rows.items():
        assert row["available"] == (by_name()[name].unavailable() is None)
        assert row["available"] == (row["reason"] == "")
    said = found["tuning tables"].values()
    assert set(said) <= {"not there"} | {text for text in said if "measured" in text or "times are estimated" in text}


def test_info_with_a_library_that_does_not_load(tmp_path, monkeypatch):
    broken = tmp_path / "libsdpa_cpu.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "LIBRARY", broken)
    monkeypatch.setattr(library, "_outcome", [])
    found = json.loads(call("info", "--json"))
    row = next(row for row in found["kernels"] if row["kernel"] == "cpu_flash")
    assert not row["available"] and "did not load" in row["reason"] and str(broken) in row["reason"]
    assert (
        "not loaded" in found["libraries"]["CPU library"] and "unknown" in found["machine"]["instruction sets (sdpa)"]
    )
    assert "no " in call("info")


def test_info_with_probes_that_raise(monkeypatch):
    def broken(*_):
        raise OSError("no such\nthing [here]")

    monkeypatch.setattr("sdpa.dispatch.device.cpu_model", broken)
    monkeypatch.setattr("sdpa.dispatch.kernel.Kernel.unavailable", broken)
    monkeypatch.setattr("torch.cuda.device_count", broken)
    found = json.loads(call("info", "--json"))
    assert found["machine"]["processor"] == found["tuning tables"] == "error: OSError: no such"
    assert all(row["reason"] == "error: OSError: no such" for row in found["kernels"])
    assert "error: OSError: no such" in call("info")


def test_info_names_a_broken_table(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    path = folder / f"{device_of('cpu').names[0]}.yaml"
    path.write_text("schema: 7\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = json.loads(call("info", "--json"))["tuning tables"][str(path)]
    assert state.startswith("ignored") and "device" in state


def test_info_of_a_device_without_a_table(user):
    found = json.loads(call("info", "--json"))["tuning tables"]
    assert found["cpu"] == "no tuning table for this device; times are estimated"
    assert {text for path, text in found.items() if path.endswith(".yaml")} == {"not there"}


@pytest.mark.parametrize("below", ["", "tables"])
def test_info_of_a_folder_that_is_none(below, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / below
    monkeypatch.setenv("SDPA_TUNING_DIR", str(folder))
    found = json.loads(call("info", "--json"))["tuning tables"]
    assert found[str(folder / f"{device_of('cpu').names[0]}.yaml")] == f"not there: {folder} is not a folder"


def test_info_of_a_table_that_needs_no_entry(user):
    name = device_of("cpu").names[0]
    head = {"schema": 1, "device": name, "date": "2026-01-01", "versions": {}, "command": "sdpa tune", "entries": []}
    tables.write(user / f"{name}.yaml", head)
    found = json.loads(call("info", "--json"))["tuning tables"]
    assert found[str(user / f"{name}.yaml")] == "there, without entries; times are estimated" and "cpu" not in found


# explain


def test_explain_prints_every_kernel():
    text = call(*SHAPE, "--causal", "--dtype", "bfloat16")
    assert all(name in text for name in NAMES) and "chosen: " in text and "runs on cuda, got cpu" in text


def test_explain_as_json():
    found = json.loads(
        call(*SHAPE, "--dv", "16", "--kv-heads", "2", "--window", "5,none", "--mask", "padding", "--json")
    )
    problem = found["problem"]
    assert (problem["Dv"], problem["Hkv"], problem["left"], problem["right"]) == (16, 2, 5, -1)
    assert problem["features"] == ["allowed", "band", "gqa"]
    assert [row["kernel"] for row in found["kernels"]] == NAMES
    assert {row["status"] for row in found["kernels"]} <= set(STATUSES)
    assert [row["kernel"] for row in found["kernels"] if row["status"] == "chosen"] == [found["chosen"]]


@pytest.mark.parametrize(
    "mask", ["none", "causal", "padding", "bias", "lengths", "both-lengths", "segments", "prefix", "alibi"]
)
@pytest.mark.parametrize("direction", [(), ("--training",), ("--backward",)])
def test_explain_asks_what_a_call_would_ask(mask, direction):
    """The problem made from options is the one that tensors of the same call make."""
    from sdpa.testing import make_inputs, problem_of

    case = {"both-lengths": "both_lengths"}.get(mask, mask)
    inputs = make_inputs(Case(B=1, H=8, Hkv=8, M=48, N=64, D=32, Dv=32, mask=case))
    wanted = problem_of(inputs, "backward" if "--backward" in direction else "forward")
    if not direction:
        wanted = wanted._replace(features=wanted.features - {"lse"})
    extra = (
        ("--causal", "--align", "bottom_right") if mask == "both-lengths" else ("--causal",) if mask == "alibi" else ()
    )
    found = json.loads(call("explain", "--shape", "1,8,48,64,32", "--mask", mask, *extra, *direction, "--json"))[
        "problem"
    ]
    assert found["features"] == sorted(wanted.features)
    assert [found[name] for name in ("left", "right", "bottom_right", "direction")] == [
        wanted.left,
        wanted.right,
        wanted.bottom_right,
        wanted.direction,
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_explain_for_a_gpu_that_is_not_there():
    found = json.loads(call(*SHAPE, "--device", "cuda", "--dtype", "float16", "--json", code=1))
    built = torch.version.cuda or torch.version.hip
    absent = "torch sees no CUDA device" + ("" if built else ": this torch was built without CUDA")
    assert found["chosen"] is None and found["reason"].startswith(f"{absent}. Of a card that was measured: ")
    reasons = {row["kernel"]: row["reasons"] for row in found["kernels"]}
    assert list(reasons) == NAMES and all(reasons.values())
    assert reasons["cpu_flash"] == ["runs on cpu, got cuda"] and reasons["math"] == [absent]
    assert "torch sees no CUDA device" in call(*SHAPE, "--device", "cuda", code=1)


def test_explain_a_kernel_that_cannot():
    text = call(*SHAPE, "--dv", "16", "--kernel", "vendor_cpu_flash", code=1)
    assert "chosen: none" in text and "needs D == Dv" in text
    assert "asked for by name" in call(*SHAPE, "--kernel", "vendor_cpu_flash")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shape", "1,2,3"), "expected B,H,M,N,D as 5 integers >= 1, got '1,2,3'"),
        (("--shape", "1,2,3,4,x"), "expected B,H,M,N,D"),
        (("--shape", "0,2,3,4,5"), "got '0,2,3,4,5'"),
        (("--shape", "1,8,4,4,8", "--kv-heads", "3"), "expected --kv-heads to divide the 8 heads, got 3"),
        (("--shape", "1,8,4,4,8", "--kernel", "flsh"), "unknown kernel or backend 'flsh'; known families: flash"),
        (("--shape", "1,8,4,4,8", "--device", "gpu"), "expected a device such as cpu or cuda:0, got 'gpu'"),
        (("--shape", "1,8,4,4,8", "--dtype", "int8"), "'int8' is not one of"),
        (
            ("--shape", "1,8,4,4,8", "--window", "-3,0"),
            "expected L,R, each an integer >= 0 or 'none', as 128,0 or 3,none, got '-3,0'",
        ),
        (
            ("--shape", "1,8,4,4,8", "--window", "none"),
            "each an integer >= 0 or 'none', as 128,0 or 3,none, got 'none'",
        ),
        (("--shape", "1,8,64,64," + 23 * "9"), "expected B,H,M,N,D as integers up to 1099511627776, got '1,8,64"),
        ((), "Missing option '--shape'. For example: --shape 1,32,4096,4096,128"),
        (("--device", "mps"), "Missing option '--shape'. For example: --shape 1,32,4096,4096,128"),
    ],
)
def test_explain_complains_in_one_sentence(arguments, said):
    assert said in complaint("explain", *arguments)


@pytest.mark.parametrize("device", ["hip", "xla"])
def test_explain_of_a_backend_that_torch_has_not(device):
    """torch's own text lists every backend that it has."""
    found = json.loads(call(*SHAPE, "--device", device, "--json", code=1))
    assert found["reason"] == f"this torch was built without {device}"


def test_explain_weights():
    found = json.loads(call(*SHAPE, "--weights", "--json"))
    assert found["chosen"] == "math"
    assert "got both" in complaint(*SHAPE, "--weights", "--backward")


# check


def test_check_passes_and_counts(few_cases):
    text = call("check", "--quick")
    assert text.splitlines()[-1] == f"check: {able_pairs(few_cases)} cases, 0 failed"
    assert "ok" in text


def able_pairs(few: list[Case]) -> int:
    from sdpa.testing import able

    return sum(not able(name, case) for name in NAMES for case in few)


def test_apples_gpus_are_checked_without_float64_and_judged_on_the_cpu():
    """MPS has no float64, which every result is held against."""
    there, here = list(cases("mps", quick=True)), list(cases("cpu", quick=True))
    assert {case.dtype for case in there} == {torch.float32, torch.bfloat16, torch.float16}
    assert {str(case) for case in there} == {str(case) for case in here if case.dtype != torch.float64}
    moved = on_host(sdpa.problem.Results(torch.ones(2), None))
    assert torch.equal(moved.out, torch.ones(2)) and moved.lse is None and on_host(None) is None


def test_check_as_json(few_cases):
    found = json.loads(call("check", "--json", "--kernel", "math", "--seed", "3"))
    assert found["summary"] == "check: 2 cases, 0 failed" and found["seed"] == 3
    (row,) = found["kernels"]
    assert row["kernel"] == "math" and row["cases"] == 2 and 0 < row["worst"] <= 1 and not row["failures"]


def test_check_tells_its_progress_where_nobody_sees_a_bar(few_cases):
    lines = call("check", "--kernel", "math").splitlines()
    assert lines[0] == "checking: 2 cases"
    assert [line.partition(", ")[0] for line in lines[1:3]] == [f"checking: {n} of 2 cases" for n in (1, 2)]
    beside = complete_output("check", "--kernel", "math", "--json")
    assert beside.startswith("{") and "checking: 2 of 2 cases" in beside.splitlines()[-1]


@pytest.mark.parametrize("json_out", [False, True])
def test_progress_is_written_at_once(monkeypatch, json_out):
    """Into a stream that keeps what is not flushed."""
    raw = io.BytesIO()
    kept = io.TextIOWrapper(raw)
    monkeypatch.setattr(sys, "stdout", io.StringIO() if json_out else kept)
    monkeypatch.setattr(sys, "stderr", kept if json_out else io.StringIO())
    with counted("checking", 60, json_out) as step:
        seen = [raw.getvalue().decode().splitlines()[-1]]
        for _ in range(60):
            step()
            seen.append(raw.getvalue().decode().splitlines()[-1])
    assert seen[0] == "checking: 60 cases" and seen[2] == seen[0]
    assert seen[3].startswith("checking: 3 of 60 cases, ") and seen[60].startswith("checking: 60 of 60 cases, ")
    assert len(set(seen)) == 21


def test_check_finds_a_wrong_kernel(few_cases, monkeypatch):
    module = by_name()["math"].load()
    honest = module.forward
    monkeypatch.setattr(module, "forward", lambda *a: (r := honest(*a))._replace(out=r.out * 1.1))
    text = call("check", "--kernel", "math", code=1)
    assert text.splitlines()[-1] == "check: 2 cases, 2 failed"
    again = re.search(r"sdpa check --kernel math --only (\S+) --seed 0", text)
    assert again and "out: error" in text
    assert "1 failed" in call("check", "--kernel", "math", "--only", again[1], code=1).splitlines()[-1]


def test_check_takes_an_exception_as_a_failure(few_cases, monkeypatch):
    def broken(*_):
        raise MemoryError("no room [at all]")

    monkeypatch.setattr(by_name()["math"].load(), "forward", broken)
    text = call("check", "--kernel", "math", code=1)
    assert "MemoryError: no room [at all]" in text and text.splitlines()[-1] == "check: 2 cases, 2 failed"


def test_check_says_what_is_not_here(few_cases):
    missing = next((name for name in NAMES if by_name()[name].unavailable()), None)
    if missing is None:
        pytest.skip("every kernel is available here")
    assert by_name()[missing].unavailable() in call("check", "--kernel", missing, code=1)


def test_check_complains_in_one_sentence(few_cases):
    assert "unknown kernel 'x'; known kernels: cpu_flash" in complaint("check", "--kernel", "x")
    assert "no case's name contains 'zzz'" in complaint("check", "--only", "zzz")
    assert "expected a device of this machine, got 'cuda:99'" in complaint("check", "--device", "cuda:99")
    assert complaint("check", "--device", "CPU").endswith("expected a device such as cpu or cuda:0, got 'CPU'")
    assert "got 'hpu': this torch was built without hpu" in complaint("check", "--device", "hpu")
    assert "got 'meta': it computes nothing" in complaint("check", "--device", "meta")
    assert "99999999999999999999 is not in the range" in complaint("check", "--seed", "99999999999999999999")


def test_check_grids_hold_every_mask_dtype_and_layout():
    from sdpa.testing import LAYOUTS, MASKS

    quick, full = chosen_cases("cpu", True), chosen_cases("cpu", False)
    for grid in (quick, full):
        assert {case.mask for case in grid} == set(MASKS) and {case.layout for case in grid} == set(LAYOUTS)
        assert len({case.dtype for case in grid}) == 4
        assert any(c.sinks for c in grid) and any(c.softcap for c in grid) and any(c.dropout_p for c in grid)
        assert any(c.Dv != c.D for c in grid) and any(c.Hkv != c.H for c in grid) and any(c.M == 1 for c in grid)
    assert len(full) > 4 * len(quick) and len(list(cases("cpu", True))) >= len(quick)


def test_quick_check_of_one_kernel_for_real():
    """Every case of the quick grid in float32, by the kernel of last resort."""
    verdict = Verdict("math")
    for case in chosen_cases("cpu", True, "float32"):
        torch.set_num_threads(1)
        verdict.judge(case, 0)
    assert verdict.cases >= 35 and not verdict.failures, verdict.failures


# bench


@pytest.fixture
def tiny_suite(monkeypatch):
    problems = (Problem(1, 2, 9, 9, 8), Problem(1, 2, 9, 9, 8, mask="causal", direction="backward"))
    monkeypatch.setitem(SUITES, "tiny", problems)


def test_bench_prints_rows_and_the_last_line(tiny_suite, tmp_path):
    path = tmp_path / "rows.json"
    text = call("bench", "--suite", "tiny", "--repeat", "2", "--threads", "1", "--json", str(path))
    last = text.splitlines()[-1]
    assert re.fullmatch(r"suite=tiny cells=2 geomean=\d+\.\d{3} worst=\d+\.\d{3}", last)
    assert "float32 1,2,9,8 causal backward" in text and "torch=" in text
    data = json.loads(path.read_text())
    assert data["summary"] == last and data["threads"] == 1 and len(data["rows"]) == 2


def test_bench_lists_its_suites():
    text = call("bench", "--list")
    assert all(name in text for name in ("cpu-forward", "cpu-backward", "cpu-decode", "overhead", "models"))


def test_bench_without_matplotlib(tiny_suite, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = complaint("bench", "--suite", "tiny", "--plot", str(tmp_path / "p.png"), code=1)
    assert said == "sdpa: --plot needs matplotlib: pip install matplotlib"


def test_bench_draws(tiny_suite, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.png"
    text = call("bench", "--suite", "tiny", "--repeat", "1", "--plot", str(path))
    assert path.stat().st_size > 5000 and text.splitlines()[-1].startswith("suite=tiny cells=2 ")


def test_bench_with_a_forced_kernel(tiny_suite):
    text = call("bench", "--suite", "tiny", "--repeat", "1", "--kernel", "vendor_math")
    assert "has no backward pass" in text and text.splitlines()[-1].startswith("suite=tiny cells=1 ")


def test_bench_with_a_wrong_result(tiny_suite, monkeypatch):
    monkeypatch.setattr("sdpa.bench.peers.our_call", lambda work, kernel: lambda: work.v.new_zeros(1, 2, 9, 8))
    text = call("bench", "--suite", "tiny", "--repeat", "1", "--only", "forward", code=1)
    assert "wrong result: out" in text and text.splitlines()[-1] == "suite=tiny cells=0 geomean=nan worst=nan"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected --suite NAME, one of cpu-forward"),
        (("--suite", "nope"), "unknown suite 'nope'; known suites: cpu-forward"),
        (("--suite", "tiny", "--only", "zzz"), "no problem of suite tiny contains 'zzz'"),
        (("--suite", "tiny", "--kernel", "x"), "unknown kernel or backend 'x'"),
        (("--suite", "tiny", "--peer", "x"), "'x' is not one of"),
        (("--suite", "tiny", "--peer", "fa4"), "--peer fa4: expected a device of kind cuda, where it runs, got cpu"),
        (("--suite", "tiny", "--json", "/no/such/folder/f.json"), "expected a file in a folder that exists"),
        (("--suite", "tiny", "--threads", "0"), "0 is not in the range"),
        (("--suite", "tiny", "--threads", "99999999999"), "expected --threads up to 4096, got 99999999999"),
        (("--suite", "tiny", "--time-limit", "nan"), "expected a number >= 0, got 'nan'"),
        (("--suite", "tiny", "--device", "cuda:99"), "expected a device of this machine, got 'cuda:99'"),
    ],
)
def test_bench_complains_in_one_sentence(tiny_suite, arguments, said):
    assert said in complaint("bench", *arguments)


def test_bench_of_a_peer_that_is_not_installed(tiny_suite, monkeypatch):
    """Said before anything is measured; also where what would hold a part of it is absent."""
    monkeypatch.setitem(peers.PACKAGES, "zentorch", "nobodys_package.part")
    monkeypatch.setattr("sdpa.cli.bench.run_contest", lambda *_: pytest.fail("measured"))
    said = complaint("bench", "--suite", "tiny", "--peer", "torch", "--peer", "zentorch")
    assert said.endswith("--peer zentorch: the package nobodys_package.part is not installed")


def test_peers_are_known_by_where_they_run():
    assert set(peers.KINDS) | set(peers.PACKAGES) <= set(peers.PEERS)
    everywhere = {name for name in peers.TORCH_PEERS if peers.why_absent(name, "mps") is None}
    assert everywhere == {"torch", "math"} and peers.why_absent("flash", "cpu") is None
    assert all("cuda" in peers.KINDS.get(name, ("cuda",)) for name in (*peers.TORCH_PEERS, "fa3", "fa4", "flex"))


def test_bench_of_files_that_are_none(tmp_path):
    file, picture = tmp_path / "rows.csv", ("--plot", str(tmp_path / "p.png"))
    assert complaint("bench", "--from-csv", str(file), *picture, code=1).endswith(f"{file}: No such file or directory")
    file.write_bytes(b"\xff\xfe")
    told = complaint("bench", "--from-csv", str(file), *picture, code=1)
    assert told == f"sdpa: {file} is not what sdpa bench --csv writes"
