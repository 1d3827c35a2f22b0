"""Cases, inputs and the error budget: shared by the tests, the benchmark and `sdpa check`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.kernel import Kernel, KernelModule
from sdpa.inputs import Options, build_inputs
from sdpa.mask import Mask
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile
from sdpa.reference import attention

# A kernel may be this many times as far from float64 as torch operations in the same precision.
ERROR_FACTOR = 2.0
# In float64 the reference is as rounded as the result and "plain" is the reference itself, so the band stands alone:
# twice for two roundings, twice for sums over rows that cancel (gradients of broadcast biases).
FLOAT64_SLACK = 4.0
# The error of an exponential made for half precisions: torch's CPU flash uses one with an error of 2^-14.
HALF_EXPONENTIAL = 2.0**-13


@dataclass(frozen=True)
class Case:
    """A problem to test: sizes by the glossary, the kind of mask by name, and the memory order of q, k and v."""

    B: int = 2
    H: int = 4
    Hkv: int = 4
    M: int = 33
    N: int = 47
    D: int = 32
    Dv: int = 32
    dtype: torch.dtype = torch.float32
    mask: str = "none"  # of MASKS
    layout: str = "bhmd"  # of LAYOUTS
    device: str = "cpu"
    dropout_p: float = 0.0
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    requires_bias_grad: bool = False

    def __str__(self) -> str:
        sizes = "-".join(f"{n}{getattr(self, n)}" for n in ("B", "H", "Hkv", "M", "N", "D", "Dv"))
        extras = [self.layout] * (self.layout != "bhmd") + [f"p{self.dropout_p}"] * bool(self.dropout_p)
        extras += ["softcap"] * bool(self.softcap) + ["sinks"] * self.sinks + ["biasgrad"] * self.requires_bias_grad
        extras += [f"scale{self.scale}"] * (self.scale is not None)
        return "-".join([sizes, str(self.dtype).removeprefix("torch."), self.mask, *extras])


class Draw:
    """Random tensors of one case from one seed, made on the CPU so that every device gets the same."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        wide = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return wide.to(dtype or self.case.dtype).to(self.case.device)

    def coins(self, *shape: int, share: float = 0.7) -> Tensor:
        return (torch.rand(*shape, generator=self.generator) < share).to(self.case.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator).to(self.case.device)


def documents(draw: Draw) -> Mask:
    """Ascending document ids; queries and keys share them where M == N."""
    c = draw.case
    keys = draw.integers(0, 2, c.B, c.N).sort(-1).values
    return Mask(segments=keys if c.M == c.N else (draw.integers(0, 2, c.B, c.M).sort(-1).values, keys))


def scattered(draw: Draw) -> Mask:
    """A dense mask with some rows that see nothing."""
    c = draw.case
    return Mask(allowed=draw.coins(c.B, 1, c.M, c.N) & draw.coins(c.B, 1, c.M, 1, share=0.9))


MASKS: dict[str, Callable[[Draw], Mask | None]] = {
    "none": lambda d: None,
    "causal": lambda d: Mask(causal=True),
    "causal_bottom_right": lambda d: Mask(causal=True, align="bottom_right"),
    "window": lambda d: Mask(window=(7, 3)),
    "window_bottom_right": lambda d: Mask(window=(5, 0), align="bottom_right"),
    "lengths": lambda d: Mask(lengths=d.integers(0, d.case.N, d.case.B)),
    "both_lengths": lambda d: Mask(
        lengths=d.integers(0, d.case.N, d.case.B),
        query_lengths=d.integers(0, d.case.M, d.case.B),
        causal=True,
        align="bottom_right",
    ),
    "segments": documents,
    "segments_causal": lambda d: documents(d) & Mask(causal=True),
    "prefix": lambda d: Mask(causal=True, prefix=d.integers(0, d.case.N, d.case.B)),
    "alibi": lambda d: Mask(alibi=d.normal(d.case.H, dtype=torch.float32).abs() / 8, causal=True),
    "allowed": scattered,
    "allowed_heads": lambda d: Mask(allowed=d.coins(1, d.case.H, d.case.M, d.case.N)),
    "padding": lambda d: Mask(allowed=d.coins(d.case.B, 1, 1, d.case.N)),
    "bias": lambda d: Mask(bias=d.normal(1, d.case.H, d.case.M, d.case.N)),
    "bias_low": lambda d: Mask(bias=d.normal(1, d.case.H, d.case.M, d.case.N) - 120),  # exp(0 - lse) overflows
    "bias_rows": lambda d: Mask(bias=d.normal(d.case.B, 1, 1, d.case.N)),
    "bias_float32": lambda d: Mask(bias=d.normal(d.case.M, d.case.N, dtype=torch.float32), causal=True),
    "bias_causal": lambda d: Mask(bias=d.normal(d.case.B, d.case.H, d.case.M, d.case.N)) & Mask(causal=True),
}
LAYOUTS = ("bhmd", "bmhd", "strided", "expanded")


