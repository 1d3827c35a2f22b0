"""operators_library(): the native library by which programs without Python know the operators of an exported graph."""

from __future__ import annotations

from sdpa.kernels.cpu.library import OPERATORS


def operators_library() -> str:
    """The path of `libsdpa_operators.so`, for C++ programs that run packages of AOTInductor.

    A program opens it by `dlopen`, or is linked with it, before it loads a package: `examples/run_package.cpp` is one.
    The kernel cpu_flash answers then, on CPUs. Attention with weights, attention on a GPU and attention for which
    another kernel was asked by name are refused in a sentence: export those under `sdpa.decomposed()`. The library
    looks for `libsdpa_cpu.so` in its own folder. Python needs neither: `import sdpa` registers the same operators.

    Raises:
        RuntimeError: the library was not built.
    """
    if not OPERATORS.exists():
        raise RuntimeError(f"the library of operators was not built: {OPERATORS} does not exist")
    return str(OPERATORS)
