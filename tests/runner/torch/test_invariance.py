"""Batching never changes an answer of the PyTorch runner, row by row: the same tests as the native one's."""

from __future__ import annotations

import pytest
from tests.runner.invariance import LENGTHS, Prompt, make_prompts
from tests.runner.test_invariance import (  # noqa: F401
    alone,
    test_batches_of_any_size_chunk_block_and_thread_count,
    test_preemption_at_block_borders,
    test_preemption_in_a_tight_pool,
    test_prefix_hits_of_earlier_and_of_simultaneous_requests,
    test_three_choices_fork_the_prompt_and_differ,
)
from tests.runner.torch.models import row_by_row_model

from everystop.runner.torch.loading import TorchModel


@pytest.fixture(scope="module")
def tiny() -> TorchModel:
    """A tiny model with sizes that fit no vector."""
    return row_by_row_model()


@pytest.fixture(scope="module")
def prompts(tiny: TorchModel) -> list[Prompt]:
    """Thirty-two prompts of mixed lengths; each stays long enough to be met by all others, whatever the chunk."""
    return make_prompts(LENGTHS, tiny.spec.vocab_size, max_tokens=340)
