"""Models for the runner's tests: tiny random ones of each family, the embedded one, and the same in transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tests.model.builders import tiny_model, write_folder
from tests.runner import invariance

from everystop.model.checkpoint import inspect_model
from everystop.model.spec import Float32Array
from everystop.model.weights import LoadedModel, load_model

# Odd on purpose: no size is a multiple of a vector or of a group of 64 inputs.
ODD_SIZES = {
    "hidden_size": 84,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "vocab_size": 150,
    "max_position_embeddings": 1024,
}


def random_transformer(architecture: str, **overrides: Any) -> transformers.PreTrainedModel:
    """A tiny model whose activations keep a sensible size and whose attention is not flat."""
    model = tiny_model(architecture, **ODD_SIZES | overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 0.3)
            if parameter.ndim == 1:
                parameter.add_(0.7)
        model.get_input_embeddings().weight.mul_(4.0)
    return model


def load_transformer(model: transformers.PreTrainedModel, dtype: str) -> LoadedModel:
    """The same weights as the native runner takes them."""
    with tempfile.TemporaryDirectory() as folder:
        return load_model(inspect_model(write_folder(Path(folder), model)), dtype=dtype, num_threads=1)


@cache
def random_model(architecture: str, dtype: str) -> LoadedModel:
    """A tiny random model of a family, loaded once."""
    return load_transformer(random_transformer(architecture), dtype)


def make_runner(model: Any, **overrides: Any) -> Any:
    """A runner with room for one long sequence, on two threads; of PyTorch for a model of its own."""
    settings: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 32,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "num_threads": 2,
    }
    return invariance.make_runner(model, **settings | overrides)


def reference_logits(model: transformers.PreTrainedModel, token_ids: Sequence[int]) -> Float32Array:
    """Logits [T, V] of transformers in float32."""
    with torch.inference_mode():
        logits: Float32Array = model(torch.tensor([list(token_ids)])).logits[0].numpy()
    return logits


def transformer_from_gguf(path: Path) -> transformers.PreTrainedModel:
    """A Llama GGUF file in transformers: read and dequantised by the gguf package, the rows of q and k put back."""
    reader = gguf.GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    config = transformers.LlamaConfig(
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    state = {name: _from_gguf(name, tensors, config) for name in model.state_dict() if name != "lm_head.weight"}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()


def _from_gguf(name: str, tensors: dict[str, np.ndarray], config: transformers.LlamaConfig) -> torch.Tensor:
    outer = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
    inner = {
        "input_layernorm": "attn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    parts = name.split(".")
    if name in outer:
        return torch.tensor(tensors[outer[name] + ".weight"])
    values = tensors[f"blk.{parts[2]}.{inner[parts[-2]]}.weight"]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(parts[-2])
    if heads:
        # Row i of a head of d rows is row (i % 2) · d/2 + i // 2 in transformers.
        rows, columns = values.shape
        values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return torch.tensor(np.ascontiguousarray(values))
