"""Paged attention against its reference; rows that nobody else changes; and kernels that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runner.torch.kernels.attention_cases import TOLERANCE, Step, make_step
from tests.runner.torch.kernels.coverage import pairwise
from tests.runner.torch.kernels.mutants import mutant

from everystop.runner.torch.batch import AttentionBatch
from everystop.runner.torch.kernels import attention, reference

Attend = Callable[..., torch.Tensor]

# (rows, context) of each sequence: contexts of 1 to 600 positions, at and about borders of blocks, tiles and segments.
STEPS = {
    "decode, short": ([1, 1, 1], [1, 15, 33]),
    "decode, at borders": ([1, 1, 1], [16, 64, 65]),
    "decode, segments": ([1, 1, 1], [255, 257, 600]),
    "prompts, whole": ([1, 17, 40], [1, 17, 40]),
    "prompts, in pieces": ([31, 2], [63, 300]),
    "mixed": ([1, 23, 1, 9], [70, 23, 256, 521]),
}
FACTORS: dict[str, list[Any]] = {
    "step": list(STEPS),
    "group": [1, 2, 3, 4, 5, 6, 7, 8],
    "head_dim": [64, 80, 96, 128, 256],
    "block_size": [16, 32, 64],
    "window": [None, 1, 20, 300],
    "soft_cap": [None, 3.0],
    "dtype": [torch.float32, torch.float16],
    "deterministic": [False, True],
    "split": [None, True, False],
    "num_kv_heads": [1, 2],
}


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to values of about 1; infinite where a number is missing."""
    difference = (got.double() - wanted.double()).abs().max().item()
    return difference if difference == difference else float("inf")


def check(attend: Attend, case: dict[str, Any], device: torch.device) -> None:
    """A step of a case gives what the reference gives."""
    case = dict(case)
    query_lens, context_lens = STEPS[case.pop("step")]
    launch = {name: case.pop(name) for name in ("deterministic", "split") if name in case}
    form = {name: case.pop(name) for name in ("window", "soft_cap") if name in case}
    step = make_step(query_lens, context_lens, device=device, **case)
    arguments = (step.query, step.keys, step.values, step.batch, step.scale)
    got = attend(*arguments, **form, **launch)
    assert error_of(got, reference.paged_attention(*arguments, **form)) < TOLERANCE[step.query.dtype]


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=lambda case: "-".join(str(value) for value in case.values()))
def test_equals_the_reference(case: dict[str, Any], device: torch.device) -> None:
    check(attention.paged_attention, case, device)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", FACTORS["head_dim"])
@pytest.mark.parametrize("group", FACTORS["group"])
@pytest.mark.parametrize("block_size", FACTORS["block_size"])
def test_equals_the_reference_for_all_shapes_and_steps(
    head_dim: int, group: int, block_size: int, device: torch.device
) -> None:
    for step, window, soft_cap in product(STEPS, FACTORS["window"], FACTORS["soft_cap"]):
        case = {"step": step, "window": window, "soft_cap": soft_cap}
        shape = {"head_dim": head_dim, "group": group, "block_size": block_size}
        check(attention.paged_attention, case | shape, device)


@pytest.mark.slow
@pytest.mark.parametrize("length", range(1, 601))
def test_equals_the_reference_for_every_context(length: int, device: torch.device) -> None:
    for query_len in {1, min(length, 7)}:
        step = make_step([query_len], [length], num_kv_heads=1, device=device, seed=length)
        arguments = (step.query, step.keys, step.values, step.batch, step.scale)
        got = attention.paged_attention(*arguments)
        assert error_of(got, reference.paged_attention(*arguments)) < TOLERANCE[torch.float32]


def test_writes_to_a_given_output_that_is_a_view(device: torch.device) -> None:
    step = make_step([1, 5], [9, 20], device=device)
    wide = torch.zeros(6, 5, 96, device=device)
    out = wide[:, :4, :64]
    got = attention.paged_attention(step.query, step.keys, step.values, step.batch, step.scale, out=out)
    assert got is out
    wanted = reference.paged_attention(step.query, step.keys, step.values, step.batch, step.scale)
    assert error_of(out, wanted) < TOLERANCE[torch.float32]
    assert not wide[:, 4].any()
    assert not wide[:, :, 64:].any()


@pytest.mark.parametrize("split", [False, True])
def test_padding_of_a_captured_step_changes_nothing_and_gives_zeros(split: bool, device: torch.device) -> None:
    """Sequences without context: what they would read does not exist."""
    step = make_step([1, 1, 1, 1], [40, 300, 1, 1], device=device)
    lens = torch.tensor([40, 300, 0, 0], dtype=torch.int32, device=device)
    batch = AttentionBatch(step.batch.block_tables, step.batch.query_starts, lens, 1, 8192)
    got = attention.paged_attention(step.query, step.keys, step.values, batch, step.scale, split=split)
    alone = step.only(0, 1)
    wanted = attention.paged_attention(alone.query, alone.keys, alone.values, alone.batch, alone.scale, split=split)
    assert torch.equal(got[:2], wanted)
    assert not got[2:].any()


def test_upper_bounds_may_be_larger_than_what_is_there(device: torch.device) -> None:
    """Grids follow from bounds alone; programs beyond the end find nothing to do."""
    step = make_step([3, 1], [20, 50], device=device)
    roomy = AttentionBatch(
        step.batch.block_tables, step.batch.query_starts, step.batch.context_lens, 64, step.batch.max_context_len * 9
    )
    arguments = (step.query, step.keys, step.values)
    wanted = attention.paged_attention(*arguments, step.batch, step.scale)
    assert torch.equal(attention.paged_attention(*arguments, roomy, step.scale), wanted)


