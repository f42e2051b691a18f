"""A file of named arrays that is written once, in a stream, and then only mapped.

    prefix, 64 bytes: magic | total size u64 | start of index u64 | CRC-32 of the data u32 | CRC-32 of the index u32
    data: each array at a multiple of 64 bytes
    index: JSON {"key": …, "arrays": {name: [dtype, shape, offset]}}

The prefix is written last, so a file that was not finished is never taken for one.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64

Array = npt.NDArray[Any]

_MAGIC = b"EVSTOPW1"
_PREFIX = struct.Struct("<8sQQII")
_DTYPES = ("float32", "float16", "uint8")


class WeightFileUnusable(Exception):
    """The file is truncated, altered, of another key, or no weight file; build it again."""


def write_arrays(fd: int, key: Mapping[str, str], arrays: Iterable[tuple[str, Array]]) -> None:
    """Write `arrays` as they come to the empty file `fd`; each may be dropped before the next is made."""
    index: dict[str, tuple[str, list[int], int]] = {}
    position, checksum = _write(fd, bytes(ALIGNMENT), 0), 0
    for name, array in arrays:
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
        index[name] = (array.dtype.name, list(array.shape), position)
        padding = bytes(-len(data) % ALIGNMENT)
        checksum = zlib.crc32(padding, zlib.crc32(data, checksum))
        position = _write(fd, padding, _write(fd, data, position))
    header = json.dumps({"key": dict(key), "arrays": index}).encode()
    total = _write(fd, header, position)
    prefix = _PREFIX.pack(_MAGIC, total, position, checksum, zlib.crc32(header))
    os.pwrite(fd, prefix, 0)


def _write(fd: int, data: bytes | memoryview, position: int) -> int:
    """Write all of `data`, and return the position behind it."""
    view = memoryview(data)
    while view:
        count = os.write(fd, view)
        view, position = view[count:], position + count
    return position


def map_arrays(fd: int, key: Mapping[str, str], *, verify: bool) -> dict[str, Array]:
    """The arrays of a weight file as read-only views of its mapping, which lives as long as they do.

    With `verify` all bytes are read and compared with their checksum. Raises WeightFileUnusable.
    """
    mapped, index, index_start, checksum = _open(fd)
    if verify and zlib.crc32(memoryview(mapped)[ALIGNMENT:index_start]) != checksum:
        raise WeightFileUnusable("its data has been altered")
    if index["key"] != dict(key):
        raise WeightFileUnusable("it was made for another model or kernel")
    return {name: _view(mapped, index_start, entry) for name, entry in index["arrays"].items()}


def read_key(fd: int) -> dict[str, str]:
    """What a weight file was made for; its data is not looked at. Raises WeightFileUnusable."""
    key: dict[str, str] = _open(fd)[1]["key"]
    return key


def _open(fd: int) -> tuple[mmap.mmap, dict[str, Any], int, int]:
    """The mapped file, its index, where that starts, and the checksum of the data; raises WeightFileUnusable."""
    size = os.fstat(fd).st_size
    if size < ALIGNMENT:
        raise WeightFileUnusable(f"it has {size} bytes")
    mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    magic, total, index_start, checksum, index_checksum = _PREFIX.unpack_from(mapped)
    if magic != _MAGIC or total != size or not ALIGNMENT <= index_start <= size:
        raise WeightFileUnusable(f"it has {size:,} bytes and claims {total:,}")
    header = mapped[index_start:]
    if zlib.crc32(header) != index_checksum:
        raise WeightFileUnusable("its index has been altered")
    return mapped, json.loads(header), index_start, checksum


def _view(mapped: mmap.mmap, end: int, entry: list[Any]) -> Array:
    dtype, shape, offset = entry
    count = math.prod(shape)
    assert dtype in _DTYPES
    assert offset + count * np.dtype(dtype).itemsize <= end
    array: Array = np.frombuffer(mapped, dtype=dtype, count=count, offset=offset)
    return array.reshape(shape)
