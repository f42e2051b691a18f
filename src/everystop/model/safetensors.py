"""`SafetensorsFile`: the header of a safetensors file and the mapped bytes of its tensors; trusts nothing the file
says.

Layout (https://huggingface.co/docs/safetensors): header length u64 | header JSON | data. The header maps names to
`{"dtype", "shape", "data_offsets": [begin, end]}`, with offsets from the start of the data.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from everystop.core.errors import ModelFileDamaged, UnsupportedModel

MAX_HEADER_BYTES = 16 << 20  # some 100,000 tensors
MAX_DIMS = 8

# The GGML type of the same format, so that one kernel converts both kinds of file.
GGML_TYPE_OF = {"F32": 0, "F16": 1, "BF16": 30}
_BYTES_OF = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """Where a tensor lies: `offset` counts from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """An open safetensors file: `tensors` by name, their bytes through `raw`.

    Raises ModelFileDamaged where the file is missing, truncated or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = self._open()
        self._size = len(self._map)
        self.tensors: dict[str, SafetensorsTensor] = {}
        self._read_header()

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor: a read-only view of the mapped file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def _open(self) -> mmap.mmap:
        try:
            with open(self.path, "rb") as file:
                if (size := os.fstat(file.fileno()).st_size) < 8:
                    raise ModelFileDamaged(f"{self.path}: the file has {size} bytes and no header; fetch it again")
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileDamaged(f"{self.path}: cannot be opened: {error.strerror}; fetch it again") from error

    def _damaged(self, what: str) -> ModelFileDamaged:
        return ModelFileDamaged(f"{self.path}: {what} (file of {self._size:,} bytes); fetch the file again")

    def _read_header(self) -> None:
        length = int.from_bytes(self._map[:8], "little")
        if length > min(self._size - 8, MAX_HEADER_BYTES):
            raise self._damaged(f"the header claims {length:,} bytes: the file is truncated or not safetensors")
        try:
            header = json.loads(self._map[8 : 8 + length], object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise self._damaged("the header is not JSON") from error
        if not isinstance(header, dict):
            raise self._damaged("the header is no JSON object")
        for name, entry in header.items():
            if name != "__metadata__":
                self.tensors[name] = self._place(name, entry, 8 + length)

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise self._damaged("the header names a tensor twice")
        return result

    def _place(self, name: str, entry: Any, base: int) -> SafetensorsTensor:
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            sound = isinstance(dtype, str) and len(shape) <= MAX_DIMS
            sound = sound and all(type(value) is int and 0 <= value < 1 << 63 for value in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise self._damaged(f"the header entry of tensor {name!r} is malformed")
        if dtype not in _BYTES_OF:
            return SafetensorsTensor(dtype, shape, base + begin, end - begin)
        if end - begin != math.prod(shape) * _BYTES_OF[dtype]:
            raise self._damaged(f"tensor {name!r} has {end - begin:,} bytes, which {dtype} {list(shape)} does not take")
        if base + end > self._size:
            raise self._damaged(f"tensor {name!r} ends at byte {base + end:,}, behind the end: the file is truncated")
        return SafetensorsTensor(dtype, shape, base + begin, end - begin)

    def require_float(self, name: str) -> int:
        """The GGML type of a tensor; raises UnsupportedModel where it is not float32, float16 or bfloat16."""
        dtype = self.tensors[name].dtype
        if dtype not in GGML_TYPE_OF:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has the dtype {dtype}, which is not supported; "
                f"supported: {', '.join(GGML_TYPE_OF)}"
            )
        return GGML_TYPE_OF[dtype]
