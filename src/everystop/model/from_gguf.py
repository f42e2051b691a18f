"""`GgufCheckpoint`: a decoder in a GGUF file; maps its keys to a `DecoderSpec` and its tensors to parameters."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from everystop.core.errors import ModelFileDamaged, UnsupportedModel
from everystop.model.checkpoint import Dequantize, Shape, match_parameters
from everystop.model.gguf import GgufFile
from everystop.model.spec import ARCHITECTURES, DecoderSpec, Float32Array, RopeScaling, check_spec

_NAMES = {
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "layers.{i}.attn_norm": "blk.{i}.attn_norm.weight",
    "layers.{i}.q": "blk.{i}.attn_q.weight",
    "layers.{i}.k": "blk.{i}.attn_k.weight",
    "layers.{i}.v": "blk.{i}.attn_v.weight",
    "layers.{i}.q_bias": "blk.{i}.attn_q.bias",
    "layers.{i}.k_bias": "blk.{i}.attn_k.bias",
    "layers.{i}.v_bias": "blk.{i}.attn_v.bias",
    "layers.{i}.q_norm": "blk.{i}.attn_q_norm.weight",
    "layers.{i}.k_norm": "blk.{i}.attn_k_norm.weight",
    "layers.{i}.o": "blk.{i}.attn_output.weight",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm.weight",
    "layers.{i}.gate": "blk.{i}.ffn_gate.weight",
    "layers.{i}.up": "blk.{i}.ffn_up.weight",
    "layers.{i}.down": "blk.{i}.ffn_down.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufCheckpoint:
    """A checked GGUF file; see `Checkpoint`. `gguf` gives access to its other keys (tokenizer, template)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gguf = GgufFile(path)
        self.files = (path,)
        _refuse_parts(self.gguf)
        self.spec = check_spec(_Keys(self.gguf).spec(), str(path))
        # Only the Llama converter reorders q and k; Qwen files keep the halves.
        self.interleaved_rotary = self.spec.architecture in ("llama", "mistral")
        shapes = {name: _logical_shape(tensor.shape) for name, tensor in self.gguf.tensors.items()}
        self._names, self.warnings = match_parameters(self.spec, _NAMES, shapes, (_ROPE_FACTORS,), str(path))

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._names

    @property
    def formats(self) -> dict[str, int]:
        """How many tensors each format stores."""
        return dict(Counter(self.gguf.tensors[name].kind.name for name in self._names.values()).most_common())

    def read(self, parameter: str, dequantize: Dequantize) -> Float32Array:
        """A parameter as float32 in its shape, rows as the file has them."""
        tensor = self.gguf.tensors[self._names[parameter]]
        num_columns = tensor.shape[-1]
        num_rows = math.prod(tensor.shape[:-1])
        values = dequantize(tensor.kind.id, self.gguf.raw(tensor.name), num_rows, num_columns)
        return values.reshape(_logical_shape(tensor.shape))


