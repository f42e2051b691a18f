"""The weights that peers get: the same values as ours, in their formats."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from benchmarks.peers.peer import PeerError, Place
from benchmarks.peers.weights import (
    GGUF_KINDS,
    hf_name,
    quantise_rows,
    requantise,
    write_gguf,
    write_hf,
    write_hf_weights,
    write_w8a8,
)
from safetensors.numpy import load_file
from tests.model import builders
from tests.runner.models import make_runner

from everystop.model.checkpoint import inspect_model
from everystop.model.from_gguf import GgufCheckpoint
from everystop.model.home import Home
from everystop.model.weights import load_model


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_small_llama_comes_back_from_gguf_as_it_was(tmp_path: Path, is_tied: bool) -> None:
    model = builders.tiny_model("llama", tie_word_embeddings=is_tied)
    builders.write_gguf(tmp_path / "tiny.gguf", model)
    write_hf_weights(tmp_path / "hf", GgufCheckpoint(tmp_path / "tiny.gguf"))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    expected = builders.state_of(model)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name].numpy())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = torch.tensor([[1, 5, 9, 2]])
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_only_plain_llamas_are_written(tmp_path: Path) -> None:
    builders.write_gguf(tmp_path / "tiny.gguf", builders.tiny_model("qwen3"))
    with pytest.raises(PeerError, match="not qwen3"):
        write_hf_weights(tmp_path / "hf", GgufCheckpoint(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_requantised_files_hold_the_same_model(tmp_path: Path, kind: str) -> None:
    builders.write_gguf(tmp_path / "tiny.gguf", builders.tiny_model("llama", tie_word_embeddings=True))
    requantise(tmp_path / "tiny.gguf", tmp_path / "out.gguf", *GGUF_KINDS[kind])
    before, after = gguf.GGUFReader(tmp_path / "tiny.gguf"), gguf.GGUFReader(tmp_path / "out.gguf")
    layers, table = (gguf.GGMLQuantizationType[name] for name in GGUF_KINDS[kind])
    step = {"F16": 1e-3, "Q8_0": 0.02, "Q4_0": 0.4}
    for old, new in zip(before.tensors, after.tensors, strict=True):
        wanted = (
            table
            if new.name == "token_embd.weight"
            else layers
            if len(new.shape) > 1
            else gguf.GGMLQuantizationType.F32
        )
        assert (new.name, new.tensor_type) == (old.name, wanted)
        values = gguf.quants.dequantize(new.data, new.tensor_type)
        np.testing.assert_allclose(values, old.data, atol=step.get(wanted.name, 0.0), rtol=1e-3)
    assert after.fields["llama.block_count"].contents() == before.fields["llama.block_count"].contents()
    assert GgufCheckpoint(tmp_path / "out.gguf").spec == GgufCheckpoint(tmp_path / "tiny.gguf").spec


def test_rows_are_quantised_to_within_half_a_step() -> None:
    values = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    values[3] = 0.0
    quantised, scales = quantise_rows(values)
    assert (quantised.dtype, quantised.shape, scales.shape) == (np.int8, (5, 64), (5, 1))
    assert np.abs(quantised[:3]).max(axis=1).tolist() == [127, 127, 127]
    assert (np.abs(quantised * scales - values) <= scales * 0.501).all()


def test_names_in_hugging_face_files() -> None:
    assert hf_name("layers.3.q") == "model.layers.3.self_attn.q_proj.weight"
    assert hf_name("embed_tokens") == "model.embed_tokens.weight"
    assert hf_name("lm_head") == "lm_head.weight"


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_dequantised_folder_agrees_with_the_native_float32_logits(tmp_path: Path, smollm2_path: Path) -> None:
    place = Place(tmp_path)
    write_hf(place, lambda sentence: None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place.hf)
    ids = tokenizer("In the beginning there were 1,234 small words, and then there were more of them.")["input_ids"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(place.hf, dtype=torch.float32)
    with torch.inference_mode():
        wanted = reference(torch.tensor([ids])).logits[0].numpy()
    ours = load_model(inspect_model(smollm2_path), dtype="float32", num_threads=2, home=Home.from_environment())
    assert np.abs(make_runner(ours).logits(ids) - wanted).max() < 1e-3
    assert tokenizer.eos_token_id == reference.generation_config.eos_token_id == 2
    assert "system" in tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)

    write_w8a8(place, lambda sentence: None)
    arrays = load_file(place.w8a8 / "model.safetensors")
    assert arrays["model.layers.0.mlp.down_proj.weight"].dtype == np.int8
    assert json.loads((place.w8a8 / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    write_gguf(place, "Q8_0", lambda sentence: None)
    assert inspect_model(place.gguf("Q8_0")).formats == {"Q8_0": 211, "F32": 61}
