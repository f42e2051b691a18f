from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.model.builders import PlainPacker, tiny_model, write_folder

from everystop.core.errors import ModelFileDamaged, ModelNotFound, UnsupportedModel
from everystop.model.checkpoint import inspect_model
from everystop.model.safetensors import SafetensorsFile

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A model folder of three shards."""
    return write_folder(tmp_path / "model", tiny_model("llama"), num_shards=3)


def edit_index(folder: Path, changes: dict[str, Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


def test_header_equals_that_of_the_library(sharded: Path) -> None:
    for path in sorted(sharded.glob("*.safetensors")):
        ours = SafetensorsFile(path)
        with safe_open(path, framework="np") as theirs:
            assert set(ours.tensors) == set(theirs.keys())
            for name in theirs.keys():  # noqa: SIM118 (not a mapping)
                array = theirs.get_tensor(name)
                assert ours.tensors[name].shape == array.shape
                np.testing.assert_array_equal(ours.raw(name), array.view(np.uint8).reshape(-1))


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelFileDamaged, match=r"model-00002-of-00003\.safetensors: this shard.* is missing"):
        inspect_model(sharded)


def test_truncated_shard_is_named_at_any_length(sharded: Path) -> None:
    path = sharded / "model-00002-of-00003.safetensors"
    data = path.read_bytes()
    for length in (0, 4, 9, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ModelFileDamaged, match=r"model-00002-of-00003\.safetensors"):
            inspect_model(sharded)


def test_truncated_single_file_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_model("llama"))
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(ModelFileDamaged, match=r"model\.safetensors.*truncated"):
        inspect_model(folder)


def test_index_that_places_a_tensor_in_the_wrong_shard_is_stale(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    name = "model.layers.0.mlp.up_proj.weight"
    other = next(shard for shard in weight_map.values() if shard != weight_map[name])
    edit_index(sharded, {name: other})
    with pytest.raises(ModelFileDamaged, match=rf"{other}: tensor '{name}'"):
        inspect_model(sharded)


def test_parameter_that_the_index_leaves_out_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.layers.1.self_attn.o_proj.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelFileDamaged, match=r"'model\.layers\.1\.self_attn\.o_proj\.weight'.*missing"):
        inspect_model(sharded)


def test_tensors_come_only_from_the_file_that_the_index_names(sharded: Path) -> None:
    name = "model.norm.weight"
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    wanted = load_file(sharded / weight_map[name])[name].numpy()
    other = next(shard for shard in sorted(set(weight_map.values())) if shard != weight_map[name])
    tensors = load_file(sharded / other) | {name: torch.full((64,), 9.0)}
    save_file(tensors, sharded / other)
    save_file({name: torch.full((64,), 7.0)}, sharded / "stray.safetensors")
    found = inspect_model(sharded).read("norm", PlainPacker().dequantize)
    np.testing.assert_array_equal(found, wanted)


def test_tensor_named_twice_in_one_header_is_refused(tmp_path: Path) -> None:
    entry = '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    header = ("{" + entry + ", " + entry + "}").encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ModelFileDamaged, match="twice"):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": 3, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 1 << 82]},
        {"shape": [1]},
        "text",
        None,
    ],
)
def test_malformed_header_entries_are_refused(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ModelFileDamaged, match=r"m\.safetensors.*'a'"):
        SafetensorsFile(path)


@pytest.mark.parametrize("header", [b"[]", b"{", b"\xff\xff", b"[" * 100_000])
def test_header_that_is_no_json_object_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelFileDamaged, match=r"m\.safetensors"):
        SafetensorsFile(path)


def test_wrong_shape_names_the_tensor(sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {"vocab_size": 97}))
    with pytest.raises(ModelFileDamaged, match=r"'model\.embed_tokens\.weight' has the shape \[96, 64\].*\[97, 64\]"):
        inspect_model(sharded)


def test_unsupported_dtype_names_the_tensor(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_model("llama"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"'model\.norm\.weight' has the dtype F64"):
        inspect_model(folder)


def test_index_that_leads_out_of_the_folder_is_refused(sharded: Path) -> None:
    edit_index(sharded, {"model.norm.weight": "../other.safetensors"})
    with pytest.raises(ModelFileDamaged, match=r"other\.safetensors"):
        inspect_model(sharded)


def test_folder_without_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        inspect_model(tmp_path)
    write_folder(tmp_path, tiny_model("llama"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="neither"):
        inspect_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileDamaged, match=r"config\.json"):
        inspect_model(tmp_path)
