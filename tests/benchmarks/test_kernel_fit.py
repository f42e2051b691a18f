"""Constants of kernels found again from times that they made, and tables that are read between their points."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.kernel_fit import Decodes, Prefills, Products, fit_decodes, fit_mixed, fit_prefills, fit_products
from benchmarks.vllm_profile import AttentionTable, Curve, LayerProfile
from tests.sim.test_roofline import PLAIN, TINY, decodes, prompt

from everystop.core.plan import StepPlan
from everystop.core.rows import Row
from everystop.sim.roofline import decode_attention_ns, prefill_attention_ns, product_ns

FITTED = (
    "gemm_floor_ns",
    "gemm_memory_share",
    "gemm_compute_share",
    "gemm_middle_factor",
    "decode_floor_ns",
    "decode_memory_share",
    "decode_head_ns",
    "prefill_floor_ns",
    "prefill_compute_share",
    "prefill_half_tokens",
)
UNKNOWN = replace(PLAIN, **dict.fromkeys(FITTED, 1.0))


def test_constants_of_products_are_found() -> None:
    sizes = [(m, n, k) for m in (1, 8, 64, 128, 256, 1024, 4096) for n in (256, 1024, 4096) for k in (256, 1024, 4096)]
    times = [product_ns(PLAIN, *size) for size in sizes]
    data = Products(*np.array(sizes, float).T, np.array(times))
    gpu, errors = fit_products(UNKNOWN, data)
    assert errors.p90 < 0.01
    for name in FITTED[:4]:
        assert getattr(gpu, name) == pytest.approx(getattr(PLAIN, name), rel=0.03), name
    assert gpu.gemm_error == errors.median


def test_constants_of_attention_are_found() -> None:
    rows, contexts = np.array([1, 8, 64, 64, 256, 256]), np.array([16, 1024, 16, 1024, 16, 4096])
    times = [10_000 + decode_attention_ns(PLAIN, TINY, int(n), int(n * c)) for n, c in zip(rows, contexts, strict=True)]
    num_bytes = 4.0 * TINY.kv_size * rows * contexts
    gpu, errors = fit_decodes(UNKNOWN, Decodes(num_bytes, 2.0 * rows, np.array(times)))
    assert errors.p90 < 0.01
    found = (gpu.decode_floor_ns, gpu.decode_memory_share, gpu.decode_head_ns)
    assert found == pytest.approx((10_000, 0.5, 20), rel=0.02)
    tokens = np.array([16, 128, 512, 1024, 4096, 8192])
    pairs = tokens * (tokens + 1) // 2
    times = [12_000 + prefill_attention_ns(PLAIN, TINY, int(p), int(n)) for p, n in zip(pairs, tokens, strict=True)]
    data = Prefills(pairs.astype(float), tokens.astype(float), np.full(6, float(TINY.q_size)), np.array(times))
    gpu, errors = fit_prefills(gpu, data)
    assert errors.p90 < 0.01
    found = (gpu.prefill_floor_ns, gpu.prefill_compute_share, gpu.prefill_half_tokens)
    assert found == pytest.approx((12_000, 0.5, 400), rel=0.05)
    gpu, _ = fit_mixed(gpu, np.array([10.0, 20.0]), np.array([5.0, 40.0]), np.array([20.0, 100.0]))
    assert gpu.mixed_decode_factor == pytest.approx(2, rel=0.01)


def test_one_kernel_that_was_held_up_does_not_move_the_constants() -> None:
    num_bytes = np.array([1e4, 1e5, 1e6, 1e7, 1e8, 2e8, 1e9])
    times = 10_000 + num_bytes / 0.5e12 * 1e9
    times[3] *= 30
    gpu, _ = fit_decodes(UNKNOWN, Decodes(num_bytes, np.zeros(7), times))
    assert (gpu.decode_floor_ns, gpu.decode_memory_share) == pytest.approx((10_000, 0.5), rel=0.01)


def test_curve_is_straight_between_points_and_beyond_the_last() -> None:
    curve = Curve({1: 10.0, 3: 14.0, 5: 15.0})
    assert [curve.at(size) for size in (1, 2, 3, 4, 5, 9)] == [10, 12, 14, 14.5, 15, 17]


def test_attention_is_read_between_points_and_missing_corners_are_added_up() -> None:
    table = AttentionTable(
        {
            (0, 0, 1, 16): 4.0, (0, 0, 1, 32): 6.0, (0, 0, 2, 16): 8.0, (0, 0, 2, 32): 12.0,
            (16, 0, 0, 0): 10.0, (16, 16, 0, 0): 20.0, (16, 0, 1, 16): 15.0, (16, 0, 1, 32): 18.0,
        }
    )  # fmt: skip
    assert table.at(0, 0, 1, 24) == 5
    assert table.at(0, 0, 2, 32) == 12
    assert table.at(0, 0, 1.5, 24) == 7.5
    assert table.at(16, 0, 1, 16) == 15
    assert table.at(16, 8, 0, 0) == 15
    assert table.at(16, 0, 2, 32) == 10 + 12, "not measured together"
    assert table.at(0, 0, 0, 0) == 0


def test_profile_adds_up_layers(tmp_path: Path) -> None:
    """Every kernel takes 1 µs a token; attention 10, 20 and 35 µs; two layers."""
    names = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
    dense = [(name, n, n) for name in (*names, "embedding", "final_layernorm") for n in (1, 1024)]
    write(tmp_path / "dense.csv", ("layer", "tokens", "time_us"), dense)
    sampled = [(name, n, 100 * n) for name in ("lm_head", "sampler") for n in (1, 64)]
    write(tmp_path / "per_sequence.csv", ("layer", "sequences", "time_us"), sampled)
    sizes = [
        (16, 0, 0, 0, 20),
        (16, 16, 0, 0, 30),
        (32, 0, 0, 0, 20),
        (0, 0, 1, 16, 10),
        (0, 0, 1, 32, 10),
        (16, 0, 1, 16, 35),
    ]
    write(tmp_path / "attention.csv", ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"), sizes)
    profile = LayerProfile.read(tmp_path, TINY)
    assert profile.plan_ns(prompt(16)) == (2 * (8 * 16 + 20) + 2 * 16 + 200) * 1_000
    assert profile.plan_ns(decodes(1, 20)) == (2 * (8 + 10) + 2 + 200) * 1_000
    both = StepPlan(0, [Row(0, 15, 1, 0, 0), Row(1, 0, 16, 0, 16), Row(2, 0, 16, 0, 16)])
    assert profile.plan_ns(both) == (2 * (8 * 33 + 35 + 20) + 2 * 33 + 200) * 1_000


def write(path: Path, header: tuple[str, ...], rows: list[tuple[str | int, ...]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
