"""Kernels that cannot start: a sentence, the next able one where none was forced, and never a fault hidden."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from fake_kernels import catalog_of_fakes

import sdpa
from sdpa.dispatch import failure, select
from sdpa.dispatch.context import ALL_TOGGLES
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile


class OutOfResources(Exception):
    """As Triton's: told by its name and its module's."""


OutOfResources.__module__ = "triton.runtime.errors"


class InterpreterError(OutOfResources):
    """Triton's, too, but a fault of the program."""


InterpreterError.__module__ = "triton.runtime.errors"

NO_CPU_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has")
TOO_LARGE = OutOfResources("out of resource: shared memory, Required: 300000, Hardware limit: 232448")
NO_IMAGE = RuntimeError("CUDA error: no kernel image is available for execution on the device")
GRID = RuntimeError("Triton Error [CUDA]: invalid configuration argument")
FAULT = RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")


LARGE_TILE, MIDDLE_TILE, SMALL_TILE = Tile(128, 128), Tile(64, 64), Tile(32, 32)


@pytest.fixture
def rows(monkeypatch, tmp_path):
    """Puts a catalog of fake rows in place; each is given as (name, error, limits), the fastest first."""
    yield from catalog_of_fakes(monkeypatch, tmp_path)


def inputs(M=16, D=8):
    q = torch.ones(1, 2, M, D)
    return AttentionInputs(q, q, q, 1.0)


def run(setting="", direction="forward", M=16, D=8):
    given = inputs(M, D)
    problem = AttentionProblem.of(given, direction)
    choice = select.choose(problem, setting, ALL_TOGGLES)
    results = Results(given.q, None)
    return choice.run(given) if direction == "forward" else choice.run(given, results, results)


LARGE = {"materialises": True}


