"""From Metal source to C++: threadgroup arrays rewritten, kernels' parameters read, functions added that start them."""

from __future__ import annotations

import re
from typing import NamedTuple

THREADGROUP_ARRAY = re.compile(r"(?<=[;{}])(\s*)threadgroup\s+([\w:<>, ]+?)\s*\b(\w+)\s*((?:\[[^\]]*\]\s*)+);")
UNROLLING = re.compile(r"^#pragma (clang loop )?unroll.*$", re.M)  # more text for the compiler, little speed here
KERNEL = re.compile(r"\bkernel\s+void\s+(\w+)\s*\(")
LIMIT = re.compile(r"\[\[\s*max_total_threads_per_threadgroup\s*\((.*?)\)\s*\]\]\s*$", re.S)
PARAMETER = re.compile(
    r"^(?P<type>.*?[\s*&])(?P<name>\w+)\s*\[\[\s*(?P<attribute>\w+)\s*(?:\(\s*(?P<index>.*?)\s*\))?\s*\]\]$", re.S
)
QUALIFIERS = re.compile(r"\b(device|constant|threadgroup|thread|const|volatile)\b")

BUILTINS = {
    "threadgroup_position_in_grid": "ids->group",
    "threadgroups_per_grid": "ids->groups",
    "thread_position_in_threadgroup": "ids->place",
    "threads_per_threadgroup": "ids->threads",
    "simdgroup_index_in_threadgroup": "ids->simdgroup",
    "thread_index_in_simdgroup": "ids->lane",
    "thread_index_in_threadgroup": "ids->index",
}


class Parameter(NamedTuple):
    """`index` is the number of a buffer, or -1; `element` the type that a buffer holds, or a builtin's own."""

    name: str
    attribute: str
    index: int
    element: str
    is_reference: bool
    is_written: bool
    text: str  # the type as it stands in the source


class Kernel(NamedTuple):
    name: str
    parameters: tuple[Parameter, ...]
    limit: str  # of threads in a threadgroup, as an expression

    @property
    def buffers(self) -> dict[int, Parameter]:
        return {p.index: p for p in self.parameters if p.index >= 0}


def closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    raise SyntaxError("a parenthesis that nothing closes")


def split(text: str) -> list[str]:
    """The parts between commas that no bracket holds."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "(<[{") - (letter in ")>]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def parameter(kernel: str, text: str) -> Parameter:
    match = PARAMETER.match(text)
    if match is None:
        raise SyntaxError(f"kernel {kernel}: the parameter {text!r} has no attribute of Metal")
    declared, attribute = match["type"].strip(), match["attribute"]
    is_buffer = attribute == "buffer"
    if not is_buffer and attribute not in BUILTINS:
        raise SyntaxError(f"kernel {kernel}: the emulator does not know [[{attribute}]]")
    is_pointer, is_reference = declared.endswith("*"), declared.endswith("&")
    if is_buffer and not (is_pointer or is_reference):
        raise SyntaxError(f"kernel {kernel}: buffer {match['index']} is neither a pointer nor a reference")
    words = set(QUALIFIERS.findall(declared))
    if is_buffer and not words & {"device", "constant"}:
        raise SyntaxError(f"kernel {kernel}: {match['name']} has no address space, wanted device or constant")
    return Parameter(
        match["name"],
        attribute,
        int(match["index"]) if is_buffer else -1,
        QUALIFIERS.sub("", declared).strip("*& \n\t").strip(),
        is_reference,
        is_buffer and "device" in words and "const" not in words,
        declared,
    )


def kernels(text: str) -> list[Kernel]:
    """The kernels of a preprocessed text."""
    found = []
    plain = re.sub(r"^#.*$", "", text, flags=re.M)
    for match in KERNEL.finditer(plain):
        end = closing(plain, match.end() - 1)
        parameters = tuple(parameter(match[1], part) for part in split(plain[match.end() : end]))
        indices = [p.index for p in parameters if p.index >= 0]
        if len(set(indices)) < len(indices) or any(i > 30 for i in indices):
            raise SyntaxError(f"kernel {match[1]}: buffers {indices}, wanted different numbers from 0 to 30")
        limit = LIMIT.search(plain[: match.start()])
        found.append(Kernel(match[1], parameters, limit[1] if limit else "1024"))
    return found


def rewritten_arrays(text: str) -> str:
    """`threadgroup T name[N];` as a reference to memory of the thread's threadgroup."""

    def reference(match: re.Match) -> str:
        space, element, name, size = match.groups()
        kind = f"EMULATOR_SPACE(3) {element}"
        memory = f'emulator::emulator_threadgroup_array(__LINE__, "{name}", sizeof({element} {size}))'
        return f"{space}{kind} (&{name}){size} = *({kind} (*){size})(unsigned long)({memory});"

    return THREADGROUP_ARRAY.sub(reference, text)


def argument(p: Parameter) -> str:
    if p.index < 0:
        return f"emulator::builtin<{p.text}>({BUILTINS[p.attribute]})"
    pointer = p.text.rstrip("&* \n\t") + "*"
    cast = f"({pointer})(unsigned long)buffers[{p.index}]"
    return f"*{cast}" if p.is_reference else cast


def starter(kernel: Kernel) -> str:
    """The function that calls a kernel for one thread, the types of its buffers, and its limit of threads."""
    arguments = ", ".join(argument(p) for p in kernel.parameters)
    codes = ", ".join(f"emulator::code<{p.element}>()" for p in kernel.buffers.values())
    export = 'extern "C" __attribute__((visibility("default")))'
    return (
        f"{export} void emulator_run_{kernel.name}(void* const* buffers, const emulator::Ids* ids) "
        f"{{ {kernel.name}({arguments}); }}\n"
        f"{export} const int emulator_types_{kernel.name}[] = {{{codes}{', ' if codes else ''}0}};\n"
        f"{export} const int emulator_limit_{kernel.name} = ({kernel.limit});\n"
    )


def translated(text: str) -> tuple[str, list[Kernel]]:
    """C++ from a preprocessed text, with the same numbers of lines in what the compiler says."""
    found = kernels(text)
    head = '# 1 "emulator"\n#include <metal_stdlib>\n'
    tail = '\n# 1 "starters"\n' + "".join(map(starter, found))
    text = UNROLLING.sub("", text)
    return head + rewritten_arrays(text) + tail, found
