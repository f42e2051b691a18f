from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.model.builders import close_writer

from everystop.core.errors import ModelError, ModelFileDamaged, ModelNotFound, UnsupportedModel
from everystop.model.gguf import GGML_TYPES, GgufFile

VALUES = {
    "t.u8": 200,
    "t.i32": -7,
    "t.f32": 0.5,
    "t.bool": True,
    "t.text": "blank ▁ and 日本",
    "t.words": ["a", "", "日本", "b" * 300],
    "t.numbers": [3, -1, 2**30],
}


def write_sample(path: Path) -> Path:
    """A small file with a key of each kind and a tensor of each format that the gguf package can write."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("t.u8", VALUES["t.u8"])
    writer.add_int32("t.i32", VALUES["t.i32"])
    writer.add_float32("t.f32", VALUES["t.f32"])
    writer.add_bool("t.bool", VALUES["t.bool"])
    writer.add_string("t.text", VALUES["t.text"])
    writer.add_array("t.words", VALUES["t.words"])
    writer.add_array("t.numbers", VALUES["t.numbers"])
    rng = np.random.default_rng(0)
    for kind in GGML_TYPES.values():
        if kind.name.endswith("_K"):
            raw = rng.integers(0, 255, (3, kind.block_bytes), dtype=np.uint8)
            writer.add_tensor(kind.name, raw, raw_dtype=gguf.GGMLQuantizationType(kind.id))
        else:
            values = rng.standard_normal((3, 64)).astype(np.float32)
            raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType(kind.id))
            writer.add_tensor(kind.name, raw, raw_dtype=gguf.GGMLQuantizationType(kind.id))
    close_writer(writer)
    return path


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "sample.gguf")


def test_keys_and_tensors_equal_those_of_the_gguf_package(sample: Path) -> None:
    ours, theirs = GgufFile(sample), gguf.GGUFReader(str(sample))
    for key, value in VALUES.items():
        assert ours.get(key) == value
        assert ours.get(key) == theirs.fields[key].contents()
    assert ours.keys() == [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert (found.kind.id, found.offset, found.num_bytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert found.shape == tuple(int(size) for size in reversed(tensor.shape))
        np.testing.assert_array_equal(ours.raw(tensor.name), tensor.data.view(np.uint8).reshape(-1))


def test_missing_key_is_the_default(sample: Path) -> None:
    file = GgufFile(sample)
    assert file.get("none") is None
    assert file.get("none", 3) == 3
    assert "t.u8" in file
    assert "none" not in file


def test_every_truncation_is_found_before_a_tensor_is_read(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    cut = tmp_path / "cut.gguf"
    lengths = [*range(0, 1200, 7), *range(1200, len(data), 101), len(data) - 1]
    for length in lengths:
        cut.write_bytes(data[:length])
        with pytest.raises(ModelFileDamaged, match=r"cut\.gguf"):
            GgufFile(cut)


def test_altered_headers_raise_only_named_errors_within_bounded_memory(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    header = GgufFile(sample).tensors["F32"].offset
    rng, path = random.Random(5), tmp_path / "bad.gguf"
    refusals = []
    tracemalloc.start()
    for _ in range(1500):
        bad = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(header)] = rng.choice((0, 1, 8, 9, 127, 128, 255, rng.randrange(256)))
        path.write_bytes(bad)
        try:
            file = GgufFile(path)
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                file.get(key)
            for name in file.tensors:
                assert len(file.raw(name)) == file.tensors[name].num_bytes
        except ModelError as error:
            refusals.append(str(error))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(refusals) > 300
    assert all("bad.gguf" in refusal for refusal in refusals)
    assert peak < 50 * len(data) + 2_000_000


def craft(num_tensors: int, num_keys: int, body: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


HUGE = 2**63
HOSTILE = {
    "count of keys": craft(0, HUGE, b"x" * 100),
    "count of tensors": craft(HUGE, 0, b"x" * 100),
    "length of a name": craft(0, 1, struct.pack("<Q", HUGE) + b"x" * 100),
    "length of a string": craft(0, 1, text("k") + struct.pack("<IQ", 8, HUGE) + b"x" * 100),
    "length of an array": craft(0, 1, text("k") + struct.pack("<IIQ", 9, 10, HUGE) + b"x" * 100),
    "count of strings": craft(0, 1, text("k") + struct.pack("<IIQ", 9, 8, HUGE) + b"x" * 100),
    "nested array": craft(0, 1, text("k") + struct.pack("<IIQ", 9, 9, 1) + b"x" * 100),
    "type of a key": craft(0, 1, text("k") + struct.pack("<I", 77) + b"x" * 100),
    "key twice": craft(0, 2, 2 * (text("k") + struct.pack("<IB", 0, 1)) + b"x" * 100),
    "count of dimensions": craft(1, 0, text("t") + struct.pack("<I", 99) + b"x" * 100),
    "huge dimensions": craft(1, 0, text("t") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0) + b"x" * 100),
    "dimension of zero": craft(1, 0, text("t") + struct.pack("<IQIQ", 1, 0, 0, 0) + b"x" * 100),
    "offset": craft(1, 0, text("t") + struct.pack("<IQIQ", 1, 8, 0, HUGE) + b"x" * 100),
    "crooked offset": craft(1, 0, text("t") + struct.pack("<IQIQ", 1, 8, 0, 3) + b"x" * 100),
    "part of a block": craft(1, 0, text("t") + struct.pack("<IQIQ", 1, 33, 8, 0) + b"x" * 100),
    "tensor twice": craft(2, 0, 2 * (text("t") + struct.pack("<IQIQ", 1, 8, 0, 0)) + b"x" * 100),
    "alignment of zero": craft(0, 1, text("general.alignment") + struct.pack("<II", 4, 0) + b"x" * 100),
    "alignment of text": craft(0, 1, text("general.alignment") + struct.pack("<I", 8) + text("a") + b"x" * 100),
    "name that is not UTF-8": craft(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + b"x" * 100),
    "no GGUF": b"PK\x03\x04" + b"x" * 100,
    "empty": b"",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused(tmp_path: Path, case: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(ModelFileDamaged, match=r"hostile\.gguf"):
        GgufFile(path)


@pytest.mark.parametrize(("type_id", "name"), [(10, "Q2_K"), (23, "IQ4_XS"), (999, "number 999")])
def test_unsupported_format_names_tensor_and_format(tmp_path: Path, type_id: int, name: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(craft(1, 0, text("blk.0.attn_q.weight") + struct.pack("<IQIQ", 1, 256, type_id, 0) + b"x" * 500))
    with pytest.raises(UnsupportedModel, match=rf"'blk\.0\.attn_q\.weight' has the format {name}"):
        GgufFile(path)


def test_unsupported_version_and_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(craft(0, 0, b"x" * 100, version=1))
    with pytest.raises(UnsupportedModel, match="version 1"):
        GgufFile(path)
    with pytest.raises(ModelNotFound, match="No such file"):
        GgufFile(tmp_path / "none.gguf")


def test_array_with_text_that_is_not_utf8_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    strings = struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 2) + b"\xff\xfe"
    path.write_bytes(craft(0, 1, text("words") + strings + b"x" * 100))
    file = GgufFile(path)
    with pytest.raises(ModelFileDamaged, match="'words'"):
        file.get("words")


@pytest.mark.model
def test_embedded_model_header_equals_the_gguf_package(smollm2_path: Path) -> None:
    ours, theirs = GgufFile(smollm2_path), gguf.GGUFReader(str(smollm2_path))
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.get(key) == field.contents(), key
    assert [(t.name, t.offset, t.num_bytes) for t in ours.tensors.values()] == [
        (t.name, t.data_offset, t.n_bytes) for t in theirs.tensors
    ]
