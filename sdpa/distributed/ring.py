"""Ring attention: a rank's own queries meet the keys and values of one rank after the other.

Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023. Results of the steps are merged in float32 by
their log-sum-exp. The backward makes the steps again, so that what a rank holds does not grow with the number of ranks:
its own keys, those of a step and of the next, and what it hands on. The keys of a step come straight from the rank that
has them, and only those that some query sees. They travel while those before are computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdpa.dispatch.context import effective, forced_text, request_text
from sdpa.dispatch.failure import LaunchError
from sdpa.dispatch.select import backward_setting, select
from sdpa.distributed.blocks import Block, narrow
from sdpa.distributed.links import Link, Passing, pieces_of, refuse_second_derivatives, shapes_of
from sdpa.distributed.modes import Part, blocks_of, first_block, needed
from sdpa.distributed.modes import Results as Pair
from sdpa.distributed.parts import Interval, Intervals, common, places
from sdpa.inputs import Options, build_inputs
from sdpa.operators import call_backward, call_forward
from sdpa.problem import AttentionInputs, AttentionProblem, Results
from sdpa.sinks import sinks_grad


class Ring:
    """The mode: it is called with a rank's part."""

    def __init__(self, link: Link, steps: type[Steps] | None = None) -> None:
        self.link, self.steps = link, steps or Steps

    def __call__(self, part: Part) -> Pair:
        out, lse = RingAttention.apply(self.steps(self.link, part), *part[:3], part.mask.bias, part.sinks)
        return out, lse if part.returns_lse else None

    def local(self, part: Part) -> Part:
        return first_block(part._replace(returns_lse=True), self.link.rank, in_steps=True)


class Meeting(NamedTuple):
    """A block of a step, and where it lies in what is held."""

    block: Block
    rows: Interval  # of this rank's own queries
    piece: int  # the number of that which holds its keys
    keys: Interval  # in that piece


class Steps:
    """What meets what at each step, and the calls of it."""

    def __init__(self, link: Link, part: Part) -> None:
        self.link, self.setting = link, request_text(part.options.get("kernel"))
        options = {name: value for name, value in part.options.items() if name != "kernel"}
        self.options, self.random = Options(None, **options), part.random
        self.blocks = blocks_of(part, in_steps=True)
        self.needs, self.keys = needed(self.blocks, part), part.keys.intervals
        self.rows = part.queries.intervals[link.rank]
        self.plan = [list(self.meetings(step)) for step in range(link.ranks)]

    def given(self, step: int) -> Intervals:
        """What this rank hands on at a step, of its own keys."""
        return common(self.keys[self.link.rank], self.needs[(self.link.rank + step) % self.link.ranks])

    def taken(self, step: int) -> Intervals:
        """What it takes."""
        return common(self.keys[(self.link.rank - step) % self.link.ranks], self.needs[self.link.rank])

    def meetings(self, step: int) -> Iterator[Meeting]:
        """What meets at a step."""
        for piece, keys in enumerate(self.taken(step)):
            for rows in self.rows:
                block = self.blocks.of(rows, keys)
                if block is not None:
                    own = block.keys[0] - keys[0], block.keys[1] - keys[0]
                    yield Meeting(block, places((block.rows,), self.rows)[0], piece, own)

    def begin(self, step: int, k: Tensor, v: Tensor) -> Passing:
        """The keys and values of a step, on their way: a piece for each interval."""
        given, taken, own = self.given(step), self.taken(step), self.keys[self.link.rank]
        shapes = [shape for t in (k, v) for shape in shapes_of(t, taken, t.shape[1])]
        return self.link.pass_on(step, [piece for t in (k, v) for piece in pieces_of(t, given, own)], shapes)

    def begin_back(self, step: int, k: Tensor, v: Tensor, gradients: list[Tensor]) -> Passing:
        """The gradients of such pieces, on their way."""
        shapes = [shape for t in (k, v) for shape in shapes_of(t, self.given(step), t.shape[1])]
        return self.link.pass_on(-step, gradients, shapes)

    def add(self, dk: Tensor, dv: Tensor, step: int, returned: Passing) -> None:
        """Add to the gradients of this rank's own keys and values those that come back of a step."""
        own, given = self.keys[self.link.rank], self.given(step)
        for total, pieces in zip((dk, dv), halves(returned.wait()), strict=True):
            for place, piece in zip(pieces_of(total, given, own), pieces, strict=True):
                place.add_(piece)

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        return call_forward(inputs, True, self.setting)

    def backward(
        self, inputs: AttentionInputs, results: Results, upstream: Results, bias_grad: bool
    ) -> tuple[Tensor, ...]:
        """Gradients of a block, from results of whole rows."""
        asked = {"bias_grad": bias_grad, "lse_grad": upstream.lse is not None}
        extra = frozenset(name for name, on in asked.items() if on)
        problem = AttentionProblem.of(inputs, "backward", extra, (*results, upstream.out))
        kernel = select(problem, backward_setting(effective(self.setting), problem)).kernel
        assert results.lse is not None
        if not kernel.needs_whole_rows(problem, results.lse):
            try:  # by its name: a kernel that took its place might need what `results` are not
                return call_backward(inputs, results, upstream, bias_grad, forced_text(kernel.name))
            except (LaunchError, torch.OutOfMemoryError) as error:
                warnings.warn(f"{error}; another kernel answers instead, given the block's own results", stacklevel=2)
        return call_backward(inputs, *self.of_block_alone(inputs, results, upstream), bias_grad, self.setting)

    def of_block_alone(self, inputs: AttentionInputs, results: Results, upstream: Results) -> tuple[Results, Results]:
        """What a kernel needs for the same gradients that takes a block for whole rows: the block's own results, and
        the gradients that arrive at these through the merging."""
        assert results.lse is not None
        out, lse = call_forward(inputs, True, self.setting)
        share = (lse - results.lse).exp().masked_fill(lse == -torch.inf, 0.0)
        grad_out = upstream.out.to(share.dtype)
        of_row = (results.out.to(share.dtype) * grad_out).sum(3) - (0.0 if upstream.lse is None else upstream.lse)
        grad_lse = share * ((out.to(share.dtype) * grad_out).sum(3) - of_row)
        return Results(out, lse), Results((share.unsqueeze(3) * grad_out).to(out.dtype), grad_lse)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, block: Block, bias: Tensor | None) -> AttentionInputs:
        mask = block.mask if bias is None else block.mask.replace(bias=of_block(bias, block))
        found = build_inputs(q, k, v, self.options._replace(attn_mask=mask))
        if self.random is None:
            return found
        rng = self.random.of_block(block.rows[0], block.keys[0])
        return found._replace(dropout_p=float(self.options.dropout_p), rng=rng)