# ------------------------------------------------------------------------------------------------- batch invariance


def check_decoders_alone(attend: Attend, device: torch.device, window: int | None = None) -> None:
    """A decoder's bits are the same alone, in any order, beside any context, split or not."""
    step = make_step([1] * 5, [1, 64, 257, 513, 600], group=3, device=device)
    whole = attend(step.query, step.keys, step.values, step.batch, step.scale, window, split=False)
    for split in (False, True):
        for seqs in ([0], [1], [2], [3], [4], [4, 2], [3, 0, 1]):
            part = step.only(*seqs)
            got = attend(part.query, part.keys, part.values, part.batch, part.scale, window, split=split)
            assert torch.equal(got, whole[seqs])


def check_mixed_steps(attend: Attend, device: torch.device, window: int | None = None) -> None:
    """With `deterministic` a row's bits are the same in a step of decoders, beside prompts, and as part of a prompt."""
    step = make_step([1, 30, 1], [310, 300, 77], group=3, device=device)
    mixed = attend(step.query, step.keys, step.values, step.batch, step.scale, window, deterministic=True)
    for seqs in ([0], [2, 0], [1], [1, 2]):
        part = step.only(*seqs)
        got = attend(part.query, part.keys, part.values, part.batch, part.scale, window, deterministic=True)
        assert torch.equal(got, torch.cat([mixed[step.rows(seq)] for seq in seqs]))
    prompt = step.only(1)
    for row in (0, 6, 29):  # each as a decoder, after the rows before it
        context = torch.tensor([271 + row], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        batch = AttentionBatch(prompt.batch.block_tables, starts, context, 1, 271 + row)
        query = prompt.query[row : row + 1]
        for split in (False, True):
            options = {"deterministic": True, "split": split}
            got = attend(query, prompt.keys, prompt.values, batch, prompt.scale, window, **options)
            assert torch.equal(got[0], mixed[1 + row])


@pytest.mark.parametrize("window", [None, 100])
def test_a_decoder_gets_the_same_bits_whoever_else_is_there(window: int | None, device: torch.device) -> None:
    check_decoders_alone(attention.paged_attention, device, window)


@pytest.mark.parametrize("window", [None, 100])
def test_deterministic_rows_get_the_same_bits_in_every_kind_of_step(window: int | None, device: torch.device) -> None:
    check_mixed_steps(attention.paged_attention, device, window)


# ----------------------------------------------------------------------------------------------------------- mutants

WRONG = {
    "sees the next token": ("keys[None, :] <= position[:, None]", "keys[None, :] <= position[:, None] + 1"),
    "does not see itself": ("keys[None, :] <= position[:, None]", "keys[None, :] < position[:, None]"),
    "a window wider by one": ("keys[None, :] < window)", "keys[None, :] <= window)"),
    "a window without its first tile": ("first_key // TILE * TILE", "tl.cdiv(first_key, TILE) * TILE"),
    "the old sum not rescaled": ("part * keep[:, None]", "part"),
    "the old mass not rescaled": ("tl.fma(part_mass, keep, ", "(part_mass + "),
    "segments merged without their tops": ("other_total * take[:, None]", "other_total"),
    "heads of another group": ("head = kv_head * GROUP + rows % GROUP", "head = rows % GROUP"),
    "a table read a block late": ("table_ptr + keys // BLOCK_SIZE", "table_ptr + (keys + 1) // BLOCK_SIZE"),
    "values beyond the context": ("dims[None, :], mask=is_key[:, None] & is_dim", "dims[None, :], mask=is_dim"),
    "no cap": ("if HAS_CAP:", "if False:"),
}
CATCHING: list[dict[str, Any]] = [
    {"step": "mixed", "group": 3, "window": None, "soft_cap": None},
    {"step": "mixed", "group": 2, "window": 20, "soft_cap": None},
    {"step": "decode, segments", "group": 3, "window": None, "soft_cap": 3.0, "split": True},
]
VARIANT = {
    "tiles counted from the window": ("first_key // TILE * TILE", "first_key"),
    "segments by the number of sequences": ("SEGMENT=SEGMENT,", "SEGMENT=SEGMENT * min(batch.num_seqs, 2),"),
    "tiles by the kind of step": ("head_padded),\n        SEGMENT", "head_padded) * (1 + one_query),\n        SEGMENT"),
}


def check_all(attend: Attend, device: torch.device) -> None:
    """The steps that tell wrong kernels from right ones."""
    for case in CATCHING:
        check(attend, case, device)


def check_invariance(attend: Attend, device: torch.device) -> None:
    """All that is said of a row's bits."""
    for window in (100, None):
        check_decoders_alone(attend, device, window)
        check_mixed_steps(attend, device, window)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_told_from_the_right_one(name: str, tmp_path: Path, device: torch.device) -> None:
    changed = mutant(attention, *WRONG[name], tmp_path)
    with pytest.raises(AssertionError):
        check_all(changed.paged_attention, device)


@pytest.mark.parametrize("name", VARIANT)
def test_a_kernel_that_depends_on_others_is_found(name: str, tmp_path: Path, device: torch.device) -> None:
    changed = mutant(attention, *VARIANT[name], tmp_path)
    with pytest.raises(AssertionError):
        check_invariance(changed.paged_attention, device)


def test_steps_can_be_cut_for_these_tests() -> None:
    step: Step = make_step([1, 3], [4, 5])
    assert step.only(1).query.shape[0] == 3
    assert step.only(1).batch.query_starts.tolist() == [0, 3]
