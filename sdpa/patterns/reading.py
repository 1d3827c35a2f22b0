"""What a node of a graph says: which of torch's functions, of which tensors, and who reads its result.

Graphs are those that Dynamo hands to Inductor: calls of torch's functions and methods, not yet functional, so that a
node may write into a tensor. An exported program's, of operators of torch.ops.aten, are read by the same names.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

Shape = tuple[Any, ...]  # of int and SymInt

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
# Our name of a function: the names torch has for it, as a method, in torch, in F, in torch.special and torch.ops.aten.
SPELLINGS = {
    "add": ("add",),
    "sub": ("sub", "subtract"),
    "mul": ("mul", "multiply"),
    "div": ("div", "divide", "true_divide"),
    "matmul": ("matmul",),
    "bmm": ("bmm",),
    "baddbmm": ("baddbmm",),
    "einsum": ("einsum",),
    "softmax": ("softmax", "_safe_softmax"),
    "dropout": ("dropout",),
    "tanh": ("tanh",),
    "masked_fill": ("masked_fill",),
    "where": ("where",),
    "transpose": ("transpose", "swapaxes", "swapdims"),
    "permute": ("permute",),
    "view": ("view", "reshape", "_unsafe_view"),
    "flatten": ("flatten",),
    "linear": ("linear",),
    "contiguous": ("contiguous", "clone"),
    "cast": ("to", "float", "half", "bfloat16", "type", "type_as", "_to_copy"),
    "expand": ("expand", "expand_as", "broadcast_to"),
    "unsqueeze": ("unsqueeze",),
    "repeat_interleave": ("repeat_interleave",),
    "full": ("full", "full_like"),
    "tensor": ("tensor",),
    "sqrt": ("sqrt",),
    "attention": ("scaled_dot_product_attention",),
}
BY_SPELLING = {spelling: name for name, spellings in SPELLINGS.items() for spelling in spellings}
OPERATORS = {
    "add": (operator.add, operator.iadd),
    "sub": (operator.sub, operator.isub),
    "mul": (operator.mul, operator.imul),
    "div": (operator.truediv, operator.itruediv),
    "matmul": (operator.matmul, operator.imatmul),
    "getitem": (operator.getitem,),
    "getattr": (getattr,),
}
ARITHMETIC = "add and concat floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
WRITING_OPERATORS = (operator.setitem, operator.delitem, *(getattr(operator, f"i{name}") for name in ARITHMETIC))
NAMESPACES = (torch, F, torch.special)
OVERLOAD: Any = type(torch.ops.aten.add.Tensor)
# What changes a tensor itself instead of its numbers: views that were taken of it before do not follow.
CHANGES = (
    "transpose_",
    "swapaxes_",
    "swapdims_",
    "t_",
    "squeeze_",
    "unsqueeze_",
    "as_strided_",
    "resize_",
    "resize_as_",
    "set_",
    "detach_",
)


def functions() -> dict[Any, str]:
    """Our names by torch's functions."""
    found: dict[Any, str] = {function: name for name, group in OPERATORS.items() for function in group}
    for spelling, name in BY_SPELLING.items():
        for written in (spelling, f"{spelling}_"):
            for space in NAMESPACES:
                function = getattr(space, written, None)
                if function is not None:
                    found[function] = name
            if hasattr(torch.ops.aten, written):
                found[getattr(torch.ops.aten, written)] = name
    return found


FUNCTIONS = functions()


def name_of(node: object) -> str:
    """Our name of the function that a node calls, "" where it is none that we know."""
    if not isinstance(node, Node):
        return ""
    if node.op == "call_method":
        method = str(node.target)
        return BY_SPELLING.get(method) or BY_SPELLING.get(method.removesuffix("_"), "")
    if node.op != "call_function":
        return ""
    target = node.target
    if isinstance(target, OVERLOAD):
        target = target.overloadpacket
    try:
        return FUNCTIONS.get(target, "")
    except TypeError:  # no hash
        return ""


