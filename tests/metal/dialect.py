"""Which Metal the kernels may use: constructs that kernels tested on Apple hardware are known to use, and no others.

There is no Apple compiler here, so that a text is judged by its tokens: `violations(text)` lists what is outside.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<number>0[xX][0-9a-fA-F]+\w*|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\w*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<sign>::|->|\+\+|--|<<=|>>=|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\#\#|[^\s\w])""",
    re.S | re.X,
)
DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)(.*)$")
FLOAT = re.compile(r"^(?!0[xX])(?=.*[.eE])")

SPACES = {"device", "constant", "threadgroup", "thread"}
SCALARS = set("float half bfloat int uint short ushort char uchar bool long ulong".split())
VECTORS = {f"{t}{n}" for t in SCALARS - {"bool", "bfloat", "long", "ulong"} for n in (2, 3, 4)}
MATRICES = {"simdgroup_matrix", "simdgroup_float8x8"}
TYPES = SCALARS | VECTORS | MATRICES | {"vec", "void"}
TEMPLATES = {"vec", "simdgroup_matrix", "reinterpret_cast", "static_cast", "as_type", "make_filled_simdgroup_matrix"}
KEYWORDS = set(
    "if else for while return break continue const constexpr inline template typename struct kernel sizeof true false"
    " static_assert using namespace nullptr reinterpret_cast static_cast".split()
)
# Every other word of C++ is refused, among them those that Metal knows in part: lambdas, static locals, goto, virtual.
OTHER_KEYWORDS = set(
    "alignas alignof and asm atomic auto catch class co_await co_return co_yield concept const_cast consteval constinit"
    " decltype default delete do double dynamic_cast enum explicit export extern friend goto long_long mutable new"
    " noexcept not operator or override private protected public register requires signed static switch case this"
    " thread_local throw try typedef typeid union unsigned virtual volatile wchar_t xor size_t ptrdiff_t"
    " function_constant texture1d texture2d texture3d sampler array visible intersection vertex fragment".split()
)
FUNCTIONS = set(
    "exp2 exp log log2 tanh fabs fmin fmax min max clamp select fma isnan isinf mulhi as_type floor rsqrt"
    " threadgroup_barrier simdgroup_barrier simd_shuffle_xor simd_sum simd_max simd_min simd_any simd_all"
    " simd_broadcast make_filled_simdgroup_matrix simdgroup_multiply_accumulate simdgroup_multiply".split()
)
METHODS = {"thread_elements"}
SCOPES = {
    "metal": FUNCTIONS | TYPES | {"precise", "fast"},
    "precise": {"exp2", "exp", "log", "log2", "tanh", "rsqrt"},
    "fast": {"exp2", "exp", "log", "log2", "tanh", "rsqrt"},
    "mem_flags": {"mem_none", "mem_threadgroup", "mem_device"},
}
# Names that Metal's library declares, so that a call of an own function of that name may be ambiguous there.
TAKEN = FUNCTIONS | set(
    "abs absdiff access acos acosh address addsat all any asin asinh atan atan2 atanh bias c ceil clz component coord"
    " copysign cos cosh cospi cross ctz degrees depth determinant distance distance_squared divide dot exp10"
    " extract_bits fabs faceforward fdim filter fmax3 fmin3 fmod fract frexp gradient2d hadd hypot ilogb insert_bits"
    " int_downsample is_null_texture isfinite isnormal isordered isunordered ldexp length length_squared level lgamma"
    " log10 mad24 madhi madsat matrix max3 med3 median3 memory_order mesh min3 min_lod_clamp mix mod modf move mul24"
    " nan nextafter normalize numeric_limits object ordered_max ordered_min patch popcount pow powr precise quad_any"
    " radians reflect refract remainder reverse_bits rhadd rint rotate round sampler saturate scalbn sign signbit sin"
    " sincos sinh sinpi size smoothstep sqrt step subsat swap tan tanpi tgamma transpose trunc uniform unpack".split()
)
ATTRIBUTES = set(
    "buffer threadgroup_position_in_grid simdgroup_index_in_threadgroup thread_index_in_simdgroup"
    " thread_index_in_threadgroup max_total_threads_per_threadgroup".split()
)
DIRECTIVES = {"include", "define", "if", "else", "elif", "endif", "pragma", "undef"}
HEADERS = {"<metal_stdlib>", "<metal_simdgroup>", "<metal_simdgroup_matrix>"}
PRAGMAS = re.compile(r"unroll|clang loop unroll\((full|enable|disable)\)")
MACRO = re.compile(r"[A-Z][A-Z0-9_]*$")  # of the specialisation; INFINITY and NAN too


class Token(NamedTuple):
    kind: str
    text: str
    line: int


