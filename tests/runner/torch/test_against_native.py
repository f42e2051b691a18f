"""The two runners in float32 on one model: the same logits to rounding, and so the same tokens, greedy and drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.runner.invariance import GREEDY, RANDOM, Prompt, Setting, make_prompts, serve
from tests.runner.models import load_transformer, make_runner, random_transformer
from tests.runner.test_native import load_embedded, text_tokens
from tests.runner.torch.models import torch_model

from everystop.core.plan import TokenLogprobs
from everystop.model.checkpoint import inspect_model
from everystop.runner.torch.device import CpuDevice
from everystop.runner.torch.loading import load_model
from everystop.runner.torch.plain_sets import PlainKernels


def assert_alike(logprobs: list[TokenLogprobs], others: list[TokenLogprobs], tolerance: float) -> None:
    np.testing.assert_allclose([e.logprob for e in logprobs], [e.logprob for e in others], atol=tolerance)
    assert [e.rank for e in logprobs] == [e.rank for e in others]
    assert [[i for i, _ in e.top] for e in logprobs] == [[i for i, _ in e.top] for e in others]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tiny_models_give_the_same_tokens_and_log_probabilities(architecture: str) -> None:
    """Every setting of sampling that there is, in a batch with chunks and prefix hits."""
    transformer = random_transformer(architecture, **({"hidden_size": 120} if architecture == "qwen2" else {}))
    prompts = make_prompts((33, 90, 7, 64, 17, 50), 150, max_tokens=40)
    extras = (
        {"top_k": 5, "min_p": 0.02},
        {"logit_bias": ((3, 4.0), (9, -5.0)), "min_tokens": 5},
        {"allowed_token_ids": tuple(range(0, 150, 3))},
        {"bad_word_ids": ((5,), (6, 7)), "frequency_penalty": 1.0},
        {"prompt_logprobs": 3, "repetition_penalty": 1.5},
        {"n": 2, "temperature": 0.7},
    )
    prompts = [replace(p, params=replace(p.params, **extra)) for p, extra in zip(prompts, extras, strict=True)]
    setting = Setting(max_num_prefill_tokens=40, prefix_caching=True, max_num_seqs=7)
    native = serve(load_transformer(transformer, "float32"), setting, prompts)
    torch_run = serve(torch_model(transformer, kernels=PlainKernels()), setting, prompts)
    assert torch_run.tokens == native.tokens
    for key, logprobs in native.logprobs.items():
        assert_alike(torch_run.logprobs[key], logprobs, 1e-4)
    for key, scores in native.prompt_logprobs.items():
        assert_alike(torch_run.prompt_logprobs[key], scores, 1e-4)


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_embedded_model_gives_the_same_logits_and_tokens(smollm2_path: Path) -> None:
    text = text_tokens(smollm2_path)
    native = load_embedded(smollm2_path, "float32")
    model = load_model(
        inspect_model(smollm2_path), dtype="float32", device=CpuDevice(), kernels=PlainKernels(), num_threads=1
    )
    ids = text[500:700]
    logits, expected = (make_runner(each).logits(ids) for each in (model, native))
    assert np.abs(logits - expected).max() < 1e-3
    prompts = [
        Prompt(tuple(text[i * 200 : i * 200 + length]), replace(params, max_tokens=20))
        for i, (length, params) in enumerate(((5, GREEDY), (40, GREEDY), (90, RANDOM), (17, replace(RANDOM, seed=5))))
    ]
    setting = Setting(max_num_prefill_tokens=64, max_num_seqs=4)
    ours, theirs = (serve(each, setting, prompts) for each in (model, native))
    assert ours.tokens == theirs.tokens
