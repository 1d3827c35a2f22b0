"""Launches by the driver itself, of arguments laid out once as a kernel reads them: only addresses and the stream
change.

Triton's launcher reads every number of every tuple again at each call: 3.2 us for fifty of them on a Zen 4 core, where
0.4 us call the driver; and encodes each tensor descriptor again, of which the driver can replace the address.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from triton.compiler import CompiledKernel

WORD = 8
# Triton's names of what kernels take by value, as `struct` packs it.
FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}
FORMATS |= {"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
CONSTANT, DESCRIPTOR = "constexpr", "tensordesc"
# A CUtensorMap, and where it lies in Triton's object around it.
MAP_SIZE, MAP_ALIGNMENT, MAP_OFFSET = 128, 64, 128
SCRATCH = 2  # pointers to memory behind a kernel's own arguments, null where it wants none
MAY_BEGIN_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
THREADS_PER_WARP = 32


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_ubyte * 64))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("number", ctypes.c_uint),
    )


class Driver(NamedTuple):
    """What is called of it; both return 0 where it went well."""

    launch: Callable[..., int]  # cuLaunchKernelEx(config, function, arguments, None)
    readdress: Callable[..., int]  # cuTensorMapReplaceAddress(map, address)


@lru_cache(maxsize=1)
def driver() -> Driver | None:
    """None where there is none. The interpreter's lock is let go of: a driver whose queue is full waits, perhaps for a
    thread of this process."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        found = Driver(library.cuLaunchKernelEx, library.cuTensorMapReplaceAddress)
    except (OSError, AttributeError):
        return None
    for function, number in zip(found, (4, 2), strict=True):
        function.argtypes, function.restype = [ctypes.c_void_p] * number, ctypes.c_int
    return found


class Arguments(NamedTuple):
    """What a kernel takes, in order: words of 8 bytes and tensor maps, and which of them hold an address."""

    words: bytearray
    maps: bytearray
    order: list[tuple[bool, int]]  # whether it is a map, and its offset
    pointers: list[tuple[int, int]]  # number of the word, which address
    bases: list[tuple[int, int]]  # offset of the map, which address

    @classmethod
    def none(cls) -> Arguments:
        return cls(bytearray(), bytearray(), [], [], [])

    def add(self, word: bytes) -> None:
        self.order.append((False, len(self.words)))
        self.words.extend(word.ljust(WORD, b"\0"))

    def add_pointer(self, number: int) -> None:
        self.pointers.append((len(self.words) // WORD, number))
        self.add(b"")

    def add_map(self, encoded: bytes, number: int) -> None:
        self.order.append((True, len(self.maps)))
        self.bases.append((len(self.maps), number))
        self.maps.extend(encoded)


class Layout(threading.local):
    """Arguments in memory and what points to them; each thread has its own, which no other changes before a launch."""

    def __init__(self, arguments: Arguments, config: Sequence[Any], chained: bool) -> None:
        self.words = (ctypes.c_uint64 * (len(arguments.words) // WORD)).from_buffer_copy(arguments.words)
        self.maps = (ctypes.c_ubyte * (len(arguments.maps) + MAP_ALIGNMENT))()
        words, maps = ctypes.addressof(self.words), -(-ctypes.addressof(self.maps) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        ctypes.memmove(maps, bytes(arguments.maps), len(arguments.maps))
        places = [(maps if is_map else words) + offset for is_map, offset in arguments.order]
        self.places = (ctypes.c_void_p * len(places))(*places)
        self.attribute = Attribute(MAY_BEGIN_EARLY, 0, (ctypes.c_ubyte * 64)(1))
        self.config = Config(*config, None, ctypes.pointer(self.attribute), int(chained))
        bases = [(maps + offset, number) for offset, number in arguments.bases]
        self.told = self.words, bases, self.config, ctypes.addressof(self.config), ctypes.addressof(self.places)


class Direct:
    """One kernel's launch; called with the addresses of tensors and the stream it returns the driver's answer, 0 where
    it went well."""

    def __init__(self, cuda: Driver, function: int, layout: Layout, pointers: Sequence[tuple[int, int]]) -> None:
        self.launch, self.readdress, self.function = *cuda, function
        self.layout, self.pointers = layout, tuple(pointers)

    def __call__(self, addresses: Sequence[int], stream: int) -> int:
        words, bases, config, config_at, places_at = self.layout.told
        for word, number in self.pointers:
            words[word] = addresses[number]
        for place, number in bases:
            if answer := self.readdress(place, addresses[number]):
                return answer
        config.stream = stream
        return self.launch(config_at, self.function, places_at, None)


def direct(
    compiled: CompiledKernel, grid: tuple[int, int, int], args: Sequence[Any], number_of: Callable[[Any], int | None]
) -> Direct | None:
    """The launch of a compiled kernel with `args`, where `number_of` a tensor or descriptor is the place of its address
    among those given; None where Triton's launcher does more than launch: scratch memory, clusters."""
    cuda, launcher = driver(), compiled.run
    warps, clusters, shared = compiled.packed_metadata
    wants = [getattr(launcher, name, 1) for name in ("global_scratch_size", "profile_scratch_size")]
    if cuda is None or any(wants) or clusters != 1 or getattr(launcher, "launch_cooperative_grid", True):
        return None
    maps = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    arguments = Arguments.none()
    for kind, arg in leaves(tuple(compiled.src.signature.values()), tuple(args)):
        if kind == CONSTANT:
            continue
        number = number_of(arg)
        if kind in FORMATS:
            arguments.add(struct.pack(FORMATS[kind], arg))
        elif number is None or not kind.startswith(("*", DESCRIPTOR)):
            return None
        elif kind.startswith("*"):
            arguments.add_pointer(number)
        elif not add_descriptor(arguments, arg, number, next(maps, None)):
            return None
    for _ in range(SCRATCH):
        arguments.add(b"")
    config = (grid, (warps * THREADS_PER_WARP, 1, 1), shared)
    layout = Layout(arguments, config, bool(launcher.launch_pdl))
    return Direct(cuda, compiled.function, layout, arguments.pointers)


def add_descriptor(arguments: Arguments, descriptor: Any, number: int, about: dict | None) -> bool:
    """A tensor map, and the sizes and strides behind it; False where it is no map or not as Triton 3.6 has it."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    if about is None:
        return False
    encoded, *numbers = make_tensordesc_arg(descriptor, about)
    if type(encoded).__basicsize__ != MAP_OFFSET + MAP_SIZE:
        return False
    arguments.add_map(ctypes.string_at(id(encoded) + MAP_OFFSET, MAP_SIZE), number)
    rank = len(numbers) // 2
    for kind, values in (("i32", numbers[:rank]), ("i64", numbers[rank:])):
        for value in values:
            arguments.add(struct.pack(FORMATS[kind], value))
    return True


def leaves(kind: Any, arg: Any) -> Iterator[tuple[str, Any]]:
    """Numbers and tensors with their kinds in Triton's words, in the order in which a kernel takes them."""
    if not isinstance(kind, tuple):
        yield kind, arg
        return
    for part, own in zip(kind, arg, strict=True):
        yield from leaves(part, own)
