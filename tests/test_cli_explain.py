"""The options of `sdpa explain` ask what the same call asks: numbers, results, packed documents and pages."""

from __future__ import annotations

import json

import pytest
import torch

from helpers import call, complaint

pytest.importorskip("click")
pytest.importorskip("rich")

import sdpa
from sdpa import Mask, sequences
from sdpa.cli import asked
from sdpa.dispatch import device
from sdpa.dispatch.kernel import Kernel
from sdpa.problem import AttentionProblem
from sdpa.validate import Options

pytestmark = pytest.mark.usefixtures("own_surroundings")
B, H, HKV, M, N, D = 2, 4, 2, 6, 10, 8
SHAPE = ("explain", "--shape", f"{B},{H},{M},{N},{D}", "--kv-heads", str(HKV))


def asked_by(*arguments: str) -> dict:
    return json.loads(call(*arguments, "--json"))["problem"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--softcap", "-1"), "'--softcap': expected a finite number >= 0, got '-1'"),
        (("--softcap=-1",), "'--softcap': expected a finite number >= 0, got '-1'"),
        (("--softcap", "-inf"), "'--softcap': expected a finite number >= 0, got '-inf'"),
        (("--causal", "--dropout", "-0.5"), "'--dropout': expected a number from 0 to 1, got '-0.5'"),
        (("--softcap", "-x"), "No such option '-x'"),
    ],
)
def test_a_negative_number_behind_an_option_that_needs_none(words, said):
    """It is the number that is told of, and not an option of that name."""
    assert said in complaint(*SHAPE, *words)


def test_a_number_behind_an_equals_sign():
    found = asked_by(*SHAPE, "--softcap=30", "--dropout", "--causal")
    assert {"softcap", "dropout", "causal"} <= set(found["features"] + ["causal"])


def as_json(problem: AttentionProblem) -> dict:
    """As `Explanation.as_dict` has it."""
    return json.loads(json.dumps(sdpa.dispatch.explain.Explanation(problem, (), None, "").as_dict()["problem"]))


def tensors():
    return torch.randn(B, H, M, D), torch.randn(B, HKV, N, D), torch.randn(B, HKV, N, D)


