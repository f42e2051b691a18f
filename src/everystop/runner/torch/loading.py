"""From model files to weights on a device: one tensor after the other, so that no second copy of the model is held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everystop.core.errors import ModelError
from everystop.model.checkpoint import Checkpoint, Uint8Array
from everystop.model.spec import DecoderSpec, Float32Array
from everystop.model.weight_file import Array
from everystop.model.weights import NativePacker, build_weights
from everystop.runner.torch.decoder import DecoderWeights, LayerWeights
from everystop.runner.torch.device import Device
from everystop.runner.torch.kernel_set import KernelSet
from everystop.runner.torch.kernels.reference import quantize_rows
from everystop.runner.torch.linear import Fp8Linear, Linear, PlainLinear

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.bfloat16,  # of what is not a matrix of a layer, and of activations
}
Stored = Tensor | tuple[Tensor, Tensor]
"""A tensor, or a quantised matrix and its scales."""

_FLOAT_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # GGML's numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchModel:
    """A model on a device, with the kernels that it runs with; `notes` are sentences worth showing to the user.

    `digest` is the SHA-256 of the model's files in hex, "" where nobody asked.
    """

    spec: DecoderSpec
    dtype: str
    weights: DecoderWeights
    device: Device
    kernels: KernelSet
    notes: tuple[str, ...] = ()
    digest: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights; a tied embedding counts once."""
        weights = self.weights
        total = weights.embed_tokens.nbytes + weights.norm.nbytes + sum(map(_layer_bytes, weights.layers))
        return total if weights.is_tied else total + weights.lm_head.num_bytes

    @property
    def num_step_bytes(self) -> int:
        """Bytes of weights that a step reads: all but the embedding, of which it reads a row a token."""
        return self.num_bytes - (0 if self.weights.is_tied else self.weights.embed_tokens.nbytes)

    @property
    def runs_on(self) -> str:
        """The device and the kernels, for the user."""
        return f"{self.device.name}, {self.kernels.name} kernels"

    @property
    def torch_dtype(self) -> torch.dtype:
        """That of activations and of the KV cache."""
        return DTYPES[self.dtype]


