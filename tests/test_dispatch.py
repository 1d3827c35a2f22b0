"""Who answers: reasons, invariants of the catalog, cached choices, estimates, the warning, explain, SDPA_KERNEL."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

import helpers
import sdpa
from helpers import ON_GPU
from sdpa.dispatch import apple, candidates, cost, device, explain, rules, select, tuning
from sdpa.dispatch.catalog import ALL_DTYPES, EVERYTHING, KERNELS, by_name, kernels_for
from sdpa.dispatch.context import ALL_TOGGLES, Setting
from sdpa.dispatch.kernel import FAMILIES, Kernel
from sdpa.problem import FEATURES, AttentionProblem

attention = sdpa.scaled_dot_product_attention
qkv = partial(helpers.qkv, B=1, H=2, M=16, N=16)
PLAIN = AttentionProblem("cpu", torch.float32, 2, 4, 4, 128, 128, 64, 64)
GPU = device.Device("cuda", "A GPU", ("nvidia_test",), 132, 9e14, 6e13, 3e13, 3e12)


pytestmark = pytest.mark.usefixtures("nothing_remembered")


def problem(**changes):
    return PLAIN._replace(**changes)


SENTENCES = {
    "device": ("vendor_flash", {}, "runs on cuda, got cpu"),
    "dtype": ("vendor_flash", {}, "takes bfloat16, float16, got float32"),
    "alibi forward": ("cuda_flash", {"features": frozenset({"alibi"})}, "knows ALiBi slopes in the backward only"),
    "alibi and softcap": (
        "cuda_flash",
        {"features": frozenset({"alibi", "softcap"}), "direction": "backward"},
        "takes ALiBi slopes or a softcap, got both",
    ),
    "head_size": ("vendor_flash", {"D": 320}, "takes head sizes up to 256, got D = 320, Dv = 64"),
    "direction": ("vendor_math", {"direction": "backward"}, "has no backward pass"),
    "feature": ("vendor_flash", {"features": frozenset({"bias"})}, "does not support an additive attention bias"),
    "features_in_order": (
        "vendor_cpu_flash",
        {"features": frozenset({"sinks", "alibi", "segments"})},
        "does not support segments (packed documents), ALiBi slopes, attention sinks",
    ),
    "deterministic": (
        "vendor_cudnn",
        {"deterministic": True},
        "is not deterministic, and torch.use_deterministic_algorithms(True) is set",
    ),
    "window": (
        "vendor_cpu_flash",
        {"left": 4, "right": 0, "features": frozenset({"band"})},
        "knows no window but causal, got left = 4, right = 0",
    ),
    "two_masks": (
        "vendor_math",
        {"right": 0, "features": frozenset({"band", "allowed"})},
        "takes a causal mask or a dense one, got both (causal and allowed)",
    ),
    "square": (
        "vendor_flash",
        {"M": 5, "right": 0, "features": frozenset({"band"})},
        "aligns causal masks to the bottom right, so M must equal N, got M = 5, N = 128",
    ),
    "head_sizes": ("vendor_cpu_flash", {"Dv": 32}, "needs D == Dv, got D = 64, Dv = 32"),
    "stride": (
        "vendor_cpu_flash",
        {"unaligned": (("q", 0),)},
        "needs the last stride of q, k and v to be 1, and would cop",
    ),
    "bias_dtype": (
        "vendor_math",
        {"bias_dtype": torch.float32, "dtype": torch.bfloat16, "features": frozenset({"bias"})},
        "needs the bias in the query's dtype torch.bfloat16, got torch.float32",
    ),
    "grid": ("vendor_flash", {"B": 70000}, "takes at most 65535 batch entries and heads, got B = 70000, H = 4"),
    "cudnn_multiple": (
        "vendor_cudnn",
        {"D": 20, "Dv": 20},
        "needs head sizes that are multiples of 8, got D = 20, Dv = 20",
    ),
    "cudnn_head_sizes": ("vendor_cudnn", {"D": 64, "Dv": 32}, "needs D == Dv, got D = 64, Dv = 32"),
    "cudnn_one_key": ("vendor_cudnn", {"N": 1}, "needs more than one key, got N = 1"),
    "cudnn_one_query": (
        "vendor_cudnn",
        {"M": 1, "direction": "backward"},
        "may give NaN gradients of keys and values for one query with low scores, got M = 1",
    ),
    "cudnn_half_tile": (
        "vendor_cudnn",
        {"N": 192, "direction": "backward"},
        "may give NaN gradients of queries with low scores where N % 128 is 64, got N = 192",
    ),
    "cudnn_half_tile_masked": (
        "vendor_cudnn",
        {"N": 64, "direction": "backward", "features": frozenset({"allowed"})},
        "may give NaN gradients of queries with low scores where N % 128 is 64, got N = 64",
    ),
    "mask_columns": (
        "vendor_cudnn",
        {"features": frozenset({"bias"}), "narrow_mask": True},
        "needs a mask with a column for each of the 128 keys, got one that repeats along them",
    ),
    "packed_weights": (
        "math",
        {"direction": "weights", "features": frozenset({"packed"})},
        "makes weights of batch entries side by side only, got packed sequences",
    ),
    "alignment": ("vendor_efficient", {"D": 30}, "needs head sizes that are multiples of 4, got D = 30, Dv = 64"),
    "paged_backward": (
        "metal_flash",
        {"direction": "backward", "features": frozenset({"paged"})},
        "reads a paged cache in the forward only",
    ),
    "mps_head_size": (
        "vendor_mps",
        {"D": 40, "Dv": 40},
        "takes the head sizes 32, 64, 72, 80, 96, 128, 256 for M = 128, got D = 40",
    ),
    "mps_few_queries": (
        "vendor_mps",
        {"M": 4, "D": 32, "Dv": 32},
        "takes the head sizes 64, 96, 128, 256 for M = 4, got",
    ),
    "mps_fewer_keys": (
        "vendor_mps",
        {"M": 4, "N": 3},
        "takes no more queries than keys where they are few, got M = 4, N = 3",
    ),
    "mps_elements": (
        "vendor_mps",
        {"B": 1 << 10, "M": 1 << 13},
        "takes tensors of fewer than 2^31 elements, got 2147483648",
    ),
    "mask_width": (
        "vendor_efficient",
        {"N": 126, "features": frozenset({"allowed"})},
        "needs a mask of a width that is a multiple of 4, got N = 126",
    ),
}


def test_a_backward_that_sums_over_heads_which_share_keys_takes_the_time_of_it(monkeypatch):
    monkeypatch.setattr(cost, "device_of", lambda name: GPU)
    causal = {"left": -1, "right": 0, "features": frozenset({"band"})}
    large = problem(device="cuda:0", dtype=torch.bfloat16, M=8192, N=8192, H=8, Hkv=8, **causal)
    sums = 4 * large.B * 2 * 8192 * (large.D + large.Dv) / GPU.bandwidth
    for name, direction, longer in (
        ("cuda_flash", "forward", 0.0),
        ("cuda_flash", "backward", sums),
        ("triton_hopper", "backward", 0.0),
    ):
        alone, grouped = (cost.estimate(by_name()[name], large._replace(Hkv=n, direction=direction)) for n in (8, 2))
        assert grouped == pytest.approx(alone + longer)
    for other in ({"right": -1, "features": frozenset()}, {"left": 99}, {"M": 999, "N": 999}):
        backward = large._replace(direction="backward", **other)
        alone, grouped = (cost.estimate(by_name()["cuda_flash"], backward._replace(Hkv=n)) for n in (8, 2))
        assert grouped == pytest.approx(alone)


def test_work_is_counted_inside_of_the_band():
    """All of it beside a prefix, which may be as long as the keys."""
    causal = problem(left=-1, right=0, features=frozenset({"band"}))
    assert problem().flops() == problem().dense_flops() == causal.dense_flops()
    assert causal.flops() == pytest.approx(problem().flops() * 129 / 256)
    assert causal._replace(features=frozenset({"band", "prefix"})).flops() == problem().flops()


@pytest.mark.parametrize("name", SENTENCES)
def test_why_not_says_what_it_got(name):
    kernel, changes, sentence = SENTENCES[name]
    reasons = by_name()[kernel].why_not(problem(**changes))
    assert any(reason.startswith(sentence) for reason in reasons), reasons


# What a Mac says of itself, and the sentence.
MACS = {
    "old": ((13, 6), "arm64", torch.bfloat16, "needs macOS 14 or newer for bfloat16, got macOS 13.6"),
    "intel": (
        (14, 5),
        "x86_64",
        torch.float16,
        "needs a GPU of Apple's (M1 or newer), got a Mac with an x86_64 processor",
    ),
    "new": ((14, 0), "arm64", torch.bfloat16, None),
    "old, other dtype": ((13, 6), "arm64", torch.float16, None),
}


@pytest.mark.parametrize("change", [
    {"N": 192, "M": 192, "right": 0, "features": frozenset({"band"})}, {"N": 192, "direction": "forward"}, {"N": 128},
    {"N": 200, "features": frozenset({"bias"})}, {"M": 2, "N": 100}, {"M": 1, "direction": "forward"},
], ids=str)  # fmt: skip
def test_cudnn_is_not_refused_where_its_gradients_are_finite(change):
    assert rules.cudnn_low_scores(ON_GPU._replace(**{"direction": "backward", **change})) is None


@pytest.mark.parametrize(("sizes", "sentence"), [
    ((192, 128), None), ((64, 128), None), ((256, 256), None),
    ((192, 100), "needs head sizes that are multiples of 8, got D = 192, Dv = 100"),
    ((128, 264), "takes head sizes up to 256 on this device, got D = 128, Dv = 264"),
], ids=str)  # fmt: skip
def test_cudnn_takes_other_head_sizes_of_values_on_hopper(sizes, sentence, monkeypatch):
    monkeypatch.setattr(rules, "capability", lambda device: (9, 0))
    assert rules.cudnn_head_sizes(ON_GPU._replace(D=sizes[0], Dv=sizes[1])) == sentence


@pytest.mark.parametrize("name", MACS)
def test_what_metal_flash_wants_of_a_mac(name, monkeypatch):
    macos, machine, dtype, sentence = MACS[name]
    monkeypatch.setattr(apple, "macos", lambda: macos)
    monkeypatch.setattr(apple, "machine", lambda: machine)
    asked = problem(device="mps", dtype=dtype)
    assert by_name()["metal_flash"].limits(asked) == ([] if sentence is None else [sentence])


def test_limits_are_what_a_problem_exceeds_on_any_machine():
    """Without that the machine lacks a device, which `why_not` adds."""
    for kernel in KERNELS:
        for kind in ("cpu", "cuda:0", "mps"):
            asked = problem(device=kind)
            unavailable = kernel.unavailable() if kernel.serves(asked.device_type) else None
            assert kernel.why_not(asked) == kernel.limits(asked) + ([unavailable] if unavailable else [])
    assert by_name()["metal_flash"].limits(problem(device="mps:M4")) == []


def test_names_are_unique_and_families_known():
    assert len(by_name()) == len(KERNELS)
    for kernel in KERNELS:
        assert kernel.family in FAMILIES and kernel.summary
        assert kernel.features <= set(FEATURES) and kernel.dtypes <= ALL_DTYPES
        assert set(kernel.directions) <= {"forward", "backward", "weights"}


def test_every_row_imports_or_has_a_reason():
    for kernel in KERNELS:
        reason = kernel.unavailable()
        assert reason is None or (isinstance(reason, str) and "\n" not in reason)
        module = importlib.import_module(kernel.module)
        for direction in kernel.directions:
            assert callable(getattr(module, direction))
        assert isinstance(module.TILES, tuple)


def test_a_module_that_does_not_import_is_a_reason():
    row = dataclasses.replace(by_name()["math"], name="lost", module="sdpa.kernels.lost")
    assert "its module does not import: No module named 'sdpa.kernels.lost'" in row.why_not(PLAIN)


EXTREMES = [
    problem(features=EVERYTHING, left=3, right=2, bottom_right=True, D=1000, Dv=3, unaligned=(("q", 0),)),
    problem(direction="backward", features=EVERYTHING, dtype=torch.float64, deterministic=True, B=70000),
    problem(device="mps", dtype=torch.float16),
    problem(device="xpu:1", features=EVERYTHING),
]


@pytest.mark.parametrize("extreme", EXTREMES, ids=["forward", "backward", "mps", "xpu"])
def test_the_last_row_is_math_and_always_can(extreme):
    assert KERNELS[-1].name == "math" and KERNELS[-1].why_not(extreme) == []


def test_the_fallback_has_every_feature_that_exists():
    assert KERNELS[-1].features == EVERYTHING == set(FEATURES)


def test_kernels_for_a_device_keep_the_order():
    names = [k.name for k in kernels_for("cpu")]
    assert names == [k.name for k in KERNELS if k.name in names] and "vendor_flash" not in names


def test_choices_are_cached(monkeypatch):
    first = select.choose(PLAIN, "", ALL_TOGGLES)
    monkeypatch.setattr(select, "consider_allowed", lambda *rest: pytest.fail("selected again"))
    assert select.choose(PLAIN, "", ALL_TOGGLES) is first
    assert helpers.python_calls(lambda: select.choose(PLAIN, "", ALL_TOGGLES)) <= 3


@pytest.mark.parametrize("names, asked", [(("cpu_flash",), ["cpu_flash"]), (("math",), ["vendor_math", "math"])])
def test_only_kernels_that_a_setting_allows_are_considered(names, asked, monkeypatch):
    own, considered = candidates.candidate_of, []
    monkeypatch.setattr(candidates, "candidate_of", lambda k, *rest: considered.append(k.name) or own(k, *rest))
    select.choose.__wrapped__(PLAIN, Setting(names).encode(), ALL_TOGGLES)
    assert considered == asked


IMPORTED = """
import sys
from helpers import ON_GPU
from sdpa.dispatch import cost, select, tuning
from sdpa.dispatch.context import ALL_TOGGLES, Setting
from sdpa.dispatch.device import Device
card = Device("cuda", "a card", ("a_card",), 132, 1e15, 6e13, 3e13, 3e12, "nvidia", "sm90")
tuning.device_of = cost.device_of = lambda name: card
for setting in (Setting(("cuda_flash",), forced=True), Setting()):
    try:
        select.choose(ON_GPU, setting.encode(), ALL_TOGGLES)
    except select.NoKernelError:
        pass
    print(any(name.startswith("sdpa.kernels.triton") for name in sys.modules))
