"""python -m sdpa.bench.mask_pictures: each kind of mask as a picture, docs/pictures/mask_*.svg, drawn from the mask.

A row of squares for each query, a column for each key. What a query sees is filled; where a bias is added, the more it
is, the fuller.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sdpa.mask import Mask

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
M, N = 8, 8
SIDE, GAP, MARGIN = 18, 2, 22  # of a square and around the whole, in pixels
# By the picture's name: the mask as docs/guide/masks.md writes it, how many queries and keys.
MASKS: dict[str, tuple[str, int, int]] = {
    "causal": ("sdpa.Mask(causal=True)", M, N),
    "bottom_right": ('sdpa.Mask(causal=True, align="bottom_right")', 3, N),
    "window": ("sdpa.Mask(causal=True, window=(2, 0))", M, N),
    "two_sided": ("sdpa.Mask(window=(1, 2))", M, N),
    "lengths": ("sdpa.Mask(lengths=torch.tensor([5]))", M, N),
    "query_lengths": ("sdpa.Mask(lengths=torch.tensor([5]), query_lengths=torch.tensor([5]))", M, N),
    "segments": ("sdpa.Mask(segments=torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]))", M, N),
    "documents": ("sdpa.Mask(causal=True, cu_seqlens=torch.tensor([0, 3, 5, 8]))", M, N),
    "prefix": ("sdpa.Mask(causal=True, prefix=3)", M, N),
    "alibi": ("sdpa.Mask(causal=True, alibi=torch.tensor([0.25]))", M, N),
    "dense": ("sdpa.Mask(causal=True) & (torch.arange(8) % 3 != 1)", M, N),
    "bias": ("sdpa.Mask(bias=-0.3 * (torch.arange(8)[:, None] - torch.arange(8)).abs())", M, N),
}
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#475569}.seen{fill:#2563eb}.hidden{fill:#94a3b8}"
    "@media(prefers-color-scheme:dark){text{fill:#cbd5e1}.seen{fill:#60a5fa}}"
)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in MASKS:
        (FOLDER / f"mask_{name}.svg").write_text(picture(name))


def picture(name: str) -> str:
    """The SVG of a mask."""
    written, rows, columns = MASKS[name]
    shares = fullness(mask_of(written).dense(1, 1, rows, columns)[0, 0])
    step = SIDE + GAP
    width, height = MARGIN + columns * step, MARGIN + rows * step
    squares = [square(i, j, share) for i, row in enumerate(shares.tolist()) for j, share in enumerate(row)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{rows} queries, {columns} keys: {seen_in_words(shares)}">',
            f"<style>{STYLE}</style>",
            f'<text x="{MARGIN}" y="14">keys</text>',
            f'<text transform="translate(14 {MARGIN + 44}) rotate(-90)">queries</text>',
            *squares,
            "</svg>\n",
        ]
    )


def square(row: int, column: int, share: float) -> str:
    kind = "hidden" if share == 0.0 else "seen"
    x, y = (MARGIN + at * (SIDE + GAP) for at in (column, row))
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" rx="2" '
        f'fill-opacity="{share if share else 0.25:.2f}"/>'
    )


def mask_of(written: str) -> Mask:
    """The mask that an expression of the page makes."""
    import sdpa

    made: Mask = eval(written, {"sdpa": sdpa, "torch": torch})
    return made


def fullness(dense: Tensor) -> Tensor:
    """(M, N) from 0, hidden, to 1: of a bias how much of the weight is left, exp(bias)."""
    return dense.double() if dense.dtype == torch.bool else dense.double().exp()


def seen_in_words(shares: Tensor) -> str:
    return "; ".join(f"query {i} sees {int((row > 0).sum())}" for i, row in enumerate(shares))


if __name__ == "__main__":
    main()