class RingAttention(torch.autograd.Function):
    """A rank's part of the output and of the log-sum-exp. What it saves is this rank's own."""

    @staticmethod
    def forward(
        ctx: Any, steps: Steps, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        total = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=total)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=total)
        passing = steps.begin(0, k, v)
        for step in range(steps.link.ranks):
            keys, values = halves(passing.wait())
            if step + 1 < steps.link.ranks:
                passing = steps.begin(step + 1, k, v)
            for block, rows, piece, own in steps.plan[step]:
                inputs = steps.inputs(at(q, rows), at(keys[piece], own), at(values[piece], own), block, bias)
                merge(at(out, rows), at(lse, rows), *steps.forward(inputs))
                del inputs  # with it goes what a step was given
        if sinks is not None:
            with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.steps = steps
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        steps, (q, k, v, bias, sinks, out, lse) = ctx.steps, ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        dq, dk, dv = (torch.zeros_like(t, dtype=lse.dtype) for t in (q, k, v))
        dbias = torch.zeros_like(bias, dtype=lse.dtype) if bias is not None and ctx.needs_input_grad[4] else None
        passing = steps.begin(0, k, v)
        home: list[tuple[int, Passing]] = []  # gradients on their way, of one step while the next is computed
        for step in range(steps.link.ranks):
            keys, values = halves(passing.wait())
            if step + 1 < steps.link.ranks:
                passing = steps.begin(step + 1, k, v)
            dkeys, dvalues = ([torch.zeros_like(t, dtype=lse.dtype) for t in pieces] for pieces in (keys, values))
            for block, rows, piece, own in steps.plan[step]:
                inputs = steps.inputs(at(q, rows), at(keys[piece], own), at(values[piece], own), block, bias)
                upstream = Results(at(grad_out, rows), None if grad_lse is None else at(grad_lse, rows))
                results = Results(at(out, rows), at(lse, rows))
                found = steps.backward(inputs, results, upstream, dbias is not None)
                del inputs, results, upstream
                totals = at(dq, rows), at(dkeys[piece], own), at(dvalues[piece], own)
                for total, gradient in zip(totals, found, strict=False):
                    total += gradient
                if dbias is not None:
                    place = of_block(dbias, block)
                    place += found[3].reshape(place.shape)
            home.append((step, steps.begin_back(step, k, v, [*dkeys, *dvalues])))
            if step:
                steps.add(dk, dv, *home.pop(0))
        steps.add(dk, dv, *home.pop())
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            delta = (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(3)
            dsinks = sinks_grad(sinks, lse, delta if grad_lse is None else delta - grad_lse)
        own = [total.to(t.dtype) for total, t in zip((dq, dk, dv), (q, k, v), strict=True)]
        return (None, *own, None if dbias is None else dbias.to(bias.dtype), dsinks)


def halves(pieces: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Those of keys and those of values."""
    return pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]


def at(tensor: Tensor, rows: Interval) -> Tensor:
    return tensor[:, :, rows[0] : rows[1]]


def of_block(bias: Tensor, block: Block) -> Tensor:
    return narrow(narrow(bias, -2, block.rows), -1, block.keys)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add to results of some keys, in place, those of others."""
    launch = merging_launch(str(out.device)) if out.is_cuda else None
    if launch is not None:
        launch(out, lse, more, more_lse)
        return
    # The shares of both, each rounded by itself: of no keys at all they are 0, for -inf - -inf is no number.
    before, after = (torch.sigmoid(gap).nan_to_num_(0.0).unsqueeze(3) for gap in (lse - more_lse, more_lse - lse))
    out.mul_(before).addcmul_(more.to(out.dtype), after)
    torch.logaddexp(lse, more_lse, out=lse)


@lru_cache(maxsize=16)
def merging_launch(device: str) -> Callable[..., None] | None:
    """The kernel that merges in one launch, tried once; None where there is no Triton that can run or compile it."""
    try:
        from sdpa.kernels.triton import merge as module
    except ImportError:
        return None
    if module.unavailable():
        return None
    out, lse = torch.zeros(1, 1, 1, 16, device=device), torch.zeros(1, 1, 1, device=device)
    try:
        module.merge(out, lse, out, lse)
    except Exception as error:
        warnings.warn(f"a ring's steps are merged by torch's operations: {error}", stacklevel=2)
        return None
    return module.merge


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add to results, in place, one more logit a head, which has no value."""
    both = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    out.mul_((lse - both).exp().unsqueeze(3))
    lse.copy_(both)
