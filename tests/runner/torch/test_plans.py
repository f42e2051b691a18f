"""What the PyTorch runner does with plans: the same tests as the native one's."""

from __future__ import annotations

import pytest
from tests.runner.models import make_runner
from tests.runner.test_native import (  # noqa: F401
    test_a_chunk_that_samples_nothing_gives_no_token,
    test_a_request_that_cannot_be_taken_fails_alone,
    test_a_row_may_compute_positions_again,
    test_a_row_without_a_token_says_so_and_leaves_the_others_alone,
    test_copied_and_replaced_blocks_hold_the_same_tokens,
    test_greedy_generation_follows_the_logits,
    test_impossible_plans_are_refused_and_the_runner_lives,
    test_logprobs_come_only_for_those_who_asked,
    test_min_tokens_masks_stop_ids_that_exist,
    test_padded_rows_change_nothing,
    test_seeds_and_choices_choose_the_draw,
)
from tests.runner.torch.models import row_by_row_model

from everystop.runner.torch.runner import TorchRunner


@pytest.fixture
def runner() -> TorchRunner:
    """A tiny float32 model with 64 blocks of 32."""
    made: TorchRunner = make_runner(row_by_row_model())
    return made
