"""Log-probabilities of prompts from the PyTorch runner: what the native runner's tests do, in less."""

from __future__ import annotations

import pytest
from tests.runner import test_prompt_logprobs as native
from tests.runner.test_prompt_logprobs import (  # noqa: F401
    test_bad_words_are_the_same_in_any_batch,
    test_few_slots_score_many_positions_in_pieces,
    test_first_choice_scores_for_all,
    test_sampled_and_scored_tokens_agree_to_the_bit,
    test_scores_are_the_same_with_a_warm_cache,
    test_scores_are_those_of_the_models_own_logits,
    test_scores_survive_a_tight_pool,
    test_scores_survive_preemption_in_the_middle_of_the_prompt,
)
from tests.runner.torch.models import row_by_row_model

from everystop.runner.torch.loading import TorchModel


@pytest.fixture(scope="module")
def tiny() -> TorchModel:
    """A tiny model with sizes that fit no vector."""
    return row_by_row_model()


@pytest.mark.parametrize(("block_size", "chunk", "depth"), [(16, 7, 0), (32, 16, 1), (64, 33, 1), (32, None, 1)])
def test_scores_are_the_same_in_any_batch_and_in_any_chunks(
    tiny: TorchModel, block_size: int, chunk: int | None, depth: int
) -> None:
    native.test_scores_are_the_same_in_any_batch_and_in_any_chunks(tiny, block_size, chunk, 1, depth)
