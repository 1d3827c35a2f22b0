"""Every private part of torch that this package uses: what it is for, and what is done in a torch that has it not.

Nothing else imports names of torch that begin with an underscore, but for what `bench` times beside ours. Seen in torch
2.10, 2.11, 2.13 and 2.15; `ABSENT` holds the names that the running torch lacks, which `sdpa info` lists. Without them
calls are slower, and never wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.autograd import forward_ad as forward_ad  # noqa: PLC0414
from torch.overrides import has_torch_function

ABSENT: list[str] = []


def part(path: str, instead: Any) -> Any:
    """The object at `path`, or `instead` where the running torch does not have it."""
    module, _, name = path.rpartition(".")
    while module:
        try:
            found = import_module(module)
            break
        except ImportError:
            module, _, head = module.rpartition(".")
            name = f"{head}.{name}"
    try:
        for attribute in name.split("."):
            found = getattr(found, attribute)
    except AttributeError:
        ABSENT.append(path)
        return instead
    return found


def needed(path: str) -> Any:
    """The object at `path`, without which calls would be wrong: an ImportError where the running torch has it not."""
    found = part(path, ABSENT)
    if found is ABSENT:
        ABSENT.remove(path)
        raise ImportError(f"sdpa needs {path}, which torch {torch.__version__} does not have.")
    return found


def zero() -> int:
    return 0


def never(*_: object) -> bool:
    return False


# Recognises tensors by type, dispatch keys, dtype, device, sizes, strides and requires_grad in one call. Absent: calls
# are found by a key of these, which takes three times as long.
TensorGuards = part("torch._C._dynamo.guards.TensorGuards", None)

# torch's process-wide switches. Each has a public getter that takes four times as long, which stands in its stead.
flash_enabled = part("torch._C._get_flash_sdp_enabled", torch.backends.cuda.flash_sdp_enabled)
efficient_enabled = part("torch._C._get_mem_efficient_sdp_enabled", torch.backends.cuda.mem_efficient_sdp_enabled)
math_enabled = part("torch._C._get_math_sdp_enabled", torch.backends.cuda.math_sdp_enabled)
cudnn_enabled = part("torch._C._get_cudnn_sdp_enabled", torch.backends.cuda.cudnn_sdp_enabled)
deterministic = torch.are_deterministic_algorithms_enabled


def precision_by_name() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


# How float32 may be multiplied, by whichever of torch's switches it was said: torch.get_float32_matmul_precision
# raises where one of the newer ones (`fp32_precision`) was used. Absent: the older switch alone.
_precision = part("torch._C._get_fp32_precision_getter", None)
float32_precision: Callable[[], str] = partial(_precision, "cuda", "matmul") if _precision else precision_by_name

# Whether a function mode stands between a call and the kernels: it wants to see calls with any argument.
function_modes: Callable[[], int] = partial(has_torch_function, (None,))
# How many dispatch modes do, and which. Absent: one sees what a kernel calls instead of the operator.
dispatch_modes: Callable[[], int] = part("torch._C._len_torch_dispatch_stack", zero)
dispatch_mode_stack = part("torch.utils._python_dispatch._get_current_dispatch_mode_stack", list)
TRACERS = frozenset({"FakeTensorMode", "ProxyTorchDispatchMode"})  # by name, since their modules take long to import


def mode_traces() -> bool:
    """Whether a dispatch mode stands for tensors without values, or writes down what is called."""
    return any(kind.__name__ in TRACERS for mode in dispatch_mode_stack() for kind in type(mode).__mro__)


def is_exporting() -> bool:
    """Whether operations are recorded by name, for tools that may know few of them; also in other threads' exports."""
    if torch.compiler.is_exporting() or torch.compiler.is_dynamo_compiling():
        return torch.compiler.is_exporting()
    return torch.jit.is_tracing() or (dispatch_modes() > 0 and mode_traces())


# functorch's levels, the innermost last; None where there is none. Needed: transforms would be answered wrongly.
get_interpreter_stack = needed("torch._C._functorch.get_interpreter_stack")
enable_single_level_autograd_function = needed("torch._functorch.utils.enable_single_level_autograd_function")


