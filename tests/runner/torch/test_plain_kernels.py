"""The plain kernels against the references, which go row by row in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from everystop.runner.torch import plain_kernels
from everystop.runner.torch.batch import FAILED, AttentionBatch, LogitEdits, SamplingBatch
from everystop.runner.torch.kernels import reference
from everystop.runner.torch.plain_sets import PlainKernels, RowByRowKernels

NUM_BLOCKS, BLOCK, KV_HEADS, DIM = 40, 16, 2, 12


def make_batch(contexts: list[int], rows: list[int], seed: int = 0) -> AttentionBatch:
    """Sequences with those contexts, of which the last so many positions are rows; blocks in any order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(NUM_BLOCKS, generator=generator).int().tolist()
    tables = torch.full((len(contexts), max(-(-c // BLOCK) for c in contexts)), NUM_BLOCKS - 1, dtype=torch.int32)
    for s, context in enumerate(contexts):
        num = -(-context // BLOCK)
        tables[s, :num] = torch.tensor([order.pop() for _ in range(num)])
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    return AttentionBatch(tables, starts, torch.tensor(contexts, dtype=torch.int32), max(rows), max(contexts))


def caches(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_BLOCKS, BLOCK, KV_HEADS, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.mark.parametrize("kernels", [PlainKernels(), RowByRowKernels()], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    ("contexts", "rows"), [([1, 16, 17, 100], [1, 1, 1, 1]), ([5, 40, 100, 33], [5, 1, 30, 33]), ([64], [7])]
)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (9, None), (None, 5.0), (20, 2.0)])
def test_attention(
    kernels: PlainKernels, group: int, contexts: list[int], rows: list[int], window: int | None, soft_cap: float | None
) -> None:
    batch, (keys, values) = make_batch(contexts, rows), caches()
    query = torch.randn(sum(rows), KV_HEADS * group, DIM, generator=torch.Generator().manual_seed(2))
    expected = reference.paged_attention(query, keys, values, batch, 0.3, window, soft_cap)
    attended = kernels.paged_attention(query, keys, values, batch, 0.3, window, soft_cap)
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)
    out = torch.empty_like(query)
    assert kernels.paged_attention(query, keys, values, batch, 0.3, window, soft_cap, out) is out
    assert torch.equal(out, attended)


@pytest.mark.parametrize("rows", [[1, 1], [6, 1]])
def test_cells_that_nobody_sees_may_hold_anything(rows: list[int]) -> None:
    batch, (keys, values) = make_batch([20, 7], rows), caches()
    query = torch.randn(sum(rows), KV_HEADS, DIM)
    expected = PlainKernels().paged_attention(query, keys, values, batch, 0.3)
    for cache in (keys, values):
        used = {(int(batch.block_tables[s, p // BLOCK]), p % BLOCK) for s, end in ((0, 20), (1, 7)) for p in range(end)}
        for block in range(NUM_BLOCKS):
            for offset in range(BLOCK):
                if (block, offset) not in used:
                    cache[block, offset] = math.nan
    assert torch.equal(PlainKernels().paged_attention(query, keys, values, batch, 0.3), expected)


@pytest.mark.parametrize("kernels", [PlainKernels(), RowByRowKernels()], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("with_norms", [False, True])
def test_rotation_and_cache_write(kernels: PlainKernels, with_norms: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(9, 6 + 2 * KV_HEADS, DIM, generator=generator)
    positions = torch.tensor([0, 1, 2, 50, 7, 8, 9, 3, 4])
    slots = torch.tensor([5, 6, 7, 100, 33, 34, 35, 90, 91])
    cos_sin = torch.randn(60, DIM, generator=generator)
    norms: dict[str, Any] = {}
    if with_norms:
        norms = {"query_norm": torch.rand(DIM) + 0.5, "key_norm": torch.rand(DIM) + 0.5, "eps": 1e-5}
    results = []
    for write in (kernels.rope_write, reference.rope_write):
        query, key, value = qkv.clone().tensor_split([6, 6 + KV_HEADS], dim=1)
        caches_ = caches()
        write(query, key, value, positions, slots, cos_sin, *caches_, **norms)
        results.append((query, *caches_))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", [PlainKernels(), RowByRowKernels()], ids=lambda kernels: kernels.name)
def test_rows(kernels: PlainKernels) -> None:
    x, residual, weight = torch.randn(7, 84), torch.randn(7, 84), torch.rand(84)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    ours, expected = (k.add_rms_norm(x, residual, weight, 1e-5) for k in (kernels, reference))
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(kernels.silu_mul(x), reference.silu_mul(x))
    matrix, bias = torch.randn(50, 84), torch.randn(50)
    torch.testing.assert_close(kernels.linear(x, matrix, bias), reference.linear(x, matrix, bias), atol=1e-5, rtol=1e-5)
    values, scales = reference.quantize_rows(matrix)
    expected = reference.linear_fp8(x, values, scales, bias)
    torch.testing.assert_close(kernels.linear_fp8(x, values, scales, bias), expected)


# ----------------------------------------------------------------------------------- sampling

VOCAB, ROWS, SEATS = 70, 12, 5


def sampling_batch(seed: int, **changes: Any) -> SamplingBatch:
    """Rows of all kinds: greedy ones, cuts, penalties, masks and edits in all mixtures."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        index = torch.randint(len(values), (ROWS,), generator=generator)
        return torch.tensor(values, dtype=torch.float64)[index].to(dtype)

    def integers(high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(high, (ROWS,), generator=generator).to(dtype)

    words = -(-VOCAB // 32)
    allowed = torch.randint(-(2**31), 2**31, (ROWS, words), generator=generator).int()
    allowed[::3] = -1
    edits = LogitEdits(
        torch.tensor([0, 0, 1, 3, 3, 5]),
        torch.tensor([4, 5, 9, 2, 2, 60]),
        torch.tensor([3.0, -math.inf, -math.inf, 0.5, 0.25, 8.0]),
    )
    batch = SamplingBatch(
        temperatures=pick(0.0, 0.3, 1.0, 2.5),
        top_ks=pick(0, 1, 5, 1000, dtype=torch.int32),
        top_ps=pick(1.0, 0.9, 0.3, 0.0, dtype=torch.float64),
        min_ps=pick(0.0, 0.05, 0.5, dtype=torch.float64),
        repetition_penalties=pick(1.0, 1.3, 0.8),
        presence_penalties=pick(0.0, 0.7),
        frequency_penalties=pick(0.0, 0.4),
        seeds=integers(2**62),
        choices=integers(4, torch.int32),
        positions=integers(5000),
        seats=integers(SEATS),
        output_counts=torch.randint(3, (SEATS, VOCAB + 9), generator=generator).int(),
        is_in_prompt=torch.rand(SEATS, VOCAB + 9, generator=generator) < 0.3,
        allowed=allowed,
        edits=edits,
        is_greedy=False,
        has_cuts=True,
    )
    return replace(batch, **changes)


def make_logits(seed: int) -> torch.Tensor:
    """With ties, since half of them are rounded."""
    logits = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[::2] = logits[::2].round()
    return logits


@pytest.mark.parametrize("seed", range(30))
def test_sampled_tokens_are_those_of_the_reference(seed: int) -> None:
    logits = make_logits(seed)
    for changes in ({}, {"edits": None, "allowed": None}, {"output_counts": None, "is_in_prompt": None}):
        batch = sampling_batch(seed, **changes)
        assert plain_kernels.sample(logits.clone(), batch).tolist() == reference.sample(logits, batch).tolist()


def test_greedy_rows_take_the_first_of_the_best() -> None:
    logits = torch.zeros(ROWS, VOCAB)
    batch = sampling_batch(0, is_greedy=True, temperatures=torch.zeros(ROWS), allowed=None, edits=None)
    batch = replace(batch, output_counts=None, is_in_prompt=None)
    assert plain_kernels.sample(logits, batch).tolist() == [0] * ROWS


@pytest.mark.parametrize("is_greedy", [False, True])
def test_rows_without_a_number_or_a_token_fail_alone(is_greedy: bool) -> None:
    logits = make_logits(5)
    logits[2, 7], logits[4, 0] = math.nan, math.inf
    edits = LogitEdits(torch.full((VOCAB,), 6), torch.arange(VOCAB), torch.full((VOCAB,), -math.inf))
    temperatures = torch.full((ROWS,), 0.0 if is_greedy else 1.0)
    batch = sampling_batch(5, edits=edits, allowed=None, is_greedy=is_greedy, temperatures=temperatures)
    tokens = plain_kernels.sample(logits, batch).tolist()
    assert [i for i, token in enumerate(tokens) if token == FAILED] == [2, 4, 6]


def test_numbers_are_those_of_the_reference() -> None:
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63)])
    choices = torch.tensor([0, 3, 1023, 7, 1], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2**33, 17, 2**31])
    expected = [
        reference.uniform(*row) for row in zip(seeds.tolist(), choices.tolist(), positions.tolist(), strict=True)
    ]
    assert plain_kernels.uniform(seeds, choices, positions).tolist() == expected
