"""Tiny models of each family, written as folders and as GGUF files, and what the loader must make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

HIDDEN, LAYERS, VOCAB, CONTEXT = 64, 2, 96, 128


class PlainPacker:
    """Packs nothing, so that packed weights can be compared; converts with the gguf package."""

    def layout(self, dtype: str) -> str:
        return "plain"

    def pack(self, dtype: str, weights: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(weights, dtype=np.float32).view(np.uint8).reshape(-1)

    def dequantize(self, type_id: int, raw: np.ndarray, num_rows: int, num_columns: int) -> np.ndarray:
        values = gguf.quants.dequantize(raw.reshape(num_rows, -1), gguf.GGMLQuantizationType(type_id))
        return values.astype(np.float32).reshape(num_rows, num_columns)


def tiny_model(architecture: str, **overrides: Any) -> transformers.PreTrainedModel:
    """A model of the family with random weights, biases and norms included."""
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "pad_token_id": None,
    }
    config = transformers.AutoConfig.for_model(architecture, **settings | overrides)
    torch.manual_seed(hash_of(architecture))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.eval()


def hash_of(text: str) -> int:
    """A small number that is the same in every process."""
    return sum(ord(character) * 31**i for i, character in enumerate(text)) % 10_007


def state_of(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors as a checkpoint has them: a tied lm_head is left out."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def write_folder(
    folder: Path, model: transformers.PreTrainedModel, *, num_shards: int = 1, dtype: torch.dtype | None = None
) -> Path:
    """Write `config.json` and safetensors as `save_pretrained` lays them out."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    state = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in state_of(model).items()}
    if num_shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(state)
    weight_map = {}
    for shard in range(num_shards):
        part = {name: state[name] for name in names[shard::num_shards]}
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor of transformers."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{GGUF_NAMES[stem]}.{suffix}"


def permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as the Llama converter of llama.cpp writes them."""
    shape = values.shape
    return values.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    keys: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a GGUF file with the gguf package; matrices in `quantization`, the rest as float32."""
    config = model.config
    arch = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if config.model_type != "qwen2" else HIDDEN // 4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (keys or {}).items():
        add_key(writer, key, value)
    for name, tensor in state_of(model).items():
        values = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and arch == "llama":
            values = permuted(values, heads)
        add_tensor(writer, gguf_name(name), values, quantization if values.ndim == 2 else gguf.GGMLQuantizationType.F32)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    close_writer(writer)
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key with the type that fits its value."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    """Add a tensor in the given format."""
    values = np.ascontiguousarray(values)
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    elif kind == gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def close_writer(writer: gguf.GGUFWriter) -> None:
    """Write everything out."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def expected_weights(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """The canonical weights, unpacked, straight from the model."""
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}

    def joined(layer: int, *names: str) -> np.ndarray:
        return np.concatenate([state[f"model.layers.{layer}.{name}"] for name in names])

    result = {
        "embed_tokens": state["model.embed_tokens.weight"],
        "norm": state["model.norm.weight"],
        "lm_head": state["lm_head.weight"],
    }
    for layer in range(model.config.num_hidden_layers):
        prefix = f"layers.{layer}."
        result[prefix + "attn_norm"] = joined(layer, "input_layernorm.weight")
        result[prefix + "qkv"] = joined(layer, *(f"self_attn.{x}_proj.weight" for x in "qkv"))
        result[prefix + "o"] = joined(layer, "self_attn.o_proj.weight")
        result[prefix + "mlp_norm"] = joined(layer, "post_attention_layernorm.weight")
        result[prefix + "gate_up"] = joined(layer, "mlp.gate_proj.weight", "mlp.up_proj.weight")
        result[prefix + "down"] = joined(layer, "mlp.down_proj.weight")
        if f"model.layers.{layer}.self_attn.q_proj.bias" in state:
            result[prefix + "qkv_bias"] = joined(layer, *(f"self_attn.{x}_proj.bias" for x in "qkv"))
        if f"model.layers.{layer}.self_attn.q_norm.weight" in state:
            result[prefix + "q_norm"] = joined(layer, "self_attn.q_norm.weight")
            result[prefix + "k_norm"] = joined(layer, "self_attn.k_norm.weight")
    return result


def unpacked(weights: dict[str, np.ndarray], like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights of a `PlainPacker` in the shapes of `like`."""
    return {
        name: (array.view(np.float32) if array.dtype == np.uint8 else array).reshape(like[name].shape)
        for name, array in weights.items()
    }
