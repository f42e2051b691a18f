"""What stands out in a head is spread, and products of two heads stay what they were."""

from __future__ import annotations

import numpy as np
import pytest

from everystop import _native


def matrix(size: int) -> np.ndarray:
    """Sylvester's: entry (i, j) is -1 where i and j have an odd number of common ones in binary."""
    common = np.arange(size)[:, None] & np.arange(size)
    return 1.0 - 2.0 * (np.array([bin(each).count("1") for each in common.ravel()]) % 2).reshape(size, size)


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (128, 64), (80, 16), (96, 32), (16, 16)])
def test_equals_the_formula(dim: int, block: int) -> None:
    x = np.random.default_rng(dim).standard_normal((3, dim)).astype(np.float32)
    expected = x.reshape(3, -1, block) @ matrix(block) / np.sqrt(block)
    np.testing.assert_allclose(_native.spread(x), expected.reshape(3, dim), atol=2e-6)


@pytest.mark.parametrize("dim", [2, 12, 20])
def test_a_head_of_another_size_stays_as_it_is(dim: int) -> None:
    x = np.random.default_rng(dim).standard_normal((2, dim)).astype(np.float32)
    np.testing.assert_array_equal(_native.spread(x), x)


def test_products_stay_and_what_stands_out_is_spread() -> None:
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 5, 64)).astype(np.float32)
    k[:, 7] = 100.0
    spread_q, spread_k = _native.spread(q), _native.spread(k)
    np.testing.assert_allclose((spread_q * spread_k).sum(axis=1), (q * k).sum(axis=1), rtol=1e-4, atol=1e-3)
    assert np.abs(spread_k).max() < 20.0


def test_what_is_not_finite_stays_in_its_head() -> None:
    x = np.ones((2, 64), dtype=np.float32)
    x[0, 5] = np.nan
    out = _native.spread(x)
    assert np.isnan(out[0]).any()
    assert np.isfinite(out[1]).all()
