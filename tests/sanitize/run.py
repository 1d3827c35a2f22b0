"""`make fuzz`: builds the CPU library under AddressSanitizer and UBSan, and fuzzes its operators for some seconds."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time

from build import LIBRARY, ROOT, TREE, build, environment

FUZZER = ROOT / "tests/sanitize/fuzz.py"
NOTE = TREE / "case"
ASSERTS = b"__assert_fail"  # what glibc's assert calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="for how long cases are begun")
    parser.add_argument("--seed", type=int, help="of the first case; each has the next one; left out: random")
    parser.add_argument("--cases", type=int, default=0, help="no more than this; 1 tells what the case is")
    given = parser.parse_args()
    seed = random.randrange(10**9) if given.seed is None else given.seed
    start = time.monotonic()
    surroundings = environment()
    build()
    if ASSERTS not in LIBRARY.read_bytes():
        raise SystemExit("fuzz: the asserts of preconditions were not compiled")
    print(f"fuzz: built in {time.monotonic() - start:.0f} s; seed {seed}", flush=True)
    NOTE.unlink(missing_ok=True)
    options = ("--seed", str(seed), "--seconds", str(given.seconds), "--cases", str(given.cases))
    done = subprocess.run([sys.executable, FUZZER, LIBRARY, NOTE, *options], env=surroundings, check=False)
    if done.returncode:
        again = f"the case alone: make fuzz SEED={NOTE.read_text()} CASES=1" if NOTE.exists() else "before any case"
        raise SystemExit(f"fuzz: failed ({done.returncode}); {again}")


if __name__ == "__main__":
    sys.exit(main())
