"""Batching never changes an answer of the PyTorch runner, row by row: what the native runner's tests do, in less."""

from __future__ import annotations

import itertools

import pytest
from tests.runner import test_invariance as native
from tests.runner.invariance import LENGTHS, Prompt, Run, Setting, check_batch, make_prompts
from tests.runner.test_invariance import alone, describe  # noqa: F401
from tests.runner.torch.models import row_by_row_model

from everystop.runner.torch.loading import TorchModel


@pytest.fixture(scope="module")
def tiny() -> TorchModel:
    """A tiny model with sizes that fit no vector."""
    return row_by_row_model()


@pytest.fixture(scope="module")
def prompts(tiny: TorchModel) -> list[Prompt]:
    """Eight prompts of mixed lengths; each stays long enough to be met by all others, whatever the chunk."""
    return make_prompts(LENGTHS[:8], tiny.spec.vocab_size, max_tokens=115)


def settings() -> list[tuple[int, Setting]]:
    """Each chunk size with block sizes, batch sizes, prefix cache and depth in turns."""
    sizes, blocks, depths = itertools.cycle((8, 2, 5)), itertools.cycle((16, 32, 64)), itertools.cycle((0, 1, 1))
    return [
        (
            next(sizes),
            Setting(
                block_size=next(blocks), max_num_prefill_tokens=chunk, prefix_caching=turn % 2 == 1, depth=next(depths)
            ),
        )
        for turn, chunk in enumerate((7, 16, 33, 256, None, 7, None))
    ]


@pytest.mark.parametrize(("size", "setting"), settings(), ids=describe)
def test_batches_of_any_size_chunk_and_block(
    tiny: TorchModel,
    prompts: list[Prompt],
    alone: Run,  # noqa: F811
    size: int,
    setting: Setting,
) -> None:
    check_batch(tiny, alone, prompts, size, setting)


@pytest.mark.parametrize("block_size", [16, 64])
def test_prefix_hits_of_earlier_and_of_simultaneous_requests(tiny: TorchModel, block_size: int) -> None:
    native.test_prefix_hits_of_earlier_and_of_simultaneous_requests(tiny, block_size)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_at_block_borders(tiny: TorchModel, depth: int, prefix_caching: bool) -> None:
    native.test_preemption_at_block_borders(tiny, 16, depth, prefix_caching)


def test_preemption_in_a_tight_pool(tiny: TorchModel) -> None:
    native.test_preemption_in_a_tight_pool(tiny)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_three_choices_fork_the_prompt_and_differ(tiny: TorchModel, prefix_caching: bool) -> None:
    native.test_three_choices_fork_the_prompt_and_differ(tiny, prefix_caching)
