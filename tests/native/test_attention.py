"""Attention against its naive version, and the bits that must not depend on how it is called."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from everystop import _native

# (query heads, KV heads, head_dim, rows, first position, block size)
SHAPES = [
    (9, 3, 64, 1, 0, 16),
    (9, 3, 64, 40, 300, 32),
    (4, 4, 12, 17, 500, 64),
    (8, 1, 128, 5, 255, 16),
    (6, 2, 80, 33, 0, 256),
    (1, 1, 2, 3, 14, 128),
    (14, 2, 64, 1, 1000, 32),
    (30, 1, 16, 2, 40, 32),
]


STORED = ("float32", "float16", "int8")


def make_inputs(shape: tuple[int, ...], seed: int = 0) -> dict[str, Any]:
    """Random q, k, v and a shuffled block table with gaps."""
    heads, kv_heads, dim, rows, first, block_size = shape
    rng = np.random.default_rng(seed)
    num_keys = first + rows
    num_blocks = -(-num_keys // block_size)
    return {
        "q": rng.standard_normal((rows, heads, dim)).astype(np.float32),
        "k": rng.standard_normal((num_keys, kv_heads, dim)).astype(np.float32),
        "v": rng.standard_normal((num_keys, kv_heads, dim)).astype(np.float32),
        "first_position": first,
        "block_size": block_size,
        "block_table": rng.permutation(num_blocks + 3)[:num_blocks].astype(np.int32),
    }


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_naive_version(shape: tuple[int, ...], stored: str) -> None:
    """Over int8 queries and weights are rounded to 16 bits, which the naive version does not do."""
    inputs = make_inputs(shape) | {"kv_cache_dtype": stored}
    naive = _native.attention(**inputs, naive=True)
    out = _native.attention(**inputs)
    np.testing.assert_allclose(out, naive, atol=1e-4 if stored == "int8" else 2e-6, rtol=2e-5)
    assert np.abs(out - naive).mean() < 2e-5


def test_the_naive_version_is_attention() -> None:
    inputs = make_inputs((4, 2, 16, 5, 37, 16))
    q, k, v = (inputs[name].astype(np.float64) for name in "qkv")
    out = _native.attention(**inputs, naive=True)
    for row in range(5):
        for head in range(4):
            scores = k[: 38 + row, head // 2] @ q[row, head] / 4.0
            weights = np.exp(scores - scores.max())
            expected = weights @ v[: 38 + row, head // 2] / weights.sum()
            np.testing.assert_allclose(out[row, head], expected, atol=1e-6)


def rounded_to_int8(x: np.ndarray) -> np.ndarray:
    """Each head of each token [T, KV, d] on a grid of its own, from -127 to 127 times a scale."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(x * inverse).astype(np.float64) * (largest / np.float32(127))


def test_int8_has_a_scale_for_each_token_and_head() -> None:
    """Attention over keys and values that were rounded here; tokens and heads differ in size, and some are zero."""
    inputs = make_inputs((6, 2, 20, 3, 40, 16), seed=3)
    rng = np.random.default_rng(4)
    for name in "kv":
        inputs[name] *= (10.0 ** rng.uniform(-3, 2, (43, 2, 1))).astype(np.float32)
        inputs[name][7::11, rng.integers(2)] = 0.0
    inputs["k"] /= 10.0
    out = _native.attention(**inputs, kv_cache_dtype="int8")
    k, v = (rounded_to_int8(inputs[name]) for name in "kv")
    for row in range(3):
        for head in range(6):
            scores = k[: 41 + row, head // 3] @ inputs["q"][row, head].astype(np.float64) / np.sqrt(20.0)
            weights = np.exp(scores - scores.max())
            expected = weights @ v[: 41 + row, head // 3] / weights.sum()
            np.testing.assert_allclose(out[row, head], expected, atol=5e-5 * np.abs(v).max())


@pytest.mark.parametrize("stored", STORED)
def test_bits_do_not_depend_on_tiles_blocks_or_chunks(stored: str) -> None:
    inputs = make_inputs((9, 3, 64, 50, 230, 32)) | {"kv_cache_dtype": stored}
    whole = _native.attention(**inputs, tile_rows=8)
    for tile_rows in (1, 2, 4):
        np.testing.assert_array_equal(_native.attention(**inputs, tile_rows=tile_rows), whole)
    for block_size in (16, 64, 128, 256):
        table = np.arange(20, dtype=np.int32)[::-1].copy()
        other = inputs | {"block_size": block_size, "block_table": table}
        np.testing.assert_array_equal(_native.attention(**other, tile_rows=8), whole)
    for start, end in ((0, 1), (1, 27), (26, 50)):
        chunk = inputs | {"q": inputs["q"][start:end].copy(), "first_position": 230 + start}
        chunk |= {"k": inputs["k"][: 230 + end].copy(), "v": inputs["v"][: 230 + end].copy()}
        np.testing.assert_array_equal(_native.attention(**chunk, tile_rows=8), whole[start:end])


@pytest.mark.parametrize("stored", STORED)
def test_later_positions_are_never_touched(stored: str) -> None:
    """NaN in the keys and values after a row leaves the row alone, also inside its tile and its block."""
    inputs = make_inputs((9, 3, 64, 8, 40, 16)) | {"kv_cache_dtype": stored}
    clean = _native.attention(**inputs, tile_rows=8)
    inputs["k"][44:] = np.nan
    inputs["v"][44:] = np.nan
    out = _native.attention(**inputs, tile_rows=8)
    np.testing.assert_array_equal(out[:4], clean[:4])
    assert np.isnan(out[4:]).all()


@pytest.mark.parametrize("stored", STORED)
def test_large_scores_do_not_overflow(stored: str) -> None:
    inputs = make_inputs((2, 1, 16, 3, 600, 16)) | {"kv_cache_dtype": stored}
    inputs["q"] *= 1e4
    out = _native.attention(**inputs)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, _native.attention(**inputs, naive=True), atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 24}, "block_size must be 16, 32, 64, 128 or 256, not 24"),
        ({"block_table": np.zeros(1, dtype=np.int32)}, "do not hold"),
        ({"block_table": np.full(4, -1, dtype=np.int32)}, "negative"),
        ({"first_position": 3}, "as many keys"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be float32, float16 or int8, not fp8"),
    ],
)
def test_wrong_sizes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.attention(**make_inputs((2, 1, 16, 3, 30, 16)) | change)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets_give_the_same_numbers(isa: str) -> None:
    """The tests of this folder's decoder kernels pass on the other paths too."""
    # The interpreter path of this process is handed on, so that both see the same module.
    names = ("attention", "hadamard", "norm", "rope", "sampling")
    files = [f"{os.path.dirname(__file__)}/test_{name}.py" for name in names]
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-o",
            "pythonpath=",
            "-k",
            "not other_instruction",
            *files,
        ],
        env=os.environ | {"EVERYSTOP_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if "this CPU cannot run it" in process.stdout:
        pytest.skip(f"this CPU cannot run {isa}")
    assert process.returncode == 0, process.stdout
