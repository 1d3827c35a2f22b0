"""Triton's private parts: what they are called with, and each of them taken away: slower, never wrong. No GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from recorded_calls import inputs_of, problem_of  # noqa: E402
from test_recorded import device  # noqa: E402, F401
from triton.compiler import CompiledKernel  # noqa: E402

from sdpa.kernels.triton import flash, triton_private  # noqa: E402

STREAM, FUNCTION = 11, 7
SEEN = pytest.mark.skipif(triton_private.VERSION not in triton_private.LAID_OUT, reason="told of Triton 3.6 and 3.9")


class Launcher:
    """What Triton 3.6 has around its function in C."""

    launch_cooperative_grid, launch_pdl, global_scratch_size, profile_scratch_size = False, True, 0, 0

    def __init__(self, called, **sizes):
        self.called, self.launch = called, lambda *args: called.append(("function", args))
        for name, size in sizes.items():
            setattr(self, name, size)

    def __call__(self, *args):
        self.called.append(("launcher", args))


@pytest.mark.parametrize("version,sizes,way", [
    ((3, 6), {}, "function"),
    ((3, 6), {"global_scratch_size": 128}, "launcher"),
    ((3, 6), {"profile_scratch_size": 128}, "launcher"),
    ((3, 5), {}, "launcher"),
    ((3, 9), {}, "launcher"),
])  # fmt: skip
def test_the_function_in_c_is_called_where_nothing_is_put_before_it(version, sizes, way, monkeypatch):
    """With the arguments that Triton 3.6's launcher calls it with."""
    called = []
    compiled = CompiledKernel.__new__(CompiledKernel)
    compiled.module, compiled.function, compiled.packed_metadata = None, FUNCTION, (4, 1, 0)
    compiled._run = Launcher(called, **sizes)
    monkeypatch.setattr(triton_private, "VERSION", version)
    run, call = triton_private.launcher_of(compiled, (5, 1, 1))
    call[triton_private.STREAM] = STREAM
    run(*call, "args")
    told = ((4, 1, 0), None, None, None, "args")
    wanted = (5, 1, 1, STREAM, FUNCTION, *((False, True, None, None) if way == "function" else ()), *told)
    assert called == [(way, wanted)]


@pytest.mark.skipif(triton.__version__.rpartition(".")[0] != "3.6", reason="told of Triton 3.6")
def test_the_function_in_c_has_the_arguments_of_tritons_own_launcher():
    from triton.backends.nvidia.driver import CudaLauncher

    called = []
    launcher = CudaLauncher.__new__(CudaLauncher)
    launcher.__dict__.update(vars(Launcher(called)), num_ctas=1, launch_cooperative_grid=False, launch_pdl=True)
    launcher.__dict__.update(dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0))
    launcher.__dict__.update(dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1))
    compiled = CompiledKernel.__new__(CompiledKernel)
    compiled.function, compiled.packed_metadata, compiled._run = FUNCTION, (4, 1, 0), launcher
    run, call = triton_private.launcher_of(compiled, (5, 1, 1))
    call[triton_private.STREAM] = STREAM
    run(*call, "args")
    launcher(5, 1, 1, STREAM, FUNCTION, (4, 1, 0), None, None, None, "args")
    assert called[0] == called[1]


def record_plain():
    inputs = inputs_of("plain", 1)
    problem = problem_of((inputs,), "forward", {"lse"}, "cuda:0")
    results, again = flash.record((inputs,), problem, flash.tiles(problem)[0])
    assert results.out.shape == inputs.q.shape  # the call itself ran
    return inputs, again


def test_a_release_that_is_not_known_records_nothing(device, monkeypatch):  # noqa: F811
    assert record_plain()[1] is not None
    monkeypatch.setattr(triton_private, "VERSION", (99, 0))
    assert record_plain()[1] is None


@pytest.mark.parametrize("name", triton_private.HOOKS)
def test_hooks_that_cannot_be_seen_record_nothing(name, device, monkeypatch):  # noqa: F811
    knobs = SimpleNamespace(runtime=SimpleNamespace(**{n: None for n in triton_private.HOOKS if n != name}))
    monkeypatch.setattr(triton_private, "knobs", knobs)
    assert record_plain()[1] is None


def test_kernels_whose_hooks_cannot_be_seen_record_nothing(device, monkeypatch):  # noqa: F811
    from sdpa.kernels.triton.forward import forward_kernel

    monkeypatch.delattr(forward_kernel, "pre_run_hooks")
    assert record_plain()[1] is None


