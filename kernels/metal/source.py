"""Metal source of a kernel, specialised by text: torch compiles no function constants.

A source is `#define` lines of the configuration, the shared files, and the kernel's file. COMMON_BUFFERS and CALL stand
for the arguments that all kernels share.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

FOLDER = Path(__file__).parent
SHARED = ("primitives", "mask", "rows", "scores")
ELEMENTS = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
SIMDGROUP = 32  # threads
FRAGMENT = 8  # rows and columns of a simdgroup matrix
MOST_ROWS = 32  # of a threadgroup
MAX_THREADGROUP_BYTES = 32 << 10  # of every Apple GPU

# The buffers that all kernels share, in their order: the type, and the flag without which a call has no such tensor.
BUFFERS = {
    "q": ("ELEMENT", None),
    "k": ("ELEMENT", None),
    "v": ("ELEMENT", None),
    "bias": ("BIAS_ELEMENT", "BIAS"),
    "allowed": ("uchar", "ALLOWED"),
    "q_lengths": ("int", "Q_LENGTHS"),
    "k_lengths": ("int", "K_LENGTHS"),
    "q_segments": ("int", "SEGMENTS"),
    "k_segments": ("int", "SEGMENTS"),
    "prefix": ("int", "PREFIX"),
    "alibi": ("float", "ALIBI"),
    "sinks": ("SINK_ELEMENT", "SINKS"),
    "rng": ("long", "DROPOUT"),
    "cu_q": ("int", "PACKED"),
    "cu_k": ("int", "PACKED"),
    "block_table": ("int", "PAGED"),
}
# Integers (`n`), with how many there are where it is more than one: strides of batch, head and row, in elements.
INTEGERS = {
    "B": 1,
    "H": 1,
    "G": 1,
    "M": 1,
    "N": 1,
    "LEFT": 1,
    "RIGHT": 1,
    "DROPOUT": 1,  # weights whose random number is below it are dropped
    "PART": 1,  # dropout's numbers are those of a part of a call
    "FIRST": 3,  # threadgroup of this dispatch among those of the whole call, by x, y and z
    "SPLITS": 1,
    "ROWS": 1,  # in memory, of a head
    "PAGE_SIZE": 1,
    "BLOCK_TABLE": 1,
    "Q_SEGMENTS": 1,
    "K_SEGMENTS": 1,
    "ALIBI": 1,
    "LSE": 2,
    "LSE_SPLIT": 1,
    "OUT_SPLIT": 1,
    "Q": 3,
    "K": 3,
    "V": 3,
    "OUT": 3,
    "GRAD_OUT": 3,
    "DQ": 3,
    "DK": 3,
    "DV": 3,
    "DBIAS": 3,
    "BIAS": 4,
    "ALLOWED": 4,
}
OWN_BUFFER = re.compile(r"\[\[buffer\(OWN \+ (\d)\)\]\]")  # how a kernel's file numbers its own buffers
FLOATS = ("SCALE", "SOFTCAP", "KEPT")


class Tiles(NamedTuple):
    """Sizes of a kernel's tiles, and the elements by which a row in threadgroup memory is longer than it need be, so
    that rows lie in different banks."""

    BLOCK_M: int
    BLOCK_N: int
    PAD: int


class Config(NamedTuple):
    """What a source is specialised for."""

    kernel: str  # its file
    dtype: torch.dtype
    D: int
    Dv: int
    tiles: Tiles
    rows: int  # that a threadgroup's simdgroups have, 8 each
    vector: int  # elements that are loaded together
    bias: torch.dtype | None
    sinks: torch.dtype | None
    flags: frozenset[str]  # of FLAGS


FLAGS = (
    "LEFT",
    "RIGHT",
    "BOTTOM_RIGHT",
    "Q_LENGTHS",
    "K_LENGTHS",
    "PREFIX",
    "SEGMENTS",
    "ALLOWED",
    "ALLOWED_ROWS",
    "BIAS",
    "BIAS_BATCHES",
    "BIAS_HEADS",
    "BIAS_ROWS",
    "BIAS_COLUMNS",
    "BIAS_PARTS",
    "ALIBI",
    "SOFTCAP",
    "SINKS",
    "DROPOUT",
    "PACKED",
    "PAGED",
    "GROUPED",
    "SPLIT_KV",
    "WITH_LSE",
    "GRAD_LSE",
    "AVERAGED",
    "RENORMALISED",
)
ROWS_OF_COMBINE = 4  # simdgroups of kernels that have a row each


def source_of(config: Config) -> str:
    """The whole text that torch compiles."""
    head = ["#include <metal_stdlib>", "#include <metal_simdgroup>", "#include <metal_simdgroup_matrix>"]
    lines = [f"#define {name} {value}" for name, value in definitions(config).items()]
    files = [text_of(name, config.flags) for name in (*SHARED, config.kernel)]
    return "\n".join([*head, "using namespace metal;", *lines, "", *files])


def definitions(config: Config) -> dict[str, str | int]:
    element = ELEMENTS[config.dtype]
    tiles, block_d, block_dv = config.tiles, whole(config.D), whole(config.Dv)
    found: dict[str, str | int] = {
        "ELEMENT": element,
        "BIAS_ELEMENT": ELEMENTS[config.bias or config.dtype],
        "SINK_ELEMENT": ELEMENTS[config.sinks or config.dtype],
        "OUT_ELEMENT": "float" if "SPLIT_KV" in config.flags else element,
        "HEAD_D": config.D,
        "HEAD_DV": config.Dv,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_M": tiles.BLOCK_M,
        "BLOCK_N": tiles.BLOCK_N,
        "LD_D": block_d + tiles.PAD,
        "LD_DV": block_dv + tiles.PAD,
        "LD_LARGER": max(block_d, block_dv) + tiles.PAD,
        "LD_N": tiles.BLOCK_N + tiles.PAD,
        "KV_ELEMENTS": kv_elements(config.D, config.Dv, tiles),
        "THREADS": config.rows // FRAGMENT * SIMDGROUP,
        "VECTOR": config.vector,
        "ROWS_OF_COMBINE": ROWS_OF_COMBINE,
    }
    found |= {flag: int(flag in config.flags) for flag in FLAGS}
    found |= {f"I_{name}": place for name, place in integer_places().items()}
    return found | {f"X_{name}": place for place, name in enumerate(FLOATS)}


@cache
def integer_places() -> dict[str, int]:
    """Where each of INTEGERS begins."""
    places, place = {}, 0
    for name, count in INTEGERS.items():
        places[name] = place
        place += count
    return places


def shared_buffers(flags: frozenset[str]) -> list[str]:
    """The names of the shared buffers that a call has."""
    return [name for name, (_, flag) in BUFFERS.items() if flag is None or flag in flags]


@cache
def flags_read(kernel: str) -> frozenset[str]:
    """The flags that a kernel's code reads, or by which it has a buffer. For others it need not be compiled again."""
    code = re.sub(r"//.*", "", "\n".join(map(read, (*SHARED, kernel))))
    words = set(re.findall(r"[A-Z_]+", code))
    return frozenset(words.intersection(FLAGS))


