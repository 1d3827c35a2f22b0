"""Run by test_driver_launch.py in a process of its own: what Triton's launcher in C and ours hand to a driver.

The driver, which records it, is a library of ours that calls itself libcuda.so.1. Printed as JSON are the records of
each kernel: Triton's launcher, the driver called past it, and Triton's launcher with a recorded call's arguments.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

STUB = """
#include <stdint.h>
#include <string.h>
typedef struct { unsigned grid[3], block[3], shared; void *stream; unsigned *attrs; unsigned number; } Config;
int sizes[256], count, answer, encoded;
unsigned seen[16];
uint64_t handles[2];
unsigned char values[256][128];
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "out of order"; return 0; }
int cuPointerGetAttribute(void *out, int which, uint64_t pointer) { *(uint64_t *)out = pointer; return 0; }
#define NOTHING(name) int name() { return 0; }
NOTHING(cuCtxGetLimit) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxSetLimit) NOTHING(cuDeviceGet)
NOTHING(cuDeviceGetAttribute) NOTHING(cuDevicePrimaryCtxRetain) NOTHING(cuFuncGetAttribute)
NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuModuleGetFunction) NOTHING(cuModuleLoadData)
NOTHING(cuOccupancyMaxActiveClusters) NOTHING(cuCtxGetDevice) NOTHING(cuDriverGetVersion) NOTHING(cuModuleUnload)
NOTHING(cuStreamIsCapturing) NOTHING(cuTensorMapEncodeIm2col)
int cuTensorMapEncodeTiled(void *map, int dtype, unsigned rank, uint64_t address, const uint64_t *sizes,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  uint64_t *word = map;
  memset(map, 0, 128);
  *word++ = address;
  *word++ = dtype | swizzle << 8 | fill << 16;
  for (unsigned i = 0; i < rank; i++) *word++ = sizes[i] ^ (uint64_t)box[i] << 32;
  for (unsigned i = 0; i + 1 < rank; i++) *word++ = strides[i];
  encoded++;
  return 0;
}
int cuTensorMapReplaceAddress(void *map, uint64_t address) { *(uint64_t *)map = address; return (uint64_t)map % 64; }
int cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
  memset(values, 0, sizeof values);
  memcpy(seen, config, 28);
  seen[7] = config->number;
  seen[8] = config->number ? config->attrs[0] : 0;
  seen[9] = config->number ? config->attrs[2] : 0;
  handles[0] = (uint64_t)config->stream;
  handles[1] = (uint64_t)function;
  for (int i = 0; i < count; i++) memcpy(values[i], params[i], sizes[i]);
  return answer;
}
"""
SIZES = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "f": 4, "q": 8, "Q": 8, "d": 8}
POINTER, MAP = 8, 128
STREAM = 0x5555555500


def build(folder: Path) -> ctypes.CDLL:
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(STUB)
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library, "-Wl,-soname,libcuda.so.1"], check=True)
    (folder / "libcuda.so").symlink_to(library)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def record(stub: ctypes.CDLL, number: int) -> dict:
    """What the driver was last told, and forgotten since."""
    values = ((ctypes.c_ubyte * MAP) * 256).in_dll(stub, "values")
    told = {
        "config": list((ctypes.c_uint * 10).in_dll(stub, "seen")),
        "handles": list((ctypes.c_uint64 * 2).in_dll(stub, "handles")),
        "values": [bytes(value).hex() for value in values[:number]],
    }
    ctypes.memset(values, 0, ctypes.sizeof(values))
    return told


def sizes_of(kinds: list[tuple[str, object]], formats: dict[str, str]) -> list[int]:
    """Bytes of what a kernel takes, its scratch memory included."""
    sizes = []
    for kind, arg in kinds:
        if kind.startswith("tensordesc"):
            sizes += [MAP, *[4] * len(arg.shape), *[8] * len(arg.shape)]
        elif kind != "constexpr":
            sizes.append(SIZES[formats[kind]] if kind in formats else POINTER)
    return [*sizes, POINTER, POINTER]


def alone(native, count: int):
    """A launch by the driver, of `count` tensors; it returns None where the driver refuses."""
    import torch

    from sdpa.repeated import Launches, Recording

    nothing = torch.zeros(16)
    return Launches(
        Recording(
            count, -1, ((),), lambda: nothing, ((None, native),), (-1,), lambda: False, 0, lambda tensors: True,
            unaligned=False, stream_of=lambda device: STREAM,
        )
    )  # fmt: skip


def with_launcher(compiled, folder: Path):
    """Give a compiled kernel Triton's own launcher; what calls it with (grid, stream, function, arguments)."""
    import triton.backends.nvidia.driver as backend
    from triton.runtime.build import compile_module_from_src

    metadata, no_hooks = compiled.packed_metadata, (None, None, None)
    if not hasattr(backend, "make_launcher"):  # Triton 3.6 writes one in C for each kernel
        compiled._run = backend.CudaLauncher(compiled.src, compiled.metadata)
        return lambda *where, args: compiled.run(*where, metadata, *no_hooks, *args)
    source, signature = compiled.src, dict(compiled.src.signature)
    constants = {(source.fn.arg_names.index(k),) if isinstance(k, str) else k: v for k, v in source.constants.items()}
    about = getattr(compiled.metadata, "tensordesc_meta", None)
    module = compile_module_from_src(
        src=backend.make_launcher(constants, signature, about), name="__triton_launcher", library_dirs=[str(folder)],
        include_dirs=backend.include_dirs, libraries=["cuda"],
    )  # fmt: skip
    compiled._run.launch = backend.wrap_handle_tensordesc(module.launch, signature, about)
    kinds = False, compiled.run.launch_pdl, None, None
    return lambda *where, args: compiled.run.launch(*where, *kinds, metadata, *no_hooks, *args)


