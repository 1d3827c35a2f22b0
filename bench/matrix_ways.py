"""Ways of running a call for the matrix (sdpa.bench.matrix), each compared with operations of torch's in float64."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import sdpa
from sdpa.bench.cpp_program import SEED, Refused, run_package
from sdpa.bench.matrix_kinds import Calling, Kind

CLOSE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-9}  # float64 sums in another order, also of second derivatives
SINGLE = {"rtol": 1e-4, "atol": 1e-5}  # where a runtime computes in float32
HALF = {"rtol": 3e-2, "atol": 3e-2}  # bfloat16 has 8 bits
Way = Callable[[Kind], "str | None"]
Run = Callable[..., object]


class Wrong(Exception):
    """Other numbers than those expected."""


def flat(results: object) -> list[Tensor]:
    return [r for r in torch.utils._pytree.tree_leaves(results) if isinstance(r, Tensor)]


def compare(found: Any, expected: Any, close: dict[str, Any] = CLOSE) -> None:
    found, expected = flat(found), flat(expected)
    if len(found) != len(expected):
        raise Wrong(f"{len(found)} results instead of {len(expected)}")
    for a, b in zip(found, expected, strict=True):
        try:
            torch.testing.assert_close(a.double(), b.double(), **close)
        except AssertionError as error:
            raise Wrong(" ".join(str(error).split())[:160]) from None


def total(numbers: Iterable[Tensor]) -> Any:
    return sum(numbers)


def loss(results: object) -> Tensor:
    """A number of all results, with other weights for each element."""
    parts = ((r * torch.linspace(-1, 2, r.numel(), dtype=r.dtype).view(r.shape)).sum() for r in flat(results))
    return total(parts)


def leaves(kind: Kind) -> tuple[Tensor, ...]:
    return tuple(t.clone().requires_grad_(n < kind.learn) for n, t in enumerate(kind.tensors))


def seeded(run: Run, *args: object) -> Any:
    torch.manual_seed(3)
    return run(*args)


def expected(run: Run, *args: object) -> Any:
    """What `run` gives where operations of torch's answer."""
    with sdpa.decomposed():
        return seeded(run, *args)


def without_gradients(kind: Kind) -> bool:
    """Whether the call refuses inputs that learn; so does every way then that needs them."""
    try:
        Calling(kind)(*leaves(kind))
    except RuntimeError as error:
        return "requires a gradient" in str(error) or "require a gradient" in str(error)
    return False


def gradients(run: Run, kind: Kind) -> list[Tensor]:
    """Results, and gradients of what learns."""
    tensors = leaves(kind)
    results = run(*tensors)
    learning = [*tensors[: kind.learn], *(kind.module.parameters() if kind.module else ())]
    return [*flat(results), *torch.autograd.grad(loss(results), learning, materialize_grads=True)]


def learned(run: Run, kind: Kind, close: dict[str, Any] = CLOSE) -> None:
    """Results without gradients; with them, unless the call has none."""
    with torch.no_grad():
        compare(seeded(run, *kind.tensors), expected(Calling(kind), *kind.tensors), close)
    if not without_gradients(kind):
        compare(seeded(gradients, run, kind), expected(gradients, Calling(kind), kind), close)


def eager(kind: Kind) -> None:
    for _ in range(3):  # the later ones from memory
        learned(Calling(kind), kind)


def compiled(kind: Kind) -> None:
    with torch._inductor.config.patch(fallback_random=True):
        learned(torch.compile(Calling(kind), fullgraph=True), kind)


def dynamic(kind: Kind) -> None:
    learned(torch.compile(Calling(kind), fullgraph=True, dynamic=True, backend="aot_eager"), kind)