@pytest.mark.parametrize("name", ["_run", "function", "packed_metadata"])
def test_a_compiled_kernel_without_a_part_records_nothing(name, device, monkeypatch):  # noqa: F811
    from sdpa.kernels.triton.launch import Launch

    whole = Launch.__call__

    def without(self, backend, arch):
        compiled = whole(self, backend, arch)
        delattr(compiled, name)
        return compiled

    monkeypatch.setattr(Launch, "__call__", without)
    assert record_plain()[1] is None


def compiled_with(run, metadata=(4, 1, 0)):
    return SimpleNamespace(run=run, function=FUNCTION, packed_metadata=metadata)


PLAIN = {"launch_cooperative_grid": False, "launch_pdl": True, "global_scratch_size": 0, "profile_scratch_size": 0}
SANITIZED = PLAIN | {"gsan_enabled": False}  # in Triton 3.9


RELEASES = [((3, 6), PLAIN), ((3, 9), SANITIZED)]


@pytest.mark.parametrize(
    "version,parts,missing", [(version, parts, name) for version, parts in RELEASES for name in (None, *parts)]
)
def test_the_driver_is_called_only_where_all_is_known_of_a_launcher(version, parts, missing, monkeypatch):
    monkeypatch.setattr(triton_private, "VERSION", version)
    launcher = SimpleNamespace(**{name: value for name, value in parts.items() if name != missing})
    wanted = (4, 0, True) if missing is None else None
    assert triton_private.plain_launch(compiled_with(launcher)) == wanted


def test_the_driver_is_not_called_where_triton_adds_arguments_or_is_not_known(monkeypatch):
    launcher = SimpleNamespace(**SANITIZED)
    for version in ((3, 4), (3, 5), (3, 7), (3, 8), (3, 10), (4, 0)):
        monkeypatch.setattr(triton_private, "VERSION", version)
        assert triton_private.plain_launch(compiled_with(launcher)) is None
    monkeypatch.setattr(triton_private, "VERSION", (3, 9))
    assert triton_private.plain_launch(compiled_with(launcher)) is not None
    launcher.gsan_enabled = True
    assert triton_private.plain_launch(compiled_with(launcher)) is None


@SEEN
@pytest.mark.parametrize("metadata", [(4, 2, 0), (4, 1), None, 4, (4, 1, (228 << 10) + 16)])
def test_clusters_and_other_metadata_are_left_to_triton(metadata):
    assert triton_private.plain_launch(compiled_with(SimpleNamespace(**SANITIZED), metadata)) is None
    assert triton_private.plain_launch(compiled_with(SimpleNamespace(**SANITIZED), (4, 1, 228 << 10))) is not None


@pytest.mark.skipif(triton_private.VERSION != (3, 9), reason="told of Triton 3.9")
def test_the_arguments_of_a_launcher_are_those_of_tritons_own_call():
    """`JITFunction.run` ends in a call of `CudaLauncher`, which the recorded one repeats."""
    import inspect

    from triton.backends.nvidia.driver import CudaLauncher

    names = list(inspect.signature(CudaLauncher.__call__).parameters)[1:]
    assert names[triton_private.STREAM : triton_private.STREAM + 2] == ["stream", "function"]
    assert names[5:] == ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"]
    _, call = triton_private.launcher_of(compiled_with(SimpleNamespace(**SANITIZED)), (5, 1, 1))
    assert call == [5, 1, 1, None, FUNCTION, (4, 1, 0), None, None, None]


def test_a_launcher_without_its_function_in_c_is_called_itself():
    launcher = SimpleNamespace(**PLAIN)
    assert triton_private.launcher_of(compiled_with(launcher), (1, 1, 1))[0] is launcher


def test_without_the_function_that_encodes_descriptors(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", SimpleNamespace())
    assert triton_private.encode(object(), {}) is None


@pytest.mark.parametrize("size", [0, 8, 256])
def test_a_tensor_map_in_another_object_is_left_to_triton(size, monkeypatch):
    """Its 128 bytes are read only out of an object that is known by its size."""
    encoded = bytes(size)
    assert type(encoded).__basicsize__ != triton_private.MAP_OFFSET + triton_private.MAP_SIZE
    module = SimpleNamespace(make_tensordesc_arg=lambda *_: [encoded, 1, 2, 3, 4])
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", module)
    assert triton_private.encode(object(), {}) is None


def test_a_descriptor_that_is_no_map_is_left_to_triton():
    assert triton_private.encode(object(), None) is None
    assert triton_private.encode(object(), {"is_im2col": True}) is None
    assert triton_private.descriptor_kinds(SimpleNamespace(metadata=SimpleNamespace())) == ()
