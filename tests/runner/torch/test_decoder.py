"""The decoder in PyTorch, float32 on the CPU, against transformers; what is loaded, and in which dtype."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.model.builders import PlainPacker, write_folder, write_gguf
from tests.runner.models import make_runner, random_transformer, reference_logits, transformer_from_gguf
from tests.runner.test_native import VARIANTS, assert_close, text_tokens
from tests.runner.torch.models import plain_model, torch_model

from everystop.core.errors import ModelError
from everystop.model.checkpoint import inspect_model
from everystop.runner.torch.device import CpuDevice
from everystop.runner.torch.kernels.reference import quantize_rows
from everystop.runner.torch.linear import Fp8Linear, PlainLinear
from everystop.runner.torch.loading import load_model, random_weights
from everystop.runner.torch.plain_sets import PlainKernels, RowByRowKernels


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_models_of_each_family_equal_transformers(variant: str) -> None:
    architecture, overrides = VARIANTS[variant]
    model = random_transformer(architecture, **overrides)
    rng = np.random.default_rng(0)
    for kernels in (PlainKernels(), RowByRowKernels()):
        runner = make_runner(torch_model(model, kernels=kernels), max_num_batched_tokens=100)
        for length in (1, 5, 300):
            ids = rng.integers(0, 150, length).tolist()
            assert_close(runner.logits(ids), reference_logits(model, ids), 1e-4)


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_embedded_model_equals_transformers(smollm2_path: Path) -> None:
    """Nine prompts of 1 to 300 tokens, taken from all over a text; the file is dequantised as it is loaded."""
    text, reference = text_tokens(smollm2_path), transformer_from_gguf(smollm2_path)
    model = load_model(
        inspect_model(smollm2_path), dtype="float32", device=CpuDevice(), kernels=PlainKernels(), num_threads=1
    )
    runner = make_runner(model)
    for index, length in enumerate((1, 2, 5, 16, 31, 33, 64, 100, 300)):
        ids = text[index * 300 : index * 300 + length]
        assert_close(runner.logits(ids), reference_logits(reference, ids), 1e-3)


# ------------------------------------------------------------------------------------ loading


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_those_of_the_file_rounded_once(stored: torch.dtype, dtype: str) -> None:
    transformer = random_transformer("qwen2", hidden_size=120)
    model = torch_model(transformer, dtype=dtype, stored=stored)
    state = {name: t.to(stored).to(getattr(torch, dtype)) for name, t in transformer.state_dict().items()}
    weights, layer = model.weights, model.weights.layers[1]
    assert torch.equal(weights.embed_tokens, state["model.embed_tokens.weight"])
    assert torch.equal(weights.lm_head.weight, state["lm_head.weight"])
    prefix = "model.layers.1."
    assert isinstance(layer.qkv, PlainLinear)
    parts = [state[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.qkv.weight, torch.cat(parts))
    assert layer.qkv.bias is not None
    assert torch.equal(layer.qkv.bias, torch.cat([state[f"{prefix}self_attn.{name}_proj.bias"] for name in "qkv"]))
    assert torch.equal(layer.mlp_norm, state[f"{prefix}post_attention_layernorm.weight"])
    assert isinstance(layer.down, PlainLinear)
    assert torch.equal(layer.down.weight, state[f"{prefix}mlp.down_proj.weight"])
    assert model.num_bytes == sum(t.nbytes for t in state.values())
    assert model.num_step_bytes == model.num_bytes - weights.embed_tokens.nbytes


@pytest.mark.parametrize(
    "quantization", [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0]
)
def test_gguf_files_are_dequantised_as_they_are_loaded(tmp_path: Path, quantization: gguf.GGMLQuantizationType) -> None:
    transformer = random_transformer("llama", hidden_size=96, intermediate_size=128, head_dim=16)
    checkpoint = inspect_model(write_gguf(tmp_path / "m.gguf", transformer, quantization=quantization))
    model = load_model(checkpoint, dtype="bfloat16", device=CpuDevice(), kernels=PlainKernels())
    up = torch.from_numpy(checkpoint.read("layers.0.up", PlainPacker().dequantize)).bfloat16()
    gate_up = model.weights.layers[0].gate_up
    assert isinstance(gate_up, PlainLinear)
    assert torch.equal(gate_up.weight[128:], up)


def test_tied_head_takes_no_memory_of_its_own() -> None:
    tied = torch_model(random_transformer("llama", tie_word_embeddings=True))
    assert tied.weights.is_tied
    untied = plain_model()
    assert untied.num_bytes - tied.num_bytes == tied.weights.embed_tokens.nbytes
    assert tied.num_step_bytes == tied.num_bytes


def test_weights_beyond_float16_are_refused_with_the_other_dtypes(tmp_path: Path) -> None:
    transformer = random_transformer("llama")
    with torch.no_grad():
        transformer.model.layers[1].mlp.down_proj.weight[3, 5] = 1e6
    checkpoint = inspect_model(write_folder(tmp_path, transformer))
    with pytest.raises(ModelError, match=r"layers.1.down reaches 1e\+06, beyond float16; use --dtype bfloat16"):
        load_model(checkpoint, dtype="float16", device=CpuDevice(), kernels=PlainKernels())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8"])
def test_logits_of_narrow_dtypes_follow_float32(dtype: str) -> None:
    transformer = random_transformer("qwen3")
    ids = np.random.default_rng(1).integers(0, 150, 100).tolist()
    exact = reference_logits(transformer, ids)
    logits = make_runner(torch_model(transformer, dtype=dtype, kernels=PlainKernels())).logits(ids)
    assert (
        np.corrcoef(exact.ravel(), logits.ravel())[0, 1] > {"bfloat16": 0.9995, "float16": 0.9999, "fp8": 0.98}[dtype]
    )


# ---------------------------------------------------------------------------------------- fp8


def test_fp8_rows_have_scales_of_their_own() -> None:
    x = torch.randn(7, 100) * torch.logspace(-3, 3, 7)[:, None]
    values, scales = quantize_rows(x)
    assert values.dtype is torch.float8_e4m3fn
    error = (values.float() * scales[:, None] - x).abs().amax(1) / x.abs().amax(1)
    assert error.max() < 2**-4
    alone = [quantize_rows(row[None]) for row in x]
    assert torch.equal(values.float(), torch.cat([v.float() for v, _ in alone]))
    assert torch.equal(scales, torch.cat([s for _, s in alone]))


def test_fp8_projection_is_that_of_the_quantised_numbers() -> None:
    x, weight, bias = torch.randn(5, 64), torch.randn(48, 64), torch.randn(48)
    linear = Fp8Linear(*quantize_rows(weight), bias)
    expected = x @ weight.t() + bias
    out = linear(PlainKernels(), x)
    assert (out - expected).norm() < 0.05 * expected.norm()
    assert linear.num_bytes == 48 * 64 + 48 * 4 + 48 * 4
    zeros = linear(PlainKernels(), torch.zeros(1, 64))
    assert torch.equal(zeros[0], bias)


def test_random_weights_have_the_sizes_of_the_spec() -> None:
    model = plain_model("qwen2")
    weights = random_weights(model.spec, "float32", torch.device("cpu"))
    for name in ("qkv", "o", "gate_up", "down"):
        one, other = getattr(weights.layers[1], name), getattr(model.weights.layers[1], name)
        assert one.weight.shape == other.weight.shape
        assert (one.bias is None) == (other.bias is None)
    assert weights.lm_head.weight.shape == model.weights.lm_head.weight.shape
    assert not weights.is_tied