def peek_interpreter_stack() -> Any:
    """The innermost of functorch's levels, or None."""
    levels = get_interpreter_stack()
    return levels[-1] if levels else None


class TransformTypes:
    """functorch's kinds of levels by name. Their class is that of a level's key: asked for inside of one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(type(peek_interpreter_stack().key()), name)


TransformType = TransformTypes()


def unwrapped(argument: Any) -> Any:
    """An argument without what functorch left around it when a transform ended; outside of all transforms."""
    return torch.func.debug_unwrap(argument) if isinstance(argument, torch.Tensor) else argument


# The level of forward mode, -1 outside of it. Needed: tangents would be lost.
needed("torch.autograd.forward_ad._current_level")


def forward_level() -> int:
    return forward_ad._current_level


# Guards of the dispatcher's state. Needed: operators would call themselves again, or be given another dtype.
below_autograd = needed("torch._C._AutoDispatchBelowAutograd")
without_autocast = needed("torch._C._DisableAutocast")


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """A block without autocast, also where torch.compile traces it."""
    if torch.compiler.is_dynamo_compiling():
        return torch.autocast(device_type, enabled=False)
    return without_autocast()


# Whether autocast is on for any device. Absent: those of the devices that kernels run on are asked.
autocast_is_on: Callable[[], bool] = part(
    "torch._C._is_any_autocast_enabled", lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
)

# Hooks of saved tensors (activation checkpointing). Absent: a call under hooks is taken for one without.
saved_tensors_hooks = part("torch._C._autograd._top_saved_tensors_default_hooks", lambda _: None)

# Whether a profiler is on, which wants to see operators and names of compositions. Absent: it sees neither.
profiler_enabled: Callable[[], bool] = part("torch.autograd._profiler_enabled", never)

# What generated code writes for an operator. Inductor is imported by who compiles, never here. Absent (torch 2.10):
# generated code calls the operators.
CODEGEN = "torch._inductor.codegen.custom_extern_kernel_codegen"


def inductor_hooks() -> Any:
    """Inductor's module of such hooks where it is there and has been imported, else None."""
    return sys.modules.get(CODEGEN)


# (size, stride, dtype) on a CPU or the current device, as code generated by Inductor has it: a third of the time.
empty_strided_cpu = part(
    "torch._C._dynamo.guards._empty_strided_cpu",
    lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cpu"),
)
empty_strided_cuda = part(
    "torch._C._dynamo.guards._empty_strided_cuda",
    lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"),
)

# The number of a device's current stream. Absent: a launch draws each seed of dropout.
current_stream = part("torch._C._cuda_getCurrentRawStream", None)


def single_level_base() -> Any:
    """`Function` with the `apply` of its own base, which asks functorch nothing: for nodes of eager calls without a
    transform, and at an operator's autograd key, where functorch comes once for each of its levels. From torch 2.14 on
    `Function.apply` asks in C++, by the class."""
    own = {name: value for name, value in vars(torch.autograd.Function).items() if not name.startswith("__")}
    del own["apply"]
    return type("SingleLevelFunction", torch.autograd.Function.__bases__, own)


SingleLevelFunction: Any = single_level_base()


def single_level(function: type[torch.autograd.Function]) -> type:
    """The same derivative as a class of that base."""
    names = ("forward", "setup_context", "backward", "jvp")
    methods = {name: staticmethod(getattr(function, name)) for name in names}
    return type(function.__name__, (SingleLevelFunction,), methods)


def current_trace() -> Any:
    """What belongs to the one trace of Dynamo's in this thread. Needed, but Dynamo is imported by who compiles: a
    with-block inside of a compiled function would hold for another."""
    return needed("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx")().output


def inside_torchs_block() -> bool:
    """Dynamo keeps for each open with-block what undoes it, should the trace end there."""
    hooks = getattr(current_trace(), "cleanup_hooks", ())  # another release may have none
    undoing = [getattr(getattr(hook, "__self__", None), "cleanup_fn", None) for hook in hooks]
    return any("SDPAKernel" in getattr(function, "__qualname__", "") for function in undoing)


