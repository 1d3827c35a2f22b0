"""The instruction set "amx" without AMX: its own source, built against tiles in plain C++ (tests/amx).

Products are compared bit for bit with the same arithmetic spelled out, and with float64; then all of cpu_flash's tests
in bfloat16 run on a library that has them.
"""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import setuptools
import torch
from torch import Tensor

from sdpa.kernels.cpu import library

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "tests/amx"
PRODUCTS = "products.so"
SIDE, FEWEST_ROWS = 32, 4  # rows of a square of tiles; fewer than so many left over are computed in vectors
ROUNDING = 2.0**-24

if library.load_error() is not None:
    pytest.skip(library.load_error(), allow_module_level=True)
if "avx512bf16" not in library.isas():
    pytest.skip("what tiles leave to vectors needs a processor with AVX512-BF16", allow_module_level=True)
if shutil.which(os.environ.get("CXX", "g++").split()[0]) is None:
    pytest.skip("no C++ compiler", allow_module_level=True)


def build(tree: Path, targets: tuple[str, ...], emulated: bool = True, fault: tuple[str, str] = ("", "")) -> Path:
    """With emulated tiles or the processor's; objects that are up to date are not compiled again."""
    sources, objects = tree / "kernels/cpu", "build/native"
    shutil.copytree(ROOT / "kernels/cpu", sources, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if (ROOT / objects).exists():
        shutil.copytree(ROOT / objects, tree / objects, ignore=shutil.ignore_patterns("cuda"))
    for source in EMULATION.iterdir():
        if emulated or source.name != "permission.cpp":
            shutil.copy(source, sources)  # a new file: the object of what stood in its place is out of date
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        names = runpy.run_path(str(ROOT / "setup.py"))
    unit = sources / "primitives_amx.cpp"
    text = unit.read_text()
    assert fault[0] in text, fault[0]
    if fault[0]:
        unit.write_text(text.replace(*fault))
    flags = {"tiles": names["AVX2"], "products": names["AVX2"]}
    if emulated:
        fast = "-O0" if fault[0] else ""  # to compile: what is wrong there is seen in a few products
        flags["_amx"] = f"{names['AVX512BF16']} -include kernels/cpu/tiles.h {fast}"
    make = names["ninja_text"].__globals__
    sets = names["ISA_FLAGS"] | {"X86": names["ISA_FLAGS"]["X86"] | flags}
    make.update(ROOT=tree, ISA_FLAGS=sets, nvcc=lambda: None)
    parts = " ".join(f"{objects}/{name}.o" for name in ("primitives_amx", "primitives_avx512bf16", "tiles", "products"))
    script = tree / objects / "build.ninja"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(f"{make['ninja_text'](make['torch_folder']())}build {PRODUCTS}: link {parts}\n")
    command = [make["ninja"](), "-C", tree, "-f", script, *targets]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return tree


# Where a processor has AMX, and the library has the system's permission, its own tiles are held against the same.
@pytest.fixture(scope="module", params=["emulated"] + ["processor"] * ("amx" in library.isas()))
def products(request, tmp_path_factory) -> ctypes.CDLL:
    emulated = request.param == "emulated"
    return ctypes.CDLL(str(build(tmp_path_factory.mktemp(request.param), (PRODUCTS,), emulated) / PRODUCTS))


def at(tensor: Tensor | None, index: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr() + index * tensor.element_size())


def number(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pairs(matrix: Tensor) -> Tensor:
    """[rows, depth] as rows of pairs, one float32 of any bits each; a last half pair is filled up with zero."""
    odd = torch.zeros(matrix.shape[0], matrix.shape[1] % 2, dtype=torch.bfloat16)
    return torch.cat([matrix, odd], 1).contiguous().view(torch.float32)


def framed(inner: Tensor, rows: int, columns: int) -> Tensor:
    """`inner` amid NaN, [rows, columns] in all: what is read beyond it reaches the result."""
    frame = torch.full((rows, columns), torch.nan)
    frame.view(torch.int32)[: inner.shape[0], : inner.shape[1]] = inner.view(torch.int32)
    return frame


@dataclass
class Operands:
    """a [rows, depth] and b [depth, columns] in bfloat16, and how they lie as pairs."""

    a: Tensor
    b: Tensor

    @classmethod
    def random(cls, rows: int, columns: int, depth: int, seed: int) -> Operands:
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(*size, generator=generator).bfloat16() for size in ((rows, depth), (depth, columns)))
        return cls(a, b)

    def left(self, room: int = 3) -> Tensor:
        inner = pairs(self.a)
        return framed(inner, inner.shape[0] + SIDE, inner.shape[1] + room)

    def transposed(self, room: int = 5) -> Tensor:
        """[pairs of the depth, rows], as gradients of keys want it."""
        inner = pairs(self.a).view(torch.int32).T.contiguous().view(torch.float32)
        return framed(inner, inner.shape[0] + SIDE, inner.shape[1] + room)

    def right(self) -> Tensor:
        """[pairs of the depth, columns], zeros up to a whole vector."""
        columns = up(self.b.shape[1], 16)
        inner = pairs(self.b.T).view(torch.int32).T.contiguous()
        full = torch.zeros(inner.shape[0], columns, dtype=torch.int32)
        full[:, : inner.shape[1]] = inner
        return framed(full.view(torch.float32), inner.shape[0] + SIDE, columns + 16)

    def exact(self) -> tuple[Tensor, Tensor]:
        """The product in float64, and the bound of what rounding its sums in float32 may add."""
        a, b = self.a.double(), self.b.double()
        return a @ b, (a.abs() @ b.abs()) * (self.a.shape[1] + 2) * ROUNDING


def run_scores(products: ctypes.CDLL, by: bytes, given: Operands, factor: float) -> Tensor:
    (rows, depth), columns = given.a.shape, given.b.shape[1]
    a, b = given.left(), given.right()
    c = torch.full((rows + 2, up(columns, 16) + 16), torch.nan)
    products.scores(
        by, number(rows), number(columns), number(depth), at(a), number(a.shape[1]), at(b), number(b.shape[1]),
        ctypes.c_float(factor), at(c), number(c.shape[1]),
    )  # fmt: skip
    assert c[rows:].isnan().all() and c[:, up(columns, 16) :].isnan().all()
    return c[:rows, : up(columns, 16)]


def run_accumulate(
    products: ctypes.CDLL, by: bytes, given: Operands, old: Tensor, keep: Tensor | None, order: str
) -> Tensor:
    """`order` of the left operand: "rows"; "transposed"; "reversed" is that, and from the last pair to the first."""
    (rows, depth), width = given.a.shape, given.b.shape[1]
    a, b = given.left() if order == "rows" else given.transposed(), given.right()
    row_stride, depth_stride = (a.shape[1], 1) if order == "rows" else (1, a.shape[1])
    first, right = at(a), (at(b), number(b.shape[1]))
    if order == "reversed":
        last = (depth - 1) // 2
        first, depth_stride = at(a, last * depth_stride), -depth_stride
        right = at(b, last * b.shape[1]), number(-b.shape[1])
    c = torch.full((rows + 2, width + 16), torch.nan)
    c[:rows, :width] = old
    products.accumulate(
        by, number(rows), number(width), number(depth), first, number(row_stride), number(depth_stride), *right,
        at(c), number(c.shape[1]), at(keep),
    )  # fmt: skip
    assert c[rows:].isnan().all() and c[:, width:].isnan().all()
    return c[:rows, :width]


def same_bits(found: Tensor, plain: Tensor, vectors: Tensor) -> bool:
    """By tiles as spelled out; the rows that are too few, as vectors have them."""
    rows = found.shape[0]
    end = rows // SIDE * SIDE if rows % SIDE < FEWEST_ROWS else rows
    expected = torch.cat([plain[:end], vectors[end:]])
    return torch.equal(found.contiguous().view(torch.int32), expected.view(torch.int32))


ROWS = (1, 3, 4, 15, 16, 17, 31, 32, 33, 37, 64, 100)
COLUMNS = (1, 15, 16, 17, 32, 33, 64, 100, 128)
DEPTHS = (1, 2, 15, 31, 32, 33, 64, 80, 127, 128, 129, 161, 256, 300)


def draws(count: int, *choices: tuple) -> list[tuple]:
    """So many picks of every choice; every value of each comes up."""
    generator = torch.Generator().manual_seed(7)
    columns = []
    for choice in choices:
        order = [choice[i % len(choice)] for i in range(count)]
        columns.append([order[i] for i in torch.randperm(count, generator=generator)])
    return list(zip(*columns, strict=True))


SCORES = draws(150, ROWS, COLUMNS, DEPTHS, (1.0, 0.125, 0.3))
SUMS = draws(180, ROWS, (16, 32, 48, 64, 80, 128), DEPTHS, ("ones", "none", "some"), ("rows", "transposed", "reversed"))


def check_scores(products: ctypes.CDLL, rows: int, columns: int, depth: int, factor: float) -> None:
    given = Operands.random(rows, columns, depth, seed=rows + 1000 * columns)
    found, plain, vectors = (run_scores(products, by, given, factor) for by in (b"tiles", b"plain", b"vectors"))
    assert same_bits(found, plain, vectors)
    exact, band = given.exact()
    assert ((found[:, :columns].double() - factor * exact).abs() <= factor * band).all()


def check_sums(products: ctypes.CDLL, rows: int, width: int, depth: int, keep: str, order: str) -> None:
    given = Operands.random(rows, width, depth, seed=rows + 1000 * width)
    torch.manual_seed(depth)
    old, factors = torch.randn(rows, width), {"ones": torch.ones(rows), "none": None, "some": torch.rand(rows)}[keep]
    found, plain, vectors = (
        run_accumulate(products, by, given, old, factors, order) for by in (b"tiles", b"plain", b"vectors")
    )
    assert same_bits(found, plain, vectors)
    exact, band = given.exact()
    kept = old.double() * (1.0 if factors is None else factors.double()[:, None])
    assert ((found.double() - kept - exact).abs() <= band + 2 * ROUNDING * (kept.abs() + exact.abs())).all()


@pytest.mark.parametrize("case", SCORES, ids=str)
def test_scores(products, case):
    check_scores(products, *case)


@pytest.mark.parametrize("case", SUMS, ids=str)
def test_accumulate(products, case):
    check_sums(products, *case)


SPLIT_SCORES = draws(60, ROWS, COLUMNS, DEPTHS, (1.0, 0.3))
SPLIT_SUMS = draws(
    60, ROWS, (16, 24, 32, 48, 80, 128), (64, 65, 90, 96, 127, 300), (0, 16, 48), ("ones", "none", "some")
)


def check_split_scores(products: ctypes.CDLL, rows: int, columns: int, depth: int, factor: float) -> None:
    """Products of float16 are exact; what is left is the rounding of sums in float32."""
    generator = torch.Generator().manual_seed(rows + 1000 * columns)
    q, k = (torch.randn(n, depth, generator=generator).half() for n in (rows, columns))
    c = torch.full((rows + 2, up(columns, 16) + 16), torch.nan)
    products.split_scores(
        number(rows), number(columns), number(depth), at(q), at(k), ctypes.c_float(factor), at(c), number(c.shape[1])
    )
    assert c[rows:].isnan().all() and c[:, up(columns, 16) :].isnan().all()
    exact, terms = q.double() @ k.double().T, q.double().abs() @ k.double().abs().T
    band = factor * terms * (4 * depth + 2) * ROUNDING
    assert ((c[:rows, :columns].double() - factor * exact).abs() <= band).all()


def check_split_sums(products: ctypes.CDLL, rows: int, width: int, steps: int, first: int, keep: str) -> None:
    """Weights keep 16 bits, and the product of both second parts is left out."""
    torch.manual_seed(rows + 1000 * width)
    depth, room, ld = steps - first, up(width, SIDE), up(steps, 16) | 16
    weights, v, old = torch.full((rows, ld), torch.nan), torch.randn(steps, width).half(), torch.randn(rows, room)
    weights[:, :depth] = torch.rand(rows, depth)
    exact_weights = weights[:, :depth].double()
    factors = {"ones": torch.ones(rows), "none": None, "some": torch.rand(rows)}[keep]
    c = torch.full((rows + 2, room + 16), torch.nan)
    c[:rows, :room] = old
    products.split_sums(
        number(rows), number(width), number(steps), number(first), at(weights), number(ld), at(v), at(c),
        number(c.shape[1]), at(factors),
    )  # fmt: skip
    assert c[rows:].isnan().all() and c[:, room:].isnan().all()
    kept = old.double() * (1.0 if factors is None else factors.double()[:, None])
    wanted, terms = exact_weights @ v[first:].double(), exact_weights @ v[first:].double().abs()
    band = terms * (2.0**-16 + (3 * depth + 2) * ROUNDING) + 2 * ROUNDING * (kept[:, :width].abs() + wanted.abs())
    assert ((c[:rows, :width].double() - kept[:, :width] - wanted).abs() <= band).all()
    assert torch.allclose(c[:rows, width:room].double(), kept[:, width:])


@pytest.mark.parametrize("case", SPLIT_SCORES, ids=str)
def test_split_scores(products, case):
    check_split_scores(products, *case)


@pytest.mark.parametrize("case", SPLIT_SUMS, ids=str)
def test_split_sums(products, case):
    check_split_sums(products, *case)


FAULTS = {
    "pairs beyond the depth are read": ("k < pairs ? _mm512_loadu_ps(b", "k < kTile ? _mm512_loadu_ps(b"),
    "rows beyond the last are read": ("square[i] = i < lines ?", "square[i] = i < kTile ?"),
    "the first chunk stands for all": ("first || pairs - in_place > kChunk", "first"),
    "squares of tiles share their factors": ("alpha ? alpha + r : nullptr", "alpha"),
    "a product is left out": ("_tile_dpbf16ps(3, 5, 7)", "_tile_zero(3)"),
    "scores without the product of second parts": ("kSteps[2] = {4, 3}", "kSteps[2] = {3, 3}"),
    "sums without second parts of values": ("kSteps[2] = {4, 3}", "kSteps[2] = {4, 2}"),
    "second parts are those of the first row": (
        "pair_up(even.second, odd.second)",
        "pair_up(even.second, even.second)",
    ),
    "nothing follows the last row": ("(rows + kTile + kSpan - 1)", "(rows + 1)"),
    "half a span is not cleared": ("if (end % kSpan != 0) store_half", "if (end < 0) store_half"),
    "the second part is cut short": ("second = rounded(rest)", "second = _mm512_setzero_si512()"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_source_that_is_wrong_is_seen(tmp_path, fault):
    faulty = ctypes.CDLL(str(build(tmp_path, (PRODUCTS,), fault=FAULTS[fault]) / PRODUCTS))
    with pytest.raises(AssertionError):
        for case in SCORES:
            check_scores(faulty, *case)
        for case in SUMS:
            check_sums(faulty, *case)
        for case in SPLIT_SCORES:
            check_split_scores(faulty, *case)
        for case in SPLIT_SUMS:
            check_split_sums(faulty, *case)


def test_subnormal_numbers_are_zero(products):
    """Of operands, of products and of sums."""
    tiny, least = 2.0**-130, 2.0**-126
    a = torch.tensor([tiny, 2.0**-70, least, least], dtype=torch.bfloat16).expand(SIDE, 4)
    b = torch.tensor([1.0, 2.0**-60, 1.0, -1.5], dtype=torch.bfloat16).expand(16, 4).T
    found, plain = (run_scores(products, by, Operands(a, b), 1.0) for by in (b"tiles", b"plain"))
    assert torch.equal(found, plain) and not found.any()


def test_what_is_not_finite_stays_in_its_row(products):
    given = Operands.random(70, 48, 90, seed=5)
    clean = run_scores(products, b"tiles", given, 1.0)
    for row, value in ((0, torch.nan), (33, torch.inf), (69, torch.nan)):
        given.a[row, 3] = value
        found = run_scores(products, b"tiles", given, 1.0)
        given.a[row, 3] = 0
        others = [r for r in range(70) if r != row]
        assert not found[row].isfinite().any() and torch.equal(found[others], clean[others])
        given.a[row] = Operands.random(70, 48, 90, seed=5).a[row]


IN_A_FRESH_PROCESS = """
import sys, pytest
from pathlib import Path
from sdpa.kernels.cpu import library
library.LIBRARY = Path(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
"""


def test_attention_by_tiles(tmp_path):
    """All of cpu_flash's tests in bfloat16, and those of split float16, with amx as it is chosen where there is one."""
    built = "kernels/cpu/libsdpa_cpu.so"
    built = str(build(tmp_path, (built,)) / built)
    files = [str(ROOT / "tests" / name) for name in ("test_cpu_flash.py", "test_cpu_blocks.py", "test_cpu_split.py")]
    cases = [*files, "-q", "-k", "amx and (bfloat16 or test_cpu_split)", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, built, *cases], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100
