"""The whole runner on Triton's kernels, against the plain ones; batches change nothing where it is deterministic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.runner.invariance import RANDOM, Setting, assert_same, make_prompts, serve, serve_alone
from tests.runner.models import make_runner, random_transformer
from tests.runner.test_native import assert_close
from tests.runner.torch.models import torch_model

from everystop.runner.torch.plain_sets import PlainKernels
from everystop.runner.torch.triton_set import DeterministicTritonKernels, TritonKernels

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def _on_the_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.fail("these tests put the runner on the CPU; leave TRITON_INTERPRET at 1")


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_logits_are_those_of_the_plain_kernels(architecture: str) -> None:
    transformer = random_transformer(architecture, **SIZES)
    ids = list(range(1, 45))
    runners = [
        make_runner(torch_model(transformer, kernels=kernels), max_num_batched_tokens=30)
        for kernels in (TritonKernels(), DeterministicTritonKernels(), PlainKernels())
    ]
    triton, deterministic, plain = (runner.logits(ids) for runner in runners)
    assert_close(triton, plain, 1e-4)
    assert_close(deterministic, plain, 1e-4)


def test_requests_get_the_tokens_of_the_plain_kernels() -> None:
    """Greedy and drawn, with penalties, a bias and a mask, in chunks."""
    transformer = random_transformer("llama", **SIZES)
    prompts = make_prompts((21, 7, 12), 150, max_tokens=3)
    prompts[0] = replace(prompts[0], params=replace(prompts[0].params, logit_bias=((3, 2.0),), min_tokens=2))
    params = replace(RANDOM, top_k=9, allowed_token_ids=tuple(range(0, 150, 2)), max_tokens=3)
    prompts[2] = replace(prompts[2], params=params)
    setting = Setting(max_num_prefill_tokens=16, block_size=16, num_tokens=512, max_num_seqs=3)
    triton, plain = (
        serve(torch_model(transformer, kernels=kernels), setting, prompts)
        for kernels in (TritonKernels(), PlainKernels())
    )
    assert triton.tokens == plain.tokens


def test_batches_change_no_bit_where_it_is_deterministic() -> None:
    """With prompts in pieces, one step ahead."""
    model = torch_model(random_transformer("llama", **SIZES), kernels=DeterministicTritonKernels())
    prompts = make_prompts((19, 3), 150, max_tokens=4)
    setting = Setting(max_num_prefill_tokens=10, block_size=16, num_tokens=512, max_num_seqs=2, depth=1)
    assert_same(serve(model, setting, prompts), serve_alone(model, prompts))
