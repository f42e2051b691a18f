"""Linear kernels against their naive versions, and their independence of batch, threads and position.

Every test here runs on this machine's best instruction-set path; the last one runs them all again on each other path.
"""

import os
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest

from everystop import _native

Floats = npt.NDArray[np.float32]
DTYPES = ["int8", "float32"]


def make_floats(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def run_linear(dtype: str, w: Floats, x: Floats, bias: Floats | None = None, *, num_threads: int = 1) -> Floats:
    packed = _native.pack_linear(dtype, w, num_threads)
    return _native.linear(dtype, packed, x, *w.shape, bias, num_threads)


def random_shapes(count: int) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(7)
    shapes = [(int(rng.integers(1, 71)), int(rng.integers(1, 200)), int(rng.integers(1, 400))) for _ in range(count)]
    return [*shapes, (1, 1, 1), (6, 32, 64), (7, 33, 65), (32, 960, 576), (5, 64, 1536)]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), random_shapes(12))
def test_int8_equals_its_naive_version_bit_for_bit(m: int, n: int, k: int, with_bias: bool) -> None:
    w, x = make_floats(1, n, k), make_floats(2, m, k)
    bias = make_floats(3, n) if with_bias else None
    packed = _native.pack_linear("int8", w, 2)
    fast = _native.linear("int8", packed, x, n, k, bias, 2)
    naive = _native.linear("int8", packed, x, n, k, bias, naive=True)
    assert np.array_equal(fast, naive)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), random_shapes(12))
def test_float32_agrees_with_its_naive_version(m: int, n: int, k: int, with_bias: bool) -> None:
    w, x = make_floats(1, n, k), make_floats(2, m, k)
    bias = make_floats(3, n) if with_bias else None
    packed = _native.pack_linear("float32", w, 2)
    fast = _native.linear("float32", packed, x, n, k, bias, 2)
    naive = _native.linear("float32", packed, x, n, k, bias, naive=True)
    magnitude = np.abs(x) @ np.abs(w).T + (0 if bias is None else np.abs(bias))
    assert np.all(np.abs(fast - naive) <= 1e-5 * magnitude)


def test_float32_is_the_matrix_product() -> None:
    w, x, bias = make_floats(1, 97, 211), make_floats(2, 19, 211), make_floats(3, 97)
    exact = x.astype(np.float64) @ w.T.astype(np.float64) + bias
    magnitude = np.abs(x) @ np.abs(w).T + np.abs(bias)
    assert np.all(np.abs(run_linear("float32", w, x, bias) - exact) <= 1e-6 * magnitude)


def test_int8_follows_its_definition() -> None:
    w, x = make_floats(1, 40, 192), make_floats(2, 9, 192)
    quantised_x, x_scales = _native.quantize_activations(x)
    quantised_w, w_scales = _native.quantize_activations(w)
    a = (quantised_x.astype(np.int64) - 128).reshape(9, 3, 64)
    b = (quantised_w.astype(np.int64) - 128).reshape(40, 3, 64)
    dots = np.einsum("mgi,ngi->mng", a, b)
    expected = np.einsum("mng,mg,ng->mn", dots, x_scales.astype(np.float64), w_scales.astype(np.float64))
    assert np.allclose(run_linear("int8", w, x), expected, rtol=0, atol=1e-4)


def test_int8_is_near_the_matrix_product() -> None:
    w, x = make_floats(1, 128, 576), make_floats(2, 16, 576)
    exact = x @ w.T
    error = run_linear("int8", w, x) - exact
    assert np.sqrt(np.mean(error**2)) < 0.012 * np.sqrt(np.mean(exact**2))


def hadamard(x: Floats) -> Floats:
    """The last axis, a power of two long, transformed without a factor, in the order of csrc/hadamard.hpp."""
    y, apart = x.copy(), x.shape[-1] // 2
    while apart:
        a, b = np.moveaxis(y.reshape(*x.shape[:-1], -1, 2, apart), -2, 0)
        y = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        apart //= 2
    return y


