"""`GgufFile`: the header of a GGUF file and the mapped bytes of its tensors; trusts nothing that the file says.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian:

    "GGUF" | version u32 | num_tensors u64 | num_keys u64
    key: name string | type u32 | value                    string: length u64 | bytes
    tensor: name string | num_dims u32 | dims u64… | type u32 | offset u64
    padding to the alignment | tensor data, each tensor at its offset from here

Every count, length and offset is compared with the size of the file before it is used, so a hostile file costs at
most a small multiple of its own size in memory, and a truncated one is found before a byte of a tensor is read.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from everystop.core.errors import ModelFileDamaged, ModelNotFound, UnsupportedModel

MAX_NAME_BYTES = 65_535
MAX_KEYS, MAX_TENSORS = 1 << 16, 1 << 18
MAX_VALUES = 1 << 24  # of one array, where it is read
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}
_U32, _U64 = _STRUCTS[4], _STRUCTS[10]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A tensor format: `block_bytes` bytes hold `block_size` consecutive values of a row."""

    id: int
    name: str
    block_size: int
    block_bytes: int


GGML_TYPES = {
    kind.id: kind
    for kind in (
        GgmlType(0, "F32", 1, 4),
        GgmlType(1, "F16", 1, 2),
        GgmlType(2, "Q4_0", 32, 18),
        GgmlType(3, "Q4_1", 32, 20),
        GgmlType(6, "Q5_0", 32, 22),
        GgmlType(7, "Q5_1", 32, 24),
        GgmlType(8, "Q8_0", 32, 34),
        GgmlType(12, "Q4_K", 256, 144),
        GgmlType(13, "Q5_K", 256, 176),
        GgmlType(14, "Q6_K", 256, 210),
        GgmlType(30, "BF16", 1, 2),
    )
}
# Names of formats that are known but not read, for the message.
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: `shape` is [rows, columns] (the reverse of the file's order), `offset` counts from the
    file's start.
    """

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Array:
    """An array value that has been checked and skipped; `GgufFile.get` reads it when it is asked for."""

    kind: int
    count: int
    position: int


class GgufFile:
    """An open GGUF file: `metadata` keys through `get`, tensors through `tensors` and `raw`.

    Raises ModelNotFound where the file cannot be opened, ModelFileDamaged where it is truncated or contradicts
    itself, and UnsupportedModel for versions and tensor formats that are not read. The mapping lives as long as this
    object and the arrays that `raw` gave out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        self._size = len(self._map)
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._position = 0
        self._read_header()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys(self) -> list[str]:
        """The metadata keys, in the file's order."""
        return list(self._values)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key: a number, bool, str or list of those."""
        value = self._values.get(key, default)
        return self._read_array(value, key) if isinstance(value, _Array) else value

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor: a read-only view of the mapped file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def _damaged(self, what: str) -> ModelFileDamaged:
        return ModelFileDamaged(f"{self.path}: {what} (file of {self._size:,} bytes); fetch the file again")

    def _advance(self, num_bytes: int, what: str) -> int:
        """Move over `num_bytes` and return where they began."""
        start = self._position
        if num_bytes > self._size - start:
            raise self._damaged(f"the file ends inside {what}, which needs {num_bytes:,} bytes at byte {start:,}")
        self._position = start + num_bytes
        return start

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._map, self._advance(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._map, self._advance(8, what))[0]
        return value

    def _string(self, what: str, limit: int | None = None) -> str:
        length = self._u64(what)
        if limit is not None and length > limit:
            raise self._damaged(f"{what} claims {length:,} bytes; at most {limit:,} are allowed")
        start = self._advance(length, what)
        return self._decode(self._map[start : start + length], what)

    def _decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not UTF-8") from error

    def _read_header(self) -> None:
        magic = self._map[self._advance(4, "the magic number") : 4]
        if magic != b"GGUF":
            raise self._damaged(f"this is no GGUF file: it begins with {magic!r}")
        version = self._u32("the version")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path}: GGUF version {version} is not supported; versions 2 and 3 are")
        num_tensors, num_keys = self._u64("the number of tensors"), self._u64("the number of keys")
        # A key takes at least 13 bytes and a tensor at least 32, so impossible counts end here and not in a loop.
        if num_keys > self._size // 13 or num_tensors > self._size // 32:
            raise self._damaged(f"{num_keys:,} keys and {num_tensors:,} tensors cannot fit")
        if num_keys > MAX_KEYS or num_tensors > MAX_TENSORS:
            raise self._damaged(f"{num_keys:,} keys and {num_tensors:,} tensors are more than any model has")
        for index in range(num_keys):
            self._read_key(index)
        headers = [self._read_tensor_header(index) for index in range(num_tensors)]
        self._place_tensors(headers)

    def _read_key(self, index: int) -> None:
        name = self._string(f"the name of key {index}", MAX_NAME_BYTES)
        if name in self._values:
            raise self._damaged(f"key {name!r} occurs twice")
        kind = self._u32(f"the type of key {name!r}")
        if kind == _STRING:
            self._values[name] = self._string(f"key {name!r}")
        elif kind == _ARRAY:
            self._values[name] = self._skip_array(name)
        elif kind in _STRUCTS:
            layout = _STRUCTS[kind]
            self._values[name] = layout.unpack_from(self._map, self._advance(layout.size, f"key {name!r}"))[0]
        else:
            raise self._damaged(f"key {name!r} has the unknown type {kind}")

    def _skip_array(self, name: str) -> _Array:
        kind, count = self._u32(f"array {name!r}"), self._u64(f"array {name!r}")
        array = _Array(kind, count, self._position)
        if kind in _STRUCTS:
            self._advance(count * _STRUCTS[kind].size, f"array {name!r}")
        elif kind == _STRING:
            self._skip_strings(name, count)
        else:
            raise self._damaged(f"array {name!r} has elements of the unsupported type {kind}")
        return array

    def _skip_strings(self, name: str, count: int) -> None:
        position, last = self._position, self._size - 8
        if count > (self._size - position) // 8:
            raise self._damaged(f"array {name!r} claims {count:,} strings")
        unpack, data = _U64.unpack_from, self._map
        for _ in range(count):
            if position > last:
                raise self._damaged(f"the file ends inside array {name!r}")
            position += 8 + unpack(data, position)[0]
        if position > self._size:
            raise self._damaged(f"the file ends inside array {name!r}")
        self._position = position

    def _read_array(self, array: _Array, name: str) -> list[Any]:
        if array.count > MAX_VALUES:
            raise self._damaged(f"array {name!r} has {array.count:,} values; at most {MAX_VALUES:,} are read")
        if array.kind != _STRING:
            return list(struct.unpack_from(f"<{array.count}{_SCALARS[array.kind]}", self._map, array.position))
        unpack, data, position = _U64.unpack_from, self._map, array.position
        pieces = []
        for _ in range(array.count):
            start = position + 8
            position = start + unpack(data, position)[0]
            pieces.append(data[start:position])
        try:
            return [piece.decode() for piece in pieces]
        except UnicodeDecodeError as error:
            raise self._damaged(f"array {name!r} holds a string that is not UTF-8") from error

    def _read_tensor_header(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(f"the name of tensor {index}", MAX_NAME_BYTES)
        what = f"the header of tensor {name!r}"
        num_dims = self._u32(what)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._damaged(f"tensor {name!r} has {num_dims:,} dimensions; expected 1 to {MAX_DIMS}")
        shape = tuple(self._u64(what) for _ in range(num_dims))[::-1]
        return name, shape, self._u32(what), self._u64(what)

    def _place_tensors(self, headers: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        alignment = self._values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}; expected a power of two")
        base = -(-self._position // alignment) * alignment
        for name, shape, type_id, offset in headers:
            if name in self.tensors:
                raise self._damaged(f"tensor {name!r} occurs twice")
            if offset % alignment:
                raise self._damaged(f"tensor {name!r} lies at offset {offset:,}, which is no multiple of {alignment}")
            tensor = self._place_tensor(name, shape, type_id, base + offset)
            self.tensors[name] = tensor

    def _place_tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
        kind = GGML_TYPES.get(type_id)
        if kind is None:
            known = ", ".join(sorted(known.name for known in GGML_TYPES.values()))
            label = _OTHER_TYPES.get(type_id, f"number {type_id}")
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has the format {label}, which is not supported; supported: {known}"
            )
        num_values = 1
        for size in shape:
            num_values *= size
        if num_values < 1 or shape[-1] % kind.block_size:
            raise self._damaged(f"tensor {name!r} has the shape {list(shape)}, which {kind.name} cannot hold")
        num_bytes = num_values // kind.block_size * kind.block_bytes
        if offset + num_bytes > self._size:
            raise self._damaged(
                f"tensor {name!r} ends at byte {offset + num_bytes:,}, behind the end: the file is truncated"
            )
        return GgufTensor(name, kind, shape, offset, num_bytes)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileDamaged(f"{path}: the file is empty; fetch it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFound(f"{path}: cannot be opened: {reason}") from error
