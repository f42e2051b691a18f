"""How many prompt tokens a step has beside decoders, where these are many."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.budget import prefill_beside

LONG = 900


@pytest.mark.parametrize(
    ("num_decoders", "num_others", "most"),
    [(0, 1, None), (1, 1, 64), (12, 3, 64), (13, 3, 65), (16, 16, 80), (16, 17, None), (64, 0, 320)],
)
def test_the_limit_grows_with_the_decoders_and_ends_where_others_are_more(
    num_decoders: int, num_others: int, most: int | None
) -> None:
    assert prefill_beside(num_decoders, num_others, 5) == most
    assert prefill_beside(num_decoders, num_others, 0) is None
    assert prefill_beside(num_decoders, num_others, None) is None


def decoding(num: int, **limits: Any) -> Harness:
    """So many requests that decode, under a budget of 256 tokens."""
    usual = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "num_blocks": 2000, "max_prefill_per_decode": 5}
    harness = Harness(make_scheduler(**usual | limits))
    for request_id in range(num):
        harness.add(make_request(request_id, 8, max_tokens=60))
    while not harness.plans or rows(harness) != dict.fromkeys(range(num), 1):
        harness.turn()
    return harness


def rows(harness: Harness) -> dict[int, int]:
    """Tokens of each request in the last step."""
    return {row.request_id: row.num_tokens for row in harness.plans[-1].rows}


def chunk_beside(harness: Harness, num_long: int = 1) -> int:
    """Prompt tokens of the step after so many long prompts have come."""
    for request_id in range(1000, 1000 + num_long):
        harness.add(make_request(request_id, LONG, max_tokens=200))
    harness.turn()
    return sum(num for request_id, num in rows(harness).items() if request_id >= 1000)


@pytest.mark.parametrize(("num_decoders", "chunk"), [(1, 64), (16, 80), (20, 100)])
def test_a_long_prompt_beside_decoders_comes_in_short_chunks(num_decoders: int, chunk: int) -> None:
    assert chunk_beside(decoding(num_decoders)) == chunk


def test_where_nobody_decodes_a_prompt_takes_the_whole_step() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=256, num_blocks=2000, max_prefill_per_decode=5))
    assert chunk_beside(harness) == 256


def test_where_more_wait_for_a_token_than_decode_they_take_the_whole_step() -> None:
    assert chunk_beside(decoding(4), num_long=5) == 252
    assert chunk_beside(decoding(4), num_long=4) == 64


def test_those_for_whom_there_is_no_slot_do_not_count() -> None:
    """More chunks would bring none of them a token sooner."""
    assert chunk_beside(decoding(4, max_num_seqs=5), num_long=30) == 64


def test_a_narrower_limit_holds_beside_it() -> None:
    assert chunk_beside(decoding(16, max_num_prefill_tokens=48)) == 48
    assert chunk_beside(decoding(16, max_num_batched_tokens=64)) == 48


def test_a_target_on_time_takes_its_place() -> None:
    """Who says how long a step may last has said what is wanted."""
    assert chunk_beside(decoding(16, target_itl_ns=10**12)) == 240


def test_without_the_limit_a_prompt_takes_what_is_left() -> None:
    assert chunk_beside(decoding(16, max_prefill_per_decode=None)) == 240