def text_of(name: str, flags: frozenset[str]) -> str:
    """A file's text, with the shared arguments written out. The kernel's own buffers follow these."""
    present = shared_buffers(flags)
    given = [f"device const {BUFFERS[buffer][0]}* {buffer} [[buffer({at})]]" for at, buffer in enumerate(present)]
    given += [f"constant long* n [[buffer({len(present)})]]", f"constant float* x [[buffer({len(present) + 1})]]"]
    call = "{" + ", ".join([*(buffer if buffer in present else "nullptr" for buffer in BUFFERS), "n", "x"]) + "}"
    text = read(name).replace("COMMON_BUFFERS", ", ".join(given)).replace("= CALL;", f"= {call};")
    return OWN_BUFFER.sub(lambda found: f"[[buffer({len(present) + 2 + int(found[1])})]]", text)


@cache
def read(name: str) -> str:
    return (FOLDER / f"{name}.metal").read_text()


def whole(size: int) -> int:
    """A head size in whole fragments, at least one."""
    return max(1, -(-size // FRAGMENT)) * FRAGMENT


# -- tiles -----------------------------------------------------------------------------------------------------------

# BLOCK_M and BLOCK_N, the preferred first. For more rows than 32 a simdgroup would need more than one row of fragments,
# and its registers.
BLOCKS = ((32, 32), (32, 16), (16, 32), (16, 16), (32, 8), (16, 8), (8, 32), (8, 16), (8, 8))


def kv_elements(D: int, Dv: int, tiles: Tiles) -> int:
    """Of a block of keys [D, BLOCK_N] or values [BLOCK_N, Dv] in a forward."""
    return max(whole(D) * (tiles.BLOCK_N + tiles.PAD), tiles.BLOCK_N * (whole(Dv) + tiles.PAD))


def memory_of(kernel: str, dtype: torch.dtype, D: int, Dv: int, tiles: Tiles) -> int:
    """The threadgroup memory that a kernel takes. Tiles that use the same memory one after the other count once."""
    d, dv = whole(D) + tiles.PAD, whole(Dv) + tiles.PAD
    M, N, larger = tiles.BLOCK_M, tiles.BLOCK_N, max(d, dv)
    elements = {
        "forward": M * d + kv_elements(D, Dv, tiles),
        "backward_q": M * (d + dv) + N * larger,
        "backward_kv": (M + N) * (d + dv),
        "bias_grad": (M + N) * larger,
        "row_base": (M + N) * d,
        "weights": (M + N) * d,
    }[kernel]
    shared = {"bias_grad": M // FRAGMENT * N, "row_base": M // FRAGMENT}.get(kernel, 0)  # numbers of all simdgroups
    return elements * dtype.itemsize + 4 * shared


def fitting(kernel: str, dtype: torch.dtype, D: int, Dv: int, rows: int) -> list[Tiles]:
    """The tiles that fit threadgroup memory, the preferred first. `rows` is how many there are: of keys in
    `backward_kv`, else of queries.

    Rows in threadgroup memory are padded by 16 bytes, as in MLX and torch, where there is room. Tiles of 32 rows that
    leave room for a second threadgroup come first.
    """
    found = []
    for pad in (16 // dtype.itemsize, 0):
        for first, second in BLOCKS:
            tiles = Tiles(second, first, pad) if kernel == "backward_kv" else Tiles(first, second, pad)
            if first <= max(FRAGMENT, whole(rows)) and memory_of(kernel, dtype, D, Dv, tiles) <= MAX_THREADGROUP_BYTES:
                found.append(tiles)
        if found:
            break
    if not found:
        raise ValueError(f"head sizes of {D} and {Dv} do not fit {MAX_THREADGROUP_BYTES} bytes of threadgroup memory")

    def shared(tiles: Tiles) -> bool:
        rows = tiles.BLOCK_N if kernel == "backward_kv" else tiles.BLOCK_M
        return rows == MOST_ROWS and memory_of(kernel, dtype, D, Dv, tiles) <= MAX_THREADGROUP_BYTES // 2

    return sorted(found, key=shared, reverse=True)  # keeps the order of what is alike