def spelling_of(node: Node) -> str:
    """torch's name of the function that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").partition(".")[0]


def argument(node: Node, position: int, *names: str, default: Any = None) -> Any:
    """An argument by position or by one of its names."""
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def operands(node: Node) -> tuple[Any, Any]:
    """The two operands of a function such as add."""
    first = argument(node, 0, "input", "self")
    return first, argument(node, 1, "other", "mat2", "tensor2")


def tensor_of(node: object) -> Tensor | None:
    """The fake tensor that a node stands for; None for anything else, subclasses that wrap others among it."""
    meta = node.meta if isinstance(node, Node) else {}
    found = meta.get("example_value", meta.get("val"))
    if not isinstance(found, Tensor) or hasattr(found, "__tensor_flatten__"):
        return None
    return found if found.layout == torch.strided and not found.is_nested else None


def shape_of(node: object) -> Shape:
    tensor = tensor_of(node)
    return () if tensor is None else tuple(tensor.shape)


def dtype_of(node: object) -> torch.dtype | None:
    tensor = tensor_of(node)
    return None if tensor is None else tensor.dtype


def equal(left: Any, right: Any) -> bool:
    """Whether two sizes are the same for every size that a symbol may have, without a new guard."""
    return bool(statically_known_true(left == right))


def same_shape(left: Shape, right: Shape) -> bool:
    return len(left) == len(right) and all(map(equal, left, right))


def broadcasts(shape: Shape, full: Shape) -> bool:
    """Whether a tensor of this shape fits another of shape `full`, aligned right, and leaves its shape alone."""
    if len(shape) > len(full):
        return False
    return all(equal(own, 1) or equal(own, size) for own, size in zip(shape[::-1], full[::-1], strict=False))


def number_of(value: object, any_shape: bool = False) -> float | None:
    """A number, or what a node holds that makes a tensor of one number, of no dimensions unless `any_shape`."""
    if isinstance(value, (bool, complex)):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Node):
        return None
    symbol = value.meta.get("example_value", value.meta.get("val"))
    if isinstance(symbol, (torch.SymFloat, torch.SymInt)):
        return float(symbol)  # a guard: as a scale that users give is one, which their sizes imply
    name = name_of(value)
    if tensor_of(value) is None or (shape_of(value) != () and not any_shape):
        return None
    if name == "sqrt":
        inner = number_of(argument(value, 0, "input", "self"))
        return None if inner is None or inner < 0 else math.sqrt(inner)
    if name == "full":
        return number_of(argument(value, 1, "fill_value"))
    return number_of(argument(value, 0, "data")) if name == "tensor" else None


# -- who writes ----------------------------------------------------------------------------------------


def inplace_argument(node: Node) -> bool:
    """Whether one of torch's functions is called with inplace=True."""
    if node.kwargs.get("inplace"):
        return True
    if getattr(F, getattr(node.target, "__name__", ""), None) is not node.target or True not in node.args:
        return False
    try:
        names = list(inspect.signature(node.target).parameters)
    except (TypeError, ValueError):  # a function in C++, none of which has such an argument
        return False
    return "inplace" in names and bool(argument(node, names.index("inplace")))


def writes(node: Node) -> bool:
    """Whether a node writes into one of its arguments."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    if isinstance(node.target, OVERLOAD):
        return node.target._schema.is_mutable
    if node.target in WRITING_OPERATORS or "out" in node.kwargs:
        return True
    return getattr(node.target, "__name__", "").endswith("_") or inplace_argument(node)


def leaves_of(value: object) -> Iterator[object]:
    """What lists, tuples and dicts hold, however deep."""
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves_of(part)
    else:
        yield value


def written_by(node: Node) -> list[Node]:
    """The arguments that a node may write into: all those of a function that is not known."""
    if is_plain(node):
        return []
    known = node.op == "call_method" or (writes(node) and not isinstance(node.target, OVERLOAD))
    given = (node.args[:1], {name: node.kwargs.get(name) for name in ("input", "self", "out")})
    return [leaf for leaf in leaves_of(given if known else (node.args, node.kwargs)) if isinstance(leaf, Node)]


def changes_tensors(graph: Graph) -> bool:
    return any(writes(node) and spelling_of(node) in CHANGES for node in graph.nodes)


HIDDEN = ("register_", "__")


def is_operators(method: str) -> bool:
    """Whether a method is one of Python's operators and writes nothing: torch 2.10 has `__eq__` in graphs for ==."""
    function = vars(operator).get(method) if method.startswith("__") else None
    return function is not None and function not in WRITING_OPERATORS