def saved(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def exported(kind: Kind, strict: bool) -> None:
    with torch.no_grad():
        wanted = expected(Calling(kind), *kind.tensors)
        program = saved(torch.export.export(Calling(kind), kind.tensors, strict=strict))
        compare(seeded(program.module(), *kind.tensors), wanted)
    if not without_gradients(kind):
        program = torch.export.export(Calling(kind), kind.tensors, strict=strict)
        compare(seeded(gradients, program.module(), kind), expected(gradients, Calling(kind), kind))


class Several(torch.nn.Module):
    """Many kinds as one module, because a package takes a minute to make."""

    def __init__(self, calls: list[Calling]) -> None:
        super().__init__()
        self.calls = torch.nn.ModuleList(calls)

    def forward(self, *tensors: tuple[Tensor, ...]) -> list[object]:
        return [call(*given) for call, given in zip(self.calls, tensors, strict=True)]


def packaged(kinds: dict[str, Kind], table: bool) -> dict[str, Callable[[], None]]:
    """Made by AOTInductor and run: what compares each kind; with the table the package knows no operator of ours, as a
    program in C++ wants it."""
    tensors = tuple(kind.tensors for kind in kinds.values())
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        wanted = [expected(Calling(kind), *kind.tensors) for kind in kinds.values()]
        path = package(kinds, table, folder)
        if table and b"sdpa::" in path.read_bytes():
            raise Wrong("the package names an operator of ours")
        found = seeded(torch._inductor.aoti_load_package(str(path)), *tensors)
    return {name: partial(compare, *pair) for name, pair in zip(kinds, zip(found, wanted, strict=True), strict=True)}


def package(kinds: dict[str, Kind], table: bool, folder: str) -> Path:
    tensors = tuple(kind.tensors for kind in kinds.values())
    program = torch.export.export(Several([Calling(kind) for kind in kinds.values()]), tensors)
    if table:
        program = program.run_decompositions(sdpa.decomposition_table())
    with torch._inductor.config.patch({"fallback_random": True, "aot_inductor.compile_wrapper_opt_level": "O0"}):
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "package.pt2"))
    return Path(path)


def packaged_for_cpp(kinds: dict[str, Kind]) -> dict[str, Callable[[], None]]:
    """The same run by a program without Python; one that ends for one kind is halved until that kind is alone."""
    seed = partial(torch.manual_seed, SEED)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        tensors = [t for kind in kinds.values() for t in kind.tensors]
        with sdpa.decomposed():
            wanted = {name: (seed(), flat(Calling(kind)(*kind.tensors)))[1] for name, kind in kinds.items()}
        try:
            found = iter(run_package(package(kinds, False, folder), tensors, sdpa.operators_library()))
        except (Refused, RuntimeError) as error:
            if len(kinds) == 1:
                return dict.fromkeys(kinds, partial(fail, error))
            names, half = list(kinds), len(kinds) // 2
            parts = [{name: kinds[name] for name in some} for some in (names[:half], names[half:])]
            return packaged_for_cpp(parts[0]) | packaged_for_cpp(parts[1])
    return {name: partial(compare, [next(found) for _ in numbers], numbers) for name, numbers in wanted.items()}


def fail(error: Exception) -> None:
    raise error


def alone(way: Callable[[dict[str, Kind]], dict[str, Callable[[], None]]], kind: Kind) -> None:
    way({"": kind})[""]()


def mapped(kind: Kind) -> None:
    """vmap over the first tensor; the others are shared."""
    samples = torch.stack([kind.tensors[0], kind.tensors[0].flip(0)])
    dims = (0, *(None,) * (len(kind.tensors) - 1))
    with torch.no_grad():
        mapping = torch.vmap(Calling(kind), in_dims=dims, randomness="same")
        wanted = [flat(expected(Calling(kind), sample, *kind.tensors[1:])) for sample in samples]
        compare(seeded(mapping, samples, *kind.tensors[1:]), [torch.stack(some) for some in zip(*wanted, strict=True)])


