"""Log-probabilities of prompts from the PyTorch runner: the same tests as the native one's."""

from __future__ import annotations

import pytest
from tests.runner.test_prompt_logprobs import (  # noqa: F401
    test_bad_words_are_the_same_in_any_batch,
    test_few_slots_score_many_positions_in_pieces,
    test_first_choice_scores_for_all,
    test_sampled_and_scored_tokens_agree_to_the_bit,
    test_scores_are_the_same_in_any_batch_and_in_any_chunks,
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
