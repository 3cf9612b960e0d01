"""A stand-in for a GPU: every product's bits depend on the shapes that went into it, as they do
where one row and several rows go through different kernels. It also keeps a record of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

Call = tuple[str, tuple[tuple[int, ...], ...]]
"""A product's name and the shapes of its arrays."""

STRENGTH = 0.1
"""Relative size of the differences: large, so that a few dozen tokens show them."""

PRODUCTS = {
    mx: ("matmul", "addmm", "quantized_matmul", "gather_mm", "gather_qmm", "softmax", "cumsum"),
    mx.fast: ("scaled_dot_product_attention",),
    mx.array: ("__matmul__",),
}


@contextmanager
def shape_dependent(strength: float = STRENGTH) -> Iterator[list[Call]]:
    """Within it products are off by up to the share `strength`, as their shapes say.

    Yields:
        The products so far, in their order.
    """
    calls: list[Call] = []

    def wrapped(name: str, compute: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def product(*args: Any, **options: Any) -> mx.array:
            arrays = [*args, *options.values()]
            shapes = tuple(tuple(x.shape) for x in arrays if isinstance(x, mx.array))
            calls.append((name, shapes))
            share = zlib.crc32(repr((name, shapes)).encode()) / 2**32
            out = compute(*args, **options)
            # Not the same for all: norms would undo that.
            wave = mx.sin(6.28 * share + mx.arange(out.shape[-1] if out.ndim else 1))
            return out * (1 + strength * wave).astype(out.dtype)

        return product

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in PRODUCTS.items():
            for name in names:
                patch.setattr(owner, name, wrapped(name, getattr(owner, name)))
        yield calls