def tokens_of(text: str) -> tuple[list[Token], list[str]]:
    """The tokens outside of comments and directives, and what is wrong with the directives."""
    found, wrong, plain = [], [], []
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    for number, line in enumerate(text.split("\n"), 1):
        match = DIRECTIVE.match(line)
        if match:
            wrong += [f"line {number}: {reason}" for reason in directive(match[1], match[2].split("//")[0].strip())]
            line = " ".join(match[2].split("//")[0].split()[1:]) if match[1] == "define" else ""
            line = re.sub(r'_Pragma\("([^"]*)"\)', "", line)
        plain.append(line)
    line = 1
    for match in TOKEN.finditer(text := "\n".join(plain)):
        if match.lastgroup != "comment":
            line = text.count("\n", 0, match.start()) + 1
            found.append(Token(match.lastgroup, match[0], line))
    return found, wrong


def directive(name: str, rest: str) -> list[str]:
    if name not in DIRECTIVES:
        return [f"the directive #{name}"]
    if name == "include" and rest not in HEADERS:
        return [f"the header {rest}"]
    if name == "pragma" and not PRAGMAS.fullmatch(rest):
        return [f"#pragma {rest}"]
    pragma = re.search(r'_Pragma\("([^"]*)"\)', rest)
    if name == "define" and pragma and not PRAGMAS.fullmatch(pragma[1]):
        return [f"_Pragma {pragma[1]}"]
    return []


class Declared(NamedTuple):
    functions: set[str]
    types: set[str]
    templates: set[str]

    @classmethod
    def by(cls, tokens: list[Token], beside: list[Token]) -> Declared:
        """What texts declare: structs and template types; functions are names behind a type that have a parameter
        list and are not inside of a function's body."""
        tokens = [*beside, *tokens]
        functions, templates = set(), set()
        types = {b.text for a, b in pairwise(tokens) if a.text in ("struct", "typename")}
        depths, template = Depths(), False
        for i, token in enumerate(tokens):
            inside = depths.in_function
            depths.see(tokens, i)
            template = template or token.text == "template"
            if token.text in ("{", ";"):
                template = False
            if inside or token.kind != "name" or i + 1 >= len(tokens) or tokens[i + 1].text != "(":
                continue
            before = tokens[i - 1].text if i else ""
            if before in TYPES | types | {">", "*", "&"} or MACRO.match(before):
                functions.add(token.text)
                if template:
                    templates.add(token.text)
        return cls(functions, types, templates | types)


class Depths:
    """Where in the braces a token is."""

    def __init__(self):
        self.stack: list[str] = []

    @property
    def in_function(self) -> bool:
        return "function" in self.stack

    def see(self, tokens: list[Token], i: int) -> None:
        text = tokens[i].text
        if text == "{":
            before = tokens[i - 1].text if i else ""
            opens = before == ")" or (before == "const" and tokens[i - 2].text == ")")
            self.stack.append("function" if opens and not self.in_function else "other")
        elif text == "}" and self.stack:
            self.stack.pop()


def violations(text: str, beside: str = "") -> list[str]:
    """What of the text the kernels may not use, each with its line. `beside` is text whose names it may use."""
    tokens, found = tokens_of(text)
    others, _ = tokens_of(beside)
    declared = Declared.by(tokens, others)
    for check in (
        words,
        literals,
        scopes,
        calls,
        lambdas,
        pointers,
        array_parameters,
        attributes,
        threadgroup_arrays,
        names,
    ):
        found += [f"line {token.line}: {reason}" for token, reason in check(tokens, declared)]
    found += [f"line {line}: {reason}" for line, reason in recursion(tokens, declared)]
    return sorted(set(found), key=lambda reason: int(reason.split()[1].rstrip(":")))


def words(tokens, declared):
    for token in tokens:
        if token.text in OTHER_KEYWORDS or token.text.startswith(("atomic_", "texture", "__")):
            yield token, f"the word {token.text}"
        if token.kind == "string":
            yield token, f"the string {token.text}"


def literals(tokens, declared):
    for token in tokens:
        if token.kind == "number" and FLOAT.match(token.text) and not token.text.endswith("f"):
            yield token, f"the literal {token.text}, wanted one that ends in f"


def scopes(tokens, declared):
    for before, sign, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if sign.text == "::" and after.text not in SCOPES.get(before.text, ()):
            yield sign, f"{before.text}::{after.text}"


def closing_angle(tokens, i) -> int:
    """Where the template arguments end that begin at `i`, or -1."""
    depth = 0
    for k in range(i, min(len(tokens), i + 64)):
        text = tokens[k].text
        if text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return k
        elif text in (";", "{", "}"):
            return -1
    return -1


def is_type(text: str, declared: Declared) -> bool:
    return text in TYPES or text in declared.types or text.endswith("ELEMENT")


def calls(tokens, declared):
    known = FUNCTIONS | TYPES | KEYWORDS | ATTRIBUTES | declared.functions | declared.types
    for i, token in enumerate(tokens[:-1]):
        if token.kind != "name":
            continue
        after = i + 1
        if tokens[after].text == "<" and (token.text in TEMPLATES or token.text in declared.templates):
            after = closing_angle(tokens, after) + 1
        if after <= 0 or tokens[after].text != "(" or MACRO.match(token.text):
            continue
        before = tokens[i - 1].text if i else ""
        if before in (".", "->"):
            if token.text not in METHODS | declared.functions:
                yield token, f"the method {token.text}"
        elif before != "::" and not is_type(before, declared) and token.text not in known:
            yield token, f"the function {token.text}"


