"""Sampling against its reference and against the native runner: the same numbers, ties and rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.runner.torch.kernels.mutants import mutant, mutant_above
from tests.runner.torch.kernels.sampling_cases import Row, batch_of

from everystop import _native
from everystop.runner.torch.batch import FAILED, SamplingBatch
from everystop.runner.torch.kernels import cuts, reference, sampling

Sample = Callable[[torch.Tensor, SamplingBatch], torch.Tensor]


def tokens(rows: list[Row], device: torch.device, sample: Sample = sampling.sample) -> list[int]:
    """What is sampled of each row."""
    chosen: list[int] = sample(*batch_of(rows, device)).tolist()
    return chosen


def counted(logits: Any, device: torch.device, count: int = 40, **settings: Any) -> Counter[int]:
    """How often each token is drawn over many seeds, in one batch."""
    row = np.asarray(logits, dtype=np.float32)
    return Counter(tokens([Row(row, settings=settings | {"seed": seed}) for seed in range(count)], device))


# ----------------------------------------------------------------------------------------------------- random numbers


@triton.jit
def _uniforms(seeds_ptr, choices_ptr, positions_ptr, out_ptr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    seed, choice, position = tl.load(seeds_ptr + row), tl.load(choices_ptr + row), tl.load(positions_ptr + row)
    tl.store(out_ptr + row, sampling.uniform(seed, choice, position))


def test_random_numbers_are_those_of_the_native_runner_to_the_bit(device: torch.device) -> None:
    seeds = [0, 1, 7, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    keys = [(seed, choice, position) for seed in seeds for choice in (0, 3) for position in (0, 1, 2**32 + 5)]
    wanted = [_native.uniform_draw(*key) for key in keys]
    assert [reference.uniform(*key) for key in keys] == wanted
    signed = [seed - (seed >= 2**63) * 2**64 for seed, _, _ in keys]
    out = torch.zeros(len(keys), dtype=torch.float64, device=device)
    _uniforms[(len(keys),)](
        torch.tensor(signed, device=device),
        torch.tensor([choice for _, choice, _ in keys], dtype=torch.int32, device=device),
        torch.tensor([position for _, _, position in keys], device=device),
        out,
    )
    assert out.tolist() == wanted


# ------------------------------------------------------------------------------------------------------ the same tokens


def random_rows(size: int, count: int) -> list[Row]:
    """Rows with settings of all kinds, logits with and without ties."""
    rng = np.random.default_rng(size)
    rows = []
    for case in range(count):
        logits = np.round(rng.standard_normal(size) * rng.choice([0.5, 3, 10]), int(rng.choice([0, 1, 6])))
        history = rng.integers(0, size, rng.integers(1, 30)).tolist()
        allowed = np.sort(rng.choice(size, max(1, size // 2), replace=False)).astype(np.int32)
        settings = {
            "temperature": float(rng.choice([0.0, 0.3, 1.0, 2.5])),
            "top_k": int(rng.choice([0, 0, 1, 5, 40, 300, 10**9])),
            "top_p": float(rng.choice([1.0, 0.9, 0.4])),
            "min_p": float(rng.choice([0.0, 0.05])),
            "repetition_penalty": float(rng.choice([1.0, 1.3])),
            "presence_penalty": float(rng.choice([0.0, 0.5])),
            "frequency_penalty": float(rng.choice([0.0, 0.7])),
            "logit_bias": [(int(rng.integers(size)), 2.0)],
            "allowed_token_ids": allowed if case % 3 == 0 else None,
            "stop_token_ids": [int(rng.integers(size))] if size > 1 else [],
            "min_tokens": int(rng.choice([0, 0, 20])),
            "seed": case * 0x9E3779B97F4A7C15 % 2**64,
            "choice_index": case % 3,
        }
        rows.append(Row(logits, history, int(rng.integers(0, len(history) + 1)), settings))
    return rows


def check(sample: Sample, device: torch.device, size: int, count: int) -> None:
    """The tokens of random rows are those of the native runner and of the reference."""
    rows = random_rows(size, count)
    got = tokens(rows, device, sample)
    wanted = [row.native(naive=True) for row in rows]
    assert got == wanted, [row.settings for row, a, b in zip(rows, got, wanted, strict=True) if a != b]


def check_sizes(sample: Sample, device: torch.device) -> None:
    """Rows of one tile and of several."""
    for size in (17, 300, 5000):
        check(sample, device, size, 24)


@pytest.mark.parametrize(("size", "count"), [(1, 10), (2, 40), (17, 40), (300, 40), (5000, 40)])
def test_tokens_are_those_of_the_native_runner(size: int, count: int, device: torch.device) -> None:
    check(sampling.sample, device, size, count)
    rows = random_rows(size, count)
    assert tokens(rows, device, reference.sample) == [row.native() for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 1000, 1024, 1025, 49152])
def test_tokens_are_those_of_the_native_runner_for_many_rows(size: int, device: torch.device) -> None:
    check(sampling.sample, device, size, 400)


def test_rows_do_not_change_each_other(device: torch.device) -> None:
    rows = random_rows(300, 20)
    together = tokens(rows, device)
    assert [tokens([row], device)[0] for row in rows] == together
    assert tokens(rows[::-1], device) == together[::-1]


def test_logits_may_be_the_first_columns_of_wider_ones(device: torch.device) -> None:
    rows = random_rows(300, 10)
    logits, batch = batch_of(rows, device)
    wide = torch.full((10, 512), 1e6, device=device)
    wide[:, :300] = logits
    assert sampling.sample(wide[:, :300], batch).tolist() == [row.native() for row in rows]


# ------------------------------------------------------------------------------------------------------------ the rules


def test_greedy_takes_the_lowest_of_tied_ids(device: torch.device) -> None:
    logits = np.zeros(5000)
    logits[[2077, 2078, 4000]] = 3.0
    rows = [Row(logits, settings={"temperature": t, "top_p": 0.5, "top_k": 1}) for t in (0.0, 1e-40, 1e-6)]
    assert tokens(rows, device) == [2077] * 3
    assert tokens([Row(logits, settings={"temperature": 1.0, "top_k": 1, "seed": s}) for s in range(9)], device) == (
        [2077] * 9
    )


def test_minus_zero_ties_with_zero(device: torch.device) -> None:
    rows = [Row(np.array([-1.0, -0.0, 0.0]), settings={"temperature": 0.0})]
    assert tokens(rows, device) == [1]
    assert set(counted([-1.0, -0.0, 0.0, -0.0], device, top_k=2)) == {1, 2}


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie(device: torch.device) -> None:
    assert set(counted([0.0, 1.0, 1.0, 1.0, 1.0], device, top_k=3)) == {1, 2, 3}
    assert set(counted([1.0] * 6, device, top_k=2)) == {0, 1}
    assert set(counted([1.0] * 4, device, top_k=4)) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it(device: torch.device) -> None:
    logits = np.log([0.5, 0.25, 0.15, 0.1])
    assert set(counted(logits, device, top_p=0.49)) == {0}
    assert set(counted(logits, device, top_p=0.51)) == {0, 1}
    assert set(counted(logits, device, top_p=0.76)) == {0, 1, 2}
    assert set(counted([1.0] * 8, device, top_p=0.4)) == {0, 1, 2, 3}
    for top_p in (0.0, 1e-9):
        assert set(counted([0.0, 2.0, 2.0], device, 30, top_p=top_p)) == {1}


def test_top_p_counts_its_share_of_what_top_k_left(device: torch.device) -> None:
    logits = np.log([0.4, 0.2, 0.2, 0.2])
    assert set(counted(logits, device, top_k=2, top_p=0.7)) == {0, 1}
    assert set(counted(logits, device, top_k=2, top_p=0.6)) == {0}


def test_ties_are_cut_by_both_in_order_of_ids(device: torch.device) -> None:
    """Top-k leaves four of six equals, top-p two of the four."""
    assert set(counted([1.0] * 6, device, top_k=4, top_p=0.5)) == {0, 1}


def test_min_p_is_relative_to_the_best(device: torch.device) -> None:
    logits = np.log([0.5, 0.2, 0.1, 0.2])
    assert set(counted(logits, device, min_p=0.3)) == {0, 1, 3}
    assert set(counted(logits, device, min_p=1.0)) == {0}


def test_frequencies_follow_the_probabilities_at_a_temperature(device: torch.device) -> None:
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    for temperature in (1.0, 0.5):
        expected = probabilities ** (1 / temperature)
        counts = counted(np.log(probabilities), device, 300, temperature=temperature)
        for token, share in enumerate(expected / expected.sum()):
            assert counts[token] / 300 == pytest.approx(share, abs=0.08)


def test_rows_that_cannot_be_sampled_fail_alone(device: torch.device) -> None:
    rows = []
    for bad in (np.nan, np.inf, -np.inf):
        for position in (0, 5, 1500):
            logits = np.zeros(1501)
            logits[position] = bad
            rows += [Row(logits, settings={"temperature": t, "top_p": 0.9}) for t in (0.0, 1.0)]
    rows += [Row(np.zeros(1501), settings={"allowed_token_ids": [], "temperature": t}) for t in (0.0, 1.0)]
    rows += [Row(np.arange(1501.0), settings={"temperature": 0.0})]
    assert tokens(rows, device) == [FAILED] * (len(rows) - 1) + [1500]


def test_a_bias_and_a_ban_of_one_token(device: torch.device) -> None:
    settings = {"logit_bias": [(1, 50.0)], "stop_token_ids": [1], "min_tokens": 1, "temperature": 0.0}
    assert tokens([Row(np.array([0.0, 9.0, 1.0]), settings=settings)], device) == [2]


def test_no_rows(device: torch.device) -> None:
    logits, batch = batch_of([Row(np.zeros(5))], device)
    assert sampling.sample(logits[:0], batch).tolist() == []


# -------------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (sampling, "key0 += 0x9E3779B9", "key0 += 0x9E3779B8"),
        (cuts, "(key == cut_key) & (ids <= cut_id)", "(key == cut_key)"),
        (cuts, "k - above.to(tl.int32)", "k - above.to(tl.int32) + 1"),
        (cuts, "target = (p * all_kept.to(tl.float64))", "target = (p * p * all_kept.to(tl.float64))"),
        (cuts, "bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits"),
        (sampling, "weight.to(tl.float64) >= tl.load(min_ps_ptr + row)", "weight > 0.0"),
        (sampling, "tiles == tile - 1", "tiles == tile"),
        (sampling, "(count > 0) | (in_prompt != 0)", "(count > 0)"),
        (sampling, "word >> (ids % 32)", "word >> (ids % 31)"),
        (cuts, "tl.where(reach_a, first, low)", "first"),
    ],
)
def test_wrong_kernels_are_told_from_the_right_one(
    module: ModuleType, old: str, new: str, tmp_path: Path, device: torch.device
) -> None:
    is_below = module is cuts
    wrong = mutant_above(sampling, cuts, old, new, tmp_path) if is_below else mutant(sampling, old, new, tmp_path)
    with pytest.raises(AssertionError):
        check_sizes(wrong.sample, device)
