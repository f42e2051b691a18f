"""Kernels run in Triton's interpreter, on the CPU; with TRITON_INTERPRET=0 the same tests run them on a GPU.

Triton reads the variable when it is imported, which PyTorch or transformers may do for any test, and when a kernel is
defined; so it is set in `tests/conftest.py`, before all. What compiles kernels (`test_compile.py`) does so in a process
of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")


@pytest.fixture(autouse=True, scope="session")
def one_patch_a_launch() -> Iterator[None]:
    """The interpreter patches Triton's language for each launch, and again for each function that a kernel calls.

    The second is needed for functions of the language itself alone, and took half of the time of these tests.
    """
    from triton.runtime.interpreter import InterpretedFunction

    patch_and_call = InterpretedFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__.startswith("triton."):
            return patch_and_call(function, *args, **kwargs)
        return function.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        yield


@pytest.fixture(autouse=True, scope="session")
def products_in_one_order() -> Iterator[None]:
    """The interpreter multiplies tiles with NumPy's BLAS, whose sums take another order in other rows of a tile.

    A GPU's do not. OpenBLAS's kernels for AVX-512 happen not to either; those for AVX2 do, and on such a processor what
    is deterministic looked as if it were not. Here each product of a tile is added from the first of K to the last.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    matmul = InterpreterBuilder.create_dot

    def in_order(builder: Any, a: Any, b: Any, total: Any, *precision: Any) -> Any:
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return matmul(builder, a, b, total, *precision)
        x, weight = a.data.astype(total.data.dtype), b.data.astype(total.data.dtype)
        product = np.zeros_like(total.data)
        for depth in range(x.shape[-1]):
            product += x[..., depth, None] * weight[..., depth, None, :]
        return TensorHandle(product + total.data, total.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", in_order)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small matrices: threads cost more than they bring."""
    torch.set_num_threads(1)
