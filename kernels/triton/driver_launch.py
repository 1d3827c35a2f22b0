"""Launches by the driver itself, of arguments laid out once as a kernel reads them: only addresses and the stream
change from one to the next.

Triton's launcher reads every number of every tuple again at each call. Fifty of them take 3.2 us on a Zen 4 core; to
call the driver takes 0.4 us. It also encodes each tensor descriptor again, of which the driver can replace the address.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from triton.compiler import CompiledKernel

from sdpa.kernels.triton.triton_private import MAP_SIZE, descriptor_kinds, encode, plain_launch, signature_of
from sdpa.repeated import MAX_MAPS, MAX_WORDS

WORD = 8
# Triton's names of what kernels take by value, as `struct` packs it.
FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}
FORMATS |= {"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
CONSTANT, DESCRIPTOR = "constexpr", "tensordesc"
SCRATCH = 2  # pointers to memory behind a kernel's own arguments, null where it wants none
THREADS_PER_WARP = 32


class Driver(NamedTuple):
    """The addresses of its functions that are called; both return 0 where it went well."""

    launch: int  # cuLaunchKernelEx(config, function, arguments, None)
    replace_address: int  # cuTensorMapReplaceAddress(map, address)


@lru_cache(maxsize=1)
def driver() -> Driver | None:
    """None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        functions = library.cuLaunchKernelEx, library.cuTensorMapReplaceAddress
    except (OSError, AttributeError):
        return None
    return Driver(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions))


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

    def packed(self) -> tuple[bytes, ...]:
        """Words, maps, then as 32-bit numbers: the offset of each argument in the order in which the kernel takes them
        (of a map: less one, negated), and pairs of a place and the number of the address that stands there."""
        order = [-1 - offset if is_map else offset for is_map, offset in self.order]
        numbers = (order, chain(*self.pointers), chain(*self.bases))
        return bytes(self.words), bytes(self.maps), *(array("i", each).tobytes() for each in numbers)

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


def driver_launch(
    compiled: CompiledKernel, grid: tuple[int, int, int], args: Sequence[Any], number_of: Callable[[Any], int | None]
) -> tuple[Any, ...] | None:
    """The launch of a compiled kernel with `args`, as `repeated.Launches` takes it, where `number_of` a tensor or
    descriptor is the place of its address among those given; None where Triton's launcher does more than launch, or is
    not known."""
    cuda, known = driver(), plain_launch(compiled)
    if cuda is None or known is None:
        return None
    warps, shared, dependent = known
    arguments = arguments_of(compiled, args, number_of)
    if arguments is None or len(arguments.words) > MAX_WORDS * WORD or len(arguments.maps) > MAX_MAPS * MAP_SIZE:
        return None
    block = (warps * THREADS_PER_WARP, 1, 1)
    return (*cuda, compiled.function, grid, block, shared, dependent, *arguments.packed())


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
