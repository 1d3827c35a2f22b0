"""How a race's page looks, in a light and in a dark scheme."""

from __future__ import annotations

from collections.abc import Iterable

# Text has a contrast of 4.5 or more to the page in both schemes. Bars are lighter on a dark page, and have an outline.
NAMES = ("page", "text", "faint", "line", "slow", "link")
LIGHT = dict(zip(NAMES, ("#ffffff", "#1c2126", "#57606a", "#d0d7de", "#b3261e", "#0b57d0"), strict=True))
DARK = dict(zip(NAMES, ("#14181d", "#e6e9ec", "#a3adb8", "#3a444f", "#ff9488", "#8ab4f8"), strict=True))
DARK_BARS = "brightness(1.2)"

RULES = """
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 16px; }
h1 { font-size: 26px; line-height: 1.25; margin: 8px 0 16px; }
h2 { font-size: 21px; margin: 40px 0 8px; }
h3 { font-size: 17px; margin: 32px 0 4px; }
h4 { font-size: 15px; margin: 20px 0 4px; }
h1, h2, h3, h4, p, li, dd, summary { overflow-wrap: anywhere; }
p, .notes { max-width: 900px; }
a { color: var(--link); }
small, .faint, figcaption, caption { color: var(--faint); font-size: 12px; }
small { display: block; font-weight: 400; }
.wide { overflow-x: auto; margin: 8px 0 16px; }
.wide:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 4px 0; }
th, td { padding: 3px 9px; text-align: right; vertical-align: top; white-space: nowrap; }
th { font-weight: 600; }
thead th { border-bottom: 2px solid var(--line); vertical-align: bottom; }
tbody tr:first-child > * { border-top: 1px solid var(--line); }
.t, tbody th { text-align: left; }
tbody th { font-weight: 400; }
.best { font-weight: 700; }
.slow { color: var(--slow); font-weight: 700; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 0; margin: 8px 0; list-style: none; font-size: 13px; }
.legend svg { vertical-align: -1px; margin-right: 6px; }
.charts { display: flex; flex-wrap: wrap; gap: 8px 28px; }
figcaption { margin-bottom: 2px; }
svg { display: block; }
.legend svg { display: inline; }
svg text { fill: var(--faint); font: 11px system-ui, sans-serif; text-anchor: middle; }
svg .ticks text { text-anchor: end; }
svg .grid { stroke: var(--line); fill: none; }
svg path, svg rect { stroke: var(--text); stroke-width: .5; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
pre { border: 1px solid var(--line); padding: 8px 12px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 4px 0; }
dt { color: var(--faint); }
dd { margin: 0; }
.notes { font-size: 13px; padding-left: 2.6em; }
@media (max-width: 600px) {
  main { padding: 12px; }
  tbody th, tbody .t { white-space: normal; min-width: 8em; }
  dl { grid-template-columns: 1fr; }
}
"""


def style(bars: Iterable[str]) -> str:
    """The rules; `bars` are the colours of the classes k0, k1 and so on."""
    dark = f"{variables(DARK)}\n[class^=k] {{ filter: {DARK_BARS}; }}"
    kinds = "\n".join(f".k{number} {{ fill: {color}; }}" for number, color in enumerate(bars))
    return f"{variables(LIGHT)}{RULES}{kinds}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def variables(scheme: dict[str, str]) -> str:
    told = " ".join(f"--{name}: {color};" for name, color in scheme.items())
    return f":root {{ color-scheme: light dark; {told} }}"