@pytest.mark.parametrize("error,kind", [
    (NO_CPU_MEMORY, failure.MEMORY),
    (NO_MEMORY, failure.MEMORY), (TOO_LARGE, failure.TILE), (NO_IMAGE, failure.BUILD), (FAULT, None),
    (GRID, failure.SIZE), (RuntimeError("CUDA error: too many resources requested for launch"), failure.TILE),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
    (RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built."), failure.SIZE),
    (InterpreterError("wrong"), None), (ValueError("no kernel image is available"), None), (KeyError("x"), None),
])  # fmt: skip
def test_kinds_of_errors(error, kind):
    assert failure.kind_of(error) == kind


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_next_able_kernel_answers_loudly(rows, direction):
    first, second = rows(("first", TOO_LARGE, {}), ("second", None, {}))
    with pytest.warns(UserWarning) as caught:
        answer = run(direction=direction)
    assert isinstance(answer, Results if direction == "forward" else Gradients)
    text = str(caught[0].message)
    assert len(caught) == 1 and "kernel first could not be launched on" in text and "second answers instead" in text
    assert direction in text and "M=16 N=16" in text and "Required: 300000" in text
    assert (first.ran, second.ran) == (1, 1) and sdpa.last_choice().kernel.name == "second"
    assert "in place of first" in sdpa.last_choice().reason


def test_a_failed_launch_is_not_tried_again(rows):
    first, second = rows(("first", NO_IMAGE, {}), ("second", None, {}))
    with pytest.warns(UserWarning, match="no kernel image"):
        run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
        run(M=24)  # another length is the same program
    assert (first.ran, second.ran) == (1, 3)
    told = next(c for c in select.consider(AttentionProblem.of(inputs())) if c.kernel.name == "first")
    assert told.reasons == (f"could not be launched before: {NO_IMAGE}",)
    select.clear_caches()
    with pytest.warns(UserWarning):
        run()
    assert first.ran == 2


def too_large(problem, tile):
    """What a device says whose shared memory holds the small tile only."""
    return None if tile == SMALL_TILE else TOO_LARGE


def one_tile(problem, tile):
    return TOO_LARGE if tile == LARGE_TILE else None


THREE = {"tiles": (LARGE_TILE, MIDDLE_TILE, SMALL_TILE)}


def test_the_next_tile_answers_before_the_next_kernel(rows):
    first, second = rows(("first", one_tile, THREE), ("second", None, {}))
    with pytest.warns(UserWarning) as caught:
        run()
    text = str(caught[0].message)
    assert len(caught) == 1 and f"with {LARGE_TILE}: out of resource" in text and f"its {MIDDLE_TILE} answers" in text
    assert sdpa.last_choice().kernel.name == "first" and sdpa.last_choice().tile == MIDDLE_TILE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(M=512)  # the refused tile is not tried for another length
    assert first.tiles_seen == [LARGE_TILE, MIDDLE_TILE, MIDDLE_TILE] and second.ran == 0


def test_tiles_are_tried_one_after_the_other(rows):
    first, second = rows(("first", too_large, THREE), ("second", None, {}))
    with pytest.warns(UserWarning):
        run("first;f")  # another tile is the kernel that was asked for
    assert first.tiles_seen == list(THREE["tiles"]) and second.ran == 0


def test_a_refused_tile_is_tried_for_another_head_size(rows):
    first, _ = rows(("first", lambda problem, tile: one_tile(problem, tile) if problem.D > 8 else None, THREE),
                    ("second", None, {}))  # fmt: skip
    with pytest.warns(UserWarning):
        run(D=16)
    run(D=8)
    assert first.tiles_seen == [LARGE_TILE, MIDDLE_TILE, LARGE_TILE]


def test_a_kernel_whose_tiles_are_all_refused_is_named_with_a_reason(rows):
    first, second = rows(("first", TOO_LARGE, THREE), ("second", None, {}))
    with pytest.warns(UserWarning) as caught:
        run()
    run()
    assert len(caught) == first.ran == 3 and second.ran == 2 and "second answers" in str(caught[2].message)
    told = next(c for c in select.consider(AttentionProblem.of(inputs())) if c.kernel.name == "first")
    assert told.reasons == (f"could not be launched before: {TOO_LARGE}",)


def test_a_kernel_nobody_built_is_not_tried_tile_by_tile(rows):
    first, _ = rows(("first", NO_IMAGE, THREE), ("second", None, {}))
    with pytest.warns(UserWarning, match="second answers instead"):
        run()
    assert first.ran == 1


def test_a_size_refused_bars_sizes_like_it(rows):
    first, second = rows(("first", lambda problem, tile: GRID if problem.M > 64 else None, THREE), ("second", None, {}))
    with pytest.warns(UserWarning, match="second answers instead"):
        run(M=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(M=101)
        run(M=63)
    assert (first.ran, second.ran) == (2, 2)


def test_out_of_memory_at_one_size_leaves_the_kernel_to_others(rows):
    first, second = rows(("first", lambda problem, tile: NO_MEMORY if problem.M > 64 else None, THREE),
                         ("second", None, {}))  # fmt: skip
    with pytest.warns(UserWarning, match="second answers instead"):
        run(M=100)
    run(M=64)
    assert first.tiles_seen == [LARGE_TILE, LARGE_TILE] and second.ran == 1, "no tile needs less memory than another"


def test_a_forced_kernel_raises_a_sentence(rows):
    _, second = rows(("first", TOO_LARGE, {}), ("second", None, {}))
    with pytest.raises(failure.LaunchError, match=r"kernel first could not be launched on forward B=1 H=2 .* float32"):
        run("first;f")
    assert second.ran == 0


def test_out_of_memory_stays_torchs_error_and_names_kernel_and_problem(rows):
    _, second = rows(("first", NO_MEMORY, {}), ("second", None, LARGE))
    with pytest.raises(
        torch.OutOfMemoryError, match=r"kernel first ran out of memory on forward B=1.*20.00 GiB"
    ) as got:
        run()
    assert got.value.__cause__ is NO_MEMORY and second.ran == 0, "a kernel that needs more is not tried"


def test_out_of_memory_where_a_kernel_was_asked_for_names_those_that_need_less(rows):
    _, second, _ = rows(("first", NO_MEMORY, {"sums_queries": True}), ("second", None, {}), ("third", None, LARGE))
    with pytest.raises(torch.OutOfMemoryError, match=r"; second would need less beside the results$"):
        run("first;f", direction="backward")
    with pytest.raises(torch.OutOfMemoryError, match=r"has$"):  # sums are those of a backward
        run("first;f")
    assert second.ran == 0
    rows(("lean", NO_MEMORY, {}), ("last", NO_MEMORY, {"sums_queries": True}))
    with pytest.warns(UserWarning), pytest.raises(torch.OutOfMemoryError, match=r"kernel last .* has$"):
        run(direction="backward")  # and does not name what ran out of memory before


def test_out_of_memory_of_a_kernel_that_needs_more(rows):
    first, second = rows(("first", NO_MEMORY, LARGE), ("second", None, {}))
    for count in (1, 2):
        with pytest.warns(UserWarning, match="first ran out of memory .* second answers instead"):
            run()
        assert (first.ran, second.ran) == (count, count), "memory may be there the next time"


def test_one_after_the_other_until_none_is_left(rows):
    modules = rows(("a", TOO_LARGE, {}), ("b", NO_MEMORY, {}), ("c", NO_MEMORY, {}), ("d", None, LARGE))
    with pytest.warns(UserWarning), pytest.raises(torch.OutOfMemoryError, match="kernel c ran out of memory"):
        run()
    assert [module.ran for module in modules] == [1, 1, 1, 0]


def test_faults_are_never_hidden(rows):
    first, second = rows(("first", FAULT, {}), ("second", None, {}))
    with pytest.raises(RuntimeError) as got:
        run()
    assert got.value is FAULT and (first.ran, second.ran) == (1, 0)
    third, _ = rows(("third", TOO_LARGE, {}), ("fourth", FAULT, {}))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="size of tensor"):
        run()
    assert third.ran == 1


def test_strict_does_not_end_at_math(rows):
    _, second = rows(("first", TOO_LARGE, {}), ("last", None, {"family": "math", **LARGE}))
    with pytest.raises(failure.LaunchError, match="kernel first"):
        run("flash,math;s")
    assert second.ran == 0


def test_only_what_is_allowed_may_answer(rows):
    modules = rows(("first", TOO_LARGE, {}), ("other", None, {"family": "efficient"}), ("third", None, {}))
    with pytest.warns(UserWarning, match="third answers"):
        run("flash")
    assert [module.ran for module in modules] == [1, 0, 1]


def test_temporaries_of_the_failed_call_are_gone_when_the_next_one_runs(rows, monkeypatch):
    first, second = rows(("first", None, LARGE), ("second", None, {}))
    held = []

    def greedy(given, problem, tile):
        scores = torch.zeros(4, 4)
        held.append(weakref.ref(scores))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def modest(given, problem, tile):
        gc.collect()
        assert held[0]() is None, "the score matrix is still there"
        return Results(given.q, None)

    monkeypatch.setattr(first, "forward", greedy)
    monkeypatch.setattr(second, "forward", modest)
    with pytest.warns(UserWarning, match="second answers"):
        run()


class ShaderError(RuntimeError):
    """As that of our launcher for Metal, which is told by its name."""


ShaderError.__module__ = "sdpa.kernels.metal.launch"
LOG = (
    "forward for Config(float16, D=64):\nprogram_source:217:9: error: use of undeclared identifier 'row'\n" + "x " * 400
)


def test_apples_refusals_are_known():
    """In torch's words for MPS, its misspelling included."""
    told = {
        "MPS backend out of memory (MPS allocated: 8.23 GiB). Tried to allocate 1.00 GiB.": failure.MEMORY,
        "Invalid buffer size: 64.00 GiB": failure.MEMORY,
        "Failed to created pipeline state object, error: too much threadgroup memory": failure.TILE,
        "Failed to create function state object for: forward": failure.BUILD,
        "Failed to create metal library, error: it is broken": failure.BUILD,
    }
    assert {said: failure.kind_of(RuntimeError(said)) for said in told} == told
    assert failure.kind_of(ShaderError("out of memory?")) == failure.BUILD
    assert failure.kind_of(SyntaxError("of a program")) is None


def test_a_shader_that_does_not_compile_shows_its_log(rows):
    first, second = rows(("first", ShaderError(LOG), THREE), ("second", None, {}))
    with pytest.warns(UserWarning, match="second answers instead") as caught:
        run()
    text = str(caught[0].message)
    assert LOG.strip() in text, "the line and what it was specialised for, as the compiler has them"
    assert first.ran == 1, "another tile is the same program"
    run(M=24)
    assert (first.ran, second.ran) == (1, 2)
    told = next(c for c in select.consider(AttentionProblem.of(inputs())) if c.kernel.name == "first")
    assert "\n" not in told.reasons[0] and len(told.reasons[0]) < 400
    select.clear_caches()
    with pytest.raises(failure.LaunchError, match="kernel first could not be launched") as raised:
        run("first;f")
    assert "undeclared identifier 'row'" in str(raised.value)


def test_out_of_memory_of_mps_is_torchs_error(rows):
    error = RuntimeError("MPS backend out of memory (MPS allocated: 8.23 GiB)")
    rows(("first", error, {}), ("second", None, LARGE))
    with pytest.raises(torch.OutOfMemoryError, match="kernel first ran out of memory on"):
        run()


def test_long_messages_are_cut():
    said = failure.message(RuntimeError("x " * 1000))
    assert len(said) <= failure.MESSAGE_LENGTH and said.endswith("...")
    assert failure.message(RuntimeError()) == "RuntimeError"


def test_a_call_made_again_that_fails(rows):
    """What was recorded of the first kernel fails in the second call, after the first."""
    first, second = rows(("first", None, {}), ("second", None, {}))

    def again(*given):
        raise TOO_LARGE

    first.record = lambda tensors, problem, tile: (first.forward(*tensors, problem, tile), again)
    q, k, v = torch.ones(3, 1, 2, 16, 8)
    assert sdpa.scaled_dot_product_attention(q, k, v).eq(0).all()
    with pytest.warns(UserWarning, match="first could not be launched on .* second answers instead"):
        assert sdpa.scaled_dot_product_attention(q, k, v).eq(0).all()
    assert (first.ran, second.ran) == (1, 1) and sdpa.last_choice().kernel.name == "second"


def test_a_call_made_again_for_which_the_record_is_not_good(rows):
    """Tensors that are not aligned: the record is asked once, and the kernel runs in full."""
    (first,) = rows(("first", None, {}))
    asked = []
    tensors = torch.ones(3, 1, 2, 16, 8)
    first.record = lambda tensors, problem, tile: (
        first.forward(*tensors, problem, tile), lambda *given: asked.append(given)
    )  # fmt: skip
    for count in range(3):
        assert sdpa.scaled_dot_product_attention(*tensors).eq(0).all()
        assert (first.ran, len(asked)) == (count + 1, count)
