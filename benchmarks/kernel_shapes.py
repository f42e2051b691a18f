"""The shapes of three models, with packed weights that nobody has trained, and decoders that only attend."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from everystop import _native

Bytes = npt.NDArray[np.uint8]
Layer = tuple[Bytes, int, int, int]  # packed weights, outputs, inputs, rows

BLOCK_SIZE = 32
TINY = 64  # every size of a decoder of which only the attention matters
PACKED_OUTPUTS = 1024  # that many outputs are drawn, and repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The sizes of a Llama: outputs and inputs of its linear layers, and its heads."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer of a block."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (query + 2 * key, self.hidden_size),
            "o": (self.hidden_size, query),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }

    @property
    def head(self) -> tuple[int, int]:
        """(outputs, inputs) of the output projection."""
        return self.vocab_size, self.hidden_size


MODELS = {
    "smollm2": Shapes(
        name="SmolLM2-135M",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
    ),
    "1b": Shapes(
        name="Llama 1B",
        num_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=128256,
    ),
    "8b": Shapes(
        name="Llama 8B",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
    ),
}


def pack(dtype: str, num_outputs: int, num_inputs: int) -> Bytes:
    """Packed weights of a layer in memory of their own; outputs beyond the first thousand repeat them."""
    rng = np.random.default_rng(0)
    drawn = min(num_outputs, PACKED_OUTPUTS)
    tiles = _native.pack_linear(dtype, rng.standard_normal((drawn, num_inputs), dtype=np.float32), 1)
    num_bytes = _native.packed_linear_bytes(dtype, num_outputs, num_inputs)
    return aligned(np.resize(tiles, num_bytes))


def aligned(data: Bytes) -> Bytes:
    """A copy that begins at a multiple of 64 bytes."""
    room = np.empty(data.size + 64, dtype=np.uint8)
    first = -room.ctypes.data % 64
    room[first : first + data.size] = data
    return room[first : first + data.size]


def mapped(matrices: Sequence[Bytes]) -> list[Bytes]:
    """Copies in one mapped file, from which a server reads its weights too."""
    with tempfile.TemporaryFile() as file:
        for matrix in matrices:
            file.write(matrix.data)
            file.write(bytes(-matrix.size % 64))
        file.flush()
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    placed, first = [], 0
    for matrix in matrices:
        placed.append(whole[first : first + matrix.size])
        first += matrix.size + -matrix.size % 64
    return placed


class Attender:
    """A decoder whose linear layers are tiny, so that its steps are attention over so many rows of one context.

    Its K and V are zeros in float16, or in int8 with their scales, each in memory of its own; what they hold changes
    no time.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        num_layers: int,
        num_rows: int,
        context: int,
        num_threads: int,
        kv_cache_dtype: str = "int8",
    ) -> None:
        blocks_a_row = -(-context // BLOCK_SIZE)
        head_bytes = {"float16": 4 * shapes.head_dim, "int8": 2 * shapes.head_dim + 8}[kv_cache_dtype]
        self.num_bytes = num_layers * num_rows * context * shapes.num_kv_heads * head_bytes
        config = {
            "dtype": "int8",
            "kv_cache_dtype": kv_cache_dtype,
            "num_layers": num_layers,
            "hidden_size": TINY,
            "intermediate_size": TINY,
            "num_heads": shapes.num_heads,
            "num_kv_heads": shapes.num_kv_heads,
            "head_dim": shapes.head_dim,
            "vocab_size": TINY,
            "num_valid_tokens": TINY,
            "rms_norm_eps": 1e-5,
            "inv_freq": np.ones(shapes.head_dim // 2, dtype=np.float32),
            "rope_factor": 1.0,
            "num_blocks": num_rows * blocks_a_row,
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": num_rows,
            "max_num_seqs": num_rows,
            "num_threads": num_threads,
        }
        self._decoder: Any = _native.Decoder(config, tiny_weights(shapes, num_layers))
        for row in range(num_rows):
            table = np.arange(row * blocks_a_row, (row + 1) * blocks_a_row, dtype=np.int32)
            self._decoder.admit(row, np.zeros(context, dtype=np.int32), context, GREEDY, table)
        self._rows = np.array([[row, context - 1, 1, 0, 0] for row in range(num_rows)], dtype=np.int64)
        self._write_all(num_rows * blocks_a_row)
        self._decoder.set_profiling(True)

    def _write_all(self, num_blocks: int) -> None:
        """What was never written is one page of zeros to the system, which no memory is read for."""
        copies = np.array([(0, block) for block in range(1, num_blocks)], dtype=np.int32).reshape(-1, 2)
        self._decoder.step(self._rows, copies)

    def times_ns(self, repeats: int) -> list[int]:
        """Nanoseconds that each of so many steps spent in attention, in all layers together."""
        times = []
        for _ in range(repeats):
            self._decoder.step(self._rows)
            times.append(int(self._decoder.times()["attention"]))
        return times


GREEDY = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": 0,
    "choice_index": 0,
    "min_tokens": 0,
    "num_logprobs": -1,
    "num_prompt_logprobs": -1,
    "stop_token_ids": [],
    "logit_bias": [],
    "bad_word_ids": [],
    "allowed_token_ids": None,
}


def tiny_weights(shapes: Shapes, num_layers: int) -> dict[str, Any]:
    """What `Attender` is made of."""
    query, key = shapes.num_heads * shapes.head_dim, shapes.num_kv_heads * shapes.head_dim
    ones = np.ones(TINY, dtype=np.float32)
    weights: dict[str, Any] = {
        "embed_tokens": np.ones((TINY, TINY), dtype=np.float16),
        "norm": ones,
        "lm_head": pack("int8", TINY, TINY),
    }
    layer = {
        "attn_norm": ones,
        "qkv": pack("int8", query + 2 * key, TINY),
        "o": pack("int8", TINY, query),
        "mlp_norm": ones,
        "gate_up": pack("int8", 2 * TINY, TINY),
        "down": pack("int8", TINY, TINY),
    }
    for i in range(num_layers):
        weights |= {f"layers.{i}.{name}": array for name, array in layer.items()}
    return weights