def lay_out(draw: Draw, heads: int, length: int, size: int) -> Tensor:
    """(B, heads, length, size) in the memory order the case asks for."""
    c = draw.case
    if c.layout == "bmhd":
        return draw.normal(c.B, length, heads, size).transpose(1, 2)
    if c.layout == "strided":
        return draw.normal(c.B, heads, length, 2 * size)[..., ::2]
    if c.layout == "expanded":
        return draw.normal(1, heads, length, size).expand(c.B, -1, -1, -1)
    return draw.normal(c.B, heads, length, size)


def make_inputs(case: Case, seed: int = 0) -> AttentionInputs:
    """Checked and normalised inputs of a case, as kernels take them."""
    draw = Draw(case, seed)
    q = lay_out(draw, case.H, case.M, case.D)
    k, v = lay_out(draw, case.Hkv, case.N, case.D), lay_out(draw, case.Hkv, case.N, case.Dv)
    sinks = draw.normal(case.H) if case.sinks else None
    mask = MASKS[case.mask](draw)
    (torch.default_generator if case.device == "cpu" else torch).manual_seed(seed)  # torch's takes a millisecond
    options = Options(mask, case.dropout_p, scale=case.scale, enable_gqa=True, softcap=case.softcap, sinks=sinks)
    return build_inputs(q, k, v, options)


@dataclass(frozen=True)
class Comparison:
    """One result against float64: its largest error, and the bound for it."""

    name: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        return self.error <= self.budget  # False for NaN

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.3g}, budget {self.budget:.3g}"


def problem_of(inputs: AttentionInputs, direction: str, bias_grad: bool = False) -> AttentionProblem:
    extra = {"lse"} if direction == "forward" else {"bias_grad"} if bias_grad else set()
    return AttentionProblem.of(inputs, direction, frozenset(extra))


def run_kernel(
    name: str, inputs: AttentionInputs, grad_out: Tensor | None, bias_grad: bool = False
) -> tuple[Results, Gradients | None]:
    """One kernel of the catalog, forward and backward by itself. A kernel without a forward gets the results of math.
    The gradients are None where `grad_out` is None."""
    module = by_name()[name].load()
    first = problem_of(inputs, "forward") if grad_out is not None else AttentionProblem.of(inputs)
    if "forward" in by_name()[name].directions:
        results = module.forward(inputs, first, default_tile(module, first))
    else:
        results = by_name()["math"].load().forward(inputs, first, None)
    if grad_out is None:
        return results, None
    problem = problem_of(inputs, "backward", bias_grad)
    return results, module.backward(inputs, results, Results(grad_out, None), problem, default_tile(module, problem))


def default_tile(module: KernelModule, problem: AttentionProblem) -> Tile | None:
    """The tile a kernel takes where no table says otherwise."""
    choose = getattr(module, "tiles", None)
    offered = choose(problem) if choose else getattr(module, "TILES", ())
    return offered[0] if offered else None


def differentiate(inputs: AttentionInputs, grad_out: Tensor, dtype: torch.dtype) -> tuple[Results, Gradients]:
    """Reference results and gradients by autograd, computed in `dtype`."""
    needed, optional = inputs[:3], learnable(inputs)[3:]
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in needed)
    bias, sinks = (None if t is None else t.detach().to(dtype).requires_grad_() for t in optional)
    results = attention(inputs._replace(q=q, k=k, v=v, bias=bias, sinks=sinks), dtype)
    present = [t for t in (q, k, v, bias, sinks) if t is not None]
    found = torch.autograd.grad(results.out, present, grad_out.to(dtype), allow_unused=True)
    grad_q, grad_k, grad_v, *others = (
        torch.zeros_like(t) if g is None else g for g, t in zip(found, present, strict=True)
    )
    grad_bias, grad_sinks = (None if t is None else others.pop(0) for t in optional)
    return Results(results.out.detach(), lse_of(results).detach()), Gradients(
        grad_q, grad_k, grad_v, grad_bias, grad_sinks
    )


