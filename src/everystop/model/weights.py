"""The weights as the runners take them: converted, packed for the kernels, and kept packed for the next start.

Canonical names, with the sizes of `checkpoint`: `embed_tokens` [V, D] (float16 in int8 mode, else float32), `norm` [D],
`lm_head`; `layers.i.` `attn_norm` [D], `qkv`, `qkv_bias` [Q + 2K], `q_norm`, `k_norm` [H], `o`, `mlp_norm` [D],
`gate_up`, `down`. Norms and biases are float32; `qkv` (rows q, then k, then v), `o`, `gate_up` (rows gate, then up),
`down` and `lm_head` are packed uint8. The rows of a head of q and k lie in halves: channel i turns with i + head_dim
/ 2.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import everystop
from everystop.core.errors import ConfigError, ModelError
from everystop.model.checkpoint import Checkpoint, Uint8Array
from everystop.model.home import Home, temporary_name
from everystop.model.spec import DecoderSpec, Float32Array
from everystop.model.weight_file import Array, WeightFileUnusable, map_arrays, write_arrays

WEIGHTS_VERSION = 1
"""Raised whenever the same model file and kernel layout give other arrays than before."""


class Packer(Protocol):
    """Converts and packs matrices for the kernels of this process."""

    def layout(self, dtype: str) -> str:
        """Names the packed form; equal names mean interchangeable bytes."""

    def pack(self, dtype: str, weights: Float32Array) -> Uint8Array:
        """The packed form of weights [n, k]."""

    def dequantize(self, type_id: int, raw: Uint8Array, num_rows: int, num_columns: int) -> Float32Array:
        """Tensor data of a GGML type as float32 [num_rows, num_columns]."""


class NativePacker:
    """Packs with the native kernels on `num_threads` threads."""

    def __init__(self, num_threads: int) -> None:
        from everystop import _native

        self._native: Any = _native
        self._num_threads = num_threads

    def layout(self, dtype: str) -> str:
        """Names the packed form; equal names mean interchangeable bytes. Raises ConfigError for an EVERYSTOP_ISA that
        cannot be had.
        """
        try:
            return str(self._native.linear_layout(dtype))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def pack(self, dtype: str, weights: Float32Array) -> Uint8Array:
        """The packed form of weights [n, k]."""
        packed: Uint8Array = self._native.pack_linear(dtype, weights, self._num_threads)
        return packed

    def dequantize(self, type_id: int, raw: Uint8Array, num_rows: int, num_columns: int) -> Float32Array:
        """Tensor data of a GGML type as float32 [num_rows, num_columns]."""
        values: Float32Array = self._native.dequantize(type_id, raw, num_rows, num_columns, self._num_threads)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run: `weights` by canonical name, read-only; `notes` are sentences worth showing to the user.

    `digest` is the SHA-256 of the model's files in hex, "" where there was no home to remember it in.
    """

    spec: DecoderSpec
    dtype: str
    layout: str
    weights: dict[str, Array]
    from_cache: bool
    notes: tuple[str, ...]
    digest: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(array.nbytes for array in self.weights.values())

    @property
    def num_step_bytes(self) -> int:
        """Bytes of weights that a step reads: all but the embedding, of which it reads a row a token."""
        return self.num_bytes - self.weights["embed_tokens"].nbytes


def load_model(
    checkpoint: Checkpoint, *, dtype: str, num_threads: int = 1, home: Home | None = None, packer: Packer | None = None
) -> LoadedModel:
    """Load the weights of a checked model for `dtype` (int8 or float32): mapped where they are cached, else built.

    What was built is kept in `home` (None: nowhere). A home that cannot be written or a damaged cached file costs
    time and a sentence in `notes`, never the start. Two processes that load the same model at once build it once.
    Raises ModelError.
    """
    packer = packer or NativePacker(num_threads)
    layout = packer.layout(dtype)
    notes = list(checkpoint.warnings)
    weights, from_cache, digest = None, False, ""
    if home is not None:
        try:
            key = _cache_key(checkpoint, dtype, layout, home)
            digest = key["model"]
            weights, from_cache = _load_cached(checkpoint, key, packer, home, notes)
        except OSError as error:
            notes.append(
                f"packed weights are not kept: {home.root}: {error.strerror or error}; "
                "starts take longer until EVERYSTOP_HOME names a folder that can be written"
            )
    if weights is None:
        weights = _load_into_memory(checkpoint, dtype, packer)
    return LoadedModel(
        spec=checkpoint.spec,
        dtype=dtype,
        layout=layout,
        weights=weights,
        from_cache=from_cache,
        notes=tuple(notes),
        digest=digest,
    )


def build_weights(checkpoint: Checkpoint, dtype: str, packer: Packer) -> Iterator[tuple[str, Array]]:
    """The canonical weights one after the other, so that one tensor at a time is held as float32."""

    def read(parameter: str) -> Float32Array:
        return checkpoint.read(parameter, packer.dequantize)

    table = read("embed_tokens")
    yield "embed_tokens", _stored_embeddings(table, dtype, checkpoint.path)
    yield "lm_head", packer.pack(dtype, read("lm_head") if "lm_head" in checkpoint else table)
    del table
    yield "norm", read("norm")
    for layer in range(checkpoint.spec.num_layers):
        yield from _build_layer(checkpoint, f"layers.{layer}.", dtype, packer)