def main(folder: Path) -> None:
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    stub = build(folder)

    import torch
    import triton.backends.nvidia.driver as backend
    from ahead import compiling_for
    from test_driver_launch import CASES, FUNCTION, compiled_for
    from triton.runtime import driver

    from sdpa.kernels.triton import driver_launch, recorded, triton_private

    def number(name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(stub, name)

    found = {}
    for name, (target, case) in CASES.items():
        with compiling_for(target, folder / "cache"):
            driver.active.utils = backend.CudaUtils()
            launches, tensors = case()
            for place, launch in enumerate(launches):
                compiled = compiled_for(launch)
                kinds = tuple(compiled.src.signature.values())
                sizes = sizes_of(list(driver_launch.leaves(kinds, tuple(launch.args))), driver_launch.FORMATS)
                (ctypes.c_int * 256).in_dll(stub, "sizes")[: len(sizes)] = sizes
                number("count").value = len(sizes)
                run = with_launcher(compiled, folder)
                step = recorded.step_of(launch, compiled, tensors)
                others = [tensor.clone() for tensor in tensors]
                known = {tensor.data_ptr(): other for tensor, other in zip(tensors, others, strict=True)}
                args = [elsewhere(arg, known, torch.Tensor) for arg in launch.args]
                run(*(*launch.grid, 1, 1)[:3], STREAM, FUNCTION, args=args)
                wanted, before = record(stub, len(sizes)), number("encoded").value
                addresses = [other.data_ptr() for other in others]
                launched = alone(step.native, len(others))(*others)
                found[f"{name} {place}"] = (wanted, record(stub, len(sizes)), launched != (None,))
                number("answer").value = 1
                found[f"{name} {place} refused"] = (None, alone(step.native, len(others))(*others), 0)
                number("answer").value = 0
                assert number("encoded").value == before  # the address of a map is replaced, and no more
                call = [recorded.filled(arg, others, addresses) for arg in step.call]
                call[triton_private.STREAM] = STREAM
                step.launch(*call)
                found[f"{name} {place} by Triton"] = (wanted, record(stub, len(sizes)), 0)
    print(json.dumps(found))


def elsewhere(arg: object, known: dict, tensor: type) -> object:
    """An argument with other tensors in place of those known: by address, or inside of a descriptor."""
    if isinstance(arg, tensor):
        return known[arg.data_ptr()].data_ptr()
    if hasattr(arg, "base"):
        return dataclasses.replace(arg, base=known[arg.base.data_ptr()])
    if isinstance(arg, tuple):
        parts = [elsewhere(part, known, tensor) for part in arg]
        return type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts)
    return arg


if __name__ == "__main__":
    main(Path(sys.argv[1]))