def _layer_bytes(layer: LayerWeights) -> int:
    norms = (layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return sum(t.nbytes for t in norms if t is not None) + sum(linear.num_bytes for linear in linears)


class UnpackedMatrices:
    """Takes matrices as they are, where the CPU's kernels would have them packed; see `Packer`."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def layout(self, dtype: str) -> str:
        """There is one."""
        return "unpacked"

    def pack(self, dtype: str, weights: Float32Array) -> Uint8Array:
        """The bytes of weights [n, k], which stay float32."""
        return np.ascontiguousarray(weights).view(np.uint8)

    def dequantize(self, type_id: int, raw: Uint8Array, num_rows: int, num_columns: int) -> Float32Array:
        """Tensor data of a GGML type as float32 [num_rows, num_columns]; only quantised ones need the native module."""
        if type_id not in _FLOAT_TYPES:
            return NativePacker(self._num_threads).dequantize(type_id, raw, num_rows, num_columns)
        values = torch.from_numpy(np.array(raw)).view(_FLOAT_TYPES[type_id])
        return values.float().reshape(num_rows, num_columns).numpy()


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str,
    device: Device,
    kernels: KernelSet,
    num_threads: int = 1,
    digest: str = "",
) -> TorchModel:
    """Read the weights of a checked model, GGUF or safetensors, in `dtype` (one of `DTYPES`). Raises ModelError."""
    assert dtype in DTYPES
    arrays = build_weights(checkpoint, "float32", UnpackedMatrices(num_threads))
    is_tied = "lm_head" not in checkpoint
    tensors = ((name, array) for name, array in arrays if not (is_tied and name == "lm_head"))
    placed = _place(tensors, checkpoint.spec, dtype, device.torch_device, str(checkpoint.path))
    return TorchModel(
        spec=checkpoint.spec,
        dtype=dtype,
        weights=assemble(checkpoint.spec, placed),
        device=device,
        kernels=kernels,
        notes=tuple(checkpoint.warnings),
        digest=digest,
    )


def _place(
    tensors: Iterator[tuple[str, Array]], spec: DecoderSpec, dtype: str, device: torch.device, source: str
) -> dict[str, Stored]:
    """Each tensor on the device in the model's dtype; a matrix gets its columns back."""
    columns = {"o": spec.q_size, "down": spec.intermediate_size}
    placed: dict[str, Stored] = {}
    for name, array in tensors:
        values = torch.from_numpy(np.asarray(array))
        if array.dtype == np.uint8:
            values = values.view(torch.float32).reshape(-1, columns.get(name.split(".")[-1], spec.hidden_size))
        moved = values.to(device=device, dtype=DTYPES[dtype], copy=True)
        if dtype == "float16" and not bool(moved.isfinite().all()) and bool(values.isfinite().all()):
            raise ModelError(
                f"{source}: {name} reaches {values.abs().max():.3g}, beyond float16; use --dtype bfloat16 or float32"
            )
        placed[name] = _stored(name, moved, dtype)
    return placed


def _stored(name: str, values: Tensor, dtype: str) -> Stored:
    """In fp8 the matrices of the layers are quantised; embedding, head, norms and biases are not."""
    is_matrix_of_layer = values.ndim == 2 and name.startswith("layers.")
    return quantize_rows(values) if dtype == "fp8" and is_matrix_of_layer else values


def assemble(spec: DecoderSpec, stored: dict[str, Stored]) -> DecoderWeights:
    """The decoder's weights from tensors by canonical name (see `model.weights`), quantised ones with their scales.

    Without `lm_head` the embedding is used.
    """

    def tensor(name: str) -> Tensor:
        value = stored[name]
        assert isinstance(value, Tensor)
        return value

    def optional(name: str) -> Tensor | None:
        return tensor(name) if name in stored else None

    def linear(name: str) -> Linear:
        value, bias = stored[name], optional(name + "_bias")
        return PlainLinear(value, bias) if isinstance(value, Tensor) else Fp8Linear(*value, bias)

    layers = tuple(
        LayerWeights(
            attn_norm=tensor(prefix + "attn_norm"),
            qkv=linear(prefix + "qkv"),
            q_norm=optional(prefix + "q_norm"),
            k_norm=optional(prefix + "k_norm"),
            o=linear(prefix + "o"),
            mlp_norm=tensor(prefix + "mlp_norm"),
            gate_up=linear(prefix + "gate_up"),
            down=linear(prefix + "down"),
        )
        for prefix in (f"layers.{i}." for i in range(spec.num_layers))
    )
    embed_tokens = tensor("embed_tokens")
    head = optional("lm_head")
    return DecoderWeights(
        embed_tokens=embed_tokens,
        layers=layers,
        norm=tensor("norm"),
        lm_head=PlainLinear(embed_tokens if head is None else head),
    )


def random_weights(spec: DecoderSpec, dtype: str, device: torch.device, seed: int = 0) -> DecoderWeights:
    """Weights of the sizes of `spec`, drawn on the device, where there are no files; activations keep a sensible
    size. They are drawn in float32, so that those of two dtypes are the same but for rounding.
    """
    generator = torch.Generator(device).manual_seed(seed)
    stored: dict[str, Stored] = {}
    for name, shape in _canonical_shapes(spec):
        values = torch.empty(shape, dtype=torch.float32, device=device)
        if len(shape) == 2:
            values.normal_(0.0, shape[1] ** -0.5, generator=generator)
        else:
            values.fill_(0.0 if name.endswith("_bias") else 1.0)
        stored[name] = _stored(name, values.to(DTYPES[dtype]), dtype)
    return assemble(spec, stored)


def _canonical_shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, f, h, qkv = spec.hidden_size, spec.intermediate_size, spec.head_dim, spec.q_size + 2 * spec.kv_size
    yield "embed_tokens", (spec.vocab_size, d)
    yield "norm", (d,)
    if not spec.tied_embeddings:
        yield "lm_head", (spec.vocab_size, d)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,),
        "qkv": (qkv, d),
        "o": (d, spec.q_size),
        "mlp_norm": (d,),
        "gate_up": (2 * f, d),
        "down": (d, f),
    }
    layer |= {"qkv_bias": (qkv,)} if spec.qkv_bias else {}
    layer |= {"q_norm": (h,), "k_norm": (h,)} if spec.qk_norm else {}
    for i in range(spec.num_layers):
        yield from ((f"layers.{i}.{name}", shape) for name, shape in layer.items())