"""


def test_whoever_asks_for_one_kernel_does_not_wait_for_triton():
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    run = partial(subprocess.run, capture_output=True, text=True, env=environment, check=False)
    done = run([sys.executable, "-c", IMPORTED])
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_settings_travel_as_text():
    for setting in (Setting(), Setting(("math",), True), Setting(("flash", "math"), False, True, True)):
        assert Setting.decode(setting.encode()) == setting
    assert Setting().encode() == ""


def test_estimates_order_as_sizes_do():
    for kernel in KERNELS[:1] + KERNELS[-2:]:
        sizes = [problem(M=n, N=n) for n in (64, 256, 1024, 4096)]
        times = [cost.estimate(kernel, p) for p in sizes]
        assert times == sorted(times) and times[0] > 0
        assert cost.estimate(kernel, sizes[-1]) > cost.estimate(kernel, sizes[-1]._replace(B=1))


def test_estimates_prefer_fused_kernels_on_large_problems():
    large = problem(M=4096, N=4096)
    fused, math = by_name()["cpu_flash"], by_name()["math"]
    assert cost.estimate(fused, large) < cost.estimate(math, large)
    causal = large._replace(right=0, features=frozenset({"band"}))
    assert cost.estimate(fused, causal) < 0.6 * cost.estimate(fused, large)
    assert cost.estimate(math, causal) == pytest.approx(cost.estimate(math, large))


def test_backward_costs_more_than_forward():
    for kernel in (by_name()["cpu_flash"], by_name()["math"]):
        large = problem(M=2048, N=2048)
        assert cost.estimate(kernel, large._replace(direction="backward")) > 2 * cost.estimate(kernel, large)


def on_gpu(monkeypatch):
    """A CUDA device whose kernels, math apart, cannot be loaded."""
    monkeypatch.setattr(device, "cuda", lambda index: GPU)
    return problem(device="cuda:0", M=2048, N=2048)


def test_a_large_fall_to_math_on_an_accelerator_warns_once(monkeypatch):
    large = on_gpu(monkeypatch)
    with pytest.warns(UserWarning, match="attention falls to .*math on a large problem") as caught:
        choice = select.choose(large, "", ALL_TOGGLES)
    assert choice.kernel.family == "math" and len(caught) == 1
    text = str(caught[0].message)
    assert "vendor_flash: takes bfloat16, float16, got float32" in text and "M=2048" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select.choose(large, "", ALL_TOGGLES)


QUIET = {
    "small": ({"M": 16, "N": 16}, ""),
    "asked_for_by_family": ({}, "math"),
    "asked_for_by_name": ({}, "math;f"),
    "on_cpu": ({"device": "cpu"}, "math"),
}


@pytest.mark.parametrize("changes,setting", QUIET.values(), ids=QUIET)
def test_other_falls_to_math_are_silent(changes, setting, monkeypatch):
    large = on_gpu(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select.choose(large._replace(**changes), setting, ALL_TOGGLES).kernel.family == "math"


def test_a_kernel_without_a_time_is_still_chosen_by_why_not():
    for candidate in select.consider(PLAIN):
        assert candidate.able == (not candidate.kernel.why_not(PLAIN))
        assert (candidate.seconds is not None) == candidate.able


def test_explain_as_text_and_as_data():
    result = sdpa.explain(*qkv(), is_causal=True)
    data, text = result.as_dict(), str(result)
    assert [row["kernel"] for row in data["kernels"]] == [k.name for k in KERNELS]
    assert sum(row["status"] == "chosen" for row in data["kernels"]) == 1
    assert data["chosen"] == result.chosen and data["problem"]["M"] == 16 and data["problem"]["features"] == ["band"]
    for row in data["kernels"]:
        assert row["status"] in explain.STATUSES and row["kernel"] in text
        assert bool(row["reasons"]) == (row["status"] == "refused") and (row["seconds"] is None) == bool(row["reasons"])
        assert row["source"] or row["reasons"]
    assert f"chosen: {result.chosen}" in text and "runs on cuda, got cpu" in text


def test_problems_and_choices_are_told_in_a_users_words():
    causal = PLAIN._replace(right=0, features=frozenset({"band", "lse"}))
    assert select.describe(causal).endswith(" on cpu: causal, lse")
    assert select.describe(causal._replace(left=7)).endswith(" on cpu: window=(7, 0), lse")
    assert select.describe(causal._replace(right=3)).endswith(" on cpu: window=(None, 3), lse")
    choice = select.choose(PLAIN, "math;f", ALL_TOGGLES)
    assert str(choice) == f"math for {select.describe(PLAIN)} (asked for by name)"


def test_explain_names_what_the_call_then_runs():
    for options in ({}, {"is_causal": True}, {"dropout_p": 0.1}, {"attn_mask": torch.ones(16, 16)}, {"kernel": "math"}):
        expected = sdpa.explain(*qkv(), **options).chosen
        attention(*qkv(), **options)
        assert sdpa.last_choice().kernel.name == expected


def test_explain_of_backward_and_of_a_setting():
    leaves = [t.requires_grad_() for t in qkv()]
    expected = sdpa.explain(*leaves, direction="backward").chosen
    attention(*leaves).sum().backward()
    assert sdpa.last_choice().kernel.name == expected
    with sdpa.sdpa_kernel("vendor_math"):
        result = sdpa.explain(*qkv())
    assert result.chosen == "vendor_math"
    assert {row.kernel: row.status for row in result.rows}["math"] == "disabled"


def test_a_refusal_says_who_takes_the_problem():
    """What to change is then the name alone."""
    with pytest.raises(sdpa.NoKernelError) as refused:
        sdpa.scaled_dot_product_attention(*qkv(), kernel="vendor_cudnn")
    told = str(refused.value).splitlines()
    assert told[-2] == "    - takes bfloat16, float16, got float32"
    assert told[-1].startswith("  Others take it: cpu_flash, ") and "cudnn" not in told[-1]
    assert told[-1].endswith(", vendor_math, math. Ask for one of these, or leave the choice open.")


def test_explain_without_a_kernel():
    with sdpa.sdpa_kernel("cudnn"):
        result = sdpa.explain(*qkv())
    assert result.chosen is None
    assert "chosen: none (No kernel can run this problem (asked for: cudnn))\n" in str(result)
    with torch.nn.attention.sdpa_kernel([]):
        result = sdpa.explain(*qkv())
    wanted = "Expected at least one enabled kernel, got all kernels allowed and torch's switches off for: "
    assert result.chosen is None and result.reason.startswith(wanted)


def test_last_choice_is_of_this_thread():
    found = []
    attention(*qkv(), kernel="vendor_cpu_flash")

    def work():
        found.append(sdpa.last_choice())
        attention(*qkv(), kernel="vendor_math")
        found.append(sdpa.last_choice().kernel.name)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None, "vendor_math"] and sdpa.last_choice().kernel.name == "vendor_cpu_flash"


SCRIPT = (
    "import torch, sdpa; q = torch.ones(1, 2, 16, 8); sdpa.scaled_dot_product_attention(q, q, q); "
    "print(sdpa.last_choice().kernel.name)"
)


def under(name):
    environment = {**os.environ, "SDPA_KERNEL": name}
    return subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("name", ["vendor_math", "math", "cudnn, vendor_cpu_flash"])
def test_environment_variable_holds_for_a_process(name):
    done = under(name)
    assert done.returncode == 0, done.stderr
    ran = done.stdout.strip()
    assert ran in name or by_name()[ran].family == name


def test_environment_variable_with_an_unknown_name():
    done = under("warp_drive")
    assert done.returncode != 0
    assert "unknown kernel or backend 'warp_drive'; known families:" in done.stderr and "cpu_flash" in done.stderr


def test_a_row_is_data():
    assert dataclasses.is_dataclass(Kernel) and hash(KERNELS[0]) == hash(KERNELS[0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        KERNELS[0].name = "other"


def test_a_backward_whose_bits_vary_says_so():
    adding = {"cuda_flash", "vendor_cudnn", "vendor_flash", "vendor_efficient"}
    backward = problem(direction="backward")
    assert {kernel.name for kernel in KERNELS if kernel.varies(backward)} == adding
    assert not any(
        kernel.varies(problem()) or kernel.varies(backward._replace(deterministic=True)) for kernel in KERNELS
    )
    row = explain.Row("cuda_flash", "chosen", (), 1e-3, "measured", varies=True)
    text = str(explain.Explanation(backward, (row, dataclasses.replace(row, varies=False)), "cuda_flash", "fastest"))
    assert [line.endswith("measured, bits vary") for line in text.splitlines()[-2:]] == [True, False]


def test_the_time_of_an_order_is_counted():
    kernel = by_name()["cuda_flash"]
    asked = problem(device="cuda", dtype=torch.bfloat16, direction="backward", deterministic=True, D=128, Dv=128)
    assert cost.ordering(kernel, asked) == 1.15
    for other in (asked._replace(deterministic=False), asked._replace(direction="forward")):
        assert cost.ordering(kernel, other) == 1.0
    assert all(cost.ordering(each, asked) == 1.0 for each in KERNELS if not each.varies_in)
    for more, reason in (
        ({"D": 192}, "above head size 128, got 192"),
        ({"features": frozenset({"segments"})}, "with segments"),
    ):
        limits = kernel.limits(asked._replace(**more))
        assert any(f"in an order that varies {reason}, and torch.use_deterministic" in limit for limit in limits)
    table = tuning.Measurement({"cuda_flash": 1.0}, "a table", {})
    times = [candidates.timed(kernel, asked._replace(deterministic=mode), table, ()).time for mode in (False, True)]
    assert times == [1.0, 1.15]
