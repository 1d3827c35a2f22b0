"""sdpa_kernel, patch and decomposed as decorators: of functions, coroutines, methods and objects, not of generators."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch

import helpers
import sdpa
from sdpa import last_choice, sdpa_kernel

attention = sdpa.scaled_dot_product_attention
qkv = partial(helpers.qkv, B=1, H=2, M=16, N=16)


def ran():
    """The kernel that a plain call runs with."""
    attention(*qkv())
    return last_choice().kernel.name


def test_functions_and_their_names():
    @sdpa_kernel("vendor_math")
    def chosen():
        """Says who ran."""
        return ran()

    assert chosen() == "vendor_math" != ran() and (chosen.__name__, chosen.__doc__) == ("chosen", "Says who ran.")


def test_a_decorated_coroutine_runs_inside_of_its_block():
    async def attend(seen):
        for _ in range(3):
            sdpa.scaled_dot_product_attention(*(torch.randn(1, 1, 4, 8) for _ in range(3)))
            seen.append(last_choice().kernel.name)
            await asyncio.sleep(0)

    class Called:
        async def __call__(self, seen):
            await attend(seen)

    async def both(function):
        inside, outside = [], []
        await asyncio.gather(sdpa_kernel("math")(function)(inside), attend(outside))
        return set(inside), set(outside)

    for function in (attend, staticmethod(attend), partial(attend), Called()):
        assert asyncio.run(both(function)) == ({"vendor_math"}, {"cpu_flash"})


@pytest.mark.parametrize(
    "block", [sdpa_kernel("math"), sdpa.patch(), sdpa.decomposed()], ids=lambda b: type(b).__name__
)
def test_generators_are_not_decorated(block):
    """Their code runs after the call, when the block has ended."""

    def values():
        yield

    async def awaited():
        yield

    class Called:
        def __call__(self):
            yield

    for function, name in (
        (values, "values"), (awaited, "awaited"), (partial(values), "values"), (staticmethod(values), "values"),
        (Called(), "Called.__call__"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"got the generator .*{name}; write the with-block"):
            block(function)
