"""Launches by the driver itself, of arguments laid out once as a kernel reads them: only addresses and the stream
change from one to the next.

Triton's launcher reads every number of every tuple again at each call. Fifty of them take 3.2 us on a Zen 4 core; to
call the driver takes 0.4 us. It also encodes each tensor descriptor again, of which the driver can replace the address.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from triton.compiler import CompiledKernel

from sdpa.kernels.triton.triton_private import descriptor_kinds, encode, plain_launch, signature_of

WORD = 8
# Triton's names of what kernels take by value, as `struct` packs it.
FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}
FORMATS |= {"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
CONSTANT, DESCRIPTOR = "constexpr", "tensordesc"
MAP_ALIGNMENT = 128  # bytes, of a CUtensorMap; 64 before CUDA 13
SCRATCH = 2  # pointers to memory behind a kernel's own arguments, null where it wants none
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
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
    """The driver's functions; None where there is no driver.

    A call releases the interpreter's lock, because a driver whose queue is full waits, perhaps for a thread of this
    process.
    """
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


class Layout:
    """Arguments in memory and what points to them, for one launch at a time."""

    def __init__(self, arguments: Arguments, config: Sequence[Any], dependent: bool) -> None:
        self.words = (ctypes.c_uint64 * (len(arguments.words) // WORD)).from_buffer_copy(arguments.words)
        self.maps = (ctypes.c_ubyte * (len(arguments.maps) + MAP_ALIGNMENT))()
        words, maps = ctypes.addressof(self.words), -(-ctypes.addressof(self.maps) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        ctypes.memmove(maps, bytes(arguments.maps), len(arguments.maps))
        places = [(maps if is_map else words) + offset for is_map, offset in arguments.order]
        self.places = (ctypes.c_void_p * len(places))(*places)
        self.attribute = Attribute(PROGRAMMATIC_SERIALIZATION, 0, (ctypes.c_ubyte * 64)(1))
        self.config = Config(*config, None, ctypes.pointer(self.attribute), int(dependent))
        bases = [(maps + offset, number) for offset, number in arguments.bases]
        self.stream = 0  # of the launch before
        self.parts = self.words, bases, self.config, ctypes.addressof(self.config), ctypes.addressof(self.places)


class DriverLaunch:
    """One kernel's launch; called with the addresses of tensors and the stream it returns the driver's answer, 0 where
    it went well.

    A call takes a layout out of `free` and puts it back behind the launch. Whoever comes in between (another thread, or
    a signal handler or finaliser of the same) finds none and makes its own, so nobody changes what another wrote.
    """

    def __init__(self, cuda: Driver, function: int, arguments: Arguments, *config: Any) -> None:
        self.launch, self.readdress, self.function = *cuda, function
        self.writes, self.blueprint = tuple(writes_of(arguments.pointers)), (arguments, *config)
        self.free = [Layout(*self.blueprint)]

    def __call__(self, addresses: Sequence[int], stream: int) -> int:
        try:
            layout = self.free.pop()
        except IndexError:
            layout = Layout(*self.blueprint)
        words, bases, config, config_at, places_at = layout.parts
        for pack, place, begin, end in self.writes:
            pack(words, place, *addresses[begin:end])
        answer = 0
        for place, number in bases:
            answer = answer or self.readdress(place, addresses[number])
        if stream != layout.stream:
            config.stream = layout.stream = stream
        answer = answer or self.launch(config_at, self.function, places_at, None)
        self.free.append(layout)
        return answer


def writes_of(pointers: Sequence[tuple[int, int]]) -> Iterator[tuple[Callable[..., None], int, int, int]]:
    """(what packs addresses, offset in bytes, first address, end of addresses) for each run of words that are pointers
    to tensors one after the other: one call for a run takes a third of the time of a word each."""
    run: list[tuple[int, int]] = []
    for pointer in (*pointers, None):
        if run and pointer != (run[-1][0] + 1, run[-1][1] + 1):
            yield struct.Struct(f"={len(run)}Q").pack_into, run[0][0] * WORD, run[0][1], run[-1][1] + 1
            run = []
        if pointer is not None:
            run.append(pointer)


def driver_launch(
    compiled: CompiledKernel, grid: tuple[int, int, int], args: Sequence[Any], number_of: Callable[[Any], int | None]
) -> DriverLaunch | None:
    """The launch of a compiled kernel with `args`, where `number_of` a tensor or descriptor is the place of its address
    among those given; None where Triton's launcher does more than launch, or is not known."""
    cuda, known = driver(), plain_launch(compiled)
    if cuda is None or known is None:
        return None
    warps, shared, dependent = known
    arguments = arguments_of(compiled, args, number_of)
    if arguments is None:
        return None
    config = (grid, (warps * THREADS_PER_WARP, 1, 1), shared)
    return DriverLaunch(cuda, compiled.function, arguments, config, dependent)


def arguments_of(
    compiled: CompiledKernel, args: Sequence[Any], number_of: Callable[[Any], int | None]
) -> Arguments | None:
    """`args` as the kernel takes them; None where one is of a kind that is not known."""
    kinds = iter(descriptor_kinds(compiled))
    arguments = Arguments.none()
    for kind, arg in leaves(signature_of(compiled), tuple(args)):
        if kind == CONSTANT:
            continue
        number = number_of(arg)
        if kind in FORMATS:
            arguments.add(struct.pack(FORMATS[kind], arg))
        elif number is None or not kind.startswith(("*", DESCRIPTOR)):
            return None
        elif kind.startswith("*"):
            arguments.add_pointer(number)
        elif not add_descriptor(arguments, arg, number, next(kinds, None)):
            return None
    for _ in range(SCRATCH):
        arguments.add(b"")
    return arguments


def add_descriptor(arguments: Arguments, descriptor: Any, number: int, kind: dict | None) -> bool:
    """Add a tensor map, and the sizes and strides behind it; False where it cannot be encoded."""
    encoded = encode(descriptor, kind)
    if encoded is None:
        return False
    tensor_map, numbers = encoded
    arguments.add_map(tensor_map, number)
    rank = len(numbers) // 2
    for size_kind, values in (("i32", numbers[:rank]), ("i64", numbers[rank:])):
        for value in values:
            arguments.add(struct.pack(FORMATS[size_kind], value))
    return True


def leaves(kind: Any, arg: Any) -> Iterator[tuple[str, Any]]:
    """Numbers and tensors with their kinds in Triton's words, in the order in which a kernel takes them."""
    if not isinstance(kind, tuple):
        yield kind, arg
        return
    for part, own in zip(kind, arg, strict=True):
        yield from leaves(part, own)