def lambdas(tokens, declared):
    for before, bracket, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        operand = before.kind in ("name", "number") and before.text not in ("return", "kernel")
        if bracket.text != "[" or "[" in (before.text, after.text) or operand or before.text in (")", "]", ">"):
            continue
        yield bracket, "a lambda"


def pointers(tokens, declared):
    """Every pointer and reference to a type names the address space of what it points to."""
    for i, token in enumerate(tokens):
        if token.text not in ("*", "&", "&&") or not i:
            continue
        k = i - 1
        while tokens[k].text == "const":
            k -= 1
        if tokens[k].text == ">":
            k = opening_angle(tokens, k) - 1
            if k < 0 or tokens[k].text not in TEMPLATES | declared.types:
                continue
        if not is_type(tokens[k].text, declared):
            continue
        if tokens[k - 1].text in (".", "->", "::"):
            continue
        specifiers = set()
        while k >= 0 and (tokens[k].kind == "name" or tokens[k].text == "::"):
            specifiers.add(tokens[k].text)
            k -= 1
        if not specifiers & SPACES:
            yield token, f"a pointer or reference without an address space: {' '.join(sorted(specifiers))}{token.text}"
        if token.text == "&&":
            yield token, "a reference to an rvalue"


def opening_angle(tokens, i) -> int:
    depth = 0
    for k in range(i, max(-1, i - 64), -1):
        depth += (tokens[k].text == ">") - (tokens[k].text == "<")
        if depth == 0:
            return k
        if tokens[k].text in (";", "{", "}"):
            return -1
    return -1


def array_parameters(tokens, declared):
    """`float x[4]` as a parameter is a pointer without an address space."""
    depths = Depths()
    for i, token in enumerate(tokens):
        inside = depths.in_function
        depths.see(tokens, i)
        if inside or token.text not in declared.functions or tokens[i + 1].text != "(":
            continue
        depth = 0
        for k in range(i + 1, len(tokens)):
            depth += (tokens[k].text == "(") - (tokens[k].text == ")")
            if depth == 0:
                break
            plain = tokens[k].text == "[" and "[" not in (tokens[k + 1].text, tokens[k - 1].text)
            if plain and tokens[k - 1].kind == "name":
                yield tokens[k], f"the parameter {tokens[k - 1].text} is an array"


def attributes(tokens, declared):
    for i in range(len(tokens) - 2):
        if tokens[i].text == "[" and tokens[i + 1].text == "[" and tokens[i + 2].text not in ATTRIBUTES:
            yield tokens[i], f"the attribute {tokens[i + 2].text}"


def threadgroup_arrays(tokens, declared):
    """Threadgroup memory is arrays of numbers, declared in a kernel and not in one of its blocks."""
    depth, kernel, wants_body = 0, False, False
    for i, token in enumerate(tokens):
        wants_body = wants_body or token.text == "kernel"
        if token.text == "{":
            kernel, wants_body = (wants_body, False) if depth == 0 else (kernel, wants_body)
            depth += 1
        depth -= token.text == "}"
        if token.text != "threadgroup" or i == 0 or tokens[i - 1].text not in (";", "{", "}"):
            continue
        end = next((k for k in range(i, len(tokens)) if tokens[k].text in (";", "=", "[", "*", "&")), i)
        if tokens[end].text in ("*", "&"):
            continue
        element = tokens[i + 1].text
        if tokens[end].text != "[":
            yield token, "threadgroup memory that is no array"
        if element not in SCALARS | VECTORS and not element.endswith("ELEMENT"):
            yield token, f"a threadgroup array of {element}"
        if depth != 1 or not kernel:
            yield token, "a threadgroup array that is not at the top of a kernel"


def names(tokens, declared):
    """Functions and structs do not have names of Metal's own."""
    depths = Depths()
    for i, token in enumerate(tokens[:-1]):
        inside = depths.in_function
        depths.see(tokens, i)
        is_function = not inside and token.text in declared.functions and tokens[i + 1].text == "("
        is_struct = i and tokens[i - 1].text == "struct"
        if token.text in TAKEN and (is_function or is_struct):
            yield token, f"the name {token.text}, which is Metal's"


def recursion(tokens, declared):
    """Functions that reach themselves, with the line of each."""
    called: dict[str, set[str]] = {}
    lines: dict[str, int] = {}
    depths, current = Depths(), ""
    for i, token in enumerate(tokens):
        inside = depths.in_function
        depths.see(tokens, i)
        if token.text not in declared.functions:
            continue
        if not inside:
            current = token.text
            lines.setdefault(current, token.line)
        elif current:
            called.setdefault(current, set()).add(token.text)
    for name, line in lines.items():
        seen, todo = set(), list(called.get(name, ()))
        while todo:
            other = todo.pop()
            if other not in seen:
                seen.add(other)
                todo += called.get(other, ())
        if name in seen:
            yield line, f"{name} calls itself"