def test_groups_are_transformed_and_quantised_around_128_with_one_scale_each() -> None:
    x = make_floats(1, 5, 256)
    values, scales = _native.quantize_activations(x)
    y = hadamard(x.reshape(5, 4, 64))
    assert np.array_equal(scales, np.abs(y).max(axis=2) / np.float32(127) / np.float32(8))
    restored = (values.astype(np.float32) - 128).reshape(5, 4, 64) * scales[..., None]
    assert np.all(np.abs(restored - y / 8) <= 0.5001 * scales[..., None])
    assert np.allclose(hadamard(y) / 64, x.reshape(5, 4, 64), atol=1e-6)


def test_an_input_that_stands_out_coarsens_its_group_little() -> None:
    """One of 64 inputs is forty times as large as the others, as in a residual stream: the grid of plain int8 would
    be three times as coarse.
    """
    w, x = make_floats(1, 128, 576), make_floats(2, 16, 576)
    x[:, 5::64] *= 40.0
    w[:, 5::64] /= 40.0
    exact = x @ w.T
    error = run_linear("int8", w, x) - exact
    step = np.abs(x).reshape(16, 9, 64).max(axis=2, keepdims=True) / 127
    plain = (np.rint(x.reshape(16, 9, 64) / step) * step).reshape(16, 576) @ w.T - exact
    assert np.sqrt(np.mean(error**2)) < 0.5 * np.sqrt(np.mean(plain**2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_at_any_place_in_any_batch(dtype: str) -> None:
    n, k = 100, 200
    w, bias = make_floats(1, n, k), make_floats(2, n)
    packed = _native.pack_linear(dtype, w, 1)
    rows = make_floats(3, 70, k)
    alone = np.concatenate([_native.linear(dtype, packed, rows[i : i + 1], n, k, bias) for i in range(70)])
    for m in range(1, 71):
        batch = _native.linear(dtype, packed, rows[70 - m :], n, k, bias, 2)
        assert np.array_equal(batch, alone[70 - m :]), f"rows differ in a batch of {m}"
    order = np.random.default_rng(4).permutation(70)
    assert np.array_equal(_native.linear(dtype, packed, rows[order], n, k, bias), alone[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 5, 33])
def test_the_number_of_threads_changes_no_bit(dtype: str, m: int) -> None:
    w, x = make_floats(1, 333, 576), make_floats(2, m, 576)
    packed = _native.pack_linear(dtype, w, 1)
    single = _native.linear(dtype, packed, x, *w.shape)
    for num_threads in (2, 3, 4, 8):
        assert np.array_equal(_native.pack_linear(dtype, w, num_threads), packed)
        assert np.array_equal(_native.linear(dtype, packed, x, *w.shape, None, num_threads), single)


def spread_evenly(first: int, rows: int, sign: int = 1) -> Floats:
    """Rows of 320 whose groups are as large everywhere once transformed: `first` 0 gives one sign, 1 both in turns."""
    x = np.zeros((rows, 320), dtype=np.float32)
    x[:, first::64] = sign
    return x


@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("first", [0, 1])
def test_extreme_values_do_not_saturate(first: int, signs: tuple[int, int]) -> None:
    x, w = spread_evenly(first, 7, signs[0]), spread_evenly(first, 45, signs[1])
    values, _ = _native.quantize_activations(x)
    assert set(np.unique(values.astype(int) - 128)) <= {-127, 127}
    assert np.allclose(run_linear("int8", w, x), signs[0] * signs[1] * 5.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 77, 199])
def test_a_value_that_is_not_finite_spoils_its_own_row_alone(dtype: str, bad: float, column: int) -> None:
    w, x = make_floats(1, 70, 200), make_floats(2, 13, 200)
    clean = run_linear(dtype, w, x)
    for row in (0, 6, 12):
        spoilt_x = x.copy()
        spoilt_x[row, column] = bad
        y = run_linear(dtype, w, spoilt_x)
        others = np.arange(13) != row
        assert np.array_equal(y[others], clean[others])
        assert not np.isfinite(y[row]).any()


def test_rows_of_zeros_and_of_tiny_values_give_finite_results() -> None:
    x = np.zeros((3, 128), dtype=np.float32)
    x[1] = 1e-41
    x[2] = 1e-28
    w = make_floats(1, 32, 128)
    y = run_linear("int8", w, x)
    assert np.array_equal(y[:2], np.zeros((2, 32)))
    assert np.allclose(y[2], x[2] @ w.T, rtol=0, atol=1e-28)


def test_a_group_with_large_values_does_not_coarsen_another() -> None:
    x = make_floats(2, 4, 128)
    w = make_floats(1, 32, 128)
    w[:, 64:] = 0
    loud = x.copy()
    loud[:, 64:] *= 1e6
    assert np.array_equal(run_linear("int8", w, loud), run_linear("int8", w, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_are_aligned_and_may_be_read_only(dtype: str) -> None:
    w, x = make_floats(1, 50, 100), make_floats(2, 3, 100)
    packed = _native.pack_linear(dtype, w, 1)
    assert packed.ctypes.data % 64 == 0
    assert packed.size == _native.packed_linear_bytes(dtype, 50, 100)
    before = packed.copy()
    expected = _native.linear(dtype, packed, x, 50, 100)
    packed.flags.writeable = False
    assert np.array_equal(_native.linear(dtype, packed, x, 50, 100), expected)
    assert np.array_equal(packed, before)


def test_empty_batches_give_empty_results() -> None:
    assert run_linear("int8", make_floats(1, 8, 64), make_floats(2, 0, 64)).shape == (0, 8)


def test_wrong_sizes_are_refused_with_both_numbers() -> None:
    w = make_floats(1, 32, 64)
    packed = _native.pack_linear("int8", w, 1)
    x = make_floats(2, 3, 64)
    with pytest.raises(ValueError, match=r"take 2176 bytes, not 2175"):
        _native.linear("int8", packed[:-1], x, 32, 64)
    with pytest.raises(ValueError, match=r"63 columns, the layer takes k = 64"):
        _native.linear("int8", packed, x[:, :63].copy(), 32, 64)
    with pytest.raises(ValueError, match=r"bias has 31 entries, the layer has n = 32"):
        _native.linear("int8", packed, x, 32, 64, make_floats(3, 31))
    with pytest.raises(ValueError, match=r"num_threads must be between 1 and 1024, not 0"):
        _native.linear("int8", packed, x, 32, 64, None, 0)
    larger = _native.pack_linear("int8", make_floats(1, 32, 65), 1)
    shifted = larger[1 : packed.size + 1]
    with pytest.raises(ValueError, match=r"multiple of 64 bytes"):
        _native.linear("int8", shifted, x, 32, 64)
    with pytest.raises(ValueError, match=r"dtype must be int8 or float32, not int4"):
        _native.pack_linear("int4", w, 1)
    with pytest.raises(ValueError, match=r"n must be between 0 and"):
        _native.packed_linear_bytes("int8", -1, 64)
    with pytest.raises(TypeError):
        _native.pack_linear("int8", w.astype(np.float64), 1)


def test_layout_names_say_dtype_and_group() -> None:
    assert _native.linear_layout("int8").startswith("int8-g64-")
    assert _native.linear_layout("float32").startswith("float32-")


def run_with_isa(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"EVERYSTOP_ISA": name, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


def test_an_unknown_path_is_refused_by_name() -> None:
    result = run_with_isa("sse9", "-c", "from everystop import _native; _native.isa()")
    assert "EVERYSTOP_ISA=sse9 is unknown; this CPU supports portable" in result.stderr


@pytest.mark.skipif("EVERYSTOP_ISA" in os.environ, reason="this run is of one path")
@pytest.mark.parametrize("isa", ["portable", "avx2", "avxvnni", "avx512vnni", "neon"])
def test_everything_here_holds_on_every_path(isa: str) -> None:
    probe = run_with_isa(isa, "-c", "from everystop import _native; print(_native.isa())")
    if "this CPU cannot run it" in probe.stderr:
        pytest.skip(f"this CPU cannot run {isa}")
    assert probe.stdout.strip() == isa
    result = run_with_isa(isa, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
