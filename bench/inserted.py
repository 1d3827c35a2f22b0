"""What is made of bench/results inside of a page that is otherwise written by hand, between two comments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Inserted(NamedTuple):
    """`make` says what stands in `page` under a name; `python -m module` puts it there."""

    page: Path
    name: str
    module: str
    make: Callable[[], str]

    def parts(self) -> tuple[str, str, str]:
        """What stands before, between and behind the comments, which belong to the outer parts."""
        begin, end = f"<!-- begin {self.name}: python -m {self.module} -->\n", f"<!-- end {self.name} -->"
        before, found, rest = self.page.read_text().partition(begin)
        kept, closed, behind = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"expected {begin.strip()} and {end} in {self.page.name}, got a page without them")
        return before + begin, kept, end + behind

    def kept(self) -> str:
        return self.parts()[1]

    def write(self) -> None:
        before, _, behind = self.parts()
        self.page.write_text(before + self.make() + behind)
