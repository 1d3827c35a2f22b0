"""What runs in the emulator, in one process because importing torch takes 15 s there: `sdpa check`, then pytest."""

from __future__ import annotations

import sys
import time

import pytest

from sdpa.cli.check import check
from sdpa.kernels.cpu import library


def main(instruction_sets: str, check_options: str, *tests: str) -> int:
    """Instruction sets separated by commas that must be found, the widest last; no options mean no `sdpa check`."""
    assert library.load_error() is None, library.load_error()
    found = ",".join(library.isas())
    assert found == instruction_sets, f"expected the instruction sets {instruction_sets}, got {found}"
    assert library.isa() == library.isas()[-1]
    start = time.monotonic()
    if check_options and check.main(check_options.split(), standalone_mode=False):
        return 1
    print(f"sdpa check took {time.monotonic() - start:.0f} s")
    return pytest.main(["-q", "-p", "no:cacheprovider", "--durations=5", *tests])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
