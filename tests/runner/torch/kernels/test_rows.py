"""Kernels that work on rows: norms, rotation and cache writes, the MLP's gate, projections."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.runner.torch.kernels.coverage import pairwise
from tests.runner.torch.kernels.mutants import mutant

from everystop.runner.torch.kernels import activation, fp8, linear, norm, reference, rope

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter multiplies matrices of bfloat16 as if their bits were integers.
DOT_DTYPES = DTYPES if os.environ["TRITON_INTERPRET"] == "0" else DTYPES[:2]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal to the last bits of the dtype, relative to the larger of 1 and the value."""
    error = (got.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1.0)
    return bool((error <= TOLERANCE[got.dtype]).all())


def numbers(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    """Normal random numbers."""
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=random) * size).to(device, dtype)


# -------------------------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (5, 64), (3, 1000), (2, 4096), (0, 64)])
def test_rms_norm(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = numbers(rows, size, dtype=dtype, device=device, size=3.0)
    weight = numbers(size, dtype=dtype, device=device, seed=1)
    assert close(norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    residual = numbers(rows, size, dtype=dtype, device=device, seed=2)
    kept = x.clone(), residual.clone()
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    wanted, wanted_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    # The interpreter cuts bfloat16 off where a GPU rounds.
    assert close(total, wanted_total) if dtype == torch.bfloat16 else torch.equal(total, wanted_total)
    assert close(normed, wanted)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_rms_norm_of_heads_that_are_views(device: torch.device) -> None:
    heads = numbers(4, 6, 80, dtype=torch.float32, device=device)
    weight = numbers(80, dtype=torch.float32, device=device, seed=1)
    view = heads[:, 1:4]
    assert close(norm.rms_norm(view, weight, 1e-6), reference.rms_norm(view, weight, 1e-6))


def test_rms_norm_keeps_small_and_large_rows(device: torch.device) -> None:
    x = torch.stack([torch.full((64,), 1e-4), torch.full((64,), 3e4), torch.zeros(64)]).to(device)
    weight = torch.ones(64, device=device)
    assert close(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


# --------------------------------------------------------------------------------------------------- rotation and cache

ROPE = pairwise(
    {
        "head_dim": [64, 80, 96, 128, 256],
        "group": [1, 2, 3, 4, 7, 8],
        "block_size": [16, 32, 64],
        "dtype": DTYPES,
        "normed": [False, True],
    }
)


def written(module: object, case: dict[str, object], device: torch.device) -> list[torch.Tensor]:
    """Query and caches after `rope_write` of five tokens, one of which is not kept."""
    head_dim, group, block_size = (int(str(case[name])) for name in ("head_dim", "group", "block_size"))
    dtype = case["dtype"]
    assert isinstance(dtype, torch.dtype)
    fused = numbers(5, 2 * group + 4, head_dim, dtype=dtype, device=device)
    query, key, value = fused.split([2 * group, 2, 2], dim=1)
    caches = torch.zeros(4, 2, block_size, 2, head_dim, dtype=dtype, device=device)
    positions = torch.tensor([0, 1, 7, 600, 3], device=device)
    slots = torch.tensor([0, block_size + 3, 4 * block_size - 1, 2 * block_size, -1], device=device)
    angles = torch.outer(torch.arange(601.0), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
    norms: dict[str, object] = {}
    if case["normed"]:
        norms = {"query_norm": numbers(head_dim, dtype=dtype, device=device, seed=5), "eps": 1e-6}
        norms["key_norm"] = numbers(head_dim, dtype=dtype, device=device, seed=6)
    write = module.rope_write  # type: ignore[attr-defined]
    write(query, key, value, positions, slots, cos_sin, caches[:, 0], caches[:, 1], **norms)
    return [fused, caches]


@pytest.mark.parametrize("case", ROPE, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_rope_write(case: dict[str, object], device: torch.device) -> None:
    """Queries are turned in place, keys and values of kept tokens written, and nothing else is touched."""
    for got, wanted in zip(written(rope, case, device), written(reference, case, device), strict=True):
        assert close(got, wanted)


# ---------------------------------------------------------------------------------------------------- gate, projections


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (3, 100), (2, 1024), (0, 64)])
def test_silu_mul(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = numbers(rows, 2 * size, dtype=dtype, device=device, size=4.0)
    assert close(activation.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_mul_of_large_numbers(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, -100.0, -0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert activation.silu_mul(gate_up).tolist() == [[0.0, pytest.approx(0.0, abs=1e-30), 0.0, 100.0, 1e4]]


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "depth", "size"), [(1, 576, 192), (70, 100, 72), (129, 64, 64), (3, 1536, 10), (0, 64, 8)]
)
def test_linear(rows: int, depth: int, size: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    x = numbers(rows, depth, dtype=dtype, device=device)
    weight = numbers(size, depth, dtype=dtype, device=device, seed=1, size=depth**-0.5)
    bias = numbers(size, dtype=dtype, device=device, seed=2) if has_bias else None
    assert close(linear.linear(x, weight, bias), reference.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_of_a_projection_has_the_same_bits_among_any_others(dtype: torch.dtype, device: torch.device) -> None:
    x = numbers(150, 200, dtype=dtype, device=device)
    weight = numbers(96, 200, dtype=dtype, device=device, seed=1)
    whole = linear.linear(x, weight)
    for rows in (slice(0, 1), slice(7, 8), slice(149, 150), slice(3, 40), slice(60, 150)):
        assert torch.equal(linear.linear(x[rows], weight), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "depth", "size"), [(1, 576, 192), (70, 100, 72), (0, 64, 8)])
def test_linear_in_fp8(rows: int, depth: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = numbers(rows, depth, dtype=dtype, device=device, size=5.0)
    weight, scales = fp8.quantize_rows(numbers(size, depth, dtype=dtype, device=device, seed=1))
    bias = numbers(size, dtype=dtype, device=device, seed=2)
    for got, wanted in zip(fp8.quantize_rows(x), reference.quantize_rows(x), strict=True):
        assert torch.equal(got.float(), wanted.float())
    assert close(fp8.linear_fp8(x, weight, scales, bias), reference.linear_fp8(x, weight, scales, bias))
    x[:1] = 0.0
    assert not fp8.linear_fp8(x, weight, scales)[:1].any()


# -------------------------------------------------------------------------------------------------------------- mutants


def test_wrong_kernels_are_told_from_right_ones(tmp_path: Path, device: torch.device) -> None:
    x = numbers(3, 1000, dtype=torch.float32, device=device)
    weight = numbers(1000, dtype=torch.float32, device=device, seed=1)
    wrong_norm = mutant(norm, "/ SIZE + eps", "/ PADDED + eps", tmp_path)
    assert not close(wrong_norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    wrong_gate = mutant(activation, "tl.where(gate < 0.0, gate * decayed, gate)", "gate", tmp_path)
    assert not close(wrong_gate.silu_mul(x), reference.silu_mul(x))
    matrix = numbers(8, 1000, dtype=torch.float32, device=device, seed=2)
    wrong_linear = mutant(linear, "depth < K - begin", "depth < BLOCK_K", tmp_path)
    assert not close(wrong_linear.linear(x[:, :40], matrix[:, :40]), reference.linear(x[:, :40], matrix[:, :40]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("first * cos - second * sin", "first * cos + second * sin"),
        ("slot // BLOCK_SIZE, slot % BLOCK_SIZE", "slot // BLOCK_SIZE, (slot + 1) % BLOCK_SIZE"),
        ("cos_sin_ptr + tl.load(position_ptr + token)", "cos_sin_ptr + tl.load(position_ptr)"),
        ("HEAD_DIM // 2 + half, mask", "half, mask"),
        ("value_cache_ptr + cell + part * HALF", "value_cache_ptr + cell"),
    ],
)
def test_wrong_rope_writes_are_told_from_the_right_one(
    old: str, new: str, tmp_path: Path, device: torch.device
) -> None:
    wrong = mutant(rope, old, new, tmp_path)
    case = {"head_dim": 80, "group": 3, "block_size": 16, "dtype": torch.float32, "normed": True}
    pairs = zip(written(wrong, case, device), written(reference, case, device), strict=True)
    assert not all(close(got, wanted) for got, wanted in pairs)


def test_a_projection_that_splits_by_rows_is_found(tmp_path: Path, device: torch.device) -> None:
    wrong = mutant(linear, "BLOCK_K=32 if is_wide", "BLOCK_K=(128 if num_rows < 8 else 32) if is_wide", tmp_path)
    x = numbers(20, 640, dtype=torch.float32, device=device)
    weight = numbers(32, 640, dtype=torch.float32, device=device, seed=1)
    assert not torch.equal(wrong.linear(x[:1], weight), wrong.linear(x, weight)[:1])