def of_first(kind: Kind) -> Callable[[Tensor], Tensor]:
    """The loss as a function of the first tensor."""
    return lambda first: loss(Calling(kind)(first, *kind.tensors[1:]))


def pushed(kind: Kind) -> None:
    """Forward mode, of torch.func and of torch.autograd."""
    first = kind.tensors[0]
    run = lambda: torch.func.jvp(of_first(kind), (first,), (first.sin(),))  # noqa: E731
    wanted = expected(run)
    compare(seeded(run), wanted)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(first, first.sin())
        found = torch.autograd.forward_ad.unpack_dual(seeded(of_first(kind), dual))
        compare((found.primal, found.tangent), wanted)


def transformed(transform: Callable[..., Any], kind: Kind) -> None:
    run = lambda: transform(of_first(kind))(kind.tensors[0])  # noqa: E731
    compare(seeded(run), expected(run))


def second_derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.func.hessian, but that the columns share random numbers."""
    return torch.func.jacfwd(torch.func.jacrev(function), randomness="same")


def per_sample(kind: Kind) -> None:
    samples = torch.stack([kind.tensors[0], kind.tensors[0].flip(0)])
    mapping = torch.vmap(torch.func.grad(of_first(kind)), randomness="same")
    wanted = [expected(torch.func.grad(of_first(kind)), sample) for sample in samples]
    compare(seeded(mapping, samples), torch.stack(wanted))


def twice(kind: Kind) -> None:
    def second() -> list[Tensor]:
        tensors = leaves(kind)[: kind.learn]
        value = loss(Calling(kind)(*tensors, *kind.tensors[kind.learn :]))
        first = torch.autograd.grad(value, tensors, create_graph=True, materialize_grads=True)
        return list(torch.autograd.grad(total(map(loss, first)), tensors, materialize_grads=True))

    compare(seeded(second), expected(second))


def autocast(kind: Kind) -> None:
    """float32 inputs; the results are in bfloat16, as far as that is what autocast makes of them."""
    single = lambda t: t.float() if t.is_floating_point() else t  # noqa: E731
    module = None if kind.module is None else copy.deepcopy(kind.module).float()
    cast = Kind(kind.call, tuple(map(single, kind.tensors)), kind.learn, module)
    with torch.no_grad():
        wanted = expected(Calling(kind), *kind.tensors)
        with torch.autocast("cpu", torch.bfloat16):
            found = seeded(Calling(cast), *cast.tensors)
    compare(found, wanted, HALF)
    if torch.bfloat16 not in {t.dtype for t in flat(found)} and kind.module is None:
        raise Wrong(f"results are {[t.dtype for t in flat(found)]}")


def checkpointed(kind: Kind, **options: Any) -> None:
    learned(lambda *tensors: checkpoint(Calling(kind), *tensors, **options), kind)


def selected(kind: Kind) -> None:
    checkpointed(
        kind, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, sdpa.save_attention())
    )


def reentrant(kind: Kind) -> None:
    """Gradients by backward, which is all it knows."""

    def by_backward(run: Run, kind: Kind) -> list[Tensor | None]:
        tensors = leaves(kind)
        loss(run(*tensors)).backward()
        return [t.grad for t in tensors[: kind.learn]]

    if without_gradients(kind):
        return checkpointed(kind, use_reentrant=True)
    run = lambda *tensors: checkpoint(Calling(kind), *tensors, use_reentrant=True)  # noqa: E731
    compare(seeded(by_backward, run, kind), expected(by_backward, Calling(kind), kind))
    return None


def faked(kind: Kind) -> None:
    """Shapes, dtypes and strides without numbers."""
    with torch.no_grad():
        wanted = flat(Calling(kind)(*kind.tensors))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            found = flat(Calling(kind)(*map(mode.from_tensor, kind.tensors)))
    if [(t.shape, t.dtype, t.stride()) for t in found] != [(t.shape, t.dtype, t.stride()) for t in wanted]:
        raise Wrong(f"{[(t.shape, t.stride()) for t in found]} instead of {[(t.shape, t.stride()) for t in wanted]}")


def jit_traced(kind: Kind) -> str | None:
    calling = Calling(kind)
    run = torch.jit.trace(calling, kind.tensors, check_trace=not kind.is_random)
    if kind.is_random:
        return drops(run, kind)
    learned(run, kind)
    return None


def drops(run: Run, kind: Kind) -> str:
    """Of a mean of many: dropout by random numbers of torch's."""
    with torch.no_grad():
        mean = torch.stack([flat(run(*kind.tensors))[0] for _ in range(4000)]).mean(0)
        tensors: Any = kind.tensors
        compare(mean, sdpa.scaled_dot_product_attention(*tensors), {"rtol": 0.0, "atol": 0.15})
    return "ok*"


