"""`SafetensorsCheckpoint`: a folder with `config.json` and safetensors, one file or shards with an index."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from everystop.core.errors import ModelFileDamaged, ModelNotFound, UnsupportedModel
from everystop.model.checkpoint import Dequantize, match_parameters
from everystop.model.safetensors import SafetensorsFile
from everystop.model.spec import ARCHITECTURES, DecoderSpec, Float32Array, RopeScaling, check_spec

# Beyond any number of a configuration, and safe to convert.
_LARGEST = 1e30
MAX_JSON_BYTES = 64 << 20
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "layers.{i}.attn_norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.k": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.v": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.o": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.up": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj.weight",
}


class SafetensorsCheckpoint:
    """A checked model folder; see `Checkpoint`. `config` is the content of `config.json`."""

    interleaved_rotary = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json_object(path / "config.json")
        self.spec = check_spec(_ConfigReader(self.config, path / "config.json").spec(), str(path / "config.json"))
        self._file_of = _locate_tensors(path)
        shards = tuple(dict.fromkeys(file.path for file in self._file_of.values()))
        self.files = (path / "config.json", *shards)
        shapes = {name: file.tensors[name].shape for name, file in self._file_of.items()}
        ignored = [name for name in shapes if name.endswith((".rotary_emb.inv_freq", ".attn.masked_bias"))]
        self._names, warnings = match_parameters(self.spec, _NAMES, shapes, ignored, str(path))
        self.warnings = (*warnings, *_code_warnings(self.config, path))
        for name in self._names.values():
            self._file_of[name].require_float(name)

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._names

    @property
    def formats(self) -> dict[str, int]:
        """How many tensors each format stores."""
        return dict(Counter(self._file_of[name].tensors[name].dtype for name in self._names.values()).most_common())

    def read(self, parameter: str, dequantize: Dequantize) -> Float32Array:
        """A parameter as float32 in its shape."""
        name = self._names[parameter]
        file = self._file_of[name]
        shape = file.tensors[name].shape
        values = dequantize(file.require_float(name), file.raw(name), math.prod(shape[:-1]), shape[-1])
        return values.reshape(shape)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ModelNotFound where it is missing, ModelFileDamaged where it is none."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ModelFileDamaged(f"{path}: has {size:,} bytes; at most {MAX_JSON_BYTES:,} are read")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileDamaged(f"{path}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileDamaged(f"{path}: is no JSON object")
    return value


def _code_warnings(config: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """That code which comes with the model is not run; nothing here ever imports a file of a model's folder."""
    if "auto_map" not in config:
        return ()
    return (f"{folder / 'config.json'}: auto_map names code that came with the model; it is never run",)


def _locate_tensors(folder: Path) -> dict[str, SafetensorsFile]:
    """The file of each tensor: the single file, or for each tensor the shard that the index names and no other."""
    if not (folder / _INDEX).exists():
        if not (folder / _SINGLE).exists():
            pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
            advice = f"; {pickled[0]} is a pickle, which can run code, and is not read: convert it" if pickled else ""
            raise ModelNotFound(f"{folder} holds neither {_SINGLE} nor {_INDEX}{advice}")
        single = SafetensorsFile(folder / _SINGLE)
        return dict.fromkeys(single.tensors, single)
    weight_map = read_json_object(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelFileDamaged(f"{folder / _INDEX}: holds no weight_map of tensor names to file names")
    shards = {name: _open_shard(folder, name) for name in sorted(set(weight_map.values()))}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard].tensors:
            raise ModelFileDamaged(f"{folder / shard}: tensor {tensor!r}, which {_INDEX} places there, is missing")
    return {tensor: shards[shard] for tensor, shard in weight_map.items()}


def _open_shard(folder: Path, name: str) -> SafetensorsFile:
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise ModelFileDamaged(f"{folder / _INDEX}: {name!r} is no file name of a shard")
    if not (folder / name).is_file():
        raise ModelFileDamaged(f"{folder / name}: this shard, which {_INDEX} names, is missing; fetch it again")
    return SafetensorsFile(folder / name)


