"""Writes a folder with a Llama of given shapes and random weights, to serve sizes for which there is no model here.

    python -m benchmarks.random_model FOLDER [--shapes 1b] [--layers N]

Its answers are nonsense of the right length; its times are those of a model of these shapes. The weights are float16,
each layer the same, so that the file is written quickly; the server holds a copy of its own of each layer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.kernel_shapes import MODELS, Shapes

CONTEXT = 8192


def config_of(shapes: Shapes, num_layers: int) -> dict[str, Any]:
    """`config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shapes.hidden_size,
        "intermediate_size": shapes.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shapes.num_heads,
        "num_key_value_heads": shapes.num_kv_heads,
        "head_dim": shapes.head_dim,
        "vocab_size": shapes.vocab_size,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float16",
    }


def weights_of(shapes: Shapes, num_layers: int) -> dict[str, np.ndarray]:
    """Every tensor by its name; layers share theirs."""
    rng = np.random.default_rng(0)

    def random(num_outputs: int, num_inputs: int) -> np.ndarray:
        block = rng.standard_normal((min(num_outputs, 4096), num_inputs), dtype=np.float32) * num_inputs**-0.5
        return np.resize(block.astype(np.float16), (num_outputs, num_inputs))

    hidden, ones = shapes.hidden_size, np.ones(shapes.hidden_size, dtype=np.float16)
    query, key = shapes.num_heads * shapes.head_dim, shapes.num_kv_heads * shapes.head_dim
    layer = {
        "input_layernorm.weight": ones,
        "self_attn.q_proj.weight": random(query, hidden),
        "self_attn.k_proj.weight": random(key, hidden),
        "self_attn.v_proj.weight": random(key, hidden),
        "self_attn.o_proj.weight": random(hidden, query),
        "post_attention_layernorm.weight": ones,
        "mlp.gate_proj.weight": random(shapes.intermediate_size, hidden),
        "mlp.up_proj.weight": random(shapes.intermediate_size, hidden),
        "mlp.down_proj.weight": random(hidden, shapes.intermediate_size),
    }
    tensors = {"model.embed_tokens.weight": random(shapes.vocab_size, hidden), "model.norm.weight": ones}
    for i in range(num_layers):
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def tokenizer_of(num_ids: int) -> tokenizers.Tokenizer:
    """A token a byte, and behind them as many words as the vocabulary has room for."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *letters]
    words += [f"w{i}" for i in range(num_ids - len(words))]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write(folder: Path, shapes: Shapes, num_layers: int) -> None:
    """The whole folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shapes, num_layers), indent=1))
    tokenizer_of(shapes.vocab_size).save(str(folder / "tokenizer.json"))
    save_file(weights_of(shapes, num_layers), folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", choices=list(MODELS), default="1b")
    parser.add_argument("--layers", type=int, help="fewer or more layers than the shapes have")
    arguments = parser.parse_args()
    shapes = MODELS[arguments.shapes]
    write(arguments.folder, shapes, arguments.layers or shapes.num_layers)


if __name__ == "__main__":
    main()