# torch's context_parallel (prototype) puts a function of its module in the place of torch's, which it was, and lets
# DTensors of the operators that it serves be handled by itself. Absent: there is no such block.
TORCHS: Callable[..., Any] = torch.nn.functional.scaled_dot_product_attention
DISTRIBUTED = "torch.distributed."


def is_sharded() -> bool:
    """Whether this is inside of torch's context_parallel, where tensors are one rank's shards of a sequence."""
    now = torch.nn.functional.scaled_dot_product_attention
    return now is not TORCHS and str(getattr(now, "__module__", "")).startswith(DISTRIBUTED)


def compiler_is_imported() -> bool:
    """Whether torch's compiler is, which takes seconds to import."""
    return "torch._dynamo" in sys.modules


def distributed_tensors() -> Any:
    """The module of DTensors, or None where it has not been imported."""
    return sys.modules.get("torch.distributed.tensor")


def is_distributed(tensor: object) -> bool:
    module = distributed_tensors()
    return module is not None and isinstance(tensor, module.DTensor)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """As torch's, which leaves the switch off where a program had it on."""
    dispatcher = getattr(distributed_tensors().DTensor, "_op_dispatcher", None)
    before = getattr(dispatcher, "_allow_implicit_replication", False)
    try:
        if dispatcher is not None:
            dispatcher._allow_implicit_replication = True
        yield
    finally:
        if dispatcher is not None:
            dispatcher._allow_implicit_replication = before


def handles_attention() -> bool:
    """Whether torch's context_parallel answers for DTensors of torch's own kernels now."""
    module = distributed_tensors()
    handlers = getattr(getattr(module and module.DTensor, "_op_dispatcher", None), "_custom_op_handlers", {})
    return any("scaled_dot_product" in str(operator) for operator in handlers)


# How types become pytrees. Absent: torch.export and torch.func take no Mask.
pytree = part("torch.utils._pytree", None)


def register_pytree(kind: type, flatten: Callable[..., Any], build: Callable[..., Any], **options: Any) -> None:
    """`register_pytree_node` for a type whose `flatten_with_keys_fn` returns the names of its fields as keys."""
    if pytree is None:
        return
    if by_name := options.get("flatten_with_keys_fn"):

        def with_keys(tree: Any) -> tuple[list[Any], Any]:
            named, context = by_name(tree)
            return [(pytree.GetAttrKey(name), value) for name, value in named], context

        options["flatten_with_keys_fn"] = with_keys
    pytree.register_pytree_node(kind, flatten, build, **options)


# Which functions torch.jit.script knows as operators. Absent: it tries to compile ours, and says what it cannot.
jit_builtins = part("torch.jit._builtins", None)


def name_for_scripts(function: Callable[..., Any], operator: str) -> None:
    """torch.jit.script, which looks functions up by identity, calls the operator where it finds the function."""
    known, table = getattr(jit_builtins, "_builtin_ops", None), getattr(jit_builtins, "_builtin_table", None)
    if isinstance(known, list):
        known.append((function, operator))  # of which the table is made when it is first asked for
    if isinstance(table, dict):
        table[id(function)] = operator


def constant(function: Any) -> Any:
    """As torch.compiler.assume_constant_result, which imports the compiler: Dynamo looks for this attribute."""
    function._dynamo_marked_constant = True
    return function


def inductor_pass() -> tuple[Any, type]:
    """(Inductor's settings, the class of passes that its cache knows). Imports Inductor, as compiling does. Needed: by
    who installs a pass, who hears that it is not there."""
    names = ("torch._inductor.config", "torch._inductor.custom_graph_pass")
    try:
        config, passes = map(import_module, names)
        found: tuple[Any, type] = config, passes.CustomGraphPass
        assert hasattr(config, "pre_grad_custom_pass")
    except (ImportError, AttributeError, AssertionError):
        raise RuntimeError(
            "install(patterns=True) needs torch._inductor.config.pre_grad_custom_pass, which torch "
            f"{torch.__version__} does not have."
        ) from None
    return found