def symbolic(kind: Kind) -> None:
    class Root(torch.nn.Module):
        """torch.fx knows the names of arguments only."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = kind.module

        def call(self, *tensors: object) -> object:
            return kind.call(*tensors) if kind.module is None else kind.call(self.inner, *tensors)

    names = ", ".join(f"t{n}" for n in range(len(kind.tensors)))
    scope: dict[str, Callable[..., Any]] = {}
    exec(f"def forward(self, {names}): return self.call({names})", scope)
    Root.forward = scope["forward"]
    learned(torch.fx.symbolic_trace(Root()), kind)


def to_onnx(kind: Kind) -> str | None:
    import onnxruntime

    with torch.no_grad():
        wanted = expected(Calling(kind), *kind.tensors)
        made: Any = torch.onnx.export(Calling(kind).eval(), kind.tensors, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(made.model_proto.SerializeToString())

        def run(*tensors: Tensor) -> list[Tensor]:
            given = zip(session.get_inputs(), (t.numpy() for t in tensors), strict=False)
            return [torch.from_numpy(out) for out in session.run(None, {i.name: t for i, t in given})]

        if kind.is_random:
            return drops(run, kind)
        compare(run(*kind.tensors), wanted, SINGLE)
    return None


def compiled_autograd(kind: Kind) -> None:
    """Gradients; of a call that has none its results, which it must leave as they are."""

    def by_backward() -> list[Tensor | None]:
        tensors = leaves(kind)
        loss(Calling(kind)(*tensors)).backward()
        return [t.grad for t in tensors[: kind.learn]]

    run = partial(Calling(kind), *kind.tensors) if without_gradients(kind) else by_backward
    wanted = expected(run)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        compare(seeded(run), wanted)


WAYS: dict[str, Way] = {
    "eager": eager,
    "compiled": compiled,
    "dynamic": dynamic,
    "export": partial(exported, strict=False),
    "export strict": partial(exported, strict=True),
    "AOTInductor": partial(alone, partial(packaged, table=False)),
    "AOTInductor, decomposed": partial(alone, partial(packaged, table=True)),
    "AOTInductor in C++": partial(alone, packaged_for_cpp),
    "vmap": mapped,
    "jvp": pushed,
    "jacrev": partial(transformed, torch.func.jacrev),
    "hessian": partial(transformed, second_derivative),
    "per sample": per_sample,
    "double backward": twice,
    "autocast": autocast,
    "checkpoint": partial(checkpointed, use_reentrant=False),
    "checkpoint, reentrant": reentrant,
    "selective": selected,
    "FakeTensor": faked,
    "jit.trace": jit_traced,
    "fx": symbolic,
    "ONNX": to_onnx,
    "compiled autograd": compiled_autograd,
}
# Those that answer many kinds at once.
TOGETHER: dict[str, Callable[[dict[str, Kind]], dict[str, Callable[[], None]]]] = {
    "AOTInductor": partial(packaged, table=False),
    "AOTInductor, decomposed": partial(packaged, table=True),
    "AOTInductor in C++": packaged_for_cpp,
}
