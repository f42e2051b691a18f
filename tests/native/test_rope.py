"""The rotation of heads against its naive version and the formula."""

from __future__ import annotations

import numpy as np
import pytest

from everystop import _native


def frequencies(dim: int) -> np.ndarray:
    """The usual ones, base 10,000."""
    return (1e4 ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)


@pytest.mark.parametrize("position", [0, 1, 777, 8191, 131071])
@pytest.mark.parametrize("dim", [2, 12, 32, 64, 80, 128])
def test_equals_the_naive_version_and_the_formula(dim: int, position: int) -> None:
    x = np.random.default_rng(dim).standard_normal((3, dim)).astype(np.float32)
    out = _native.rope(x, frequencies(dim), position)
    np.testing.assert_allclose(out, _native.rope(x, frequencies(dim), position, naive=True), atol=1e-6)
    angles = (np.float32(position) * frequencies(dim)).astype(np.float64)
    turned = (x[:, : dim // 2] + 1j * x[:, dim // 2 :]) * np.exp(1j * angles)
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], axis=1), atol=2e-6)


def test_the_factor_scales_both_parts() -> None:
    x = np.ones((1, 8), dtype=np.float32)
    np.testing.assert_allclose(
        _native.rope(x, frequencies(8), 5, factor=1.5), 1.5 * _native.rope(x, frequencies(8), 5), rtol=1e-6
    )


def test_a_head_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="two entries"):
        _native.rope(np.ones((1, 8), dtype=np.float32), frequencies(12), 0)
