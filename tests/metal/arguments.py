"""Arguments of a kernel in the emulator: what torch binds to a buffer, with what Metal would not notice refused."""

from __future__ import annotations

import ctypes

import torch

from . import source

BUFFERS, MAX_BYTES = 31, 4096  # Metal's limits; the second is that of numbers in a command
# The kinds of element a tensor may be for a kernel: signed, unsigned, float, bfloat; and its size.
CODES = {
    torch.float32: ("f", 4),
    torch.float16: ("f", 2),
    torch.bfloat16: ("b", 2),
    torch.int64: ("i", 8),
    torch.int32: ("iu", 4),
    torch.int16: ("iu", 2),
    torch.int8: ("i", 1),
    torch.uint8: ("u", 1),
    torch.bool: ("u", 1),
    torch.uint16: ("u", 2),
    torch.uint32: ("u", 4),
    torch.uint64: ("u", 8),
}


class Buffer(ctypes.Structure):
    """As in runtime/dispatch.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("bytes", "offset", "end")),
        *((name, ctypes.c_int32) for name in ("bound", "writable", "shares", "reserved")),
    ]


def bound(kernel: source.Kernel, types: dict[int, int], args: tuple) -> tuple[ctypes.Array, list]:
    """The arguments as the runtime takes them, and what has to live until it returns."""
    if len(args) > BUFFERS:
        raise ValueError(f"{kernel.name}: {len(args)} arguments, Metal has {BUFFERS} buffers")
    missing = [f"{p.name} [[buffer({i})]]" for i, p in kernel.buffers.items() if i >= len(args)]
    if missing:
        raise TypeError(f"{kernel.name}: {len(args)} arguments, but the kernel has {', '.join(missing)}")
    buffers, keep, storages = (Buffer * BUFFERS)(), [], {}
    for i, arg in enumerate(args):
        parameter = kernel.buffers.get(i)
        where = f"{kernel.name}: argument {i}" + (f" for {parameter.text} {parameter.name}" if parameter else "")
        if isinstance(arg, torch.Tensor):
            buffers[i] = tensor_buffer(where, parameter, types.get(i), arg, storages, i)
            keep.append(arg)
        else:
            buffers[i], array = number_buffer(where, parameter, types.get(i), arg, i)
            keep.append(array)
    return buffers, keep


def tensor_buffer(where, parameter, code, tensor, storages, i) -> Buffer:
    if tensor.device.type != "cpu":
        raise TypeError(f"{where} is on {tensor.device}, the emulator takes CPU tensors")
    kinds, size = CODES[tensor.dtype]
    if code is not None and (chr(code // 16) not in kinds or code % 16 != size):
        raise TypeError(f"{where} is {tensor.dtype}")
    storage, step = tensor.untyped_storage(), tensor.element_size()
    first = storages.setdefault(storage.data_ptr(), i) if storage.data_ptr() else i
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    begin = tensor.storage_offset() * step
    written = parameter is not None and parameter.is_written
    return Buffer(storage.data_ptr(), storage.nbytes(), begin, begin + last * step, True, written, first, 0)


def number_buffer(where, parameter, code, value, i) -> tuple[Buffer, ctypes.Array]:
    kind, array = numbers(where, value)
    size = ctypes.sizeof(array)
    if size > MAX_BYTES:
        raise ValueError(f"{where} has {size} bytes, Metal takes {MAX_BYTES}")
    if parameter is not None and parameter.is_written:
        raise TypeError(f"{where} is a number, and the kernel writes there")
    if code is not None and (kind != chr(code // 16).replace("u", "i") or (kind == "f" and code % 16 != 4)):
        raise TypeError(f"{where} is {value!r}")
    return Buffer(ctypes.addressof(array), size, 0, size, True, False, i, 0), array


def numbers(where, value) -> tuple[str, ctypes.Array]:
    """What torch copies into the command for an int, a float, or a list of either."""
    many = value if isinstance(value, list | tuple) else [value]
    if many and all(isinstance(n, int) and -(2**63) <= n < 2**63 for n in many):
        return "i", (ctypes.c_int64 * len(many))(*many)
    if many and all(isinstance(n, float) for n in many):
        return "f", (ctypes.c_float * len(many))(*many)
    raise TypeError(f"{where} is {value!r}: no tensor, int64, float, nor a list of ints or of floats")
