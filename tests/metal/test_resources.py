"""docs/metal_kernels.md says what the sources take."""

from pathlib import Path

from metal import resources

PAGE = Path(__file__).parents[2] / "docs/metal_kernels.md"


def test_the_page_has_the_table():
    assert "\n".join(resources.resources_table()) in PAGE.read_text()
