from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.model.builders import PlainPacker, expected_weights, tiny_model, unpacked, write_folder, write_gguf

from everystop.core.errors import ModelError, ModelFileDamaged, UnsupportedModel
from everystop.model.checkpoint import inspect_model
from everystop.model.weights import LoadedModel, NativePacker, halves_from_pairs, load_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def load_plain(path: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(inspect_model(path), dtype=dtype, packer=PlainPacker())


def assert_same_weights(loaded: LoadedModel, expected: dict[str, np.ndarray]) -> None:
    assert loaded.weights.keys() == expected.keys()
    for name, array in unpacked(loaded.weights, expected).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_folder_weights_equal_the_model(tmp_path: Path, architecture: str, num_shards: int) -> None:
    model = tiny_model(architecture)
    loaded = load_plain(write_folder(tmp_path, model, num_shards=num_shards))
    assert_same_weights(loaded, expected_weights(model))
    assert loaded.notes == ()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_gguf_weights_equal_the_model(tmp_path: Path, architecture: str) -> None:
    model = tiny_model(architecture)
    loaded = load_plain(write_gguf(tmp_path / "model.gguf", model))
    assert_same_weights(loaded, expected_weights(model))
    assert loaded.notes == ()


def test_gguf_rows_of_llama_are_really_permuted(tmp_path: Path) -> None:
    model = tiny_model("llama")
    checkpoint = inspect_model(write_gguf(tmp_path / "model.gguf", model))
    raw = checkpoint.read("layers.0.q", PlainPacker().dequantize)
    wanted = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    assert not np.array_equal(raw, wanted)
    np.testing.assert_array_equal(halves_from_pairs(raw, 4), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_folders_are_widened_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    folder = write_folder(tmp_path, model)
    assert_same_weights(load_plain(folder), expected_weights(model))
    assert list(inspect_model(folder).formats) == [{torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]]


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_gguf_and_folder_agree_on_queries_and_keys(tmp_path: Path, kind: str) -> None:
    model = tiny_model("llama")
    expected = expected_weights(model)
    path = write_gguf(tmp_path / "model.gguf", model, quantization=gguf.GGMLQuantizationType[kind])
    found = unpacked(load_plain(path).weights, expected)
    assert inspect_model(path).formats == {kind: 16, "F32": 5}
    for layer in range(2):
        ours, theirs = found[f"layers.{layer}.qkv"].ravel(), expected[f"layers.{layer}.qkv"].ravel()
        cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
        assert cosine > 0.999


@pytest.mark.parametrize("write", ["folder", "gguf"])
def test_missing_lm_head_is_the_embedding(tmp_path: Path, write: str) -> None:
    model = tiny_model("qwen3", tie_word_embeddings=True)
    path = write_folder(tmp_path / "m", model) if write == "folder" else write_gguf(tmp_path / "m.gguf", model)
    loaded = load_plain(path)
    assert loaded.spec.tied_embeddings
    assert_same_weights(loaded, expected_weights(model))


def test_lm_head_of_a_tied_model_is_taken_where_it_is_there(tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = expected_weights(model)
    model.config.tie_word_embeddings = True
    folder = write_folder(tmp_path, model)
    model.config.tie_word_embeddings = False
    write_folder(tmp_path / "other", model)
    (folder / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    assert_same_weights(load_plain(folder), expected)


def test_int8_keeps_embeddings_as_float16_and_norms_as_float32(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    loaded = load_model(inspect_model(write_folder(tmp_path, model)), dtype="int8", num_threads=1)
    expected = expected_weights(model)
    assert loaded.layout == NativePacker(1).layout("int8")
    np.testing.assert_array_equal(loaded.weights["embed_tokens"], expected["embed_tokens"].astype(np.float16))
    np.testing.assert_array_equal(loaded.weights["layers.1.qkv_bias"], expected["layers.1.qkv_bias"])
    packed = NativePacker(2).pack("int8", expected["layers.0.gate_up"])
    np.testing.assert_array_equal(loaded.weights["layers.0.gate_up"], packed)


def test_packed_weights_are_aligned_and_read_only(tmp_path: Path) -> None:
    loaded = load_model(inspect_model(write_folder(tmp_path, tiny_model("llama"))), dtype="int8")
    for array in loaded.weights.values():
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable


def test_embeddings_beyond_float16_are_refused_for_int8(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 5] = 1e5
    folder = write_folder(tmp_path, model)
    with pytest.raises(ModelError, match=r"1e\+05, beyond float16; use --dtype float32"):
        load_plain(folder, "int8")
    assert load_plain(folder, "float32").weights["embed_tokens"][3, 5] == 1e5


def test_spec_of_folder_and_gguf_are_equal(tmp_path: Path) -> None:
    for architecture in ("llama", "qwen2", "qwen3"):
        model = tiny_model(architecture)
        folder = inspect_model(write_folder(tmp_path / architecture, model)).spec
        file = inspect_model(write_gguf(tmp_path / f"{architecture}.gguf", model)).spec
        assert (folder.rms_norm_eps, file.rms_norm_eps) == (1e-6, pytest.approx(1e-6))
        for name in folder.__slots__:
            if name != "rms_norm_eps":
                assert getattr(folder, name) == getattr(file, name), name
        assert folder.num_parameters == sum(p.numel() for p in model.parameters())


def test_unknown_tensor_warns_and_unknown_bias_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    extra = {"blk.0.attn_sub_norm.weight": np.ones(64, np.float32)}
    path = write_gguf(tmp_path / "a.gguf", model, extra_tensors=extra)
    (note,) = load_plain(path).notes
    assert "blk.0.attn_sub_norm.weight" in note
    biased = {"blk.0.attn_output.bias": np.ones(64, np.float32)}
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_output\.bias"):
        inspect_model(write_gguf(tmp_path / "b.gguf", model, extra_tensors=biased))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.rope.dimension_count": 8}, "rotary embedding of 8 of 16 channels"),
        ({"llama.attention.sliding_window": 32}, "sliding attention window"),
        ({"llama.expert_count": 4}, "mixture of experts"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.attention.value_length": 32}, "values of 32 channels"),
    ],
)
def test_unsupported_gguf_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), keys=keys)
    with pytest.raises(UnsupportedModel, match=message) as caught:
        inspect_model(path)
    assert str(path) in str(caught.value)


def test_unknown_gguf_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.add_tensor("x", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        inspect_model(tmp_path / "m.gguf")


def test_gguf_without_tensors_is_no_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "vocab.gguf"), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileDamaged, match="no tensors"):
        inspect_model(tmp_path / "vocab.gguf")


def test_gguf_shape_that_contradicts_the_keys_names_the_tensor(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.intermediate_size = 80
    with pytest.raises(ModelFileDamaged, match=r"'blk\.0\.ffn_gate\.weight' has the shape \[96, 64\].*\[80, 64\]"):
        inspect_model(write_gguf(tmp_path / "m.gguf", model))


@pytest.mark.parametrize("isa", ["nope", "neon" if os.uname().machine == "x86_64" else "avx2"])
def test_instruction_set_that_cannot_be_had_is_a_config_error(isa: str) -> None:
    code = (
        "from everystop.core.errors import ConfigError\n"
        "from everystop.model.weights import NativePacker\n"
        "try:\n    NativePacker(1).layout('int8')\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "EVERYSTOP_ISA": isa}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert f"EVERYSTOP_ISA={isa}" in result.stdout
