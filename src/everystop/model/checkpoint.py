"""What a model's files must hold: the parameters of a `DecoderSpec`, and the `Checkpoint` that finds each of them.

Parameters, with D = hidden_size, F = intermediate_size, Q = q_size, K = kv_size, H = head_dim, V = vocab_size:

    embed_tokens [V, D]    norm [D]    lm_head [V, D] (only where the files have one)
    layers.i.  attn_norm [D]   q [Q, D]   k [K, D]   v [K, D]   o [D, Q]   mlp_norm [D]   gate, up [F, D]   down [D, F]
               with biases q_bias [Q], k_bias, v_bias [K]; with norms of heads q_norm, k_norm [H]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from everystop.core.errors import ModelFileDamaged, ModelNotFound, UnsupportedModel
from everystop.model.spec import DecoderSpec, Float32Array

Shape = tuple[int, ...]
Uint8Array = npt.NDArray[np.uint8]


class Dequantize(Protocol):
    """Turns the raw bytes of a tensor of GGML type `type_id` into float32 [num_rows, num_columns]."""

    def __call__(self, type_id: int, raw: Uint8Array, num_rows: int, num_columns: int) -> Float32Array: ...


class Checkpoint(Protocol):
    """Opened model files whose header and shapes have been checked; no tensor has been read."""

    @property
    def path(self) -> Path:
        """The file or folder."""

    @property
    def spec(self) -> DecoderSpec:
        """What the files describe."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that decide the weights."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each thing that was left aside."""

    @property
    def formats(self) -> dict[str, int]:
        """How many tensors each format stores, most first: {"Q4_1": 210, "F32": 61, "Q8_0": 1}."""

    @property
    def interleaved_rotary(self) -> bool:
        """Whether rows of q and k lie in pairs (2i, 2i + 1) and not in halves (i, i + head_dim / 2)."""

    def __contains__(self, parameter: str) -> bool:
        """Whether the files hold this parameter; only `lm_head` may be missing."""

    def read(self, parameter: str, dequantize: Dequantize) -> Float32Array:
        """A parameter as float32 in its shape, rows as the file has them."""


def layer_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """The parameters of one layer and their shapes."""
    d, f, q, k = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    shapes: dict[str, Shape] = {"attn_norm": (d,), "q": (q, d), "k": (k, d), "v": (k, d)}
    if spec.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (k,), "v_bias": (k,)}
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    return shapes | {"o": (d, q), "mlp_norm": (d,), "gate": (f, d), "up": (f, d), "down": (d, f)}


def parameter_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Every parameter and its shape, `lm_head` included."""
    table = (spec.vocab_size, spec.hidden_size)
    shapes: dict[str, Shape] = {"embed_tokens": table}
    for layer in range(spec.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(spec).items()}
    return shapes | {"norm": (spec.hidden_size,), "lm_head": table}


def match_parameters(
    spec: DecoderSpec, names: Mapping[str, str], present: Mapping[str, Shape], ignored: Iterable[str], source: str
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The file's tensor of each parameter, and warnings about tensors that belong to none.

    `names` maps parameters to tensor names, those of a layer with {i} for its number (`layers.{i}.q`); `present` maps
    tensor names to shapes. Raises ModelFileDamaged for a parameter that is missing or has another shape,
    UnsupportedModel for a bias that the decoder has no place for.
    """
    found: dict[str, str] = {}
    for parameter, shape in parameter_shapes(spec).items():
        tensor = _tensor_name(parameter, names)
        if tensor in present:
            if present[tensor] != shape:
                raise ModelFileDamaged(
                    f"{source}: tensor {tensor!r} has the shape {list(present[tensor])}, "
                    f"but the model needs {list(shape)}"
                )
            found[parameter] = tensor
        elif parameter != "lm_head":
            raise ModelFileDamaged(
                f"{source}: tensor {tensor!r} of shape {list(shape)} is missing; {len(present):,} tensors are there"
            )
    unknown = sorted(present.keys() - set(found.values()) - set(ignored))
    for tensor in unknown:
        if tensor.endswith(".bias"):
            raise UnsupportedModel(
                f"{source}: tensor {tensor!r} is a bias that {spec.architecture} models are not run with"
            )
    if not unknown:
        return found, ()
    some = ", ".join(unknown[:3]) + (" …" if len(unknown) > 3 else "")
    return found, (
        f"{source}: {len(unknown)} tensors belong to no part of a {spec.architecture} model and are left aside: {some}",
    )


def _tensor_name(parameter: str, names: Mapping[str, str]) -> str:
    if parameter in names:
        return names[parameter]
    _, layer, name = parameter.split(".")
    return names[f"layers.{{i}}.{name}"].replace("{i}", layer)


def inspect_model(path: Path) -> Checkpoint:
    """Open a `.gguf` file or a folder with `config.json` and safetensors; check headers and shapes, read no tensor.

    Raises ModelNotFound, ModelFileDamaged or UnsupportedModel, naming the file and, where there is one, the tensor.
    """
    if path.is_dir():
        from everystop.model.from_safetensors import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    if path.suffix.lower() != ".gguf":
        raise ModelNotFound(f"{path} is neither a .gguf file nor a folder")
    from everystop.model.from_gguf import GgufCheckpoint

    return GgufCheckpoint(path)
