"""Mutants of Metal source: a barrier less, another index, another bound. Tests that are worth something fail for each.

`mutants(text)` lists them. run_mutations.py runs cases through them and names those that survive.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Mutant(NamedTuple):
    line: int
    description: str  # what was replaced by what, and the line; the same text in a line is numbered
    source: str


class Rule(NamedTuple):
    """What is replaced: a pattern, and the text for a match."""

    name: str
    pattern: str
    replacement: str


SWAPS = [
    ("BLOCK_M", "BLOCK_N"),
    ("BLOCK_D", "BLOCK_DV"),
    ("HEAD_D", "HEAD_DV"),
    ("LD_D", "LD_DV"),
    ("I_Q", "I_K"),
    ("I_K", "I_V"),
    ("I_OUT", "I_Q"),
    ("I_GRAD_OUT", "I_OUT"),
    ("I_DK", "I_DV"),
    ("q_first", "k_first"),
    ("q_length", "k_length"),
    ("first_query", "first_key"),
    ("begin", "end"),
    ("low", "high"),
    ("first", "last"),
    ("kv_head", "head"),
    ("LEFT", "RIGHT"),
]
BARRIER = Rule("barrier", r"\b(?:threadgroup|simdgroup)_barrier\([^;]*\);", ";")
RULES = [
    BARRIER,
    # bounds and comparisons; clang-format puts spaces around these, and none around template arguments
    Rule("bound", r" < ", " <= "),
    Rule("bound", r" <= ", " < "),
    Rule("bound", r" > ", " >= "),
    Rule("bound", r" >= ", " > "),
    Rule("equality", r" == ", " != "),
    Rule("equality", r" != ", " == "),
    Rule("and", r" && ", " || "),
    Rule("or", r" \|\| ", " && "),
    # arithmetic of indices
    Rule("one more", r" \+ 1\b(?!\.)", ""),
    Rule("one less", r" - 1\b(?!\.)", ""),
    Rule("summand", r" \+ (?:i|d|b|n|row|column|begin|first|place|split)\b(?![.\[(])", ""),
    Rule("eight", r"\b8 \* ", ""),
    Rule("eighth", r" / 8\b", " / 16"),
    Rule("leading dimension", r" \* LD\w*", ""),
    Rule("row stride", r" \* n\[[^\]]*\]", ""),
    Rule("dense stride", r" \* stride\[\d\]", ""),
    Rule("dimension of a stride", r"(\b[In]\w*\[?I_\w+) \+ 1\]", r"\1 + 2]"),
    Rule("dimension of a stride", r"(\b[In]\w*\[?I_\w+) \+ 2\]", r"\1 + 1]"),
    Rule("smaller", r"\bmin\(", "max("),
    Rule("larger", r"\bmax\(", "min("),
    Rule("axis", r"\bgroup\.x\b", "group.y"),
    Rule("axis", r"\bgroup\.y\b", "group.z"),
    Rule("axis", r"\bgroup\.z\b", "group.x"),
    Rule("row for column", r"(\.|->)row\b", r"\1col"),
    Rule("column for row", r"(\.|->)col\b", r"\1row"),
    Rule("element", r"\[0\](?!\s*=\s*\{)", "[1]"),
    Rule("element", r"\[1\]", "[0]"),
    Rule("lanes", r"ushort\((\d+)\)\)", r"ushort(\1 ^ 3))"),
    Rule("sign", r" \+ (?=e\.shift|e\.prefix)", " - "),
    Rule("sign", r" - (?=e\.shift)", " + "),
    Rule("sum", r" \+= (?=\w)", " = "),
    *(Rule("swap", rf"(?<![.\w]){a}\b(?!\()", b) for pair in SWAPS for a, b in (pair, pair[::-1]) if a.isupper()),
    *(Rule("swap", rf"\.{a}\b", f".{b}") for pair in SWAPS for a, b in (pair, pair[::-1]) if a.islower()),
    *(Rule("swap", rf"\b{a}\(", f"{b}(") for pair in SWAPS for a, b in (pair, pair[::-1]) if a.startswith("first_")),
]


def hidden(text: str) -> str:
    """The text with spaces for comments, strings and directives, so that places stay what they are."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731
    return re.sub(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"|^[ \t]*#[^\n]*", blank, text, flags=re.S | re.M)


def mutants(text: str, rules: list[Rule] | None = None) -> list[Mutant]:
    """Every mutant of the text, by line."""
    visible, found, seen = hidden(text), [], set()
    numbers: dict[str, int] = {}
    for rule in RULES if rules is None else rules:
        for match in re.finditer(rule.pattern, visible):
            source = text[: match.start()] + match.expand(rule.replacement) + text[match.end() :]
            if source == text or source in seen:
                continue
            seen.add(source)
            line = text.count("\n", 0, match.start()) + 1
            code = text.split("\n")[line - 1].split("//")[0].strip()
            replaced = f"`{match[0].strip()}` -> `{match.expand(rule.replacement).strip()}`"
            description = f"{rule.name}: {replaced} in: {code}"
            numbers[description] = numbers.get(description, 0) + 1
            if numbers[description] > 1:
                description += f" #{numbers[description]}"
            found.append(Mutant(line, description, source))
    return sorted(found, key=lambda mutant: mutant.line)


def barriers(text: str) -> list[Mutant]:
    return mutants(text, [BARRIER])
