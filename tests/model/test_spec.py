from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tests.model.builders import tiny_model, write_folder, write_gguf
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from everystop.core.errors import ModelFileDamaged, UnsupportedModel
from everystop.model.checkpoint import inspect_model
from everystop.model.spec import DecoderSpec, RopeScaling, check_spec, rope_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with bounds": YARN | {"beta_fast": 24.0, "beta_slow": 2.0, "truncate": False},
    "yarn with attention factor": YARN | {"attention_factor": 1.25},
    "yarn with mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
}


def rope_config(scaling: dict[str, Any], theta: float, head_dim: int) -> transformers.LlamaConfig:
    parameters = {"rope_theta": theta, **scaling}
    return tiny_model("llama", rope_parameters=parameters, max_position_embeddings=256, head_dim=head_dim).config


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 64), (500_000.0, 128)])
def test_rope_frequencies_equal_those_of_transformers(tmp_path: Path, name: str, theta: float, head_dim: int) -> None:
    config = rope_config(SCALINGS[name], theta, head_dim)
    rotary = LlamaRotaryEmbedding(config)
    config.save_pretrained(tmp_path)
    spec = folder_spec(tmp_path, config)
    frequencies, factor = rope_frequencies(spec)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=2.5e-7)
    assert factor == pytest.approx(rotary.attention_scaling, rel=1e-12)


def folder_spec(folder: Path, config: transformers.LlamaConfig) -> DecoderSpec:
    """The spec that the loader reads from a configuration."""
    model = transformers.LlamaForCausalLM(config)
    return inspect_model(write_folder(folder, model)).spec


def test_scaling_of_transformers_4_is_read_too(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_model("llama"))
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(config))
    spec = inspect_model(folder).spec
    assert (spec.rope_theta, spec.rope) == (5e5, RopeScaling(kind="linear", factor=2.0))


def test_gguf_scaling_matches_the_folder(tmp_path: Path) -> None:
    for kind in ("linear", "yarn"):
        scaling = SCALINGS[kind]
        model = tiny_model("llama", rope_parameters={"rope_theta": 1e4, **scaling})
        keys = {
            "llama.rope.scaling.type": kind,
            "llama.rope.scaling.factor": scaling["factor"],
            "llama.rope.scaling.original_context_length": 64,
        }
        file = inspect_model(write_gguf(tmp_path / f"{kind}.gguf", model, keys=keys)).spec
        folder = inspect_model(write_folder(tmp_path / kind, model)).spec
        ours, theirs = rope_frequencies(file), rope_frequencies(folder)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1] == pytest.approx(theirs[1])
        assert file.max_position == max(128, 64 * int(scaling["factor"]))


def test_rope_freqs_tensor_is_the_scaling_of_llama3(tmp_path: Path) -> None:
    model = tiny_model("llama", rope_parameters={"rope_theta": 1e4, **LLAMA3})
    plain = rope_frequencies(inspect_model(write_gguf(tmp_path / "plain.gguf", model)).spec)[0]
    wanted = rope_frequencies(inspect_model(write_folder(tmp_path / "folder", model)).spec)[0]
    factors = (plain / wanted).astype(np.float32)
    assert factors.max() > 2
    checkpoint = inspect_model(write_gguf(tmp_path / "m.gguf", model, extra_tensors={"rope_freqs.weight": factors}))
    assert checkpoint.warnings == ()
    np.testing.assert_allclose(rope_frequencies(checkpoint.spec)[0], wanted, rtol=3e-7)


def test_context_of_yarn_is_what_the_scaling_reaches(tmp_path: Path) -> None:
    model = tiny_model("qwen3", rope_parameters={"rope_theta": 1e4, **YARN}, max_position_embeddings=64)
    assert inspect_model(write_folder(tmp_path, model)).spec.max_position == 256


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"model_type": "gemma3"}, "'gemma3'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "su", "factor": 2.0}}, "'su'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"hidden_act": "gelu"}, "'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ("mistral", {"sliding_window": 64}, "sliding attention window .here 64 tokens"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "layer_types": None},
            "sliding",
        ),
    ],
)
def test_unsupported_config_is_refused_by_name(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    folder = write_folder(tmp_path, tiny_model(architecture))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModel, match=message) as caught:
        inspect_model(folder)
    assert "config.json" in str(caught.value)


def test_sliding_window_that_is_off_or_longer_than_the_context_is_no_matter(tmp_path: Path) -> None:
    for name, architecture, changes in (
        ("a", "mistral", {"sliding_window": 128}),
        ("b", "qwen2", {"use_sliding_window": False, "sliding_window": 64}),
        ("c", "qwen2", {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 2}),
    ):
        folder = write_folder(tmp_path / name, tiny_model(architecture))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        assert inspect_model(folder).spec.max_position == 128


@pytest.mark.parametrize("value", ["64", None, 1.5, True, [1]])
def test_config_values_of_the_wrong_type_are_named(tmp_path: Path, value: Any) -> None:
    folder = write_folder(tmp_path, tiny_model("llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": value}))
    with pytest.raises(ModelFileDamaged, match="hidden_size"):
        inspect_model(folder)


def test_absurd_sizes_are_refused() -> None:
    spec = DecoderSpec(
        architecture="llama",
        num_layers=1 << 40,
        hidden_size=64,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        max_position=128,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
    )
    with pytest.raises(UnsupportedModel, match="num_layers"):
        check_spec(spec, "test")