def _build_layer(checkpoint: Checkpoint, prefix: str, dtype: str, packer: Packer) -> Iterator[tuple[str, Array]]:
    spec = checkpoint.spec

    def read(name: str) -> Float32Array:
        values = checkpoint.read(prefix + name, packer.dequantize)
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(name.removesuffix("_bias"))
        return halves_from_pairs(values, heads) if heads and checkpoint.interleaved_rotary else values

    def rows(*names: str) -> Float32Array:
        return np.concatenate([read(name) for name in names])

    yield prefix + "attn_norm", read("attn_norm")
    yield prefix + "qkv", packer.pack(dtype, rows("q", "k", "v"))
    if spec.qkv_bias:
        yield prefix + "qkv_bias", rows("q_bias", "k_bias", "v_bias")
    if spec.qk_norm:
        yield prefix + "q_norm", read("q_norm")
        yield prefix + "k_norm", read("k_norm")
    yield prefix + "o", packer.pack(dtype, read("o"))
    yield prefix + "mlp_norm", read("mlp_norm")
    yield prefix + "gate_up", packer.pack(dtype, rows("gate", "up"))
    yield prefix + "down", packer.pack(dtype, read("down"))


def halves_from_pairs(values: Float32Array, num_heads: int) -> Float32Array:
    """Rows of q or k [num_heads · d, …] from pairs, as Llama GGUF files have them, to halves.

    With d = 4, a head's rows (0, 1, 2, 3) of the file are channels (0, 2, 1, 3): rows 2i and 2i + 1 are the pair that
    turns together, channels i and i + d/2.
    """
    paired = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)


def _stored_embeddings(table: Float32Array, dtype: str, path: Path) -> Array:
    if dtype == "float32":
        return table
    largest = max(table.max(), -table.min())
    if not largest <= np.finfo(np.float16).max:
        raise ModelError(f"{path}: embeddings reach {largest:.3g}, beyond float16; use --dtype float32")
    return table.astype(np.float16)


def _load_into_memory(checkpoint: Checkpoint, dtype: str, packer: Packer) -> dict[str, Array]:
    """Build into a nameless file in memory: the same layout, alignment and read-only views as a cached file."""
    fd = os.memfd_create("everystop-weights")
    try:
        write_arrays(fd, {}, build_weights(checkpoint, dtype, packer))
        return map_arrays(fd, {}, verify=False)
    finally:
        os.close(fd)


def _load_cached(
    checkpoint: Checkpoint, key: dict[str, str], packer: Packer, home: Home, notes: list[str]
) -> tuple[dict[str, Array], bool]:
    """The weights, and whether they were there already; raises OSError where the home cannot be used."""
    path = home.folder("weights") / f"{hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:32]}.weights"
    if (weights := _open_cached(path, key, home, notes)) is not None:
        return weights, True
    with home.lock(path.name):
        if (weights := _open_cached(path, key, home, notes)) is not None:
            return weights, True
        _build_file(path, key, build_weights(checkpoint, key["dtype"], packer))
        _record_verified(path, home)
        with open(path, "rb") as file:
            return map_arrays(file.fileno(), key, verify=False), False


def model_digest(checkpoint: Checkpoint, home: Home) -> str:
    """SHA-256 of the model's files, in hex; raises OSError where the home cannot be used."""
    digests = [home.sha256(path) for path in checkpoint.files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _cache_key(checkpoint: Checkpoint, dtype: str, layout: str, home: Home) -> dict[str, str]:
    model = model_digest(checkpoint, home)
    version = f"{everystop.__version__}-{WEIGHTS_VERSION}"
    return {"model": model, "dtype": dtype, "layout": layout, "version": version}


def _open_cached(path: Path, key: dict[str, str], home: Home, notes: list[str]) -> dict[str, Array] | None:
    """The cached weights, or None where there are none that can be used.

    All bytes are compared with their checksum unless the file is as it was when this was last done.
    """
    try:
        with open(path, "rb") as file:
            verified = home.is_unchanged(path, "verified")
            weights = map_arrays(file.fileno(), key, verify=not verified)
    except FileNotFoundError:
        return None
    except WeightFileUnusable as error:
        if (note := f"cached weights {path} are built again: {error}") not in notes:
            notes.append(note)
        return None
    if not verified:
        _record_verified(path, home)
    return weights


def _record_verified(path: Path, home: Home) -> None:
    home.record(path, "verified")


def _build_file(path: Path, key: dict[str, str], arrays: Iterator[tuple[str, Array]]) -> None:
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        left.unlink(missing_ok=True)  # of a process that died: the lock is held
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb", buffering=0) as file:
            write_arrays(file.fileno(), key, arrays)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
