"""The embedded model's weights in the formats of the peers: every file comes from the same dequantised float32 values.

Nothing is fetched but the embedded GGUF file (Q4_1). A folder or file is written beside its name and renamed, so one
that is there is whole.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.peer import NUM_THREADS, PeerError, Place, Say
from everystop.model.checkpoint import inspect_model, parameter_shapes
from everystop.model.from_gguf import GgufCheckpoint
from everystop.model.home import Home
from everystop.model.pull import pull
from everystop.model.tokenizer_files import load_tokenizer
from everystop.model.weights import NativePacker, halves_from_pairs

Arrays = dict[str, npt.NDArray[Any]]

GGUF_KINDS: Mapping[str, tuple[str, str]] = {
    "Q4_0": ("Q4_0", "Q8_0"),
    "Q4_0-all": ("Q4_0", "Q4_0"),
    "Q8_0": ("Q8_0", "Q8_0"),
    "F16": ("F16", "F16"),
}
"""The format of the layers' matrices, and that of the embedding, which is the output projection, too."""

FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7}
_OUTER = {"embed_tokens": "model.embed_tokens.weight", "norm": "model.norm.weight"}
_INNER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def embedded() -> GgufCheckpoint:
    """The embedded model; fetched where it is missing."""
    checkpoint = inspect_model(pull("smollm2", Home.from_environment()))
    assert isinstance(checkpoint, GgufCheckpoint)
    return checkpoint


def hf_arrays(checkpoint: GgufCheckpoint) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The tensors of a Llama by their names in Hugging Face files, float32; rows of q and k in halves.

    A tied output projection is left out, as those files do.
    """
    spec = checkpoint.spec
    if spec.architecture != "llama" or spec.qkv_bias or spec.qk_norm:
        raise PeerError(f"{checkpoint.path}: only a plain Llama is written for peers, not {spec.architecture}")
    packer = NativePacker(NUM_THREADS)
    for parameter in parameter_shapes(spec):
        if parameter not in checkpoint:
            continue
        values = checkpoint.read(parameter, packer.dequantize)
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(parameter.rpartition(".")[2])
        yield hf_name(parameter), halves_from_pairs(values, heads) if heads else values


def hf_name(parameter: str) -> str:
    """The name in Hugging Face files of a parameter: `layers.3.q` is `model.layers.3.self_attn.q_proj.weight`."""
    if parameter == "lm_head":
        return "lm_head.weight"
    if parameter in _OUTER:
        return _OUTER[parameter]
    _, layer, name = parameter.split(".")
    return f"model.layers.{layer}.{_INNER[name]}.weight"


def hf_config(checkpoint: GgufCheckpoint) -> dict[str, Any]:
    """`config.json`, readable by transformers 4 and 5."""
    spec = checkpoint.spec
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tied_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **_special_ids(checkpoint),
    }


def _special_ids(checkpoint: GgufCheckpoint) -> dict[str, Any]:
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id"}
    found = {name: checkpoint.gguf.get(f"tokenizer.ggml.{key}") for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def write_hf(place: Place, say: Say) -> None:
    """The dequantised weights as a Hugging Face folder, with their tokenizer."""
    if place.hf.is_dir():
        return
    say("writing the dequantised weights as a Hugging Face folder")
    checkpoint = embedded()
    half = _unfinished(place.hf)
    write_hf_weights(half, checkpoint)
    write_tokenizer(half, checkpoint)
    half.rename(place.hf)


def write_hf_weights(folder: Path, checkpoint: GgufCheckpoint) -> None:
    """`model.safetensors`, float32, and the two configurations."""
    folder.mkdir(parents=True)
    _need("safetensors.numpy").save_file(dict(hf_arrays(checkpoint)), folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", hf_config(checkpoint))
    _write_json(folder / "generation_config.json", {"do_sample": False, **_special_ids(checkpoint)})


def write_tokenizer(folder: Path, checkpoint: GgufCheckpoint) -> None:
    """`tokenizer.json` and what transformers wants beside it."""
    tokenizer = load_tokenizer(checkpoint, Home.from_environment())
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.spec.max_position,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokenizer.bos_token or None,
        "eos_token": tokenizer.eos_token or None,
        "pad_token": tokenizer.eos_token or None,
        "chat_template": checkpoint.gguf.get("tokenizer.chat_template"),
    }
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in config.items() if value is not None})


def write_w8a8(place: Place, say: Say) -> None:
    """The Hugging Face folder with int8 matrices; embedding and output projection stay as they are."""
    if place.w8a8.is_dir():
        return
    say("writing the weights as int8 with a scale an output row (W8A8)")
    half = _unfinished(place.w8a8)
    shutil.copytree(place.hf, half, ignore=shutil.ignore_patterns("model.safetensors"))
    arrays: Arrays = {}
    for name, values in _need("safetensors.numpy").load_file(place.hf / "model.safetensors").items():
        if "_proj." in name:
            arrays[name], arrays[name.removesuffix("weight") + "weight_scale"] = quantise_rows(values)
        else:
            arrays[name] = values
    _need("safetensors.numpy").save_file(arrays, half / "model.safetensors", {"format": "pt"})
    config = json.loads((half / "config.json").read_text())
    _write_json(half / "config.json", config | {"quantization_config": _W8A8})
    half.rename(place.w8a8)


def quantise_rows(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """int8 [n, k] and a scale a row [n, 1], symmetric: the largest of a row becomes 127."""
    scales = np.maximum(np.abs(values).max(axis=1, keepdims=True) / np.float32(127), np.float32(1e-12))
    return np.rint(values / scales).astype(np.int8), scales.astype(np.float32)


def write_gguf(place: Place, kind: str, say: Say) -> None:
    """The embedded file with its matrices in another format."""
    target = place.gguf(kind)
    if target.is_file():
        return
    say(f"writing the weights as GGUF {kind}")
    half = target.with_name(f"{target.name}.unfinished")
    half.parent.mkdir(parents=True, exist_ok=True)
    requantise(embedded().path, half, *GGUF_KINDS[kind])
    half.rename(target)


def requantise(source: Path, target: Path, layers: str, table: str) -> None:
    """Copy a Llama GGUF file with its matrices in the format `layers`, the embedding in `table`; norms are float32.

    Names, keys and the order of rows stay; a matrix that has its format already is copied as it is.
    """
    gguf = _need("gguf")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch="llama")
    _copy_keys(reader, writer, gguf)
    writer.add_file_type(FILE_TYPES[layers])
    writer.add_quantization_version(2)
    for tensor in reader.tensors:
        wanted = gguf.GGMLQuantizationType[table if tensor.name == "token_embd.weight" else layers]
        if len(tensor.shape) < 2:
            wanted = gguf.GGMLQuantizationType.F32
        data = tensor.data
        if tensor.tensor_type != wanted:
            data = gguf.quants.quantize(gguf.quants.dequantize(data, tensor.tensor_type), wanted)
        writer.add_tensor(tensor.name, data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_keys(reader: Any, writer: Any, gguf: Any) -> None:
    """All keys but those that the writer sets itself or that tell the format."""
    set_elsewhere = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if not field.name.startswith(set_elsewhere):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(
                field.name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None
            )


def _unfinished(folder: Path) -> Path:
    """A name beside `folder` that nothing bears."""
    half = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(half, ignore_errors=True)
    return half


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def _need(module: str) -> Any:
    """A package of the project's test environment."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise PeerError(
            f"the package {package} is missing; it comes with everystop[test]: pip install {package}"
        ) from None
