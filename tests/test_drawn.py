"""Suite random: problems drawn by a seed, what each family promises, the regret, and the command's answers."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from helpers import call, complaint
from sdpa.bench import calls, drawn, record, truth
from sdpa.bench.contest import DEFAULT, Entry, Row
from sdpa.bench.problems import DIRECTIONS, MASKS, Problem
from sdpa.bench.workload import make_workload, surroundings

DEVICES = ("cpu", "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_seed_draws_the_same_problems(device):
    first, again, other = drawn.drawn(7, 60, device), drawn.drawn(7, 60, device), drawn.drawn(8, 60, device)
    assert first == again and len({p.label for p in first}) == 60
    assert len(set(first) & set(other)) < 6
    assert drawn.drawn(7, 20, device) == first[:20]


@pytest.mark.parametrize("device", DEVICES)
def test_problems_are_well_formed_and_within_the_device(device):
    limits = drawn.CPU_LIMITS if device == "cpu" else drawn.GPU_LIMITS
    problems = drawn.drawn(1, 400, device)
    for p in problems:
        assert p.mask in MASKS and p.direction in DIRECTIONS and p.H % p.Hkv == 0
        assert p.device == device and p.flops() > 0 and not drawn.takes_too_much(p, limits)
        assert p.direction == "backward" if p.mask == "bias_grad" else p.M <= p.N or p.mask == "none"
        assert p.call != "dropout" or p.mask in ("none", "causal")
    assert {p.mask for p in problems} == set(MASKS) and {p.direction for p in problems} == set(DIRECTIONS)
    assert {p.dtype for p in problems} == {"float32", "bfloat16", "float16"}
    assert sum(p.N % 64 != 0 for p in problems) > 200, "lengths that no tile divides"
    assert {p.H // p.Hkv for p in problems} >= {1, 4, 8} and {p.layout for p in problems} == {"bhmd", "bmhd"}


@pytest.mark.parametrize("family", drawn.FAMILIES, ids=lambda family: family.draw.__name__)
def test_a_family_that_is_never_too_large_ends(family):
    random = Random(3)
    for _ in range(50):
        asked = Problem(**family.draw(random))
        for limits in (drawn.CPU_LIMITS, drawn.GPU_LIMITS):
            fitted = drawn.fitted(asked, limits)
            assert not drawn.takes_too_much(fitted, limits) and (fitted.D, fitted.mask) == (asked.D, asked.mask)


def test_lengths_are_spread_over_their_logarithm():
    random = Random(0)
    found = sorted(drawn.between(random, 16, 4096) for _ in range(2001))
    assert (found[0], found[-1]) >= (16, 2048) and 200 < found[1000] < 330, "the median is the geometric mean"


def test_few_queries_behind_a_cache_see_all_of_it():
    problem = Problem(2, 2, 3, 7, 16, mask="lower_right")
    work = make_workload(problem)
    with surroundings(problem):
        ours, torchs = calls.our_call(work)(), calls.torch_call(work)()
    assert truth.out_error(work, ours, truth.right_out(work)).largest < 1e-5
    assert torch.allclose(ours, torchs, atol=1e-5)
    assert problem.visible_pairs() == 2 * (5 + 6 + 7)


def rows_of(problem, **times):
    return [Row("random", problem, Entry(name, name, seconds=time)) for name, time in times.items()]


def test_regret_is_the_defaults_time_over_the_best_kernels():
    problems = [Problem(1, 1, n, n, 8) for n in (8, 9, 10)]
    rows = rows_of(problems[0], default=2.0, math=3.0, flash=1.6) + rows_of(problems[1], default=1.0, math=3.0)
    rows += rows_of(problems[2], default=1.0) + rows_of(Problem(1, 1, 4, 4, 8), math=1.0)
    lost = record.regrets(rows)
    assert lost == {problems[0]: 1.25, problems[1]: 1.0}
    text = record.summary("random", DEFAULT, rows)
    assert text.endswith(f"regret={math.sqrt(1.25):.3f} worst_regret=1.250")
    assert "regret" not in record.summary("random", "math", rows)
    assert "regret" not in record.summary("random", DEFAULT, rows_of(problems[0], default=2.0))


def test_the_command_draws_and_tells_regret(tmp_path):
    text = call(
        "bench", "--suite", "random", "--seed", "11", "--problems", "3", "--device", "cpu", "--repeat", "1",
        "--csv", str(tmp_path / "random.csv"),
    )  # fmt: skip
    assert text.splitlines()[-1].startswith("suite=random cells=3 ") and "worst_regret=" in text
    shown = [line for line in text.splitlines() if line.startswith(("float", "bfloat"))]
    assert len(shown) == 3 and all("(" in line and "regret=" in line for line in shown)
    rows = record.read(tmp_path / "random.csv")[1]
    assert {row["problem"] for row in rows} == {p.label for p in drawn.drawn(11, 3, "cpu")}
    assert {row["asked"] for row in rows} >= {"default", "cpu_flash", "vendor_cpu_flash"}


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("--suite", "cpu-decode", "--seed", "1"), "--seed and --problems are of suite random"),
        (("--suite", "random", "--suite", "cpu-decode"), "suite random runs alone"),
        (("--suite", "random", "--seed", "-1"), "--seed"),
        (("--suite", "random", "--problems", "0"), "--problems"),
        (("--suite", "randon"), "unknown suite 'randon'; known suites: .*, models, random"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_answered_in_a_sentence(arguments, text):
    import re

    assert re.search(text, complaint("bench", *arguments))


def test_it_is_listed():
    assert "random" in call("bench", "--list")
