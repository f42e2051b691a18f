"""RMSNorm and the gated activation against their naive versions."""

from __future__ import annotations

import numpy as np
import pytest

from everystop import _native


@pytest.mark.parametrize("size", [1, 8, 16, 37, 63, 64, 65, 576, 1000])
def test_rms_norm_equals_the_naive_version(size: int) -> None:
    rng = np.random.default_rng(size)
    x = (rng.standard_normal((5, size)) * 3).astype(np.float32)
    weight = rng.standard_normal(size).astype(np.float32)
    out = _native.rms_norm(x, weight, 1e-5)
    np.testing.assert_allclose(out, _native.rms_norm(x, weight, 1e-5, naive=True), rtol=1e-6, atol=1e-7)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-7)


def test_a_row_of_rms_norm_depends_on_itself_alone() -> None:
    x = np.random.default_rng(1).standard_normal((3, 84)).astype(np.float32)
    weight = np.ones(84, dtype=np.float32)
    whole = _native.rms_norm(x, weight, 1e-5)
    x[1] = np.nan
    out = _native.rms_norm(x, weight, 1e-5)
    np.testing.assert_array_equal(out[[0, 2]], whole[[0, 2]])
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("size", [1, 16, 37, 1536])
def test_silu_mul_equals_the_naive_version(size: int) -> None:
    rng = np.random.default_rng(size)
    gate = (rng.standard_normal((4, size)) * 20).astype(np.float32)
    up = rng.standard_normal((4, size)).astype(np.float32)
    np.testing.assert_allclose(
        _native.silu_mul(gate, up), _native.silu_mul(gate, up, naive=True), rtol=2e-6, atol=1e-12
    )


def test_silu_mul_of_extreme_gates() -> None:
    gate = np.array([[-1e30, -200.0, 0.0, 200.0, 1e30, np.nan]], dtype=np.float32)
    out = _native.silu_mul(gate, np.ones_like(gate))[0]
    assert out[1] == pytest.approx(0.0, abs=1e-30)
    assert out[2] == 0.0
    assert out[3] == 200.0
    assert out[4] == np.float32(1e30)
    assert np.isnan(out[5])