SINKS, BIAS = torch.zeros(H), torch.zeros(B, H, M, N)
# name: (the options of the command, those of sdpa.explain)
DENSE = {
    "softcap": (("--softcap", "30"), {"softcap": 30.0}),
    "softcap without a number": (("--softcap", "--dtype", "float32"), {"softcap": 30.0}),
    "no softcap": (("--softcap", "0"), {"softcap": 0.0}),
    "large softcap": (("--softcap", "2000"), {"softcap": 2000.0}),
    "sinks": (("--sinks",), {"sinks": SINKS}),
    "dropout": (("--dropout", "0.5"), {"dropout_p": 0.5}),
    "dropout without a number": (("--dropout",), {"dropout_p": 0.1}),
    "all dropped": (("--dropout", "1"), {"dropout_p": 1.0}),
    "scale": (("--scale", "-2"), {"scale": -2.0}),
    "window": (("--window", "3,2"), {"attn_mask": Mask(window=(3, 2))}),
    "wide window": (("--window", "99,none", "--causal"), {"attn_mask": Mask(window=(99, None), causal=True)}),
    "return_lse": (("--return-lse",), {"return_lse": True}),
    "learned bias": (
        ("--mask", "bias", "--learned-bias", "--backward"),
        {"attn_mask": BIAS.clone().requires_grad_(), "direction": "backward"},
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_options_of_a_call(name):
    arguments, options = DENSE[name]
    wanted = sdpa.explain(*tensors(), enable_gqa=True, **options).problem
    assert asked_by(*SHAPE, *arguments) == as_json(wanted)


def documents(rows_q: int, rows_k: int):
    """Full documents, one after the other; of one length the same tensor, as self-attention has it."""
    cu_q = torch.arange(B + 1, dtype=torch.int32) * rows_q
    return sequences.Documents(cu_q, cu_q if rows_q == rows_k else cu_q // rows_q * rows_k, rows_q, rows_k)


LENGTHS = torch.ones(B, dtype=torch.int32)
# name: (queries, keys, the options of the command, the mask)
PACKED = {
    "self": (N, N, (), None),
    "self, causal": (N, N, ("--causal",), Mask(causal=True)),
    "self, aligned": (N, N, ("--causal", "--align", "bottom_right"), Mask(causal=True, align="bottom_right")),
    "self, lengths": (N, N, ("--mask", "lengths"), Mask(lengths=LENGTHS)),
    "self, prefix": (N, N, ("--mask", "prefix"), Mask(causal=True, prefix=3)),
    "self, slopes": (N, N, ("--mask", "alibi"), Mask(alibi=torch.ones(H))),
    "cross": (M, N, (), None),
    "cross, aligned": (M, N, ("--causal", "--align", "bottom_right"), Mask(causal=True, align="bottom_right")),
}


@pytest.mark.parametrize("served", [(), ("segments",), ("segments", "packed")], ids=["none", "segments", "packed"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_documents(name, served, monkeypatch):
    """Of a device whose kernels take neither, segments, or the documents as they are."""
    table = {feature: frozenset({"cpu"} if feature in served else ()) for feature in ("packed", "paged", "segments")}
    for module in (sequences, asked):
        monkeypatch.setattr(module, "SERVED", table)
    queries, keys, arguments, mask = PACKED[name]
    q, k, v = torch.randn(B * queries, H, D), torch.randn(B * keys, HKV, D), torch.randn(B * keys, HKV, D)
    options = Options(attn_mask=mask, enable_gqa=True)
    inputs = sequences.served_form(sequences.build_packed(q, k, v, documents(queries, keys), options))
    shape = ("--shape", f"{B},{H},{queries},{keys},{D}", "--kv-heads", str(HKV))
    found, wanted = asked_by("explain", *shape, "--packed", *arguments), as_json(AttentionProblem.of(inputs))
    assert found == wanted


@pytest.mark.parametrize("served", [frozenset(), frozenset({"cpu"})], ids=["gathered", "as they are"])
@pytest.mark.parametrize("causal", [False, True])
def test_pages(causal, served, monkeypatch):
    for module in (sequences, asked):
        monkeypatch.setattr(module, "SERVED", {**module.SERVED, "paged": served})
    cache = torch.randn(2 * B, N // 2, HKV, D)
    pages = sequences.Pages(torch.arange(2 * B, dtype=torch.int32).view(B, 2), LENGTHS)
    options = Options(is_causal=causal, enable_gqa=True)
    inputs = sequences.served_form(sequences.build_paged(torch.randn(B, M, H, D), cache, cache, pages, options))
    wanted = as_json(AttentionProblem.of(inputs))
    assert asked_by(*SHAPE, "--paged", *(("--causal",) if causal else ())) == wanted


def test_packed_documents_on_a_cpu_are_answered():
    """By a fused kernel: as segments of one batch entry."""
    assert "chosen: cpu_flash" in call("explain", "--shape", "2,4,64,64,32", "--packed", "--causal")


def test_a_backward_of_a_kernel_that_has_none_is_free():
    assert "chosen: cpu_flash" in call(*SHAPE, "--backward", "--kernel", "vendor_math")
    assert "chosen: math" in call(*SHAPE, "--weights", "--kernel", "vendor_math")


def test_reasons_without_torchs_words():
    text = call(*SHAPE, "--softcap", "30", "--kernel", "vendor_cpu_flash", code=1)
    assert "chosen: none (No kernel can run this problem (asked for: vendor_cpu_flash))" in text
    assert "does not support softcap" in text and "Aborting execution" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--softcap", "much"), "expected a finite number >= 0, got 'much'"),
        (("--softcap", "inf"), "expected a finite number >= 0, got 'inf'"),
        (("--dropout", "1.5"), "expected a number from 0 to 1, got '1.5'"),
        (("--dropout", "nan"), "expected a number from 0 to 1, got 'nan'"),
        (("--scale", "inf"), "expected a finite number, got 'inf'"),
        (("--learned-bias",), "--learned-bias needs --mask bias"),
        (("--packed", "--paged"), "expected --packed or --paged, got both"),
        (
            ("--packed", "--mask", "bias"),
            "--packed takes --mask none, causal, lengths, both-lengths, prefix, alibi, got",
        ),
        (("--paged", "--mask", "lengths"), "--paged takes --mask none, causal, prefix, alibi, got lengths"),
        (("--paged", "--backward"), "--paged has a forward alone"),
        (("--packed", "--weights"), "--packed has no --weights"),
        (("--training", "--backward"), "expected --backward or --training, got both"),
        (("--return-lse", "--backward"), "expected --backward or --return-lse, got both"),
        (("--training", "--weights"), "expected --weights or --training, got both"),
        (("--mask", "none", "--mask", "causal"), "--mask none stands alone, got causal beside it"),
        (("--mask", "bias", "--mask", "none", "--causal"), "--mask none stands alone, got bias, causal beside it"),
        (
            ("--align", "bottom_right"),
            "--align bottom_right needs a diagonal: --window or --mask causal, prefix, alibi",
        ),
        (("--align", "bottom_right", "--mask", "lengths"), "--align bottom_right needs a diagonal"),
        (("--device", "meta"), "expected a device such as cpu or cuda:0, got 'meta': it computes nothing"),
        (("--device", "cuda:-1"), "expected a device such as cpu or cuda:0, got 'cuda:-1'"),
        (("--device", "cuda:gb"), "one of nvidia_h100_80gb_hbm3, nvidia_h200, got 'cuda:gb'"),
        (("--device", "cuda:hbm"), "one of nvidia_h100_80gb_hbm3, nvidia_h200, got 'cuda:hbm'"),
    ],
)
def test_it_complains_in_one_sentence(arguments, said):
    assert said in complaint(*SHAPE, *arguments)


@pytest.mark.parametrize("words", [("--window", "3,2"), ("--mask", "prefix"), ("--mask", "alibi"), ("--causal",)])
def test_a_diagonal_may_be_aligned(words):
    assert "bottom_right" in asked_by(*SHAPE, "--align", "bottom_right", *words)["features"]


@pytest.mark.parametrize("name", ["h100", "H100", "NVIDIA H100 80GB HBM3", "nvidia_h100_80gb_hbm3"])
def test_a_card_is_named_by_whole_words(name):
    assert "for nvidia_h100_80gb_hbm3, which was named" in call(*SHAPE, "--device", f"cuda:{name}")


WITHOUT_MPS = pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has one of Apple's GPUs")


@WITHOUT_MPS
def test_apples_gpus_are_answered_by_an_estimate_on_any_machine():
    found = json.loads(call("explain", "--shape", "1,32,1,8192,128", "--kv-heads", "4", "--device", "mps", "--json"))
    assert found["chosen"] == "metal_flash"
    assert "estimated from public figures for Apple M2 (10 GPU cores), which is assumed" in found["reason"]
    rows = {row["kernel"]: row for row in found["kernels"]}
    assert {name for name, row in rows.items() if row["seconds"]} == {"metal_flash", "vendor_mps", "math"}
    assert rows["cpu_flash"]["reasons"] == ["runs on cpu, got mps"]
    assert all(row["source"] == "estimated" for row in rows.values() if row["seconds"])
    assert "chosen: metal_flash" in call(*SHAPE, "--device", "mps", "--causal", "--sinks", "--backward")
    disabled = call(*SHAPE, "--device", "mps", "--kernel", "vendor_mps", "--sinks", code=1)
    assert "no kernel is able and allowed on Apple M2" in disabled and "disabled" in disabled


def test_a_chip_may_be_named():
    """Then the answer is an estimate on every machine."""
    times = {}
    for chip in ("M1", "m4 max"):
        found = json.loads(call("explain", "--shape", "1,8,4096,4096,64", "--device", f"mps:{chip}", "--json"))
        assert found["reason"].endswith("GPU cores), which was named")
        times[chip] = next(row["seconds"] for row in found["kernels"] if row["kernel"] == "metal_flash")
    assert times["M1"] > 5 * times["m4 max"]
    assert "expected a chip of Apple's, one of M1, M1 Pro" in complaint(*SHAPE, "--device", "mps:M0")


def test_a_card_that_a_table_tells_of_may_be_named(monkeypatch):
    """Kernels of Hopper are able and have the table's times, also where neither Triton nor a GPU is there."""
    asked = ("explain", "--shape", "4,32,4096,4096,128", "--causal", "--dtype", "bfloat16", "--json")
    found = json.loads(call(*asked, "--device", "cuda:H200"))
    rows = {row["kernel"]: row for row in found["kernels"]}
    assert found["reason"].endswith("for nvidia_h200, which was named") and rows[found["chosen"]]["seconds"]
    assert rows["cuda_flash"]["source"].startswith("nvidia_h200: measured at")
    assert rows["cpu_flash"]["reasons"] == ["runs on cpu, got cuda"]
    other = json.loads(call(*asked, "--device", "cuda:h100"))
    unmeasured = json.loads(call(*asked[:-2], "float64", "--json", "--device", "cuda:H200"))
    assert "estimated from what it reports for nvidia_h200" in unmeasured["reason"]
    assert "nvidia_h100_80gb_hbm3: measured" in other["reason"]

    def load(kernel):
        raise ImportError("no Triton here")

    monkeypatch.setattr(Kernel, "load", load)
    without = json.loads(call(*asked, "--device", "cuda:H200"))
    assert {row["kernel"] for row in without["kernels"] if row["seconds"]} >= {"cuda_flash", "triton_flash"}
    assert "one of nvidia_h100_80gb_hbm3, nvidia_h200, got 'cuda:A100'" in complaint(*SHAPE, "--device", "cuda:A100")
    assert device.ASSUMED.get() is None


def test_float64_is_refused_in_torchs_sentence():
    told = complaint(*SHAPE, "--device", "mps", "--dtype", "float64")
    assert "as the MPS framework doesn't support float64. Please use float32 instead." in told


@WITHOUT_MPS
@pytest.mark.parametrize(
    "command",
    [("check",), ("tune",), ("bench", "--suite", "mps"), ("bench", "--suite", "cpu-decode", "--device", "mps")],
)
def test_other_commands_want_the_device(command):
    device = () if "bench" in command else ("--device", "mps")
    told = complaint(*command, *device)
    assert "expected a device of this machine, got 'mps': " in told and "MPS" in told


def test_pages_of_few_queries_are_read_where_they_lie_on_a_cpu():
    problem = asked_by("explain", "--shape", "2,4,3,10,8", "--kv-heads", "2", "--paged")
    assert "paged" in problem["features"]