def _logical_shape(shape: Shape) -> Shape:
    """Without the leading dimensions of 1 that some writers add."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _refuse_parts(gguf: GgufFile) -> None:
    """A file of several, or one without weights, is no model by itself."""
    count = gguf.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        raise UnsupportedModel(f"{gguf.path} is one of {count} parts; join them with llama-gguf-split --merge")
    if not gguf.tensors:
        raise ModelFileDamaged(f"{gguf.path} holds no tensors: it is a vocabulary or an unfinished file, not a model")


class _Keys:
    """Reads the keys of one architecture with their types checked."""

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf
        self._arch = gguf.get("general.architecture")
        if self._arch not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{gguf.path}: architecture {self._arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )

    def _get(self, key: str, default: Any = None) -> Any:
        value = self._gguf.get(f"{self._arch}.{key}", default)
        if value is None:
            raise ModelFileDamaged(f"{self._gguf.path}: key {self._arch}.{key} is missing")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedModel(
                f"{self._gguf.path}: key {self._arch}.{key} is {str(value)[:80]}; expected one integer"
            )
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelFileDamaged(f"{self._gguf.path}: key {self._arch}.{key} is {str(value)[:80]}; expected a number")
        return float(value)

    def spec(self) -> DecoderSpec:
        num_heads = self._integer("attention.head_count")
        hidden_size = self._integer("embedding_length")
        if num_heads < 1:
            raise ModelFileDamaged(f"{self._gguf.path}: key {self._arch}.attention.head_count is {num_heads}")
        head_dim = self._integer("attention.key_length", hidden_size // num_heads)
        self._refuse_unlike(head_dim)
        return DecoderSpec(
            architecture=self._arch,
            num_layers=self._integer("block_count"),
            hidden_size=hidden_size,
            intermediate_size=self._integer("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=self._integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=self._vocab_size(),
            max_position=self._max_position(),
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            rope_theta=self._number("rope.freq_base", 10_000.0),
            rope=self._rope(),
            tied_embeddings="output.weight" not in self._gguf.tensors,
            qkv_bias="blk.0.attn_q.bias" in self._gguf.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._gguf.tensors,
        )

    def _refuse_unlike(self, head_dim: int) -> None:
        """Refuse what would be computed wrongly: partial rotation, unequal heads, a sliding window, experts."""
        path = self._gguf.path
        if (rotated := self._integer("rope.dimension_count", head_dim)) != head_dim:
            raise UnsupportedModel(f"{path}: rotary embedding of {rotated} of {head_dim} channels is not supported")
        if (value_dim := self._integer("attention.value_length", head_dim)) != head_dim:
            raise UnsupportedModel(f"{path}: keys of {head_dim} and values of {value_dim} channels are not supported")
        if self._integer("expert_count", 0):
            raise UnsupportedModel(f"{path}: a mixture of experts is not supported")
        window = self._integer("attention.sliding_window", 0)
        if 0 < window < self._integer("context_length"):
            raise UnsupportedModel(f"{path}: a sliding attention window (here {window:,} tokens) is not supported")

    def _vocab_size(self) -> int:
        table = self._gguf.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise ModelFileDamaged(f"{self._gguf.path}: tensor 'token_embd.weight' is missing or is no table")
        return table.shape[0]

    def _max_position(self) -> int:
        """The context; a stretched one reaches `factor` times as far as the model was trained."""
        context = self._integer("context_length")
        original = self._integer("rope.scaling.original_context_length", 0)
        return max(context, int(original * self._number("rope.scaling.factor", 1.0)))

    def _rope(self) -> RopeScaling:
        kind = self._get("rope.scaling.type", "none")
        factors = self._gguf.tensors.get(_ROPE_FACTORS)
        if factors is not None:
            if factors.kind.name != "F32" or kind not in ("none", "linear"):
                raise UnsupportedModel(
                    f"{self._gguf.path}: {_ROPE_FACTORS} of {factors.kind.name} with scaling {kind!r}"
                )
            values = self._gguf.raw(_ROPE_FACTORS).view("<f4").tolist()
            stretch = self._number("rope.scaling.factor", 1.0) if kind == "linear" else 1.0
            return RopeScaling(kind="factors", factors=tuple(value * stretch for value in values))
        if kind == "none":
            older = self._number("rope.scale_linear", 1.0)
            return RopeScaling() if older == 1.0 else RopeScaling(kind="linear", factor=older)
        if kind == "linear":
            return RopeScaling(kind="linear", factor=self._number("rope.scaling.factor"))
        if kind == "yarn":
            return self._yarn()
        return RopeScaling(kind=str(kind))

    def _yarn(self) -> RopeScaling:
        factor = self._number("rope.scaling.factor")
        magnitude = 1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position=self._integer(
                "rope.scaling.original_context_length", self._integer("context_length")
            ),
            beta_fast=self._number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self._number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=self._number("rope.scaling.attn_factor", 1.0) * magnitude,
        )