def learnable(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    return inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks


def lse_of(results: Results) -> Tensor:
    """The log-sum-exp of results that have one, as the reference's always do."""
    assert results.lse is not None
    return results.lse


def compare(
    name: str,
    got: Tensor | None,
    wanted: Tensor,
    plain: Tensor,
    terms: int,
    extra: float = 0.0,
    expected: torch.dtype | None = None,
) -> Comparison:
    """Largest error of `got` against float64 `wanted`, within ERROR_FACTOR times that of `plain` plus a rounding band.

    The band is one rounding to the result's dtype, a random walk of `terms` roundings in the accumulator, and `extra`
    (see `backward_bands`). Positions of non-finite values must agree: one that differs makes the error infinite, and so
    does a result that is missing or not of the `expected` dtype.
    """
    if got is None or (expected is not None and got.dtype != expected):
        return Comparison(name, float("inf"), 0.0)
    dtype, got, plain = got.dtype, got.double(), plain.double()
    if got.shape != wanted.shape or not torch.equal(nature(got), nature(wanted)):
        return Comparison(name, float("inf"), 0.0)
    finite = torch.isfinite(wanted)
    error = (got - wanted)[finite].abs()
    plain_error = (plain - wanted)[finite & torch.isfinite(plain)].abs()
    band = (torch.finfo(dtype).eps + accumulator(dtype) * terms**0.5) * largest(wanted[finite].abs()) + extra
    if dtype == torch.float64:
        band *= FLOAT64_SLACK
    return Comparison(name, largest(error), ERROR_FACTOR * largest(plain_error) + band)


def accumulator(dtype: torch.dtype) -> float:
    """The rounding of sums: half precisions are summed in float32."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def exponent_size(inputs: AttentionInputs, lse: Tensor) -> float:
    """P is exp(score - lse) of a rounded score and a rounded lse: this many roundings off, relative to P."""
    scores = abs(inputs.scale) * longest(inputs.q.double()) * longest(inputs.k.double())
    return scores + largest(lse[torch.isfinite(lse)].abs())


def forward_band(inputs: AttentionInputs, wanted: Results) -> float:
    """What rounded exponents do to `out`; half precisions round more than that.

    In float64 `plain` is the reference itself, so the bound of a whole product counts. In float32 it is one rounding of
    the largest score, which `plain` shows only where its luck is no better than the kernel's.
    """
    dtype = inputs.q.dtype
    if dtype not in (torch.float32, torch.float64):
        return 0.0
    values = inputs.v[torch.isfinite(inputs.v)].abs()
    size = exponent_size(inputs, lse_of(wanted)) if dtype == torch.float64 else largest_score(inputs) / 2
    return accumulator(dtype) * size * largest(values) / (1 - inputs.dropout_p)


def largest_score(inputs: AttentionInputs) -> float:
    q, k = inputs.q.double(), inputs.k.double().repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], dim=1)
    scores = (q @ k.mT).abs()
    return abs(inputs.scale) * largest(scores[torch.isfinite(scores)])


def backward_bands(inputs: AttentionInputs, grad_out: Tensor, wanted: Results, grads: Gradients) -> dict[str, float]:
    """Roundings in a gradient that its own size does not show, by name.

    dS = P * (dP - delta) cancels, as for a row with one key; dP is a rounded sum, and delta = rowsum(out * grad_out)
    comes from an `out` rounded to its dtype; the exponents of P are rounded.
    """
    grad_out, out = grad_out.double(), wanted.out.double()
    eps, sum_eps = torch.finfo(inputs.q.dtype).eps, accumulator(inputs.q.dtype)
    products = longest(grad_out) * longest(inputs.v.double()) / (1 - inputs.dropout_p)
    bands = from_scores(inputs, sum_eps * products + eps * longest(out * grad_out))
    if inputs.sinks is not None:
        bands["sinks"] = cancelling_sinks(inputs.sinks, wanted, grad_out, sum_eps, eps)
    exponent = exponent_size(inputs, lse_of(wanted))
    sizes = {
        name: exponent * largest(g[torch.isfinite(g)].abs()) for name, g in grads._asdict().items() if g is not None
    }
    return {name: bands.get(name, 0.0) + sum_eps * size for name, size in sizes.items()}


def from_scores(inputs: AttentionInputs, error: float) -> dict[str, float]:
    """What an error of each dP - delta becomes in the gradients: a random walk over the rows that are summed."""
    q, k, scale = inputs.q.double(), inputs.k.double(), abs(inputs.scale)
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    bands = {"q": scale * error * largest(k.abs()), "k": scale * error * largest(q.abs()) * rows**0.5}
    if inputs.bias is not None and inputs.bias.numel():
        summed = q.shape[:3].numel() * k.shape[2] / inputs.bias.numel()
        bands["bias"] = error * summed**0.5
    return bands


def cancelling_sinks(sinks: Tensor, wanted: Results, grad_out: Tensor, sum_eps: float, eps: float) -> float:
    """grad_sinks sums -P_sink * delta over rows with either sign: a random walk of the errors of its terms.

    A delta is off by a rounded sum and by the rounding of each `out` in it.
    """
    lse = lse_of(wanted).double()
    weight = torch.exp(sinks.double()[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)  # [B, H, M]
    out = wanted.out.double()
    sums = torch.linalg.vector_norm(out, dim=-1) * torch.linalg.vector_norm(grad_out, dim=-1)
    rounded = torch.linalg.vector_norm(out * grad_out, dim=-1)
    return largest(torch.linalg.vector_norm(weight * (sum_eps * sums + eps * rounded), dim=(0, 2)))


def longest(rows: Tensor) -> float:
    return largest(torch.linalg.vector_norm(rows, dim=-1))


def nature(values: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    return torch.isnan(values) + 2 * (values == torch.inf) + 3 * (values == -torch.inf)


def largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def check_kernel(name: str, case: Case, seed: int = 0) -> list[Comparison]:
    """Forward and, where the kernel has one, backward of one kernel on one case against the float64 reference."""
    inputs = make_inputs(case, seed)
    if case.requires_bias_grad and inputs.bias is None:
        raise ValueError(f"case {case} asks for the gradient of a bias it does not have")
    grad_out = Draw(case, seed + 1).normal(case.B, case.H, case.M, case.Dv)
    return check_inputs(name, inputs, grad_out, case.requires_bias_grad)


def check_inputs(name: str, inputs: AttentionInputs, grad_out: Tensor, bias_grad: bool = False) -> list[Comparison]:
    """The same for inputs that are there already."""
    q, k = inputs.q, inputs.k
    with_backward = trains(by_name()[name], inputs)
    results, grads = run_kernel(name, inputs, grad_out if with_backward else None, bias_grad)
    if q.device.type == "mps":  # which has no float64
        inputs, results, grads, grad_out = on_host(inputs), on_host(results), on_host(grads), grad_out.cpu()
    wanted, wanted_grads = differentiate(inputs, grad_out, torch.float64)
    plain, plain_grads = differentiate(inputs, grad_out, q.dtype)
    terms = q.shape[2] * (q.shape[1] // k.shape[1]) + k.shape[2]
    found = [compare("out", results.out, wanted.out, plain.out, terms, forward_band(inputs, wanted), q.dtype)]
    if results.lse is not None or grads is not None:
        precise = torch.promote_types(q.dtype, torch.float32)
        half = precise != q.dtype
        rough = lse_of(attention(inputs, precise) if half else plain)  # scores are never rounded to half
        band = HALF_EXPONENTIAL if half else 0.0
        found.append(compare("lse", results.lse, lse_of(wanted), rough, terms + q.shape[3], band, precise))
    if grads is None:
        return found
    bands = backward_bands(inputs, grad_out, wanted, wanted_grads)
    for field, got, want, near in zip(Gradients._fields, grads, wanted_grads, plain_grads, strict=True):
        asked = field != "bias" or bias_grad
        if asked and want is not None and near is not None and want.numel():
            expected = getattr(inputs, field).dtype
            found.append(compare(f"grad_{field}", got, want, near, terms, bands[field], expected))
    return found


def on_host(found: Any) -> Any:
    """Inputs, results or gradients with their tensors on the CPU."""
    tensors = {} if found is None else found._asdict()
    return found and found._replace(**{name: t.cpu() for name, t in tensors.items() if isinstance(t, Tensor)})


def reference_weights(inputs: AttentionInputs, average: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """The reference's weights after dropout (B, H, M, N), or their mean over heads: its result for unit vectors."""
    B, Hkv, N, _ = inputs.k.shape
    units = torch.eye(N, dtype=inputs.q.dtype, device=inputs.q.device).expand(B, Hkv, N, N)
    weights = attention(inputs._replace(v=units), dtype).out
    return weights.mean(1) if average else weights


def compare_weights(got: Tensor, inputs: AttentionInputs, average: bool) -> Comparison:
    wanted, plain = (reference_weights(inputs, average, dtype) for dtype in (torch.float64, inputs.q.dtype))
    terms = inputs.q.shape[3] + inputs.q.shape[1]
    # What made the log-sum-exp rounded the scores otherwise; `plain` has its own, where one error takes off the other.
    band = accumulator(inputs.q.dtype) * exponent_size(inputs, lse_of(attention(inputs))) / (1 - inputs.dropout_p)
    return compare("weights", got, wanted, plain, terms, band, inputs.q.dtype)


def able(name: str, case: Case) -> list[str]:
    """Why a kernel does not take a case; empty where it takes its forward, and the bias' gradient if that is asked."""
    inputs, kernel = make_inputs(case), by_name()[name]
    reasons = kernel.why_not(AttentionProblem.of(inputs))
    if case.requires_bias_grad:
        reasons += kernel.why_not(problem_of(inputs, "backward", True))
    return reasons


def trains(kernel: Kernel, inputs: AttentionInputs) -> bool:
    """Whether the kernel's forward also returns what a backward needs, and its backward takes the problem. A few
    kernels do so for some problems only."""
    return not kernel.why_not(problem_of(inputs, "forward")) and not kernel.why_not(problem_of(inputs, "backward"))
