"""Finds the functions of C++ and CUDA sources, well enough to measure their lengths."""

from __future__ import annotations

import re
from typing import NamedTuple

# Comments, preprocessor lines with what continues them, strings and characters: none of their braces counts.
NOISE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:\\\n|[^\n])*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'""", re.S | re.M
)
# A separator inside of a number, as in 1'000, begins no character.
DIGITS = re.compile(r"(?<=\d)'(?=\d)")
TYPE = re.compile(r"\b(?:class|struct|union|enum)\b")
DEVICE = re.compile(r"\b(?:CUTE_DEVICE|CUTE_HOST_DEVICE|__device__|__global__|kernel)\b")
# The name before a function's parameters, an operator's included.
NAME = re.compile(r"(operator\s*\S+?|~?\w+)\s*\(")
# These look like a name before parameters, and are none.
ATTRIBUTES = re.compile(r"\b(?:alignas|decltype|__attribute__|__launch_bounds__|__cluster_dims__|sizeof)\b")


class Function(NamedTuple):
    name: str
    line: int  # the first
    lines: int
    device: bool  # runs on a GPU


def blank(text: str) -> str:
    """The text without its noise, on the same lines."""
    return NOISE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), DIGITS.sub(" ", text))


def without(text: str, opening: str, closing: str, start: int) -> str:
    """The text without the bracketed part that begins at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == opening) - (text[position] == closing)
        if depth == 0:
            return text[:start] + text[position + 1 :]
    return text[:start]


def plain_header(header: str) -> str:
    """A declaration without its template parameters and attributes."""
    while found := re.search(r"\btemplate\s*<", header):
        header = without(header, "<", ">", found.end() - 1)
        header = header[: found.start()] + header[found.start() + len(found[0]) - 1 :]
    while found := ATTRIBUTES.search(header):
        bracket = header.find("(", found.end())
        header = without(header, "(", ")", bracket) if bracket >= 0 else header
        header = header[: found.start()] + header[found.end() :]
    return header


def kind_of(header: str) -> str:
    """What a brace at namespace or class scope opens: "scope", "function" or "value"."""
    header = plain_header(header)
    before, bracket, _ = header.partition("(")
    if TYPE.search(before) or re.search(r"\b(?:namespace|extern)\b", before):
        return "scope"
    return "function" if bracket and "=" not in before.replace("operator=", "").replace("==", "") else "value"


def functions(text: str) -> list[Function]:
    """All functions at namespace and class scope; lambdas and local classes are lines of the function around them."""
    found, text = [], blank(text)
    scopes: list[tuple[str, int]] = []  # what each open brace opened, and where its declaration begins
    start = 0  # of the present declaration
    for position, character in enumerate(text):
        inside = bool(scopes) and scopes[-1][0] != "scope"
        if character == ";" and not inside:
            start = position + 1
        elif character == "{":
            scopes.append(("inner" if inside else kind_of(text[start:position]), start))
            start = start if inside or scopes[-1][0] == "value" else position + 1
        elif character == "}" and scopes:
            kind, began = scopes.pop()
            if kind == "function":
                found.append(measured(text[began : position + 1], text.count("\n", 0, began)))
            start = start if kind in ("inner", "value") else position + 1
    return found


def measured(text: str, line: int) -> Function:
    """The function of this text, whose declaration begins after so many lines."""
    above = text[: len(text) - len(text.lstrip())].count("\n")
    header = plain_header(text.partition("{")[0])
    name = NAME.search(header)
    device = DEVICE.search(text.partition("{")[0]) is not None
    return Function(name[1] if name else header.strip(), line + above + 1, text.strip().count("\n") + 1, device)
