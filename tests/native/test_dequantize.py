"""Dequantisation against the gguf package's."""

import gguf
import numpy as np
import pytest

from everystop import _native

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
# Where a block of each type keeps its f16 scales; any other bytes may be anything.
HALVES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def quantization_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def make_raw(name: str, num_rows: int, k: int) -> np.ndarray:
    """Random bytes of [num_rows, k] values in which every scale is an ordinary number."""
    rng = np.random.default_rng(11)
    if name in ("F32", "F16"):
        dtype = np.float32 if name == "F32" else np.float16
        return rng.standard_normal((num_rows, k)).astype(dtype).view(np.uint8)
    if name == "BF16":
        return (
            (rng.standard_normal((num_rows, k)).astype(np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        )
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[quantization_type(name)]
    blocks = rng.integers(0, 256, (num_rows * k // block_values, block_bytes), dtype=np.uint8)
    for offset in HALVES[name]:
        scales = rng.uniform(-2, 2, len(blocks)).astype(np.float16)
        scales[::7] = np.float16(3e-6)
        blocks[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", TYPES)
def test_values_equal_the_gguf_packages(name: str, num_threads: int) -> None:
    raw = make_raw(name, 300, 512)
    ours = _native.dequantize(int(quantization_type(name)), raw.reshape(-1), 300, 512, num_threads)
    theirs = gguf.quants.dequantize(raw, quantization_type(name)).reshape(300, 512)
    assert np.array_equal(ours, theirs)


def test_every_half_converts_exactly() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    ours = _native.dequantize(int(quantization_type("F16")), halves.view(np.uint8), 1, 1 << 16)[0]
    theirs = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(ours), np.signbit(theirs))


@pytest.mark.parametrize("name", TYPES)
def test_row_bytes_equal_the_gguf_packages(name: str) -> None:
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[quantization_type(name)]
    assert _native.ggml_row_bytes(int(quantization_type(name)), 768) == 768 // block_values * block_bytes


def test_raw_bytes_may_be_read_only_and_unaligned() -> None:
    raw = make_raw("Q4_1", 4, 64).reshape(-1)
    shifted = np.zeros(raw.size + 1, dtype=np.uint8)
    shifted[1:] = raw
    shifted.flags.writeable = False
    q4_1 = int(quantization_type("Q4_1"))
    assert np.array_equal(_native.dequantize(q4_1, shifted[1:], 4, 64), _native.dequantize(q4_1, raw, 4, 64))


def test_wrong_sizes_and_types_are_refused() -> None:
    q6_k = int(quantization_type("Q6_K"))
    with pytest.raises(ValueError, match="Q6_K rows hold a multiple of 256 values, not 128"):
        _native.ggml_row_bytes(q6_k, 128)
    with pytest.raises(ValueError, match="take 420 bytes, not 419"):
        _native.dequantize(q6_k, np.zeros(419, dtype=np.uint8), 2, 256)
    with pytest.raises(ValueError, match=r"GGML type 10 is not supported; supported are F32 \(0\)"):
        _native.ggml_row_bytes(int(quantization_type("Q2_K")), 256)