def is_plain(node: Node) -> bool:
    """Whether a node only computes a result: no change of modes, no function of functions, nothing of functorch's."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if writes(node) or node.op not in ("call_function", "call_method"):
        return False
    target: Any = node.target
    if node.op == "call_method":
        return callable(getattr(Tensor, target, None)) and (is_operators(target) or not target.startswith(HIDDEN))
    if isinstance(target, OVERLOAD) or getattr(operator, getattr(target, "__name__", ""), None) is target:
        return True
    spaces = (*NAMESPACES, torch.functional, torch.linalg)
    name = getattr(target, "__name__", "")
    return target in FUNCTIONS or any(getattr(space, name, None) is target for space in spaces)


def is_transformed(graph: Graph) -> bool:
    """Whether functorch's transforms are in a graph: tensors have fewer dimensions there than they are made of."""
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    return any("functorch" in (getattr(target, "__module__", None) or "") for target in targets)


def drop_unread(graph: Graph) -> None:
    """Take out what only computes a result that nobody reads, such as weights that are averaged and thrown away."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or not is_plain(node))


# -- whose memory ----------------------------------------------------------------------------------------------------


def memory_of(node: Node) -> set[int]:
    """The memory that a node's fake tensors are views of."""
    leaves = leaves_of(node.meta.get("example_value", node.meta.get("val")))
    return {t.untyped_storage()._cdata for t in leaves if isinstance(t, Tensor) and t.layout == torch.strided}


# What is a view or a copy, as its argument lies in memory.
MAYBE_VIEWS = ("reshape", "flatten", "contiguous")


def overwritten_behind(out: Node, others: list[Node]) -> Node | None:
    """A node behind `out` that may write into `out` or one of the others, or a view of these."""
    result = memory_of(out)
    rest = set().union(*map(memory_of, others))
    for node in nodes_behind(out):
        if any(memory_of(target) & (result | rest) for target in written_by(node)):
            return node
        if spelling_of(node) in MAYBE_VIEWS and any(memory_of(given) & result for given in node.all_input_nodes):
            result |= memory_of(node)  # whether `out` will lie in memory as it does now is not known yet
    return None


def nodes_behind(node: Node) -> Iterator[Node]:
    while (node := node.next).op != "root":
        yield node


# -- who reads -------------------------------------------------------------------------------------------------------

# Functions that ask one of their arguments for its sizes and its dtype alone, and which.
LOOKS = {"expand_as": 1, "view_as": 1, "reshape_as": 1, "type_as": 1, "zeros_like": 0, "ones_like": 0, "full_like": 0}


def looks(reader: Node, node: Node) -> bool:
    """Whether a reader asks for a node's form alone, for which nothing is computed in the end."""
    target = reader.target if isinstance(reader.target, str) else getattr(reader.target, "__name__", "")
    place = LOOKS.get(target)
    if place is None or len(reader.args) <= place or reader.args[place] is not node:
        return False
    return reader.all_input_nodes.count(node) == 1 and reader.args.count(node) == 1


def readers(node: Node) -> list[Node]:
    """Who reads the numbers that a node computes."""
    return [user for user in node.users if not looks(user, node)]


def only_reader(node: Node) -> Node | None:
    found = readers(node)
    return found[0] if len(found) == 1 else None


def settle_writes(graph: Graph) -> None:
    """Whoever reads a tensor after one of the functions known here wrote into it reads that function's result, which is
    the same tensor: `scores.masked_fill_(mask, value)` as a statement then stands in the chain of what is computed."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        target = (
            argument(node, 0, "input", "self") if node.op == "call_method" and name_of(node) and writes(node) else 0
        )
        if isinstance(target, Node) and same_shape(shape_of(target), shape_of(node)):
            target.replace_all_uses_with(node, delete_user_cb=after(order, node))


def after(order: dict[Node, int], node: Node) -> Callable[[Node], bool]:
    return lambda user: order[user] > order[node]


def between(first: Node, last: Node) -> Iterator[Node]:
    """The nodes behind `first` and in front of `last`."""
    node = first.next
    while node is not last and node.op != "root":
        yield node
        node = node.next
