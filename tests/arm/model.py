"""Flop per cycle of the inner loops on Neoverse cores, as llvm-mca models them: no cache, no memory, no measurement."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from prepare import DISASSEMBLER, MODEL, ROOT, TREE

ITERATIONS = 200
# Steps of a tile between two meetings of its sums with memory.
CHAIN = int(re.search(r"kScoreChain = (\d+)", (ROOT / "kernels/cpu/microkernels.h").read_text())[1])
# Flop of an instruction: four lanes, or 2 x 2 sums of four products.
FLOP = {"fmla": 8, "bfmmla": 32}
# Flop per cycle of a core that does nothing else: Graviton2, 3 and 4.
PEAKS = {
    "neoverse-n1": {"fmla": 16},
    "neoverse-v1": {"fmla": 32, "bfmmla": 128},
    "neoverse-v2": {"fmla": 32, "bfmmla": 128},
}
# N1 has half the pipes beside the same number of loads.
SHARES = {"neoverse-n1": 0.85, "neoverse-v1": 0.90, "neoverse-v2": 0.90}


class Product(NamedTuple):
    """One register tile: where its machine code is, and which instruction does its work, how often in a step."""

    what: str
    source: str
    function: str
    instruction: str
    step: int
    steps: int = 1  # of a chain after the first, where a loop goes over chains


PRODUCTS = (
    Product("float32 q k^T", "primitives_neon", "tile<float, float, float, 6, 4, false>", "fmla", 24, CHAIN - 1),
    Product("float32 p v", "primitives_neon", "tile<float, float, float, 6, 4, true>", "fmla", 24),
    Product("bfloat16 q k^T", "primitives_neonbf16", "quad_tile<3, 4, false>", "bfmmla", 24),
    Product("bfloat16 p v", "primitives_neonbf16", "quad_tile<3, 4, true>", "bfmmla", 24),
)


class Modelled(NamedTuple):
    product: Product
    processor: str
    speed: float  # flop per cycle

    @property
    def peak(self) -> int:
        return PEAKS[self.processor][self.product.instruction]

    @property
    def good(self) -> bool:
        return self.speed >= SHARES[self.processor] * self.peak

    def __str__(self) -> str:
        share = f"{self.speed:.1f} of {self.peak} flop/cycle ({self.speed / self.peak:.0%})"
        return f"modelled: {self.processor} {self.product.what}: {share}{'' if self.good else ', which is too little'}"


def functions(listing: str) -> dict[str, list[tuple[int, str]]]:
    """Addresses and instructions by function, out of a disassembly."""
    found: dict[str, list[tuple[int, str]]] = {}
    for line in listing.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            code = found.setdefault(header[1], [])
        elif instruction := re.match(r"\s*([0-9a-f]+):\s+([^<]*)", line):
            code.append((int(instruction[1], 16), instruction[2].strip().replace("\t", " ")))
    return found


def loops(code: list[tuple[int, str]], instruction: str) -> list[list[str]]:
    """The bodies between a label and the branch back to it that hold the instruction, the branch with a name.

    A body that jumps elsewhere is of several paths, none of which is known to be taken. A loop around another goes over
    the chains of a sum: its body has the other's as often as a chain has steps after the first, which begins it.
    """
    at = {address: index for index, (address, _) in enumerate(code)}
    spans = []
    for index, (address, text) in enumerate(code):
        back = re.match(r"(?:b|b\.\w+|cbnz \w+,|cbz \w+,) 0x([0-9a-f]+)$", text)
        if back is None or int(back[1], 16) > address:
            continue
        first = at[int(back[1], 16)]
        body = [other for _, other in code[first:index]]
        works = any(other.startswith(instruction + " ") for other in body)
        if works and not any(other.startswith(("b ", "ret")) for other in body):
            spans.append((first, index))
    found = []
    for first, last in spans:
        body, place = [], first
        for start, end in sorted(spans):
            if first <= start and end < last and start >= place:
                inner = [text for _, text in code[start : end + 1]]
                body += [text for _, text in code[place:start]] + inner * (CHAIN - 1)
                place = end + 1
        body += [text for _, text in code[place:last]]
        found.append([*body, re.sub(r"0x[0-9a-f]+$", "again", code[last][1])])
    return found


def work(body: list[str], instruction: str) -> int:
    """How often a body does the instruction."""
    return sum(line.startswith(instruction + " ") for line in body)


def speed(body: list[str], instruction: str, processor: str) -> float:
    """Flop per cycle of a loop's body, run over and over."""
    with tempfile.NamedTemporaryFile("w", suffix=".s") as source:
        source.write("\n".join(["again:", *body, ""]))
        source.flush()
        options = ("-mtriple=aarch64", f"-mcpu={processor}", "-mattr=+bf16", f"-iterations={ITERATIONS}")
        said = subprocess.run([MODEL, *options, source.name], capture_output=True, text=True, check=True).stdout
    return work(body, instruction) * FLOP[instruction] * ITERATIONS / int(re.search(r"Total Cycles:\s+(\d+)", said)[1])


def modelled() -> list[Modelled]:
    """The slowest loop of each product on each processor that has its instruction."""
    found = []
    for product in PRODUCTS:
        path = TREE / "build" / "native" / f"{product.source}.o"
        command = [DISASSEMBLER, "-d", "-C", "--no-show-raw-insn", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (code,) = [code for name, code in functions(listing).items() if f"::{product.function}(" in name]
        bodies = loops(code, product.instruction)
        if not bodies:
            raise SystemExit(f"no loop of {product.instruction} in {product.function} of {Path(path).name}")
        longest = max(work(body, product.instruction) for body in bodies)
        if longest != product.step * product.steps:
            raise SystemExit(f"{product.what}: a loop of {longest} {product.instruction}, not of the chain looked for")
        for processor in (name for name, peaks in PEAKS.items() if product.instruction in peaks):
            slowest = min(speed(body, product.instruction, processor) for body in bodies)
            found.append(Modelled(product, processor, slowest))
    return found


def check() -> None:
    found = modelled()
    print(*found, sep="\n", flush=True)
    if not all(result.good for result in found):
        raise SystemExit("the inner loops are modelled below the share of the peak they are to reach")


if __name__ == "__main__":
    sys.exit(check())