class _ConfigReader:
    """Reads `config.json` of transformers 4 and 5 with types checked; absent keys mean what they mean there."""

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self._config, self._path = config, path
        self._arch = config.get("model_type")
        if self._arch not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{path}: model_type {self._arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if type(value) is not int or abs(value) > _LARGEST:
            raise ModelFileDamaged(f"{self._path}: {key} is {str(value)[:80]}; expected an integer")
        return value

    def _number(self, values: dict[str, Any], key: str, default: float | None = None) -> float:
        value: Any = values.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not -_LARGEST <= value <= _LARGEST:
            raise ModelFileDamaged(f"{self._path}: {key} is {str(value)[:80]}; expected a number")
        return float(value)

    def spec(self) -> DecoderSpec:
        self._refuse_unlike()
        num_heads, hidden_size = self._integer("num_attention_heads"), self._integer("hidden_size")
        if num_heads < 1:
            raise ModelFileDamaged(f"{self._path}: num_attention_heads is {num_heads}")
        kv_default = {"llama": num_heads, "mistral": 8, "qwen2": 32, "qwen3": 32}[str(self._arch)]
        rope = self._rope_settings()
        return DecoderSpec(
            architecture=str(self._arch),
            num_layers=self._integer("num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=self._integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=self._integer("num_key_value_heads", kv_default),
            head_dim=self._integer("head_dim", 128 if self._arch == "qwen3" else hidden_size // num_heads),
            vocab_size=self._integer("vocab_size"),
            max_position=self._max_position(rope),
            rms_norm_eps=self._number(self._config, "rms_norm_eps", 1e-6),
            rope_theta=self._number(rope, "rope_theta", 10_000.0),
            rope=self._rope(rope),
            tied_embeddings=bool(self._config.get("tie_word_embeddings", False)),
            qkv_bias=self._arch == "qwen2" or bool(self._config.get("attention_bias", False)),
            qk_norm=self._arch == "qwen3",
        )

    def _refuse_unlike(self) -> None:
        """Refuse what would be computed wrongly."""
        if (act := self._config.get("hidden_act", "silu")) != "silu":
            raise UnsupportedModel(f"{self._path}: hidden_act {act!r} is not supported; silu is")
        if self._config.get("quantization_config"):
            method = str(self._config["quantization_config"])[:80]
            raise UnsupportedModel(
                f"{self._path}: quantised weights ({method}) are not supported in a folder; use a GGUF file"
            )
        for key in ("attention_bias", "mlp_bias"):
            if self._config.get(key):
                raise UnsupportedModel(f"{self._path}: {key} is set, which is not supported")
        window = self._window()
        if window is not None:
            raise UnsupportedModel(
                f"{self._path}: a sliding attention window (here {window:,} tokens) is not supported"
            )

    def _window(self) -> int | None:
        """The sliding window in tokens where one is in use and shorter than the context."""
        layers = self._config.get("layer_types")
        if self._arch in ("qwen2", "qwen3"):
            in_use = bool(self._config.get("use_sliding_window")) and (
                "sliding_attention" in layers
                if isinstance(layers, list)
                else self._integer("max_window_layers", 28) < self._integer("num_hidden_layers")
            )
        else:
            in_use = self._arch == "mistral"
        if not in_use or self._config.get("sliding_window", 4096) is None:
            return None
        window = self._integer("sliding_window", 4096)
        return window if window < self._integer("max_position_embeddings") else None

    def _rope_settings(self) -> dict[str, Any]:
        """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of 4, as one mapping."""
        settings: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self._config.get(key) or {}
            if not isinstance(value, dict):
                raise ModelFileDamaged(f"{self._path}: {key} is {str(value)[:80]}; expected an object")
            settings |= value
        settings.setdefault("rope_theta", self._config.get("rope_theta"))
        outside = self._number(self._config, "partial_rotary_factor", 1.0)
        if self._number(settings, "partial_rotary_factor", outside) != 1.0:
            raise UnsupportedModel(f"{self._path}: partial_rotary_factor other than 1 is not supported")
        return settings

    def _max_position(self, rope: dict[str, Any]) -> int:
        """The context; a stretched one reaches `factor` times as far as the model was trained."""
        context = self._integer("max_position_embeddings")
        original = self._number(rope, "original_max_position_embeddings", 0.0)
        if self._kind(rope) == "yarn":
            return max(context, int((original or context) * self._number(rope, "factor", 1.0)))
        return max(context, int(original))

    @staticmethod
    def _kind(rope: dict[str, Any]) -> str:
        return str(rope.get("rope_type") or rope.get("type") or "default")

    def _rope(self, rope: dict[str, Any]) -> RopeScaling:
        kind = self._kind(rope)
        if kind == "default":
            return RopeScaling()
        if kind == "linear":
            return RopeScaling(kind="linear", factor=self._number(rope, "factor"))
        if kind not in ("llama3", "yarn"):
            return RopeScaling(kind=kind)
        context = self._integer("max_position_embeddings")
        original = self._number(rope, "original_max_position_embeddings", context)
        # Some files keep the number outside, where it takes precedence.
        original = self._number(self._config, "original_max_position_embeddings", original)
        if original < 1:
            raise ModelFileDamaged(f"{self._path}: original_max_position_embeddings is {original:g}")
        attention_factor = rope.get("attention_factor")
        return RopeScaling(
            kind=kind,
            factor=self._number(rope, "factor", context / original if kind == "yarn" else None),
            original_max_position=int(original),
            low_freq_factor=self._number(rope, "low_freq_factor", None if kind == "llama3" else 1.0),
            high_freq_factor=self._number(rope, "high_freq_factor", None if kind == "llama3" else 4.0),
            beta_fast=self._number(rope, "beta_fast", 32.0) or 32.0,
            beta_slow=self._number(rope, "beta_slow", 1.0) or 1.0,
            attention_factor=None if attention_factor is None else self._number(rope, "attention_factor"),
            mscale=self._number(rope, "mscale", 0.0),
            mscale_all_dim=self._number(rope, "mscale_all_dim", 0.0),
            truncate=bool(rope.get("truncate", True)),
        )
